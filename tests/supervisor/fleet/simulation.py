"""A fleet in one thread.

Machines, clocks, a network and faults, all from one seed.

The product's `Directory` and `Node` decide; here is what surrounds them. Messages are
lost, doubled and delayed up to 30 s. Processes crash, or stop and wake later; machines
stop whole, or are paused with their clocks. Clocks drift by 2 %. A ledger can be lost.
In a part of the seeds a directory comes back with another length of leases; in another
part a day ends, and a node's ledger has a slice of another fleet.

`run` returns what was broken: nothing, if the rules hold. `Rules` leaves one of them out.
"""

import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from supervisor.fleet import node as on_node
from supervisor.fleet.directory import Directory, FleetError, PlacementRequest
from supervisor.fleet.fence import FencedError
from supervisor.fleet.held_slices import (
    HeldRow,
    HeldSlices,
    HeldState,
    LedgerRow,
    ReserveResult,
)
from supervisor.fleet.lease import LEASE_S, LEAST_LEASE_S
from supervisor.fleet.messages import (
    ChildReport,
    Message,
    Program,
    Session,
)
from supervisor.fleet.node import Node, NodeStep
from supervisor.fleet.slices import DAY, LOST, NEVER, RootAccount, window_at
from supervisor.fleet.states import NodePhase
from supervisor.fleet.step import Moment, Step

FAULTS_S = 40.0
"""Faults and load last so long."""

END_S = 85.0
"""The last delayed message has come 30 s after the faults; then all has to settle."""

TICK_S = 0.25
STORE_S = 0.002
DRIFT = 0.02
LONGEST_DELAY_S = 30.0
LEASES_S = (LEAST_LEASE_S, 2 * LEASE_S)
ACCOUNT = "tokens"
FOREIGN = f"{ACCOUNT}/other.1"
DAY_S = 86_400.0
EPSILON = 1e-6

Rows = dict[tuple[str, str], bytes]


class Violation(Exception):  # noqa: N818 - it is found, not a mistake of a caller
    """An invariant is broken; the text begins with its name."""


@dataclass(frozen=True)
class Rules:
    """The product's own parts, or those of a test that leaves a rule out.

    Attributes:
        back_after_s: the root takes a slice back after so long (no rule of ours).
        has_timer: the kernel ends the launchpad at its deadline.
        stores_reservations: a node's ledger has them.
    """

    account: type[RootAccount] = RootAccount
    held: type[HeldSlices] = HeldSlices
    directory: type[Directory] = Directory
    back_after_s: float | None = None
    has_timer: bool = True
    stores_reservations: bool = True


@dataclass
class Clock:
    """CLOCK_BOOTTIME of one machine: it drifts, and stands still while a VM is paused."""

    rate: float
    start_s: float
    paused_s: float = 0.0
    paused_at: float | None = None

    @property
    def was_paused(self) -> bool:
        """Whether it stands still, or has."""
        return self.paused_at is not None or self.paused_s > 0.0

    def read(self, real_s: float) -> float:
        """Return what it shows."""
        running = real_s if self.paused_at is None else self.paused_at
        return self.start_s + (running - self.paused_s) * self.rate


@dataclass
class Process:
    """The directory's process, or a node's: it can be stopped, and can die."""

    is_alive: bool = True
    stopped_until: float = 0.0


@dataclass
class Living:
    """A child's process."""

    child: str
    incarnation: int
    is_alive: bool = True


@dataclass
class Machine:
    """The processes of one machine.

    Attributes:
        armed_s: when the launchpad's timer ends its children, on the machine's clock.
        ledger: the rows on the disk.
        unsent: worst cases of calls that wait for a slice.
        calls: under way: what they will have cost.
    """

    name: str
    clock: Clock
    process: Process
    node: Node
    ledger: Rows
    living: list[Living] = field(default_factory=list)
    armed_s: float | None = None
    has_launchpad: bool = True
    timer_generation: int = 0
    calls: dict[str, float] = field(default_factory=dict)
    worsts: dict[str, float] = field(default_factory=dict)
    unsent: list[float] = field(default_factory=list)


class BackByClock(RootAccount):
    """Break FL7.5: slices of lost nodes come back after a while."""

    def take_back(self, after_s: float, real_s: float, step: Step) -> None:
        """Close those that were lost long enough ago."""
        lost_s: dict[str, float] = self.__dict__.setdefault("lost_s", {})
        for one in self.slices():
            if one.state != LOST:
                continue
            if real_s - lost_s.setdefault(one.id, real_s) >= after_s:
                self._close(one, one.spent, step)


class Simulation:
    """One run.

    Args:
        seed: everything is drawn from it.
        rules: whose parts decide.
    """

    def __init__(self, seed: int, rules: Rules) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        has_leases = seed % 2 == 0
        self._leases = random.Random(seed) if has_leases else None
        self.rules = rules
        self.real_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        draw = self.random.random
        self._loss = draw() * 0.2
        self._doubling = draw() * 0.15
        self._long_delay = draw() * 0.1
        self._cuts: list[tuple[float, float, str]] = []
        self._limit = 100.0
        self._ledgers = 0
        self._calls = 0
        days = random.Random(seed)
        self._has_days = seed % 3 == 0
        self._wall_s = DAY_S - (5 + 33 * days.random()) if self._has_days else 0.0
        self._charged: dict[str, float] = defaultdict(float)
        self._windows: dict[str, str] = {}
        self._costs: dict[str, float] = {}
        self._forgiven: dict[str, float] = defaultdict(float)
        self._has_lost_ledger = False
        self._accepted: dict[str, int] = {}
        self._store: Rows = {}
        self._epoch = 0
        self.directory: Directory | None = None
        self._directory_process = Process(is_alive=False)
        self._directory_clock = Clock(1 + DRIFT * (2 * draw() - 1), 1000 * draw())
        self.machines = {name: self._machine(name) for name in "abc"}
        self._machine_of_another = self.machines["a"] if self._has_days else None
        if self._machine_of_another is not None:
            _put(self._machine_of_another.ledger, _rows_of_another_fleet())

    # Time

    def at(self, real_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call something at a time."""
        self._sequence += 1
        heapq.heappush(self._heap, (real_s, self._sequence, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call something after a while."""
        self.at(self.real_s + delay_s, call, *args)

    def run(self) -> None:
        """Run to the end.

        Raises:
            Violation: a rule was broken.
        """
        self._start_directory()
        for index, machine in enumerate(self.machines.values()):
            self.after(0.01 * index, self._start_node, machine)
        self._plan_load()
        self._plan_faults()
        while self._heap:
            self.real_s, _, call, args = heapq.heappop(self._heap)
            if self.real_s > END_S:
                break
            call(*args)
        self._check_end()

    def _moment(self, clock: Clock) -> Moment:
        return Moment(clock.read(self.real_s), self._wall_s + self.real_s)

    def _to(self, process: Process, call: Callable[..., None], *args: Any) -> None:
        """Call something within a process: not if it is dead, later if it is stopped."""
        if not process.is_alive:
            return
        if process.stopped_until > self.real_s:
            wake_s = process.stopped_until + 0.01 * self.random.random()
            self.at(wake_s, self._to, process, call, *args)
        else:
            call(*args)

    # The network

    def _send(self, name: str, message: Message, receive: Callable[..., None]) -> None:
        """Carry a message between a node and the directory, or lose it."""
        for _ in range(2 if self.random.random() < self._doubling else 1):
            if self.real_s < FAULTS_S:
                if self.random.random() < self._loss or self._is_cut(name):
                    continue
                if self.random.random() < self._long_delay:
                    delay_s = self.random.random() * LONGEST_DELAY_S
                    self.after(delay_s, receive, name, message)
                    continue
            self.after(0.001 + 0.02 * self.random.random(), receive, name, message)

    def _is_cut(self, name: str) -> bool:
        return any(
            begin <= self.real_s < end and node == name
            for begin, end, node in self._cuts
        )

    # The directory

    def _start_directory(self) -> None:
        process = self._directory_process = Process()
        self._epoch += 1
        stored = [(table, key, row) for (table, key), row in self._store.items()]
        lease_s = self._leases.choice(LEASES_S) if self._leases else LEASE_S
        directory = _directory_type(self.rules)(
            self._epoch, stored, self._moment(self._directory_clock), lease_s
        )
        self.directory = directory
        if self._epoch == 1:
            now = self._moment(self._directory_clock)
            kind = DAY if self._has_days else NEVER
            self._carry_out(directory.name_fleet("own"))
            self._carry_out(directory.open_account(ACCOUNT, self._limit, kind, now))
        self._to(process, self._tick_directory, process)

    def _tick_directory(self, process: Process) -> None:
        assert self.directory is not None
        now = self._moment(self._directory_clock)
        self._carry_out(self.directory.tick(now))
        if self.rules.back_after_s is not None:
            self._take_back(self.rules.back_after_s)
        self.after(TICK_S, self._to, process, self._tick_directory, process)

    def _take_back(self, after_s: float) -> None:
        """Break FL7.5: give slices of lost nodes back by the root's clock."""
        assert self.directory is not None
        step = Step()
        for account in self.directory.accounts.values():
            assert isinstance(account, BackByClock)
            account.take_back(after_s, self.real_s, step)
        self._carry_out(step)

    def _carry_out(self, step: Step) -> None:
        """Store a step's changes, then send; a directory that dies before does neither."""
        process = self._directory_process
        rows = [
            (one.table, one.key, None if one.row is None else _encoded(one.row))
            for one in step.changes
        ]
        self.after(STORE_S, self._to, process, self._commit, rows, step.sends)

    def _commit(
        self, rows: list[tuple[str, str, bytes | None]], sends: list[Any]
    ) -> None:
        _put(self._store, rows)
        for send in sends:
            self._send(send.node, send.message, self._at_node)

    def _at_directory(self, name: str, message: Any) -> None:
        self._to(self._directory_process, self._receive, message)

    def _receive(self, message: Any) -> None:
        assert self.directory is not None
        now = self._moment(self._directory_clock)
        self._carry_out(self.directory.receive(message, now))

    # Nodes

    def _machine(self, name: str) -> Machine:
        draw = self.random.random
        clock = Clock(1 + DRIFT * (2 * draw() - 1), 1000 * draw())
        process = Process(is_alive=False)
        ledger: Rows = {}
        node = Node(name, (), 4, HeldSlices(name, LedgerRow("none")))
        return Machine(name, clock, process, node, ledger)

    def _start_node(self, machine: Machine) -> None:
        """Start a daemon: nothing of the one before is alive any more."""
        if any(one.is_alive for one in machine.living):
            self.after(0.1, self._start_node, machine)
            return
        process = machine.process = Process()
        machine.calls.clear()
        machine.worsts.clear()
        machine.unsent.clear()
        machine.armed_s = None
        machine.has_launchpad = True
        step = NodeStep()
        if ("ledger", "") not in machine.ledger:
            self._ledgers += 1
            row = LedgerRow(f"L{self._ledgers}")
            step.put("ledger", "", row)
        else:
            row = msgspec.msgpack.decode(machine.ledger["ledger", ""], type=LedgerRow)
        rows = [
            msgspec.msgpack.decode(data, type=HeldRow)
            for (table, _), data in machine.ledger.items()
            if table == "held"
        ]
        held = self.rules.held(machine.name, row, rows)
        held.recover(step)
        machine.node = Node(machine.name, (), 4, held)
        self._do(machine, step)
        self._do(machine, machine.node.join(self._moment(machine.clock)))
        self._tick_node(machine, process)

    def _tick_node(self, machine: Machine, process: Process) -> None:
        now = self._moment(machine.clock)
        self._do(machine, machine.node.tick(now))
        if machine.node.phase is NodePhase.OUT and self.random.random() < 0.2:
            self._do(machine, machine.node.join(now))
        self._try_calls(machine)
        self.after(TICK_S, self._to, process, self._tick_node, machine, process)

    def _stored(self, row: msgspec.Struct) -> msgspec.Struct:
        if isinstance(row, HeldRow) and not self.rules.stores_reservations:
            return replace(row, reserved={})
        return row

    def _do(self, machine: Machine, step: NodeStep) -> None:
        """Store a step's changes, then send and act; a node that dies does neither."""
        rows = [
            (
                one.table,
                one.key,
                None if one.row is None else _encoded(self._stored(one.row)),
            )
            for one in step.changes
        ]
        self.after(
            STORE_S,
            self._to,
            machine.process,
            self._finish,
            machine,
            machine.process,
            rows,
            step,
        )

    def _finish(
        self,
        machine: Machine,
        process: Process,
        rows: list[tuple[str, str, bytes | None]],
        step: NodeStep,
    ) -> None:
        _put(machine.ledger, rows)
        for send in step.sends:
            self._send(machine.name, send.message, self._at_directory)
        for action in step.actions:
            self._act(machine, process, action)

    def _at_node(self, name: str, message: Any) -> None:
        machine = self.machines[name]
        self._to(machine.process, self._node_receives, machine, message)

    def _node_receives(self, machine: Machine, message: Any) -> None:
        now = self._moment(machine.clock)
        self._do(machine, machine.node.receive(message, now))
        self._check_quota()

    def _act(self, machine: Machine, process: Process, action: on_node.Action) -> None:
        delay_s = 0.03 * self.random.random()
        later: Callable[..., None]
        match action:
            case on_node.AskDaemon():
                later = self._daemon_answers
            case on_node.Arm():
                later = self._arm
            case on_node.StartChild():
                later = self._start_child
            case on_node.EndChild():
                later = self._end_child
            case on_node.EndAll():
                later = self._end_all
            case on_node.CallsDecided():
                bound = action.refused_from
                if bound is not None:
                    machine.unsent[:] = [n for n in machine.unsent if n < bound]
                return
            case _:
                return
        self.after(delay_s, self._to, process, later, machine, action)

    def _daemon_answers(self, machine: Machine, question: on_node.AskDaemon) -> None:
        self._do(machine, machine.node.daemon_answered(question.number, 0))

    # Children, and the launchpad's timer

    def _arm(self, machine: Machine, order: on_node.Arm) -> None:
        if not machine.has_launchpad or order.session != machine.node.session:
            return
        machine.armed_s = order.deadline_s
        machine.timer_generation += 1
        self._fire(machine, machine.timer_generation)
        if machine.has_launchpad:
            machine.node.armed(order.deadline_s)

    def _fire(self, machine: Machine, generation: int) -> None:
        """End the children if it is time: the kernel does it whatever is stopped."""
        if generation != machine.timer_generation or machine.armed_s is None:
            return
        if not self.rules.has_timer:
            return
        left_s = machine.armed_s - machine.clock.read(self.real_s)
        if left_s <= 0:
            self._kill_launchpad(machine)
        else:
            delay_s = max(left_s / machine.clock.rate, 1e-4)
            self.after(delay_s, self._fire, machine, generation)

    def _kill_launchpad(self, machine: Machine) -> None:
        """Let the timer fire: the launchpad ends, its children with it."""
        machine.has_launchpad = False
        self._kill_all(machine)
        self._to(machine.process, self._launchpad_gone, machine, machine.node)

    def _launchpad_gone(self, machine: Machine, node: Node) -> None:
        if node is machine.node:
            self._do(machine, node.launchpad_gone(self._moment(machine.clock)))

    def _kill_all(self, machine: Machine) -> None:
        for one in machine.living:
            one.is_alive = False
        machine.living.clear()

    def _start_child(self, machine: Machine, order: on_node.StartChild) -> None:
        if order.session != machine.node.session:
            return
        is_possible = machine.has_launchpad and machine.armed_s is not None
        if not is_possible or self.random.random() < 0.05:
            report = ChildReport(
                order.child,
                order.incarnation,
                self.random.choice(["failed", "refused"]),
                reason="no such program",
            )
            now = self._moment(machine.clock)
            self._do(machine, machine.node.child_over(report, now))
            return
        self._check_alone(machine, order)
        living = Living(order.child, order.incarnation)
        machine.living.append(living)
        self._do(machine, machine.node.child_started(order.child, order.incarnation, 1))
        self.after(self.random.random() * 30, self._child_exits, machine, living)
        self._effect(machine, living)

    def _check_alone(self, machine: Machine, order: on_node.StartChild) -> None:
        """Two lives of a child at once: only on a machine that was paused may one be."""
        for other in self.machines.values():
            if machine.clock.was_paused or other.clock.was_paused:
                continue
            if any(one.child == order.child for one in other.living):
                raise Violation(f"FL6 {order} is started beside another life of it")

    def _effect(self, machine: Machine, living: Living) -> None:
        """Let a child do something at a door, again and again."""
        if not living.is_alive:
            return
        self.after(0.5 + self.random.random(), self._effect, machine, living)
        process = machine.process
        if not process.is_alive or process.stopped_until > self.real_s:
            return
        try:
            now = self._moment(machine.clock)
            machine.node.check_effect(living.child, living.incarnation, now)
        except FencedError:
            return
        if machine.clock.was_paused:
            return  # its clock tells nothing: a service outside compares incarnations
        best = self._accepted.get(living.child, 0)
        if living.incarnation < best:
            raise Violation(f"FL6 an effect of {living} after incarnation {best}")
        self._accepted[living.child] = living.incarnation

    def _child_exits(self, machine: Machine, living: Living) -> None:
        if (
            living.is_alive
            and self.real_s < FAULTS_S
            and machine.clock.paused_at is None
        ):
            living.is_alive = False
            machine.living.remove(living)
            self._to(machine.process, self._child_over, machine, living)

    def _child_over(self, machine: Machine, living: Living) -> None:
        report = ChildReport(
            living.child, living.incarnation, "ended", status=self.random.choice([0, 1])
        )
        now = self._moment(machine.clock)
        self._do(machine, machine.node.child_over(report, now))

    def _end_child(self, machine: Machine, order: on_node.EndChild) -> None:
        for one in tuple(machine.living):
            if (one.child, one.incarnation) == (order.child, order.incarnation):
                one.is_alive = False
                machine.living.remove(one)
                self._child_over(machine, one)

    def _end_all(self, machine: Machine, _: on_node.EndAll) -> None:
        self._kill_all(machine)
        machine.armed_s = None
        machine.has_launchpad = True
        self._do(machine, machine.node.all_gone(self._moment(machine.clock)))

    # Calls of the model

    def _try_calls(self, machine: Machine) -> None:
        for worst in tuple(machine.unsent):
            now = self._moment(machine.clock)
            self._calls += 1
            call = f"call{self._calls}"
            try:
                outcome, step = machine.node.reserve(ACCOUNT, call, worst, now)
            except FencedError:
                return
            self._do(machine, step)
            if outcome is ReserveResult.ASKED:
                return
            self._note_window(machine, call, now)
            machine.unsent.remove(worst)
            machine.worsts[call] = worst
            self.after(
                2 * STORE_S, self._to, machine.process, self._send_call, machine, call
            )

    def _note_window(self, machine: Machine, call: str, now: Moment) -> None:
        """FL7.6: of a window that has ended, no call but a slice's first is taken."""
        (row,) = (one for one in machine.node.held.rows() if call in one.reserved)
        self._windows[call] = row.window
        is_over = row.window not in (NEVER, window_at(DAY, now.wall_s))
        if is_over and (row.settled or len(row.reserved) > 1):
            raise Violation(f"FL7.6 a call is taken in {row}, at {now.wall_s}")

    def _send_call(self, machine: Machine, call: str) -> None:
        """Send a call whose reservation is stored; the provider charges it."""
        cost = machine.worsts[call] * self.random.random()
        machine.calls[call] = cost
        self._costs[call] = cost
        self._charged[self._windows[call]] += cost
        self._check_quota()
        ends_s = self.random.random() * self.random.choice([0.1, 1.0, 15.0])
        self.after(ends_s, self._to, machine.process, self._end_call, machine, call)

    def _end_call(self, machine: Machine, call: str) -> None:
        cost = machine.calls.pop(call)
        del machine.worsts[call]
        self._do(machine, machine.node.settle(call, cost))

    def _check_quota(self) -> None:
        """I1 of FL7: what was charged and what may still be is within the limit."""
        usable: dict[str, float] = defaultdict(float)
        for machine in self.machines.values():
            if machine.process.is_alive:
                for row in machine.node.held.rows():
                    usable[row.window] += row.left
        for window, left in usable.items():
            if self._charged[window] + left > self._limit + EPSILON:
                raise Violation(
                    f"FL7 {self._charged[window]:.3f} charged and {left:.3f} in slices,"
                    f" of {self._limit} of {window!r}"
                )

    # Load and faults

    def _plan_load(self) -> None:
        draw = self.random.random
        for number in range(8):
            self.at(1 + draw() * 20, self._spawn, f"child{number}")
        for _ in range(4):
            self.at(5 + draw() * 30, self._kill, f"child{self.random.randrange(8)}")
        orders = random.Random(self.seed)
        for number in range(int(FAULTS_S / TICK_S)):
            at_s = (number + orders.random()) * TICK_S
            self.at(at_s, self._order_in_vain)
        for machine in self.machines.values():
            for _ in range(self.random.randrange(4, 30)):
                worst = self.random.choice([0.5, 2.0, 8.0, 20.0]) * draw()
                self.at(1 + draw() * (FAULTS_S - 2), self._wish, machine, worst)

    def _spawn(self, name: str) -> None:
        self._to(self._directory_process, self._spawn_there, name)

    def _spawn_there(self, name: str) -> None:
        assert self.directory is not None
        restart = self.random.choice(["no", "on-failure", "always"])
        request = PlacementRequest(name, Program(("true",), restart=restart), wait=True)
        now = self._moment(self._directory_clock)
        _, step = self.directory.spawn(request, now)
        self._carry_out(step)

    def _kill(self, name: str) -> None:
        self._to(self._directory_process, self._kill_there, name)

    def _kill_there(self, name: str) -> None:
        assert self.directory is not None
        if any(child.name == name for child in self.directory.ps().children):
            now = self._moment(self._directory_clock)
            self._carry_out(self.directory.kill(name, "TERM", now))

    def _order_in_vain(self) -> None:
        self._to(self._directory_process, self._refuse_there)

    def _refuse_there(self) -> None:
        """Give the directory orders that it refuses: it has no step to store then."""
        assert self.directory is not None
        now = self._moment(self._directory_clock)
        with suppress(FleetError):
            self.directory.kill("nobody", "TERM", now)
        with suppress(FleetError):
            self.directory.forget("nobody", now)

    def _wish(self, machine: Machine, worst: float) -> None:
        self._to(machine.process, machine.unsent.append, worst)

    def _plan_faults(self) -> None:
        draw = self.random.random
        faults: tuple[Callable[..., None], ...] = (
            self._crash_node,
            self._crash_node,
            self._stop_node,
            self._stop_machine,
            self._pause_machine,
            self._lose_ledger,
            self._cut_network,
            self._crash_directory,
            self._stop_directory,
        )
        for _ in range(self.random.randrange(1, 9)):
            fault = self.random.choice(faults)
            machine = self.machines[self.random.choice("abc")]
            self.at(2 + draw() * (FAULTS_S - 10), fault, machine)
        if self._leases is not None:
            machine = self.machines[self._leases.choice("abc")]
            at_s = 2 + self._leases.random() * (FAULTS_S - 10)
            self.at(at_s, self._crash_directory, machine)
            self.at(at_s, self._cut_network, machine)

    def _crash_node(self, machine: Machine, restart_s: float | None = None) -> None:
        process = machine.process
        if not process.is_alive:
            return
        process.is_alive = False
        # Reservations in the ledger count as spent, whatever the call has cost.
        for (table, _), data in machine.ledger.items():
            if table == "held":
                row = msgspec.msgpack.decode(data, type=HeldRow)
                for call, worst in row.reserved.items():
                    self._forgiven[row.window] += worst - self._costs.get(call, 0.0)
        machine.calls.clear()
        if self.random.random() < 0.7:  # the launchpad sees it, unless it is stopped
            self.after(0.05, self._kill_all, machine)
        if restart_s is None:
            restart_s = 0.2 + self.random.random() * 8
        self.after(restart_s, self._start_node, machine)

    def _lose_ledger(self, machine: Machine) -> None:
        if machine.process.is_alive:
            self._crash_node(machine)
            machine.ledger.clear()
            self._has_lost_ledger = True
            if machine is self._machine_of_another:
                self._machine_of_another = None

    def _stop_node(self, machine: Machine) -> None:
        """SIGSTOP of daemon and node actor; the children go on until the timer fires."""
        if machine.process.is_alive:
            stop_s = self.random.random() * 10
            machine.process.stopped_until = self.real_s + stop_s

    def _stop_machine(self, machine: Machine) -> None:
        """SIGSTOP of everything on a machine: the same, as children's effects go on."""
        self._stop_node(machine)

    def _pause_machine(self, machine: Machine) -> None:
        """Pause a VM: its clock stands still, and with it the timer."""
        if machine.clock.paused_at is not None or not machine.process.is_alive:
            return
        pause_s = self.random.random() * 10
        machine.clock.paused_at = self.real_s
        wake_s = self.real_s + pause_s
        machine.process.stopped_until = max(machine.process.stopped_until, wake_s)
        self.at(wake_s, self._wake_machine, machine)

    def _wake_machine(self, machine: Machine) -> None:
        assert machine.clock.paused_at is not None
        machine.clock.paused_s += self.real_s - machine.clock.paused_at
        machine.clock.paused_at = None

    def _cut_network(self, machine: Machine) -> None:
        end_s = self.real_s + self.random.random() * 12
        self._cuts.append((self.real_s, end_s, machine.name))

    def _crash_directory(self, _: Machine) -> None:
        if self._directory_process.is_alive:
            self._directory_process.is_alive = False
            self.after(1 + self.random.random() * 3, self._start_directory)

    def _stop_directory(self, _: Machine) -> None:
        process = self._directory_process
        process.stopped_until = self.real_s + self.random.random() * 8

    # The end

    def _check_end(self) -> None:
        assert self.directory is not None
        self._check_told(self.directory)
        self._check_stored(self.directory)
        self._check_returned(self.directory)

    def _check_told(self, directory: Directory) -> None:
        """Running children are known, shown ones run, lost ones have a reason."""
        living = {
            (one.child, one.incarnation, machine.name)
            for machine in self.machines.values()
            for one in machine.living
        }
        shown = directory.ps()
        known = {
            (child.id, child.incarnation, child.node)
            for child in shown.children
            if child.state == "running"
        }
        if living != known:
            raise Violation(f"told: {living} live, {known} are shown")
        for child in shown.children:
            if child.state in ("placing", "unknown"):
                raise Violation(f"told: {child} has not settled")
            if child.state == "lost" and not child.reason:
                raise Violation(f"told: {child} has no reason")
            if child.state == "waiting" and len(living) < 12:
                raise Violation(f"told: {child} waits beside free places")
        if any(node.state != "up" for node in shown.nodes):
            raise Violation(f"told: {shown.nodes} after the network is whole")

    def _check_stored(self, directory: Directory) -> None:
        """FL2: a directory that begins anew would know the same."""
        stored = [(table, key, row) for (table, key), row in self._store.items()]
        now = self._moment(self._directory_clock)
        again, shown = Directory(self._epoch + 1, stored, now).ps(), directory.ps()
        for was, now_is in (
            (shown.nodes, again.nodes),
            (shown.children, again.children),
        ):
            for row in set(was).symmetric_difference(now_is):
                raise Violation(f"FL2 {row} is not the same in the store")

    def _check_returned(self, directory: Directory) -> None:
        """Tokens neither charged, written off nor held by a node are free again."""
        (account,) = directory.quota().accounts
        held: dict[str, HeldRow] = {
            row.id: row
            for machine in self.machines.values()
            for row in machine.node.held.rows()
        }
        if (held.pop(FOREIGN, None) is None) is not (self._machine_of_another is None):
            raise Violation(f"FL7.5 {FOREIGN} is its own fleet's to settle")
        is_open = [row for row in held.values() if row.state is HeldState.OPEN]
        if any(row.state is not HeldState.OPEN for row in held.values()):
            raise Violation(f"returned: {held} are not settled")
        if len(is_open) > len(self.machines):
            raise Violation(f"returned: {is_open}: more than one a node")
        orphans = [one for one in account.slices if one.id not in held]
        if orphans:
            raise Violation(f"returned: nobody has {orphans}")
        window = account.window
        idle = sum(row.left for row in is_open if row.window == window)
        charged = self._charged[window]
        missing = self._limit - charged - idle - account.free
        if account.free + idle + charged > self._limit + EPSILON:
            raise Violation(f"FL7 {-missing:.3f} more than there was is free")
        if not self._has_lost_ledger and missing > self._forgiven[window] + EPSILON:
            raise Violation(f"returned: {missing:.3f} is missing")


def _directory_type(rules: Rules) -> type[Directory]:
    members = {"account_type": rules.account}
    return cast("type[Directory]", type("Chosen", (rules.directory,), members))


def _rows_of_another_fleet() -> list[tuple[str, str, bytes | None]]:
    """Return a ledger that has a slice of another fleet, with a call under way."""
    row = HeldRow(FOREIGN, ACCOUNT, Session("L0", 1), 50.0, NEVER, reserved={"x": 9.0})
    return [
        ("ledger", "", _encoded(LedgerRow("L0", sessions=1, requests=1))),
        ("held", FOREIGN, _encoded(row)),
    ]


def _encoded(row: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(row)


def _put(store: Rows, rows: list[tuple[str, str, bytes | None]]) -> None:
    for table, key, data in rows:
        if data is None:
            store.pop((table, key), None)
        else:
            store[table, key] = data


def violation(seed: int, rules: Rules | None = None) -> str | None:
    """Return what a run breaks; None if all invariants hold."""
    try:
        Simulation(seed, rules or Rules()).run()
    except Violation as found:
        return str(found)
    return None
