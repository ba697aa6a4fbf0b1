"""One node of the fleet: its decisions on orders, leases and slices.

Messages, ends of children and the time come in; a `NodeStep` goes out: changes of the
ledger, messages, and actions that the caller does on this machine once both are done.

Rules of this file.

1. Nothing starts and no effect goes out unless the lease is held: the launchpad has armed
   its deadline, and that lies ahead (FL5, FL6).
2. An order of another session, or of a lower epoch, is ignored; the same order twice is
   one child; an incarnation that was ended here is never started (FL4).
3. A new session begins only when nothing runs of the one before.
4. An end is reported until the directory confirms it, and known for a time after that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, assert_never

from msgspec.structs import replace

from supervisor.fleet.fence import FencedError
from supervisor.fleet.lease import BEAT_S, NodeLease
from supervisor.fleet.messages import (
    VERSION,
    Beat,
    ChildNews,
    ChildReport,
    Confirm,
    End,
    HandBack,
    Join,
    Joined,
    Leave,
    Program,
    Refused,
    Renewed,
    Session,
    SliceGranted,
    SliceNews,
    SliceRefused,
    SlicesSettled,
    Start,
)
from supervisor.fleet.ray_places import RayPlaces
from supervisor.fleet.slices import fleet_of
from supervisor.fleet.states import PHASES, NodePhase, PhaseAction, PhaseEvent
from supervisor.fleet.step import Step

if TYPE_CHECKING:
    from supervisor.fleet.held_slices import HeldSlices, ReserveResult
    from supervisor.fleet.messages import FromDirectory, RayPlace, SliceReport
    from supervisor.fleet.step import Moment

KNOWN_S = 3600.0
"""How long an end is known after it was confirmed: an order of before is refused then. No
lease is longer, and no message is under way so long while one is held."""

STARTING, RUNNING = "starting", "running"
"""States of a child here that are not over; the first is never reported."""


@dataclass(frozen=True, slots=True)
class AskDaemon:
    """Ask the daemon whether it answers; `daemon_answered` is to follow, or `failed`."""

    number: int


@dataclass(frozen=True, slots=True)
class Arm:
    """Let the launchpad of a session arm a deadline; `armed` is to follow."""

    session: Session
    deadline_s: float


@dataclass(frozen=True, slots=True)
class StartChild:
    """Start a child under the launchpad of its session, and under no later one.

    `child_started` or `child_over` is to follow.
    """

    session: Session
    child: str
    name: str
    incarnation: int
    program: Program


@dataclass(frozen=True, slots=True)
class EndChild:
    """End a child; `child_over` is to follow."""

    child: str
    incarnation: int
    signal: str


@dataclass(frozen=True, slots=True)
class EndAll:
    """End all children here, starts under way included, and their launchpad.

    `all_gone` is to follow, once it is proved.
    """


@dataclass(frozen=True, slots=True)
class CallsDecided:
    """Calls that wait for a slice of this account try again.

    Attributes:
        refused_from: those with such a worst case, or a larger one, are refused; None:
            a slice has come.
        is_held: calls elsewhere hold the room for them.
    """

    account: str
    refused_from: float | None
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class OperatorNotice:
    """The fleet does not take this node; the text is for the operator."""

    reason: str


Action: TypeAlias = (
    AskDaemon | Arm | StartChild | EndChild | EndAll | CallsDecided | OperatorNotice
)


@dataclass(slots=True)
class NodeStep(Step):
    """The decision that follows from one event on a node.

    Attributes:
        actions: to be done on this machine, after the changes are stored.
    """

    actions: list[Action] = field(default_factory=list)


class Node:
    """One node, from its start to its end.

    Args:
        name: of the node, unique in the fleet.
        labels: of the node, which children may need.
        capacity: children that it takes.
        held: the slices of its ledger.
        version: of its daemon and node actor.

    Attributes:
        accounts: of the fleet, as the directory said last.
        ray: of all nodes, as the directory said last.
        own_ray: of this node, told at a join.
    """

    def __init__(
        self,
        name: str,
        labels: tuple[str, ...],
        capacity: int,
        held: HeldSlices,
        version: str = VERSION,
    ) -> None:
        self.name = name
        self.phase = NodePhase.OUT
        self.accounts: tuple[str, ...] = ()
        self.ray = RayPlaces()
        self.own_ray: RayPlace | None = None
        self.session: Session | None = None
        self.held = held
        self._labels = labels
        self._capacity = capacity
        self._version = version
        self._lease = NodeLease()
        self._fleet = ""
        self._epoch = 0
        self._tell_s = float("-inf")
        self._children: dict[str, ChildReport] = {}
        self._no_launchpad = ""
        self._unconfirmed: dict[str, None] = {}
        self._confirmed: dict[str, float] = {}  # child -> when, the oldest first

    # Membership

    @property
    def is_out(self) -> bool:
        """Whether it is in no fleet, nor about to be."""
        return self.phase is NodePhase.OUT

    @property
    def deadline_s(self) -> float:
        """Until when the launchpad lets the children live."""
        return self._lease.deadline_s

    def is_member(self, now: Moment) -> bool:
        """Return whether the lease is held."""
        return self.phase is NodePhase.MEMBER and self._lease.is_held(now.clock_s)

    def join(self, now: Moment) -> NodeStep:
        """Ask to be a member, with a new session.

        Precondition: no child of the fleet runs here.
        """
        return self._on(PhaseEvent.JOIN, now)

    def relink(
        self, labels: tuple[str, ...], ray: RayPlace | None, now: Moment
    ) -> NodeStep:
        """Take what a node actor says of its node; a member tells the directory.

        It may be another fleet's, which refuses what is still in this one.
        """
        step = NodeStep()
        self._labels, self.own_ray = labels, ray
        if self.phase is NodePhase.MEMBER:
            self._send_join(now, step)
        return step

    def leave(self, now: Moment) -> NodeStep:
        """End what runs here, then say that the node has left."""
        return self._on(PhaseEvent.LEAVE, now)

    def all_gone(self, now: Moment) -> NodeStep:
        """Go on after `EndAll`: no process of the session is left."""
        return self._on(PhaseEvent.GONE, now)

    def launchpad_gone(self, now: Moment) -> NodeStep:
        """End the session: the timer has fired, or the launchpad was killed.

        Its children are gone with it, whatever renewal has come since.
        """
        return self._on(PhaseEvent.EXPIRED, now)

    def launchpad_failed(self, reason: str) -> None:
        """Refuse orders until a launchpad has armed a deadline: none can be started."""
        self._no_launchpad = reason

    def tick(self, now: Moment) -> NodeStep:
        """Decide what follows from the time: due ten times a second."""
        step = NodeStep()
        if self._lease.is_over(now.clock_s) and self.phase is NodePhase.MEMBER:
            self._on(PhaseEvent.EXPIRED, now, step)
        elif now.clock_s >= self._lease.next_s:
            if self.phase is NodePhase.JOINING:
                self._send_join(now, step)
            elif self.phase is NodePhase.MEMBER:
                step.actions.append(AskDaemon(self._lease.begin(now.clock_s)))
        if now.clock_s >= self._tell_s:
            self._tell_s = now.clock_s + BEAT_S
            self.held.tick()
            self._tell_slices(step)
            self._forget_ends(now)
        return step

    def daemon_answered(self, number: int, others: int) -> NodeStep:
        """Send the beat that the daemon's answer allows.

        Args:
            number: of the attempt, as `AskDaemon` had it.
            others: children that the daemon has beside those of the fleet.
        """
        step = NodeStep()
        if self.phase is NodePhase.MEMBER and self.session is not None:
            ray = self.ray.digest
            step.send(self.name, Beat(self.name, self.session, number, others, ray))
            for child_id in self._unconfirmed:
                self._send_report(self._children[child_id], step)
            for request in self.held.asked():
                step.send(self.name, request)
        return step

    def failed(self, now: Moment) -> None:
        """Try again soon: the daemon or the directory could not be asked."""
        self._lease.fail(now.clock_s)

    def armed(self, deadline_s: float) -> None:
        """Count on a deadline that the launchpad has armed; not if it is gone."""
        self._lease.confirm(deadline_s)
        self._no_launchpad = ""

    def receive(self, message: FromDirectory, now: Moment) -> NodeStep:
        """Decide what follows from a message of the directory."""
        step = NodeStep()
        if isinstance(message, Refused) and self._is_of_another_fleet(message):
            return step
        if message.epoch < self._epoch:
            return step
        if isinstance(message, SlicesSettled):
            # It concerns a ledger, whatever session it is in.
            self._slice_message(message, step)
            return step
        if self.session is None or message.session != self.session:
            return step
        if message.epoch > self._epoch:
            self._meet_directory(message.epoch, now, step)
        self._dispatch(message, now, step)
        return step

    def _is_of_another_fleet(self, message: Refused) -> bool:
        return bool(self._fleet and message.fleet) and message.fleet != self._fleet

    def _meet_directory(self, epoch: int, now: Moment, step: NodeStep) -> None:
        """Tell a directory that has just started what runs here."""
        is_first = self._epoch == 0
        self._epoch = epoch
        if self.phase is NodePhase.MEMBER and not is_first:
            self._send_join(now, step)

    def _dispatch(self, message: FromDirectory, now: Moment, step: NodeStep) -> None:
        match message:
            case Joined() | Renewed() | Refused():
                self._membership_message(message, now, step)
            case Start():
                self._start(message, now, step)
            case End():
                self._end(message, step)
            case Confirm():
                self._confirm(message, now)
            case SliceGranted() | SliceRefused() | HandBack() | SlicesSettled():
                self._slice_message(message, step)
            case _:
                assert_never(message)

    def _membership_message(
        self, message: Joined | Renewed | Refused, now: Moment, step: NodeStep
    ) -> None:
        if isinstance(message, Refused):
            is_final = message.is_final
            event = PhaseEvent.REJECTED if is_final else PhaseEvent.REFUSED
            self._on(event, now, step, message.reason)
            return
        if message.ray is not None:
            self.ray = RayPlaces(message.ray)
        if isinstance(message, Joined):
            self._fleet = message.fleet
            self._lease.lease_s = message.lease_s
            self.accounts = message.accounts
            self._on(PhaseEvent.JOINED, now, step)
        self._renew(message.number, step)

    def _renew(self, number: int, step: NodeStep) -> None:
        deadline_s = self._lease.renew(number)
        is_in = self.phase in (NodePhase.JOINING, NodePhase.MEMBER)
        if deadline_s is not None and self.session is not None and is_in:
            step.actions.append(Arm(self.session, deadline_s))

    def _on(
        self,
        event: PhaseEvent,
        now: Moment,
        step: NodeStep | None = None,
        reason: str = "",
    ) -> NodeStep:
        step = NodeStep() if step is None else step
        self.phase, action = PHASES.step(self.phase, event)
        if action is PhaseAction.ASK or self.is_out:
            # Nothing runs of any fleet here: another one may take the node.
            self._fleet, self._epoch = "", 0
        match action:
            case PhaseAction.ASK:
                self._lease = NodeLease(self._lease.lease_s)
                self._children.clear()
                self._unconfirmed.clear()
                self._confirmed.clear()
                self._no_launchpad = ""
                self.session = self.held.begin_session(step)
                self._send_join(now, step)
            case PhaseAction.END_ALL:
                # Reservations stay until their calls end; no new call is paid.
                self.held.stop(step)
                step.actions.append(EndAll())
            case PhaseAction.TELL:
                step.actions.append(OperatorNotice(reason))
            case PhaseAction.SAY_LEFT:
                self.held.stop(step)
                self._tell_slices(step)
                if self.session is not None:
                    step.send(self.name, Leave(self.name, self.session))
            case PhaseAction.NOTHING | PhaseAction.BEGIN:
                pass
            case _:
                assert_never(action)
        return step

    def _send_join(self, now: Moment, step: NodeStep) -> None:
        if self.session is None:
            return
        number = self._lease.begin(now.clock_s)
        children = tuple(
            report
            for report in self._children.values()
            if report.state == RUNNING or report.child in self._unconfirmed
        )
        step.send(
            self.name,
            Join(
                self.name,
                self.session,
                number,
                self._version,
                self._labels,
                self._capacity,
                children,
                self.held.inventory(),
                self.own_ray,
                self._fleet,
            ),
        )

    # Children

    def _start(self, order: Start, now: Moment, step: NodeStep) -> None:
        is_held = self.is_member(now)
        may_refuse = self.phase is NodePhase.MEMBER and self._no_launchpad != ""
        if not is_held and not may_refuse:
            return  # it is sent again
        known = self._children.get(order.child)
        if known is None or known.incarnation < order.incarnation:
            if known is not None and known.state in (STARTING, RUNNING):
                return  # its end has not been seen here: the order comes again
            if not is_held:
                report = ChildReport(order.child, order.incarnation, "refused")
                self._over(replace(report, reason=self._no_launchpad), step)
                return
            self._unconfirmed.pop(order.child, None)
            self._confirmed.pop(order.child, None)
            self._children[order.child] = ChildReport(
                order.child, order.incarnation, STARTING
            )
            step.actions.append(
                StartChild(
                    order.session,
                    order.child,
                    order.name,
                    order.incarnation,
                    order.program,
                )
            )
        elif known.incarnation == order.incarnation and known.state != STARTING:
            self._send_report(known, step)

    def _end(self, order: End, step: NodeStep) -> None:
        known = self._children.get(order.child)
        if known is None or known.incarnation < order.incarnation:
            report = ChildReport(
                order.child, order.incarnation, "ended", reason="ended before it began"
            )
            self._over(report, step)
        elif known.incarnation > order.incarnation:
            return
        elif known.state in (STARTING, RUNNING):
            step.actions.append(EndChild(order.child, order.incarnation, order.signal))
        else:
            self._send_report(known, step)

    def child_started(self, child: str, incarnation: int, pid: int) -> NodeStep:
        """Tell that a child's daemon has started it."""
        step = NodeStep()
        known = self._children.get(child)
        is_awaited = known is not None and known.incarnation == incarnation
        if known is not None and is_awaited and known.state == STARTING:
            report = replace(known, state=RUNNING, pid=pid)
            self._children[child] = report
            self._send_report(report, step)
        return step

    def child_over(self, report: ChildReport, now: Moment) -> NodeStep:
        """Tell that a child has ended, or was not started, until it is confirmed.

        Where no lease is held it is told if the session goes on, with the next beat.
        """
        step = NodeStep()
        known = self._children.get(report.child)
        is_current = known is not None and known.incarnation == report.incarnation
        if known is not None and is_current and known.state in (STARTING, RUNNING):
            # That it began may not have been heard.
            report = replace(report, pid=known.pid)
            self._note_over(report)
            if self.is_member(now):
                self._send_report(report, step)
        return step

    def _over(self, report: ChildReport, step: NodeStep) -> None:
        self._note_over(report)
        self._send_report(report, step)

    def _note_over(self, report: ChildReport) -> None:
        self._children[report.child] = report
        self._confirmed.pop(report.child, None)
        self._unconfirmed[report.child] = None

    def _confirm(self, message: Confirm, now: Moment) -> None:
        child = message.child
        is_told = child in self._unconfirmed
        if is_told and self._children[child].incarnation == message.incarnation:
            del self._unconfirmed[child]
            self._confirmed[child] = now.clock_s

    def _forget_ends(self, now: Moment) -> None:
        while self._confirmed:
            child, confirmed_s = next(iter(self._confirmed.items()))
            if now.clock_s - confirmed_s < KNOWN_S:
                return
            del self._confirmed[child], self._children[child]

    def _send_report(self, report: ChildReport, step: NodeStep) -> None:
        if self.session is not None:
            step.send(self.name, ChildNews(self.name, self.session, report))

    def check_effect(self, child: str, incarnation: int, now: Moment) -> None:
        """Let an effect of a child go out; due before each, at every door (FL6).

        Raises:
            FencedError: the lease is over, or it is not this incarnation that runs.
        """
        if not self.is_member(now):
            raise FencedError(
                f"cannot let {child!r} act: the lease of node {self.name!r} is over"
            )
        known = self._children.get(child)
        if known is None or known.incarnation != incarnation:
            raise FencedError(
                f"cannot let {child!r} act: incarnation {incarnation} is not the one"
                " that runs here"
            )

    # Slices

    def reserve(
        self, account: str, call: str, worst: float, now: Moment
    ) -> tuple[ReserveResult, NodeStep]:
        """Reserve a call's worst case; it may be sent once the change is stored.

        Raises:
            FencedError: the lease is over.
        """
        step = NodeStep()
        if self.session is None or not self.is_member(now):
            raise FencedError(
                f"cannot pay a call: the lease of node {self.name!r} is over"
            )
        outcome = self.held.reserve(
            account, call, worst, self.session, now.wall_s, step
        )
        return outcome, step

    def settle(self, call: str, cost: float) -> NodeStep:
        """Count what a call cost; 0 if it was never sent."""
        step = NodeStep()
        self.held.settle(call, cost, step)
        return step

    def _slice_message(
        self,
        message: SliceGranted | SliceRefused | HandBack | SlicesSettled,
        step: NodeStep,
    ) -> None:
        session = self.session
        if isinstance(message, SlicesSettled):
            if message.ledger == self.held.ledger.id:
                self.held.forget(message.slices, step)
        elif isinstance(message, HandBack):
            self.held.hand_back(message, step)
            self._tell_slices(step)
        elif session is None:
            return
        elif isinstance(message, SliceGranted):
            if self.held.take(message, session, step):
                step.actions.append(CallsDecided(message.account, None))
        elif (asked := self.held.refuse(message, session)) is not None:
            decided = CallsDecided(message.account, asked.worst, message.is_held)
            step.actions.append(decided)

    def _tell_slices(self, step: NodeStep) -> None:
        # Those of another fleet stay in the ledger, for that one to settle.
        reports = tuple(one for one in self.held.reports() if self._is_own(one))
        if reports:
            step.send(self.name, SliceNews(self.name, self.held.ledger.id, reports))

    def _is_own(self, report: SliceReport) -> bool:
        return self._fleet == "" or fleet_of(report.slice) in ("", self._fleet)
