"""One contract for both ways to open beneath a directory: kernel and walk.

A client sees the class of an answer: the opened file, "denied" (spec O6), or the errno
that becomes the text of an error. Both ways must give the same.
Links and mounts have a file of their own.
"""

import errno
import os
import resource
import socket
import stat
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from hostlib.linux import resolve, syscalls
from hostlib.linux.resolve import open_beneath, open_beneath_kernel, split_parent
from tests.helpers.trees import PROJECT
from tests.hostlib.beneath import CREATE, DIRECTORY, Tree, tree, way

__all__ = ["tree", "way"]


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
    # Others in this process may hold higher ones, and none between is free for sure.
    highest = max(int(number) for number in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, limits[1]))
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


_LEADER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from hostlib.linux.resolve import OPEN_FLAGS, open_beneath_kernel, open_beneath_walk
terminal = os.ttyname(os.openpty()[1]).encode()
os.setsid()
directory, name = os.path.split(terminal)
held = os.open(directory, os.O_PATH)
for fd in (
    open_beneath_kernel(held, name, os.O_RDWR),
    open_beneath_walk(held, name, os.O_RDWR),
    os.open(terminal, os.O_RDWR | OPEN_FLAGS),  # as the top-level view does
):
    os.close(fd)
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        continue
    sys.exit("the host has got a controlling terminal")
"""


# spec O7: a terminal that is opened does not become that of the host, whose Ctrl-C and
# hang-up would be the host's from then on.
def test_no_terminal_becomes_the_hosts() -> None:
    command = [sys.executable, "-I", "-c", _LEADER, os.fspath(PROJECT)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    if (
        b"No such file or directory" in done.stderr
        or b"Function not implemented" in done.stderr
    ):
        pytest.skip(done.stderr.decode())
    assert (done.returncode, done.stderr) == (0, b"")


# spec O7, attack 9: an open never truncates; that is decided after a look.
def test_nothing_is_truncated(tree: Tree, way: object) -> None:
    assert tree.answer(way, b"file", CREATE) == "file"
    assert (tree.root / "file").read_text() == "root/file"


# The choice of the way


# spec A4: this kernel has openat2, so the host must use it.
def test_openat2_is_used_where_the_kernel_has_it(tree: Tree) -> None:
    try:
        os.close(open_beneath_kernel(tree.fd, b"file", os.O_RDONLY))
    except OSError as why:
        pytest.skip(f"openat2 does not work here: {why}")
    assert open_beneath is open_beneath_kernel


# spec A4, attack 4: EAGAIN says that something was renamed meanwhile: once more, but not
# for ever.
@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR])
def test_the_kernel_is_asked_again(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    ask = syscalls.openat2
    times = 3

    def disturbed(*arguments: Any) -> int:
        nonlocal times
        times -= 1
        if times < 0:
            return ask(*arguments)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(resolve, "openat2", disturbed)
    assert tree.answer(open_beneath_kernel, b"file") == "file"
    times = 10_000
    assert tree.answer(open_beneath_kernel, b"file") == "EAGAIN"
    assert times > 0


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
