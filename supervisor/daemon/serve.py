"""``sandhost serve``: the daemon.

1. READY is sent when the configured children have begun and the sockets listen.
2. A stop goes in order, reports overdue children after the grace period, kills, and
   waits ``SETTLE_S`` more, and ``SWEEP_TIMEOUT_S`` for a process that the kernel holds;
   it exits 0 only if no child had to be killed (spec S6).
3. A living host in the same directories ends it with status 1, faults of the
   configuration with 78: another start would not help.
4. Objects of configured children are frozen as they begin: with 1,000, each of five
   full collections held the loop for up to 250 ms.
5. Sockets of services exist before a child can be asked for.
6. The next program of the process (``handover``) begins here too, with all that is
   open.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import trio

from hostlib.handover import HandoverError
from hostlib.journal import KEEP, MAX_BYTES, SegmentJournal
from hostlib.keys import KeyFileError, identify_key_file, restore_environment
from hostlib.log import Log
from hostlib.messages import set_json_log
from hostlib.segments import Segments
from hostlib.systemd import Notifier, take_activated, watchdog_interval_s
from hostlib.user_values import parse_size
from supervisor.app import NOTHING, open_metrics, open_services
from supervisor.config.child import longest_chain
from supervisor.config.daemon_checks import faults_here
from supervisor.config.directories import (
    STAY,
    VARIABLE,
    Locks,
    keep_paths,
    lock_directories,
    make_directories,
    places_from,
    places_of,
    remove_borrowed,
    text_of,
)
from supervisor.config.document import Config
from supervisor.control.blockers import MAX_NAMED, blocker, sentence
from supervisor.control.fleet import FleetOrders
from supervisor.control.orders import DaemonOrders
from supervisor.control.server import ListeningSocket, OrderError, Orders, serve_control
from supervisor.control.streams import DaemonStreams, OverdueChildren
from supervisor.daemon.sweep import sweep
from supervisor.fleet.link import LinkError
from supervisor.fleet.store_address import secret_files, usual_secret_files
from supervisor.fsproxy.ports import Portable
from supervisor.handover.daemon import DaemonSurroundings, daemon_state
from supervisor.handover.exchange import Change
from supervisor.handover.host_state import restore_host
from supervisor.handover.next_program import SIGNALS, hear_signals, state_of
from supervisor.host import open_host, settings_of
from supervisor.kept_children.roster import Children
from supervisor.observe.loop import Conditions, feed_watchdog
from supervisor.observe.registry import attach_metrics
from supervisor.run import complain, heeded_signals, run_program
from supervisor.sandbox import groups

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from supervisor.children.child import Child
    from supervisor.config.directories import Places
    from supervisor.config.fleet import FleetSection
    from supervisor.handover.daemon import DaemonState
    from supervisor.handover.state import HostState
    from supervisor.host import Host
    from supervisor.membership.member import Member
    from supervisor.spawn.launchpad.start import LaunchpadProcess

FAILED = 1

FLEET_NODE = "fleet-node"
"""Directory of a fleet node's ledger, in the state directory."""

BAD_CONFIG = 78
"""EX_CONFIG of sysexits(3): the unit has it in ``RestartPreventExitStatus=``."""

SETTLE_S = 10.0
"""Longest wait after the grace period: killing takes milliseconds, and only a process
that is stuck in the kernel takes longer."""

CONDITIONS_S = 10.0
"""Time between two looks at all states: 15 ms of work for a thousand children."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of the command line; see ``sandhost serve --help``."""

    config: Config = field(default_factory=Config)
    config_path: str | None = None
    control: str | None = None
    log_level: str = "INFO"
    log_json: bool | None = None


def run_daemon(launchpad: LaunchpadProcess, options: ServeOptions) -> int:
    """Run the daemon until it is stopped; return its exit status."""
    log = Log(options.log_level, as_json=options.log_json)
    set_json_log(as_json=log.is_json)
    log.take_stderr()
    with suppress(ImportError, MemoryError, OSError):
        log.start()
    status = run_program("serve", _serve, launchpad, options, log)
    return status if status in {0, BAD_CONFIG} else FAILED


async def _serve(launchpad: LaunchpadProcess, options: ServeOptions, log: Log) -> int:
    state = state_of(launchpad)
    left = daemon_state(state)
    told = os.environ.pop(VARIABLE, None)
    living = None if left is None else places_from(told)
    places = places_of(options.config.host, options.control)
    if living is not None and living != places:
        log.write("WARNING", f"{options.config_path}: host: {STAY}")
        config, places = keep_paths(options.config, living), living
        options = replace(options, config=config)
    with ExitStack() as stack:
        notifier = Notifier(os.environ.pop("NOTIFY_SOCKET", None))
        stack.callback(notifier.close)
        activated = take_activated()
        for sock in (sock for among in activated.values() for sock in among):
            stack.callback(sock.close)
        heeded = heeded_signals(SIGNALS)
        signals = stack.enter_context(trio.open_signal_receiver(*heeded))
        hear_signals()
        make_directories(places)
        held = None if left is None else Locks(left.lock_fd, left.state_lock_fd)
        locks, before = stack.enter_context(
            lock_directories(places, launchpad.pid, held)
        )
        stack.callback(remove_borrowed, places)
        if left is None:
            for line in sweep(places, options.config, before, time.time()):
                log.write("WARNING", f"Left behind: {line}")
        segments = Segments(places.journal, MAX_BYTES, KEEP)
        journal = SegmentJournal(segments, lambda text: log.write("WARNING", text))
        stack.callback(journal.close)
        given = StartState(notifier, activated, locks, state, left)
        daemon = Daemon(options, places, given)
        groups.settle(launchpad.pid)
        async with open_host(
            launchpad,
            settings_of(options.config),
            journal=journal,
            log=log,
            left=state,
        ) as host:
            if left is None:
                faults = await faults_here(
                    host.launcher, host.machine, host.log, places, options.config
                )
                for fault in faults:
                    complain("serve", f"cannot use {options.config_path}: {fault}")
                if faults:
                    return BAD_CONFIG
            host.holders.add(notifier.descriptors)
            host.holders.add(lambda: [(fd, "lock") for fd in locks])
            await daemon.run(host, journal, signals)
        return daemon.status


class StartState(NamedTuple):
    """Descriptors and states that are there when a daemon begins.

    Attributes:
        notifier: the socket of the service manager.
        activated: sockets that the manager opened.
        locks: of its directories.
        host_state: the host of the program before; None if there was none.
        left: the daemon of the program before.
    """

    notifier: Notifier
    activated: dict[str, list[socket.socket]]
    locks: Locks
    host_state: HostState | None
    left: DaemonState | None


class Daemon:
    """One daemon's life within its host.

        serve nursery             with the host's own nursery beneath (``host``)
        |- on_signals             TERM, INT: stop; HUP: reload; USR2: next program
        |- feed_watchdog          proves that the loop turns
        |- watch_lag, Conditions  how late the loop is; children that are stopped or stuck
        |- serve_metrics          figures, if a listener is configured
        |- member                 of a fleet, if one is configured
        |- serve_control          answers, orders, streams
        |- apply_config           once, after a hand-over
        |- kept children          one task a name: turn, process, restarts

    Args:
        options: those of the command line.
        places: its directories.
        opened: descriptors and states from its start or the program before.
    """

    def __init__(
        self, options: ServeOptions, places: Places, opened: StartState
    ) -> None:
        self._options = options
        self._places = places
        self._opened = opened
        self._notifier = opened.notifier
        self._activated = opened.activated
        self._stop_asked = trio.Event()
        self._has_begun = trio.Event()  # all configured or restored children are known
        self._grace_s = settings_of(options.config).grace_s
        self._overdue = OverdueChildren()
        self._went_well = True
        self._member: Member | None = None

    @property
    def status(self) -> int:
        """The exit status (rule 2)."""
        return 0 if self._went_well else FAILED

    async def run(
        self, host: Host, journal: SegmentJournal, signals: AsyncIterator[int]
    ) -> None:
        """Serve until a stop is asked for, then stop."""
        places, notifier = self._places, self._notifier
        host.on_overdue = partial(self._tell_overdue, host)
        async with trio.open_nursery() as nursery:
            config, path = self._options.config, self._options.config_path
            children = Children(host, config, places, nursery)
            metrics = attach_metrics(host)
            conditions = Conditions(host)
            orders = Orders(stats=[metrics.lag_row, conditions.row])
            tell = self._tell_reload(children)
            actions = DaemonOrders(host, children, places, path, tell)
            actions.add_to(orders)
            stop, overdue = self.request_stop, self._overdue
            streams = DaemonStreams(host, children, journal, places.logs, stop, overdue)
            streams.add_to(orders)
            change = Change(host, self._surroundings(children, orders), notifier)
            change.add_to(orders)
            nursery.start_soon(self._on_signals, change, children, actions, signals)
            nursery.start_soon(metrics.watch_lag)
            await open_metrics(host, config.metrics, nursery)
            nursery.start_soon(conditions.run, CONDITIONS_S)
            interval_s = watchdog_interval_s()
            if interval_s is not None:
                nursery.start_soon(feed_watchdog, notifier, interval_s)
            control = partial(
                serve_control, host, places.control, orders, self._take_control()
            )
            for_tools = []
            if config.toolexec is not None:
                for_tools = self._activated.pop("toolexec", [])
            state = self._opened.host_state
            left_services = NOTHING if state is None else state.services
            restore_environment(left_services.get("llm"))
            async with open_services(
                host, config, for_tools, left_services, has_network=True
            ):
                await self._begin(host, children, nursery, orders, control)
                if await children.wait_begun(self._tell_start, unless=self._stop_asked):
                    gc.freeze()
                    notifier.ready(_status(children))
                    host.log.write("INFO", f"Serving at {places.control}")
                    await self._stop_asked.wait()
                await self._stop(host, children)
            nursery.cancel_scope.cancel()

    async def _begin(
        self,
        host: Host,
        children: Children,
        nursery: trio.Nursery,
        orders: Orders,
        control: Callable[..., Awaitable[object]],
    ) -> None:
        """Serve the control socket, and start or restore the children."""
        await self._open_member(host, children, nursery, orders)
        if self._opened.left is not None:
            await self._restore(host, children, self._opened.left)
        await nursery.start(control)
        self._close_untaken(host)
        if self._opened.left is None:
            children.start_configured()
        else:
            nursery.start_soon(_apply_config, host, children)
        self._has_begun.set()

    async def _open_member(
        self, host: Host, children: Children, nursery: trio.Nursery, orders: Orders
    ) -> None:
        """Make ready to be a node of a fleet, if that is configured."""
        section = self._options.config.fleet
        if section is not None:
            from supervisor.control.bases import BaseOrders  # noqa: PLC0415 - seldom

            _hide_secrets(host, section)
            self._member = self._make_member(host, children, section)
            await nursery.start(self._member.run)
            BaseOrders(self._member, host.journal).add_to(orders)
        FleetOrders(self._member).add_to(orders)

    def _make_member(
        self, host: Host, children: Children, section: FleetSection
    ) -> Member:
        from supervisor.cluster.client import door_of  # noqa: PLC0415 - seldom
        from supervisor.cluster.peers import stream_by  # noqa: PLC0415 - as above
        from supervisor.membership.base_keeper import BaseKeeper  # noqa: PLC0415
        from supervisor.membership.bases import Bases  # noqa: PLC0415 - as above
        from supervisor.membership.member import Member  # noqa: PLC0415 - as above

        state_dir = self._places.state_dir
        size_bytes = parse_size(str(section.base_size))
        bases = Bases(state_dir, size_bytes, section.bases_kept)
        keeper = BaseKeeper(bases, stream_by(door_of(self._places.control)))
        return Member(host, children, section, f"{state_dir}/{FLEET_NODE}", keeper)

    def _take_control(self) -> ListeningSocket | None:
        """Return the control socket if it is open already; the caller owns it."""
        left = self._opened.left
        if left is not None:
            sock = socket.socket(fileno=left.listener_fd)
            sock.setblocking(False)
            return ListeningSocket(sock, left.listener_identity)
        among = self._activated.get("control")
        return ListeningSocket(among.pop(0)) if among else None

    def _surroundings(self, children: Children, orders: Orders) -> DaemonSurroundings:
        address = self._notifier.address
        told = {} if address is None else {"NOTIFY_SOCKET": address}
        return DaemonSurroundings(
            children=children,
            orders=orders,
            locks=self._opened.locks,
            stopping=self._stop_asked.is_set,
            variables=told | {VARIABLE: text_of(self._places)},
        )

    async def _restore(self, host: Host, children: Children, left: DaemonState) -> None:
        """Restore the children and orders of the program before."""
        state = self._opened.host_state
        if state is None:
            raise HandoverError("a daemon without a host was handed over")
        for name, service_left in state.services.items():
            service = getattr(host.services, name, None)
            if isinstance(service, Portable):
                await service.restore(service_left)
            else:
                host.log.write("WARNING", f"No section for {name} any more: it is gone")
                for fd in state.service_fds[name]:
                    os.close(fd)
        children.restore(left.kept, await restore_host(host, state))

    def _close_untaken(self, host: Host) -> None:
        for name, among in self._activated.items():
            for sock in among:
                host.log.write("WARNING", f"Nobody takes the activated socket {name}")
                sock.close()
        self._activated = {}

    def request_stop(self, grace_s: float | None = None) -> None:
        """Begin a stop; children are killed after ``grace_s``, None for the setting."""
        if grace_s is not None:
            self._grace_s = grace_s
        self._stop_asked.set()

    async def _on_signals(
        self,
        change: Change,
        children: Children,
        actions: DaemonOrders,
        signals: AsyncIterator[int],
    ) -> None:
        async with trio.open_nursery() as nursery:
            async for number in signals:
                if number == signal.SIGHUP:
                    reload = partial(_reload, change.host, actions)
                    nursery.start_soon(self._obey, reload)
                elif number == signal.SIGUSR2:
                    nursery.start_soon(self._obey, change.try_replace)
                elif self._stop_asked.is_set():
                    self._went_well = False
                    children.stop_rest_at_once()
                else:
                    self.request_stop()

    async def _obey(self, order: Callable[[], Awaitable[object]]) -> None:
        """Carry out an order when the children have begun, unless a stop was asked for.

        Before, a reload would take all of them for new ones.
        """
        await self._has_begun.wait()
        if not self._stop_asked.is_set():
            await order()

    async def _stop(self, host: Host, children: Children) -> None:
        if self._member is not None:
            # Where the ledger cannot be written nothing of the fleet is left to end.
            with trio.move_on_after(SETTLE_S), suppress(LinkError):
                await self._member.leave()
        self._notifier.stopping(f"stopping {len(host.children)} children")
        host.tell_stop()
        in_a_row = longest_chain({k.name: k.section.after for k in children})
        patience_s = self._grace_s * in_a_row + SETTLE_S
        with trio.move_on_after(patience_s) as patience:
            await children.stop_all(self._grace_s)
        if patience.cancelled_caught:
            self._went_well = False
            for child in tuple(host.children.values()):
                text = f"Gave up waiting: {sentence(blocker(child))}"
                host.log.write("ERROR", text, **child.log_fields())
            # Kernel objects are left to the launchpad, which outlives the host.
            if host.nursery is not None:
                host.nursery.cancel_scope.cancel()

    def _tell_start(self, begun: int, of: int) -> None:
        """Report the progress of the start, and freeze what has begun (rule 4)."""
        gc.freeze()
        self._notifier.starting(begun, of)

    def _tell_overdue(self, host: Host, child: Child) -> None:
        """Report a child that had to be killed because it did not end (rule 2)."""
        row = blocker(child)
        host.journal.write("child.overdue", child_id=child.id, **row)
        host.log.write("WARNING", f"{sentence(row)}; killed", **child.log_fields())
        if self._stop_asked.is_set():
            self._went_well = False
            self._overdue.add(row)
        if self._overdue.count <= MAX_NAMED:  # the manager shows only the last one
            self._notifier.send(STATUS=sentence(row))

    def _tell_reload(self, children: Children) -> Callable[[bool], None]:
        def tell(begins: bool) -> None:
            if begins:
                self._notifier.reloading()
            else:
                self._notifier.reloaded(_status(children))

        return tell


def _hide_secrets(host: Host, section: FleetSection) -> None:
    """Keep the files of the store's password and key from all children.

    Raises:
        OSError: one that is named cannot be read, or others may read it.
    """
    for path in secret_files(section.store):
        try:
            host.hide_key_files({path: identify_key_file(path)})
        except KeyFileError as why:
            raise OSError(errno.EINVAL, str(why)) from None
    for path in usual_secret_files(section.store, os.environ):
        # One that is not there, or that others may read, libpq does not use either.
        with suppress(KeyFileError):
            host.hide_key_files({path: identify_key_file(path)})


async def _reload(host: Host, actions: DaemonOrders) -> None:
    try:
        await actions.reload()
    except OrderError:
        return  # it was logged
    except Exception as why:  # noqa: BLE001 - a fault of ours; the children go on
        host.log.write("ERROR", f"Not reloaded: internal error: {why!r}")


async def _apply_config(host: Host, children: Children) -> None:
    """Apply the present configuration to the children that were taken over."""
    changes = await children.reload(children.config)
    if changes.started or changes.stopped or changes.restarted:
        host.journal.write("host.reloaded", **changes.row())


def _status(children: Children) -> str:
    return f"{len(children)} children"
