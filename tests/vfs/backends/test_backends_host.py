"""Directories of the host: kinds of files, links, permission bits, leftovers."""

import errno
import os
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trees import (
    PROJECT,
    content,
    host,
    host_directory,
    names,
    opened,
    put,
)
from vfs.backends import MODES, HostDirectory
from vfs.errors import AccessDeniedError

__all__ = ["host"]


# spec O7, attack 8: refused at once, and nothing is harmed.
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("staged", [False, True])
def test_what_is_no_file_is_refused(
    host: HostDirectory, tmp_path: Path, mode: bytes, staged: bool
) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(".", os.O_PATH)
        os.chdir(tmp_path)  # a socket's address is at most 107 bytes long
        try:
            server.bind("socket")
        finally:
            os.fchdir(here)
            os.close(here)
        for name in (b"fifo", b"socket"):
            with pytest.raises(OSError, match=r"such device|not permitted"):
                opened(host, name, mode, staged=staged and MODES[mode].empties)
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(PermissionError):
            opened(host, b"fifo", mode, staged=staged and MODES[mode].empties)
    finally:
        os.close(reader)
    assert host.list(b".", 10) == [(b"fifo", "fifo"), (b"socket", "socket")]
    assert host.stat(b"fifo").kind == "fifo"


# attack 7: the host writes for its client, and may be one whose writes leave the bits.
@pytest.mark.parametrize("bits", [0o4755, 0o2755, 0o6711])
@pytest.mark.parametrize("word", [b"r", b"r+", b"a", b"w", b"w staged"])
@pytest.mark.parametrize("view", ["beneath", "top"])
def test_what_a_client_writes_is_no_set_user_id_program(
    host: HostDirectory, tmp_path: Path, bits: int, word: bytes, view: str
) -> None:
    file = tmp_path / "program"
    file.write_text("of another one's")
    file.chmod(bits)
    mode, *staged = word.split()
    name = b"program"
    if view == "top":
        name, host = os.fsencode(file), HostDirectory(-1, beneath=False)
        if staged:
            pytest.skip("only a place has staged files")
    handle = opened(host, name, mode, staged=bool(staged))
    if mode != b"r":
        handle.pwrite(b"mine", 0)
        handle.publish(durable=False)
    handle.close()
    now = file.stat().st_mode & 0o7777
    assert now == (bits if mode == b"r" else bits & ~0o6000)


# rename(2) leaves two names of one file as they are.
def test_a_renaming_of_one_file_onto_itself_replaces_nothing(
    host: HostDirectory, tmp_path: Path
) -> None:
    put(host, b"a", b"content")
    os.link(tmp_path / "a", tmp_path / "b")
    assert host.rename(b"a", host, b"b") is None
    assert names(host) == [b"a", b"b"]
    host.remove(b"b")
    assert host.rename(b"a", host, b"./a") is None
    assert content(host, b"a") == b"content"


# spec A4: REMOVE and RENAME are about the link, never about what it names.
# attack 3, attack 5
def test_links_are_removed_and_renamed_themselves(
    host: HostDirectory, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "f").write_text("outside")
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "file").symlink_to(outside / "f")
    with pytest.raises(NotADirectoryError):
        host.remove(b"link/")
    with pytest.raises(NotADirectoryError):
        host.rename(b"link/", host, b"x")
    for name in (b"link/f", b"link/new"):
        for call in (host.remove, host.make_directory, host.stat):
            with pytest.raises(AccessDeniedError):
                call(name)
    host.rename(b"link", host, b"moved")
    host.remove(b"moved")
    host.remove(b"file")
    assert (outside / "f").read_text() == "outside"
    assert names(host) == []


# spec A3b: a link is followed within the tree, staged as directly.
@pytest.mark.parametrize("staged", [False, True])
def test_a_write_through_a_link(
    host: HostDirectory, tmp_path: Path, staged: bool
) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "to").symlink_to("../real")
    (tmp_path / "link").symlink_to("dir/to")
    (tmp_path / "out").symlink_to("../secret")
    (tmp_path / "loop").symlink_to("loop")
    handle = opened(host, b"link", b"w", staged=staged)
    handle.pwrite(b"x", 0)
    handle.publish(durable=False)
    handle.close()
    assert (tmp_path / "real").read_bytes() == b"x"
    assert (tmp_path / "link").is_symlink()
    for name in (b"out", b"loop"):
        with pytest.raises(AccessDeniedError):
            opened(host, name, b"w", staged=staged)
    assert not (tmp_path.parent / "secret").exists()


# spec A3b, O6: a file that is replaced keeps its permission bits; a new one has 0666.
def test_permission_bits(host: HostDirectory, tmp_path: Path) -> None:
    (tmp_path / "script").write_text("old")
    (tmp_path / "script").chmod(0o751)
    old = os.umask(0o022)
    try:
        for name in (b"script", b"new"):
            handle = opened(host, name, b"w", staged=True)
            handle.publish(durable=False)
            handle.close()
        opened(host, b"plain", b"w").close()
    finally:
        os.umask(old)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in tmp_path.iterdir()}
    assert modes == {"script": 0o751, "new": 0o644, "plain": 0o644}


# spec A4: where one file is granted, a link in its place is refused.
def test_a_granted_file_that_becomes_a_link(
    host: HostDirectory, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "granted").write_text("x")
    (tmp_path / "through").symlink_to("granted")
    part, only = host.narrow(b"through", create=False)
    assert only == b"granted"
    assert content(part, only) == b"x"
    (tmp_path / "granted").unlink()
    (tmp_path / "granted").symlink_to("secret")
    for mode in MODES:
        with pytest.raises(AccessDeniedError):
            opened(part, only, mode)
    with pytest.raises(AccessDeniedError):
        opened(part, only, b"w", staged=True)
    assert part.stat(only).kind == "link"
    assert (tmp_path / "secret").read_text() == "secret"
    part.close()


# spec X1
def test_a_listing_tells_kinds(host: HostDirectory, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "f").touch()
    (tmp_path / "l").symlink_to("nothing")
    os.mkfifo(tmp_path / "p")
    (tmp_path / os.fsdecode(b"\xff")).touch()
    assert host.list(b".", 5) == [
        (b"d", "directory"),
        (b"f", "file"),
        (b"l", "link"),
        (b"p", "fifo"),
        (b"\xff", "file"),
    ]
    with pytest.raises(FileNotFoundError):
        host.stat(b"l")


# spec A2: the whole file system, as the host sees it.
def test_a_directory_with_everything(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = HostDirectory(os.open(tmp_path, os.O_PATH), beneath=False)
    other = tmp_path_factory.mktemp("other")
    put(whole, b"here", b"x")
    put(whole, os.fsencode(other / "there"), b"y")
    assert (tmp_path / "here").read_text() == "x"
    assert (other / "there").read_text() == "y"
    (tmp_path / "link").symlink_to(other)
    assert content(whole, b"link/there") == b"y"
    with pytest.raises(FileExistsError):
        whole.make_directory(b"/tmp")
    with pytest.raises(OSError, match="Invalid argument"):
        whole.make_directory(b"a\0b")
    whole.close()


# spec O6, A2: a new file has 0666 & ~umask in this view too.
def test_permission_bits_in_the_top_level_view(tmp_path: Path) -> None:
    whole = HostDirectory(os.open(tmp_path, os.O_PATH), beneath=False)
    old = os.umask(0o027)
    try:
        put(whole, b"new", b"")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    whole.close()


# spec A3b: where the place's own directory cannot take the name, the file's can.
@pytest.mark.parametrize("code", [errno.EXDEV, errno.EACCES])
def test_publication_next_to_the_file(
    host: HostDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    (tmp_path / "sub").mkdir()
    plain_link = os.link
    tried: list[int] = []

    def link(*args: Any, dst_dir_fd: int, **rest: Any) -> None:
        tried.append(dst_dir_fd)
        if len(tried) == 1:
            raise OSError(code, os.strerror(code))
        plain_link(*args, dst_dir_fd=dst_dir_fd, **rest)

    monkeypatch.setattr(os, "link", link)
    handle = opened(host, b"sub/file", b"w", staged=True)
    handle.pwrite(b"x", 0)
    handle.publish(durable=False)
    handle.close()
    assert len(set(tried)) == 2
    assert os.listdir(tmp_path) == ["sub"]
    assert os.listdir(tmp_path / "sub") == ["file"]
    # Any other error is one of the publication.
    tried.clear()
    code = errno.ENOSPC
    handle = opened(host, b"sub/file", b"w", staged=True)
    with pytest.raises(OSError, match="No space"):
        handle.publish(durable=False)
    handle.close()
    assert (tmp_path / "sub" / "file").read_text() == "x"
    assert os.listdir(tmp_path / "sub") == ["file"]


KILLED = """
    import os, signal, sys
    sys.path.insert(0, sys.argv[1])
    from vfs.backends import MODES, HostDirectory
    tree = HostDirectory(os.open(sys.argv[2], os.O_PATH | os.O_DIRECTORY))
    os.rename = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    handle = tree.open(
        b"sub/file", MODES[b"w"], create=True, exclusive=False, staged=True
    )
    handle.pwrite(b"fresh", 0)
    handle.publish(durable=False)
"""


# attack 39, spec A3b: what a killed host was publishing is removed by the next one.
@pytest.mark.slow
def test_what_a_killed_host_was_publishing(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("old")
    program = textwrap.dedent(KILLED)
    done = subprocess.run(
        [sys.executable, "-c", program, str(PROJECT), str(tmp_path)], check=False
    )
    assert done.returncode == -9
    left = [name for name in os.listdir(tmp_path) if name.startswith(".sandhost-")]
    assert len(left) == 1
    # A user's file with a similar name is not the host's.
    others = [".sandhost-notes", ".sandhost-", left[0] + "0", left[0][:-1] + "x"]
    for name in others:
        (tmp_path / name).touch()
    host = host_directory(tmp_path)
    # One that is being published by a host that lives stays.
    handle = opened(host, b"new", b"w", staged=True)
    handle.give_name()  # type: ignore[attr-defined]
    host.remove_stale()
    assert {name for name in others if (tmp_path / name).exists()} == set(others)
    for name in others:
        (tmp_path / name).unlink()
    now = [name for name in os.listdir(tmp_path) if name.startswith(".sandhost-")]
    assert len(now) == 1
    assert now != left
    handle.publish(durable=False)
    handle.close()
    assert sorted(os.listdir(tmp_path)) == ["new", "sub"]
    assert (tmp_path / "sub" / "file").read_text() == "old"
    host.close()


# spec A3b: a file system without unnamed files is used all the same.
def test_staging_where_there_are_no_unnamed_files(
    host: HostDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_open = os.open

    def without_unnamed(path: bytes, flags: int, *args: int, **where: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no unnamed files")
        return plain_open(path, flags, *args, **where)

    monkeypatch.setattr(os, "open", without_unnamed)
    (tmp_path / "a").write_text("old")
    for publish in (False, True):
        handle = opened(host, b"a", b"w", staged=True)
        handle.pwrite(b"fresh", 0)
        assert len(os.listdir(tmp_path)) == 2
        if publish:
            handle.publish(durable=False)
        handle.close()
        assert os.listdir(tmp_path) == ["a"]
        assert (tmp_path / "a").read_text() == ("fresh" if publish else "old")


# A file without a name is refused there, but not one that has just lost it: to another, or altogether.
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_goes_while_it_is_opened_by_its_path_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    top_level = HostDirectory(-1, beneath=False)
    name = os.fsencode(tmp_path / "file")
    plain_fstat = os.fstat

    def going(fd: int) -> os.stat_result:
        if is_replaced:
            (tmp_path / "new").rename(tmp_path / "file")
        else:
            (tmp_path / "file").unlink()
        return plain_fstat(fd)

    (tmp_path / "file").write_text("old")
    (tmp_path / "new").write_text("new")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", going)
        handle = opened(top_level, name, b"r")
    assert handle.pread(9, 0) == b"old"
    assert os.fstat(handle.fd).st_nlink == 0
    handle.close()


# A file system may count no names (FUSE): what it says is not believed then.
def test_a_file_whose_names_are_not_counted_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top_level = HostDirectory(-1, beneath=False)
    (tmp_path / "file").write_text("x")
    plain_fstat = os.fstat

    def uncounted(fd: int) -> os.stat_result:
        fields = list(plain_fstat(fd))
        fields[3] = 0
        return os.stat_result(fields, {"st_blocks": 8})

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", uncounted)
        handle = opened(top_level, os.fsencode(tmp_path / "file"), b"r")
    handle.close()
