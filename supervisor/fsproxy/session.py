"""One client's session: bytes from its descriptors, replies back, in order.

The pump drives it from the hot side (``serve``), its own task from the slow side
(``run``); one of the two owns it at any time.

1. One reply a request, in order (spec T3): the next line is parsed only when the kernel
   has taken the whole reply before it.
2. ``serve`` never waits. A request that would wait (for a disk, or a slow reader)
   becomes a job; the pump leaves the session alone until the job is done.
3. A message must end, and a reply be taken, within the deadline (spec F8); between
   messages a client may idle.
4. A fault of the transport (spec S2), or of this program, closes the one session.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import trio

from hostlib.handover import HandoverError
from hostlib.linux.pipes import bytes_waiting
from protocol import HostConnection, error
from protocol import messages as m
from protocol.chat import ChatBody
from supervisor.fsproxy.inbound import Inbound
from supervisor.fsproxy.outbound import Outbound
from supervisor.fsproxy.ports import NO_NAMES
from supervisor.fsproxy.pump import POLLS
from supervisor.fsproxy.replies import EOF, FAULT, PROCESS_EXIT, REPLACED, SLOW
from supervisor.fsproxy.session_state import NO_POLICY, BodyState, SessionState
from supervisor.fsproxy.transport import revoke
from vfs.errors import RightsError
from vfs.places import close_places
from vfs.policy import network_in

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Mapping

    from supervisor.fsproxy.outbound import Job
    from supervisor.fsproxy.ports import Services
    from supervisor.fsproxy.pump import Pump
    from vfs.clients import Client, OpenFile
    from vfs.filesystem import Filesystem
    from vfs.handover import NumberedObjects, Numbering
    from vfs.payload import MemoryReservation, PayloadBudget
    from vfs.places import Place

T = TypeVar("T")

RECEIVE_BYTES = 8192
"""Bytes of the first receive: any useful request line and a 4 KiB payload."""

TURN_REQUESTS = 64
"""Requests of one client in a turn: about half a millisecond."""

PIPELINED = 8
"""Requests sent in advance that are answered in one turn."""

TURN_S = 0.0002
"""Longest turn of one client with slow requests: a large READ, a path of hundreds of
names."""

TURN_PIECES = 8
"""Pieces of one client's payload or line in a turn: half a MiB of a payload, about 0.15
ms."""

POSTHUMOUS = frozenset(
    {m.Open, m.Read, m.Write, m.Close, m.Sync, m.Seek, m.Narrow},
)
"""Commands that are still executed for a process that has ended (spec S2).

SEEK and NARROW have no effect by themselves, but on the others.
"""

Handler = Callable[["Session", Any], bytes | None]
"""Answers a request of its class; None if the reply comes later."""

os_read = os.read
_write = os.write
yield_core = os.sched_yield
now_s = time.monotonic


class Session:
    """One client's session.

    Args:
        pump: drives the hot side.
        fs: the VFS.
        client: sends the requests.
        read_fd: source of requests; non-blocking, owned by the session.
        write_fd: gets replies; may equal ``read_fd``.
        budget: memory for payloads.
        handlers: by request class.
        services: those of the host.
        dialect: 1 or 2.
        max_write_bytes: largest payload of a WRITE (spec W3).
        deadline_s: for what has begun (spec F8).
        on_closed: called once, when the session is over.
        check_effect: raises FencedError where an effect may not go out; None for a child
            that is in no fleet.

    Attributes:
        files: the client's open files.
        conn: parses the received bytes.
        inbound: the incoming body.
        outbound: replies and files that are being sent.
        top: the ledger of its topmost child (spec S7).
        requests: number of answered ones.
        bytes_in: received from it.
        errors: replies that were errors.
        last_error: the newest of them.
        last_request: the last parsed request; None if there was none.
        begun: the last request whose body was incomplete in its first receive.
        parent: the session above it; None for a child's own.
        nested: the sessions beneath it.
        on_attach: opens another session for its client; None without ATTACH.
        narrowed_places: places of its client from NARROW.
        closed_files: filenos that were open at its end.
        why_closed: the first reason (``replies``); None while it is open.
        failure: the exception that closed it, if any.
    """

    __slots__ = (
        "_handlers",
        "_holding",
        "_interrupted",
        "_kind",
        "_on_closed",
        "_over",
        "_stop",
        "_suspended",
        "_wake",
        "begun",
        "bytes_in",
        "check_effect",
        "client",
        "closed_files",
        "conn",
        "counts",
        "deadline_s",
        "dialect",
        "errors",
        "failure",
        "files",
        "fs",
        "inbound",
        "job",
        "last_error",
        "last_request",
        "max_write_bytes",
        "narrowed_places",
        "nested",
        "on_attach",
        "outbound",
        "parent",
        "pump",
        "read_fd",
        "requests",
        "services",
        "top",
        "why_closed",
        "write_fd",
    )

    def __init__(  # noqa: PLR0913, PLR0915 - the parts of one session
        self,
        pump: Pump,
        fs: Filesystem,
        client: Client,
        read_fd: int,
        write_fd: int,
        budget: PayloadBudget,
        *,
        handlers: Mapping[type[m.Request], Handler],
        services: Services,
        dialect: int,
        max_write_bytes: int,
        deadline_s: float,
        on_closed: Callable[[Session], None],
        check_effect: Callable[[], None] | None = None,
    ) -> None:
        self.check_effect = check_effect
        self.pump = pump
        self.fs = fs
        self.services = services
        self.client = client
        self.files = client.files
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.max_write_bytes = max_write_bytes
        self.deadline_s = deadline_s
        self.dialect = dialect
        self._handlers = handlers
        self._on_closed = on_closed
        self.on_attach: Callable[[Session], Awaitable[bytes | None]] | None = None
        self.parent: Session | None = None
        self.nested: list[Session] = []
        self.narrowed_places: tuple[Place, ...] = ()

        self.conn = HostConnection(dialect)
        ledger = self.top = client.ledger
        while self.top.parent is not None:
            self.top = self.top.parent
        self.inbound = Inbound(self.conn, read_fd, budget, ledger)
        self.outbound = Outbound(pump, write_fd, deadline_s, ledger, self.top)

        self.counts = pump.counts
        self.requests = 0
        self.bytes_in = 0
        self.errors = 0
        self.last_error = b""
        self.last_request: m.Request | None = None
        self.begun: m.Request | None = None
        self._kind: type[m.Request] = m.Refusal

        self.job: Job | None = None
        self._holding: tuple[trio.CancelScope, float] | None = None
        self._interrupted = False
        self._wake = trio.Event()
        self._suspended = False
        self._stop = False
        self._over = trio.Event()
        self.why_closed: str | None = None
        self.failure: Exception | None = None
        self.closed_files: list[int] = []

    # The hot side

    def serve(  # noqa: C901, PLR0911, PLR0912, PLR0915 - the hot path, in one piece
        self, *, alone: bool
    ) -> bool:
        """Answer the received requests, without waiting.

        Args:
            alone: whether no other client is active, so that the core may be yielded to
                this one after a reply: its next request then comes without a wake-up.

        Returns:
            Whether requests are left that did not fit into this turn.
        """
        conn = self.conn
        read_fd = self.read_fd
        write_fd = self.write_fd
        misses = 0
        turns = TURN_REQUESTS
        pieces = TURN_PIECES
        message = conn.next_message() if conn.pending else None
        until_s = now_s() + TURN_S
        try:
            while True:
                if message is not None:
                    kind = self._kind = type(message)
                    self.counts.requests[kind] += 1
                    self.last_request = message
                    reply = self._handlers[kind](self, message)
                else:
                    try:
                        if conn.body_left:
                            reply = self._receive_body()
                        else:
                            data = os_read(read_fd, RECEIVE_BYTES)
                            self.bytes_in += len(data)
                            if not data:
                                self.close_soon(EOF)
                                return False
                            message = conn.receive_data(data)
                            if message is None:  # a part of a line
                                pieces -= 1
                                if pieces < 0:
                                    return False
                            continue
                    except BlockingIOError:
                        misses += 1
                        if misses > POLLS or not alone:
                            return False
                        yield_core()
                        continue
                if reply is None:
                    if message is not None:
                        self.begun = message
                    pieces -= 1
                    if self._suspended or pieces < 0:
                        return False
                    message = None  # its body is incomplete
                    continue
                if reply[:1] == b"E":
                    self.note_error(reply)
                try:
                    sent = _write(write_fd, reply)
                except BlockingIOError:
                    sent = 0
                self.outbound.bytes_out += sent
                if sent != len(reply):
                    self.start(partial(self.outbound.send, memoryview(reply)[sent:]))
                    return False
                turns -= 1
                if conn.pending:
                    if turns <= TURN_REQUESTS - PIPELINED or now_s() > until_s:
                        return True
                    message = conn.next_message()
                elif not alone or turns < 0 or now_s() > until_s:
                    return False  # epoll reports when there is more
                else:
                    message = None
                    misses = 0
                    yield_core()
        except OSError as why:
            # Everything but EINTR, which the interpreter retries, is fatal (spec S2).
            self.close_soon(EOF, why)
            return False
        except Exception as why:  # noqa: BLE001 - a fault here costs one client
            self.close_soon(FAULT, why)
            return False
        finally:
            self.requests += TURN_REQUESTS - turns

    def _receive_body(self) -> bytes | None:
        """Receive some of a body; return the reply once it is complete."""
        count = self.inbound.receive()
        if not count:
            text = b"failed to read " + self.inbound.missing()
            self.outbound.send_last(error(text))
            self.close_soon(EOF)
            return None
        self.bytes_in += count
        if self.conn.body_left:
            return None
        try:
            return self.inbound.finish()
        finally:
            if self.job is None and not self.conn.body_left:
                self.inbound.release()

    def note_error(self, reply: bytes | memoryview) -> None:
        """Count a reply that is an error, and keep it as the last one."""
        self.counts.errors[self._kind] += 1
        self.errors += 1
        self.last_error = bytes(reply)

    # For handlers

    def start(self, job: Job) -> None:
        """Pass the current request to the session's own task."""
        self.job = job
        self._suspended = True
        self.pump.suspend(self)
        self._wake.set()

    def send_file(self, file: OpenFile, size: int) -> bytes | None:
        """Answer a READ of ``size`` bytes that the file has, without copying them."""
        job = self.outbound.begin_file(file, size)
        if job is None:
            return b""
        self.start(job)
        return None

    def reserved_memory(self) -> MemoryReservation:
        """Return the current request's reservation, held until its answer is taken."""
        return self.inbound.reserved_memory()

    @contextlib.contextmanager
    def while_connected(self, leave_s: float = 0.0) -> Iterator[trio.CancelScope]:
        """Run work of a job while its client is there (spec L10).

        The end of the process, of the session, or of both directions of the connection
        cancels it; a client that has only stopped sending is waited for. It does not
        begin for a client that is gone.

        Args:
            leave_s: seconds after the client's end until the scope is cancelled.
        """
        with trio.CancelScope() as scope:
            self._holding = (scope, leave_s)
            if self._stop:
                scope.cancel()
            else:
                self.pump.watch_hangup(self)
            try:
                yield scope
            finally:
                self._holding = None
                self.pump.ignore_hangup(self)

    def narrow(self, document: bytes) -> None:
        """Give up rights for good (spec A5).

        Raises:
            RightsError: the document does not narrow what the client has.
        """
        client, llm, names = self.client, self.services.llm, self.services.network
        rules = network_in(document)
        narrow_network = None
        if rules is not None:
            if names is None:
                raise RightsError(NO_NAMES)
            try:
                narrow_network = names.narrowing(client, rules)
            except ValueError as why:
                raise RightsError(str(why)) from None
        models = None if llm is None else llm.models_of(client)
        policy = client.policy.narrow(
            document, client.ledger, models, self.fs.descriptor_account.left
        )
        if llm is not None and policy.quota is not None:
            llm.limit(client, policy.quota)
        new = tuple(
            place for place in policy.places if place not in client.policy.places
        )
        self.narrowed_places += new
        client.policy = policy
        if narrow_network is not None:
            narrow_network()

    # The slow side

    async def run(self) -> None:
        """Do the session's slow work until its end, then clean up (spec S3)."""
        try:
            while not self._stop:
                await self._wake.wait()
                self._wake = trio.Event()
                if self.job is not None:
                    await self._run_job(self.job)
        finally:
            try:
                # Bounded: calls into the kernel may still run (I1).
                with trio.CancelScope(shield=True):
                    if self.why_closed in (EOF, PROCESS_EXIT):
                        await self._settle()
                    for nested in tuple(self.nested):
                        await nested.finish(self.why_closed or EOF)
                    self.closed_files = await self.fs.end_distant(
                        self.client, self.why_closed or EOF
                    )
            finally:
                self._clean_up()

    async def _run_job(self, job: Job) -> None:
        kind = self._kind
        begun_s = time.monotonic()
        try:
            reply = await job()
            if reply is None and self._interrupted and not self._stop:
                reply = REPLACED
            if reply is not None:
                if reply[:1] == b"E":
                    self.note_error(reply)
                await self.outbound.send(reply)
        except trio.TooSlowError:
            self.close_soon(SLOW)
        except OSError as why:
            self.close_soon(EOF, why)
        except Exception as why:  # noqa: BLE001 - a fault here costs one client
            self.close_soon(FAULT, why)
        self.job = None
        self._interrupted = False
        self.requests += 1
        self.counts.count_request(self.counts.jobs, kind, time.monotonic() - begun_s)
        self.inbound.release()
        if not self._stop:
            self._suspended = False
            self.pump.resume(self)

    def interrupt(self) -> None:
        """End work that waits for a service, as if its client were gone (``handover``).

        Its client is there, and gets an error.
        """
        if self._holding is not None:
            self._interrupted = True
            self._holding[0].cancel()

    # Hand-over

    def snapshot(self, numbers: Numbering) -> SessionState:
        """Return it and those nested in it for the next program; changes nothing.

        Raises:
            HandoverError: a part of it cannot be handed over.
        """
        is_over = self.is_over
        places = () if is_over else self.narrowed_places  # closed by then
        owns = [numbers.number_owned_place(place) for place in places]
        policy = NO_POLICY if is_over else numbers.number_policy(self.client.policy)
        state = SessionState(
            client=self.client.snapshot(policy),
            dialect=self.dialect,
            read_fd=self.read_fd,
            write_fd=self.write_fd,
            requests=self.requests,
            files=[],
            nested=[nested.snapshot(numbers) for nested in self.nested],
            owns=owns,
            bytes_in=self.bytes_in,
            errors=self.errors,
            closed=self.why_closed if is_over else None,
            **msgspec.structs.asdict(self.outbound.snapshot()),
        )
        if is_over:
            return state
        for file in self.files.values():
            place = None if file.place is None else numbers.number_place(file.place)
            taken = file.snapshot(place)
            numbers.fds.update(taken.descriptors())
            state.files.append(taken)
        self._snapshot_work(state)
        numbers.fds |= {self.read_fd, self.write_fd}
        if state.body is not None and state.body.spool >= 0:
            numbers.fds.add(state.body.spool)
        if state.carried is not None:
            numbers.fds.add(state.carried[0])
        return state

    def _snapshot_work(self, state: SessionState) -> None:
        """Add the request under way (rule 1 of ``session_state``)."""
        state.held, state.skipping = self.conn.unread()
        state.reserved = self.reserved_bytes
        redo = self.outbound.redo
        if redo is not None:
            state.held = redo() + state.held
        elif self.is_working:
            if not self.outbound.can_continue:
                state.unsent = REPLACED
        elif self.conn.body_left:
            body = self.inbound.snapshot(self.begun, self.dialect)
            if isinstance(body, BodyState):
                state.body = body
            else:
                state.held = body

    def restore(self, state: SessionState, numbered: NumberedObjects) -> None:
        """Restore its places and files; ``resume`` continues its work.

        Those nested in it are not restored.
        """
        self.narrowed_places = tuple(numbered.places[n] for n in state.owns)
        if state.closed is not None:  # before this program began
            self.why_closed = state.closed
            self._stop = self._suspended = True
            self.outbound.stop()
            self._over.set()
            return
        self.fs.enter(self.client)
        for file in state.files:
            place = None if file.place is None else numbered.places[file.place]
            self.fs.restore_file(self.client, file, place)

    def resume(self, state: SessionState) -> None:
        """Continue the work under way of the program before.

        Precondition: it was restored. Its descriptors are in no epoll yet.
        """
        self.requests = state.requests
        self.bytes_in = state.bytes_in
        self.errors = state.errors
        self.client.ledger.size_bytes.charge(-state.reserved)
        job = self.outbound.restore(state, self.files)
        if state.body is None:
            self.conn.put_back(state.held, skipping=state.skipping)
        else:
            if state.body.line:
                self._begin_again(state.body.line)
            self.inbound.restore(state.body)
        if job is not None:
            self.start(job)
        elif state.carried is None:
            self.pump.resume(self)

    def _begin_again(self, line: bytes) -> None:
        """Begin the request of an incomplete body, from its line."""
        self.conn.put_back(line)
        message = self.conn.next_message()
        if message is None:
            raise HandoverError("cannot restore a request: its form is unknown")
        self.begun = message
        self._handlers[type(message)](self, message)  # it waits for the body

    # Views

    @property
    def bytes_out(self) -> int:
        """The bytes sent to the client."""
        return self.outbound.bytes_out

    @property
    def reserved_bytes(self) -> int:
        """The bytes by which the present WRITE may make a file grow."""
        return 0 if self.inbound.reserved is None else self.inbound.reserved[1]

    @property
    def is_working(self) -> bool:
        """Whether a job has its current request."""
        return self.job is not None

    @property
    def is_at_work(self) -> bool:
        """Whether a job does work that ends by itself, or is about to begin."""
        return self.is_working and not self.outbound.can_continue

    @property
    def is_mid_message(self) -> bool:
        """Whether a message has begun and is not complete (spec F8)."""
        return self.conn.is_mid_message and not self._suspended

    @property
    def is_closing(self) -> bool:
        """Whether it is being cleaned up."""
        return self._stop and not self._over.is_set()

    @property
    def is_over(self) -> bool:
        """Whether all of it was given back."""
        return self._over.is_set()

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield its descriptors of the host, with a word for each."""
        if self._over.is_set():
            return
        yield self.read_fd, "connection"
        yield self.write_fd, "connection"
        yield from self.inbound.descriptors()
        for place in self.narrowed_places:
            for fd in place.backend.descriptors():
                yield fd, "root or grant"

    # The end

    def close_soon(self, why: str, failure: Exception | None = None) -> None:
        """Stop serving; the session's task cleans up.  The first reason counts."""
        if self.why_closed is None:
            self.why_closed = why
            self.failure = failure
        if failure is not None:
            # Frames in it would hold parts of the payload's memory.
            traceback.clear_frames(failure.__traceback__)
        self._stop = True
        self._suspended = True
        self.pump.suspend(self)
        self.outbound.stop()
        if self._holding is not None:
            scope, leave_s = self._holding
            scope.deadline = min(scope.deadline, trio.current_time() + leave_s)
        self._wake.set()

    async def finish(self, why: str) -> None:
        """End the session of a process that has ended, and wait for its clean-up.

        A job in flight is waited for, never abandoned (I1).
        """
        self.close_soon(why)
        await self._over.wait()

    async def _settle(self) -> None:
        """Execute the complete requests that a gone client had sent (spec S2).

        Later bytes of another holder of the other end are ignored. Replies go nowhere
        (``outbound``, rule 2).
        """
        left = bytes_waiting(self.read_fd)
        while True:
            if self.job is not None:
                await self._run_job(self.job)
            try:
                left = self._do_sent(left)
            except OSError:
                return  # a reset connection has no more bytes
            except Exception as why:  # noqa: BLE001 - a fault here costs one client
                self.failure = why
                return
            if self.job is None:
                return

    def _do_sent(self, left: int) -> int:
        """Execute sent requests until a job begins; return the bytes that still wait.

        Args:
            left: the number of waiting bytes that count.
        """
        conn = self.conn
        message = conn.next_message() if conn.pending else None
        while True:
            if message is not None:
                self._do_posthumously(message)
            elif left <= 0:
                return 0
            elif conn.body_left:
                before = self.bytes_in  # a body may turn out to be longer
                self._receive_body()
                left -= self.bytes_in - before
                if self.bytes_in == before:
                    return 0
            else:
                data = os_read(self.read_fd, min(RECEIVE_BYTES, left))
                left -= len(data)
                self.bytes_in += len(data)
                message = conn.receive_data(data)
                if not data:
                    return 0
                continue
            if self.job is not None:
                return left
            message = conn.next_message() if conn.pending else None

    def _do_posthumously(self, message: m.Request) -> None:
        if type(message) not in POSTHUMOUS:
            self.inbound.drain(b"", ChatBody.of(message))
            return
        kind = self._kind = type(message)
        self.counts.requests[kind] += 1
        with contextlib.suppress(OSError):  # the bytes of a READ are not taken
            self._handlers[kind](self, message)

    def _clean_up(self) -> None:
        """Give all back, in reverse order of acquisition; runs once."""
        self._stop = True
        self.outbound.stop()
        with contextlib.ExitStack() as stack:  # each step, even if another one failed
            stack.callback(self._over.set)
            stack.callback(self._on_closed, self)
            if self.parent is not None:
                stack.callback(self.parent.nested.remove, self)
            for fd in {self.read_fd, self.write_fd}:
                stack.callback(os.close, fd)
                stack.callback(revoke, fd)
            stack.callback(close_places, self.narrowed_places)
            stack.callback(self._disconnect)
            stack.callback(self.inbound.release)
            stack.callback(self.pump.suspend, self)

    def _disconnect(self) -> None:
        self.client.ledger.open_files.charge(-len(self.narrowed_places))
        self.closed_files += self.fs.disconnect(self.client, self.why_closed or EOF)
