"""One contract for both ways to open beneath a directory: the kernel's and the walk's.

What a client can see is the class of an answer: which file was opened, "denied" (spec
O6), or the errno that becomes the text of an error. Both ways must give the same.
"""

import errno
import os
import resource
import socket
import stat
import sys
import textwrap
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from subprocess import run

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfs.paths import (
    DENIED,
    open_beneath,
    open_beneath_kernel,
    open_beneath_walk,
    split_parent,
)

WAYS = (open_beneath_kernel, open_beneath_walk)
CREATE = os.O_WRONLY | os.O_CREAT
DIRECTORY = os.O_PATH | os.O_DIRECTORY


@pytest.fixture(params=WAYS, ids=["kernel", "walk"])
def way(request: pytest.FixtureRequest) -> object:
    """Return one of the two."""
    return request.param


class Tree:
    """A directory to stay in, and one beside it to reach for.

    Attributes:
        root: the directory.
        outside: the other one.
        fd: the root, held.
    """

    def __init__(self, where: Path) -> None:
        self.root = where / "root"
        self.outside = where / "outside"
        for directory in (self.root / "dir" / "deep", self.outside):
            directory.mkdir(parents=True)
        for name in ("root/file", "root/dir/deep/leaf", "outside/secret", "root-evil"):
            (where / name).write_text(name)
        self.fd = os.open(self.root, os.O_PATH | os.O_DIRECTORY)

    def link(self, name: str, target: str | Path) -> None:
        """Make a symbolic link in the root."""
        (self.root / name).symlink_to(target)

    def answer(self, way: object, name: bytes, flags: int = os.O_RDONLY) -> str:
        """Return what came of an open: a path relative to the root, or an error."""
        return answer(way, self.fd, name, flags)


def answer(way: object, root: int, name: bytes, flags: int) -> str:
    """Return what came of an open: a path relative to the root, or an error."""
    assert callable(way)
    try:
        fd = way(root, name, flags)
    except OSError as why:
        return "denied" if why.errno in DENIED else errno.errorcode[why.errno or 0]
    try:
        assert not os.get_inheritable(fd)
        found = os.readlink(f"/proc/self/fd/{fd}")
        return os.path.relpath(found, os.readlink(f"/proc/self/fd/{root}"))
    finally:
        os.close(fd)


@pytest.fixture
def tree(tmp_path: Path, no_leaks: None) -> Iterator[Tree]:
    """Return a fresh tree."""
    del no_leaks
    made = Tree(tmp_path)
    yield made
    os.close(made.fd)


# Names without links


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        (b"file", os.O_RDONLY, "file"),
        (b"file", os.O_RDWR, "file"),
        (b"./file", os.O_RDONLY, "file"),
        (b".//./file", os.O_RDONLY, "file"),
        (b"dir/deep/leaf", os.O_RDONLY, "dir/deep/leaf"),
        (b"dir//deep///leaf", os.O_RDONLY, "dir/deep/leaf"),
        (b".", os.O_PATH, "."),
        (b"./", DIRECTORY, "."),
        (b"dir", DIRECTORY, "dir"),
        (b"dir/", os.O_RDONLY, "dir"),
        (b"dir/.", DIRECTORY, "dir"),
        (b"dir", os.O_RDONLY, "dir"),
        (b"dir", os.O_RDWR, "EISDIR"),
        (b"dir", CREATE, "EISDIR"),
        (b"dir/", CREATE, "EISDIR"),
        (b"new/", CREATE, "EISDIR"),
        (b".", CREATE, "EISDIR"),
        (b"file", DIRECTORY, "ENOTDIR"),
        (b"file/", os.O_RDONLY, "ENOTDIR"),
        (b"file/.", os.O_RDONLY, "ENOTDIR"),
        (b"file/x", os.O_RDONLY, "ENOTDIR"),
        (b"file/..", os.O_RDONLY, "ENOTDIR"),
        (b"nothing", os.O_RDONLY, "ENOENT"),
        (b"nothing/", os.O_RDONLY, "ENOENT"),
        (b"nothing/x", CREATE, "ENOENT"),
        (b"nothing/..", os.O_RDONLY, "ENOENT"),
        (b"", os.O_RDONLY, "ENOENT"),
        (b"new", CREATE, "new"),
        (b"dir/new", CREATE, "dir/new"),
        (b"new", CREATE | os.O_EXCL, "new"),
        (b"file", CREATE | os.O_EXCL, "EEXIST"),
        (b"file", CREATE, "file"),
    ],
)
def test_a_plain_name(
    tree: Tree, way: object, name: bytes, flags: int, expected: str
) -> None:
    assert tree.answer(way, name, flags) == expected


# spec A4: `..` may be used, and never leads out.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b"dir/..", "."),
        (b"dir/../file", "file"),
        (b"dir/deep/../../file", "file"),
        (b"dir/../dir/deep/../deep/leaf", "dir/deep/leaf"),
        (b"..", "denied"),
        (b"../", "denied"),
        (b"../root/file", "denied"),
        (b"../outside/secret", "denied"),
        (b"dir/../../outside/secret", "denied"),
        (b"./../outside/secret", "denied"),
        (b"nothing/../../outside/secret", "ENOENT"),
    ],
)
def test_dot_dot(tree: Tree, way: object, name: bytes, expected: str) -> None:
    assert tree.answer(way, name, os.O_RDONLY) == expected


# spec A4: an absolute name is never beneath a directory, not even a true one.
# attack 2: nor is one that only begins like the root.
def test_absolute_names_are_denied(tree: Tree, way: object) -> None:
    for path in (tree.root / "file", tree.outside / "secret", Path("/"), tree.root):
        assert tree.answer(way, os.fsencode(path)) == "denied"
    evil = os.fsencode(tree.root) + b"-evil"
    assert tree.answer(way, evil) == "denied"


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


# Bytes


# spec O8, attack 12: NUL is refused before the system could cut the name there.
@pytest.mark.parametrize("name", [b"file\0", b"\0", b"fi\0le", b"../outside\0/x"])
def test_nul_is_an_error(tree: Tree, way: object, name: bytes) -> None:
    assert tree.answer(way, name) == "EINVAL"


# spec O8
@pytest.mark.parametrize(
    "name", [b"\xff\xfe", b"a b\tc", b"\x01\x1b[31m", b"\r", b"-", b"...", b"~", b"\\"]
)
def test_names_are_bytes(tree: Tree, way: object, name: bytes) -> None:
    assert tree.answer(way, name, CREATE) != "ENOENT"
    assert name in os.listdir(os.fsencode(tree.root))


# attack 22
def test_unicode_twins_are_two_files(tree: Tree, way: object) -> None:
    composed, decomposed = (
        unicodedata.normalize(form, "caf\u00e9").encode() for form in ("NFC", "NFD")
    )
    (tree.root / os.fsdecode(composed)).write_text("x")
    assert tree.answer(way, composed) == os.fsdecode(composed)
    assert tree.answer(way, decomposed) == "ENOENT"
    assert tree.answer(way, b"FILE") == "ENOENT"


# attack 11, spec O8
def test_long_names(tree: Tree, way: object) -> None:
    assert tree.answer(way, b"n" * 255, CREATE) == "n" * 255
    assert tree.answer(way, b"n" * 256, CREATE) == "ENAMETOOLONG"
    assert tree.answer(way, b"n" * 256 + b"/x") == "ENAMETOOLONG"
    longest = b"./" * 2045 + b".file"[1:].rjust(5, b"/")
    assert len(longest) == 4095
    assert tree.answer(way, longest) == "file"
    assert tree.answer(way, b"/" + longest) in ("denied", "ENAMETOOLONG")
    assert tree.answer(way, b"." + b"/" + longest) == "ENAMETOOLONG"
    assert tree.answer(way, b"x/" * 3000 + b"x", CREATE) == "ENAMETOOLONG"
    assert tree.answer(way, b"dir/../" * 584 + b"file") == "file"


# attack 11, attack 18: however deep a name, few descriptors are needed for it.
def test_a_deep_name_needs_few_descriptors(tree: Tree, way: object) -> None:
    depth = 1200
    fd = os.dup(tree.fd)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        deeper = os.open("d", os.O_PATH | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(os.open("leaf", CREATE, dir_fd=fd))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd + 8, limits[1]))
    try:
        down = b"d/" * depth
        assert tree.answer(way, down + b"leaf").endswith("d/leaf")
        assert tree.answer(way, down + b"../" * 500 + b"d/d", DIRECTORY).endswith("d/d")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.unlink("leaf", dir_fd=fd)
        os.close(fd)
        for level in range(depth, 0, -1):
            os.rmdir(b"d/" * level, dir_fd=tree.fd)


# Things that are no files


# spec O7, attack 8: nothing that stands in a tree makes an open wait.
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR, CREATE])
def test_special_files_are_answered_at_once(
    tree: Tree, way: object, flags: int
) -> None:
    os.mkfifo(tree.root / "fifo")
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    expected = "ENXIO" if writes == os.O_WRONLY else "fifo"
    assert tree.answer(way, b"fifo", flags) == expected
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(".", os.O_PATH)
        os.chdir(tree.root)  # a socket's address is at most 107 bytes long
        try:
            server.bind("socket")
        finally:
            os.fchdir(here)
            os.close(here)
        assert tree.answer(way, b"socket", flags) == "ENXIO"


# attack 8
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
def test_a_device_is_opened_without_waiting(tree: Tree, way: object) -> None:
    os.mknod(tree.root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    assert tree.answer(way, b"null", os.O_RDWR) == "null"


# spec O6
def test_a_file_is_made_with_the_umask(tree: Tree, way: object) -> None:
    old = os.umask(0o027)
    try:
        assert tree.answer(way, b"new", CREATE) == "new"
    finally:
        os.umask(old)
    assert stat.S_IMODE((tree.root / "new").stat().st_mode) == 0o640


# spec O7, attack 9: an open never truncates; that is decided after a look.
def test_nothing_is_truncated(tree: Tree, way: object) -> None:
    assert tree.answer(way, b"file", CREATE) == "file"
    assert (tree.root / "file").read_text() == "root/file"


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

    from tests.vfs.test_paths import WAYS, answer
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
    for way in WAYS:
        answers.append(forest.answer(way, name, flags))
        for made in set(forest.root.rglob("*")) - before:
            made.unlink()
    assert answers[0] == answers[1]
    assert not answers[0].startswith("..")


# What is chosen


# spec A4: this kernel has openat2, so the host must use it.
def test_openat2_is_used_where_the_kernel_has_it(tree: Tree) -> None:
    try:
        os.close(open_beneath_kernel(tree.fd, b"file", os.O_RDONLY))
    except OSError as why:
        pytest.skip(f"openat2 does not work here: {why}")
    assert open_beneath is open_beneath_kernel


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (b"a", (b".", b"a")),
        (b"a/b", (b"a", b"b")),
        (b"a/b/", (b"a", b"b")),
        (b"/a", (b"/", b"a")),
        (b"/a/b", (b"/a", b"b")),
        (b"a/..", (b"a", b"..")),
        (b"/", (b".", b"")),
        (b".", (b".", b".")),
    ],
)
def test_the_parent_of_a_name(name: bytes, parts: tuple[bytes, bytes]) -> None:
    assert split_parent(name) == parts
