"""The pump: serves every client whose requests need no waiting, from one epoll.

1. One task, one epoll set of all client descriptors. Parking each client's own task in
   Trio would cost about 10 us a request; one epoll call returns all that are ready.
2. After serving, the pump yields the core and polls at most ``POLLS`` times, then parks
   on the epoll descriptor: an idle host never wakes up. Other tasks run every
   ``SLICE_S``.
3. A turn serves ``SHARE`` connections of one child (spec S7), and the loop sends large
   files to as many.
4. A session is in the set or owned by its task; ``suspend`` and ``resume`` move it.
5. Clients without an epoll watch (``readiness``) are polled by a task of their own.
6. At the host's end the pump may be closed before its sessions: the set is empty then.
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
from vfs.ledger import SHARE

if TYPE_CHECKING:
    from protocol import HostConnection
    from vfs.clients import Client
    from vfs.ledger import Ledger

POLLS = 2
"""Times that the core is yielded and polled after a reply before the pump parks."""

SLICE_S = 0.001
"""Longest time without a checkpoint; one costs 10 us, so this gives up 1 %."""

SENDING_SLICE_S = 0.0002
"""The same while a large file is sent: the time of one piece (``transport``), so that
neither waits for several of the other."""

BATCH = 64
"""Most events of a poll; others wait for the next one, a few microseconds."""


class Served(Protocol):
    """A session in the pump's view.

    Attributes:
        read_fd: source of requests.
        write_fd: gets replies; may equal ``read_fd``.
        client: sends the requests.
        top: the ledger of its topmost child (spec S7).
        conn: parses the received bytes.
        requests: number of answered ones.
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
        """Answer received requests, without waiting; return whether some are left."""
        ...

    def close_soon(self, why: str, failure: Exception | None = None) -> None:
        """Stop serving; the session's task cleans up."""
        ...


@dataclass(frozen=True, slots=True)
class PumpStatistics:
    """Figures of a pump.

    Attributes:
        attached: sessions in the set that are not their child's first.
        left_over: sessions with more requests to serve.
        deadlines: sessions with an incomplete message.
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
        counts: those of all sessions.
        sending: large files that wait for the loop's turn, and not for their clients.
    """

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.epoll.register(self._bell, select.EPOLLIN)
        self.sessions: dict[int, Served] = {}
        self.counts = Counts()
        self.sending = 0
        self._unwatched: set[int] = set()
        self._unwatched_added = trio.Event()
        self._left_over: dict[Served, None] = {}
        self._attached = 0  # sessions in the set that are not their child's first
        self._hangups: dict[int, Served] = {}
        # (time, answered requests of the session when its message began)
        self._deadlines: dict[Served, tuple[float, int]] = {}
        self._deadline_added = trio.Event()
        self._paused: trio.Event | None = None

    def pause(self) -> None:
        """Stop taking requests until ``unpause``; running jobs continue."""
        if self._paused is None:
            self._paused = trio.Event()

    @property
    def is_paused(self) -> bool:
        """Whether no requests are taken."""
        return self._paused is not None

    @property
    def is_closed(self) -> bool:
        """Whether its descriptors were given back."""
        return self.epoll.closed

    def unpause(self) -> None:
        """Take requests again."""
        paused, self._paused = self._paused, None
        if paused is not None:
            paused.set()

    def statistics(self) -> PumpStatistics:
        """Return its figures."""
        return PumpStatistics(
            self._attached,
            len(self._left_over),
            len(self._deadlines),
            len(self._unwatched),
        )

    def descriptors(self) -> tuple[int, ...]:
        """Return its descriptors of the process."""
        return (self.epoll.fileno(), self._bell)

    def add(self, session: Served) -> None:
        """Begin to serve a session."""
        if not self.epoll.closed:
            if not self._is_watched(session.read_fd, select.EPOLLIN):
                self._unwatched.add(session.read_fd)
                self._unwatched_added.set()
            self.sessions[session.read_fd] = session
            self._attached += session.client.ledger is not session.top

    def suspend(self, session: Served) -> None:
        """Leave a session to its own task."""
        # By identity: a session's old number may be another one's by now (I1).
        if self.sessions.get(session.read_fd) is session:
            del self.sessions[session.read_fd]
            self._attached -= session.client.ledger is not session.top
            if session.read_fd in self._unwatched:
                self._unwatched.remove(session.read_fd)
            elif not self.epoll.closed:
                self.epoll.unregister(session.read_fd)
        self._left_over.pop(session, None)
        self._deadlines.pop(session, None)

    def resume(self, session: Served) -> None:
        """Take a session back from its task."""
        self.add(session)
        if session.conn.pending and not self.epoll.closed:
            self._left_over[session] = None
            os.eventfd_write(self._bell, 1)
        self._watch(session)

    def watch_hangup(self, session: Served) -> None:
        """Close a session that its task owns once its client has closed both ways.

        Precondition: the session is suspended.
        """
        if self.epoll.closed:
            return
        for fd in {session.read_fd, session.write_fd}:
            # No events are asked for: EPOLLHUP and EPOLLERR always come (epoll_ctl(2)).
            # Without a watch its job runs until its next send.
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
            # Each of two pipes reports its own end.
            if session not in self._hangups.values():
                session.close_soon(EOF)

    def _hung_up(self, fd: int) -> None:
        del self._hangups[fd]
        if not self.epoll.closed:
            self.epoll.unregister(fd)

    def _is_watched(self, fd: int, events: int) -> bool:
        """Watch a descriptor for events; return False without a watch (``readiness``)."""
        try:
            self.epoll.register(fd, events)
        except OSError as why:
            if why.errno != errno.ENOSPC:
                raise
            note_unwatched()
            return False
        return True

    def _watch(self, session: Served) -> None:
        """Start or stop the deadline of a message that has begun (spec F8)."""
        known = self._deadlines.get(session)
        if not session.is_mid_message:
            if known is not None:
                del self._deadlines[session]
        elif known is None or known[1] != session.requests:
            # Another message than last time: a client that always has one under way is
            # busy, not slow. Removed first: the entries are in order of time.
            self._deadlines.pop(session, None)
            deadline = time.monotonic() + session.deadline_s
            self._deadlines[session] = (deadline, session.requests)
            self._deadline_added.set()

    async def run(self) -> None:
        """Serve until cancelled."""
        poll = self.epoll.poll
        yield_core = os.sched_yield
        misses = 0
        slice_end = self._slice_end()
        try:
            while True:
                if self._paused is not None:
                    await self._paused.wait()
                events = poll(0, BATCH)
                if events or self._left_over:
                    known = len(self.sessions)
                    self.serve_events(events)
                    # A client that has left asks nothing soon: the pump does not yield
                    # the core to it.
                    misses = 0 if len(self.sessions) == known else POLLS
                elif misses < POLLS:
                    misses += 1
                    yield_core()
                    continue
                else:
                    await wait_readable(self.epoll)
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
        self.epoll.close()
        os.close(self._bell)

    def _slice_end(self) -> float:
        """Return the end of the present slice."""
        return time.monotonic() + (SENDING_SLICE_S if self.sending else SLICE_S)

    def _turn(self, events: list[tuple[int, int]]) -> dict[Served, None]:
        """Return the sessions to serve now, in order."""
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
        # A client that asked in advance comes after new requests.
        if self._attached and len(turn) + len(left_over) > SHARE:
            turn, self._left_over = _share_turns(turn, left_over)
        else:
            turn |= left_over
            left_over.clear()
        return turn

    def serve_events(self, events: list[tuple[int, int]]) -> None:
        """Serve the clients of this turn."""
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
        """Serve the first session of a turn for one request, and measure it.

        It is measured if it answered exactly one request.
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
            kinds = [k for k, now in counts.requests.items() if now != before[k]]
            if len(kinds) == 1:
                counts.count_request(counts.inline, kinds[0], took_s)
        conn = session.conn
        if self._deadlines or conn.body_left or not conn.idle:
            self._watch(session)
        del turn[session]

    async def look_at_unwatched(self) -> None:
        """Serve the sessions without an epoll watch until they have one (``readiness``)."""
        while True:
            self._unwatched_added = trio.Event()
            while self._unwatched and not self.epoll.closed:
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
        """Close sessions whose message does not end in time (spec F8)."""
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


def _share_turns(
    fresh: dict[Served, None], left_over: dict[Served, None]
) -> tuple[dict[Served, None], dict[Served, None]]:
    """Return the sessions in each child's share of a turn, and those that wait.

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
