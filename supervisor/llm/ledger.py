"""What the host's node has spent, over restarts: a small SQLite file (ADR 11).

Rules of this file.

1. One thread call at a time writes, WAL, one transaction for all that waits.
2. What was charged is in the file before the answer goes out (``kept``): a host that is
   killed forgets nothing that a client has seen.
3. Hosts that share a directory share the total: each takes over, with every charge,
   what the others have added.
4. Without a file everything is the same but for the memory of it.
"""

from __future__ import annotations

import os
import sqlite3
import time
from typing import TYPE_CHECKING

import trio

from vfs.hostio import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.llm.quota import Node

FILE_NAME = "llm-quota.sqlite3"

RUN, DAY, NEVER = "run", "day", "never"
"""When spending is forgotten: with the host, at midnight UTC, not at all."""

BUSY_S = 5.0
"""Longest wait for another host that is writing: a transaction takes a millisecond."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS spent (
    period TEXT PRIMARY KEY, tokens REAL NOT NULL, calls INTEGER NOT NULL
) WITHOUT ROWID
"""
_ADD = """
INSERT INTO spent (period, tokens, calls) VALUES (?, ?, ?)
ON CONFLICT (period) DO UPDATE
SET tokens = tokens + excluded.tokens, calls = calls + excluded.calls
RETURNING tokens, calls
"""


class LedgerError(Exception):
    """The file cannot be used; the text says why and what to do."""


class _File:
    """The file; its methods block."""

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, FILE_NAME)  # noqa: PTH118 - a str is wanted
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)  # noqa: PTH103
            # One thread at a time uses it, not always the same one.
            self._base = sqlite3.connect(
                self.path, timeout=BUSY_S, check_same_thread=False, isolation_level=None
            )
            os.chmod(self.path, 0o600)  # noqa: PTH101
            self._base.execute("PRAGMA journal_mode = WAL")
            self._base.execute("PRAGMA synchronous = NORMAL")
            self._base.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as why:
            text = getattr(why, "strerror", None) or why
            raise LedgerError(
                f"cannot keep the quota in {self.path!r}: {text}; make the state"
                " directory writable, or move a damaged file away"
            ) from None

    def total(self, period: str) -> tuple[float, int]:
        """Return (tokens, calls) of a period."""
        row = self._base.execute(
            "SELECT tokens, calls FROM spent WHERE period = ?", (period,)
        ).fetchone()
        return (float(row[0]), int(row[1])) if row else (0.0, 0)

    def add(self, period: str, tokens: float, calls: int) -> tuple[float, int]:
        """Add a charge; return the period's total."""
        (row,) = self._base.execute(_ADD, (period, tokens, calls)).fetchall()
        return float(row[0]), int(row[1])

    def close(self) -> None:
        """Close the file, and with it its journal."""
        self._base.close()


class Spending:
    """What the host's node has spent, in the window that is on.

    Args:
        root: the host's node.
        window: ``run``, ``day`` or ``never``.
        directory: where it is kept; None for nowhere.
        complain: told once when writing begins to fail; calls go on.
        clock: seconds since the epoch.

    Raises:
        LedgerError: it cannot be kept there.
    """

    def __init__(
        self,
        root: Node,
        window: str = RUN,
        directory: str | None = None,
        complain: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = root
        self._window = window
        self._complain = complain
        self._is_failing = False
        self._clock = clock
        self._period = self._period_now()
        self._waiting: dict[str, list[float]] = {}
        self._writing = trio.Lock()
        self._file = None
        if directory is not None and window != RUN:
            self._file = _File(directory)
            root.spent, root.calls = self._file.total(self._period)

    def _period_now(self) -> str:
        if self._window != DAY:
            return self._window
        return time.strftime("%Y-%m-%d", time.gmtime(self._clock()))

    @property
    def period(self) -> str:
        """The window that is on."""
        return self._period

    @property
    def is_writing(self) -> bool:
        """Whether a charge is on its way into the file, or waits for that."""
        return self._writing.locked() or bool(self._waiting)

    def begins_anew(self) -> bool:
        """Begin a new window if it is time; tell whether (nodes then forget)."""
        period = self._period_now()
        if period == self._period:
            return False
        self._period = period
        return True

    def add(self, tokens: float, calls: int) -> None:
        """Take note of a charge that the root has already."""
        if self._file is None:
            return
        waiting = self._waiting.setdefault(self._period, [0.0, 0])
        waiting[0] += tokens
        waiting[1] += calls

    async def kept(self) -> None:
        """Return when every charge so far is in the file, or it was said why not."""
        if self._file is None:
            return
        async with self._writing:  # whoever waited finds the work done
            while self._waiting:
                period, (tokens, calls) = next(iter(self._waiting.items()))
                del self._waiting[period]
                try:
                    total = await in_thread(self._file.add, period, tokens, int(calls))
                except sqlite3.Error as why:
                    self._put_back(period, tokens, calls)
                    if not self._is_failing:
                        text = f"cannot write {self._file.path!r}: {why}"
                        self._complain(f"{text}; quotas go on in memory")
                    self._is_failing = True
                    return
                self._is_failing = False
                self._take_over(period, total)

    def _put_back(self, period: str, tokens: float, calls: float) -> None:
        waiting = self._waiting.setdefault(period, [0.0, 0])
        waiting[0] += tokens
        waiting[1] += calls

    def _take_over(self, period: str, total: tuple[float, int]) -> None:
        """Count what other hosts have added, and what this one has not written yet."""
        if period != self._period:
            return
        tokens, calls = self._waiting.get(period, (0.0, 0))
        self._root.spent = max(self._root.spent, total[0] + tokens)
        self._root.calls = max(self._root.calls, total[1] + int(calls))

    async def close(self) -> None:
        """Write what waits, and close the file."""
        if self._file is None:
            return
        try:
            await self.kept()
        finally:
            file, self._file = self._file, None
            await in_thread(file.close)

    def descriptors(self) -> tuple[tuple[int, str], ...]:
        """Return what the file holds of the process's descriptors, with a word."""
        if self._file is None:
            return ()
        found = []
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            try:
                target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            except FileNotFoundError:
                continue
            if target.startswith(os.path.abspath(self._file.path)):  # noqa: PTH100
                found.append((int(name), "quota ledger"))
        return tuple(found)
