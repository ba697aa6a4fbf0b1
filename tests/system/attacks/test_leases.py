"""Files of the host that a child keeps others from opening, by leases.

A lease is granted to the owner of a file, and a child with a user of its own is shown as
the owner of what is root's in its working directory. Of a host that is not root a child
owns what its host owns.
"""

import ctypes
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hostlib import messages
from supervisor.sandbox.plan import make_profile
from tests.system.attacks.conftest import only
from tests.system.attacks.test_walls import Attacker, attacker

__all__ = ["attacker"]

pytestmark = only("auto")

INTERPRETER = os.path.realpath(sys.executable)

TAKING = """
import fcntl, signal
signal.signal(signal.SIGIO, signal.SIG_IGN)  # the kernel asks for a lease by that
SETLEASE, SETDELEG = 1024, 1040
is_x86 = os.uname().machine == 'x86_64'
def raw(fd, command):
    return call(72 if is_x86 else 25, fd, command, fcntl.F_WRLCK)
for name in sys.argv[1:]:
    fd = os.open(name, os.O_RDONLY)
    for kind in (fcntl.F_WRLCK, fcntl.F_RDLCK):
        print(attempt(lambda: fcntl.fcntl(fd, SETLEASE, kind)))
    for command in (SETLEASE, SETLEASE | 1 << 32, SETDELEG, SETDELEG | 7 << 32):
        print(raw(fd, command))
print(raw(os.open(os.path.dirname(sys.argv[1]), os.O_RDONLY), SETDELEG))
print('tried', flush=True)
time.sleep(60)
"""
"""Six tries for each file, and one for a directory; what was got is kept."""


def nobody_waits_for(path: str) -> bool:
    """Tell whether open(2) of a file goes through at once (open(2), O_NONBLOCK)."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except BlockingIOError:
        return False
    return True


@contextmanager
def leased(path: str) -> Iterator[None]:
    """Hold a lease on a file of one's own."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)


async def lines_of(fd: int, until: str) -> list[str]:
    """Return the lines that a program prints before one of them."""
    with os.fdopen(fd) as file:
        lines = iter(file.readline, "")
        return [line.strip() for line in iter(lines.__next__, f"{until}\n")]


# attack 41
async def test_no_file_is_kept_from_the_host(attacker: Attacker) -> None:
    note = attacker.stage.where / "cwd" / "note"
    note.write_text("somebody's work")
    files = (str(note), INTERPRETER, f"{sys.prefix}/pyvenv.cfg", messages.__file__)
    with leased(str(note)):  # so that this file system knows leases, and what is one
        assert not nobody_waits_for(str(note))
    child, ours = await attacker.start(TAKING, *files)
    said = await lines_of(ours, "tried")
    assert all(nobody_waits_for(path) for path in files)
    assert said == ["EPERM"] * (6 * len(files) + 1)
    assert child.exit is None  # so it would hold what it had got


OWNERS = """
import fcntl
for name in sys.argv[1:]:
    fd = os.open(name, os.O_RDONLY)
    is_own = os.fstat(fd).st_uid == os.getuid()
    print(is_own, attempt(lambda: fcntl.fcntl(fd, 1024, fcntl.F_WRLCK)))
"""


# attack 41: where no filter refuses it. A file that all may read need not be the child's
# own to be read; what only its owner may read has to be.
async def test_an_installation_of_everybodys_is_none_of_the_childs_own(
    attacker: Attacker, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("a child of whoever is not root has its host's own user")
    attacker.stage.sandbox = make_profile("users", ["uid", "mountns", "pidns"])
    files = (
        INTERPRETER,
        f"{sys.prefix}/pyvenv.cfg",
        ctypes.__file__,
        messages.__file__,
    )
    child, ours = await attacker.start(f"{OWNERS}\nprint('tried')", *files)
    assert "uid" in dict(child.walls.applied)
    assert await lines_of(ours, "tried") == ["False EACCES"] * len(files)


# spec face: COMMAND's installation is to be read, also where it is root's alone.
async def test_an_installation_of_roots_alone_is_shown_as_the_childs_own(
    attacker: Attacker, tmp_path: Path
) -> None:
    top = tmp_path / "private"
    for path, text in (
        (top / "bin" / "run", f"#!/bin/sh\nstat -c %u:%a {top}/lib; cat {top}/lib/x"),
        (top / "lib" / "x", "read"),
    ):
        path.parent.mkdir(parents=True, mode=0o700)
        path.write_text(text)
        path.chmod(0o700)
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    try:
        child = await attacker.stage.spawn(
            str(top / "bin" / "run"), stdio=(attacker.stage.null, theirs, 2)
        )
    finally:
        os.close(theirs)
    user = dict(child.walls.applied).get("uid", str(os.geteuid()))
    with os.fdopen(ours) as file:
        assert file.read().split() == [f"{user}:700", "read"]
