"""The rights of clients: the root, grants, the two views, a root that goes away."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.memory_directory import MemoryDirectory
from tests.vfs.worlds import ALL_MODES, World, world
from vfs import names
from vfs.errors import AccessDeniedError, UnavailableError
from vfs.places import ODD, Place, open_place

__all__ = ["world"]


# The root and what is granted besides


# spec A3: a path is taken as it is where nothing in it could be left out.
@given(st.text("a./", max_size=9).map(lambda rest: f"/{rest}".encode()))
def test_only_an_odd_path_is_written_in_another_way(path: bytes) -> None:
    assert ODD.search(path) or os.path.abspath(path) == path


# spec A3
def test_the_root_can_be_read_and_written(world: World) -> None:
    policy = world.policy()
    assert world.which(policy, b"file") == ALL_MODES
    assert world.which(policy, world.name("root/file")) == ALL_MODES
    assert world.may(policy, b"new", b"w") == "yes"
    assert world.may(policy, b"nothing", b"r") == "ENOENT"


# spec A3: `r` needs read; `w`, `a` write; `r+`, `w+`, `a+` both.
@pytest.mark.parametrize(
    ("read", "write", "modes"),
    [
        (True, False, (b"r",)),
        (False, True, (b"w", b"a")),
        (True, True, ALL_MODES),
        (False, False, ()),
    ],
)
@pytest.mark.parametrize("what", ["in", "in/file"])
def test_a_grant_gives_what_it_says(
    world: World, what: str, read: bool, write: bool, modes: tuple[bytes, ...]
) -> None:
    policy = world.policy(world.place(what, read=read, write=write))
    found = world.which(policy, world.name("in/file"))
    assert sorted(found) == sorted(modes)


# spec A3: an output-only file can't be read through `a+`, nor emptied by the attempt.
@pytest.mark.parametrize("mode", [b"a+", b"w+", b"r+", b"r"])
def test_an_output_file_cannot_be_read(world: World, mode: bytes) -> None:
    policy = world.policy(world.place("out/file", write=True))
    assert world.may(policy, world.name("out/file"), mode) == "denied"
    assert (world.where / "out" / "file").read_text() == "out"


# spec A3: everything else is denied, whether it exists or not, and nothing is made.
@pytest.mark.parametrize("mode", ALL_MODES)
def test_what_is_not_granted_is_denied(world: World, mode: bytes) -> None:
    policy = world.policy(world.place("in", read=True), world.place("out", write=True))
    for name in ("else/file", "else/new", "new", ".", "nothing/x"):
        assert world.may(policy, world.name(name), mode) == "denied"
    for text in (b"/", b"/etc/passwd", b"/proc/self/mem", b"//etc/passwd"):
        assert world.may(policy, text, mode) == "denied"
    for text in (b"../else/file", b"..", b"../in/file", b"x/../../in/file"):
        assert world.may(policy, text, mode) in ("denied", "ENOENT")
    assert not (world.where / "new").exists()
    assert not (world.where / "else" / "new").exists()
    assert (world.where / "else" / "file").read_text() == "else"


# spec A3: relative names never reach grants.
def test_relative_names_never_reach_grants(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.where / "root" / "in").mkdir()
    policy = world.policy(
        world.place("in", read=True), world.place("in/file", read=True)
    )
    assert world.may(policy, b"in/file", b"r") == "ENOENT"
    assert world.may(policy, b"../in/file", b"r") == "denied"
    monkeypatch.chdir(world.where)
    assert world.may(policy, b"in/file", b"r") == "ENOENT"


# attack 2
def test_a_name_that_begins_like_the_root_is_not_in_it(world: World) -> None:
    policy = world.policy(world.place("in", read=True))
    for name in ("root-evil/file", "root-evil", "rootfile", "in-evil"):
        assert world.may(policy, world.name(name), b"r") == "denied"
    assert (
        world.may(policy, world.name("root") + b"/../root-evil/file", b"r") == "denied"
    )
    assert world.may(policy, world.name("root") + b"//file", b"r") == "yes"


# spec A3: a directory that is granted is a directory, not more.
def test_a_grant_is_not_left_upwards(world: World) -> None:
    (world.where / "in" / "sub").mkdir()
    (world.where / "in" / "out").symlink_to("../else")
    policy = world.policy(world.place("in", read=True, write=True))
    for name in ("in/../else/file", "in/sub/../../else/file", "in/out/file"):
        assert world.may(policy, world.name(name), b"r") == "denied"
    assert world.may(policy, world.name("in/sub/../file"), b"r") == "yes"


# spec A3: a link that leads from the root into a grant is no way there by itself; the
# grant's own name is.
def test_a_link_from_the_root_into_a_grant(world: World) -> None:
    (world.where / "root" / "link").symlink_to(world.where / "in")
    policy = world.policy(world.place("in", read=True))
    assert world.may(policy, b"link/file", b"r") == "denied"
    assert world.may(policy, world.name("in/file"), b"r") == "yes"


# spec A3: what one grant lets be read and another written is both.
def test_grants_that_lie_in_each_other_add_up(world: World) -> None:
    (world.where / "in" / "sub").mkdir()
    (world.where / "in" / "sub" / "file").touch()
    (world.where / "in" / "away").symlink_to("../out")
    policy = world.policy(
        world.place("in", read=True),
        world.place("in/sub", write=True),
        world.place("in/file", write=True),
        world.place("in/away", write=True),
    )
    assert world.which(policy, world.name("in/sub/file")) == ALL_MODES
    assert world.which(policy, world.name("in/file")) == ALL_MODES
    (world.where / "in" / "other").touch()
    assert world.which(policy, world.name("in/other")) == (b"r",)
    # Its text lies in `in`, the directory itself does not.
    assert sorted(world.which(policy, world.name("in/away/file"))) == [b"a", b"w"]


# spec A3: `--read P` is resolved and held at start.
def test_a_grant_is_what_its_path_named_at_the_start(world: World) -> None:
    (world.where / "link").symlink_to("in")
    (world.where / "to-file").symlink_to("in/file")
    policy = world.policy(
        world.place("link", read=True), world.place("to-file", read=True)
    )
    for path in ("link", "to-file"):
        (world.where / path).unlink()
        (world.where / path).symlink_to("else" if path == "link" else "else/file")
    client = world.client(policy)
    for name in ("link/file", "to-file", "in/file"):
        file = world.fs.open(client, world.name(name), b"r", False)
        assert file.handle.pread_wait(10, 0) == b"in"
    world.fs.disconnect(client, "test")


# spec A3: the grant of one file is that of no other, nor of anything beneath it.
async def test_the_grant_of_one_file(world: World) -> None:
    (world.where / "in" / "other").touch()
    policy = world.policy(world.place("in/file", read=True, write=True))
    name = world.name("in/file")
    assert world.which(policy, name) == ALL_MODES
    for other in (b"/", b"/.", b"/x", b"x"):
        assert world.may(policy, name + other, b"r") == "denied"
    for text in ("in", "in/other", "in/../in/file"):
        assert world.may(policy, world.name(text), b"r") == "denied"
    client = world.client(policy)
    with pytest.raises(AccessDeniedError):
        names.stat(client, world.name("in"), claim=False)
    await names.remove_waiting(client, name, claim=False)
    world.fs.disconnect(client, "test")
    assert os.listdir(world.where / "in") == ["other"]
    assert world.may(policy, name, b"w") == "yes"


# spec A3: a file that is to be written may not exist yet; one to be read must.
def test_the_grant_of_a_file_that_does_not_exist(world: World) -> None:
    with pytest.raises(FileNotFoundError):
        world.place("in/new", read=True)
    with pytest.raises(FileNotFoundError):
        world.place("nothing/new", write=True)
    with pytest.raises(FileNotFoundError):
        open_place("", read=True)
    policy = world.policy(world.place("in/new", write=True))
    assert world.may(policy, world.name("in/new"), b"w") == "yes"
    assert world.may(policy, world.name("in/newer"), b"w") == "denied"


# spec A4: a granted file that somebody makes a link is a way to nowhere.
def test_the_grant_of_a_file_that_becomes_a_link(world: World) -> None:
    (world.where / "in" / "secret").write_text("secret")
    policy = world.policy(world.place("in/file", read=True, write=True))
    (world.where / "in" / "file").unlink()
    for target in ("secret", "../else/file", "/etc/passwd", "new"):
        (world.where / "in" / "file").symlink_to(target)
        assert world.which(policy, world.name("in/file")) == ()
        (world.where / "in" / "file").unlink()
    assert (world.where / "in" / "secret").read_text() == "secret"
    assert not (world.where / "in" / "new").exists()


def test_a_path_with_dot_dot_is_what_the_system_takes_it_for(world: World) -> None:
    (world.where / "in" / "deep").mkdir()
    (world.where / "link").symlink_to("in/deep")
    held = world.place("link/../file", read=True)
    assert world.name("in/file") in held.prefixes
    assert world.name("file") not in held.prefixes
    assert world.name("in") in world.place("root/../in", read=True).prefixes


# spec A3, O4: what place a name is looked for in follows from its text alone.
@given(
    prefix=st.sampled_from([b"/a", b"/a/b", b"/"]),
    name=st.lists(st.sampled_from([b"a", b"b", b"", b"..", b"."]), max_size=5),
)
def test_the_rest_of_a_name_is_relative(prefix: bytes, name: list[bytes]) -> None:
    place = Place(MemoryDirectory(), (prefix,), read=True)
    whole = b"/" + b"/".join(name)
    rest = place.beneath(whole)
    if rest is None:
        assert not (whole + b"/").startswith(prefix.rstrip(b"/") + b"/")
    else:
        assert rest
        assert not rest.startswith(b"/")


# The top-level view


# spec A1: the claim never adds to the right.
@pytest.mark.parametrize(
    ("right", "claim", "view"),
    [
        (True, True, "top level"),
        (True, False, "restricted"),
        (True, None, "top level"),
        (False, True, "denied"),
        (False, False, "restricted"),
        (False, None, "restricted"),
    ],
)
def test_the_view_is_the_right_and_the_claim(
    world: World, right: bool, claim: bool | None, view: str
) -> None:
    policy = world.policy(top_level=right)
    answers = tuple(
        world.may(policy, name, b"r", claim)
        for name in (world.name("else/file"), b"in/file", b"file")
    )
    assert (
        answers
        == {
            "top level": ("yes", "yes", "ENOENT"),
            "restricted": ("denied", "ENOENT", "yes"),
            "denied": ("denied", "denied", "denied"),
        }[view]
    )


# spec A2: relative names from the working directory held at the start.
def test_relative_names_of_the_top_level_view(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    policy = world.policy(top_level=True)
    assert world.may(policy, b"in/file", b"r", True) == "yes"
    assert world.may(policy, b"else/new", b"w", True) == "yes"
    assert world.may(policy, b"in\0file", b"r", True) == "EINVAL"
    assert (world.where / "else" / "new").exists()


# The root goes away


# spec O4, attack 40
@pytest.mark.parametrize("how", ["renamed", "removed", "replaced", "a link", "a file"])
async def test_a_root_that_is_gone_or_another(world: World, how: str) -> None:
    policy = world.policy(world.place("in", read=True))
    root = world.where / "root"
    assert world.may(policy, b"file", b"r") == "yes"
    if how == "removed":
        (root / "file").unlink()
        root.rmdir()
    else:
        root.rename(world.where / "elsewhere")
    if how == "replaced":
        root.mkdir()
        (root / "file").touch()
    elif how == "a link":
        root.symlink_to("in")
    elif how == "a file":
        root.touch()
    for mode in ALL_MODES:
        assert world.may(policy, b"file", mode) == "unavailable"
    assert world.may(policy, world.name("in/file"), b"r") == "unavailable"
    assert world.may(policy, b"file", b"r", True) == "unavailable"
    client = world.client(policy)
    with pytest.raises(UnavailableError):
        names.stat(client, b"file", claim=False)
    with pytest.raises(UnavailableError):
        await names.make_directory_waiting(client, b"d", claim=False)
    with pytest.raises(UnavailableError):
        await names.remove_waiting(client, b"file", claim=False)
    with pytest.raises(UnavailableError):
        await names.rename_waiting(client, b"file", b"g", claim=False)
    with pytest.raises(UnavailableError):
        await names.list_waiting(client, b".", claim=False, limit=9)
    world.fs.disconnect(client, "test")


# spec O4: a root that came back is the root.
def test_a_root_that_comes_back(world: World) -> None:
    policy = world.policy()
    root = world.where / "root"
    root.rename(world.where / "elsewhere")
    assert world.may(policy, b"file", b"r") == "unavailable"
    (world.where / "elsewhere").rename(root)
    assert world.may(policy, b"file", b"r") == "yes"


# spec A2, O4: the top-level view needs no root.
def test_the_top_level_view_goes_on_without_a_root(world: World) -> None:
    policy = world.policy(top_level=True)
    (world.where / "root").rename(world.where / "elsewhere")
    assert world.may(policy, b"in/file", b"r", True) == "yes"
    assert world.may(policy, b"file", b"r", False) == "unavailable"
