"""The tables of `fleet ps`, nodes and then children, and of `fleet quota`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from supervisor.observe.tables import NOTHING, Column, cell, render_for_stdout

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = dict[str, Any]


def _amount(value: float) -> str:
    """Return tokens or dollars: with cents where it is no whole number."""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.2f}"


def _state(row: Row) -> str:
    """Return a node's state, and since when it is none of the good ones."""
    if row["state"] == "up":
        return "up"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["since"]))
    return f"{row['state']} since {at}"


NODES = (
    Column("NODE", cell("name")),
    Column("STATE", _state),
    Column("CAPACITY", cell("capacity"), is_right=True),
    Column("LABELS", lambda row: ",".join(row["labels"]) or NOTHING, gives_way=True),
    Column("SESSION", cell("session"), gives_way=True, goes=2),
    Column("REASON", cell("reason"), gives_way=True, goes=1, is_seldom=True),
)
CHILDREN = (
    Column("CHILD", cell("name")),
    Column("NODE", cell("node")),
    Column("STATE", cell("state")),
    Column("LIFE", cell("incarnation"), is_right=True, goes=3),
    Column("PID", cell("pid"), is_right=True, goes=2),
    Column("STATUS", cell("status"), is_right=True, is_seldom=True),
    Column("RESTART", cell("restart"), goes=1),
    Column("REASON", cell("reason"), gives_way=True, is_seldom=True),
)


ACCOUNTS = (
    Column("ACCOUNT", cell("name")),
    Column("LIMIT", cell("limit", _amount), is_right=True),
    Column("SPENT", cell("spent", _amount), is_right=True),
    Column("FREE", cell("free", _amount), is_right=True),
    Column("WINDOW", cell("window")),
    Column("SLICES", lambda row: str(len(row["slices"])), is_right=True),
)


def render_quota(accounts: Sequence[Row]) -> str:
    """Return the table of accounts as text, with a last LF."""
    return render_for_stdout(ACCOUNTS, accounts)


def render(nodes: Sequence[Row], children: Sequence[Row]) -> str:
    """Return both tables as text, with a last LF."""
    return f"{render_for_stdout(NODES, nodes)}\n{render_for_stdout(CHILDREN, children)}"
