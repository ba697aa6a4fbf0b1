"""Spending over restarts, in a small SQLite file (ADR 11, ADR 20).

It has the totals of the host's own node, and of each child with a configured name.

1. One thread at a time writes, one transaction for all waiting charges, with WAL.
2. A charge is in the file before its answer is sent or its client is gone
   (``wait_written``), so a killed host forgets no charge that a client has seen.
3. Hosts that share a directory share the totals: with every charge each adopts the others'.
4. The worst cost of a call is in the file before the call is sent (spec FL7).  If its host
   dies, it counts as spent: each start looks for dead hosts, by their locks.
"""

from __future__ import annotations

import fcntl
import math
import os
import sqlite3
import struct
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import trio

from hostlib.database import open_database
from hostlib.linux.holdings import descriptors_of
from hostlib.paths import LEDGER
from hostlib.private_files import open_private
from hostlib.threads import in_thread
from supervisor.llm.quota import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

RUN, DAY, NEVER = "run", "day", "never"
"""The end of a window of spending: with the host, at midnight UTC, never."""

AGAIN_S = 1.0
"""Pause after a failure until the file is written again: within the wait of a hand-over."""

DAY_S = 86_400
"""Seconds of a day in UTC, as time(2) counts them."""

HOST = ""
"""The account of the host's own node; no child can have this name."""

# A file of an older version has only the first table, and keeps it.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS spent (
    period TEXT PRIMARY KEY, tokens REAL NOT NULL, calls INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent_by_child (
    period TEXT, child TEXT, tokens REAL NOT NULL, calls INTEGER NOT NULL,
    PRIMARY KEY (period, child)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS hosts (number INTEGER PRIMARY KEY AUTOINCREMENT);
CREATE TABLE IF NOT EXISTS reserved (
    host INTEGER, call INTEGER, account TEXT, period TEXT NOT NULL,
    tokens REAL NOT NULL, PRIMARY KEY (host, call, account)
) WITHOUT ROWID;
"""
_ADD = """
INSERT INTO spent (period, tokens, calls) VALUES (:period, :tokens, :calls)
ON CONFLICT (period) DO UPDATE
SET tokens = tokens + excluded.tokens, calls = calls + excluded.calls
RETURNING tokens, calls
"""
_ADD_CHILDS = """
INSERT INTO spent_by_child (period, child, tokens, calls)
VALUES (:period, :account, :tokens, :calls)
ON CONFLICT (period, child) DO UPDATE
SET tokens = tokens + excluded.tokens, calls = calls + excluded.calls
RETURNING tokens, calls
"""
_TOTAL = "SELECT tokens, calls FROM spent WHERE period = :period"
_TOTAL_OF_CHILD = """
SELECT tokens, calls FROM spent_by_child WHERE period = :period AND child = :account
"""


_RESERVE = """
INSERT INTO reserved (host, call, account, period, tokens) VALUES (?, ?, ?, ?, ?)
"""
_RESERVED_BY = """
SELECT period, account, sum(tokens), count(*) FROM reserved WHERE host = ?
GROUP BY period, account
"""
_FORGET_HOST = """
DELETE FROM hosts WHERE number = :host
AND NOT EXISTS (SELECT 1 FROM reserved WHERE host = :host)
"""


@dataclass(slots=True)
class Charge:
    """An amount to be added to an account."""

    period: str
    account: str
    tokens: float = 0.0
    calls: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """The period and account of the charge."""
        return self.period, self.account


@dataclass(frozen=True, slots=True)
class LedgerReservation:
    """The worst cost of a call for one account, before the call is sent."""

    call: int
    account: str
    period: str
    tokens: float


class LedgerError(Exception):
    """The file cannot be used; the text says why and what to do."""


class _File:
    """The file; its methods block."""

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, LEDGER)  # noqa: PTH118 - a str is wanted
        try:
            with ExitStack() as stack:
                os.makedirs(directory, mode=0o700, exist_ok=True)  # noqa: PTH103
                os.close(open_private(self.path))
                self._base = open_database(self.path, _SCHEMA, synchronous="NORMAL")
                stack.callback(self._base.close)
                # Each living host holds a lock on the byte of its number.
                self._locks = open_private(f"{self.path}-hosts")
                stack.callback(os.close, self._locks)
                self._host = self._count_host()
                stack.pop_all()
        except (OSError, sqlite3.Error) as why:
            text = getattr(why, "strerror", None) or why
            raise LedgerError(
                f"cannot keep the quota in {self.path!r}: {text}; make the state"
                " directory writable, or move a damaged file away"
            ) from None

    def _count_host(self) -> int:
        """Return a number for this host; charge the reservations of dead hosts."""
        self._base.execute("BEGIN IMMEDIATE")
        with self._base:
            query = "INSERT INTO hosts DEFAULT VALUES RETURNING number"
            ((host,),) = self._base.execute(query).fetchall()
            self._lock_byte(host)
            rows = self._base.execute("SELECT number FROM hosts").fetchall()
            for (other,) in rows:
                if other != host and self._lock_byte(other):
                    self._charge_dead(other)
        return int(host)

    def _lock_byte(self, host: int) -> bool:
        """Lock the byte of a host's number; return False if that host has it.

        The lock belongs to the open file description (F_OFD_SETLK, fcntl(2)): it ends
        with the process, and not when another descriptor of the file is closed.
        """
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, host, 1, 0)
        try:
            fcntl.fcntl(self._locks, fcntl.F_OFD_SETLK, lock)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _charge_dead(self, host: int) -> None:
        rows = self._base.execute(_RESERVED_BY, (host,)).fetchall()
        for period, account, tokens, calls in rows:
            self._add(Charge(period, account, tokens, calls))
        self._base.execute("DELETE FROM reserved WHERE host = ?", (host,))
        self._base.execute("DELETE FROM hosts WHERE number = ?", (host,))

    def total(self, period: str, account: str) -> tuple[float, int]:
        """Return (tokens, calls) of an account in a period."""
        names = {"period": period, "account": account}
        query = _TOTAL if account == HOST else _TOTAL_OF_CHILD
        row = self._base.execute(query, names).fetchone()
        return (float(row[0]), int(row[1])) if row else (0.0, 0)

    def write(
        self, charges: list[Charge], reserved: list[LedgerReservation], ended: list[int]
    ) -> list[tuple[float, int]]:
        """Write all in one transaction; return the total of each charged account.

        Args:
            charges: charges to add.
            reserved: worst costs of calls to be sent, by number.
            ended: calls whose reservations are removed.
        """
        self._base.execute("BEGIN IMMEDIATE")
        with self._base:  # commits, or rolls back
            rows = [
                (self._host, one.call, one.account, one.period, one.tokens)
                for one in reserved
            ]
            self._base.executemany(_RESERVE, rows)
            query = "DELETE FROM reserved WHERE host = ? AND call = ?"
            self._base.executemany(query, [(self._host, call) for call in ended])
            return [self._add(charge) for charge in charges]

    def _add(self, charge: Charge) -> tuple[float, int]:
        query = _ADD if charge.account == HOST else _ADD_CHILDS
        (row,) = self._base.execute(query, asdict(charge)).fetchall()
        return float(row[0]), int(row[1])

    def close(self) -> None:
        """Close the file, and with it its journal."""
        # If this fails, the next start finds a dead host of this number.
        with suppress(sqlite3.Error):
            self._base.execute(_FORGET_HOST, {"host": self._host})
        self._base.close()
        os.close(self._locks)


class Spending:
    """The spending of the host's node and its children in the present window.

    Args:
        root: the host's node.
        window: ``run``, ``day`` or ``never``.
        directory: directory of the file; None for no file.
        complain: called once when writing begins to fail; calls go on.
        clock: returns seconds since the epoch.

    Attributes:
        is_failing: the file could not be written; charges wait, and ``write_again``
            repeats that.

    Raises:
        LedgerError: the file cannot be used.
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
        self._accounts: dict[Node, str] = {root: HOST}
        self._nodes: dict[str, Node] = {HOST: root}
        self._window = window
        self._complain = complain
        self.is_failing = False
        self._has_failed = trio.Event()
        self.clock = clock
        self._period = self._period_now()
        self._waiting: dict[tuple[str, str], Charge] = {}
        self._calls = 0
        self._reserved: dict[int, list[LedgerReservation]] = {}  # not written yet
        self._ended: list[int] = []  # written, but not removed yet
        self._turn = trio.Lock()
        self._file = None
        if directory is not None and window != RUN:
            self._file = _File(directory)
            root.tokens.used, root.calls.used = self._file.total(self._period, HOST)

    def _period_now(self) -> str:
        if self._window != DAY:
            return self._window
        return time.strftime("%Y-%m-%d", time.gmtime(self.clock()))

    @property
    def period(self) -> str:
        """The present window."""
        return self._period

    @property
    def window_left_s(self) -> float:
        """Seconds until the window ends; infinite if it ends with the host or never."""
        if self._window != DAY:
            return math.inf
        return DAY_S - self.clock() % DAY_S

    @property
    def is_writing(self) -> bool:
        """Whether a charge is being written, or waits."""
        return self._turn.locked() or self._is_waiting

    @property
    def _is_waiting(self) -> bool:
        return bool(self._waiting or self._reserved or self._ended)

    def reset(self) -> bool:
        """Begin a new window if it is time; return whether one has begun.

        Only the nodes of this object forget their spending, not those of clients.
        """
        period = self._period_now()
        if period == self._period:
            return False
        self._period = period
        for node in self._accounts:
            node.forget_spending()
        return True

    def children(self) -> Iterator[tuple[str, Node]]:
        """Yield the nodes of children by their names."""
        for node, name in self._accounts.items():
            if name != HOST:
                yield name, node

    async def node_of_child(self, name: str) -> Node:
        """Return the node of a child that the configuration names, with its total.

        The node is kept over restarts of the child (spec L10), right beneath the host's.

        Raises:
            LedgerError: the file cannot be read.
        """
        async with self._turn:
            node = self._nodes.get(name)
            if node is not None:
                return node
            node = Node(self._root)
            if self._file is not None:
                period = self._period
                try:
                    total = await in_thread(self._file.total, period, name)
                except sqlite3.Error as why:
                    raise LedgerError(
                        f"cannot read the quota of {name!r} in {self._file.path!r}:"
                        f" {why}; move a damaged file away"
                    ) from None
                if period == self._period:
                    node.tokens.used, node.calls.used = total
            self._nodes[name] = node
            self._accounts[node] = name
            return node

    def reserve(self, amounts: Iterable[tuple[Node, float]]) -> int:
        """Queue the worst cost of a call, which may be sent after ``wait_written``.

        Args:
            amounts: each node that pays, with its reserved amount.

        Returns:
            A number of the call, for its end.
        """
        self._calls += 1
        if self._file is not None:
            self._reserved[self._calls] = [
                LedgerReservation(
                    self._calls, self._accounts[node], self._period, amount
                )
                for node, amount in amounts
                if node in self._accounts
            ]
        return self._calls

    def add(
        self, node: Node, tokens: float, calls: int, reserved: int | None = None
    ) -> None:
        """Queue a charge that a node and its ancestors have already.

        Args:
            node: the charged node.
            tokens: weighted tokens.
            calls: number of calls that count.
            reserved: the number of the ended call.
        """
        if self._file is None:
            return
        if reserved is not None and self._reserved.pop(reserved, None) is None:
            self._ended.append(reserved)
        for one in node.path():
            account = self._accounts.get(one)
            if account is not None:
                self._put(Charge(self._period, account, tokens, calls))

    def _put(self, charge: Charge) -> None:
        known = self._waiting.setdefault(charge.key, charge)
        if known is not charge:
            known.tokens += charge.tokens
            known.calls += charge.calls

    async def wait_written(self) -> None:
        """Wait until all so far is in the file, or a failure was reported."""
        if self._file is None:
            return
        async with self._turn:  # another task may have done the work meanwhile
            if self._is_waiting:  # others' later charges are others' to wait for
                charges = list(self._waiting.values())
                reserved, ended = self._reserved, self._ended
                self._waiting, self._reserved, self._ended = {}, {}, []
                rows = [row for rows in reserved.values() for row in rows]
                try:
                    totals = await in_thread(self._file.write, charges, rows, ended)
                except BaseException as why:
                    # Nothing was written: queue it again.
                    self._put_back(charges, reserved, ended)
                    if not isinstance(why, (sqlite3.Error, OSError)):
                        raise
                    if not self.is_failing:
                        text = f"cannot write {self._file.path!r}: {why}"
                        self._complain(f"{text}; quotas go on in memory")
                    self.is_failing = True
                    self._has_failed.set()
                    return
                self.is_failing = False
                for charge, total in zip(charges, totals, strict=True):
                    self._take_over(charge, total)

    async def write_again(self) -> None:
        """Write waiting charges after each failure, until it is cancelled.

        Without it a host without calls would not go on when its disk has room again.
        """
        while True:
            await self._has_failed.wait()
            self._has_failed = trio.Event()
            await trio.sleep(AGAIN_S)
            await self.wait_written()

    def _put_back(
        self,
        charges: list[Charge],
        reserved: dict[int, list[LedgerReservation]],
        ended: list[int],
    ) -> None:
        for charge in charges:
            self._put(charge)
        # A call that was not written and has ended meanwhile need not be written.
        over = set(self._ended) & reserved.keys()
        left = {call: rows for call, rows in reserved.items() if call not in over}
        self._reserved = left | self._reserved
        self._ended = ended + [call for call in self._ended if call not in over]

    def _take_over(self, charge: Charge, total: tuple[float, int]) -> None:
        """Set a node to the file's total plus the charges that are not written yet."""
        if charge.period != self._period:
            return
        node = self._nodes[charge.account]
        waiting = self._waiting.get(charge.key)
        tokens, calls = (waiting.tokens, waiting.calls) if waiting else (0.0, 0)
        node.tokens.used = max(node.tokens.used, total[0] + tokens)
        node.calls.used = max(node.calls.used, total[1] + calls)

    async def close(self) -> None:
        """Write waiting charges, and close the file."""
        if self._file is None:
            return
        try:
            while self._is_waiting:
                await self.wait_written()
                if self.is_failing:
                    break
        finally:
            file, self._file = self._file, None
            await in_thread(file.close)

    def descriptors(self) -> tuple[tuple[int, str], ...]:
        """Return the descriptors of the file, each with a word for it."""
        if self._file is None:
            return ()
        return tuple((fd, "quota ledger") for fd in descriptors_of(self._file.path))
