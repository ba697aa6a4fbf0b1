"""Tables for people: children, clients, open files; and the same rows as JSON.

What it is: rows in, text out.  What it is not: where rows come from (``control``).

Rules of this file.

1. A line is never longer than the width, so it is never wrapped: one column of a table
   gives way, and says so with ``~`` at its end.
2. What children may choose (names, words of commands) is shown without control
   characters: none reaches the terminal (attack 13).
3. JSON is the rows themselves, with the contract's names (spec S1).
4. rich draws on a terminal only, and is imported then.
"""

from __future__ import annotations

import json
import unicodedata
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WIDTH = 80
"""Columns of a table that goes anywhere but to a terminal."""

NARROWEST = 8
"""What the column that gives way keeps at least."""

CUT = "~"
"""Stands for what a cell had no room for."""

Row = dict[str, Any]


class Column(NamedTuple):
    """One column.

    Attributes:
        title: its head.
        cell: makes its text of a row.
        is_right: for numbers.
        gives_way: is cut when the line would be too long; one in a table.
    """

    title: str
    cell: Callable[[Row], str]
    is_right: bool = False
    gives_way: bool = False


def render(
    kind: str, rows: Sequence[Row], *, terminal: bool = False, width: int = WIDTH
) -> str:
    """Return a table as text, with a last LF.

    Args:
        kind: ``ps``, ``clients`` or ``files``.
        rows: as the control socket gives them.
        terminal: the text goes to one, so it may be drawn.
        width: columns that there are.
    """
    return render_columns(TABLES[kind], rows, terminal=terminal, width=width)


def render_columns(
    columns: Sequence[Column],
    rows: Sequence[Row],
    *,
    terminal: bool = False,
    width: int = WIDTH,
) -> str:
    """Return a table of any columns; see ``render``."""
    cells = [[printable(column.cell(row)) for column in columns] for row in rows]
    lines = [[column.title for column in columns], *cells]
    widths = _fit(columns, lines, width)
    if terminal:
        return _drawn(columns, lines, widths, width)
    return "".join(_line(columns, line, widths, width) + "\n" for line in lines)


def as_json(result: object) -> str:
    """Return what a host answered as JSON in ASCII, with a last LF."""
    return json.dumps(result, indent=2) + "\n"


def printable(text: str) -> str:
    """Replace what a terminal might obey, or what is no character, by ``?``."""
    return "".join(c if c.isprintable() else "?" for c in text)


# Layout


def _cells(text: str) -> int:
    """Return how many columns a text takes on a terminal."""
    return sum(_char_cells(c) for c in text)


def _char_cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _fit(columns: Sequence[Column], lines: list[list[str]], width: int) -> list[int]:
    widths = [max(map(_cells, column)) for column in zip(*lines, strict=True)]
    over = sum(widths) + len(widths) - 1 - width
    if over > 0:
        for index, column in enumerate(columns):
            if column.gives_way:
                widths[index] = max(min(NARROWEST, widths[index]), widths[index] - over)
    return widths


def _line(
    columns: Sequence[Column], cells: list[str], widths: list[int], width: int
) -> str:
    texts = [
        _aligned(_cut(text, room), room, is_right=column.is_right)
        for column, text, room in zip(columns, cells, widths, strict=True)
    ]
    return _cut(" ".join(texts).rstrip(), width)


def _aligned(text: str, room: int, *, is_right: bool) -> str:
    blanks = " " * (room - _cells(text))
    return blanks + text if is_right else text + blanks


def _cut(text: str, room: int) -> str:
    if _cells(text) <= room:
        return text
    kept = ""
    left = room - 1
    for char in text:
        left -= _char_cells(char)
        if left < 0:
            break
        kept += char
    return kept + CUT


def _drawn(
    columns: Sequence[Column], lines: list[list[str]], widths: list[int], width: int
) -> str:
    """Lay out as for a file, and let rich set off the head and what people look for."""
    from rich.console import Console  # noqa: PLC0415 - rule 4
    from rich.text import Text  # noqa: PLC0415

    drawn = Text(no_wrap=True, overflow="crop")
    for number, line in enumerate(lines):
        # Text: what looks like markup in a name is none.
        text = Text(_line(columns, line, widths, width))
        if number == 0:
            text.stylize("bold")
        else:
            text.stylize("cyan", 0, len(_aligned(line[0], widths[0], is_right=False)))
        drawn.append_text(text).append("\n")
    console = Console(force_terminal=True, width=width, highlight=False)
    with console.capture() as captured:
        console.print(drawn, end="")
    return captured.get()


# Cells


def _plain(key: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row.get(key)
        return "-" if value is None else str(value)

    return cell


def _usage(key: str, show: Callable[[Any], str] = str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = (row.get("usage") or {}).get(key)
        return "-" if value is None else show(value)

    return cell


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


def _instant(key: str) -> Callable[[Row], str]:
    """Show an RFC 3339 instant to the second."""

    def cell(row: Row) -> str:
        text = str(row.get(key) or "-")
        return text.partition(".")[0] + "Z" if "." in text else text

    return cell


def _yes_no(key: str) -> Callable[[Row], str]:
    return lambda row: "yes" if row.get(key) else "no"


def _state(row: Row) -> str:
    """Show the life cycle's word, and the process's where it says more."""
    of_process = (row.get("usage") or {}).get("state")
    state = str(row.get("state"))
    if of_process == "disk-sleep":
        return "stuck"
    return of_process if of_process in {"stopped", "zombie"} else state


def _command(row: Row) -> str:
    """Show the command; after what the host has to say of the child, if it has."""
    command = " ".join(row["command"])
    reason = row.get("reason")
    return f"({reason}) {command}" if reason else command


TABLES: dict[str, tuple[Column, ...]] = {
    "ps": (
        Column("CHILD", lambda row: str(row.get("name") or row["id"])),
        Column("PID", _plain("pid"), is_right=True),
        Column("STATE", _state),
        Column("CPU%", _usage("cpu_percent"), is_right=True),
        Column("TIME", _usage("cpu_time_s", _seconds), is_right=True),
        Column("RSS", _usage("rss_bytes", _size), is_right=True),
        Column("FDS", _usage("descriptors"), is_right=True),
        Column("THR", _usage("threads"), is_right=True),
        Column("SUB", _usage("descendants"), is_right=True),
        Column("COMMAND", _command, gives_way=True),
    ),
    "clients": (
        Column("CLIENT", _plain("id")),
        Column("PARENT", _plain("parent_id")),
        Column("PID", _plain("pid"), is_right=True),
        Column("PIPE", _plain("pipe_id")),
        Column("CONNECTED", _instant("connected_at")),
        Column(
            "OPEN FILES",
            lambda row: ",".join(map(str, row["open_files"])) or "-",
            gives_way=True,
        ),
    ),
    "files": (
        Column("FILENO", _plain("fileno"), is_right=True),
        Column("MODE", _plain("mode")),
        Column("CLIENT", _plain("client_id")),
        Column("TOP", _yes_no("is_top_level")),
        Column("OFFSET", _plain("offset"), is_right=True),
        Column("OPENED", _instant("opened_at")),
        Column("FILENAME", _plain("filename"), gives_way=True),
    ),
}
"""The columns of each table."""
