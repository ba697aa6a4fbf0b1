"""A directory as a tar and back: its content, refusals, forged tars."""

import io
import os
import socket
import stat
import tarfile
from pathlib import Path

import pytest

from supervisor.workspace.archive import pack_tree, unpack_layer, unpack_tree
from supervisor.workspace.directory import WorkspaceError

MIB = 1024 * 1024


def packed(top: Path, max_bytes: int = MIB) -> bytes:
    """Return a directory as a tar."""
    file = io.BytesIO()
    fd = os.open(top, os.O_RDONLY)
    try:
        pack_tree(fd, file, max_bytes)
    finally:
        os.close(fd)
    return file.getvalue()


def unpacked(data: bytes, into: Path) -> Path:
    """Return a new directory with what is in a tar."""
    into.mkdir()
    fd = os.open(into, os.O_RDONLY)
    try:
        unpack_tree(io.BytesIO(data), fd)
    finally:
        os.close(fd)
    return into


def facts(top: Path) -> dict[str, object]:
    """Return what is in a directory: kinds, modes, contents, whole seconds."""
    found: dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        status = path.lstat()
        content = (
            os.readlink(path)
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else None
        )
        mode = stat.filemode(status.st_mode)
        found[str(path.relative_to(top))] = mode, content, int(status.st_mtime)
    return found


def tree(where: Path) -> Path:
    """Return a directory with all that a base may have."""
    top = where / "base"
    (top / "src" / "empty").mkdir(parents=True)
    (top / "a b\n").write_bytes(b"odd")
    Path(os.fsdecode(os.fsencode(top) + b"/\xff")).write_bytes(b"no UTF-8")
    (top / "src" / "run.sh").write_text("#!/bin/sh\n")
    (top / "src" / "run.sh").chmod(0o755)
    os.link(top / "src" / "run.sh", top / "src" / "same.sh")
    (top / "src" / "python").symlink_to("/usr/bin/python3")
    (top / "src" / "up").symlink_to("../../elsewhere")
    (top / "src" / "empty").chmod(0o500)
    os.utime(top / "a b\n", (1e9, 1e9))
    return top


# spec FL10
def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    top = tree(tmp_path)
    copy = unpacked(packed(top), tmp_path / "copy")
    assert facts(copy) == facts(top)
    assert (copy / "src" / "run.sh").samefile(copy / "src" / "same.sh")


# spec FL10
def test_the_same_content_is_the_same_tar(tmp_path: Path) -> None:
    top = tree(tmp_path)
    copy = unpacked(packed(top), tmp_path / "copy")
    assert packed(copy) == packed(top)
    (copy / "src" / "run.sh").write_text("#!/bin/su\n")
    assert packed(copy) != packed(top)


# spec FL10
def test_set_user_id_bits_stay_behind(tmp_path: Path) -> None:
    top = tmp_path / "base"
    top.mkdir()
    (top / "tool").write_text("")
    (top / "tool").chmod(0o6755)
    copy = unpacked(packed(top), tmp_path / "copy")
    assert stat.S_IMODE((copy / "tool").stat().st_mode) == 0o755


# spec FL10
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_special_file_is_refused_by_its_name(tmp_path: Path, kind: str) -> None:
    (tmp_path / "inner").mkdir()
    if kind == "pipe":
        os.mkfifo(tmp_path / "inner" / "odd")
    else:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(tmp_path / "inner" / "odd"))
    with pytest.raises(WorkspaceError, match=r"cannot pack 'inner/odd': it is no file"):
        packed(tmp_path)


# spec FL10
def test_a_base_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(MIB))
    with pytest.raises(WorkspaceError, match=r"'large': all would have more than 1048"):
        packed(tmp_path)
    assert len(packed(tmp_path, 2 * MIB)) < 2 * MIB
    os.truncate(tmp_path / "large", 1 << 40)
    with pytest.raises(WorkspaceError, match=r"raise \[fleet\] base_size"):
        packed(tmp_path)


def forged(*members: tuple[str, bytes, str]) -> bytes:
    """Return a tar of (name, type, where it links to)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, kind, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            tar.addfile(member)
    return file.getvalue()


# spec FL10
@pytest.mark.parametrize(
    "members",
    [
        [("../out", tarfile.REGTYPE, "")],
        [("/out", tarfile.REGTYPE, "")],
        [("a", tarfile.SYMTYPE, ".."), ("a/out", tarfile.REGTYPE, "")],
        [("a", tarfile.SYMTYPE, "../out"), ("a", tarfile.REGTYPE, "")],
        [("a", tarfile.LNKTYPE, "../secret")],
        [("up", tarfile.SYMTYPE, ".."), ("a", tarfile.LNKTYPE, "up/secret")],
        [("null", tarfile.CHRTYPE, "")],
        [("pipe", tarfile.FIFOTYPE, "")],
    ],
)
def test_a_forged_tar_writes_nothing_elsewhere(
    tmp_path: Path, members: list[tuple[str, bytes, str]]
) -> None:
    (tmp_path / "secret").write_text("")
    with pytest.raises((WorkspaceError, OSError)):
        unpacked(forged(*members), tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "secret"]
    left = [path for path in (tmp_path / "copy").iterdir() if not path.is_symlink()]
    assert left == []


# spec FL10
def test_half_a_tar_is_refused(tmp_path: Path) -> None:
    top = tmp_path / "base"
    top.mkdir()
    (top / "file").write_bytes(bytes(5000))
    with pytest.raises(WorkspaceError, match="cannot unpack"):
        unpacked(packed(top)[:2500], tmp_path / "copy")


# spec FL10
def test_a_layer_has_the_owners_and_the_directories_of_its_base(tmp_path: Path) -> None:
    base, upper = tmp_path / "base", tmp_path / "upper"
    (base / "src").mkdir(parents=True)
    upper.mkdir()
    (base / "src").chmod(0o750)
    (base / "src" / "old").write_text("")
    if os.geteuid() == 0:
        os.chown(base, 1234, 1235)
        os.chown(base / "src" / "old", 1236, 1237)
    names = ("src/.wh.gone", "src/new", "src/old")
    layer = forged(*((name, tarfile.REGTYPE, "") for name in names))
    fds = [os.open(path, os.O_RDONLY) for path in (upper, base)]
    try:
        paths = unpack_layer(io.BytesIO(layer), *fds)
    finally:
        for fd in fds:
            os.close(fd)
    assert paths == [b"src/new", b"src/old"]
    assert stat.S_IMODE((upper / "src").stat().st_mode) == 0o750
    gone = (upper / "src" / "gone").lstat()
    assert (stat.S_ISCHR(gone.st_mode), gone.st_rdev) == (True, 0)
    if os.geteuid() == 0:
        owners = [(upper / "src" / name).lstat() for name in ("new", "old")]
        found = [(one.st_uid, one.st_gid) for one in owners]
        assert found == [(1234, 1235), (1236, 1237)]


# spec FL10
def test_a_layer_whose_directory_is_gone_in_the_base_is_refused(tmp_path: Path) -> None:
    layer = forged(("src/new", tarfile.REGTYPE, ""))
    (tmp_path / "upper").mkdir()
    (tmp_path / "base").mkdir()
    fds = [os.open(tmp_path / name, os.O_RDONLY) for name in ("upper", "base")]
    try:
        with pytest.raises(WorkspaceError, match="'src': the base has no such dir"):
            unpack_layer(io.BytesIO(layer), *fds)
    finally:
        for fd in fds:
            os.close(fd)
