"""Rights only shrink: what NARROW leaves is never more than there was (I8)."""

import json
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vfs.worlds import ALL_MODES, World, world
from vfs.errors import RightsError
from vfs.places import close_places
from vfs.policy import Policy

__all__ = ["world"]


def narrowed(policy: Policy, **rights: object) -> Policy:
    """Narrow a policy by a document."""
    return policy.narrow(json.dumps(rights).encode())


def release(narrow: Policy, wide: Policy) -> None:
    """Give back what a narrowed policy holds by itself."""
    close_places(place for place in narrow.places if place not in wide.places)


# spec A5
def test_an_empty_document_drops_the_top_level_right_only(world: World) -> None:
    wide = world.policy(world.place("in", read=True), top_level=True)
    narrow = narrowed(wide)
    assert not narrow.top_level
    assert narrow.places == wide.places
    assert world.may(narrow, world.name("else/file"), b"r", True) == "denied"
    assert world.may(narrow, b"file", b"r", None) == "yes"


# spec A5: names that are given become the only places.
def test_names_become_the_only_places(world: World) -> None:
    (world.where / "root" / "sub").mkdir()
    (world.where / "root" / "sub" / "file").touch()
    wide = world.policy(world.place("in", read=True), world.place("out", write=True))
    narrow = narrowed(wide, read=["sub"], write=[os.fspath(world.where / "out")])
    assert world.which(narrow, b"sub/file") == (b"r",)
    assert world.which(narrow, world.name("root/sub/file")) == (b"r",)
    assert sorted(world.which(narrow, world.name("out/file"))) == [b"a", b"w"]
    for name in (b"file", world.name("root/file"), world.name("in/file")):
        assert world.which(narrow, name) == ()
    for name in (b"sub/../file", b"../root/file", b"sub/../../in/file"):
        assert world.may(narrow, name, b"r") == "denied"
    release(narrow, wide)


# spec A5: a name in both lists has both rights.
def test_a_name_in_both_lists(world: World) -> None:
    wide = world.policy()
    narrow = narrowed(wide, read=["file", "."], write=["file"])
    assert world.which(narrow, b"file") == ALL_MODES
    (world.where / "root" / "other").touch()
    assert world.which(narrow, b"other") == (b"r",)
    release(narrow, wide)


# spec A5: again and again, by relative and by absolute names.
def test_narrowing_goes_on(world: World) -> None:
    deep = world.where / "root" / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "file").touch()
    policies = [world.policy()]
    for name in ("a", "a/b", os.fspath(deep.parent), "a/b/c", "a/b/c/file"):
        policies.append(narrowed(policies[-1], read=[name], write=[name]))
        for how in (b"a/b/c/file", world.name("root/a/b/c/file")):
            assert world.which(policies[-1], how) == ALL_MODES, name
    assert world.may(policies[2], b"a/b/new", b"w") == "yes"
    assert world.may(policies[2], b"a/new", b"w") == "denied"
    assert policies[-1].places[0].prefixes[0] == world.name("root/a/b/c/file")
    for narrow, wide in zip(policies[:0:-1], policies[-2::-1], strict=True):
        release(narrow, wide)


# spec A5
@pytest.mark.parametrize(
    ("rights", "said"),
    [
        ({"read": ["../in"]}, "not within"),
        ({"read": ["{where}/else"]}, "not within"),
        ({"write": ["{where}/in"]}, "not within"),
        ({"read": ["{where}/out/file"]}, "not within"),
        ({"read": ["{where}/root-evil"]}, "not within"),
        ({"read": ["/"]}, "not within"),
        ({"read": ["out-link"]}, "not within"),
        ({"read": ["out-link/file"]}, "not within"),
        ({"read": ["nothing"]}, "No such file"),
        ({"write": ["nothing/x"]}, "No such file"),
        ({"read": ["file/x"]}, "Not a directory"),
        ({"read": [""]}, "an empty name"),
        ({"read": ["a\0b"]}, "Invalid argument"),
        ({"read": ["x" * 300]}, "too long"),
        ({"read": "file"}, "Expected `array"),
        ({"read": [7]}, r"Expected `str \| object`"),
        ({"top_level": True}, "unknown field"),
        ({"model": "small"}, "this host has no model"),
        ({"quota": 10}, "this host has no model"),
    ],
)
def test_what_cannot_be_asked_for(
    world: World, rights: dict[str, object], said: str
) -> None:
    (world.where / "root" / "out-link").symlink_to("../else")
    wide = world.policy(world.place("in", read=True), world.place("out", write=True))
    document = json.dumps(rights).replace("{where}", os.fspath(world.where))
    # That the first name is good does not help the second, and nothing stays open.
    for text in (document, document.replace('["', '["file", "')):
        with pytest.raises(RightsError, match=said):
            wide.narrow(text.encode())


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff", b'{"read":[}'])
def test_what_is_no_document(world: World, text: bytes) -> None:
    with pytest.raises(RightsError):
        world.policy().narrow(text)


# spec A5: who may do anything can give up all but some of it.
def test_a_client_with_the_top_level_right_narrows_to_any_path(world: World) -> None:
    wide = world.policy(top_level=True)
    narrow = narrowed(wide, read=[os.fspath(world.where / "else")], write=["file"])
    assert world.which(narrow, world.name("else/file")) == (b"r",)
    assert sorted(world.which(narrow, b"file")) == [b"a", b"w"]
    assert world.may(narrow, world.name("in/file"), b"r") == "denied"
    assert world.may(narrow, world.name("in/file"), b"r", True) == "denied"
    with pytest.raises(RightsError, match="No such file"):
        narrowed(wide, read=["/nothing/at/all"])
    release(narrow, wide)


# spec A3b, A5: how a place publishes stays.
def test_a_part_publishes_as_the_whole(world: World) -> None:
    held = world.place(
        "out", read=True, write=True, publish="on-close", durability="close"
    )
    wide = world.policy(held)
    narrow = narrowed(wide, write=[os.fspath(world.where / "out" / "file")])
    place = narrow.places[0]
    assert (place.publish, place.durability) == ("on-close", "close")
    release(narrow, wide)


# spec O4: a narrowed client's root is still the root.
def test_the_root_is_watched_after_narrowing(world: World) -> None:
    wide = world.policy(world.place("in", read=True))
    narrow = narrowed(wide, read=[os.fspath(world.where / "in")])
    (world.where / "root").rename(world.where / "elsewhere")
    assert world.may(narrow, world.name("in/file"), b"r") == "unavailable"
    release(narrow, wide)


# I8, as a property

SPOTS = ("file", "a", "a/file", "a/b", "a/b/file", "in-link", "out-link", ".")
TOPS = ("root", "in", "out", "else")
PATHS = st.one_of(
    st.sampled_from(SPOTS),
    st.tuples(st.sampled_from(TOPS), st.sampled_from(SPOTS)).map(
        "/{0[0]}/{0[1]}".format
    ),
    st.sampled_from(("..", "a/../../in", "a/..", "nothing", "/else/..")),
)
LISTS = st.none() | st.lists(PATHS, max_size=3)
GRANTS = st.lists(
    st.tuples(
        st.sampled_from(TOPS), st.sampled_from(SPOTS), st.booleans(), st.booleans()
    ),
    max_size=3,
)


@pytest.fixture(scope="module")
def wide_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Return a world with the same things at every spot."""
    made = World(tmp_path_factory.mktemp("world"))
    for top in TOPS:
        where = made.where / top
        (where / "a" / "b").mkdir(parents=True)
        for name in ("a/file", "a/b/file"):
            (where / name).touch()
        (where / "in-link").symlink_to("a/b")
        (where / "out-link").symlink_to("../else/a")
    yield made
    made.close()


# I8, spec A5
@pytest.mark.slow
@given(grants=GRANTS, chain=st.lists(st.tuples(LISTS, LISTS), min_size=1, max_size=3))
def test_rights_never_grow(
    wide_world: World,
    grants: list[tuple[str, str, bool, bool]],
    chain: list[tuple[list[str] | None, list[str] | None]],
) -> None:
    world = wide_world
    mark = len(world.places)
    policy = world.policy(
        *(world.place(f"{top}/{spot}", read=r, write=w) for top, spot, r, w in grants)
    )
    owned: list[tuple[Policy, Policy]] = []
    before = reach(world, policy)
    for lists in chain:
        rights = {
            key: [path.replace("/", f"{world.where}/", 1) if path[0] == "/" else path
                  for path in paths]
            for key, paths in zip(("read", "write"), lists, strict=True)
            if paths is not None
        }  # fmt: skip
        try:
            narrow = narrowed(policy, **rights)
        except RightsError:
            continue
        owned.append((narrow, policy))
        after = reach(world, narrow)
        assert after <= before
        policy, before = narrow, after
    for narrow, wide in reversed(owned):
        release(narrow, wide)
    close_places(world.places[mark:])
    del world.places[mark:]


def reach(world: World, policy: Policy) -> set[tuple[bytes, bytes]]:
    """Return every (file, mode) that a policy gives, by whatever name."""
    found = set()
    for top in TOPS:
        for spot in ("file", "a/file", "a/b/file", "in-link/file", "out-link/file"):
            names = {world.name(f"{top}/{spot}")}
            if top == "root":
                names.add(spot.encode())
            for mode in (b"r", b"a", b"r+"):
                if any(world.may(policy, name, mode) == "yes" for name in names):
                    found.add((os.fsencode(f"{top}/{spot}"), mode))
    return found


# spec A5, I8: tools only become fewer.
def test_tools_only_become_fewer(world: World) -> None:
    wide = world.policy()
    narrow = narrowed(wide, tools=["make", "cc"])
    both = frozenset({"make", "cc"})
    assert narrow.tools == both
    assert narrow.places == wide.places
    assert narrowed(narrow).tools == both
    assert narrowed(narrow, tools=[]).tools == frozenset()
    with pytest.raises(RightsError, match="not among this client's tools: 'gcc'"):
        narrowed(narrow, tools=["make", "gcc"])
