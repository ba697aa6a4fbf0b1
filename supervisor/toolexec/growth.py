"""Files that tools make in their child's places, charged to the child (spec S7).

A tool writes by itself, not through FD 3, so its child's limits of bytes and files do
not stop it. The host looks: before the first tool, ten times a second while one runs,
and when one has ended, before anybody is told its exit code. A tool that runs while a
limit is passed, and passed by more than when it began, is ended.

Rules of this file.

1. A child without a limit of bytes or files costs nothing.
2. No tool is started while a limit is passed, nor before what the ones before it left has
   been looked at: many tools that are done before anybody looks pass a limit by what one
   of them makes, not by the sum.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from hostlib.listener import OUT_OF_RESOURCES
from hostlib.threads import in_thread
from protocol.toolexec.requests import printable
from supervisor.toolexec.routes import RefusedError
from vfs import growth

if TYPE_CHECKING:
    from supervisor.fsproxy.ports import ChildView, Conversation

PAUSE_S = 0.1
"""Between two looks while a tool runs: what it can write in that time is what it can
write beyond a limit."""

PAUSE_LOOKS = 20
"""Or so many times what the last look took: it may use a twentieth of a thread."""

BLIND_S = 2.0
"""How long a tool may run while the host has no descriptor, memory or thread for a look:
others may have taken them, and give them back.  Beyond it a limit would be none."""

LAST_LOOK_S = 1.0
"""How long an exit code may wait for the look at what its tool made."""

TRIES = 3
"""Times that a look begins anew because something was moved."""

_SHORTAGES = OUT_OF_RESOURCES | {errno.EAGAIN}

_REFUSED = "forbidden: tool '%s' is not permitted while a limit is passed: %s\n"


class Growth:
    """Charges a child for what its tools make; see `of`.

    Args:
        child: whose.
        session: its own.
    """

    def __init__(self, child: ChildView, session: Conversation) -> None:
        # As they were at first: what the child gives up later stays where it is.
        self._places = [place for place in child.places if place.write]
        self._session = session
        self._lock = trio.Lock()
        self._looks = 0
        self._pause_s = PAUSE_S
        self._closed = 0
        self._ended = 0  # tools
        self._seen = -1  # of those, the ones that had ended when a look began

    async def begin(self, tool: str) -> None:
        """Let a tool start, or refuse it (rule 2).

        Args:
            tool: its name.

        Raises:
            RefusedError: a limit is passed.
            OSError: it cannot be looked at what is there, so nothing may run.
        """
        ended = self._ended
        await self._look_first()
        while self._seen < ended:  # a look that answers all may have failed
            await self.look()
        if self._passed():
            await self.look()  # the child may have removed something
            limit = self._passed()
            if limit:
                raise RefusedError(403, (_REFUSED % (printable(tool), limit)).encode())

    async def _look_first(self) -> None:
        """Look at what is there before the first tool.

        Raises:
            OSError: it cannot be looked at.
        """
        ledger = self._session.client.ledger
        async with self._lock:
            if ledger.before is None:
                ended = self._ended
                found = await self._content()
                ledger.before = growth.content_before(self._charged(), found)
                self._closed, self._seen = found.closed, ended

    async def look(self) -> None:
        """Charge what is there now; one look answers all who wait for it.

        Raises:
            OSError: it cannot be looked at.
        """
        await self._look_first()  # if the program before did not know of this
        wanted = self._looks + 1
        async with self._lock:
            if self._looks >= wanted:  # one that began after this was asked for
                return
            begun_s = trio.current_time()
            self._looks += 1
            ended, charged = self._ended, self._charged()
            found = await self._content()
            ledger = self._session.client.ledger
            growth.settle(ledger, charged, found, self._charged())
            self._closed, self._seen = found.closed, ended
            took_s = trio.current_time() - begun_s
            self._pause_s = max(PAUSE_S, PAUSE_LOOKS * took_s)

    async def last_look(self, nursery: trio.Nursery) -> None:
        """Look when a tool has ended, for as long as its exit code may wait for that.

        Args:
            nursery: where a look goes on that takes longer.
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

    async def until_passed(self) -> str:
        """Look again and again until a limit is passed; return its name.

        By more than when this began: who takes away from too much is left alone.
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
        """Look as soon as the host has what that takes.

        Raises:
            OSError: it has not had that for ``BLIND_S``, or something else is wrong.
        """
        until_s = trio.current_time() + BLIND_S
        while True:
            try:
                return await self.look()
            except OSError as why:
                if why.errno not in _SHORTAGES or trio.current_time() > until_s:
                    raise
            await trio.sleep(PAUSE_S)

    def _passed(self) -> str:
        """Return the name of a limit that is passed; empty for none."""
        return next((name for name, limit, used in self._uses() if used > limit), "")

    def _uses(self) -> list[tuple[str, int, int]]:
        """Return the limits: name, most, used."""
        ledger = self._session.client.ledger
        found = [("closed directories", (ledger.before or (0, 0, 0))[2], self._closed)]
        for name, of in (("bytes", ledger.size_bytes), ("files", ledger.files)):
            if of.limit is not None:
                found.append((name, of.limit, of.used))
        return found

    def _charged(self) -> growth.Charges:
        """Return what is charged to the child now."""
        return growth.charges_of(self._session.client.ledger, _reserved(self._session))

    async def _content(self) -> growth.Content:
        """Look at what the child may write.

        Raises:
            OSError: it cannot be looked at.
        """
        share = self._session.client.ledger.threads
        for _ in range(TRIES):
            try:
                return await in_thread(growth.content_of, self._places, share=share)
            except growth.MovedError:
                continue
        raise OSError(errno.EBUSY, "directories are moved again and again")


def of(child: ChildView) -> Growth | None:
    """Return what charges a child for its tools; None if nothing is to be charged."""
    session = child.session
    if session is None:
        return None
    ledger = session.client.ledger
    if ledger.size_bytes.limit is None and ledger.files.limit is None:
        return None
    return Growth(child, session)


def _reserved(session: Conversation) -> int:
    """Return what WRITEs have reserved and not written, here and beneath; bytes."""
    return session.reserved_bytes + sum(map(_reserved, session.nested))
