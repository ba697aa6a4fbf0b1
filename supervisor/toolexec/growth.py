"""Charges a child for the files that its tools make in its places (spec S7).

A tool writes without FD 3, so the limits of bytes and files do not stop it. The host
measures before the first tool, ten times a second while one runs, and after each. A
tool that passes a limit, or passes it further than at its begin, is ended.

1. A child without a limit of bytes or files costs nothing.
2. No tool starts while a limit is passed, nor before the results of earlier ones are
   measured: quick tools together pass a limit by what one of them makes.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from hostlib.listener import OUT_OF_RESOURCES
from hostlib.threads import in_thread
from protocol.toolexec.requests import printable
from supervisor.toolexec.routes import ToolRefusedError
from vfs import growth

if TYPE_CHECKING:
    from supervisor.fsproxy.ports import ChildView, SessionView

PAUSE_S = 0.1
"""Time between two measurements while a tool runs: it bounds the bytes beyond a
limit."""

PAUSE_LOOKS = 20
"""Least pause in durations of the last one: it may use a twentieth of a thread."""

BLIND_S = 2.0
"""How long a tool may run while the host lacks a descriptor, memory or thread for
measuring: others may give one back. A longer time would be no limit."""

LAST_LOOK_S = 1.0
"""Longest wait of an exit code for the measurement of its tool."""

TRIES = 3
"""Most repeats of a measurement because a directory was moved."""

_SHORTAGES = OUT_OF_RESOURCES | {errno.EAGAIN}

_REFUSED = "forbidden: tool '%s' is not permitted while a limit is passed: %s\n"


class Growth:
    """Charges a child for the files of its tools; see `growth_of`.

    Args:
        child: is charged.
        session: its own session.
    """

    def __init__(self, child: ChildView, session: SessionView) -> None:
        # The first ones: files stay although the child gives up rights later.
        self._places = [place for place in child.places if place.write]
        self._session = session
        self.lock = trio.Lock()
        self._looks = 0
        self._pause_s = PAUSE_S
        self._closed = 0
        self._ended = 0  # number of ended tools
        self._seen = -1  # number of those that had ended when a measurement began

    async def begin(self, tool: str) -> None:
        """Let a tool start, or refuse it (rule 2).

        Args:
            tool: its name.

        Raises:
            ToolRefusedError: a limit is passed.
            OSError: measuring is impossible, so no tool may run.
        """
        ended = self._ended
        await self._look_first()
        while self._seen < ended:  # a shared measurement may have failed
            await self.look()
        if self._passed_limit():
            await self.look()  # the child may have removed files
            limit = self._passed_limit()
            if limit:
                raise ToolRefusedError(
                    403, (_REFUSED % (printable(tool), limit)).encode()
                )

    async def _look_first(self) -> None:
        """Measure before the first tool.

        Raises:
            OSError: measuring is impossible.
        """
        ledger = self._session.client.ledger
        async with self.lock:
            if ledger.before is None:
                ended = self._ended
                found = await self._content()
                ledger.before = growth.content_before(self._find_charged(), found)
                self._closed, self._seen = found.closed, ended

    async def look(self) -> None:
        """Charge the present files; one measurement serves all waiting callers.

        Raises:
            OSError: measuring is impossible.
        """
        await self._look_first()  # if the program before has not measured
        wanted = self._looks + 1
        async with self.lock:
            if self._looks >= wanted:  # one that began after this request
                return
            begun_s = trio.current_time()
            self._looks += 1
            ended, charged = self._ended, self._find_charged()
            found = await self._content()
            ledger = self._session.client.ledger
            growth.settle(ledger, charged, found, self._find_charged())
            self._closed, self._seen = found.closed, ended
            took_s = trio.current_time() - begun_s
            self._pause_s = max(PAUSE_S, PAUSE_LOOKS * took_s)

    async def last_look(self, nursery: trio.Nursery) -> None:
        """Measure after the end of a tool, as long as its exit code may wait.

        Args:
            nursery: continues a longer measurement.
        """
        done = trio.Event()
        self._ended += 1

        async def look() -> None:
            with suppress(OSError):
                await self.look()
            done.set()

        nursery.start_soon(look)
        with trio.move_on_after(LAST_LOOK_S):
            await done.wait()

    async def wait_passed(self) -> str:
        """Measure again and again until a limit is passed; return its name.

        Passed further than at the begin: a tool that removes files is not ended.
        """
        at_first = {name: used for name, _, used in self._uses()}
        while True:
            await trio.sleep(self._pause_s)
            try:
                await self._look_once_possible()
            except OSError as why:
                return f"not known: {why.strerror}"
            for name, limit, used in self._uses():
                if used > max(limit, at_first[name]):
                    return name

    async def _look_once_possible(self) -> None:
        """Measure as soon as the host has the resources.

        Raises:
            OSError: they were missing for ``BLIND_S``, or another error.
        """
        until_s = trio.current_time() + BLIND_S
        while True:
            try:
                return await self.look()
            except OSError as why:
                if why.errno not in _SHORTAGES or trio.current_time() > until_s:
                    raise
            await trio.sleep(PAUSE_S)

    def _passed_limit(self) -> str:
        """Return the name of a passed limit; empty for none."""
        return next((name for name, limit, used in self._uses() if used > limit), "")

    def _uses(self) -> list[tuple[str, int, int]]:
        """Return the limits: name, most, used."""
        ledger = self._session.client.ledger
        found = [("closed directories", (ledger.before or (0, 0, 0))[2], self._closed)]
        for name, of in (("bytes", ledger.size_bytes), ("files", ledger.files)):
            if of.limit is not None:
                found.append((name, of.limit, of.used))
        return found

    def _find_charged(self) -> growth.Charges:
        """Return what the child is charged for now."""
        return growth.charges_of(
            self._session.client.ledger, _reserved_bytes(self._session)
        )

    async def _content(self) -> growth.PlacesContent:
        """Measure the places that the child may write.

        Raises:
            OSError: measuring is impossible.
        """
        share = self._session.client.ledger.threads
        for _ in range(TRIES):
            try:
                return await in_thread(growth.content_of, self._places, share=share)
            except growth.MovedError:
                continue
        raise OSError(errno.EBUSY, "directories are moved again and again")


def growth_of(child: ChildView) -> Growth | None:
    """Return the charger of a child; None if it has no limit for that."""
    session = child.session
    if session is None:
        return None
    ledger = session.client.ledger
    if ledger.size_bytes.limit is None and ledger.files.limit is None:
        return None
    return Growth(child, session)


def _reserved_bytes(session: SessionView) -> int:
    """Return the bytes that WRITEs have reserved, not written; with nested clients."""
    return session.reserved_bytes + sum(map(_reserved_bytes, session.nested))
