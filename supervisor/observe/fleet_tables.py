"""The tables of `fleet ps`, nodes and then children, and of `fleet quota`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from supervisor.observe.tables import (
    NOTHING,
    Column,
    render_columns,
    terminal_width,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Row = dict[str, Any]


def _of(key: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row[key]
        return NOTHING if value in (None, "") else str(value)

    return cell


def _amount_of(key: str) -> Callable[[Row], str]:
    """Return a cell of tokens or dollars: cents where it is no whole number."""

    def cell(row: Row) -> str:
        value = float(row[key])
        return f"{value:.0f}" if value.is_integer() else f"{value:.2f}"

    return cell


def _state(row: Row) -> str:
    """Return a node's state, and since when it is none of the good ones."""
    if row["state"] == "up":
        return "up"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["since"]))
    return f"{row['state']} since {at}"


NODES = (
    Column("NODE", _of("name")),
    Column("STATE", _state),
    Column("CAPACITY", _of("capacity"), is_right=True),
    Column("LABELS", lambda row: ",".join(row["labels"]) or NOTHING, gives_way=True),
    Column("SESSION", _of("session"), gives_way=True, goes=2),
    Column("REASON", _of("reason"), gives_way=True, goes=1, is_seldom=True),
)
CHILDREN = (
    Column("CHILD", _of("name")),
    Column("NODE", _of("node")),
    Column("STATE", _of("state")),
    Column("LIFE", _of("incarnation"), is_right=True, goes=3),
    Column("PID", _of("pid"), is_right=True, goes=2),
    Column("STATUS", _of("status"), is_right=True, is_seldom=True),
    Column("RESTART", _of("restart"), goes=1),
    Column("REASON", _of("reason"), gives_way=True, is_seldom=True),
)


ACCOUNTS = (
    Column("ACCOUNT", _of("name")),
    Column("LIMIT", _amount_of("limit"), is_right=True),
    Column("SPENT", _amount_of("spent"), is_right=True),
    Column("FREE", _amount_of("free"), is_right=True),
    Column("WINDOW", _of("window")),
    Column("SLICES", lambda row: str(len(row["slices"])), is_right=True),
)


def render_quota(accounts: Sequence[Row]) -> str:
    """Return the table of accounts as text, with a last LF."""
    return _render(ACCOUNTS, accounts)


def _render(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    width = terminal_width()
    return render_columns(columns, rows, terminal=width is not None, width=width)


def render(nodes: Sequence[Row], children: Sequence[Row]) -> str:
    """Return both tables as text, with a last LF."""
    return f"{_render(NODES, nodes)}\n{_render(CHILDREN, children)}"
