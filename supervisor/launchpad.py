"""The launchpad: the small process that forks, reaps and ends every child of a host.

What it is: one single-threaded process per host. It forks children on request, tells
their end, kills whatever a dead child leaves behind, and when its host is gone kills
everything and exits. What it is not: no policy, no names, no timeouts, no logs; the
host's side is ``supervisor/launcher.py``.

Rules:
 1. Only this process waits for children, so the pid of an unreaped one is its own.
 2. Every child is a subreaper: what it daemonises stays beneath it while it lives and
    becomes a direct child of the launchpad when it dies. Hence every direct child that
    is not in ``_children`` is a leftover, and is killed until none is left.
 3. The exit of a child is reported before its leftovers are looked for.
 4. A child with a pid namespace is two direct children: it and the namespace's init,
    which is killed when the child has ended, and with it all that is left in there.
 5. Nothing ends the launchpad but the end of its host (EOF), and then only after the
    whole tree. If it is killed, the kernel kills its children (PR_SET_PDEATHSIG) and
    the host, a subreaper too, ends the rest.
 6. Nothing blocks: a reply the host does not take waits in a queue, an exec that hangs
    hangs alone. Without events the launchpad sleeps.
 7. Standard library only, in C where there is a choice (``_socket``, ``_signal``), and
    no ``json``: it starts in the time of a bare interpreter plus 4 ms.

Started by ``supervisor/launchpad_start.py`` as ``python -I -S -c BOOT`` with its control
socket (AF_UNIX, SOCK_SEQPACKET) as descriptor 0. Read next: ``launchpad_wire`` for the
messages, ``launchpad_child`` for what happens between fork and exec.
"""

from __future__ import annotations

# `signal` and `socket` import `enum` and `selectors`: 7 ms together.
import _signal  # type: ignore[import-not-found]
import _socket
import errno
import fcntl
import gc
import os
import select

from supervisor import (
    launchpad_child,
    launchpad_fork,
    launchpad_kernel,
    launchpad_owners,
    launchpad_wire,
    proctree,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    import resource
    from collections.abc import Sequence
    from types import FrameType

_NAME = b"sandhost-pad"

# <linux/wait.h>: also children that were cloned with another exit signal than SIGCHLD.
_WALL = 0x40000000

_CAUGHT_SIGNALS = frozenset(
    {
        _signal.SIGCHLD,
        _signal.SIGHUP,
        _signal.SIGINT,
        _signal.SIGQUIT,
        _signal.SIGTERM,
        _signal.SIGPIPE,
        _signal.SIGALRM,
        _signal.SIGUSR1,
        _signal.SIGUSR2,
    }
)

# Between two looks for what is to be killed: some 3 ms on an idle machine.
_REAPED_AT_ONCE = 1024

# A wake-up is one byte a signal; more than fit mean no more than one.
_WAKE_BYTES = 4096
# Groups of ended children that are remembered: a host removes them at once, and only one
# that is killed meanwhile leaves them.
_LEFT_GROUPS = 256


class _Child:
    """One child from its fork to its reaping.

    Attributes:
        ident: The host's number for it.
        pidfd: Held until SPAWNED carries it away, then -1.
        report: Where the forked child tells how it fares; -1 when that is known.
        heard: What it told so far.
        is_forking: It forks processes that are no leftovers, and is yet to say which.
        failed: It never became its program: the host has heard so.
        init: The init of its pid namespace; -1 for none.
    """

    __slots__ = (
        "create_time",
        "failed",
        "heard",
        "ident",
        "init",
        "is_forking",
        "pid",
        "pidfd",
        "report",
    )

    def __init__(self, ident: int, pid: int, report: int) -> None:
        self.ident = ident
        self.report = report
        self.heard = b""
        self.is_forking = False
        self.failed = False
        self.init = -1
        self.pidfd = -1
        self.is_now(pid)

    def is_now(self, pid: int) -> None:
        """Take note of the process that is to become the program.

        Raises:
            OSError: It is not there; nothing was noted.
        """
        create_time = _create_time(pid)
        # Before any wait: the pid still names this process, be it dead already.
        pidfd = os.pidfd_open(pid)
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pid, self.create_time, self.pidfd = pid, create_time, pidfd


class _Launchpad:
    """The tables of one launchpad and its loop."""

    def __init__(self, control: _socket.socket) -> None:
        self._control = control
        self._pid = os.getpid()
        self._children: dict[int, _Child] = {}  # by pid, until reaped
        self._pids: dict[int, int] = {}  # id -> pid, of the same children
        self._starting: dict[int, _Child] = {}  # by report, until exec or failure
        self._inits: set[int] = set()  # of pid namespaces whose child is there
        self._killed: set[int] = set()  # leftovers that are dying, until reaped
        self._groups: dict[int, tuple[bytes, ...]] = {}  # by id, of children that live
        self._left_groups: list[bytes] = []  # of the last ones that ended
        self._unswept: list[int] = []  # ids that ended since nothing was left
        self._buried = 0  # leftovers reaped since then
        self._outbox: list[tuple[tuple[object, ...], int]] = []
        self._has_more_to_do = False  # somebody may be dead, or about to be killed
        self._is_blocked = False  # the host does not take replies at the moment
        self._host_is_there = True
        self._namespaces = launchpad_fork.PidNamespaces()
        self._wake = _wake_at_signals()
        self._epoll = select.epoll()
        self._epoll.register(control.fileno(), select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN)

    def run(self) -> None:
        """Serve the host until it is gone, then end every process beneath this one."""
        try:
            while self._host_is_there:
                for fd, events in self._epoll.poll(0 if self._has_more_to_do else None):
                    self._serve(fd, events)
                if self._has_more_to_do:
                    self._tidy()
        finally:
            self._end_everything()

    def _serve(self, fd: int, events: int) -> None:
        if fd == self._wake:
            os.read(self._wake, _WAKE_BYTES)
            self._has_more_to_do = True
        elif fd != self._control.fileno():
            if child := self._starting.get(fd):
                self._hear(child)
        elif events & (select.EPOLLHUP | select.EPOLLERR):
            self._host_is_there = False  # whatever it still asked for
        else:
            if events & select.EPOLLOUT:
                self._flush()
            if events & select.EPOLLIN:
                self._serve_request()

    # ------------------------------------------------------------ requests

    def _serve_request(self) -> None:
        try:
            received = launchpad_wire.receive_message(self._control)
        except BlockingIOError:
            return
        if received is None:
            self._host_is_there = False
            return
        (kind, ident, *body), fds = received
        try:
            if kind == launchpad_wire.SPAWN:
                self._spawn(ident, launchpad_child.Order(tuple(body), fds))
            elif kind == launchpad_wire.SIGNAL:
                self._signal(ident, *body)
            else:
                self._fail(ident, errno.EINVAL, "request")
        except ValueError:
            self._fail(ident, errno.EINVAL, "request")
        except OSError as error:  # no process, no pipe, no memory to be had
            self._fail(ident, error.errno or errno.EIO, "fork")
        finally:
            for fd in fds:
                os.close(fd)

    def _spawn(self, ident: int, order: launchpad_child.Order) -> None:
        stage = "fork"
        try:
            self._namespaces.come_back()  # should it have failed the last time
            if "uid" in order.layers and "mountns" in order.layers:
                stage = "uid"
                order.owners = launchpad_owners.owners_of(order.layers["uid"])
            if "pidns" in order.layers and "userns" not in order.layers:
                stage = "pidns"
                self._namespaces.make()
        except OSError as error:
            self._fail(ident, error.errno or errno.EIO, stage)
            return
        pid, ours = self._fork(order)
        try:
            child = _Child(ident, pid, ours)
        except OSError:
            os.close(ours)
            self._sweep()  # nobody knows it: a leftover
            raise
        self._children[pid] = child
        self._pids[ident] = pid
        self._starting[ours] = child
        groups = order.layers.get("cgroup", ())
        if groups:
            self._groups[ident] = tuple(directory for directory, _ in groups)
        if order.init >= 0:
            child.init = order.init
            self._inits.add(order.init)
        self._epoll.register(ours, select.EPOLLIN)

    def _fork(self, order: launchpad_child.Order) -> tuple[int, int]:
        """Fork what becomes the child; return its pid and where it reports."""
        order.group = _open_group(order)
        try:
            ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                order.init = self._namespaces.fork_init()
                # Within a user namespace it forks once more, and joins then.
                into = -1 if "userns" in order.layers else order.group
                pid, order.is_in_group = launchpad_fork.fork_into(into)
                if pid == 0:
                    launchpad_child.become(order, self._pid, theirs)
            except OSError:
                os.close(ours)
                self._sweep()  # of an init that nobody knows
                raise
            finally:
                os.close(theirs)
        finally:
            if order.group >= 0:
                os.close(order.group)
            self._namespaces.come_back()
        return pid, ours

    def _hear(self, child: _Child) -> None:
        """Take in what a starting child tells; at the end of that, tell the host."""
        try:
            told = os.read(child.report, launchpad_child.REPORT_BYTES)
        except BlockingIOError:
            return
        if not told:
            self._conclude_start(child)
            return
        child.heard += told
        for kind, *rest in launchpad_child.reports(told):
            if kind == launchpad_child.FORKING:
                child.is_forking = True
            elif kind == launchpad_child.BECAME:
                self._rename(child, *rest)

    def _rename(self, child: _Child, pid: int, init: int) -> None:
        """Take note that a child goes on in another process, in a pid namespace."""
        child.is_forking = False
        before = child.pid
        try:
            child.is_now(pid)
        except OSError:  # killed by another, and reaped, before anybody knew it
            failed = (launchpad_child.FAILED, errno.ECANCELED, "fork", b"")
            child.heard += launchpad_child.frame(*failed)
            return
        del self._children[before]
        child.init = init
        self._children[pid] = child
        self._pids[child.ident] = pid
        self._inits.add(init)
        self._has_more_to_do = True  # the sweep waited for this

    def _conclude_start(self, child: _Child) -> None:
        """Tell the host whether the exec succeeded, now that it is known."""
        # By hand: the copy in a forked child that has not exec'd keeps it in the epoll.
        self._epoll.unregister(child.report)
        os.close(child.report)
        del self._starting[child.report]
        child.report = -1
        pidfd, child.pidfd = child.pidfd, -1
        applied: tuple[object, ...] = ()
        for kind, *rest in launchpad_child.reports(child.heard):
            if kind == launchpad_child.FAILED:
                os.close(pidfd)
                child.failed = True
                self._fail(child.ident, *rest)
                return
            if kind == launchpad_child.APPLIED:
                (applied,) = rest
        born = (child.ident, child.pid, child.create_time, applied, child.init)
        self._reply((launchpad_wire.SPAWNED, *born), pidfd)

    def _signal(self, ident: int, signal: int) -> None:
        """Signal a child and all beneath it; nothing if it has ended meanwhile."""
        pid = self._pids.get(ident)
        if pid is None:
            return
        if signal == _signal.SIGKILL:
            proctree.kill_children((pid,))  # what it leaves is killed after it
        else:
            proctree.signal_trees(self._pid, (pid,), signal)

    # ------------------------------------------------------------ replies

    def _fail(self, ident: int, number: int, stage: str, detail: bytes = b"") -> None:
        self._reply((launchpad_wire.FAILED, ident, number, stage, detail))

    def _reply(self, message: tuple[object, ...], pidfd: int = -1) -> None:
        """Queue a message with the pidfd it carries away, and send what can be sent."""
        self._outbox.append((message, pidfd))
        if not self._is_blocked:
            self._flush()

    def _flush(self) -> None:
        sent = 0
        was_blocked, self._is_blocked = self._is_blocked, False
        try:
            for message, pidfd in self._outbox:
                if self._host_is_there:
                    fds: Sequence[int] = () if pidfd < 0 else (pidfd,)
                    launchpad_wire.send_message(self._control, message, fds)
                if pidfd >= 0:
                    os.close(pidfd)
                sent += 1
        except BlockingIOError:
            self._is_blocked = True
        except (BrokenPipeError, ConnectionResetError):
            self._host_is_there = False
        del self._outbox[:sent]
        if self._is_blocked != was_blocked:
            out = select.EPOLLOUT if self._is_blocked else 0
            self._epoll.modify(self._control.fileno(), select.EPOLLIN | out)

    # ------------------------------------------------------------ ends

    def _tidy(self) -> None:
        """Reap some of the dead, and kill what they left.

        In turns, and not to the end of either: processes that fork and exit for ever
        die as fast as they are reaped, and only a kill stops them.
        """
        self._has_more_to_do = self._reap()
        self._has_more_to_do |= self._sweep()

    def _reap(self) -> bool:
        """Wait for what has died; whether there may be more of it."""
        for _ in range(_REAPED_AT_ONCE):
            try:
                how = os.WEXITED | os.WNOHANG | os.WNOWAIT | _WALL
                dead = os.waitid(os.P_ALL, 0, how)
            except ChildProcessError:
                return False
            if dead is None:
                return False
            # While the dead still have their numbers: one may be the child that
            # another process became, and told of before it ended.
            for starting in tuple(self._starting.values()):
                self._hear(starting)
            pid, status, usage = os.wait4(dead.si_pid, _WALL)
            child = self._children.pop(pid, None)
            if child is None:
                self._killed.discard(pid)
                self._buried += 1
            else:
                self._bury(child, status, usage)
        return True

    def _bury(self, child: _Child, status: int, usage: resource.struct_rusage) -> None:
        del self._pids[child.ident]
        self._left_groups += self._groups.pop(child.ident, ())
        del self._left_groups[:-_LEFT_GROUPS]
        self._inits.discard(child.init)  # a leftover, as all that is in its namespace
        if child.report >= 0:
            self._hear(child)
        if child.report >= 0:  # it is dead: all is told that will ever be
            self._conclude_start(child)
        if child.failed:
            return
        code = os.waitstatus_to_exitcode(status)
        self._reply(
            (
                launchpad_wire.EXITED,
                child.ident,
                code if code >= 0 else None,
                -code if code < 0 else None,
                usage.ru_utime,
                usage.ru_stime,
                usage.ru_maxrss,
            )
        )
        self._unswept.append(child.ident)

    def _sweep(self) -> bool:
        """Kill what dead children left; whether there was something to kill.

        Only direct children are killed, as fast as they can be listed. What stands
        beneath them comes here when they die, which is the next SIGCHLD.
        """
        children = proctree.children_of(self._pid)
        # After the list was read: who stands on it and is no leftover was announced.
        for child in tuple(self._starting.values()):
            self._hear(child)
            if child.is_forking:
                return False  # until it says whom it forked
        known = self._children.keys() | self._inits
        leftovers = [pid for pid in children if pid not in known]
        fresh = [pid for pid in leftovers if pid not in self._killed]
        proctree.kill_children(fresh)
        self._killed.update(fresh)
        if self._unswept and not leftovers:
            self._reply((launchpad_wire.SWEPT, self._unswept, self._buried))
            self._unswept, self._buried = [], 0
        return bool(fresh)

    def _end_everything(self) -> None:
        """Kill every process beneath this one, and return when none is left."""
        self._host_is_there = False
        self._children.clear()
        self._starting.clear()
        self._inits.clear()
        self._flush()  # gives the queued descriptors back
        while True:
            self._tidy()
            if not _has_children():
                break
            if not self._has_more_to_do:
                os.read(self._wake, _WAKE_BYTES)
        for groups in (*self._groups.values(), self._left_groups):
            for directory in groups:
                try:
                    os.rmdir(directory)
                except OSError:  # the host has removed it, or never may
                    continue


def _open_group(order: launchpad_child.Order) -> int:
    """Open the group of version 2 that a child is to be forked into; -1 for none."""
    for directory, name in order.layers.get("cgroup", ()):
        if name == launchpad_child.GROUP_TO_FORK_INTO:
            try:
                return os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                return -1  # the child does not find it either, and says so
    return -1


def _has_children() -> bool:
    """Whether a child of this process is left, dead or alive."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def main() -> None:
    """Run the launchpad on the control socket that is descriptor 0."""
    launchpad_kernel.set_name(_NAME)
    # Its memory holds other children's environments, its descriptors the control
    # socket: no child of the same user may look at either (ptrace, pidfd_getfd).
    launchpad_kernel.prctl(launchpad_kernel.PR_SET_DUMPABLE, 0)
    # What a dead child leaves comes here (rule 2).
    launchpad_kernel.prctl(launchpad_kernel.PR_SET_CHILD_SUBREAPER, 1)
    control = _take_control_socket()
    _set_signals()
    os.chdir("/")
    # Objects of the start are never freed: untouched pages need no copy after a fork.
    gc.disable()
    gc.freeze()
    _Launchpad(control).run()


def _take_control_socket() -> _socket.socket:
    """Move the control socket away from descriptor 0, keep stderr, close the rest."""
    control = _socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3))
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd != control.fileno():
            os.closerange(fd, fd + 1)  # the one that listed is gone: no error
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0, inheritable=False)
    os.dup2(null, 1, inheritable=False)
    os.close(null)
    os.set_inheritable(2, False)
    return control


def _set_signals() -> None:
    """Survive what is sent to a whole service or session; ignore nothing.

    What is ignored stays ignored over exec, so children would need it put back; what
    is caught, they have as the default.
    """
    for number in _signal.valid_signals():
        if number in _CAUGHT_SIGNALS:
            _signal.signal(number, _do_nothing)
        elif number not in {_signal.SIGKILL, _signal.SIGSTOP}:
            _signal.signal(number, _signal.SIG_DFL)
    launchpad_kernel.default_reserved_signals()
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Be woken up by a signal; the loop finds out why."""


def _wake_at_signals() -> int:
    """A descriptor that becomes readable when a caught signal, SIGCHLD most, came."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(theirs, False)
    _signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    return ours


def _create_time(pid: int) -> int:
    """Start of an unreaped child, in clock ticks since boot."""
    stat = proctree.read_parent_and_start(pid)
    if stat is None:
        raise OSError(errno.EIO, "a child is not to be seen in /proc")
    return stat[1]
