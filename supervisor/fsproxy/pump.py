"""The pump: serves every client whose requests need no waiting, from one epoll.

Rules of this file.

1. One task, one epoll set of all client descriptors.  Parking each client's own task in
   Trio would cost about 10 us a request; one call of epoll returns all that are ready.
2. After it has served what was ready the pump yields the core and polls again, at most
   ``POLLS`` times; then it parks in Trio on the epoll descriptor itself.  An idle host
   never wakes up.
3. Trio's other tasks get their turn at least every ``SLICE_S``.
4. Of one child's connections, those it has attached included, a turn serves ``SHARE``
   (spec S7), and a turn of the loop sends large files to as many.
5. A session is in the set, or its task owns it; ``suspend`` and ``resume`` move it.
   Of one that its task owns the set may still be asked whether its client hangs up.
6. Whom no epoll watch is left for (``readiness``) is looked at from time to time: that is a
   task of its own, and costs nothing as long as there is nobody.
7. On the way down the pump may have gone before its sessions: then there is no set, and
   nobody is in it.
"""

from __future__ import annotations

import errno
import os
import select
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from hostlib.readiness import LOOK_PAUSE_S, note_unwatched, wait_readable
from supervisor.fsproxy.counts import SAMPLE_TURNS, Counts
from supervisor.fsproxy.replies import EOF, SLOW
from vfs.policy import SHARE

if TYPE_CHECKING:
    from protocol import HostConnection
    from vfs.clients import Client
    from vfs.policy import Ledger

POLLS = 2
"""Times that the core is yielded and polled after a reply before the pump parks."""

SLICE_S = 0.001
"""Longest stretch without a checkpoint; one costs 10 us, so this gives up 1 %."""

SENDING_SLICE_S = 0.0002
"""The same while a large file goes out: as long as a piece of it takes (``sent``), so
that neither has to wait for more of the other."""

_BATCH = 64
"""Events a poll returns at most; more wait for the next one, a few microseconds."""


class Served(Protocol):
    """A session, as the pump knows it.

    Attributes:
        read_fd: requests come here.
        write_fd: replies go here; may equal ``read_fd``.
        client: whose requests these are.
        top: the ledger of its topmost child, which stands for that (spec S7).
        conn: the bytes that have come.
        requests: that were answered.
        deadline_s: for a message that has begun (spec F8).
    """

    read_fd: int
    write_fd: int
    client: Client
    top: Ledger
    conn: HostConnection
    requests: int
    deadline_s: float

    @property
    def is_mid_message(self) -> bool:
        """Whether a message has begun and is not complete (spec F8)."""
        ...

    def serve(self, *, alone: bool) -> bool:
        """Answer what has come, without waiting; tell whether something is left over."""
        ...

    def close_soon(self, why: str, failure: Exception | None = None) -> None:
        """Stop serving; the session's task cleans up."""
        ...


@dataclass(frozen=True, slots=True)
class PumpStatistics:
    """A connection that a pump serves.

    Attributes:
        attached: sessions in the set that are not their child's first.
        left_over: sessions that have more to be served.
        deadlines: sessions whose message has to be complete in time.
        unwatched: descriptors that are not in the epoll set.
    """

    attached: int
    left_over: int
    deadlines: int
    unwatched: int


class Pump:
    """Serves sessions.

    Attributes:
        sessions: those in the epoll set, by descriptor.
        counts: what all sessions count.
        sending: how many large files wait for the loop's turn, and not for their clients.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN)
        self.sessions: dict[int, Served] = {}
        self.counts = Counts()
        self.sending = 0
        self._unwatched: set[int] = set()
        self._unwatched_added = trio.Event()
        self._left_over: dict[Served, None] = {}
        self._attached = 0  # sessions in the set that are not their child's first
        self._hangups: dict[int, Served] = {}
        # (when, requests that the session had answered when its message began)
        self._deadlines: dict[Served, tuple[float, int]] = {}
        self._deadline_added = trio.Event()
        self._paused: trio.Event | None = None

    def pause(self) -> None:
        """Take no requests until ``go_on``; jobs that have begun go on."""
        if self._paused is None:
            self._paused = trio.Event()

    @property
    def is_paused(self) -> bool:
        """Whether no requests are taken."""
        return self._paused is not None

    def go_on(self) -> None:
        """Take requests again."""
        paused, self._paused = self._paused, None
        if paused is not None:
            paused.set()

    def statistics(self) -> PumpStatistics:
        """Return how much there is to look after."""
        return PumpStatistics(
            self._attached,
            len(self._left_over),
            len(self._deadlines),
            len(self._unwatched),
        )

    def descriptors(self) -> tuple[int, ...]:
        """Return what the pump holds of the process's descriptors."""
        return (self._epoll.fileno(), self._bell)

    def add(self, session: Served) -> None:
        """Begin to serve a session."""
        if not self._epoll.closed:
            if not self._is_watched(session.read_fd, select.EPOLLIN):
                self._unwatched.add(session.read_fd)
                self._unwatched_added.set()
            self.sessions[session.read_fd] = session
            self._attached += session.client.ledger is not session.top

    def suspend(self, session: Served) -> None:
        """Leave a session to its own task."""
        # By identity: the number of a session that is over may be another's by now (I1).
        if self.sessions.get(session.read_fd) is session:
            del self.sessions[session.read_fd]
            self._attached -= session.client.ledger is not session.top
            if session.read_fd in self._unwatched:
                self._unwatched.remove(session.read_fd)
            elif not self._epoll.closed:
                self._epoll.unregister(session.read_fd)
        self._left_over.pop(session, None)
        self._deadlines.pop(session, None)

    def resume(self, session: Served) -> None:
        """Take a session back from its task."""
        self.add(session)
        if session.conn.pending and not self._epoll.closed:
            self._left_over[session] = None
            os.eventfd_write(self._bell, 1)
        self._watch(session)

    forget = suspend

    def watch_hangup(self, session: Served) -> None:
        """Close a session that its task owns once its client has closed both ways.

        Precondition: the session is suspended.
        """
        if self._epoll.closed:
            return
        for fd in {session.read_fd, session.write_fd}:
            # Nothing is asked for: EPOLLHUP and EPOLLERR always come (epoll_ctl(2)).
            # Without a watch its job goes on till it is to say something.
            if self._is_watched(fd, 0):
                self._hangups[fd] = session

    def ignore_hangup(self, session: Served) -> None:
        """End ``watch_hangup``."""
        for fd in {session.read_fd, session.write_fd}:
            if self._hangups.get(fd) is session:
                self._hung_up(fd)

    def _note_hangup(self, fd: int) -> None:
        session = self._hangups.get(fd)
        if session is not None:
            self._hung_up(fd)
            # Of two pipes each tells its own end.
            if session not in self._hangups.values():
                session.close_soon(EOF)

    def _hung_up(self, fd: int) -> None:
        del self._hangups[fd]
        if not self._epoll.closed:
            self._epoll.unregister(fd)

    def _is_watched(self, fd: int, events: int) -> bool:
        """Have the set tell of a descriptor; False: there is no watch for it (``readiness``)."""
        try:
            self._epoll.register(fd, events)
        except OSError as why:
            if why.errno != errno.ENOSPC:
                raise
            note_unwatched()
            return False
        return True

    def _watch(self, session: Served) -> None:
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
        slice_end = self._slice_end()
        try:
            while True:
                if self._paused is not None:
                    await self._paused.wait()
                events = poll(0, _BATCH)
                if events or self._left_over:
                    known = len(self.sessions)
                    self._serve(events)
                    # A client that has left asks nothing soon: the pump does not yield
                    # to it.
                    misses = 0 if len(self.sessions) == known else POLLS
                elif misses < POLLS:
                    misses += 1
                    yield_core()
                    continue
                else:
                    await wait_readable(self._epoll)
                    misses = 0
                    slice_end = self._slice_end()
                    continue
                if time.monotonic() > slice_end:
                    await trio.lowlevel.checkpoint()
                    slice_end = self._slice_end()
        finally:
            self.close()

    def close(self) -> None:
        """Give its descriptors back; `run` does so when it ends."""
        self._epoll.close()
        os.close(self._bell)

    def _slice_end(self) -> float:
        """Return until when others wait, from now on."""
        return time.monotonic() + (SENDING_SLICE_S if self.sending else SLICE_S)

    def _turn(self, events: list[tuple[int, int]]) -> dict[Served, None]:
        """Return who is served now, in order."""
        turn: dict[Served, None] = {}
        left_over = self._left_over
        for fd, _ in events:
            session = self.sessions.get(fd)
            if session is not None:
                if session not in left_over:
                    turn[session] = None
            elif fd == self._bell:
                os.eventfd_read(self._bell)
            else:
                self._note_hangup(fd)
        # A client that asked in advance comes after those that have just asked.
        if self._attached and len(turn) + len(left_over) > SHARE:
            turn, self._left_over = _shared_out(turn, left_over)
        else:
            turn |= left_over
            left_over.clear()
        return turn

    def _serve(self, events: list[tuple[int, int]]) -> None:
        """Serve the clients whose turn it is."""
        turn = self._turn(events)
        alone = len(turn) == 1 and not self._left_over
        counts = self.counts
        counts.turns -= 1
        if counts.turns <= 0:
            counts.turns = SAMPLE_TURNS
            self._serve_timed(turn)
        for session in turn:
            if session.serve(alone=alone):
                self._left_over[session] = None
            conn = session.conn
            if self._deadlines or conn.body_left or not conn.idle:
                self._watch(session)

    def _serve_timed(self, turn: dict[Served, None]) -> None:
        """Serve the first session of a turn for one request, and look at the clock.

        A turn in which it answered one request and no more is a measurement.
        """
        session = next(iter(turn), None)
        if session is None:
            return
        counts = self.counts
        before, answered = counts.requests.copy(), session.requests
        begun_s = time.monotonic()
        if session.serve(alone=False):
            self._left_over[session] = None
        took_s = time.monotonic() - begun_s
        if session.requests - answered == 1:
            pairs = zip(before, counts.requests, strict=True)
            kinds = [k for k, (was, now) in enumerate(pairs) if now != was]
            if len(kinds) == 1:
                counts.took(counts.inline, kinds[0], took_s)
        conn = session.conn
        if self._deadlines or conn.body_left or not conn.idle:
            self._watch(session)
        del turn[session]

    async def look_at_unwatched(self) -> None:
        """Serve those for whom there is no epoll watch, until there is (``readiness``)."""
        while True:
            self._unwatched_added = trio.Event()
            while self._unwatched and not self._epoll.closed:
                poll = select.poll()
                for fd in tuple(self._unwatched):
                    if self._is_watched(fd, select.EPOLLIN):
                        self._unwatched.remove(fd)
                    else:
                        poll.register(fd, select.POLLIN)
                ready = poll.poll(0) if self._unwatched else []
                self._left_over |= {self.sessions[fd]: None for fd, _ in ready}
                if ready:
                    os.eventfd_write(self._bell, 1)
                await trio.sleep(LOOK_PAUSE_S)
            await self._unwatched_added.wait()

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


def _shared_out(
    fresh: dict[Served, None], left_over: dict[Served, None]
) -> tuple[dict[Served, None], dict[Served, None]]:
    """Give each child its share of a turn; return who has one now, and who waits.

    Of one child's connections those that have waited longest come first.
    """
    shares: dict[Ledger, int] = {}
    old: dict[Served, None] = {}
    new: dict[Served, None] = {}
    waiting: dict[Served, None] = {}
    for among, chosen in ((left_over, old), (fresh, new)):
        for session in among:
            share = shares[session.top] = shares.get(session.top, 0) + 1
            (chosen if share <= SHARE else waiting)[session] = None
    return new | old, waiting
