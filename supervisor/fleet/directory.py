"""The directory: nodes, children, leases and accounts of one fleet, as decisions.

A message or the time comes in, with the moment; a `Step` goes out. The caller stores its
changes in one transaction, then sends.

Rules of this file.

1. A node is lost in the store no later than anything of it is placed again: both are in
   one transaction, and the order goes out after it.
2. An incarnation is used once. It leaves its node by the node's answer or its loss.
3. A message of another session than the node's own changes no node and no child.
4. A node's lease is the longest that any directory has told its session: it may reckon
   by that one until it has heard of another.
5. An order that is refused changes nothing: it has no step that could be stored.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, assert_never

import msgspec
from msgspec.structs import replace

from supervisor.fleet.lease import LEASE_S, LeaseTable, Standing
from supervisor.fleet.listings import (
    ShownAccount,
    ShownChild,
    ShownFleet,
    ShownNode,
    ShownQuota,
    ShownSlice,
    ShownWorkspace,
)
from supervisor.fleet.messages import (
    VERSION,
    AskSlice,
    Beat,
    ChildNews,
    ChildReport,
    Confirm,
    End,
    Join,
    Joined,
    Leave,
    Program,
    RayPlace,
    Refused,
    Renewed,
    Session,
    SliceNews,
    SlicesSettled,
    Start,
    VersionError,
    check_version,
    workspace_name,
)
from supervisor.fleet.placement import Candidate, Needs, PlacementError, place
from supervisor.fleet.ray_places import RayPlaces, is_place
from supervisor.fleet.slices import (
    AccountRow,
    RequestRow,
    RootAccount,
    SliceRow,
    fleet_of,
    window_at,
)
from supervisor.fleet.states import (
    CHILDREN,
    NODES,
    ChildAction,
    ChildEvent,
    ChildState,
    NodeAction,
    NodeEvent,
    NodeState,
)
from supervisor.fleet.step import Step, StoreError
from supervisor.spawn.restart_policies import is_placed_again

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supervisor.fleet.messages import FromNode, SliceReport
    from supervisor.fleet.step import Moment

RESEND_S = 1.0
"""Time after which an unanswered order is sent again, to the same node."""

MOST_AT_ONCE = 100_000
"""Most children of one request."""

MOST_OVER = 1000
"""Most ended children in the list, the newest, and as many that never ran.

Apart, so that a batch which ends at once does not push out its unstarted children.
"""

MOST_GONE = 1000
"""Most lost or left nodes in the list, the newest; ones with slices stay longer."""

_GONE = frozenset({NodeState.LOST, NodeState.LEFT})
_ON_NODE = frozenset(
    {
        ChildState.PLACING,
        ChildState.WITHDRAWN,
        ChildState.RUNNING,
        ChildState.ENDING,
    }
)
_SEEN = frozenset({ChildState.RUNNING, ChildState.ENDING})
_OVER = frozenset({ChildState.LOST, ChildState.ENDED})
_SHOWN = {ChildState.WITHDRAWN: "placing", ChildState.ENDING: "running"}
_EVENTS = {
    "running": ChildEvent.STARTED,
    "ended": ChildEvent.ENDED,
    "failed": ChildEvent.FAILED,
    "refused": ChildEvent.REFUSED,
}


class FleetError(Exception):
    """An order is refused; the text says why and what to do."""


class NodeRow(msgspec.Struct, frozen=True):
    """A node as it is stored.

    Attributes:
        since_s: when it came to its state, seconds since the epoch.
        lease_s: the longest by which its session may reckon, of all directories.
    """

    name: str
    session: Session
    state: NodeState
    since_s: float
    reason: str
    labels: tuple[str, ...]
    capacity: int
    version: str
    ray: RayPlace | None = None
    lease_s: float = 0.0


class ChildRow(msgspec.Struct, frozen=True):
    """A child as it is stored.

    Attributes:
        id: never used twice.
        session: of its node, when it was placed there.
        incarnation: the one that is, or was last.
        waits: it may wait for room.
        signal: by which it is to be ended.
        is_new: no node has told that it runs, or ran.
    """

    id: str
    name: str
    program: Program
    needs: Needs
    waits: bool
    state: ChildState
    incarnation: int = 0
    node: str | None = None
    session: Session | None = None
    reason: str = ""
    status: int | None = None
    pid: int | None = None
    signal: str = "TERM"
    is_new: bool = False


class MetaRow(msgspec.Struct, frozen=True):
    """The single row.

    Attributes:
        children: made so far, for their ids.
        fleet: its id, made with the store; empty in one of before there were ids.
    """

    children: int = 0
    fleet: str = ""


class PlacementRequest(msgspec.Struct, frozen=True):
    """Children to be placed.

    Attributes:
        name: of the child, or what their names begin with.
        count: how many; None for one without a number behind its name.
        wait: they may wait for a place.
    """

    name: str
    program: Program
    needs: Needs = Needs()
    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_AT_ONCE)] | None = None
    wait: bool = False

    def names(self) -> tuple[str, ...]:
        """Return the names of the children."""
        if self.count is None:
            return (self.name,)
        return tuple(f"{self.name}-{number}" for number in range(self.count))


_ROWS: dict[str, type[msgspec.Struct]] = {
    "nodes": NodeRow,
    "children": ChildRow,
    "accounts": AccountRow,
    "slices": SliceRow,
    "requests": RequestRow,
    "meta": MetaRow,
}


def _read_row(table: str, key: str, data: bytes) -> msgspec.Struct:
    """Return a row as it was stored.

    Raises:
        StoreError: it was stored by another version, or is damaged.
    """
    try:
        row: msgspec.Struct = msgspec.msgpack.decode(data, type=_ROWS[table])
    except (KeyError, msgspec.DecodeError) as why:
        raise StoreError(
            f"cannot read the fleet's store: {key!r:.40} of {table!r:.20}: {why!s:.60};"
            " take its version of sandhost, or an empty store"
        ) from None
    return row


class Directory:
    """The directory of one fleet.

    Args:
        epoch: counted up in the store before; nodes refuse a lower one.
        stored: (table, key, row) of all that the store has, rows as msgpack.
        now: every node that is a member has one full lease from now.
        lease_s: L.
        version: nodes of another one are refused.

    Raises:
        StoreError: the store cannot be read.
    """

    account_type = RootAccount

    def __init__(
        self,
        epoch: int,
        stored: Iterable[tuple[str, str, bytes]],
        now: Moment,
        lease_s: float = LEASE_S,
        version: str = VERSION,
    ) -> None:
        self.epoch = epoch
        self._version = version
        self._leases = LeaseTable(lease_s)
        self._meta = MetaRow()
        self._nodes: dict[str, NodeRow] = {}
        self._ray: RayPlaces | None = None
        self._others: Counter[str] = Counter()
        self._children: dict[str, ChildRow] = {}
        self._names: dict[str, str] = {}
        self._on: dict[str, dict[str, None]] = {}  # node -> children, in order
        self._waiting: dict[str, None] = {}
        self._sent: dict[str, float] = {}  # child -> when its order went out last
        self._over: dict[str, None] = {}
        self._over_unstarted: dict[str, None] = {}
        self.accounts: dict[str, RootAccount] = {}
        self._load(stored)
        for node in self._nodes.values():
            if node.state in (NodeState.UP, NodeState.UNKNOWN):
                self._grant_lease(node.name, now)

    def _load(self, stored: Iterable[tuple[str, str, bytes]]) -> None:
        rows = [(key, _read_row(table, key, data)) for table, key, data in stored]
        slices = [row for _, row in rows if isinstance(row, SliceRow)]
        requests = [(key, row) for key, row in rows if isinstance(row, RequestRow)]
        children = [row for _, row in rows if isinstance(row, ChildRow)]
        # In the order in which they were made: a store has c10 before c9.
        for child in sorted(children, key=lambda row: (len(row.id), row.id)):
            self._index(child)
        for key, row in rows:
            if isinstance(row, NodeRow):
                self._nodes[key] = row
            elif isinstance(row, MetaRow):
                self._meta = row
            elif isinstance(row, AccountRow):
                prefix = f"{key}/"
                self.accounts[key] = self.account_type(
                    row,
                    [one for one in slices if one.account == key],
                    [
                        (name.removeprefix(prefix), one)
                        for name, one in requests
                        if name.startswith(prefix)
                    ],
                )

    def name_fleet(self, fleet: str) -> Step:
        """Give the fleet an id if its store has none: due before anything else.

        Args:
            fleet: that no other fleet has.
        """
        step = Step()
        if not self._meta.fleet:
            self._put_meta(replace(self._meta, fleet=fleet), step)
        return step

    # Messages and time

    def receive(self, message: FromNode, now: Moment) -> Step:
        """Decide what follows from a node's message."""
        step = Step()
        # A lease that has run out is lost before anything of its node counts.
        self._expire(now, step)
        match message:
            case Join():
                self._join(message, now, step)
            case Beat():
                self._beat(message, now, step)
            case ChildNews():
                self._child_news(message, now, step)
            case AskSlice():
                self._ask_slice(message, now, step)
            case SliceNews():
                self._slice_news(message.node, message.ledger, message.slices, step)
            case Leave():
                self._leave(message, now, step)
            case _:
                assert_never(message)
        self._settle_requests(now, step)
        return step

    def tick(self, now: Moment) -> Step:
        """Decide what follows from the time: due ten times a second."""
        step = Step()
        self._expire(now, step)
        self._show_silent(now, step)
        self._settle_requests(now, step)
        for account in self.accounts.values():
            account.begin_window(now, step)
        self._place_waiting(now, step)
        self._send_again(now, step)
        return step

    def _expire(self, now: Moment, step: Step) -> None:
        for name in self._leases.nodes():
            if self._leases.standing(name, now.clock_s) is Standing.OUT:
                reason = f"not heard for {self._leases.length_of(name):g} s"
                self._on_node(name, NodeEvent.EXPIRED, reason, now, step)

    def _show_silent(self, now: Moment, step: Step) -> None:
        for name in self._leases.nodes():
            is_up = self._nodes[name].state is NodeState.UP
            standing = self._leases.standing(name, now.clock_s)
            if is_up and standing is Standing.SILENT:
                self._on_node(name, NodeEvent.SILENT, "does not answer", now, step)

    def _settle_requests(self, now: Moment, step: Step) -> None:
        for account in self.accounts.values():
            account.decide_pending(self.epoch, now, step)

    # Nodes

    def _join(self, message: Join, now: Moment, step: Step) -> None:
        node = self._nodes.get(message.node)
        refusal = self._why_not(message, node)
        if refusal is not None:
            self._refuse(message, *refusal, step)
            return
        if node is None:
            self._put_node(self._joined_row(message, now), step)
            self._grant_lease(message.node, now)
        elif node.session == message.session:
            # Its Ray may have been started anew within the session.
            lease_s = max(node.lease_s, self._leases.lease_s)
            row = replace(node, labels=message.labels, ray=message.ray, lease_s=lease_s)
            if row != node:
                self._put_node(row, step)
            self._on_node(message.node, NodeEvent.HEARD, "", now, step)
        else:
            reason = "its daemon has joined anew"
            self._on_node(message.node, NodeEvent.JOIN, reason, now, step)
            self._put_node(self._joined_row(message, now), step)
            self._grant_lease(message.node, now)
        self._slice_news(message.node, message.session.ledger, message.slices, step)
        held = frozenset(report.slice for report in message.slices)
        for account in self.accounts.values():
            account.take_inventory(message.node, message.session, held, step)
        for report in message.children:
            self._child_report(message.node, message.session, report, now, step)
        lease_s = self._leases.lease_s
        accounts = tuple(self._open_accounts())
        answer = Joined(
            self.epoch,
            message.session,
            message.number,
            lease_s,
            accounts,
            self._ray_places().places,
            self._meta.fleet,
        )
        step.send(message.node, answer)

    def _refuse(
        self, message: Join | Beat, reason: str, is_final: bool, step: Step
    ) -> None:
        fleet = self._meta.fleet
        refused = Refused(self.epoch, message.session, reason, is_final, fleet)
        step.send(message.node, refused)

    def _why_not(self, message: Join, node: NodeRow | None) -> tuple[str, bool] | None:
        """Return why a node may not join, and whether that is final."""
        if (text := self._why_never(message)) is not None:
            return text, True
        if node is None or node.session == message.session:
            # A node that has joined is not listed any more long after it was lost.
            is_over = message.fleet != "" if node is None else node.state in _GONE
            return ("its session is over", False) if is_over else None
        theirs, ours = message.session, node.session
        if theirs.ledger == ours.ledger:
            # The node proved its children gone before it made the higher number.
            is_old = theirs.number < ours.number
            return ("another session has begun since", False) if is_old else None
        if node.state in (NodeState.UP, NodeState.UNKNOWN):
            text = f"cannot join as {message.node!r}: a node of that name is"
            return f"{text} {node.state.value}; choose another name", True
        return None

    def _why_never(self, message: Join) -> str | None:
        """Return why a node may not join under any session and name."""
        try:
            check_version(f"node {message.node!r}", message.version, self._version)
        except VersionError as why:
            return str(why)
        text = f"cannot join as {message.node!r}:"
        if message.ray is not None and not is_place(message.ray):
            text = f"{text} {message.ray.addresses!r:.60} are no IP addresses"
            return f"{text}; give one by --bind"
        if message.fleet and self._meta.fleet not in ("", message.fleet):
            text = f"{text} its daemon is still in another fleet"
            return f"{text}; run `sandhost fleet leave` there first"
        return None

    def _joined_row(self, message: Join, now: Moment) -> NodeRow:
        return NodeRow(
            message.node,
            message.session,
            NodeState.UP,
            now.wall_s,
            "",
            message.labels,
            message.capacity,
            message.version,
            message.ray,
            self._leases.lease_s,
        )

    def _grant_lease(self, name: str, now: Moment) -> None:
        self._leases.grant(name, now.clock_s, self._nodes[name].lease_s)

    def _ray_places(self) -> RayPlaces:
        """Return where Ray of nodes may listen, of those that have left too.

        A Ray that its user has started stays, and so does that of a lost machine.
        """
        if self._ray is None:
            self._ray = RayPlaces(
                node.ray for node in self._nodes.values() if node.ray is not None
            )
        return self._ray

    def _beat(self, message: Beat, now: Moment, step: Step) -> None:
        if not self._is_member(message.node, message.session):
            self._refuse(message, "its session is over", False, step)
            return
        self._on_node(message.node, NodeEvent.HEARD, "", now, step)
        self._others[message.node] = message.others
        ray = self._ray_places()
        new = None if message.ray == ray.digest else ray.places
        answer = Renewed(self.epoch, message.session, message.number, new)
        step.send(message.node, answer)

    def _leave(self, message: Leave, now: Moment, step: Step) -> None:
        if self._is_member(message.node, message.session):
            self._on_node(message.node, NodeEvent.LEAVE, "it has left", now, step)

    def _is_member(self, name: str, session: Session) -> bool:
        node = self._nodes.get(name)
        if node is None or node.session != session:
            return False
        return node.state in (NodeState.UP, NodeState.UNKNOWN)

    def _on_node(
        self, name: str, event: NodeEvent, reason: str, now: Moment, step: Step
    ) -> NodeAction:
        node = self._nodes[name]
        state, action = NODES.step(node.state, event)
        if state is not node.state:
            row = replace(node, state=state, since_s=now.wall_s, reason=reason)
            self._put_node(row, step)
        if action is NodeAction.RENEW:
            self._grant_lease(name, now)
        if action in (NodeAction.LOSE, NodeAction.REPLACE):
            self._leases.drop(name)
            self._lose_children(name, reason, step)
            for account in self.accounts.values():
                account.lose(name, step)
        if action is NodeAction.WRITE_OFF:
            for account in self.accounts.values():
                account.write_off(name, step)
        if state in _GONE:
            self._bound_gone(step)
        return action

    def _bound_gone(self, step: Step) -> None:
        gone = [node for node in self._nodes.values() if node.state in _GONE]
        if len(gone) <= MOST_GONE:
            return
        accounts = self.accounts.values()
        idle = [one for one in gone if not any(it.holds(one.name) for it in accounts)]
        idle.sort(key=lambda node: node.since_s, reverse=True)
        for node in idle[MOST_GONE:]:
            self._remove_node(node.name, step)

    def _lose_children(self, name: str, reason: str, step: Step) -> None:
        for child_id in tuple(self._on.get(name, ())):
            row = self._children[child_id]
            is_again = is_placed_again(row.program.restart)
            event = ChildEvent.LOSE_AGAIN if is_again else ChildEvent.LOSE
            told = f"node {name!r} lost: {reason}"
            if row.program.base is not None:
                told += "; what it wrote stays there"
            self._on_child(replace(row, reason=told), event, step)

    def forget(self, name: str, now: Moment) -> Step:
        """Write a lost node's slices off (`fleet forget`).

        Raises:
            FleetError: there is no such node, or it is not lost.
        """
        step = Step()
        if name not in self._nodes:
            raise FleetError(f"cannot forget {name!r}: no such node; see `fleet ps`")
        action = self._on_node(name, NodeEvent.FORGET, "forgotten", now, step)
        if action is NodeAction.REFUSE:
            state = self._nodes[name].state.value
            raise FleetError(
                f"cannot forget {name!r}: it is {state}; only a node that is lost or"
                " has left can be forgotten"
            )
        return step

    # Children

    def spawn(
        self, request: PlacementRequest, now: Moment
    ) -> tuple[dict[str, str], Step]:
        """Place children, all or none; return their ids by name.

        Those that may wait are accepted at once, and each placed when it has a place.

        Raises:
            FleetError: a name is taken, or there is no place; nothing has changed.
        """
        step = Step()
        names = request.names()
        for name in names:
            row = self._children.get(self._names.get(name, ""))
            if row is not None and row.state not in _OVER:
                raise FleetError(
                    f"cannot spawn {name!r}: the name is taken; end that child first,"
                    " or choose another name"
                )
        nodes: list[str] = []
        reason = ""
        try:
            nodes = place(request.needs, len(names), self._candidates(now))
        except PlacementError as why:
            reason = str(why)
            if not request.wait:
                raise FleetError(reason) from None
        for name in names:
            self._make_child(request, name, reason, step)
        for name, node in zip(names, nodes, strict=False):
            row = self._children[self._names[name]]
            self._order(row, node, now, step)
        return {name: self._names[name] for name in names}, step

    def _make_child(
        self, request: PlacementRequest, name: str, reason: str, step: Step
    ) -> None:
        before = self._names.get(name)
        if before is not None:
            self._remove_child(before, step)
        number = self._meta.children + 1
        self._put_meta(replace(self._meta, children=number), step)
        row = ChildRow(
            id=f"c{number}",
            name=name,
            program=request.program,
            needs=request.needs,
            waits=request.wait,
            state=ChildState.WAITING,
            reason=reason,
            is_new=True,
        )
        self._put_child(row, step)

    def kill(
        self, name: str, signal: str, now: Moment, child: str | None = None
    ) -> Step:
        """End a child; its node is asked until it answers.

        Args:
            name: of the child.
            signal: ``TERM`` or ``KILL``.
            now: the time.
            child: its id; None for whatever child has that name.

        Raises:
            FleetError: there is none of that name, or with another id.
        """
        step = Step()
        row = self._children.get(self._names.get(name, ""))
        if row is None or child not in (None, row.id):
            raise FleetError(f"cannot end {name!r}: no such child; see `fleet ps`")
        self._sent[row.id] = now.clock_s
        self._on_child(replace(row, signal=signal), ChildEvent.KILL, step)
        return step

    def _child_news(self, message: ChildNews, now: Moment, step: Step) -> None:
        if self._is_member(message.node, message.session):
            self._child_report(message.node, message.session, message.report, now, step)

    def _child_report(
        self,
        node: str,
        session: Session,
        report: ChildReport,
        now: Moment,
        step: Step,
    ) -> None:
        """Adopt what matches (id, incarnation, session); end the rest (FL2)."""
        row = self._children.get(report.child)
        is_known = row is not None and row.incarnation == report.incarnation
        is_here = row is not None and row.session == session and row.state in _ON_NODE
        is_running = report.state == "running"
        if row is None or not is_known or not is_here:
            if is_running:
                step.send(
                    node, End(self.epoch, session, report.child, report.incarnation)
                )
            else:
                self._confirm(node, session, report, step)
            return
        event = _EVENTS.get(report.state)
        if event is None:
            return
        row = replace(
            row,
            pid=row.pid if report.pid is None else report.pid,
            status=report.status,
            reason=report.reason or row.reason,
        )
        self._on_child(row, event, step)
        if is_running:
            return
        self._confirm(node, session, report, step)
        if event is ChildEvent.REFUSED:
            # Until its next beat says how many others it has, it is taken as full.
            self._others[node] = self._nodes[node].capacity
        self._place_waiting(now, step)

    def _confirm(
        self, node: str, session: Session, report: ChildReport, step: Step
    ) -> None:
        step.send(node, Confirm(self.epoch, session, report.child, report.incarnation))

    def _on_child(self, row: ChildRow, event: ChildEvent, step: Step) -> None:
        state, action = CHILDREN.step(row.state, event)
        before = self._children[row.id]
        node, session = row.node, row.session
        if action is ChildAction.SETTLE and state is ChildState.WAITING:
            row = replace(row, state=state, node=None, session=None, pid=None)
        else:
            row = replace(row, state=state)
        if state in _SEEN:
            row = replace(row, is_new=False)
        if row != before:
            self._put_child(row, step)
        if action is ChildAction.ORDER_END and node and session:
            step.send(
                node, End(self.epoch, session, row.id, row.incarnation, row.signal)
            )

    def _order(self, row: ChildRow, node: str, now: Moment, step: Step) -> None:
        state, _ = CHILDREN.step(row.state, ChildEvent.PLACE)
        row = replace(
            row,
            state=state,
            node=node,
            session=self._nodes[node].session,
            incarnation=row.incarnation + 1,
            status=None,
            pid=None,
        )
        self._put_child(row, step)
        self._send_start(row, now, step)

    def _send_start(self, row: ChildRow, now: Moment, step: Step) -> None:
        self._sent[row.id] = now.clock_s
        if row.node is not None and row.session is not None:
            step.send(
                row.node,
                Start(
                    self.epoch,
                    row.session,
                    row.id,
                    row.name,
                    row.incarnation,
                    row.program,
                ),
            )

    def _send_again(self, now: Moment, step: Step) -> None:
        for child_id, sent_s in tuple(self._sent.items()):
            row = self._children.get(child_id)
            if (
                row is None
                or row.state not in _ON_NODE
                or row.state is ChildState.RUNNING
            ):
                del self._sent[child_id]
            elif now.clock_s - sent_s < RESEND_S:
                continue
            elif row.state is ChildState.PLACING:
                self._send_start(row, now, step)
            elif row.node is not None and row.session is not None:
                self._sent[child_id] = now.clock_s
                end = End(self.epoch, row.session, row.id, row.incarnation, row.signal)
                step.send(row.node, end)

    def _place_waiting(self, now: Moment, step: Step) -> None:
        """Place what waits, first come first; one that finds no place delays no other.

        A child that may not wait, and has never run, is ended: its order is refused.
        """
        tried: set[Needs] = set()
        for child_id in tuple(self._waiting):
            row = self._children[child_id]
            if row.needs not in tried:
                try:
                    (node,) = place(row.needs, 1, self._candidates(now))
                except PlacementError:
                    tried.add(row.needs)
                else:
                    self._order(row, node, now, step)
                    continue
            if row.is_new and not row.waits:
                self._on_child(row, ChildEvent.KILL, step)

    def _candidates(self, now: Moment) -> Iterable[Candidate]:
        for node in self._nodes.values():
            if node.state is not NodeState.LEFT:
                used = len(self._on.get(node.name, ())) + self._others[node.name]
                standing = self._leases.standing(node.name, now.clock_s)
                yield Candidate(
                    node.name,
                    frozenset(node.labels),
                    node.capacity - used,
                    standing is Standing.HELD,
                )

    # Accounts

    def open_account(self, name: str, limit: float, kind: str, now: Moment) -> Step:
        """Make an account, or give one that is there another limit and window.

        Raises:
            FleetError: its name cannot be one.
        """
        step = Step()
        if not name or "/" in name:
            raise FleetError(
                f"cannot open account {name!r}: a name is not empty and has no '/';"
                " choose another"
            )
        account = self.accounts.get(name)
        if account is None:
            window = window_at(kind, now.wall_s)
            row = AccountRow(name, limit, kind, window, fleet=self._meta.fleet)
            self.accounts[name] = self.account_type(row)
            step.put("accounts", name, row)
        else:
            account.set_rule(limit, kind, self._meta.fleet, now, step)
        return step

    def close_account(self, name: str) -> Step:
        """Let nodes that join from now on pay nothing in an account, if there is one."""
        step = Step()
        account = self.accounts.get(name)
        if account is not None and account.row.is_open:
            account.close(step)
        return step

    def _open_accounts(self) -> dict[str, RootAccount]:
        return {name: one for name, one in self.accounts.items() if one.row.is_open}

    def _ask_slice(self, message: AskSlice, now: Moment, step: Step) -> None:
        account = self.accounts.get(message.account)
        if account is not None and self._is_member(message.node, message.session):
            account.ask(message, self.epoch, now, step)

    def _slice_news(
        self, node: str, ledger: str, reports: tuple[SliceReport, ...], step: Step
    ) -> None:
        # The ledger keeps those of another fleet, for that one to settle.
        own = [one for one in reports if fleet_of(one.slice) in ("", self._meta.fleet)]
        for report in own:
            account = self.accounts.get(report.slice.rpartition("/")[0])
            if account is not None:
                account.report(report, ledger, step)
        # Those that were closed before are confirmed again: the ledger waits for it.
        ended = tuple(report.slice for report in own if report.is_last)
        if ended:
            step.send(node, SlicesSettled(self.epoch, ledger, ended))

    # Views

    def ps(self) -> ShownFleet:
        """Return all nodes and children (`fleet ps --json`)."""
        nodes = tuple(
            ShownNode(
                node.name,
                node.state.value,
                node.since_s,
                node.reason,
                str(node.session),
                node.capacity,
                node.labels,
                node.version,
            )
            for node in self._nodes.values()
        )
        return ShownFleet(nodes, tuple(map(self._shown, self._children.values())))

    def child(self, name: str) -> ShownChild | None:
        """Return the child of a name as `ps` shows it; None if there is none."""
        row = self._children.get(self._names.get(name, ""))
        return None if row is None else self._shown(row)

    def workspace(self, name: str) -> ShownWorkspace | None:
        """Return the workspace of a child on its node; None if its order had no base.

        Raises:
            FleetError: there is no such child, or it is on no node.
        """
        row = self._children.get(self._names.get(name, ""))
        if row is None:
            raise FleetError(f"cannot find {name!r}: no such child; see `fleet ps`")
        if row.program.base is None:
            return None
        if row.node is None or row.session is None:
            raise FleetError(f"cannot find the workspace of {name!r}: it is on no node")
        own = workspace_name(row.id, row.incarnation, row.session)
        return ShownWorkspace(row.node, own, row.program.base, row.state in _OVER)

    def children(self, ids: Iterable[str]) -> tuple[ShownChild, ...]:
        """Return children as `ps` shows them; those that it does not list are left out."""
        rows = map(self._children.get, ids)
        return tuple(self._shown(row) for row in rows if row is not None)

    def state(self, child_id: str) -> str | None:
        """Return the state of a child as `ps` shows it; None if it is not listed."""
        row = self._children.get(child_id)
        return None if row is None else self._shown_state(row)

    def _shown_state(self, row: ChildRow) -> str:
        node = self._nodes.get(row.node or "")
        is_silent = node is not None and node.state is NodeState.UNKNOWN
        if is_silent and row.state in _SEEN:
            return "unknown"
        return _SHOWN.get(row.state, row.state.value)

    def _shown(self, row: ChildRow) -> ShownChild:
        return ShownChild(
            row.id,
            row.name,
            row.node,
            self._shown_state(row),
            row.incarnation,
            row.program.restart,
            row.reason,
            row.status,
            row.pid,
        )

    def quota(self) -> ShownQuota:
        """Return the open accounts and their slices (`fleet quota --json`)."""
        return ShownQuota(
            tuple(
                ShownAccount(
                    account.row.name,
                    account.row.limit,
                    account.row.spent + sum(one.spent for one in account.slices_on()),
                    account.free,
                    account.row.window,
                    tuple(
                        ShownSlice(
                            one.id,
                            one.node,
                            one.size,
                            max(0.0, one.size - one.spent),
                            one.state,
                        )
                        for one in account.slices()
                    ),
                )
                for account in self._open_accounts().values()
            )
        )

    # Rows

    def _put_meta(self, row: MetaRow, step: Step) -> None:
        self._meta = row
        step.put("meta", "", row)

    def _put_node(self, row: NodeRow, step: Step) -> None:
        self._nodes[row.name] = row
        self._ray = None
        step.put("nodes", row.name, row)

    def _remove_node(self, name: str, step: Step) -> None:
        del self._nodes[name]
        self._on.pop(name, None)
        self._others.pop(name, None)
        self._ray = None
        for account in self.accounts.values():
            account.drop(name, step)
        step.put("nodes", name, None)

    def _put_child(self, row: ChildRow, step: Step) -> None:
        before = self._children.get(row.id)
        if before is not None and before.node is not None:
            self._on.get(before.node, {}).pop(row.id, None)
        self._index(row)
        step.put("children", row.id, row)
        for over in (self._over, self._over_unstarted):
            while len(over) > MOST_OVER:
                self._remove_child(next(iter(over)), step)

    def _index(self, row: ChildRow) -> None:
        self._children[row.id] = row
        self._names[row.name] = row.id
        if row.state in _ON_NODE and row.node is not None:
            self._on.setdefault(row.node, {})[row.id] = None
            self._sent.setdefault(row.id, float("-inf"))
        is_over, has_run = row.state in _OVER, row.pid is not None
        for is_there, ids in (
            (row.state is ChildState.WAITING, self._waiting),
            (is_over and has_run, self._over),
            (is_over and not has_run, self._over_unstarted),
        ):
            if is_there:
                ids.setdefault(row.id, None)
            else:
                ids.pop(row.id, None)

    def _remove_child(self, child_id: str, step: Step) -> None:
        row = self._children.pop(child_id)
        self._over.pop(child_id, None)
        self._over_unstarted.pop(child_id, None)
        self._sent.pop(child_id, None)
        if self._names.get(row.name) == child_id:
            del self._names[row.name]
        step.put("children", child_id, None)
