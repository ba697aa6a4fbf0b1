"""The pump: serves every client whose requests need no waiting, from one epoll.

Rules of this file.

1. One task, one epoll set of all client descriptors.  Parking each client's own task in
   Trio would cost about 10 us a request; one call of epoll returns all that are ready.
2. After it has served what was ready the pump yields the core and polls again, at most
   ``POLLS`` times; then it parks in Trio on the epoll descriptor itself.  An idle host
   never wakes up.
3. Trio's other tasks get their turn at least every ``SLICE_S``.
4. A session is in the set, or its task owns it; ``suspend`` and ``resume`` move it.
"""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING

import trio

from supervisor.session import POLLS, SLOW

if TYPE_CHECKING:
    from supervisor.session import Session

SLICE_S = 0.001
"""Longest stretch without a checkpoint; one costs 10 us, so this gives up 1 %."""

_BATCH = 64
"""Events a poll returns at most; more wait for the next one, a few microseconds."""


class Pump:
    """Serves sessions.

    Attributes:
        sessions: those in the epoll set, by descriptor.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self.sessions: dict[int, Session] = {}
        self._left_over: dict[Session, None] = {}
        # (when, requests that the session had answered when its message began)
        self._deadlines: dict[Session, tuple[float, int]] = {}
        self._deadline_added = trio.Event()

    def descriptors(self) -> tuple[int, ...]:
        """Return what the pump holds of the process's descriptors."""
        return (self._epoll.fileno(), self._bell)

    def add(self, session: Session) -> None:
        """Begin to serve a session."""
        self.sessions[session.read_fd] = session
        self._epoll.register(session.read_fd, select.EPOLLIN)

    def suspend(self, session: Session) -> None:
        """Leave a session to its own task."""
        # By identity: the number of a session that is over may be another's by now (I1).
        if self.sessions.get(session.read_fd) is session:
            del self.sessions[session.read_fd]
            # On the way down the pump may have gone before its sessions.
            if not self._epoll.closed:
                self._epoll.unregister(session.read_fd)
        self._left_over.pop(session, None)
        self._deadlines.pop(session, None)

    def resume(self, session: Session) -> None:
        """Take a session back from its task."""
        self.add(session)
        if session.conn.pending:
            self._left_over[session] = None
            os.eventfd_write(self._bell, 1)
        self._watch(session)

    forget = suspend

    def _watch(self, session: Session) -> None:
        """Start or stop the clock of a message that has begun (spec F8)."""
        known = self._deadlines.get(session)
        if not session.is_mid_message:
            if known is not None:
                del self._deadlines[session]
        elif known is None or known[1] != session.requests:
            # Another message than the last time: a client that always has one under
            # way is busy, not slow. Taken out first, for they stand in order of time.
            self._deadlines.pop(session, None)
            deadline = time.monotonic() + session.deadline_s
            self._deadlines[session] = (deadline, session.requests)
            self._deadline_added.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        poll = self._epoll.poll
        yield_core = os.sched_yield
        misses = 0
        slice_end = time.monotonic() + SLICE_S
        try:
            while True:
                events = poll(0, _BATCH)
                if events or self._left_over:
                    misses = 0
                    self._serve(events)
                elif misses < POLLS:
                    misses += 1
                    yield_core()
                    continue
                else:
                    await trio.lowlevel.wait_readable(self._epoll.fileno())
                    misses = 0
                    slice_end = time.monotonic() + SLICE_S
                    continue
                if time.monotonic() > slice_end:
                    await trio.lowlevel.checkpoint()
                    slice_end = time.monotonic() + SLICE_S
        finally:
            self._epoll.close()
            os.close(self._bell)

    def _serve(self, events: list[tuple[int, int]]) -> None:
        turn = self._left_over
        self._left_over = {}
        for fd, _ in events:
            session = self.sessions.get(fd)
            if session is not None:
                turn[session] = None
            elif fd == self._bell:
                os.eventfd_read(self._bell)
        alone = len(turn) == 1
        for session in turn:
            if session.serve(alone=True) if alone else session.serve_one():
                self._left_over[session] = None
            conn = session.conn
            if self._deadlines or conn.body_left or not conn.idle:
                self._watch(session)

    async def watch_deadlines(self) -> None:
        """Close the sessions whose message does not end in time (spec F8)."""
        while True:
            if not self._deadlines:
                self._deadline_added = trio.Event()
                await self._deadline_added.wait()
                continue
            session, (deadline, _) = next(iter(self._deadlines.items()))
            delay = deadline - time.monotonic()
            if delay <= 0:
                session.close_soon(SLOW)
            else:
                await trio.sleep(delay)
