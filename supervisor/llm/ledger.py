"""What was spent, over restarts: a small SQLite file (ADR 11, ADR 20).

The totals of the host's own node, and of each child that the configuration names.

Rules of this file.

1. One thread call at a time writes, WAL, one transaction for all that waits.
2. What was charged is in the file before the answer goes out, or the client that went
   away is gone (``kept``): a host that is killed forgets nothing that anybody has seen.
3. Hosts that share a directory share the totals: each takes over, with every charge,
   what the others have added.
4. A child's total outlives the child, by its name; without a file as long as the host.
"""

from __future__ import annotations

import math
import os
import sqlite3
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import trio

from hostlib.paths import LEDGER
from hostlib.threads import in_thread
from supervisor.llm.quota import Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RUN, DAY, NEVER = "run", "day", "never"
"""When spending is forgotten: with the host, at midnight UTC, not at all."""

DAY_S = 86_400
"""Seconds of a day in UTC, as time(2) counts them."""

BUSY_S = 5.0
"""Longest wait for another host that is writing: a transaction takes a millisecond."""

HOST = ""
"""The account of the host's own node; no child can be called so."""

# A file from before children had totals has the first table alone, and keeps it.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS spent (
    period TEXT PRIMARY KEY, tokens REAL NOT NULL, calls INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent_by_child (
    period TEXT, child TEXT, tokens REAL NOT NULL, calls INTEGER NOT NULL,
    PRIMARY KEY (period, child)
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


@dataclass(slots=True)
class Charge:
    """What is to be added to an account."""

    period: str
    account: str
    tokens: float = 0.0
    calls: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """What tells where it goes."""
        return self.period, self.account


class LedgerError(Exception):
    """The file cannot be used; the text says why and what to do."""


def _make_private(path: str) -> None:
    """Make a file, if there is none, and its owner's alone; follow no link (attack 49).

    SQLite would follow one that a child has put there.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        os.fchmod(fd, 0o600)
    finally:
        os.close(fd)


class _File:
    """The file; its methods block."""

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, LEDGER)  # noqa: PTH118 - a str is wanted
        try:
            with ExitStack() as stack:
                os.makedirs(directory, mode=0o700, exist_ok=True)  # noqa: PTH103
                _make_private(self.path)
                self._base = self._opened()
                stack.callback(self._base.close)
                self._base.execute("PRAGMA journal_mode = WAL")
                self._base.execute("PRAGMA synchronous = NORMAL")
                self._base.executescript(_SCHEMA)
                stack.pop_all()
        except (OSError, sqlite3.Error) as why:
            text = getattr(why, "strerror", None) or why
            raise LedgerError(
                f"cannot keep the quota in {self.path!r}: {text}; make the state"
                " directory writable, or move a damaged file away"
            ) from None

    def _opened(self) -> sqlite3.Connection:
        # One thread at a time uses it, not always the same one.
        return sqlite3.connect(
            self.path, timeout=BUSY_S, check_same_thread=False, isolation_level=None
        )

    def total(self, period: str, account: str) -> tuple[float, int]:
        """Return (tokens, calls) of an account in a period."""
        names = {"period": period, "account": account}
        query = _TOTAL if account == HOST else _TOTAL_OF_CHILD
        row = self._base.execute(query, names).fetchone()
        return (float(row[0]), int(row[1])) if row else (0.0, 0)

    def add(self, charges: list[Charge]) -> list[tuple[float, int]]:
        """Add all of them, or none; return the total of each account."""
        totals = []
        self._base.execute("BEGIN IMMEDIATE")
        with self._base:  # commits, or rolls back
            for charge in charges:
                query = _ADD if charge.account == HOST else _ADD_CHILDS
                (row,) = self._base.execute(query, asdict(charge)).fetchall()
                totals.append((float(row[0]), int(row[1])))
        return totals

    def close(self) -> None:
        """Close the file, and with it its journal."""
        self._base.close()


class Spending:
    """What the host's node and its children have spent, in the window that is on.

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
        self._accounts: dict[Node, str] = {root: HOST}
        self._nodes: dict[str, Node] = {HOST: root}
        self._window = window
        self._complain = complain
        self._is_failing = False
        self._clock = clock
        self._period = self._period_now()
        self._waiting: dict[tuple[str, str], Charge] = {}
        self._turn = trio.Lock()
        self._file = None
        if directory is not None and window != RUN:
            self._file = _File(directory)
            root.tokens.used, root.calls.used = self._file.total(self._period, HOST)

    def _period_now(self) -> str:
        if self._window != DAY:
            return self._window
        return time.strftime("%Y-%m-%d", time.gmtime(self._clock()))

    @property
    def period(self) -> str:
        """The window that is on."""
        return self._period

    @property
    def window_left_s(self) -> float:
        """Seconds until the window ends; infinite where it ends with the host or never."""
        if self._window != DAY:
            return math.inf
        return DAY_S - self._clock() % DAY_S

    @property
    def is_writing(self) -> bool:
        """Whether a charge is on its way into the file, or waits for that."""
        return self._turn.locked() or bool(self._waiting)

    def begin_anew(self) -> bool:
        """Begin a new window if it is time, and tell whether it was.

        The nodes that this keeps have forgotten by then; others are not known here.
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

        It is the same one for every life of the child (spec L10: what was charged is
        not forgotten), right beneath the host's.

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

    def add(self, node: Node, tokens: float, calls: int) -> None:
        """Keep a charge that a node and its ancestors have already."""
        if self._file is None:
            return
        for one in node.path():
            account = self._accounts.get(one)
            if account is not None:
                self._put(Charge(self._period, account, tokens, calls))

    def _put(self, charge: Charge) -> None:
        known = self._waiting.setdefault(charge.key, charge)
        if known is not charge:
            known.tokens += charge.tokens
            known.calls += charge.calls

    async def kept(self) -> None:
        """Return when every charge so far is in the file, or it was said why not."""
        if self._file is None:
            return
        async with self._turn:  # a task that waited finds the work done
            while self._waiting:
                charges = list(self._waiting.values())
                self._waiting.clear()
                try:
                    totals = await in_thread(self._file.add, charges)
                except BaseException as why:
                    # Nothing was written, or nobody had begun to: it is to be counted.
                    for charge in charges:
                        self._put(charge)
                    if not isinstance(why, (sqlite3.Error, OSError)):
                        raise
                    if not self._is_failing:
                        text = f"cannot write {self._file.path!r}: {why}"
                        self._complain(f"{text}; quotas go on in memory")
                    self._is_failing = True
                    return
                self._is_failing = False
                for charge, total in zip(charges, totals, strict=True):
                    self._take_over(charge, total)

    def _take_over(self, charge: Charge, total: tuple[float, int]) -> None:
        """Count what other hosts have added, and what this one has not written yet."""
        if charge.period != self._period:
            return
        node = self._nodes[charge.account]
        waiting = self._waiting.get(charge.key)
        tokens, calls = (waiting.tokens, waiting.calls) if waiting else (0.0, 0)
        node.tokens.used = max(node.tokens.used, total[0] + tokens)
        node.calls.used = max(node.calls.used, total[1] + calls)

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
