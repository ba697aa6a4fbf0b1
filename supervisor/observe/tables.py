"""Tables for people: children, clients, open files; and the same rows as JSON.

Rules of this file.

1. A line is never longer than the terminal is wide: long texts are cut, with ``~`` at
   their end; if that is not enough, lesser columns are left out. Over a pipe nothing is
   cut.
2. Texts of children (names, words of commands) are shown without control characters:
   none reaches the terminal (attack 13).
3. JSON is the rows themselves, with the contract's names (spec S1).
4. rich draws on a terminal only, and is imported then.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import unicodedata
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from hostlib.messages import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

WIDTH = 80
"""Columns of a report in sentences, on any terminal."""

NARROWEST = 8
"""Least width of a column that can be cut."""

ROOMY = 12
"""Its least width while other columns can be left out."""

NOTHING = "-"
"""The text of an empty cell."""

CUT = "~"
"""The end of a text that was cut."""

Row = dict[str, Any]


class Column(NamedTuple):
    """One column.

    Attributes:
        title: its head.
        cell: returns its text for a row.
        is_right: whether it is right-aligned, for numbers.
        gives_way: whether it is cut in a long line.
        goes: order of leaving out, higher numbers first; 0 for never.
        is_seldom: whether it is left out if all its cells are empty.
    """

    title: str
    cell: Callable[[Row], str]
    is_right: bool = False
    gives_way: bool = False
    goes: int = 0
    is_seldom: bool = False


def terminal_width() -> int | None:
    """Return the width of the terminal on stdout; None if it is none.

    ``$COLUMNS`` takes precedence.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size((WIDTH, 24)).columns


def render(
    columns: Sequence[Column],
    rows: Sequence[Row],
    *,
    terminal: bool = False,
    width: int | None = None,
) -> str:
    """Return a table as text, with a last LF.

    Args:
        columns: of ``TABLES``, or any.
        rows: from the control socket.
        terminal: whether the text goes to one, so that it may be coloured.
        width: columns of the terminal; None for as many as needed.
    """
    columns = [
        column
        for column in columns
        if not column.is_seldom or any(column.cell(row) != NOTHING for row in rows)
    ]
    cells = [[printable(column.cell(row)) for column in columns] for row in rows]
    lines = [[column.title for column in columns], *cells]
    if width is None:
        widths = _widths(lines)
        width = sum(widths) + len(widths)
    else:
        shown = _choose_columns(columns, _widths(lines), width)
        columns = [columns[index] for index in shown]
        lines = [[line[index] for index in shown] for line in lines]
        widths = _fit(columns, _widths(lines), width)
    if terminal:
        return _draw(columns, lines, widths, width)
    return "".join(_line(columns, line, widths, width) + "\n" for line in lines)


def render_for_stdout(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Return a table for the terminal on stdout, if it is one."""
    width = terminal_width()
    return render(columns, rows, terminal=width is not None, width=width)


def to_json(result: object) -> str:
    """Return a host's answer as JSON in ASCII, with a last LF."""
    return json.dumps(result, indent=2) + "\n"


# Layout


def count_cells(text: str) -> int:
    """Return the number of columns of a text on a terminal."""
    return sum(_char_cells(c) for c in text)


def _char_cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _widths(lines: list[list[str]]) -> list[int]:
    return [max(map(count_cells, column)) for column in zip(*lines, strict=True)]


def _choose_columns(
    columns: Sequence[Column], widths: list[int], width: int
) -> list[int]:
    """Return the indices of the columns that fit."""
    least = [
        min(size, ROOMY) if column.gives_way else size
        for column, size in zip(columns, widths, strict=True)
    ]
    shown = list(range(len(columns)))
    for index in sorted(shown, key=lambda index: -columns[index].goes):
        if sum(least[i] + 1 for i in shown) - 1 <= width or not columns[index].goes:
            break
        shown.remove(index)
    return shown


def _fit(columns: Sequence[Column], widths: list[int], width: int) -> list[int]:
    """Share the remaining width among the columns that can be cut, short ones first."""
    giving = [index for index, column in enumerate(columns) if column.gives_way]
    fixed = sum(size + 1 for size in widths) - 1 - sum(widths[i] for i in giving)
    room = width - fixed
    fitted = list(widths)
    for number, index in enumerate(sorted(giving, key=lambda index: widths[index])):
        share = room // (len(giving) - number)
        fitted[index] = min(widths[index], max(NARROWEST, share))
        room -= fitted[index]
    return fitted


def _line(
    columns: Sequence[Column], cells: list[str], widths: list[int], width: int
) -> str:
    texts = [
        _align(_cut(text, room), room, is_right=column.is_right)
        for column, text, room in zip(columns, cells, widths, strict=True)
    ]
    return _cut(" ".join(texts).rstrip(), width)


def _align(text: str, room: int, *, is_right: bool) -> str:
    blanks = " " * (room - count_cells(text))
    return blanks + text if is_right else text + blanks


def _cut(text: str, room: int) -> str:
    if count_cells(text) <= room:
        return text
    kept = ""
    left = room - 1
    for char in text:
        left -= _char_cells(char)
        if left < 0:
            break
        kept += char
    return kept + CUT


def _draw(
    columns: Sequence[Column], lines: list[list[str]], widths: list[int], width: int
) -> str:
    """Lay out as for a file, and let rich set off the head and important words."""
    from rich.console import Console  # noqa: PLC0415 - rule 4
    from rich.text import Text  # noqa: PLC0415

    drawn = Text(no_wrap=True, overflow="crop")
    for number, line in enumerate(lines):
        # Text: markup in a name is plain text.
        text = Text(_line(columns, line, widths, width))
        if number == 0:
            text.stylize("bold")
        else:
            text.stylize("cyan", 0, len(_align(line[0], widths[0], is_right=False)))
        drawn.append_text(text).append("\n")
    console = Console(force_terminal=True, width=width, highlight=False)
    with console.capture() as captured:
        console.print(drawn, end="", soft_wrap=True)  # it fits already
    return captured.get()


# Cells


def cell(key: str, show: Callable[[Any], str] = str) -> Callable[[Row], str]:
    """Return a cell that shows a value of a row, or ``NOTHING``."""

    def text(row: Row) -> str:
        value = row.get(key)
        return NOTHING if value in (None, "") else show(value)

    return text


def _usage(key: str, show: Callable[[Any], str] = str) -> Callable[[Row], str]:
    of_usage = cell(key, show)
    return lambda row: of_usage(row.get("usage") or {})


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "K", "M", "G"):
        if size < 1000:
            return f"{size:.0f}{unit}" if unit == "B" else f"{size:.3g}{unit}"
        size /= 1024
    return f"{size:.0f}T"


def _seconds(time_s: float) -> str:
    if time_s < 60:
        return f"{time_s:.1f}s"
    minutes, seconds = divmod(int(time_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s"


def _instant(text: str) -> str:
    """Return an RFC 3339 instant to the second."""
    return text.partition(".")[0] + "Z" if "." in text else text


def _flag(key: str) -> Callable[[Row], str]:
    return lambda row: "yes" if row.get(key) else "no"


def _state(row: Row) -> str:
    """Return the state, with the process's own where that says more."""
    of_process = (row.get("usage") or {}).get("state")
    state = str(row.get("state"))
    if of_process == "disk-sleep":
        return "stuck"
    return of_process if of_process in {"stopped", "zombie"} else state


def _state_of_workspace(row: Row) -> str:
    """Return the state of a workspace, and its child."""
    child = row.get("child")
    return f"{row['state']} by {child}" if child else str(row["state"])


def workspace_names(row: Row) -> str:
    """Return the workspaces of a child."""
    return ", ".join(str(one["name"]) for one in row.get("workspaces") or ()) or "-"


def workspace_sum(key: str, show: Callable[[Any], str] = str) -> Callable[[Row], str]:
    """Return a cell with the sum of a figure of a child's workspaces."""

    def text(row: Row) -> str:
        known = [
            one[key] for one in row.get("workspaces") or () if one[key] is not None
        ]
        return show(sum(known)) if known else NOTHING

    return text


def _isolation(row: Row) -> str:
    """Return the profile, and the number of layers that this machine lacks."""
    isolation = row.get("isolation") or {}
    return str(isolation.get("label") or isolation.get("profile") or "-")


def _uptime(row: Row) -> str:
    """Return the age of the child's process."""
    started = row.get("started_at")
    if row.get("pid") is None or not started:
        return "-"
    age_s = time.time() - datetime.fromisoformat(str(started)).timestamp()
    return _seconds(max(0.0, age_s))


def _network(row: Row) -> str:
    """Return the network of a child, and the number of refusals."""
    return network_word(row.get("network") or {}) or NOTHING


def network_word(network: Mapping[str, object]) -> str | None:
    """Return a network's mode, and what is special; None if there is no network."""
    mode, refused = network.get("mode", "none"), network.get("refused")
    if mode == "none":
        return None
    upstream = ", upstream" if network.get("upstream") else ""
    return f"{mode}{upstream}, {refused} refused" if refused else f"{mode}{upstream}"


TABLES: dict[str, tuple[Column, ...]] = {
    "workspaces": (
        Column("WORKSPACE", cell("name"), gives_way=True),
        Column("STATE", _state_of_workspace, gives_way=True),
        Column("MODE", cell("mode"), goes=2),
        Column("CHANGED", cell("changed"), is_right=True),
        Column("BYTES", lambda row: _size(row.get("bytes") or 0), is_right=True),
        Column("SINCE", cell("created_at", _instant), goes=1),
        Column("BASE", cell("base"), gives_way=True),
    ),
    "ps": (
        Column(
            "CHILD",
            lambda row: str(row.get("name") or row["id"]),
            gives_way=True,
        ),
        Column("PID", cell("pid"), is_right=True),
        Column("STATE", _state),
        Column("RESTARTS", lambda row: str(row.get("restarts", 0)), is_right=True),
        Column("UPTIME", _uptime, is_right=True),
        Column("ISOLATION", _isolation, gives_way=True),
        Column("CPU%", _usage("cpu_percent"), is_right=True, goes=1),
        Column("TIME", _usage("cpu_time_s", _seconds), is_right=True, goes=3),
        Column("RSS", _usage("rss_bytes", _size), is_right=True, goes=2),
        Column("FDS", _usage("descriptors"), is_right=True, goes=4),
        Column("THR", _usage("threads"), is_right=True, goes=5),
        Column("SUB", _usage("descendants"), is_right=True, goes=6),
        Column("WORKSPACE", workspace_names, gives_way=True, goes=8, is_seldom=True),
        Column(
            "CHANGED", workspace_sum("changed"), is_right=True, goes=7, is_seldom=True
        ),
        Column(
            "BYTES",
            workspace_sum("bytes", _size),
            is_right=True,
            goes=9,
            is_seldom=True,
        ),
        Column("NETWORK", _network, gives_way=True, goes=10, is_seldom=True),
        Column("COMMAND", lambda row: " ".join(row["command"]), gives_way=True),
        Column("REASON", lambda row: row.get("reason") or "-", gives_way=True),
    ),
    "clients": (
        Column("CLIENT", cell("id")),
        Column("CHILD", cell("child"), gives_way=True),
        Column("PARENT", cell("parent_id")),
        Column("PID", cell("pid"), is_right=True),
        Column("PIPE", cell("pipe_id"), goes=2),
        Column("CONNECTED", cell("connected_at", _instant), goes=1),
        Column(
            "OPEN FILES",
            lambda row: ",".join(map(str, row["open_files"])) or "-",
            gives_way=True,
        ),
    ),
    "files": (
        Column("FILENO", cell("fileno"), is_right=True),
        Column("MODE", cell("mode")),
        Column("CLIENT", cell("client_id")),
        Column("CHILD", cell("child"), gives_way=True),
        Column("TOP", _flag("is_top_level"), goes=2),
        Column("OFFSET", cell("offset"), is_right=True),
        Column("OPENED", cell("opened_at", _instant), goes=1),
        Column("FILENAME", cell("filename"), gives_way=True),
    ),
    "quota": (
        Column("CLIENT", lambda row: row.get("client_id") or "(host)"),
        Column("CHILD", cell("child"), gives_way=True),
        Column("PARENT", cell("parent_id"), goes=1),
        Column("SPENT", cell("spent", "{:.1f}".format), is_right=True),
        Column("RESERVED", cell("reserved", "{:.1f}".format), is_right=True),
        Column("LIMIT", cell("limit", "{:.1f}".format), is_right=True),
        Column("CALLS", cell("calls"), is_right=True),
        Column("NOW", cell("under_way"), is_right=True, goes=2),
        Column("MAX", cell("max_calls"), is_right=True),
    ),
}
"""The columns of each table."""
