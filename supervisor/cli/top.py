"""``sandhost top``: the present work of each child; rows in, text out.

Rates between two looks, columns, and a screen as a state machine: keys in, lines and
wishes out.

Rules of this file.

1. It fits into 80 columns: long names and errors are cut, then lesser figures are left
   out.
2. A kill has to be confirmed by the shown name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from supervisor.observe.tables import (
    Column,
    cell,
    render,
    workspace_names,
    workspace_sum,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

Row = dict[str, Any]

SORTS: dict[str, tuple[str, str]] = {
    "cpu": ("c", "cpu_percent"),
    "rss": ("m", "rss_bytes"),
    "requests": ("r", "requests_per_s"),
    "files": ("f", "open_files"),
    "in": ("i", "bytes_in"),
    "out": ("o", "bytes_out"),
    "tokens": ("t", "tokens"),
    "errors": ("e", "errors"),
    "name": ("n", "name"),
}
"""The words of ``--sort``: key and figure."""

HELP = "q quit  / filter  arrows k kill K kill -9  sort: " + " ".join(
    f"{key}={word}" for word, (key, _) in SORTS.items()
)


@dataclass(frozen=True, slots=True)
class HostLook:
    """The answer of a host at one moment.

    Attributes:
        at_s: on a monotonic clock.
        rows: of ``ps``.
    """

    at_s: float
    rows: Sequence[Row]


def figures(before: HostLook | None, now: HostLook) -> list[Row]:
    """Return one flat row for each child, with rates since the look before."""
    earlier: dict[Any, Row] = {}
    span_s = 0.0
    if before is not None and now.at_s > before.at_s:
        earlier = {row.get("id"): row for row in before.rows}
        span_s = now.at_s - before.at_s
    return [_flat(row, earlier.get(row.get("id")), span_s) for row in now.rows]


def _flat(row: Row, earlier: Row | None, span_s: float) -> Row:
    traffic = row.get("traffic") or {}
    usage = row.get("usage") or {}
    past = (earlier or {}).get("traffic") or {}
    before = (earlier or {}).get("usage") or {}

    def rate(key: str) -> float | None:
        if not past or not traffic or not span_s:
            return None
        happened: int = max(0, traffic[key] - past[key])
        return round(happened / span_s, 1)

    state = str(row.get("state"))
    if usage.get("state") in {"stopped", "zombie"}:
        state = usage["state"]
    elif usage.get("state") == before.get("state") == "disk-sleep":
        state = (
            "stuck"  # at both looks: a spawning process is in that state only briefly
        )
    return {
        "name": str(row.get("name") or row.get("id")),
        "node": row.get("node"),
        "id": row.get("id"),
        "pid": row.get("pid"),
        "state": state,
        "cpu_percent": usage.get("cpu_percent"),
        "rss_bytes": usage.get("rss_bytes"),
        "descriptors": usage.get("descriptors"),
        "open_files": traffic.get("open_files"),
        "requests": traffic.get("requests"),
        "requests_per_s": rate("requests"),
        "bytes_in": traffic.get("bytes_in"),
        "bytes_out": traffic.get("bytes_out"),
        "bytes_in_per_s": rate("bytes_in"),
        "bytes_out_per_s": rate("bytes_out"),
        "errors": traffic.get("errors"),
        "tokens": (row.get("llm") or {}).get("tokens"),
        "isolation": (row.get("isolation") or {}).get("label"),
        "workspaces": row.get("workspaces") or [],
        "last_error": traffic.get("last_error"),
        "reason": row.get("reason"),
    }


def arrange(rows: Sequence[Row], sort: str, wanted: str = "") -> list[Row]:
    """Return the rows with a text in name, state or error, sorted."""
    text = wanted.lower()
    kept = [row for row in rows if text in _search_text(row)]
    _, figure = SORTS[sort]
    if figure == "name":
        return sorted(kept, key=lambda row: row["name"])
    # A missing figure sorts below zero.
    return sorted(kept, key=lambda row: (-(row[figure] or 0), row["name"]))


def _search_text(row: Row) -> str:
    keys = ("name", "id", "state", "last_error", "reason")
    return " ".join(str(row.get(key) or "") for key in keys).lower()


# Columns


def _size(size_bytes: float) -> str:
    size = float(size_bytes)
    for unit in ("", "K", "M", "G"):
        if size < 999.5:
            short = size >= 10 or not unit
            return f"{size:.0f}{unit}" if short else f"{size:.1f}{unit}"
        size /= 1024
    return f"{size:.0f}T"


def _count(number: float) -> str:
    if number < 100_000:
        return f"{number:.0f}"
    return f"{number / 1000:.0f}k" if number < 99_999_500 else f"{number / 1e6:.0f}M"


def _trouble(row: Row) -> str:
    reason, error = row.get("reason"), row.get("last_error")
    return str(reason or error or "").removeprefix("ERROR ") or "-"


COLUMNS = (
    Column("CHILD", lambda row: str(row["name"]), gives_way=True),
    Column("NODE", cell("node"), is_seldom=True),
    Column("STATE", lambda row: str(row["state"])),
    Column("CPU%", cell("cpu_percent", "{:.0f}".format), is_right=True),
    Column("RSS", cell("rss_bytes", _size), is_right=True),
    Column("FDS", cell("descriptors"), is_right=True, goes=3),
    Column("FILES", cell("open_files"), is_right=True, goes=2),
    Column("REQ/S", cell("requests_per_s", _count), is_right=True),
    Column("IN", cell("bytes_in", _size), is_right=True),
    Column("OUT", cell("bytes_out", _size), is_right=True),
    Column("TOKENS", cell("tokens", _count), is_right=True, goes=1),
    Column("WORKSPACE", workspace_names, gives_way=True, goes=4, is_seldom=True),
    Column("CHANGED", workspace_sum("changed"), is_right=True, goes=5, is_seldom=True),
    Column(
        "BYTES", workspace_sum("bytes", _size), is_right=True, goes=6, is_seldom=True
    ),
    Column("ISO", lambda row: str(row.get("isolation") or "-"), gives_way=True),
    Column("LAST ERROR", _trouble, gives_way=True),
)


def table(rows: Sequence[Row], width: int | None) -> list[str]:
    """Return the head and a line for each row, at most ``width`` wide if given."""
    return render(COLUMNS, rows, width=width).splitlines()


# The screen


@dataclass(slots=True)
class Wish:
    """The order of the screen to its caller.

    Attributes:
        kill: the child to signal.
        signal: the signal.
        quit: whether to end.
    """

    kill: str = ""
    signal: str = ""
    quit: bool = False


@dataclass(slots=True)
class Screen:
    """The shown rows, and the effect of keys.

    Attributes:
        sort: a word of ``SORTS``.
        wanted: a text that rows must contain.
        notice: one line about the last action.
    """

    sort: str = "cpu"
    wanted: str = ""
    notice: str = ""
    _rows: list[Row] = field(default_factory=list)
    _chosen: str = ""
    _typing: bool = False
    _asked: Wish | None = None

    def show(self, rows: Sequence[Row]) -> None:
        """Set new rows."""
        self._rows = list(rows)

    def press(self, key: str) -> Wish:
        """Do the action of a key.

        Args:
            key: a character, or ``up``, ``down``, ``enter``, ``escape``, ``back``.
        """
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self.notice = "" if key == "y" else "nothing was killed"
            return asked if key == "y" else Wish()
        if self._typing:
            self._type(key)
            return Wish()
        self.notice = ""
        if key in {"q", "\x03", "\x04"}:
            return Wish(quit=True)
        if key == "/":
            self._typing = True
        elif key == "escape":
            self.wanted = ""
        elif key in {"up", "down"}:
            self._move(-1 if key == "up" else 1)
        elif key in {"k", "K"}:
            self._ask_to_kill("KILL" if key == "K" else "TERM")
        else:
            self._sort_by(key)
        return Wish()

    def _type(self, key: str) -> None:
        if key in {"enter", "escape"}:
            self._typing = False
            self.wanted = self.wanted if key == "enter" else ""
        elif key == "back":
            self.wanted = self.wanted[:-1]
        elif len(key) == 1 and key.isprintable():
            self.wanted += key

    def _sort_by(self, key: str) -> None:
        for word, (its_key, _) in SORTS.items():
            if key == its_key:
                self.sort = word

    def _move(self, step: int) -> None:
        names = [row["name"] for row in self.rows()]
        if not names:
            return
        at = names.index(self._chosen) + step if self._chosen in names else 0
        self._chosen = names[max(0, min(at, len(names) - 1))]

    def _ask_to_kill(self, signal: str) -> None:
        if self._chosen not in {row["name"] for row in self.rows()}:
            self.notice = "choose a child with the arrows first"
            return
        self._asked = Wish(kill=self._chosen, signal=signal)

    def rows(self) -> list[Row]:
        """Return the shown rows, in order."""
        return arrange(self._rows, self.sort, self.wanted)

    def lines(self, width: int, height: int) -> tuple[list[str], int | None]:
        """Return the lines to draw, and the index of the chosen one.

        The first line is the summary, the last one shows keys or a question.
        """
        rows = self.rows()
        chosen = next(
            (i for i, r in enumerate(rows) if r["name"] == self._chosen), None
        )
        room = max(1, height - 3)
        first = 0 if chosen is None else max(0, chosen - room + 1)
        shown = rows[first : first + room]
        asked = sum(row["requests_per_s"] or 0 for row in self._rows)
        head = f"{len(self._rows)} children, {asked:,.0f} requests/s, by {self.sort}"
        if len(shown) < len(self._rows):
            head += f", {len(shown)} shown"
        body = table(shown, width)
        at = None if chosen is None else 2 + chosen - first
        return [head[:width], *body, self._foot()[:width]], at

    def _foot(self) -> str:
        if self._asked is not None:
            return f"SIG{self._asked.signal} to {self._asked.kill}? y: yes, other: no"
        if self._typing:
            return f"/{self.wanted}_"
        if self.notice:
            return self.notice
        return f"filter: {self.wanted} (Esc clears)" if self.wanted else HELP
