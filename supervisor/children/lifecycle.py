"""A child's life as a total table: every state, every event, what to do (I3).

Rules of this file.

1. ``TABLE`` has an entry for every (state, event); the import fails without one.
2. The process's exit ends a child. EOF is no event of it: it only closes the client
   (spec S2, S3).
3. A child that is stopped during its start follows the same table.
"""

from __future__ import annotations

from enum import Enum

from hostlib.state_table import StateTable

START_PATIENCE_S = 1.0
"""How long the start of a child that is to be stopped may still take: an exec can
hang."""


class State(Enum):
    """The phase of a child's life."""

    STARTING = "starting"
    DOOMED = "doomed"  # stop was asked for before the process existed
    RUNNING = "running"
    STOPPING = "stopping"
    REAPING = "reaping"
    GONE = "gone"


class Event(Enum):
    """An event of its life."""

    SPAWNED = "spawned"
    SPAWN_FAILED = "spawn failed"
    STOP = "stop"
    GRACE_OVER = "grace over"
    EXITED = "exited"
    CLEANED = "cleaned"


class Action(Enum):
    """The owner's action after an event."""

    NOTHING = "-"
    SERVE = "serve"
    SERVE_AND_TERMINATE = "serve, terminate"
    TERMINATE = "terminate"
    KILL = "kill"
    CLEAN_UP = "clean up"
    REPORT = "report"


_S, _E, _A = State, Event, Action
_IMPOSSIBLE = None

_ROWS: dict[State, dict[Event, tuple[State, Action] | None]] = {
    _S.STARTING: {
        _E.SPAWNED: (_S.RUNNING, _A.SERVE),
        _E.SPAWN_FAILED: (_S.REAPING, _A.CLEAN_UP),
        _E.STOP: (_S.DOOMED, _A.NOTHING),
        _E.GRACE_OVER: _IMPOSSIBLE,
        _E.EXITED: _IMPOSSIBLE,
        _E.CLEANED: _IMPOSSIBLE,
    },
    _S.DOOMED: {
        # Not killed: it may run already, and be about to write its last output.
        _E.SPAWNED: (_S.STOPPING, _A.SERVE_AND_TERMINATE),
        _E.SPAWN_FAILED: (_S.REAPING, _A.CLEAN_UP),
        _E.STOP: (_S.DOOMED, _A.NOTHING),
        _E.GRACE_OVER: (_S.DOOMED, _A.NOTHING),
        _E.EXITED: _IMPOSSIBLE,
        _E.CLEANED: _IMPOSSIBLE,
    },
    _S.RUNNING: {
        _E.SPAWNED: _IMPOSSIBLE,
        _E.SPAWN_FAILED: _IMPOSSIBLE,
        _E.STOP: (_S.STOPPING, _A.TERMINATE),
        _E.GRACE_OVER: _IMPOSSIBLE,
        _E.EXITED: (_S.REAPING, _A.CLEAN_UP),
        _E.CLEANED: _IMPOSSIBLE,
    },
    _S.STOPPING: {
        _E.SPAWNED: _IMPOSSIBLE,
        _E.SPAWN_FAILED: _IMPOSSIBLE,
        _E.STOP: (_S.STOPPING, _A.KILL),  # the second request kills
        _E.GRACE_OVER: (_S.STOPPING, _A.KILL),
        _E.EXITED: (_S.REAPING, _A.CLEAN_UP),
        _E.CLEANED: _IMPOSSIBLE,
    },
    _S.REAPING: {
        _E.SPAWNED: _IMPOSSIBLE,
        _E.SPAWN_FAILED: _IMPOSSIBLE,
        _E.STOP: (_S.REAPING, _A.NOTHING),
        _E.GRACE_OVER: (_S.REAPING, _A.NOTHING),
        _E.EXITED: _IMPOSSIBLE,
        _E.CLEANED: (_S.GONE, _A.REPORT),
    },
    _S.GONE: {
        _E.SPAWNED: _IMPOSSIBLE,
        _E.SPAWN_FAILED: _IMPOSSIBLE,
        _E.STOP: (_S.GONE, _A.NOTHING),
        _E.GRACE_OVER: (_S.GONE, _A.NOTHING),
        _E.EXITED: _IMPOSSIBLE,
        _E.CLEANED: _IMPOSSIBLE,
    },
}

TABLE = StateTable("child", State, Event, _ROWS)
"""A child's life; an event that cannot happen raises."""
