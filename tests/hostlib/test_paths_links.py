"""Links, mounts and moved directories, for both ways to open beneath a directory."""

import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from subprocess import run

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostlib.linux.resolve import open_beneath_walk
from tests.hostlib.beneath import CREATE, DIRECTORY, WAYS, Tree, answer, tree, way

__all__ = ["tree", "way"]


# Links


# spec A4, attack 3, attack 5
@pytest.mark.parametrize(
    ("target", "name", "flags", "expected"),
    [
        ("file", b"link", os.O_RDONLY, "file"),
        ("./dir/../file", b"link", os.O_RDONLY, "file"),
        ("dir/deep/leaf", b"link", os.O_RDWR, "dir/deep/leaf"),
        ("dir", b"link/deep/leaf", os.O_RDONLY, "dir/deep/leaf"),
        ("dir", b"link/../file", os.O_RDONLY, "file"),
        ("dir/deep", b"link/../deep/leaf", os.O_RDONLY, "dir/deep/leaf"),
        ("dir", b"link", DIRECTORY, "dir"),
        ("dir", b"link/", DIRECTORY, "dir"),
        ("dir", b"link//", DIRECTORY, "dir"),
        ("dir", b"link/.", DIRECTORY, "dir"),
        ("dir/", b"link", DIRECTORY, "dir"),
        ("dir/", b"link", CREATE, "EISDIR"),
        ("file/", b"link", os.O_RDONLY, "ENOTDIR"),
        ("file", b"link/", os.O_RDONLY, "ENOTDIR"),
        ("file", b"link", CREATE | os.O_EXCL, "EEXIST"),
        ("file", b"link", os.O_RDONLY | os.O_NOFOLLOW, "denied"),
        ("file", b"link", os.O_PATH | os.O_NOFOLLOW, "link"),
        ("nothing", b"link", os.O_RDONLY, "ENOENT"),
        ("nothing", b"link", CREATE, "nothing"),
        ("dir/nothing", b"link", CREATE, "dir/nothing"),
        ("nothing", b"link", CREATE | os.O_EXCL, "EEXIST"),
        ("nothing/x", b"link", CREATE, "ENOENT"),
        ("nothing", b"link/", CREATE, "EISDIR"),
        ("../outside", b"link/secret", os.O_RDONLY, "denied"),
        ("../outside", b"link", DIRECTORY, "denied"),
        ("../outside", b"link/", DIRECTORY, "denied"),
        ("../outside", b"link//", DIRECTORY, "denied"),
        ("../outside", b"link/.", DIRECTORY, "denied"),
        ("../outside", b"link/..", DIRECTORY, "denied"),
        ("../outside", b"link/missing/x", CREATE, "denied"),
        ("../outside/secret", b"link", os.O_RDONLY, "denied"),
        ("../outside/new", b"link", CREATE, "denied"),
        ("dir/../../outside/secret", b"link", os.O_RDONLY, "denied"),
        ("..", b"link/root/file", os.O_RDONLY, "denied"),
        ("/", b"link/etc/passwd", os.O_RDONLY, "denied"),
        ("/etc/passwd", b"link", os.O_RDONLY, "denied"),
        ("/proc/self/root", b"link/etc/passwd", os.O_RDONLY, "denied"),
        ("/proc/self/cwd", b"link", DIRECTORY, "denied"),
        ("/proc/self/fd/0", b"link", os.O_RDONLY, "denied"),
        ("link", b"link", os.O_RDONLY, "denied"),
        ("link", b"link/x", os.O_RDONLY, "denied"),
    ],
)
def test_a_link(
    tree: Tree, way: object, target: str, name: bytes, flags: int, expected: str
) -> None:
    tree.link("link", target)
    assert tree.answer(way, name, flags) == expected
    assert not (tree.outside / "new").exists()


# spec A4: an absolute link is out, even one that names a file of the root.
def test_an_absolute_link_into_the_root_is_denied(tree: Tree, way: object) -> None:
    tree.link("link", tree.root / "file")
    assert tree.answer(way, b"link") == "denied"


def test_forty_links_in_a_row_are_followed_and_no_more(tree: Tree, way: object) -> None:
    tree.link("l0", "file")
    for number in range(1, 42):
        tree.link(f"l{number}", f"l{number - 1}")
    assert tree.answer(way, b"l39") == "file"
    assert tree.answer(way, b"l40") == "denied"


def test_a_link_in_a_directory_that_a_link_led_to(tree: Tree, way: object) -> None:
    (tree.root / "dir" / "up").symlink_to("../file")
    (tree.root / "dir" / "deep" / "out").symlink_to("../../../outside/secret")
    tree.link("link", "dir")
    assert tree.answer(way, b"link/up") == "file"
    assert tree.answer(way, b"link/deep/out") == "denied"


# attack 6: a link to a directory that the host has open is no way in.
def test_a_leaked_directory_descriptor_is_no_door(tree: Tree, way: object) -> None:
    fd = os.open(tree.outside, os.O_PATH | os.O_DIRECTORY)
    try:
        for number, base in enumerate(
            ("/proc/self/fd", "/dev/fd", "/proc/thread-self/fd")
        ):
            tree.link(f"l{number}", f"{base}/{fd}")
            assert tree.answer(way, b"l%d/secret" % number) == "denied"
            assert tree.answer(way, b"l%d" % number, DIRECTORY) == "denied"
    finally:
        os.close(fd)


# spec A4: a hard link that stands in the root belongs to it.  attack 7
def test_a_hard_link_belongs_to_the_directory_it_stands_in(
    tree: Tree, way: object
) -> None:
    (tree.root / "hard").hardlink_to(tree.outside / "secret")
    assert tree.answer(way, b"hard") == "hard"


# Moved and mounted


def test_a_held_directory_that_was_renamed_is_still_the_one(
    tree: Tree, way: object
) -> None:
    tree.root.rename(tree.root.parent / "elsewhere")
    tree.root.mkdir()
    assert tree.answer(way, b"file") == "file"
    assert tree.answer(way, b"../outside/secret") == "denied"


# spec A4: the way up is not taken if it has come to lead elsewhere.
def test_the_walk_does_not_go_up_out_of_a_directory_that_was_moved(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open
    target = tree.outside / "moved"

    def move_then_open(path: bytes, flags: int, *args: int, **where: int) -> int:
        if path == b".." and not target.exists():
            (tree.root / "dir" / "deep").rename(target)
        return opened(path, flags, *args, **where)

    monkeypatch.setattr(os, "open", move_then_open)
    # The second try begins anew, and `deep` is no longer there.
    assert answer(open_beneath_walk, tree.fd, b"dir/deep/../secret", 0) == "ENOENT"
    assert target.exists()


IN_A_NAMESPACE = """
    import ctypes, os, sys
    sys.path.insert(0, sys.argv[1])
    root = os.fsencode(sys.argv[2])
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name, *args):
        if getattr(libc, name)(*args) != 0:
            print("cannot", name, os.strerror(ctypes.get_errno()))
            sys.exit(0)

    call("unshare", 0x00020000)  # CLONE_NEWNS
    call("mount", b"none", b"/", None, 0x4000 | 0x40000, None)  # MS_REC | MS_PRIVATE
    call("mount", os.path.dirname(root) + b"/outside", root + b"/dir", None, 0x1000, None)
    os.mkdir(root + b"/proc")
    call("mount", b"proc", root + b"/proc", b"proc", 0, None)

    from tests.hostlib.beneath import WAYS, answer
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    leak = os.open("/", os.O_PATH | os.O_DIRECTORY)
    end, _ = os.pipe()
    for name in (
        b"dir/secret", b"dir/../file", b"dir/../dir/secret", b"dir/../../outside/secret",
        b"proc/version", b"proc/self/comm", b"proc/self/root/etc/passwd",
        b"proc/self/cwd", b"proc/self/exe", b"proc/self/ns/net",
        b"proc/self/fd/%d/etc/passwd" % leak, b"proc/self/fd/%d" % leak,
        b"proc/self/fd/%d" % end, b"proc/thread-self/root", b"proc/mounts",
    ):
        print(name.decode(), *(answer(way, fd, name, 0) for way in WAYS))
"""


# spec A4, attack 6, attack 10: a mount in the root belongs to it, its `..` stays in the
# root, and the magic links of a /proc in it are refused.
@pytest.mark.slow
def test_mounts_and_magic_links_in_the_root(tree: Tree) -> None:
    source = Path(__file__).parents[2]
    program = textwrap.dedent(IN_A_NAMESPACE)
    command = [sys.executable, "-c", program, str(source), str(tree.root)]
    done = run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("cannot"):
        pytest.skip(f"no mount namespace of our own: {done.stdout.strip()}")
    answers = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    leak = [name for name in answers if name.startswith("proc/self/fd/")]
    assert len(leak) == 3
    pid = answers["proc/self/comm"][0].split("/")[1]
    expected = {
        "dir/secret": "dir/secret",
        "dir/../file": "file",
        "dir/../dir/secret": "dir/secret",
        "dir/../../outside/secret": "denied",
        "proc/version": "proc/version",
        "proc/self/comm": f"proc/{pid}/comm",
        "proc/mounts": f"proc/{pid}/mounts",
    }
    for name, answer_of_both in answers.items():
        assert answer_of_both == [expected.get(name, "denied")] * 2, name


# The two ways give the same answer, whatever the name

PARTS = st.sampled_from(
    [b"dir", b"deep", b"leaf", b"file", b"..", b".", b"", b"in", b"out", b"loop",
     b"gone", b"made", b"up", b"slash", b"abs", b"nothing"]
)  # fmt: skip
NAMES = st.lists(PARTS, min_size=1, max_size=6).map(b"/".join)
FLAGS = st.sampled_from(
    [os.O_RDONLY, os.O_RDWR, os.O_PATH, DIRECTORY, CREATE, CREATE | os.O_EXCL,
     os.O_RDONLY | os.O_NOFOLLOW, os.O_PATH | os.O_NOFOLLOW]
)  # fmt: skip


@pytest.fixture(scope="module")
def forest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    """Return a tree with links of every kind."""
    made = Tree(tmp_path_factory.mktemp("forest"))
    for name, target in {
        "in": "dir",
        "out": "../outside",
        "loop": "loop",
        "gone": "nothing",
        "up": "dir/deep/../..",
        "slash": "dir/deep/",
        "abs": str(made.root),
    }.items():
        made.link(name, target)
        (made.root / "dir" / name).symlink_to(target)
    yield made
    os.close(made.fd)


# spec A4
@given(name=NAMES, flags=FLAGS)
def test_both_ways_give_the_same_answer(forest: Tree, name: bytes, flags: int) -> None:
    before = set(forest.root.rglob("*"))
    answers = []
    for one in WAYS:
        answers.append(forest.answer(one, name, flags))
        for made in set(forest.root.rglob("*")) - before:
            made.unlink()
    assert answers[0] == answers[1]
    assert not answers[0].startswith("..")
