"""The launchpad: the small process that starts, reaps and ends a host's children.

1. It alone waits for children, so the pid of an unreaped one is its own.
2. Children are subreapers: at their death their daemons become the launchpad's children,
   and each direct child that its ``Family`` does not know is killed.
3. A child's exit is reported first. With a pid namespace, its init is killed then.
4. It ends only after its host (EOF) and the whole tree; if it is killed, PR_SET_PDEATHSIG
   and the host end the rest. A deadline (ARM) does so by the kernel's timer.
5. It sleeps without events, and blocks only for a process that it forks for something
   seldom (``owners``, ``addition``: 1 ms). Standard library only, without ``json``: it
   starts in the time of a bare interpreter plus 4 ms. Read next: ``wire``, ``life``.
"""

from __future__ import annotations

# `socket` imports `enum` and `selectors`: 7 ms of a start that takes 9.
import _socket
import errno
import gc
import os
import select

from hostlib.linux import syscalls
from hostlib.linux.kill_timer import KillTimer
from supervisor.spawn.launchpad import life, setup, wire
from supervisor.spawn.launchpad.child import become
from supervisor.spawn.launchpad.family import Child, Family, describe_fork_error
from supervisor.spawn.launchpad.fork import PidNamespaces, fork_into
from supervisor.spawn.launchpad.layers import addition, owners
from supervisor.spawn.launchpad.order import APPLIED, BECAME, FORKING, GAVE_UP, Order
from supervisor.spawn.launchpad.outbox import Outbox
from supervisor.spawn.launchpad.prefork import Stock, send_order
from supervisor.spawn.launchpad.reaper import Reaper

TYPE_CHECKING = False
if TYPE_CHECKING:
    import resource
    from typing import Any

    from supervisor.spawn.launchpad.prefork import OrderKind

_NAME = b"sandhost-pad"

# A started child runs this long on this processor before a child is forked that no
# caller waits for: as long as a small program takes.
_HEAD_START_S = 0.0005


class _Launchpad:
    """The tables of one launchpad and its loop."""

    def __init__(self, control: _socket.socket) -> None:
        self._control = control
        self._pid = os.getpid()
        self._epoll = select.epoll()
        self._family = Family(self._epoll)
        self._outbox = Outbox(control, self._epoll)
        self._ends = Reaper(
            self._family, self._read_all_reports, self._bury, self._outbox.put
        )
        self._timer: KillTimer | None = None
        self._has_just_started = False  # a child, since the last pause
        self._namespaces = PidNamespaces()
        self._deaths = setup.Deaths()
        self._mounts = setup.MountChanges()  # the last descriptors: it can do without
        self._stock = Stock(sees_mounts=self._mounts.fd >= 0)
        self._epoll.register(control.fileno(), select.EPOLLIN)
        self._epoll.register(self._deaths.fd, select.EPOLLIN)
        if self._mounts.fd >= 0:
            self._epoll.register(self._mounts.fd, select.EPOLLPRI)

    def run(self) -> None:
        """Serve the host until it is gone, then end every process beneath this one."""
        try:
            while self._outbox.host_is_there:
                kind = None if self._family.is_starting else self._stock.find_missing()
                is_busy = kind is not None or self._ends.has_more_to_do
                if is_busy and self._has_just_started:
                    self._has_just_started = False
                    select.select([self._epoll], (), (), _HEAD_START_S)
                    self._drop_old_roots()  # it may have taken the word of a change
                events = self._epoll.poll(0 if is_busy else None)
                for fd, what in events:
                    self._serve(fd, what)
                if self._ends.has_more_to_do:
                    self._ends.tidy()
                elif kind is not None and not events:
                    self._put_in_stock(kind)
        finally:
            self._outbox.host_is_there = False
            self._ends.left_groups += self._stock.groups()
            self._ends.left_groups += self._family.clear()
            self._outbox.flush()  # gives the queued descriptors back
            self._ends.end_everything(self._deaths.wait)

    def _serve(self, fd: int, events: int) -> None:
        if fd == self._deaths.fd:
            self._deaths.take()
            self._ends.has_more_to_do = True
        elif fd == self._mounts.fd:
            self._drop_old_roots()
        elif fd != self._control.fileno():
            if child := self._family.by_report.get(fd):
                self._read_reports(child)
        elif events & (select.EPOLLHUP | select.EPOLLERR):
            self._outbox.host_is_there = False  # whatever it still asked for
        else:
            if events & select.EPOLLOUT:
                self._outbox.flush()
            if events & select.EPOLLIN:
                self._serve_request()

    # ------------------------------------------------------------ requests

    def _serve_request(self) -> None:
        try:
            received = wire.receive_message(self._control)
        except BlockingIOError:
            return
        except wire.CutOffError as error:
            self._outbox.fail(error.ident, errno.EMFILE, "fork")
            return
        if received is None:
            self._outbox.host_is_there = False
            return
        (kind, ident, *body), fds = received
        try:
            self._do(kind, ident, tuple(body), fds)
        except (TypeError, ValueError):
            self._outbox.fail(ident, errno.EINVAL, "request")
        except OSError as error:  # no process, no pipe, no memory to be had
            self._outbox.fail(ident, *describe_fork_error(error))
        finally:
            for fd in fds:
                os.close(fd)

    def _do(self, kind: int, ident: int, body: tuple[Any, ...], fds: list[int]) -> None:
        if kind == wire.SPAWN:
            self._spawn(ident, body, fds)
        elif kind == wire.SIGNAL:
            self._ends.signal(self._family.by_ident.get(ident), *body)
        elif kind == wire.SPARE:
            self._stock.set_spare(*body)
        elif kind == wire.LIST:
            stock = tuple(self._family.stock())
            self._outbox.put((wire.LISTED, ident, stock))
        elif kind == wire.OWNERS:
            namespace = os.dup(owners.owners_of(*body))
            self._outbox.put((wire.OWNED, ident), namespace)
        elif kind == wire.FURNISH:
            self._furnish(ident, body, fds)
        elif kind == wire.ARM:
            self._arm(ident, *body)
        else:
            self._outbox.fail(ident, errno.EINVAL, "request")

    def _furnish(self, ident: int, body: tuple[Any, ...], fds: list[int]) -> None:
        """Make more in the net namespace of a child (spec NET12)."""
        (order,), (net, way, *users) = body, fds
        try:
            addition.add(order, net, way, users)
        except OSError as error:
            self._outbox.fail(ident, error.errno or errno.EIO, "furnish")
        else:
            self._outbox.put((wire.FURNISHED, ident))

    def _arm(self, ident: int, deadline_ns: int) -> None:
        """Let the kernel end this process at a time (spec FL6)."""
        if self._timer is None:
            self._timer = KillTimer()
        self._timer.arm(deadline_ns)
        self._outbox.put((wire.ARMED, ident))

    def _spawn(self, ident: int, body: tuple[Any, ...], fds: list[int]) -> None:
        order = Order({})
        order.fill(body, fds)
        stage = "fork"
        try:
            if "uid" in order.layers and "mountns" in order.layers:
                stage = "uid"
                order.owners = owners.owners_of(order.layers["uid"])
            child = self._take_from_stock(order, body, fds)
            if child is None:
                stage = "pidns"
                self._make_namespace(order)
        except OSError as error:
            self._outbox.fail(ident, error.errno or errno.EIO, stage)
            return
        child = child or self._fork(order, life.STARTING)
        child.locks = order.locks
        for lock in order.locks:
            fds.remove(lock)  # the receiver closes the others
        self._family.assign(child, ident)
        self._end_surplus()

    def _drop_old_roots(self) -> None:
        """Give up children in mount namespaces older than a change of the machine's."""
        if self._mounts.have_changed():
            self._stock.drop_roots()
            self._end_surplus()

    def _end_surplus(self) -> None:
        for surplus in self._stock.take_surplus():
            surplus.close_line()

    def _take_from_stock(
        self, order: Order, body: tuple[Any, ...], fds: list[int]
    ) -> Child | None:
        """Give an order to a child in stock; None if none of its kind waits."""
        if "mountns" in order.layers:  # the order may stand before the word of a change
            self._drop_old_roots()
        child = self._stock.take(order.layers)
        if child is None or not send_order(child, body, fds, order.owners):
            return None
        self._handle_event(child, life.ORDERED)
        return child

    def _make_namespace(self, order: Order) -> None:
        """Let what is forked next be in a pid namespace, if the order says so."""
        self._namespaces.come_back()  # should it have failed the last time
        if "pidns" in order.layers and "userns" not in order.layers:
            self._namespaces.make()

    def _put_in_stock(self, kind: OrderKind) -> None:
        """Fork a child that waits for an order of some kind."""
        order = self._stock.order_for(kind)
        try:
            self._make_namespace(order)
            line, order.line = _socket.socketpair(
                _socket.AF_UNIX, _socket.SOCK_SEQPACKET
            )
            try:
                kind.child = self._fork(order, life.IN_STOCK)
            finally:
                order.line.close()
        except OSError:  # the next order has it forked, and is told why not
            kind.asked = 0
        else:
            kind.child.line = line

    def _fork(self, order: Order, state: int) -> Child:
        """Fork what becomes a child; this process goes on in its own namespace."""
        order.open_group()
        try:
            ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._family.watch_report(ours)  # before there is anybody to be killed
                order.init = self._namespaces.fork_init()
                # Within a user namespace it forks once more, and joins then.
                into = -1 if "userns" in order.layers else order.group
                pid, order.is_in_group = fork_into(into)
                if pid == 0:
                    become(order, self._pid, theirs)
                child = Child(state, pid, ours)
            except OSError:
                self._family.close_report(ours)
                self._ends.sweep()  # of leftovers, which have no entry
                raise
            finally:
                os.close(theirs)
        finally:
            if order.group >= 0:
                os.close(order.group)
            self._namespaces.come_back()
        groups = order.layers.get("cgroup", ())
        child.groups = tuple(directory for directory, _ in groups)
        self._family.add(child, order.init)
        return child

    # ------------------------------------------------------------ reports

    def _read_all_reports(self) -> None:
        for child in self._family.reporting():
            self._read_reports(child)

    def _read_reports(self, child: Child) -> None:
        """Take in the reports of a starting child."""
        for kind, *rest in child.read_reports():
            if kind == FORKING:
                self._handle_event(child, life.FORKING)
            elif kind == BECAME:
                self._handle_event(child, life.BECAME)
                try:
                    self._family.rename(child, *rest)
                except OSError:
                    child.failure = (errno.ECANCELED, "fork", b"")
                self._ends.has_more_to_do = True  # the sweep waited for this
            elif kind == APPLIED:
                (child.applied,) = rest
            elif kind == GAVE_UP:
                child.failure = tuple(rest)
            else:
                self._end_start(child)

    def _end_start(self, child: Child) -> None:
        """Tell the host how a start has ended, and close the pipe of its reports."""
        self._handle_event(child, life.FAILED if child.failure else life.CLOSED)
        self._has_just_started = True
        self._family.end_start(child)

    def _bury(self, child: Child, status: int, usage: resource.struct_rusage) -> None:
        """Forget a child that was reaped, and tell the host its end."""
        if child.report >= 0:
            self._read_reports(child)
        if child.report >= 0:  # another process may hold the pipe, but it is dead
            self._end_start(child)
        child.state, action = life.step(child.state, life.DIED)
        if action == life.TELL_EXITED:
            code = os.waitstatus_to_exitcode(status)
            number = (code, None) if code >= 0 else (None, -code)
            times = (usage.ru_utime, usage.ru_stime, usage.ru_maxrss)
            self._outbox.put((wire.EXITED, child.ident, *number, *times))
            self._ends.ended(child)
        else:
            child.unlock()
        self._ends.remember(child.groups)
        self._family.remove(child)

    def _handle_event(self, child: Child, event: int) -> None:
        """Do what the table says of an event (``life``)."""
        child.state, action = life.step(child.state, event)
        if action == life.DISCARD:
            self._stock.discard(child)
            child.let_go()
        elif action == life.TELL_FAILED:
            child.let_go()
            self._outbox.fail(child.ident, *(child.failure or ()))
        elif action == life.TELL_SPAWNED:
            facts = (child.pid, child.create_time, child.applied, child.init)
            self._outbox.put((wire.SPAWNED, child.ident, *facts), child.take_pidfd())


def main() -> None:
    """Run the launchpad on the control socket that is descriptor 0."""
    syscalls.set_name(_NAME)
    # Its memory holds other children's environments, its descriptors the control
    # socket: no child of the same user may look at either (ptrace, pidfd_getfd).
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    # Leftovers of a dead child come here (rule 2).
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    # The host waits for what it says, and its children for nothing that it does.
    syscalls.ask_for_slices(syscalls.SHORT_SLICE_NS)
    control = setup.take_control_socket()
    setup.set_signals()
    os.chdir("/")
    # Objects of the start are never freed: untouched pages need no copy after a fork.
    gc.disable()
    gc.freeze()
    _Launchpad(control).run()
