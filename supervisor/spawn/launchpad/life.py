"""The life of one child in the launchpad: a total table of states and events.

The host's own table is ``supervisor/children/lifecycle.py``.

1. Every (state, event) has an entry; `None` cannot happen (I3).
2. A child that continues in another process reports twice: FORKING before it forks, BECAME
   with the new pids. Between them an unknown child is no leftover.
3. The end of the pipe of reports ends the start; the process is buried after that.

Plain numbers: ``enum`` takes 4 ms of a start that takes 9.
"""

from __future__ import annotations

STATES = (
    "in stock",
    "in stock, forking",
    "starting",
    "starting, forking",
    "running",
    "dropped",
    "gone",
)
IN_STOCK, STOCK_FORKING, STARTING, START_FORKING = range(4)
RUNNING, DROPPED, GONE = range(4, 7)

EVENTS = ("ordered", "forking", "became", "closed", "failed", "died")
ORDERED, FORKING, BECAME, CLOSED, FAILED, DIED = range(6)

ACTIONS = (
    "-",
    "rename",
    "tell spawned",
    "tell failed",
    "tell exited",
    "discard",
)
NOTHING, RENAME, TELL_SPAWNED, TELL_FAILED, TELL_EXITED, DISCARD = range(6)

Step = tuple[int, int]

_ORDERED = (STARTING, NOTHING)
_FORKED = (STOCK_FORKING, NOTHING)
_FORKING_ON = (START_FORKING, NOTHING)
_IS_IN_STOCK = (IN_STOCK, RENAME)
_DISCARDED = (DROPPED, DISCARD)
_REFUSED = (DROPPED, TELL_FAILED)
_BORN = (RUNNING, TELL_SPAWNED)

# One row a state, one column an event, in the order of `EVENTS`.
TABLE: tuple[tuple[Step | None, ...], ...] = (
    (_ORDERED, _FORKED, None, _DISCARDED, _DISCARDED, None),
    (_FORKING_ON, None, _IS_IN_STOCK, _DISCARDED, _DISCARDED, None),
    (None, _FORKING_ON, None, _BORN, _REFUSED, None),
    # Closed without a word: killed between its two reports; its exit follows.
    (None, None, (STARTING, RENAME), _BORN, _REFUSED, None),
    (None, None, None, None, None, (GONE, TELL_EXITED)),
    (None, None, None, None, None, (GONE, NOTHING)),
    (None, None, None, None, None, None),
)

IS_FORKING = frozenset({STOCK_FORKING, START_FORKING})
IS_STOCK = frozenset({IN_STOCK, STOCK_FORKING})


def step(state: int, event: int) -> Step:
    """Return the state after an event, and what is to be done.

    Raises:
        RuntimeError: it cannot happen.
    """
    found = TABLE[state][event]
    if found is None:
        raise RuntimeError(
            f"a child that is {STATES[state]} cannot have {EVENTS[event]}"
        )
    return found
