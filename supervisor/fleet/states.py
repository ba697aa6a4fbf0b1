"""States of nodes and children in the directory, and of a node: total tables (I3).

Rules of this file.

1. Each table has an entry for every (state, event); the import finds a missing one.
2. Messages of a peer can come at any time: such an event is ignored where it says nothing
   new, and only the directory's own mistakes are faults.
3. A child that is `placing` leaves its node by the node's answer or its loss (FL4).
"""

from __future__ import annotations

from enum import Enum

from hostlib.state_table import StateTable


class NodeState(Enum):
    """A node, as the directory knows it."""

    UP = "up"
    UNKNOWN = "unknown"  # silent, its lease goes on
    LOST = "lost"
    LEFT = "left"


class NodeEvent(Enum):
    """An event of a node in the directory."""

    JOIN = "join"  # with a session that may begin
    HEARD = "heard"  # of its session
    SILENT = "silent"
    EXPIRED = "lease out"
    LEAVE = "leave"
    FORGET = "forget"


class NodeAction(Enum):
    """The directory's action after an event."""

    NOTHING = "-"
    ADMIT = "admit"
    REPLACE = "lose its children, admit"
    RENEW = "renew"
    LOSE = "lose its children"
    REFUSE = "refuse"
    WRITE_OFF = "write its slices off"


class ChildState(Enum):
    """A child, as the directory knows it."""

    WAITING = "waiting"
    PLACING = "placing"  # ordered, not answered
    WITHDRAWN = "withdrawn"  # ordered, not answered, and ended by somebody
    RUNNING = "running"
    ENDING = "ending"
    LOST = "lost"
    ENDED = "ended"


class ChildEvent(Enum):
    """An event of a child; waiting and ended ones get only PLACE and KILL."""

    PLACE = "place"
    STARTED = "started"
    REFUSED = "refused"  # nothing was started: another node may do
    FAILED = "failed"
    ENDED = "ended"
    LOSE = "node lost"
    LOSE_AGAIN = "node lost, comes back"
    KILL = "kill"


class ChildAction(Enum):
    """The directory's action after an event."""

    NOTHING = "-"
    ORDER = "order its start"
    ORDER_END = "order its end"
    SETTLE = "free its place"


class NodePhase(Enum):
    """A node, as it knows itself."""

    OUT = "out"
    JOINING = "joining"
    MEMBER = "member"
    ENDING = "ending"  # its children are ended, then it joins again
    LEAVING = "leaving"


class PhaseEvent(Enum):
    """An event of a node's membership."""

    JOIN = "join"
    JOINED = "joined"
    REFUSED = "refused"  # the session is over; a new one may begin
    REJECTED = "rejected"  # no session of this node
    EXPIRED = "deadline over"
    GONE = "all gone"
    LEAVE = "leave"


class PhaseAction(Enum):
    """The node's action after an event."""

    NOTHING = "-"
    ASK = "ask with a new session"
    BEGIN = "begin to serve"
    END_ALL = "end all children"
    TELL = "tell why"
    SAY_LEFT = "say that it has left"


_NS, _NE, _NA = NodeState, NodeEvent, NodeAction
_GONE_NODE = {
    _NE.JOIN: (_NS.UP, _NA.ADMIT),
    _NE.SILENT: None,
    _NE.EXPIRED: None,
}
_NODE_ROWS: dict[NodeState, dict[NodeEvent, tuple[NodeState, NodeAction] | None]] = {
    _NS.UP: {
        _NE.JOIN: (_NS.UP, _NA.REPLACE),
        _NE.HEARD: (_NS.UP, _NA.RENEW),
        _NE.SILENT: (_NS.UNKNOWN, _NA.NOTHING),
        _NE.EXPIRED: (_NS.LOST, _NA.LOSE),
        _NE.LEAVE: (_NS.LEFT, _NA.LOSE),
        _NE.FORGET: (_NS.UP, _NA.REFUSE),
    },
    _NS.UNKNOWN: {
        _NE.JOIN: (_NS.UP, _NA.REPLACE),
        _NE.HEARD: (_NS.UP, _NA.RENEW),
        _NE.SILENT: None,
        _NE.EXPIRED: (_NS.LOST, _NA.LOSE),
        _NE.LEAVE: (_NS.LEFT, _NA.LOSE),
        _NE.FORGET: (_NS.UNKNOWN, _NA.REFUSE),
    },
    _NS.LOST: {
        **_GONE_NODE,
        _NE.HEARD: (_NS.LOST, _NA.REFUSE),
        _NE.LEAVE: (_NS.LOST, _NA.REFUSE),
        _NE.FORGET: (_NS.LEFT, _NA.WRITE_OFF),
    },
    _NS.LEFT: {
        **_GONE_NODE,
        _NE.HEARD: (_NS.LEFT, _NA.REFUSE),
        _NE.LEAVE: (_NS.LEFT, _NA.NOTHING),
        _NE.FORGET: (_NS.LEFT, _NA.WRITE_OFF),
    },
}

_CS, _CE, _CA = ChildState, ChildEvent, ChildAction
_OVER_ROW = {
    _CE.PLACE: None,
    _CE.STARTED: None,
    _CE.REFUSED: None,
    _CE.FAILED: None,
    _CE.ENDED: None,
    _CE.LOSE: None,
    _CE.LOSE_AGAIN: None,
}
_CHILD_ROWS: dict[
    ChildState, dict[ChildEvent, tuple[ChildState, ChildAction] | None]
] = {
    _CS.WAITING: {
        **_OVER_ROW,
        _CE.PLACE: (_CS.PLACING, _CA.ORDER),
        _CE.KILL: (_CS.ENDED, _CA.NOTHING),
    },
    _CS.PLACING: {
        _CE.PLACE: None,
        _CE.STARTED: (_CS.RUNNING, _CA.NOTHING),
        _CE.REFUSED: (_CS.WAITING, _CA.SETTLE),
        _CE.FAILED: (_CS.ENDED, _CA.SETTLE),
        _CE.ENDED: (_CS.ENDED, _CA.SETTLE),
        _CE.LOSE: (_CS.LOST, _CA.SETTLE),
        _CE.LOSE_AGAIN: (_CS.WAITING, _CA.SETTLE),
        _CE.KILL: (_CS.WITHDRAWN, _CA.ORDER_END),
    },
    _CS.WITHDRAWN: {
        _CE.PLACE: None,
        _CE.STARTED: (_CS.ENDING, _CA.ORDER_END),
        _CE.REFUSED: (_CS.ENDED, _CA.SETTLE),
        _CE.FAILED: (_CS.ENDED, _CA.SETTLE),
        _CE.ENDED: (_CS.ENDED, _CA.SETTLE),
        _CE.LOSE: (_CS.LOST, _CA.SETTLE),
        _CE.LOSE_AGAIN: (_CS.LOST, _CA.SETTLE),
        _CE.KILL: (_CS.WITHDRAWN, _CA.ORDER_END),
    },
    _CS.RUNNING: {
        _CE.PLACE: None,
        _CE.STARTED: (_CS.RUNNING, _CA.NOTHING),
        # It runs: an answer of before that was overtaken.
        _CE.REFUSED: (_CS.RUNNING, _CA.NOTHING),
        _CE.FAILED: (_CS.ENDED, _CA.SETTLE),
        _CE.ENDED: (_CS.ENDED, _CA.SETTLE),
        _CE.LOSE: (_CS.LOST, _CA.SETTLE),
        _CE.LOSE_AGAIN: (_CS.WAITING, _CA.SETTLE),
        _CE.KILL: (_CS.ENDING, _CA.ORDER_END),
    },
    _CS.ENDING: {
        _CE.PLACE: None,
        _CE.STARTED: (_CS.ENDING, _CA.NOTHING),
        _CE.REFUSED: (_CS.ENDING, _CA.NOTHING),
        _CE.FAILED: (_CS.ENDED, _CA.SETTLE),
        _CE.ENDED: (_CS.ENDED, _CA.SETTLE),
        _CE.LOSE: (_CS.LOST, _CA.SETTLE),
        _CE.LOSE_AGAIN: (_CS.LOST, _CA.SETTLE),
        _CE.KILL: (_CS.ENDING, _CA.ORDER_END),
    },
    _CS.LOST: {**_OVER_ROW, _CE.KILL: (_CS.LOST, _CA.NOTHING)},
    _CS.ENDED: {**_OVER_ROW, _CE.KILL: (_CS.ENDED, _CA.NOTHING)},
}

_P, _PE, _PA = NodePhase, PhaseEvent, PhaseAction
_PHASE_ROWS: dict[NodePhase, dict[PhaseEvent, tuple[NodePhase, PhaseAction]]] = {
    _P.OUT: {
        _PE.JOIN: (_P.JOINING, _PA.ASK),
        _PE.JOINED: (_P.OUT, _PA.NOTHING),
        _PE.REFUSED: (_P.OUT, _PA.NOTHING),
        _PE.REJECTED: (_P.OUT, _PA.NOTHING),
        _PE.EXPIRED: (_P.OUT, _PA.NOTHING),
        _PE.GONE: (_P.OUT, _PA.NOTHING),
        _PE.LEAVE: (_P.OUT, _PA.NOTHING),
    },
    _P.JOINING: {
        _PE.JOIN: (_P.JOINING, _PA.NOTHING),
        _PE.JOINED: (_P.MEMBER, _PA.BEGIN),
        _PE.REFUSED: (_P.JOINING, _PA.ASK),
        _PE.REJECTED: (_P.OUT, _PA.TELL),
        _PE.EXPIRED: (_P.JOINING, _PA.NOTHING),
        _PE.GONE: (_P.JOINING, _PA.NOTHING),
        _PE.LEAVE: (_P.OUT, _PA.SAY_LEFT),
    },
    _P.MEMBER: {
        _PE.JOIN: (_P.MEMBER, _PA.NOTHING),
        _PE.JOINED: (_P.MEMBER, _PA.NOTHING),
        _PE.REFUSED: (_P.ENDING, _PA.END_ALL),
        _PE.REJECTED: (_P.ENDING, _PA.END_ALL),
        _PE.EXPIRED: (_P.ENDING, _PA.END_ALL),
        _PE.GONE: (_P.MEMBER, _PA.NOTHING),
        _PE.LEAVE: (_P.LEAVING, _PA.END_ALL),
    },
    _P.ENDING: {
        _PE.JOIN: (_P.ENDING, _PA.NOTHING),
        _PE.JOINED: (_P.ENDING, _PA.NOTHING),
        _PE.REFUSED: (_P.ENDING, _PA.NOTHING),
        _PE.REJECTED: (_P.ENDING, _PA.NOTHING),
        _PE.EXPIRED: (_P.ENDING, _PA.NOTHING),
        _PE.GONE: (_P.JOINING, _PA.ASK),
        _PE.LEAVE: (_P.LEAVING, _PA.NOTHING),
    },
    _P.LEAVING: {
        _PE.JOIN: (_P.LEAVING, _PA.NOTHING),
        _PE.JOINED: (_P.LEAVING, _PA.NOTHING),
        _PE.REFUSED: (_P.LEAVING, _PA.NOTHING),
        _PE.REJECTED: (_P.LEAVING, _PA.NOTHING),
        _PE.EXPIRED: (_P.LEAVING, _PA.NOTHING),
        _PE.GONE: (_P.OUT, _PA.SAY_LEFT),
        _PE.LEAVE: (_P.LEAVING, _PA.NOTHING),
    },
}

NODES = StateTable("node", NodeState, NodeEvent, _NODE_ROWS)
"""A node, as the directory knows it."""

CHILDREN = StateTable("child", ChildState, ChildEvent, _CHILD_ROWS)
"""A child, as the directory knows it."""

PHASES = StateTable("node", NodePhase, PhaseEvent, _PHASE_ROWS)
"""A node's own membership."""
