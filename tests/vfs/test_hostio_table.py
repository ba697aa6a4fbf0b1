"""The facts of a mount, and when they are looked up again."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from hostlib.linux.mount_table import UNKNOWN, MountTable
from vfs import mounts
from vfs.backends import HostDirectory, host

MOUNTING = """
import os, subprocess, sys
sys.path.insert(0, {source!r})
from vfs import mounts
def mounted(*words):
    subprocess.run(["mount", *words, {place!r}], check=True)
    return os.stat({place!r}).st_dev
def kind(device):
    return mounts.mount_of(device).kind
disk = mounts.mount_of(os.stat({source!r}).st_dev)
number = mounted("-t", "tmpfs", "none")
print(kind(number), mounts.MOUNTS[number].is_asked_about)
subprocess.run(["umount", {place!r}], check=True)
print(kind(number))
print(kind(number) if mounted("-t", "proc", "none") == number else "proc")
print(mounts.mount_of(os.stat({source!r}).st_dev) is disk)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts without a user")
def test_what_is_known_of_a_number_is_looked_up_again_when_mounts_change(
    tmp_path: Path,
) -> None:
    source = str(Path(mounts.__file__).parents[1])
    program = MOUNTING.format(source=source, place=str(tmp_path))
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare:" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == "tmpfs True\nunknown\nproc\nTrue\n", done.stderr


HOLDING = """
import os, subprocess, sys
sys.path.insert(0, {source!r})
from vfs import mounts
from vfs.backends import HostDirectory, host
from vfs.places import open_place
def mounted(*words):
    subprocess.run(["mount", *words, {place!r}], check=True)
    return os.stat({place!r}).st_dev
def told():
    mount = mounts.MOUNTS[number]
    return mount.kind, mount.is_asked_about
number = mounted("-t", "tmpfs", "none")
places = [open_place({place!r}, read=True, write=True) for _ in range(2)]
print(*told())
subprocess.run(["umount", "-l", {place!r}], check=True)
mounts.mount_of(number)
print(*told())
for place in places:
    place.backend.close()
    print(*told())
print(mounts.mount_of(number).kind)
print(*told())
"""


# Its number cannot be another's: what is opened there does not ask.
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts without a user")
def test_a_number_is_believed_while_something_of_it_is_held(tmp_path: Path) -> None:
    source = str(Path(mounts.__file__).parents[1])
    program = HOLDING.format(source=source, place=str(tmp_path))
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare:" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == (
        "tmpfs False\ntmpfs False\ntmpfs False\ntmpfs True\nunknown\nunknown True\n"
    ), done.stderr


def test_what_was_believed_of_a_number_is_asked_before_it_is_held(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = tmp_path.stat().st_dev
    monkeypatch.setattr(mounts, "MOUNTS", {device: mounts.Mount("tmpfs")})
    monkeypatch.setattr(mounts, "held_devices", {})
    monkeypatch.setattr(mounts.mount_table, "has_changed", lambda: True)
    monkeypatch.setattr(mounts.mount_table, "kind_of", lambda *_: "proc")
    fd = os.open(tmp_path, os.O_PATH)
    try:
        assert mounts.hold_device(device, fd) is mounts.MOUNTS[device]
    finally:
        os.close(fd)
    assert mounts.MOUNTS[device].kind == "proc"
    assert not mounts.MOUNTS[device].is_asked_about


def test_two_threads_that_hold_a_directory_at_once_hold_it_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    backend = HostDirectory(os.open(tmp_path, os.O_PATH))
    device, _ = backend.identity()
    before = mounts.held_devices.get(device, 0)

    def other_thread_first(device: int, fd: int) -> mounts.Mount:
        monkeypatch.undo()
        backend.hold()
        return mounts.hold_device(device, fd)

    monkeypatch.setattr(host, "hold_device", other_thread_first)
    backend.hold()
    assert mounts.held_devices.get(device, 0) == before + 1
    backend.close()
    assert mounts.held_devices.get(device, 0) == before


def test_without_a_table_nothing_is_known_and_with_one_all_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = tmp_path.stat().st_dev
    monkeypatch.setattr(mounts, "MOUNTS", {})
    with monkeypatch.context() as without:
        refused = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        without.setattr(os, "open", Mock(side_effect=refused))
        table = MountTable()
        monkeypatch.setattr(mounts, "mount_table", table)
        assert mounts.mount_of(device).is_proc, "nobody knows"
        assert mounts.mount_table_descriptors() == ()
    assert mounts.mount_of(device).kind != UNKNOWN
    (held,) = mounts.mount_table_descriptors()
    assert not os.get_inheritable(held)
    os.close(held)


# A program that counts its descriptors counts this one from the beginning.
def test_the_table_is_held_from_the_beginning() -> None:
    (held,) = mounts.mount_table_descriptors()
    assert os.readlink(f"/proc/self/fd/{held}").endswith("/mountinfo")


TABLE = rb"""
1 0 8:1 / / rw - ext4 /dev/a rw
2 1 8:1 /srv/root /home/other\040name rw,noatime shared:1 master:2 - ext4 /dev/a rw
3 1 8:1 /srv/root/sub /part rw - ext4 /dev/a rw
4 1 8:1 / /all ro - ext4 /dev/a rw
5 1 8:1 /srv/root-evil /evil rw - ext4 /dev/a rw
6 1 8:2 / /srv/root/disk rw - ext4 /dev/b rw
7 1 8:2 /x /disk rw - ext4 /dev/b rw
8 1 0:20 / /srv/root/usr ro - tmpfs none rw
9 1 0:20 / /usr rw - tmpfs none rw
10 1 0:21 / /proc rw - proc proc rw
11 1 0:21 / /srv/root/proc rw - proc proc rw
12 1 8:3 / /mnt rw - ext4 /dev/c rw
13 1 8:3 /tree /srv/tree rw - ext4 /dev/c rw
bad line
14 1 0:22 net:[4026531833] /run/net rw - nsfs nsfs rw
15 1 0:23 / /no-source rw -  tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (
            "/srv/root",
            {"/home/other name", "/part", "/disk"},
        ),
        ("/home/other name", {"/srv/root", "/all/srv/root", "/part"}),
        ("/part", {"/srv/root/sub", "/home/other name/sub", "/all/srv/root/sub"}),
        (
            "/part/x",
            {"/srv/root/sub/x", "/home/other name/sub/x", "/all/srv/root/sub/x"},
        ),
        ("/srv/tree", {"/mnt/tree"}),
        ("/mnt/tree/x", {"/srv/tree/x"}),
        ("/no-source", set()),
    ],
)
def test_a_directory_has_the_names_that_mounts_give_it(
    monkeypatch: pytest.MonkeyPatch, path: str, names: set[str]
) -> None:
    table = MountTable()
    monkeypatch.setattr(table, "read", lambda: TABLE)
    # A file on a mount has the name, too, that it would have beneath that mount.
    assert table.other_names(path) - {f"/all{path}"} == names
    (held,) = table.descriptors()
    os.close(held)
