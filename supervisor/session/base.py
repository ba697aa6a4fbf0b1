"""What a session holds, and how its work is begun, bounded and stopped.

Of the parts of a session this is the lowest: what the others share.  They are layers of
one object, each in a file of its own, because every request goes through several of
them: parts that are objects would cost it a hop each (ADR 46).

    session    answers, does the slow work, ends
    sent       replies that did not fit at once, files that leave uncopied
    received   the body of a message, while it is on its way
    base       this one

Rule of this file: a session stops once, and the first reason counts (spec S2).
"""

from __future__ import annotations

import contextlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

import trio

from protocol import HostConnection
from supervisor.services import Services

if TYPE_CHECKING:
    from protocol.chat import ChatBody
    from protocol.messages import Request
    from supervisor.session.pump import Pump
    from supervisor.session.session import Session
    from supervisor.session.transport import FileTransfer
    from vfs.clients import Client
    from vfs.filesystem import Filesystem
    from vfs.openfile import OpenFile
    from vfs.payload import Payload, PayloadBudget, Reservation
    from vfs.policy import Place

RECEIVE_BYTES = 8192
"""First look at what came: holds any request line of use and a 4 KiB payload."""

EOF = "pipe EOF"
PROCESS_EXIT = "process exit"
SLOW = "deadline"
FAULT = "internal error"
"""Why a session closed; the first two are the contract's words (spec S3)."""

Reply = bytes | None
"""What a handler returns: the reply, or None when it comes later."""

Job = Callable[[], Awaitable[bytes | None]]
"""Slow work of one request; what it returns is the reply."""


class SessionBase(ABC):
    """What one client's conversation holds; ``Session`` is the whole of it.

    Args:
        pump: drives the hot side.
        fs: the VFS.
        client: whose requests these are.
        read_fd: requests come here; non-blocking, owned by the session.
        write_fd: replies go here; may equal ``read_fd``.
        budget: memory for payloads.
        dialect: 1 or 2.
        max_write_bytes: largest payload of a WRITE (spec W3).
        deadline_s: for what has begun (spec F8).
        on_closed: called once, when the session is over.
        services: what the host offers beside files.

    Attributes:
        files: the client's open files, looked up by every request.
        bytes_in: received from it.
        bytes_out: sent to it.
        errors: replies that were errors.
        last_error: the last of them.
        last_request: the last request that was looked at; None: there was none.
        begun: the last request whose body had not come whole with its line.
        unsent: of a reply, what the client has not taken; None while none waits.
        transfer: of a READ, likewise.
        redo: makes the bytes of a request that waits and has done nothing yet.
        carried: (descriptor, reply) of an ATTACH that the client has not taken.
        top: the ledger of its topmost child, which stands for that (spec S7).
        reserved: (file, bytes) that a WRITE which has begun may add to it.
        memory: what the request reserves until its answer is taken; None: nothing.
    """

    __slots__ = (
        "_chat",
        "_drain_reply",
        "_finish",
        "_holding",
        "_interrupted",
        "_is_deep",
        "_job",
        "_kind",
        "_on_closed",
        "_over",
        "_payload",
        "_stop",
        "_suspended",
        "_waiting",
        "_wake",
        "begun",
        "budget",
        "bytes_in",
        "bytes_out",
        "carried",
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
        "last_error",
        "last_request",
        "max_write_bytes",
        "memory",
        "narrowed_places",
        "nested",
        "on_attach",
        "parent",
        "pump",
        "read_fd",
        "redo",
        "requests",
        "reserved",
        "services",
        "top",
        "transfer",
        "unsent",
        "why_closed",
        "write_fd",
        "zero_copy",
    )

    def __init__(  # noqa: PLR0913, PLR0915 - the parts of one conversation
        self,
        pump: Pump,
        fs: Filesystem,
        client: Client,
        read_fd: int,
        write_fd: int,
        budget: PayloadBudget,
        *,
        dialect: int,
        max_write_bytes: int,
        deadline_s: float,
        on_closed: Callable[[Session], None],
        services: Services | None = None,
    ) -> None:
        self.pump = pump
        self.fs = fs
        self.services = Services() if services is None else services
        self.client = client
        self.top = client.ledger
        while self.top.parent is not None:
            self.top = self.top.parent
        self.files = client.files
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.budget = budget
        self.max_write_bytes = max_write_bytes
        self.deadline_s = deadline_s
        self.dialect = dialect
        self.conn = HostConnection(dialect)
        self.nested: list[Session] = []
        self.parent: Session | None = None
        self._on_closed = on_closed
        self.on_attach: Callable[[Session], Awaitable[bytes | None]] | None = None
        self.zero_copy = False
        self.requests = 0
        self.counts = pump.counts
        self.bytes_in = 0
        self.bytes_out = 0
        self.errors = 0
        self.last_error = b""
        self._kind = 0
        self.last_request: Request | None = None
        self.begun: Request | None = None
        self.unsent: memoryview | None = None
        self.transfer: FileTransfer | None = None
        self.redo: Callable[[], bytes] | None = None
        self.carried: tuple[int, bytes] | None = None
        self.narrowed_places: tuple[Place, ...] = ()
        self.why_closed: str | None = None
        self.reserved: tuple[OpenFile, int] | None = None
        self.memory: Reservation | None = None
        self._payload: Payload | None = None
        self._finish: Callable[[bytes | memoryview], bytes | None] | None = None
        self._drain_reply: bytes | None = None
        self._chat: ChatBody | None = None
        self._job: Job | None = None
        self._waiting: trio.CancelScope | None = None
        self._holding: tuple[trio.CancelScope, float] | None = None
        self._interrupted = False
        self._wake = trio.Event()
        self._over = trio.Event()
        self._stop = False
        self._suspended = False
        self._is_deep = False
        self.failure: Exception | None = None
        self.closed_files: list[int] = []

    @abstractmethod
    def serve(self, *, alone: bool) -> bool:
        """Answer what has come, without waiting."""

    def note_error(self, reply: bytes | memoryview, kind: int) -> None:
        """Take note that a request of this kind is answered with an error."""
        self.counts.errors[kind] += 1
        self.errors += 1
        self.last_error = bytes(reply)

    def start(self, job: Job) -> None:
        """Hand the current request to the session's own task."""
        self._job = job
        self._suspended = True
        self.pump.suspend(self)
        self._wake.set()

    @property
    def is_closing(self) -> bool:
        """Whether it is being cleaned up: it is to end, and has not yet."""
        return self._stop and not self._over.is_set()

    @property
    def is_over(self) -> bool:
        """Whether everything of it was given back."""
        return self._over.is_set()

    @property
    def is_mid_message(self) -> bool:
        """Whether a message has begun and is not complete (spec F8)."""
        return self.conn.is_mid_message and not self._suspended

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Bound a wait for the client to take something (spec F8).

        Raises:
            TooSlowError: the deadline has passed, or the client is gone: nobody waits
                for a process that shares its descriptor.
        """
        with trio.fail_after(self.deadline_s) as scope:
            self._waiting = scope
            if self._stop:
                scope.cancel()
            try:
                yield
            finally:
                self._waiting = None

    @contextlib.contextmanager
    def while_connected(self, leave_s: float = 0.0) -> Iterator[trio.CancelScope]:
        """Run work of a job only for as long as its client is there (spec L10).

        The end of the process, of the session, or of both directions of the connection
        cancels it; a client that has only stopped sending is waited for.  For a client
        that is gone already nothing begins.

        Args:
            leave_s: the scope is left so many seconds after the client.
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

    def interrupt(self) -> None:
        """End work that waits for a service, as if its client were gone (``handover``).

        Its client is there, and gets an error.
        """
        if self._holding is not None:
            self._interrupted = True
            self._holding[0].cancel()

    def narrow(self, document: bytes) -> None:
        """Give up rights for good (spec A5).

        Raises:
            RightsError: the document does not narrow what the client has.
        """
        client, llm = self.client, self.services.llm
        models = None if llm is None else llm.models_of(client)
        policy = client.policy.narrowed(document, client.ledger, models, self.fs.spare)
        if llm is not None and policy.quota is not None:
            llm.limit(client, policy.quota)
        new = tuple(
            place for place in policy.places if place not in client.policy.places
        )
        self.narrowed_places += new
        self.fs.hold(client, len(new))
        client.policy = policy

    def close_soon(self, why: str, failure: Exception | None = None) -> None:
        """Stop serving; the session's task cleans up.  The first reason counts."""
        if self.why_closed is None:
            self.why_closed = why
            self.failure = failure
        if failure is not None:
            # Frames that are kept with it would hold parts of the payload's memory.
            traceback.clear_frames(failure.__traceback__)
        self._stop = True
        self._suspended = True
        self.pump.suspend(self)
        if self._waiting is not None:
            self._waiting.cancel()
        if self._holding is not None:
            scope, leave_s = self._holding
            scope.deadline = min(scope.deadline, trio.current_time() + leave_s)
        self._wake.set()

    def be_over(self, why: str) -> None:
        """Be a session that was over before this program began (``handover``)."""
        self.why_closed = why
        self._stop = self._suspended = True
        self._over.set()

    async def finish(self, why: str) -> None:
        """End the session of a process that has ended, and wait for its clean-up.

        A job in flight is waited for, never abandoned (I1).
        """
        self.close_soon(why)
        await self._over.wait()

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what this holds of the host's descriptors, with a word for each."""
        if self._over.is_set():
            return
        yield self.read_fd, "connection"
        yield self.write_fd, "connection"
        if self._payload is not None:
            for fd in self._payload.descriptors():
                yield fd, "payload"
        for place in self.narrowed_places:
            for fd in place.backend.descriptors():
                yield fd, "root or grant"
