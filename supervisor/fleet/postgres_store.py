"""The rows of a directory in a PostgreSQL, for a directory on any machine (FL2).

Rules of this file.

1. One directory at a time: an advisory lock of the session is held for as long as the
   connection lives. The server ends a session that is silent, so the lock of a machine
   that was lost, or stopped, is free after `TimeBounds.silent_s`.
2. The lock alone protects nothing: each statement compares the epoch, and a renewal goes
   out only after one that began when its beat had come (`is_remote`).
3. Each statement has a bound, on the server and here. After one that failed the
   connection is used no more: its directory ends, and begins anew with what is stored.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from supervisor.fleet.step import StaleEpochError, StoreError
from supervisor.fleet.store_address import name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from psycopg.abc import PQGen

    from supervisor.fleet.step import Change

LEAST_VERSION = 14
"""Oldest supported version of the server: the first that ends a silent session."""


class TimeBounds(NamedTuple):
    """How long things may last, in seconds.

    Attributes:
        connect_s: a connection to each host of the address; whole seconds.
        silent_s: the silence of a session, by the server's clock; then its lock is free.
            A directory speaks ten times a second.
        lock_s: the wait for the lock; the session of a machine that was lost has ended.
        statement_s: a statement, by the server's clock, its commit apart.
        answer_s: an answer, by this machine's: a server that is stopped, or that waits
            for a standby, keeps no bound.
    """

    connect_s: int = 5
    silent_s: float = 10.0
    lock_s: float = 15.0
    statement_s: float = 8.0
    answer_s: float = 12.0


USUAL = TimeBounds()


_SCHEMA = """
SELECT pg_advisory_xact_lock(7733240);
CREATE TABLE IF NOT EXISTS sandhost_fleet_epoch (
    id integer PRIMARY KEY CHECK (id = 1), number bigint NOT NULL
);
INSERT INTO sandhost_fleet_epoch VALUES (1, 0) ON CONFLICT DO NOTHING;
CREATE TABLE IF NOT EXISTS sandhost_fleet_rows (
    name text COLLATE "C", key text COLLATE "C", data bytea NOT NULL,
    PRIMARY KEY (name, key)
);
"""
"""Statements that make the tables; without the lock, two at once would fail."""

_FIND = "SELECT to_regclass('sandhost_fleet_rows')"

# Of these tables: fleets in two schemas of one database have two locks.
_LOCK = "7733241, to_regclass('sandhost_fleet_epoch')::oid::integer"

_HOLDER = """
SELECT coalesce(host(client_addr), 'a local socket') FROM pg_locks
JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND pg_locks.database = datid
AND classid = 7733241 AND objid = to_regclass('sandhost_fleet_epoch')::oid
"""

_EPOCH = "SELECT number FROM sandhost_fleet_epoch"

_COUNT = "UPDATE sandhost_fleet_epoch SET number = number + 1 RETURNING number"

_LOAD = "SELECT name, key, data FROM sandhost_fleet_rows ORDER BY name, key"

# One statement is one transaction, and one journey. A directory of another epoch has no
# row in `own`, so it changes nothing.
_PUT = """
WITH own AS (
    SELECT number FROM sandhost_fleet_epoch WHERE number = %s FOR SHARE
), removed AS (
    DELETE FROM sandhost_fleet_rows AS rows
    USING own, unnest(%s::text[], %s::text[]) AS old (name, key)
    WHERE rows.name = old.name AND rows.key = old.key
), stored AS (
    INSERT INTO sandhost_fleet_rows
    SELECT new.name, new.key, new.data
    FROM own, unnest(%s::text[], %s::text[], %b::bytea[]) AS new (name, key, data)
    ON CONFLICT (name, key) DO UPDATE SET data = excluded.data
)
SELECT number FROM own
"""

_STANDBY_WAIT = "SyncRepWaitForLSN"
"""Function of the server that warns where the wait for a standby was ended."""

_HELP = {
    "25006": "name the server that may be written to",
    "3D000": "make the database, or correct the address",
    "42501": "let its user make tables there",
    "53100": "make room on its disk",
}
"""Advice, by the server's code."""


class _Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection on which no statement is waited for without a bound."""

    answer_s = USUAL.answer_s

    def wait(
        self, gen: PQGen[Any], interval: float = 0.1, timeout: float | None = None
    ) -> Any:
        """Return the outcome of a statement.

        Raises:
            psycopg.Error: there is none in time.
        """
        bound_s = self.answer_s if timeout is None else timeout
        until_s = time.monotonic() + bound_s
        try:
            return super().wait(gen, interval, bound_s)
        except psycopg.OperationalError:
            if time.monotonic() < until_s:
                raise
            self.close()  # its next answer would be of another statement
            raise psycopg.OperationalError(f"no answer within {bound_s:g} s") from None


class PostgresStore:
    """The rows of one directory; its methods block.

    Args:
        address: of the database.
        bounds: of all that it waits for.

    Attributes:
        epoch: counted up when it was opened; no process before had it.
        is_remote: a directory elsewhere may have it by now, unless it has just answered.

    Raises:
        StoreError: another directory has it, or it cannot be used.
    """

    is_remote = True

    def __init__(self, address: str, bounds: TimeBounds = USUAL) -> None:
        self._name = name_of(address)
        self._warnings: list[str] = []
        try:
            self._base = _Connection.connect(
                _completed(address, bounds), autocommit=True
            )
        except psycopg.Error as why:
            advice = "see that it runs, and that the password file has its user"
            raise self._error("open", why, advice) from None
        try:
            self._base.answer_s = bounds.answer_s
            self._base.add_notice_handler(self._note)
            self._open(bounds)
        except psycopg.Error as why:
            self._base.close()
            raise self._error("open", why) from None
        except BaseException:
            self._base.close()
            raise

    def _open(self, bounds: TimeBounds) -> None:
        version = self._base.info.server_version // 10_000
        if version < LEAST_VERSION:
            raise StoreError(
                f"cannot open the fleet's store, {self._name}: its version is {version};"
                f" it needs {LEAST_VERSION} or later"
            )
        # A role may have other bounds of its own.
        self._set("statement_timeout", bounds.statement_s)
        self._set("idle_session_timeout", bounds.silent_s)
        self._set("idle_in_transaction_session_timeout", bounds.silent_s)
        self._set("tcp_user_timeout", bounds.silent_s)
        if self._run(_FIND) == [(None,)]:
            with self._base.transaction():
                self._base.execute(_SCHEMA)
        self._lock(bounds)
        self._base.answer_s = bounds.answer_s
        self._set("statement_timeout", bounds.statement_s)
        self._base.execute("SET lock_timeout = 0; SET synchronous_commit = on")
        ((self.epoch,),) = self._run(_COUNT)

    def _lock(self, bounds: TimeBounds) -> None:
        """Take the lock, which goes with the connection.

        Raises:
            StoreError: another directory has it.
        """
        self._set("lock_timeout", bounds.lock_s)
        # The lock's own bound comes first.
        self._set("statement_timeout", bounds.lock_s + bounds.statement_s)
        self._base.answer_s += bounds.lock_s
        try:
            self._run(f"SELECT pg_advisory_lock({_LOCK})")
        except psycopg.errors.LockNotAvailable:
            where = " or ".join(one for (one,) in self._run(_HOLDER)) or "elsewhere"
            raise StoreError(
                f"cannot open the fleet's store, {self._name}: another directory has it,"
                f" from {where}; end that one first"
            ) from None

    def _set(self, setting: str, value_s: float) -> None:
        # 0 would be no bound.
        value = f"{max(1, round(value_s * 1000))}ms"
        self._base.execute("SELECT set_config(%s, %s, false)", (setting, value))

    def load(self) -> list[tuple[str, str, bytes]]:
        """Return (table, key, row) of all that is stored, rows as msgpack.

        Raises:
            StoreError: they cannot be read.
        """
        try:
            found: list[tuple[Any, ...]] = self._base.execute(
                _LOAD, binary=True
            ).fetchall()
        except psycopg.Error as why:
            raise self._error("read", why) from None
        return [(name, key, data) for name, key, data in found]

    def put(self, changes: Sequence[Change]) -> None:
        """Store all changes, or none; without changes see that the store is still its own.

        Raises:
            StaleEpochError: another directory has counted the epoch up since.
            StoreError: it is not known whether they are stored; this store is over.
        """
        try:
            self._put(changes)
        except psycopg.Error as why:
            self._base.close()
            raise self._error("write", why) from None
        except BaseException:
            self._base.close()
            raise

    def _put(self, changes: Sequence[Change]) -> None:
        # A row that changes twice in one transaction changes once.
        rows = {(name, key): row for name, key, row in changes}
        old = [key for key, row in rows.items() if row is None]
        new = [(*key, row) for key, row in rows.items() if row is not None]
        if rows:
            found = self._run(
                _PUT,
                self.epoch,
                [name for name, _ in old],
                [key for _, key in old],
                [name for name, _, _ in new],
                [key for _, key, _ in new],
                [msgspec.msgpack.encode(row) for _, _, row in new],
            )
        else:
            found = self._run(_EPOCH)
        if found != [(self.epoch,)]:
            ((number,),) = self._run(_EPOCH)
            raise StaleEpochError(number, self.epoch)

    def _run(self, query: str, *words: object) -> list[tuple[Any, ...]]:
        """Return the rows of a statement that is committed.

        Raises:
            StoreError: its commit is not sure.
        """
        self._warnings.clear()
        found: list[tuple[Any, ...]]
        found = self._base.execute(query, words or None).fetchall()
        if self._warnings:
            # An operator has ended the wait for a standby: it is on one machine only.
            raise self._failure("write", self._warnings[0], "look at its standbys")
        return found

    def _note(self, notice: psycopg.errors.Diagnostic) -> None:
        if notice.source_function == _STANDBY_WAIT:
            self._warnings.append(
                notice.message_primary or "a standby is not waited for"
            )

    def _error(
        self, verb: str, why: psycopg.Error, advice: str = "look at its log"
    ) -> StoreError:
        """Return what a fault of the server means here; it has no password."""
        text = why.diag.message_primary or _reason(why)
        return self._failure(verb, text, _HELP.get(why.sqlstate or "", advice))

    def _failure(self, verb: str, text: str, advice: str) -> StoreError:
        return StoreError(
            f"cannot {verb} the fleet's store, {self._name}: {text}; {advice}"
        )

    def close(self) -> None:
        """Close the connection, and let another directory have the store."""
        self._base.close()


def _completed(address: str, bounds: TimeBounds) -> str:
    """Return an address with what it does not say itself."""
    usual: dict[str, Any] = {
        "connect_timeout": bounds.connect_s,
        "fallback_application_name": "sandhost fleet",
        "target_session_attrs": "read-write",
        "tcp_user_timeout": round(bounds.answer_s * 1000),
    }
    found: str = make_conninfo("", **(usual | conninfo_to_dict(address)))
    return found


def _reason(why: psycopg.Error) -> str:
    """Return what is wrong, of a text that begins with what was tried."""
    lines = [line.strip() for line in str(why).splitlines()] or [type(why).__name__]
    # libpq puts advice of its own into further lines.
    tried = [line for line in lines if " failed: " in line] or lines[:1]
    return tried[-1].rpartition(" failed: ")[2].removeprefix("FATAL:").strip()
