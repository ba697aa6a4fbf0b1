"""Word of the machine's mounts: no child gets older ones than its order."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.spawn.launchpad import wire
from tests.helpers.command import small_disk
from tests.helpers.spawning import ROOT
from tests.helpers.stage import eventually
from tests.helpers.stock import stock_of
from tests.supervisor.spawn.test_launchpad import Pad, pad

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts without a user"),
]

__all__ = ["pad"]


# In a mount namespace of its own: the launchpad never closes what hears of mounts.
PROGRAM = """
import select, sys
sys.path.insert(0, {source!r})
from hostlib.linux import mount_calls
from supervisor.spawn.launchpad.layers import namespaces
from supervisor.spawn.launchpad.setup import MountChanges
namespaces.enter("mountns")
mount_calls.mount(b"none", b"/", b"", mount_calls.MS_REC_PRIVATE, b"")
changes = MountChanges()
epoll = select.epoll()
epoll.register(changes.fd, select.EPOLLPRI)
epoll.poll(0)
changes.have_changed()
mount_calls.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, b"")
{hear}
print(changes.have_changed(), changes.have_changed())
"""


@pytest.mark.parametrize("hear", ["epoll.poll(0)", "select.select([epoll], (), (), 0)"])
def test_a_change_is_told_to_the_one_who_asks_after_it_woke_another(hear: str) -> None:
    program = PROGRAM.format(source=str(ROOT), hear=hear)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program],
        capture_output=True,
        check=False,
        text=True,
    )
    assert not done.stderr
    assert done.stdout == "True False\n"


def root_with(place: Path) -> dict[str, object]:
    """Return the layers of a child that sees the programs and a directory."""
    trees: list[tuple[bytes, str, bool]] = [(bytes(place), "read", False)]
    links = []
    for name in (b"/usr", b"/bin", b"/lib", b"/lib64"):
        if not os.path.lexists(name):
            continue
        if stat.S_ISLNK(os.lstat(name).st_mode):
            links.append((name, os.readlink(name)))
        else:
            trees.append((name, "execute", False))
    return {"mountns": (tuple(links), tuple(trees), b"/", (), b"")}


def status_of(pad: Pad, ident: int) -> int:
    """Return how the child ends whose order was sent last."""
    _, pidfd = pad.born()
    os.close(pidfd)
    (kind, number, status, *_), _ = pad.answer()
    assert (kind, number) == (wire.EXITED, ident)
    assert pad.answer()[0][0] == wire.SWEPT
    return int(status)


def stop(pad: Pad) -> None:
    """Stop a launchpad."""
    signal.pidfd_send_signal(pad.pidfd, signal.SIGSTOP)
    os.waitid(os.P_PIDFD, pad.pidfd, os.WSTOPPED)


# The kernel tells the launchpad of both at once, and the order stands first.
async def test_an_order_that_stands_before_the_word_of_a_mount_sees_it(
    pad: Pad, tmp_path: Path
) -> None:
    point = tmp_path / "small"
    point.mkdir()
    layers = root_with(point)
    argv = (b"/usr/bin/test", b"-e", bytes(point / "note"))
    for ident in (1, 2):
        pad.spawn(ident, *argv, layers=layers)
        assert status_of(pad, ident) == 1

    def waits() -> bool:
        return any(
            os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
            and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            == "S"
            for pid in stock_of(pad.pid)
        )

    await eventually(waits)
    stop(pad)
    pad.spawn(3, *argv, layers=layers)
    point.rmdir()
    with small_disk(tmp_path, "64k") as disk:
        (disk / "note").touch()
        signal.pidfd_send_signal(pad.pidfd, signal.SIGCONT)
        assert status_of(pad, 3) == 0
