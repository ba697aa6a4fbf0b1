"""The status page: facts in, HTML out, in one file without other sources.

Text, its style and the few lines of script that keep it live.

Rules of this file.

1. Every text of a child passes ``_text``: no control characters, at most ``MAX_CHARS``,
   escaped. There is no other way into the page.
2. The policy allows this style and this script by their hashes, and connections to the
   page's origin: text that passed rule 1 could still not run.
3. Pictures are inline SVG.  Without the script the page is there, sorts and filters by
   its address, and does not move.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from hostlib.messages import printable
from supervisor.observe.status_style import SCRIPT, STYLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from supervisor.observe.registry import RecentEvent
    from supervisor.observe.status_facts import Bar, ChildFacts, Facts

MAX_CHARS = 160
"""Longest text; a name may have 4,096 characters."""

NEARLY = 0.8
"""Part of a bound from which its bar is a warning."""


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


POLICY = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_hash(STYLE)}",
        f"script-src {_hash(SCRIPT)}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
"""Content-Security-Policy of the page (rule 2)."""


@dataclass(frozen=True, slots=True)
class PageView:
    """The reader's view of the tables; the script does the same without a request.

    Attributes:
        sort: the key of a column, with ``-`` before it for the largest first; else as
            is.
        words: texts that shown rows contain.
    """

    sort: str = ""
    words: str = ""

    @property
    def key(self) -> str:
        """The column's key."""
        return self.sort.removeprefix("-")

    def toggle_query(self, key: str, *, is_number: bool) -> str:
        """Return the query of a link that sorts by a column, or the other way round."""
        first, second = ("-", "") if is_number else ("", "-")
        sign = second if self.sort == first + key else first
        return urlencode({"sort": sign + key, "filter": self.words})


def view_of(query: str) -> PageView:
    """Return the view in the query of an address; unknown parts are ignored."""
    asked = dict(parse_qsl(query))
    sort = asked.get("sort", "")
    return PageView(
        sort if sort.removeprefix("-") in _KEYS else "",
        asked.get("filter", "")[:MAX_CHARS],
    )


def page(facts: Facts, view: PageView = PageView()) -> str:
    """Return the whole page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>sandhost {facts.pid}</title><style>{STYLE}</style></head><body>"
        f"<header><h1>sandhost</h1><p>{_text(facts.version)} on Python"
        f" {_text(facts.python)}, host {facts.pid}</p>"
        '<form role="search"><input type="search" name="filter" id="filter"'
        ' placeholder="filter rows" aria-label="filter rows"'
        f' value="{_text(view.words)}">'
        f'<input type="hidden" name="sort" value="{_text(view.sort)}"></form>'
        '<p id="link" class="off" role="status">not live</p></header>'
        f'<div id="live">{live_part(facts, view)}</div>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def live_part(facts: Facts, view: PageView = PageView()) -> str:
    """Return the changing part: everything beneath the head, without line ends."""
    told = (("up", _duration(facts.up_s)), *facts.totals)
    totals = "".join(
        f"<div><dt>{_text(word)}</dt><dd>{_text(figure)}</dd></div>"
        for word, figure in told
    )
    bars = "".join(map(_quota, facts.bars))
    children, clients, files = facts.more
    return (
        f'<main><dl class="totals">{totals}</dl>'
        f'<section><h2>Bounds</h2><div class="bars">{bars}</div></section>'
        + _section("Children", _CHILD, facts.children, children, view)
        + _section("Clients", _CLIENT, facts.clients, clients, view)
        + _section("Open files", _FILE, facts.files, files, view)
        + _names(facts, view)
        + f"</main><aside>{_events(facts.events)}</aside>"
    )


def _names(facts: Facts, view: PageView) -> str:
    """Return the tables of names; nothing if no child has reached or missed one."""
    reached, refused = facts.more_names
    found = ""
    if facts.reached:
        found += _section("Names reached", _REACHED, facts.reached, reached, view)
    if facts.refused:
        found += _section("Names refused", _REFUSED, facts.refused, refused, view)
    return found


# Texts and figures


def _text(value: object) -> str:
    text = printable(str(value))
    if len(text) > MAX_CHARS:
        text = text[: MAX_CHARS - 1] + "\N{HORIZONTAL ELLIPSIS}"
    return escape(text)


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            digits = 0 if unit == "B" or size_bytes >= 100 else 1
            return f"{size_bytes:,.{digits}f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def _number(value: float | None, digits: int = 0) -> str:
    return "\N{EN DASH}" if value is None else f"{value:,.{digits}f}"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3600)):
        if seconds >= 2 * size:
            return f"{seconds // size:,.0f} {unit}"
    return f"{seconds // 60:.0f} min"


def _figure(bar: Bar, value: float) -> str:
    return _size(value) if bar.is_bytes else f"{value:,.0f}"


# Bars


def _svg(bar: Bar) -> str:
    if not bar.limit:
        return ""
    used = min(1.0, bar.used / bar.limit)
    taken = min(1.0 - used, bar.reserved / bar.limit)
    full = " full" if used + taken > NEARLY else ""
    return (
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none"'
        ' aria-hidden="true">'
        '<rect class="room" width="100" height="8"/>'
        f'<rect class="taken" x="{100 * used:.1f}" width="{100 * taken:.1f}"'
        ' height="8"/>'
        f'<rect class="used{full}" width="{100 * used:.1f}" height="8"/></svg>'
    )


def _quota(bar: Bar) -> str:
    limit = "no bound" if bar.limit is None else f"of {_figure(bar, bar.limit)}"
    reserved = f", {_figure(bar, bar.reserved)} reserved" if bar.reserved else ""
    unit = f" {_text(bar.unit)}" if bar.unit else ""
    return (
        f'<div class="quota"><p><span>{_text(bar.title)}</span>'
        f"<span><b>{_figure(bar, bar.used)}</b> {limit}{unit}{reserved}</span></p>"
        f"{_svg(bar)}</div>"
    )


# Tables


class Cell(NamedTuple):
    """One cell of a row.

    Attributes:
        html: escaped.
        value: for sorting; None if unknown.
    """

    html: str
    value: float | str | None


class PageColumn(NamedTuple):
    """A column.

    Attributes:
        title: with its unit, where cells do not have theirs.
        key: of sorting, in an address.
        cell: returns its cell of a row.
        is_number: whether it holds figures.
        is_long: whether it holds sentences, which are wrapped.
    """

    title: str
    key: str
    cell: Callable[[Any], Cell]
    is_number: bool = False
    is_long: bool = False


def _section(
    title: str,
    columns: Sequence[PageColumn],
    rows: Iterable[object],
    more: int,
    view: PageView,
) -> str:
    cells = [[column.cell(row) for column in columns] for row in rows]
    body = "".join(_row(columns, row) for row in _arrange(columns, cells, view))
    if not body:
        return f'<section><h2>{title}</h2><p class="none">none</p></section>'
    head = "".join(_head(column, view) for column in columns)
    rest = f'<p class="none">and {more:,} more</p>' if more else ""
    return (
        f'<section><h2>{title}</h2><div class="wide"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>{rest}</section>"
    )


def _arrange(
    columns: Sequence[PageColumn], rows: Iterable[Sequence[Cell]], view: PageView
) -> list[Sequence[Cell]]:
    """Return the rows of a view, in its order."""
    words = escape(view.words).casefold()
    shown = [row for row in rows if words in _plain(row)]
    keys = [column.key for column in columns]
    if view.key not in keys:
        return shown
    at = keys.index(view.key)
    known = [row for row in shown if row[at].value is not None]
    known.sort(key=lambda row: _order(row[at]), reverse=view.sort.startswith("-"))
    return known + [row for row in shown if row[at].value is None]


def _plain(row: Sequence[Cell]) -> str:
    """Return the visible text of a row, for the filter."""
    return _TAG.sub("", " ".join(cell.html for cell in row)).casefold()


_TAG = re.compile(r"<[^>]*>")


def _order(cell: Cell) -> tuple[float, str]:
    value = cell.value
    return (0.0, value.casefold()) if isinstance(value, str) else (value or 0.0, "")


def _head(column: PageColumn, view: PageView) -> str:
    sorted_so = ""
    if view.key == column.key:
        way = "descending" if view.sort.startswith("-") else "ascending"
        sorted_so = f' aria-sort="{way}"'
    link = escape(view.toggle_query(column.key, is_number=column.is_number))
    return (
        f'<th scope="col" data-sort="{column.key}"{_class(column)}{sorted_so}>'
        f'<a href="?{link}">{column.title}</a></th>'
    )


def _row(columns: Sequence[PageColumn], cells: Sequence[Cell]) -> str:
    made = "".join(
        f'<td data-head="{column.title}"{_value(cell)}{_class(column)}>'
        f"<div>{cell.html}</div></td>"
        for column, cell in zip(columns, cells, strict=True)
    )
    return f"<tr>{made}</tr>"


def _value(cell: Cell) -> str:
    """Return the script's sort key; for texts it uses the cell itself."""
    if isinstance(cell.value, str):
        return ""
    return f' data-value="{"" if cell.value is None else cell.value}"'


def _class(column: PageColumn) -> str:
    if column.is_number:
        return ' class="number"'
    return ' class="long"' if column.is_long else ""


_NOTHING = "\N{EN DASH}"


def _word(value: object) -> Cell:
    """Return the cell of a text, also of a child's."""
    if value is None:
        return Cell(_NOTHING, None)
    return Cell(_text(value), str(value))


def _bytes(value: float | None) -> Cell:
    return Cell(_NOTHING if value is None else _size(value), value)


def _figures(value: float | None, digits: int = 0) -> Cell:
    return Cell(_number(value, digits), value)


def _small(bar: Bar | None) -> Cell:
    """Return the cell of a bound of one child."""
    if bar is None:
        return Cell(_NOTHING, None)
    used = _figure(bar, bar.used)
    if bar.limit is None:
        return Cell(used, bar.used)
    return Cell(f"{used} / {_figure(bar, bar.limit)}{_svg(bar)}", bar.used)


_AT_REST = frozenset({"waiting", "ended", "stopped"})
"""States in which the reason is no error."""


def _child_name(child: ChildFacts) -> Cell:
    pid = "" if child.pid is None else f" {child.pid}"
    name = f"<b>{_text(child.name)}</b> <small>{_text(child.program)}{pid}</small>"
    return Cell(name, child.name)


def _child_state(child: ChildFacts) -> Cell:
    kind = _text(child.state.replace(" ", "-"))
    shown = f'<span class="state {kind}">{_text(child.state)}</span>'
    return Cell(shown, child.state)


def _last_error(child: ChildFacts) -> Cell:
    error = _word(child.last_error)
    if error.value is None or child.state in _AT_REST:
        return error
    return Cell(f'<span class="error">{error.html}</span>', error.value)


def _strong(value: object) -> Cell:
    return Cell(f"<b>{_text(value)}</b>", str(value))


def _known(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _whole(value: object) -> Cell:
    """Return the cell of a number that has no unit, such as a port."""
    number = _known(value)
    return Cell(_NOTHING if number is None else str(number), number)


def _instant(value: object) -> Cell:
    """Return the cell of an RFC 3339 instant, to the second."""
    return _word(str(value).partition(".")[0].replace("T", " "))


_CHILD = (
    PageColumn("Child", "child", _child_name),
    PageColumn("State", "state", _child_state),
    PageColumn("Last error", "error", _last_error, is_long=True),
    PageColumn("CPU %", "cpu", lambda c: _figures(c.cpu_percent, 1), is_number=True),
    PageColumn("Memory", "memory", lambda c: _bytes(c.rss_bytes), is_number=True),
    PageColumn(
        "Requests/s", "requests", lambda c: _figures(c.requests_per_s), is_number=True
    ),
    PageColumn("Received", "received", lambda c: _bytes(c.bytes_in), is_number=True),
    PageColumn("Sent", "sent", lambda c: _bytes(c.bytes_out), is_number=True),
    PageColumn("Files", "files", lambda c: _small(c.files), is_number=True),
    PageColumn("Growth", "growth", lambda c: _small(c.growth), is_number=True),
    PageColumn("Tokens", "tokens", lambda c: _figures(c.tokens), is_number=True),
    PageColumn("Workspace", "workspace", lambda c: _word(c.workspace)),
    PageColumn("Changed", "changed", lambda c: _figures(c.changed), is_number=True),
    PageColumn(
        "Changed bytes",
        "changed-bytes",
        lambda c: _bytes(c.changed_bytes),
        is_number=True,
    ),
    PageColumn("Network", "network", lambda c: _word(c.network)),
    PageColumn("Isolation", "isolation", lambda c: _word(c.isolation)),
)
_CLIENT = (
    PageColumn("Client", "client", lambda row: _strong(row["id"])),
    PageColumn("Parent", "parent", lambda row: _word(row["parent_id"])),
    PageColumn("Pid", "pid", lambda row: _whole(row["pid"]), is_number=True),
    PageColumn("Pipe", "pipe", lambda row: _word(row["pipe_id"])),
    PageColumn(
        "Open files",
        "open",
        lambda row: _figures(len(row["open_files"])),
        is_number=True,
    ),
    PageColumn(
        "Connected (UTC)", "connected", lambda row: _instant(row["connected_at"])
    ),
)
_FILE = (
    PageColumn("Fileno", "fileno", lambda row: _whole(row["fileno"]), is_number=True),
    PageColumn("Mode", "mode", lambda row: _word(row["mode"])),
    PageColumn("Client", "of", lambda row: _word(row["client_id"])),
    PageColumn(
        "Offset", "offset", lambda row: _bytes(_known(row["offset"])), is_number=True
    ),
    PageColumn(
        "Top level", "top", lambda row: _word("yes" if row["is_top_level"] else "no")
    ),
    PageColumn(
        "Name",
        "name",
        lambda row: Cell(
            f"<code>{_text(row['filename'])}</code>", str(row["filename"])
        ),
        is_long=True,
    ),
)
_REACHED = (
    PageColumn("Child", "reaching", lambda row: _strong(row["child"])),
    PageColumn("Name", "reached", lambda row: _word(row["name"])),
    PageColumn("Port", "reached-port", lambda row: _whole(row["port"]), is_number=True),
    PageColumn(
        "Connections",
        "connections",
        lambda row: _whole(row["connections"]),
        is_number=True,
    ),
    PageColumn("Open", "open-now", lambda row: _whole(row["open"]), is_number=True),
    PageColumn(
        "Received",
        "net-in",
        lambda row: _bytes(_known(row["bytes_in"])),
        is_number=True,
    ),
    PageColumn(
        "Sent", "net-out", lambda row: _bytes(_known(row["bytes_out"])), is_number=True
    ),
)
_REFUSED = (
    PageColumn("Child", "missing", lambda row: _strong(row["child"])),
    PageColumn("Name", "refused", lambda row: _word(row["name"])),
    PageColumn("Port", "refused-port", lambda row: _whole(row["port"]), is_number=True),
    PageColumn("Reason", "reason", lambda row: _word(row["reason"])),
    PageColumn("Rule", "rule", lambda row: _word(row["rule"])),
    PageColumn("Times", "times", lambda row: _whole(row["count"]), is_number=True),
    PageColumn("Last (UTC)", "last", lambda row: _instant(row["time"])),
)
_KEYS = frozenset(
    column.key
    for columns in (_CHILD, _CLIENT, _FILE, _REACHED, _REFUSED)
    for column in columns
)


# Events


def _events(events: Sequence[RecentEvent]) -> str:
    items = "".join(map(_item, events)) or '<li class="none">none yet</li>'
    return f'<section><h2>Events (UTC)</h2><ol class="events">{items}</ol></section>'


def _item(event: RecentEvent) -> str:
    at = datetime.fromtimestamp(event.at, UTC).strftime("%H:%M:%S")
    grave = ""
    if event.event.endswith("denied") or event.fields.get("failure"):
        grave = ' class="grave"'
    told = " ".join(
        f"{name}={_text(value)}"
        for name, value in event.fields.items()
        if value is not None and (name in _TOLD or (event.event, name) == _DENIED)
    )
    return f"<li{grave}><time>{at}</time> <b>{_text(event.event)}</b> {told}</li>"


_TOLD = frozenset(
    {
        "child_id", "client_id", "pid", "signal", "code", "reason", "status", "name",
        "fileno", "filename", "mode", "model", "outcome", "prompt_tokens",
        "completion_tokens", "port", "rule", "latency_ms", "tool", "exec_id", "timed_out", "condition", "lag_s",
    }
)  # fmt: skip
"""Shown fields; a command line is not (rule 2 of ``observe.status_facts``)."""

_DENIED = ("security.denied", "command")
"""Events whose command is a word of the wire."""
