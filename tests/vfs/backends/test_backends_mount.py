"""A mount as a directory: new files and rights there are the child's."""

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.trees import (
    CHILD,
    OPERATOR,
    content,
    mounted,
    names,
    opened,
    put,
    swapped_users,
)
from vfs.backends import HostDirectory, MountDirectory
from vfs.backends.fsuser import act_as
from vfs.errors import AccessDeniedError
from vfs.mounts import mount_of
from vfs.places import Place

__all__ = ["swapped_users"]

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="it takes root to hold such a mount"
)


@pytest.fixture
def mount(
    tmp_path: Path, swapped_users: int, no_leaks: None
) -> Iterator[MountDirectory]:
    del no_leaks
    made = mounted(tmp_path, swapped_users)
    yield made
    made.close()


def acting_now() -> tuple[int, int, list[int]]:
    """Return this thread's user, group and other groups for files."""
    with open(f"/proc/self/task/{threading.get_native_id()}/status") as lines:
        found = dict(line.split(":", 1) for line in lines)
    numbers = [int(found[name].split()[3]) for name in ("Uid", "Gid")]
    return numbers[0], numbers[1], [int(one) for one in found["Groups"].split()]


# spec WS3
@pytest.mark.parametrize("staged", [False, True])
def test_what_is_made_is_the_operators_on_the_disk(
    mount: MountDirectory, tmp_path: Path, staged: bool
) -> None:
    for _ in range(2):  # new, and in the place of another
        handle = opened(mount, b"a", b"w", staged=staged)
        handle.pwrite(b"new", 0)
        handle.publish(durable=False)
        handle.close()
    mount.make_directory(b"d")
    mount.rename(b"a", mount, b"d/b")
    assert content(mount, b"d/b") == b"new"
    for name in ("d", "d/b"):
        status = (tmp_path / "own/upper" / name).stat()
        assert (status.st_uid, status.st_gid) == (OPERATOR, OPERATOR)
    assert names(mount) == [b"d"]
    assert mount.remove(b"d/b").was_last


def test_a_thread_is_the_host_again_after_each_call(mount: MountDirectory) -> None:
    os.setgroups([4, 27])
    try:
        before = acting_now()
        assert before == (0, 0, [4, 27])
        with act_as(CHILD):
            assert acting_now() == (CHILD, CHILD, [])
            with act_as(CHILD):
                pass
            assert acting_now() == (CHILD, CHILD, [])
            seen: list[object] = []
            other = threading.Thread(target=lambda: seen.append(os.geteuid()))
            other.start()
            other.join()
        assert acting_now() == before
        with pytest.raises(AccessDeniedError):
            put(mount, b"../x", b"")
        with pytest.raises(FileNotFoundError):
            mount.remove(b"none")
        assert acting_now() == before
    finally:
        os.setgroups([])


# spec WS3: by modes, as for the child's own system calls; groups of the host do not count.
def test_what_is_others_in_the_base_stays_theirs(
    mount: MountDirectory, tmp_path: Path
) -> None:
    theirs = tmp_path / "base/theirs"
    theirs.write_text("theirs")
    theirs.chmod(0o660)
    os.setgroups([0])
    try:
        for word in (b"r", b"r+", b"a"):
            with pytest.raises(PermissionError):
                opened(mount, b"theirs", word)
    finally:
        os.setgroups([])
    (tmp_path / "base/closed").mkdir(mode=0o755)
    for name in (b"closed/x", b"closed/y"):
        with pytest.raises(PermissionError):
            put(mount, name, b"")
        with pytest.raises(PermissionError):
            mount.make_directory(name)


# attack 7: the host's writes leave the bits, so they go before.
def test_what_a_client_writes_of_others_is_no_set_user_id_program(
    mount: MountDirectory, tmp_path: Path
) -> None:
    program = tmp_path / "base/program"
    program.write_text("another one's")
    program.chmod(0o4777)
    handle = opened(mount, b"program", b"r+")
    handle.pwrite(b"mine", 0)
    handle.close()
    mode = os.stat("program", dir_fd=mount.dir_fd).st_mode
    assert stat.S_IMODE(mode) == 0o777


# attack 8: what the base has as a device is none for its child, by the door as well.
def test_a_device_node_of_the_base_is_not_opened(
    mount: MountDirectory, tmp_path: Path
) -> None:
    os.mknod(tmp_path / "base/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (tmp_path / "base/null").chmod(0o666)
    for word in (b"r", b"r+", b"w"):
        with pytest.raises(PermissionError):
            opened(mount, b"null", word)


# spec A4, WS2
def test_a_mount_in_the_mount_is_outside(tmp_path: Path) -> None:
    """RESOLVE_NO_XDEV, shown on /dev: a mount with others in it."""
    mount = MountDirectory(os.open("/dev", os.O_PATH), None)
    plain = HostDirectory(os.open("/dev", os.O_PATH))
    try:
        plain.list(b"shm", 100_000)
        with pytest.raises(AccessDeniedError):
            mount.list(b"shm", 100_000)
    finally:
        mount.close()
        plain.close()


def test_its_file_system_is_known_though_no_table_names_it(
    mount: MountDirectory,
) -> None:
    put(mount, b"a", b"")
    handle = opened(mount, b"a", b"r")
    assert (handle.mount.kind, handle.mount.is_distant) == ("overlay", False)
    assert not mount_of(mount.identity()[0], mount.dir_fd).is_proc
    handle.close()


# The next program of the host goes on with the same user.
def test_a_place_is_taken_over_with_its_user(
    mount: MountDirectory, tmp_path: Path
) -> None:
    place = Place(mount, (b"/base",), read=True, write=True, relative=b"")
    assert place.is_lasting
    again = Place.restore(place.snapshot())
    assert isinstance(again.backend, MountDirectory)
    assert again.is_lasting
    assert again.identity == place.identity
    put(again.backend, b"a", b"")
    assert (tmp_path / "own/upper/a").stat().st_uid == OPERATOR


def test_where_a_directory_lies_is_told(mount: MountDirectory) -> None:
    mount.make_directory(b"d")
    mount.make_directory(b"d/e")
    for name in (b".", b"d", b"d/e"):
        fd = mount.open_directory(name)
        assert mount.path_of(fd) == name.strip(b".")
        os.close(fd)
