"""The directory at work: its decisions, its store, its clock, its questions.

Rules of this file.

1. A step is stored before anything of it is sent (`store.StepWriter`).
2. A store that cannot be written, or that another directory has taken, ends the process.
3. An order is answered when its step is stored, or when it is certain that it never will
   be. Where there is no thread to store it, the order waits.
"""

from __future__ import annotations

import secrets
import sqlite3
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import trio

from supervisor.cluster.requests import Nothing, Requests, read
from supervisor.fleet.clocks import read_clocks
from supervisor.fleet.directory import Directory, FleetError, PlacementRequest
from supervisor.fleet.lease import LEASE_S
from supervisor.fleet.listings import (  # noqa: TC001 - msgspec looks at them
    ShownChild,
    ShownFleet,
    ShownQuota,
    ShownWorkspace,
)
from supervisor.fleet.messages import decode_from_node, encode
from supervisor.fleet.step import StaleEpochError, StoreError
from supervisor.fleet.store import FleetStore, StepWriter
from supervisor.fleet.store_address import is_postgres

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hostlib.log import Log
    from supervisor.fleet.step import Step, Store

TICK_S = 0.1
"""Time between two checks of leases, of orders to send again and of windows."""

LONGEST_WAIT_S = 5.0
"""Longest wait of one question for children; a client asks again after it."""

Until = Literal["started", "decided", "over"]
STARTED: Until = "started"
DECIDED: Until = "decided"
OVER: Until = "over"
"""States that a question can wait for; a child without a place counts as decided."""

_BEFORE: dict[Until, frozenset[str]] = {
    STARTED: frozenset({"waiting", "placing"}),
    DECIDED: frozenset({"placing"}),
    OVER: frozenset({"waiting", "placing", "running", "unknown"}),
}


class KillChild(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `kill`: by TERM, with time to end, or by KILL.

    Attributes:
        child: its id, where a later one of its name is not meant.
    """

    name: str
    signal: Literal["TERM", "KILL"] = "TERM"
    child: str | None = None


class ForgetNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `forget`."""

    node: str


class FindChild(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `find` and `workspace`."""

    name: str


class WaitFor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of `wait`: until it is reached by all of these children.

    Attributes:
        children: their ids, for a name is used again.
    """

    children: tuple[str, ...]
    until: Until
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT_S)] = LONGEST_WAIT_S


class WaitAnswer(msgspec.Struct, frozen=True):
    """The answer of `wait`: the listed children, and whether that was reached by all."""

    is_reached: bool
    children: tuple[ShownChild, ...]


def open_store(where: str) -> Store:
    """Return a directory's store, opened; blocks.

    Args:
        where: a directory of this machine, or the address of a PostgreSQL.

    Raises:
        StoreError: another directory has it, or it cannot be used.
    """
    if not is_postgres(where):
        return FleetStore(where)
    # Its package is an extra.
    from supervisor.fleet.postgres_store import PostgresStore  # noqa: PLC0415

    return PostgresStore(where)


class DirectoryService:
    """One directory, in the loop of its process.

    Args:
        store: where its changes go; owned by the caller.
        rows: all that is stored there.
        deliver: takes a message for a node; it may be lost.
        log: for what cannot be told to anybody.
        lease_s: L.

    Raises:
        StoreError: its rows cannot be read.
    """

    def __init__(
        self,
        store: Store,
        rows: Iterable[tuple[str, str, bytes]],
        deliver: Callable[[str, bytes], None],
        log: Log,
        lease_s: float = LEASE_S,
    ) -> None:
        self._directory = Directory(store.epoch, rows, read_clocks(), lease_s)
        self._deliver = deliver
        self._log = log
        self._writer: StepWriter[Step] = StepWriter(store, self._carry_out, log)
        self._writer.add(self._directory.name_fleet(secrets.token_hex(8)))
        self._due = trio.Event()
        self._changed = trio.Event()
        handlers = {
            "ps": self._ps,
            "quota": self._quota,
            "find": self._find,
            "workspace": self._workspace,
            "spawn": self._spawn,
            "kill": self._kill,
            "forget": self._forget,
            "wait": self._wait,
        }
        # A directory whose store cannot be written begins anew.
        transient = StoreError, StaleEpochError
        self.answer = Requests(
            "the directory", handlers, (FleetError,), log, transient
        ).answer

    def set_account(self, name: str, limit: float | None, kind: str) -> None:
        """Have an account with a limit of tokens in each of its windows, or have none."""
        if limit is None:
            step = self._directory.close_account(name)
        else:
            step = self._directory.open_account(name, limit, kind, read_clocks())
        self._writer.add(step)

    async def run(self) -> None:
        """Store and send what is decided, and look at the clock, until cancelled.

        Raises:
            StaleEpochError: another directory has the store.
            StoreError: the store cannot be written.
        """
        next_tick = trio.current_time()
        while True:
            with trio.move_on_at(next_tick):
                await self._due.wait()
            self._due = trio.Event()
            if trio.current_time() >= next_tick:
                next_tick = trio.current_time() + TICK_S
                self._writer.add(self._directory.tick(read_clocks()))
            await self._flush()

    async def _flush(self) -> None:
        """Return when all steps so far are stored and sent.

        Raises:
            StaleEpochError: another directory has the store.
            StoreError: the store cannot be written; no step is sent then.
        """
        try:
            await self._writer.flush()
        except sqlite3.Error as why:
            raise StoreError(
                f"cannot write the fleet's store: {why}; make room for it; the"
                " directory begins anew"
            ) from None

    def _carry_out(self, step: Step) -> None:
        for node, message in step.sends:
            self._deliver(node, encode(message))
        if step.changes:
            self._wake_waiters()

    def _wake_waiters(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def receive(self, messages: list[bytes]) -> None:
        """Take messages of nodes."""
        has_changed = False
        for data in messages:
            try:
                message = decode_from_node(data)
            except msgspec.DecodeError as why:
                self._log.write("WARNING", f"cannot read a node's message: {why}")
                continue
            step = self._directory.receive(message, read_clocks())
            self._writer.add(step)
            has_changed |= bool(step.changes)
        self._due.set()
        if has_changed:
            # Not after the commit: a report that it loses is told again by its node.
            self._wake_waiters()

    async def _ps(self, args: bytes) -> ShownFleet:
        read(args, Nothing)
        return self._directory.ps()

    async def _quota(self, args: bytes) -> ShownQuota:
        read(args, Nothing)
        return self._directory.quota()

    async def _find(self, args: bytes) -> ShownChild | None:
        return self._directory.child(read(args, FindChild).name)

    async def _workspace(self, args: bytes) -> ShownWorkspace | None:
        return self._directory.workspace(read(args, FindChild).name)

    async def _spawn(self, args: bytes) -> dict[str, str]:
        request = read(args, PlacementRequest)
        ids, step = self._directory.spawn(request, read_clocks())
        await self._finish(step)
        return ids

    async def _kill(self, args: bytes) -> None:
        kill = read(args, KillChild)
        # Behind the `spawn` that came before: Trio begins tasks in any order.
        await trio.lowlevel.checkpoint()
        now = read_clocks()
        step = self._directory.kill(kill.name, kill.signal, now, kill.child)
        await self._finish(step)

    async def _forget(self, args: bytes) -> None:
        node = read(args, ForgetNode).node
        await self._finish(self._directory.forget(node, read_clocks()))

    async def _finish(self, step: Step) -> None:
        self._writer.add(step)
        await self._flush()

    async def _wait(self, words: bytes) -> WaitAnswer:
        args = read(words, WaitFor)
        until_s = trio.current_time() + args.wait_s
        before = _BEFORE[args.until]
        while True:
            changed = self._changed
            # One that was removed from the list was over before: it has no state.
            is_reached = before.isdisjoint(map(self._directory.state, args.children))
            if is_reached or trio.current_time() >= until_s:
                return WaitAnswer(is_reached, self._directory.children(args.children))
            with trio.move_on_at(until_s):
                await changed.wait()
