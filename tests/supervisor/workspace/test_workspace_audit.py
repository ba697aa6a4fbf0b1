"""Events of an audit for the rows of a workspace."""

import os
import stat
from typing import Any

import pytest
import trio

from hostlib.journal import Journal
from supervisor.workspace.audit import MOST_CHANGES, WorkspaceAudit, watch_use
from supervisor.workspace.changes import Change, Row
from supervisor.workspace.layers import TreeNode
from supervisor.workspace.use import Mode, WorkspaceUse


def added(path: bytes, size: int) -> Row:
    """Return the row of a file that was added."""
    status = os.stat_result((stat.S_IFREG | 0o644, 1, 1, 1, 0, 0, size, 0, 0, 0))
    return Row(path, Change.ADDED, TreeNode(path, status, ()), None)


def told_of(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the events that are written of some rows."""
    events: list[dict[str, Any]] = []
    journal = Journal(-1, lambda _: None)
    journal.taps.append(lambda name, fields: events.append({"event": name, **fields}))
    use = WorkspaceUse("w", "/base", "review", "/state")
    trio.run(WorkspaceAudit(journal, "child-1", use).tell_changes, rows)
    return events


# spec WS20
def test_a_row_is_told_with_its_path_and_never_with_content() -> None:
    (event,) = told_of([added(b"d/\xff", 3)])
    assert event == {
        "event": "workspace.changed", "child_id": "child-1", "workspace": "w",
        "path_b64": "ZC//", "change": "added", "kind": "file", "size": 3, "mode": 0o644,
    }  # fmt: skip


# spec WS20
def test_of_many_rows_the_rest_is_counted() -> None:
    rows = [added(b"f%d" % n, 0) for n in range(10_007)]
    *changed, last = told_of(rows)
    assert len(changed) == MOST_CHANGES
    assert (last["event"], last["changed"]) == ("workspace.left_out", 7)


# spec WS20
@pytest.mark.parametrize(
    ("mode", "mount", "why"),
    [
        ("read-only", 3, ""),
        ("direct", 3, "mode 'direct' writes to the base"),
        ("review", -1, "it takes a host that is root"),
    ],
)
def test_what_has_no_watch_says_why(mode: Mode, mount: int, why: str) -> None:
    fd, told = watch_use(WorkspaceUse("w", "/base", mode, "/state"), mount)
    assert fd == -1
    assert why in told
    assert bool(told) == bool(why)
