"""A launchpad whose user has used up the watches of epoll(7).

A start fails, no more.

Their number counts per user, and a child of a host that is not root is of its user.
"""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hostlib.linux import processes
from supervisor.spawn.launchpad import wire
from tests.helpers.command import TIMEOUT_S, read_until
from tests.supervisor.spawn.test_launchpad import Pad, pad

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing"),
]

__all__ = ["pad"]


@contextmanager
def no_watch(pid: int) -> Iterator[None]:
    """Let the next epoll_ctl(2) of a process fail, as where no watch is left."""
    inject = ("-e", "trace=epoll_ctl", "-e", "inject=epoll_ctl:error=ENOSPC:when=1")
    words = ("strace", "-p", str(pid), *inject, "-o", os.devnull)
    with subprocess.Popen(words, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            said = read_until(process.stderr.fileno(), b"\n")
            if b"attached" not in said:
                pytest.skip(f"cannot trace: {said.decode().strip()}")
            yield
        finally:
            process.terminate()
            process.communicate(timeout=TIMEOUT_S)


def run(pad: Pad, ident: int, layers: dict[str, object]) -> None:
    """Run a child to its end, when nothing is left of it nor of any before it."""
    pad.spawn(ident, b"/bin/true", layers=layers)
    _, pidfd = pad.born()
    os.close(pidfd)
    kinds = [pad.answer()[0][0] for _ in range(2)]
    assert kinds == [wire.EXITED, wire.SWEPT]


# attack 18, spec S5: it is one start that failed, and nothing is left of it.
def test_a_start_that_nobody_would_hear_of_fails_alone(pad: Pad) -> None:
    # Orders of three kinds: of one that comes twice, a child would wait in stock.
    run(pad, 1, {})
    held = len(os.listdir(f"/proc/{pad.pid}/fd"))
    with no_watch(pad.pid):
        pad.spawn(2, b"/bin/sleep", b"1000", layers={"no_new_privs": None})
        (*failed, detail), fds = pad.answer()
    assert (failed, fds) == ([wire.FAILED, 2, errno.ENOSPC, "fork"], [])
    run(pad, 3, {"capabilities": None})
    assert processes.children_of(pad.pid) == []
    assert len(os.listdir(f"/proc/{pad.pid}/fd")) == held
    assert b"raise sysctl fs.epoll.max_user_watches" in detail
