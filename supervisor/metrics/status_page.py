"""The status page: facts in, HTML out; one file, nothing from anywhere else.

What it is: text, its style and the twelve lines of script that keep it live.  What it is
not: it looks at nothing (``metrics.status_facts``) and sends nothing (``metrics.listener``).

Rules of this file.

1. Whatever comes from a child passes ``_text``: no control characters, at most
   ``MAX_CHARS``, escaped.  There is no other way into the page.
2. The policy allows this style and this script by their hashes, connections to where the
   page came from, and nothing else: what slipped through rule 1 could not run.
3. Pictures are inline SVG; without the script the page is there, but does not move.
"""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

from supervisor.metrics.status_style import SCRIPT, STYLE
from supervisor.tables import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from supervisor.metrics.registry import RecentEvent
    from supervisor.metrics.status_facts import Bar, ChildFacts, Facts

MAX_CHARS = 160
"""Of one text; a name may have 4,096."""

NEARLY = 0.8
"""A bar that is fuller is drawn as a warning."""


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
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content-Security-Policy of the page (rule 2)."""


def page(facts: Facts) -> str:
    """Return the whole page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>sandhost {facts.pid}</title><style>{STYLE}</style></head><body>"
        f'<header><h1>sandhost</h1><p>host {facts.pid}</p><p id="link" class="off"'
        ' role="status">not live</p></header>'
        f'<main id="live">{live_part(facts)}</main>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def live_part(facts: Facts) -> str:
    """Return what changes: everything beneath the head, without line ends."""
    totals = "".join(
        f"<div><dt>{_text(word)}</dt><dd>{_text(figure)}</dd></div>"
        for word, figure in facts.totals
    )
    bars = "".join(map(_quota, facts.bars))
    children, clients, files = facts.more
    return (
        f'<dl class="totals">{totals}</dl>'
        f'<section><h2>Bounds</h2><div class="bars">{bars}</div></section>'
        + _section("Children", _CHILD_HEADS, map(_child, facts.children), children)
        + _events(facts.events)
        + _section("Clients", _CLIENT_HEADS, map(_client, facts.clients), clients)
        + _section("Open files", _FILE_HEADS, map(_file, facts.files), files)
    )


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
    return (
        f'<div class="quota"><p><span>{_text(bar.title)}</span>'
        f"<span><b>{_figure(bar, bar.used)}</b> {limit}{reserved}</span></p>"
        f"{_svg(bar)}</div>"
    )


def _small(bar: Bar) -> str:
    if bar.limit is None:
        return _figure(bar, bar.used)
    return f"{_figure(bar, bar.used)} / {_figure(bar, bar.limit)}{_svg(bar)}"


# Tables


Head = tuple[str, bool]
"""A column's title, and whether it holds figures."""

_CHILD_HEADS: tuple[Head, ...] = (
    ("Child", False),
    ("State", False),
    ("CPU %", True),
    ("Memory", True),
    ("Requests/s", True),
    ("In", True),
    ("Out", True),
    ("Files", True),
    ("Growth", True),
    ("Tokens", True),
    ("Isolation", False),
    ("Last error", False),
)
_CLIENT_HEADS: tuple[Head, ...] = (
    ("Client", False),
    ("Parent", False),
    ("Pid", True),
    ("Pipe", False),
    ("Open files", True),
    ("Connected", False),
)
_FILE_HEADS: tuple[Head, ...] = (
    ("Fileno", True),
    ("Mode", False),
    ("Client", False),
    ("Offset", True),
    ("Top level", False),
    ("Name", False),
)


def _section(
    title: str, heads: Sequence[Head], rows: Iterable[Sequence[str]], more: int
) -> str:
    body = "".join(_row(heads, cells) for cells in rows)
    if not body:
        return f'<section><h2>{title}</h2><p class="none">none</p></section>'
    head = "".join(
        f'<th scope="col"{_numeric(is_number)}>{name}</th>' for name, is_number in heads
    )
    rest = f'<p class="none">and {more:,} more</p>' if more else ""
    return (
        f'<section><h2>{title}</h2><div class="wide"><table><thead><tr>{head}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>{rest}</section>"
    )


def _row(heads: Sequence[Head], cells: Sequence[str]) -> str:
    made = "".join(
        f'<td data-head="{name}"{_numeric(is_number)}><div>{cell}</div></td>'
        for (name, is_number), cell in zip(heads, cells, strict=True)
    )
    return f"<tr>{made}</tr>"


def _numeric(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _child(child: ChildFacts) -> tuple[str, ...]:
    pid = "" if child.pid is None else f" {child.pid}"
    error = ""
    if child.last_error is not None:
        error = f'<span class="error">{_text(child.last_error)}</span>'
    kind = _text(child.state.replace(" ", "-"))
    return (
        f"<b>{_text(child.name)}</b> <small>{_text(child.program)}{pid}</small>",
        f'<span class="state {kind}">{_text(child.state)}</span>',
        _number(child.cpu_percent, 1),
        "\N{EN DASH}" if child.rss_bytes is None else _size(child.rss_bytes),
        _number(child.requests_per_s),
        _size(child.bytes_in),
        _size(child.bytes_out),
        _small(child.files),
        _small(child.growth),
        _number(child.tokens),
        _text(child.isolation),
        error or "\N{EN DASH}",
    )


def _client(row: Mapping[str, object]) -> tuple[str, ...]:
    files = row["open_files"]
    return (
        f"<b>{_text(row['id'])}</b>",
        _text(row["parent_id"] or "\N{EN DASH}"),
        _text(row["pid"] or "\N{EN DASH}"),
        _text(row["pipe_id"]),
        str(len(files)) if isinstance(files, list) else "",
        _text(str(row["connected_at"]).partition(".")[0].replace("T", " ")),
    )


def _file(row: Mapping[str, object]) -> tuple[str, ...]:
    return (
        _text(row["fileno"]),
        _text(row["mode"]),
        _text(row["client_id"]),
        _text(row["offset"]),
        "yes" if row["is_top_level"] else "no",
        f"<code>{_text(row['filename'])}</code>",
    )


# Events


def _events(events: Sequence[RecentEvent]) -> str:
    items = "".join(map(_item, events)) or '<li class="none">none yet</li>'
    return f'<section><h2>Events</h2><ol class="events">{items}</ol></section>'


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
        "completion_tokens", "latency_ms", "tool", "exec_id", "timed_out", "condition", "lag_s",
    }
)  # fmt: skip
"""Fields that are shown; a command line is not (rule 2 of ``metrics.status_facts``)."""

_DENIED = ("security.denied", "command")
"""Here the command is a word of the wire."""
