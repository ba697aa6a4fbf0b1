"""The LLM fds of one host: a process for each client, and their common store.

Rules of this file.

1. A child's own connection starts with an empty table. An attached connection starts as
   a fork of its parent's process; the client that gets it may give up more
   (``keep_fds``).
2. One allowance bounds the contents of a child's clients; temporary files are shared by
   them and by no others.
3. When a client is gone, its process is closed and the contents that only it held are
   freed.
4. After a hand-over, a client's table is restored before the client is served.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

import hostlib.documents  # noqa: F401 - imported late by hosts without LLM fds
from hostlib.accounts import Account
from hostlib.handover import HandoverError
from hostlib.journal import Journal
from protocol import fdxml
from supervisor.llmfd import (
    TOOLS,
    Allowance,
    Checkpoints,
    ClientFiles,
    ContentSettings,
    FdError,
    Process,
    ProcessParts,
    Store,
)
from supervisor.llmfd.blob import BlobState  # noqa: TC001 - msgspec looks at it
from supervisor.llmfd.calls.wrapping import wrap_upload
from supervisor.llmfd.memory_file import MemoryFile
from supervisor.llmfd.own_checkpoints import is_owner, owner_of
from supervisor.llmfd.process import (  # noqa: TC001 - msgspec looks at them
    ProcessState,
    SharedState,
)
from supervisor.llmfd.threads import in_thread
from supervisor.llmfd.uploads import PartialContent

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from contextlib import AsyncExitStack, ExitStack

    from hostlib.log import Log
    from supervisor.fsproxy.ports import ChildView
    from supervisor.llm.conversations import NamedConversations
    from supervisor.llmfd import Summarizer, Tool
    from supervisor.llmfd.blob import Blob
    from vfs.clients import Client
    from vfs.filesystem import Filesystem

DEFAULT_MAX_STORE = 4 * 1024**3
"""Most bytes that the clients of one child may keep."""

MOST_COPIES = 110
"""Most copies of conversations of one child at work at once (``fork``, ``spawn``): ten, and
ten of each.  A table takes up to 300 KB, a call of the model a descriptor."""


class KeptConversationState(msgspec.Struct):
    """A conversation that is kept for a client under a name."""

    client: str
    name: str
    process: ProcessState
    size_chars: int


class FdsState(msgspec.Struct):
    """The state of all LLM fds.

    Attributes:
        temporary: the directory of checkpoints that end with the host, if any.
        memory_fd: the bytes of contents that are in memory.
        contents: all contents, once each.
        shared: the shared parts of a child's processes.
        processes: by client.
        kept: conversations.
    """

    temporary: str | None
    memory_fd: int
    contents: list[BlobState]
    shared: list[SharedState]
    processes: dict[str, ProcessState]
    kept: list[KeptConversationState]


@dataclass(frozen=True, slots=True)
class _RestoreState:
    """The state of the program before, until every table has its contents.

    Attributes:
        left: its state.
        memory: bytes of contents.
        held: all contents, held once until then.
        shared: by number.
    """

    left: FdsState
    memory: MemoryFile
    held: list[Blob]
    shared: list[ProcessParts]

    def process(self, state: ProcessState) -> Process:
        """Return a restored process."""
        return Process.restore(state, self.shared[state.shared], self.memory)


def read_state(left: object) -> FdsState | None:
    """Return the handed-over state; None without one.

    Raises:
        HandoverError: the state is another program's.
    """
    if left is None:
        return None
    try:
        if not isinstance(left, bytes):
            raise HandoverError("cannot take the LLM fds over: they are no document")
        return msgspec.convert(json.loads(left), FdsState)
    except (ValueError, msgspec.ValidationError) as why:
        raise HandoverError(f"cannot take the LLM fds over: {why}") from None


class FdService:
    """The LLM fds of one host.

    Args:
        fs: the host's file system.
        store: keeps the contents.
        enabled: tools that children may call; None for all.
        settings: how contents are shown.
        max_store: most bytes of one child.
        checkpoints: keep states; None for none.

    Attributes:
        tools: all calls; another part of the host (the tool loop) adds its own.
        processes: by client id.
        summarizer: makes summaries; None without a model.
        kept: named conversations with the model; None without a model.
        temporary: the directory of checkpoints that end with the host; None if they
            stay.
        journal: gets events about snapshots of checkpoints.
        gone_hooks: called with each client that is gone, before it is forgotten.
    """

    def __init__(
        self,
        fs: Filesystem,
        store: Store,
        enabled: frozenset[str] | None = None,
        *,
        settings: ContentSettings | None = None,
        max_store: int = DEFAULT_MAX_STORE,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.tools: dict[str, Tool] = dict(TOOLS)
        self.processes: dict[str, Process] = {}
        self.store = store
        self.summarizer: Summarizer | None = None
        self.gone_hooks: list[Callable[[Client], None]] = []
        self.kept: NamedConversations[Process] | None = None
        self.temporary: str | None = None
        self.journal = Journal(-1, lambda _: None)
        self._restoring: _RestoreState | None = None
        self.enabled = enabled
        self.settings = settings or ContentSettings()
        self._fs = fs
        self._max_store = max_store
        self._checkpoints = checkpoints

    # The seam

    async def child_starting(
        self, child: ChildView, stack: AsyncExitStack
    ) -> Mapping[str, str]:
        """Make a child's process; see ``ports.Service``."""
        del stack  # `client_gone` undoes it
        if child.session is not None:
            owner = owner_of(child.spec.account)
            self.show_workspaces(child, self.process_of(child.session.client, owner))
        return {}

    def show_workspaces(self, child: ChildView, process: Process) -> None:
        """Let checkpoints of a child have snapshots of its workspaces."""
        if child.session is not None and child.spec.workspaces:
            from supervisor.llmfd.workspaces import LayeredWorkspaces  # noqa: PLC0415 - with one

            process.shared.workspaces = LayeredWorkspaces(
                child.id, child.session.client, child.spec.workspaces, self.journal
            )

    def client_attached(self, client: Client) -> None:
        """Give an attached client all that its parent has now."""
        if client.parent is not None:
            self.enter(client, self.process_of(client.parent).fork())

    def client_gone(self, client: Client) -> None:
        """Free the contents that only this client held."""
        for hook in self.gone_hooks:
            hook(client)
        process = self.processes.pop(client.id, None)
        if process is None:
            return
        process.close()
        if client.parent is None:
            process.shared.temps.close()
            if self._checkpoints is not None:
                self._checkpoints.living.discard(process.shared.owner)

    def process_of(self, client: Client, owner: str = "") -> Process:
        """Return the process of a client.

        Args:
            client: has the process.
            owner: has the checkpoints of a new process; empty for no owner.
        """
        process = self.processes.get(client.id)
        if process is None:
            shared = self.make_shared(owner)
            process = self.enter(client, Process(shared))
        return process

    def make_shared(self, owner: str) -> ProcessParts:
        """Return the shared parts for the processes of a child.

        Args:
            owner: has the checkpoints; an invalid one is replaced.
        """
        # One of an older program's is given to another child by the next host.
        if not is_owner(owner):
            owner = owner_of(None)
        if self._checkpoints is not None:
            self._checkpoints.living.add(owner)
        return ProcessParts(
            self.store,
            self.tools,
            self.enabled,
            self.settings,
            Allowance(self._max_store),
            checkpoints=self._checkpoints,
            owner=owner,
            summarizer=self.summarizer,
            copies=Account(self._fs.descriptor_account, MOST_COPIES),
        )

    def enter(self, client: Client, process: Process) -> Process:
        """Make a process that of a client."""
        self.adopt(client, process)
        self.processes[client.id] = process
        return process

    def adopt(self, client: Client, process: Process) -> None:
        """Let a process work for a client, under its rights."""
        process.threads = client.ledger.threads
        process.caller = client
        self.give_files(process, client)

    # Hand-over (see ``ports.Portable``)

    def rest(self) -> None:
        """Do nothing: the callers are conversations, which rest."""

    def resume(self) -> None:
        """Do nothing, as ``rest``."""

    def interrupt(self) -> None:
        """Do nothing: a call under way is a job of its conversation."""

    def busy(self) -> str | None:
        """Return what must end first."""
        kept = (process for _, _, process, _ in self._all_kept())
        if any(process.is_at_work for process in (*self.processes.values(), *kept)):
            return "an LLM fd is being used"
        return None

    def _all_kept(self) -> Iterator[tuple[str, str, Process, int]]:
        if self.kept is not None:
            yield from self.kept.all()

    def snapshot(self, stack: ExitStack) -> tuple[object, set[int]]:
        """Return contents, tables and conversations.

        Checkpoints are on the disk; the next program opens them again. A temporary
        directory of checkpoints is handed over by its name.
        """
        try:
            memory = MemoryFile()
            stack.callback(memory.close)  # if the exchange fails
            state = self._snapshot(memory)
        except OSError as why:
            text = (
                f"cannot hand contents over: {why.strerror}; restart the host instead"
            )
            raise HandoverError(text) from None
        # JSON of the standard library has a form for a lone surrogate.
        return json.dumps(msgspec.to_builtins(state)).encode(), {memory.fd}

    def _snapshot(self, memory: MemoryFile) -> FdsState:
        kept = list(self._all_kept())
        all_processes = (*self.processes.values(), *(one[2] for one in kept))
        shared = list({id(one.shared): one.shared for one in all_processes}.values())
        numbers = {id(one): number for number, one in enumerate(shared)}

        def snapshot(process: Process) -> ProcessState:
            return process.snapshot(numbers[id(process.shared)], memory)

        return FdsState(
            self.temporary,
            memory.fd,
            self.store.snapshot(memory),
            [one.snapshot() for one in shared],
            {name: snapshot(process) for name, process in self.processes.items()},
            [
                KeptConversationState(client_id, name, snapshot(process), size)
                for client_id, name, process, size in kept
            ],
        )

    async def restore(self, state: object) -> None:
        """Hold the contents for the tables that are restored next."""
        left = read_state(state)
        if left is None:
            return
        memory = MemoryFile(left.memory_fd)
        held = self.store.restore(left.contents, memory)
        shared = []
        for one in left.shared:
            shared.append(made := self.make_shared(one.owner))
            made.temps.restore(one.temps)
        self._restoring = _RestoreState(left, memory, held, shared)

    async def restore_child(self, child: ChildView, stack: AsyncExitStack) -> None:
        """Restore the tables of a child; ``client_gone`` undoes it."""
        del stack
        restoring = self._restoring
        if restoring is None:
            return
        left = restoring.left
        for session in child.sessions():
            client = session.client
            process = left.processes.get(client.id)
            if process is not None:
                entered = self.enter(client, restoring.process(process))
                self.show_workspaces(child, entered)
                if child.spec.account is not None:  # also if an older program left it
                    entered.shared.owner = owner_of(child.spec.account)
            for one in left.kept:
                if one.client == client.id:
                    self._keep(client, one, restoring.process(one.process))

    def _keep(
        self, client: Client, left: KeptConversationState, process: Process
    ) -> None:
        if self.kept is None:  # no model is configured any more
            process.close()
            return
        self.adopt(client, process)
        self.kept.keep(client, left.name, process, left.size_chars)

    async def restore_rest(self) -> None:
        """Free contents without a holder."""
        restoring, self._restoring = self._restoring, None
        if restoring is not None:
            restoring.memory.close()
            for blob in restoring.held:
                self.store.release(blob)

    def give_files(self, process: Process, client: Client) -> None:
        """Let a process use its client's files, in its view."""
        process.files = ClientFiles(self._fs, client, claim=process.claim)

    @property
    def most_shown(self) -> int:
        """Most characters that are shown at once; longer texts become a descriptor."""
        return self.settings.max_output

    def is_call(self, name: str) -> bool:
        """Return whether a tool of this name is one of the calls."""
        return name in self.tools

    async def wrap_pieces(
        self, client: Client, read: Callable[[], Awaitable[bytes]], source: str
    ) -> bytes | None:
        """Keep a tool's output that comes in pieces; return its ``fd_result`` or itself.

        Args:
            client: the tool ran for it.
            read: returns the next piece, empty at the end.
            source: ``tool:NAME``.

        Returns:
            The answer of ``wrap_output``, an ``fd_error`` if there is no room; None if
            the client is gone.

        Cancellation: the pieces so far are freed.
        """
        process = self.processes.get(client.id)
        if process is None:
            return None
        # Not the process's: that may close at any time, and its child knows no token.
        upload = PartialContent(self.store, process.shared.allowance)
        try:
            while piece := await read():
                await in_thread(upload.add, piece, share=process.threads)
            work = partial(wrap_upload, process, upload, source)
            answer = await process.do("wrap_output", work, is_slow=True)
        except FdError as why:
            answer = fdxml.failure(why.kind, why.fd, why.message, why.details)
        finally:
            upload.close()
        return answer if self.processes.get(client.id) is process else None

    def drop_numbered(self, log: Log, left: FdsState | None) -> None:
        """Delete checkpoints of an older program, whose owners are unknown; log it.

        Args:
            log: of the host.
            left: the state of the program before, if any: its children run.
        """
        checkpoints = self._checkpoints
        if checkpoints is None:
            return
        if left is not None:
            checkpoints.living.update(one.owner for one in left.shared)
        try:
            count = checkpoints.drop_numbered()
        except FdError:  # the next user gets the error about damage
            return
        if count:
            text = (
                f"Dropped {count} checkpoints that were kept by the order in which"
                " children start (child-1, ...): they would go to other children"
            )
            log.write("WARNING", text, checkpoints=count)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield its descriptors of the host, with a word for each."""
        yield from self.store.files.descriptors()
        if self._checkpoints is not None:
            yield from self._checkpoints.descriptors()

    def close(self) -> None:
        """Free all."""
        self.store.close()
        for process in tuple(self.processes.values()):
            process.close()
            process.shared.temps.close()
        self.processes.clear()
        if self._checkpoints is not None:
            self._checkpoints.close()
