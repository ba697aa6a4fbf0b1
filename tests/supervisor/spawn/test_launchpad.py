"""The launchpad alone, spoken to as the host does, without Trio.

Starts and ends of children are tested through the launcher, in
`test_launcher.py` and `test_launcher_ends.py`; here is what the launcher hides: the
order of messages, a host that does not read, requests that are none, and idleness.
"""

import ctypes
import errno
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostlib.linux.syscalls import PR_SET_CHILD_SUBREAPER, prctl
from supervisor.spawn.launchpad import wire
from supervisor.spawn.launchpad.start import LaunchpadProcess, start_launchpad

pytestmark = pytest.mark.slow

CANARY = "a key of the host"

Message = tuple[Any, ...]

# No answer of a launchpad takes so long, however busy the machine is.
PATIENCE_S = 30.0


class Pad:
    """A launchpad, and the host's end of its socket."""

    def __init__(self, process: LaunchpadProcess) -> None:
        self.pid = process.pid
        self.pidfd = process.pidfd
        self.control = process.control
        self.null = os.open(os.devnull, os.O_RDWR)
        self.cwd = os.open("/", os.O_RDONLY | os.O_DIRECTORY)

    def ask(self, message: Message, fds: list[int]) -> None:
        """Send, however long the launchpad takes to make room."""
        while True:
            try:
                wire.send_message(self.control, message, fds)
            except BlockingIOError:
                assert select.select([], [self.control], [], PATIENCE_S)[1]
            else:
                return

    def spawn(
        self, ident: int, *argv: bytes, layers: dict[str, object] | None = None
    ) -> None:
        """Ask for a child with the null device as 0, 1 and 2."""
        message: Message = (
            wire.SPAWN,
            ident,
            argv[0],
            argv,
            {},
            (0, 1, 2),
            (),
            None,
            layers or {},
        )
        self.ask(message, [self.cwd, self.null, self.null, self.null])

    def answer(self) -> tuple[Message, list[int]]:
        """The next message and its descriptors."""
        assert select.select([self.control], [], [], PATIENCE_S)[0]
        received = wire.receive_message(self.control)
        assert received is not None
        return received

    def born(self) -> tuple[int, int]:
        """The next message, which is SPAWNED: pid and pidfd."""
        (kind, _, pid, *_), fds = self.answer()
        assert kind == wire.SPAWNED
        (pidfd,) = fds
        return pid, pidfd

    def end(self) -> os.waitid_result | None:
        """Close the socket and wait for the end of the launchpad."""
        self.control.close()
        assert select.select([self.pidfd], [], [], PATIENCE_S)[0]
        return os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)


@pytest.fixture
def pad(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pad]:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    pad = Pad(start_launchpad())
    yield pad
    if pad.control.fileno() >= 0:
        pad.end()
    for fd in (pad.pidfd, pad.null, pad.cwd):
        os.close(fd)
    prctl(PR_SET_CHILD_SUBREAPER, 0)  # `start_launchpad` made the test process one


def is_over(pidfd: int) -> bool:
    """Whether the process behind it has ended."""
    return bool(select.select([pidfd], [], [], 0)[0])


# ---------------------------------------------------------------- the deadline


def boot_s() -> float:
    """CLOCK_BOOTTIME."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def arm(pad: Pad, deadline_s: float) -> None:
    """Arm the launchpad's timer, and hear that it is."""
    pad.ask((wire.ARM, 900, int(deadline_s * 1e9)), [])
    assert pad.answer() == ((wire.ARMED, 900), [])


def reap(*pidfds: int) -> None:
    """Wait for processes that came to this one when their launchpad had ended."""
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)


# spec FL6: the launchpad and its children are stopped, and nobody wakes them.
def test_a_deadline_ends_a_stopped_launchpad_and_its_stopped_children(pad: Pad) -> None:
    pad.spawn(1, b"/bin/sleep", b"600")
    _, child = pad.born()
    arm(pad, boot_s() + 0.2)
    for pidfd in (child, pad.pidfd):
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    for pidfd in (pad.pidfd, child):
        assert select.select([pidfd], [], [], PATIENCE_S)[0]
    ended = os.waitid(os.P_PIDFD, pad.pidfd, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    assert ended.si_status == signal.SIGKILL
    reap(child)


# spec FL6: what detached itself in a pid namespace ends with it.
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a pid namespace as root")
def test_a_deadline_ends_what_detached_itself_in_its_namespace(pad: Pad) -> None:
    ours, theirs = os.pipe()
    script = b"setsid sh -c 'echo $$; exec sleep 600' & sleep 600"
    layers: dict[str, object] = {"pidns": ()}
    argv = (b"sh", b"-c", script)
    body: Message = (b"/bin/sh", argv, {}, (0, 1, 2), (), None, layers)
    pad.ask((wire.SPAWN, 1, *body), [pad.cwd, pad.null, theirs, pad.null])
    os.close(theirs)
    (kind, *_, init), (child,) = pad.answer()
    assert kind == wire.SPAWNED
    init = os.pidfd_open(init)
    assert os.read(ours, 16)
    arm(pad, boot_s() + 0.2)
    for pidfd in (child, pad.pidfd):
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    # The pipe ends when the last that has it has.
    assert select.select([ours], [], [], PATIENCE_S)[0]
    assert os.read(ours, 16) == b""
    os.close(ours)
    reap(child, init)


# spec FL5, FL6: each renewal replaces the deadline before.
def test_a_later_deadline_replaces_the_one_before(pad: Pad) -> None:
    near_s = boot_s() + 0.3
    arm(pad, near_s)
    arm(pad, near_s + 3600)
    while boot_s() < near_s + 0.1:
        time.sleep(0.02)
    pad.ask((wire.LIST, 7), [])
    assert pad.answer()[0][:2] == (wire.LISTED, 7)
    assert not is_over(pad.pidfd)


# spec FL6
def test_a_deadline_that_has_passed_ends_the_launchpad_at_once(pad: Pad) -> None:
    pad.ask((wire.ARM, 900, int((boot_s() - 5) * 1e9)), [])
    assert select.select([pad.pidfd], [], [], PATIENCE_S)[0]


# ---------------------------------------------------------------- messages


def test_the_pidfd_is_the_childs_even_if_it_is_long_gone(pad: Pad) -> None:
    for ident in range(20):
        pad.spawn(ident, b"/bin/true")
    born = {}
    ended = []
    swept: set[int] = set()
    while len(swept) < 20:  # the host looks when all of it is over
        (kind, ident, *_), fds = pad.answer()
        if kind == wire.SPAWNED:
            (born[ident],) = fds
        elif kind == wire.EXITED:
            assert ident in born, "an exit was told before the birth"
            ended.append(ident)
        else:
            assert set(ident) <= set(ended), "swept before its exit was told"
            swept.update(ident)
    assert sorted(born) == sorted(ended) == list(range(20))
    for pidfd in born.values():
        assert is_over(pidfd)
        with pytest.raises(ProcessLookupError):  # reaped, and nobody else's
            signal.pidfd_send_signal(pidfd, 0)
        os.close(pidfd)


# spec S5: a host that does not read stalls nothing
def test_a_host_that_does_not_read_stalls_no_child(pad: Pad) -> None:
    ours, theirs = os.pipe()
    for ident in range(300):  # some 900 answers: more than the socket holds
        program = (b"/bin/true", (b"true",))
        message: Message = (wire.SPAWN, ident, *program, {}, (7,), (), None, {})
        pad.ask(message, [pad.cwd, theirs])
    os.close(theirs)
    # All have run to their end before the first answer is read.
    assert select.select([ours], [], [], PATIENCE_S)[0]
    assert os.read(ours, 1) == b""
    os.close(ours)
    born: set[int] = set()
    ended: set[int] = set()
    swept: set[int] = set()
    while len(swept) < 300:
        (kind, ident, *_), fds = pad.answer()
        if kind == wire.SPAWNED:
            born.add(ident)
            os.close(*fds)
        elif kind == wire.EXITED:
            ended.add(ident)
        else:
            swept.update(ident)
    assert born == ended == swept == set(range(300))


# <linux/ptrace.h>
PTRACE_SEIZE = 0x4206


def trace(pid: int) -> None:
    """Trace a process: killed, it is not gone before this process has waited for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long,) * 4
    assert libc.ptrace(PTRACE_SEIZE, pid, 0, 0) == 0, os.strerror(ctypes.get_errno())


# spec S5: nothing of one child's delays the end of another.
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a pid namespace as root")
def test_what_cannot_end_delays_the_end_of_its_own_child_alone(pad: Pad) -> None:
    inits, pidfds = [], []
    for ident in (1, 2):
        pad.spawn(ident, b"/bin/sleep", b"600", layers={"pidns": None})
        (kind, *_, init), (pidfd,) = pad.answer()
        assert kind == wire.SPAWNED
        inits.append(init)
        pidfds.append(pidfd)
    pad.spawn(3, b"/bin/sleep", b"600")
    pidfds.append(pad.born()[1])
    trace(inits[0])
    told = []
    for pidfd in pidfds:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        told.append(pad.answer()[0][:2])
        os.close(pidfd)
        if pidfd != pidfds[0]:
            told.append(pad.answer()[0][:2])
    ended = [(wire.EXITED, ident) for ident in (1, 2, 3)]
    swept = [(wire.SWEPT, [ident]) for ident in (2, 3)]
    assert told == [ended[0], ended[1], swept[0], ended[2], swept[1]]
    os.waitpid(inits[0], 0)
    assert pad.answer()[0][:2] == (wire.SWEPT, [1])


@pytest.mark.parametrize(
    ("message", "number", "stage"),
    [
        ((99, 5), errno.EINVAL, "request"),
        ((wire.SPAWN, 5, b"/bin/true"), errno.EINVAL, "request"),
        (
            (wire.SPAWN, 5, b"/bin/true", (b"true",), {}, (0,), (), None, {}, {"x": 1}),
            errno.EINVAL,
            "request",
        ),
        (
            (wire.SPAWN, 5, b"/bin/true", (b"true",), {}, (0, 1), (), None, {}),
            errno.EMFILE,
            "fork",
        ),
    ],
)
def test_a_request_that_is_none_is_an_answer_and_no_end(
    pad: Pad, message: Message, number: int, stage: str
) -> None:
    pad.ask(message, [pad.cwd, pad.null])
    assert pad.answer() == ((wire.FAILED, 5, number, stage, b""), [])
    pad.spawn(6, b"/bin/true")
    _, pidfd = pad.born()
    os.close(pidfd)


def test_a_signal_for_nobody_is_no_error(pad: Pad) -> None:
    pad.ask((wire.SIGNAL, 77, 9), [])
    pad.spawn(1, b"/bin/true")
    _, pidfd = pad.born()
    os.close(pidfd)


# ---------------------------------------------------------------- the process


def test_the_end_of_the_host_is_the_end_of_all(pad: Pad) -> None:
    pidfds = []
    for ident in range(50):
        pad.spawn(ident, b"/bin/sleep", b"1000")
        pidfds.append(pad.born()[1])
    for pidfd in pidfds[::2]:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
    ended = pad.end()
    assert ended is not None
    assert (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)
    assert all(is_over(pidfd) for pidfd in pidfds)  # not soon: it waited for them
    for pidfd in pidfds:
        os.close(pidfd)


# A change of the user undoes what ties them together (prctl(2), PR_SET_PDEATHSIG).
@pytest.mark.parametrize("layer", [None, "no_new_privs", "uid"])
def test_a_killed_launchpad_takes_its_children_along(
    pad: Pad, layer: str | None
) -> None:
    if layer == "uid" and os.geteuid() != 0:
        pytest.skip("only root gives users")
    layers: dict[str, object] = {} if layer is None else {layer: None}
    if layer == "uid":
        layers[layer] = 1 << 29
    # By the kernel, at once, and also when no host is left to end them.
    pad.spawn(1, b"/bin/sleep", b"1000", layers=layers)
    _, pidfd = pad.born()
    signal.pidfd_send_signal(pad.pidfd, signal.SIGKILL)
    assert select.select([pidfd], [], [], PATIENCE_S)[0]
    # Both are children of the test process by now: no zombie is to be left.
    ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    assert ended is not None
    assert (ended.si_code, ended.si_status) == (os.CLD_KILLED, signal.SIGKILL)
    os.close(pidfd)


# security: a child runs in all that its order names, or not at all.
def test_a_layer_that_no_step_puts_on_keeps_the_program_from_running(
    pad: Pad, tmp_path: Path
) -> None:
    made = str(tmp_path / "made").encode()
    layers: dict[str, object] = {"no_new_privs": None, "forgotten": None}
    pad.spawn(1, b"/usr/bin/touch", made, layers=layers)
    (kind, _, *why), _ = pad.answer()
    assert kind == wire.FAILED
    assert why[:2] == [errno.EBADMSG, "forgotten"]
    assert os.listdir(tmp_path) == []


def test_it_holds_nothing_of_its_host(pad: Pad) -> None:
    pad.spawn(1, b"/bin/true")
    os.close(pad.born()[1])
    assert [pad.answer()[0][0] for _ in range(2)] == [wire.EXITED, wire.SWEPT]
    proc = Path(f"/proc/{pad.pid}")
    held = {int(fd.name): str(fd.readlink()) for fd in (proc / "fd").iterdir()}
    kinds = sorted(target.partition("[")[0] for target in held.values())
    assert held[0] == held[1] == os.devnull
    assert kinds.count("socket:") == 1
    assert kinds.count("anon_inode:") == 2  # its epoll, and what tells of deaths
    # And stderr, the list of its children, and the table of mounts: to wake, and to ask.
    assert str(proc / "task" / str(pad.pid) / "children") in held.values()
    assert list(held.values()).count(str(proc / "mountinfo")) == 2
    assert len(held) == 9, held
    # attack 24: the environment of a process can be read by all of the same user
    assert CANARY.encode() not in (proc / "environ").read_bytes()
    assert (proc / "cwd").readlink() == Path("/")
    assert os.getsid(pad.pid) == pad.pid
    assert (proc / "comm").read_text() == "sandhost-pad\n"


def test_it_sleeps_while_nothing_happens(pad: Pad) -> None:
    pad.spawn(1, b"/bin/sleep", b"1000")
    _, pidfd = pad.born()
    before = wake_ups(pad.pid)
    # Not to wait for something: this is the time in which nothing is to happen.
    assert not select.select([pad.control], [], [], 0.3)[0]
    assert wake_ups(pad.pid) - before <= 1  # it may have been on its way to sleep
    os.close(pidfd)


def wake_ups(pid: int) -> int:
    """How often a process went to sleep so far."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
