"""The LLM fds of one host: a process for each client, and their common store.

Rules of this file.

1. A child's own connection starts with an empty table.  A connection that it attaches
   starts as a fork of the one it was attached by: whoever is handed it has what its
   parent had, and may give up more (``keep_fds``).
2. What the clients of one child keep is bounded by one allowance; temporary files are
   theirs together and nobody else's.
3. When a client is gone, its process is closed: what only it held is freed.
"""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

import supervisor.documents  # noqa: F401 - imported late by what hosts without these load
from protocol import fdxml
from supervisor.config.fds import FileDescriptorSection
from supervisor.fds import handover
from supervisor.journal import Journal
from supervisor.options import parse_duration, parse_size
from supervisor.paths import CHECKPOINTS
from supervisor.scratch import make_kept
from vfs.content import (
    TOOLS,
    Allowance,
    Checkpoints,
    ClientFiles,
    FdError,
    Process,
    Retention,
    Settings,
    Shared,
    Store,
)
from vfs.content.owners import is_owner, owner_of
from vfs.content.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from contextlib import AsyncExitStack, ExitStack

    from supervisor.config.document import Config
    from supervisor.fds.conversations import Conversations
    from supervisor.fds.handover import FdsState
    from supervisor.logs import Log
    from supervisor.parts import Parts
    from supervisor.session.ports import ChildView
    from vfs.content import Summarizer, Tool
    from vfs.content.handover import Entering
    from vfs.filesystem import Client, Filesystem

DEFAULT_MAX_STORE = 4 * 1024**3
"""What the clients of one child may keep, bytes."""


class FdService:
    """What a host offers as LLM fds.

    Args:
        fs: the host's file system.
        store: where contents are kept.
        enabled: tools that children may call; None for all.
        settings: how contents are shown.
        max_store: what one child may keep, bytes.
        checkpoints: where states are kept; None: nowhere.

    Attributes:
        tools: the calls there are; a part of the host that brings its own (the tool
            loop) adds them.
        processes: by client id.
        summarizer: makes short of long; None: no model is there.
        conversations: with the model; None: no model is there.
        temporary: the directory of checkpoints that end with the host; None: they stay.
        journal: is told of snapshots that belong to checkpoints.
        gone_hooks: called with each client that is gone, before it is forgotten.
    """

    def __init__(
        self,
        fs: Filesystem,
        store: Store,
        enabled: frozenset[str] | None = None,
        *,
        settings: Settings | None = None,
        max_store: int = DEFAULT_MAX_STORE,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        self.tools: dict[str, Tool] = dict(TOOLS)
        self.processes: dict[str, Process] = {}
        self.store = store
        self.summarizer: Summarizer | None = None
        self.gone_hooks: list[Callable[[Client], None]] = []
        self.conversations: Conversations | None = None
        self.temporary: str | None = None
        self.journal = Journal(-1, lambda _: None)
        self._left: FdsState | None = None
        self._entering: Entering | None = None
        self.enabled = enabled
        self.settings = settings or Settings()
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
        """Let checkpoints of a child name snapshots of its workspaces."""
        if child.session is not None and child.spec.workspaces:
            from supervisor.fds.workspaces import ChildWorkspaces  # noqa: PLC0415 - with one

            process.shared.workspaces = ChildWorkspaces(
                child.id, child.session.client, child.spec.workspaces, self.journal
            )

    def client_attached(self, client: Client) -> None:
        """Give a client that was just attached what its parent has now."""
        if client.parent is not None:
            self.enter(client, self.process_of(client.parent).fork())

    def client_gone(self, client: Client) -> None:
        """Free what only this client held."""
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
            client: whose.
            owner: whose checkpoints it sees, where it is new; empty for nobody's.
        """
        process = self.processes.get(client.id)
        if process is None:
            shared = self.make_shared(owner)
            process = self.enter(client, Process(shared))
        return process

    def make_shared(self, owner: str) -> Shared:
        """Return what the processes of a child are to share.

        Args:
            owner: whose checkpoints they see; what is no owner is replaced by one.
        """
        if not is_owner(owner):  # an older program's, that is another child's next time
            owner = owner_of(None)
        if self._checkpoints is not None:
            self._checkpoints.living.add(owner)
        return Shared(
            self.store,
            self.tools,
            self.enabled,
            self.settings,
            Allowance(self._max_store),
            checkpoints=self._checkpoints,
            owner=owner,
            summarizer=self.summarizer,
        )

    def enter(self, client: Client, process: Process) -> Process:
        """Let a process be that of a client."""
        self.adopt(client, process)
        self.processes[client.id] = process
        return process

    def adopt(self, client: Client, process: Process) -> None:
        """Let a process work for a client, under its rights."""
        process.threads = client.ledger.threads
        process.caller = client
        self.give_files(process, client)

    # Handed over (see ``ports.Portable``)

    def rest(self) -> None:
        """Nothing: who calls is a conversation, and those rest."""

    def go_on(self) -> None:
        """Likewise."""

    def interrupt(self) -> None:
        """Likewise: a call under way is a job of its conversation."""

    def busy(self) -> str | None:
        """Say what has to end first."""
        return handover.busy(self)

    def hand_over(self, stack: ExitStack) -> tuple[object, set[int]]:
        """Return contents, tables and conversations."""
        return handover.hand_over(self, stack)

    async def take_over(self, state: object) -> None:
        """Hold the contents for the tables that are to come."""
        self._left = handover.read(state)
        if self._left is not None:
            self._entering = handover.take_over(self, self._left)

    async def child_entered(self, child: ChildView, stack: AsyncExitStack) -> None:
        """Go on with the tables of a child; ``client_gone`` undoes it."""
        del stack
        if self._left is not None and self._entering is not None:
            handover.enter(self, self._left, self._entering, child)

    async def all_entered(self) -> None:
        """Let go of contents that nobody holds."""
        entering, self._left, self._entering = self._entering, None, None
        if entering is not None:
            entering.close()

    def give_files(self, process: Process, client: Client) -> None:
        """Let a process reach its client's files, in the view that it has."""
        process.files = ClientFiles(self._fs, client, claim=process.claim)

    @property
    def most_shown(self) -> int:
        """Characters that are shown at once; what is longer becomes a descriptor."""
        return self.settings.max_output

    def is_call(self, name: str) -> bool:
        """Tell whether a tool of this name is one of the calls here."""
        return name in self.tools

    async def wrap_pieces(
        self, client: Client, read: Callable[[], Awaitable[bytes]], source: str
    ) -> bytes | None:
        """Keep a tool's output that comes in pieces, and return what stands for it.

        Args:
            client: for whom the tool ran.
            read: returns its next piece, nothing at the end.
            source: ``tool:NAME``.

        Returns:
            The answer of ``wrap_output``, an ``fd_error`` if there is no room; None if
            the client is gone.

        Cancellation: what was taken in is freed.
        """
        process = self.processes.get(client.id)
        if process is None:
            return None
        try:
            token = await self._take_in(process, client, read)
            if token is None:
                return None
            try:
                answer = await process.call("wrap_output", token=token, source=source)
            finally:
                process.begun.drop(token)  # cancelled before it was its turn
        except FdError as why:
            return fdxml.failure(why.kind, why.fd, why.message, why.details)
        if self.processes.get(client.id) is process:
            return answer
        process.close()  # the client went during the call
        return None

    async def _take_in(
        self, process: Process, client: Client, read: Callable[[], Awaitable[bytes]]
    ) -> str | None:
        """Return the token of a content that was read to its end; None: it went."""
        # Not yet the process's: that may close at any time, this file only here.
        writer = self.store.writer()
        allowance = process.shared.allowance or Allowance(self._max_store)
        taken = 0
        try:
            while piece := await read():
                allowance.take(len(piece))
                taken += len(piece)
                threads = client.ledger.threads
                await in_thread(writer.add, piece, share=threads)
        except BaseException:
            writer.close()
            allowance.give_back(taken)
            raise
        if self.processes.get(client.id) is process:
            return process.begun.enter(writer)
        writer.close()
        allowance.give_back(taken)
        return None

    def drop_numbered(self, log: Log, left: FdsState | None) -> None:
        """Delete checkpoints of an older program, whose owners nobody knows; say so.

        Args:
            log: of the host.
            left: what the program before has left, if any: its children are there.
        """
        checkpoints = self._checkpoints
        if checkpoints is None:
            return
        if left is not None:
            checkpoints.living.update(one.owner for one in left.shared)
        try:
            count = checkpoints.drop_numbered()
        except FdError:  # what is damaged is told to whoever uses it
            return
        if count:
            text = (
                f"Dropped {count} checkpoints that were kept by the order in which"
                " children start (child-1, ...): they would go to other children"
            )
            log.write("WARNING", text, checkpoints=count)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what this holds of the host's descriptors, with a word for each."""
        yield from self.store.descriptors()
        if self._checkpoints is not None:
            yield from self._checkpoints.descriptors()

    def close(self) -> None:
        """Free everything."""
        for process in tuple(self.processes.values()):
            process.close()
            process.shared.temps.close()
        self.processes.clear()
        if self._checkpoints is not None:
            self._checkpoints.close()


def make_service(fs: Filesystem, config: Config | None, checkpoints: str) -> FdService:
    """Return the LLM fds that a configuration asks for.

    Args:
        fs: the host's file system.
        config: None: every tool, and the usual sizes.
        checkpoints: directory for them.

    Raises:
        OSError: the directory cannot be used.
    """
    section = config.file_descriptor if config is not None else None
    section = section or FileDescriptorSection()
    return FdService(
        fs,
        Store(parse_size(section.max_memory)),
        None if config is None else frozenset(config.tools.enabled),
        settings=Settings(
            page_size=section.default_page_size,
            max_output=section.max_direct_output_chars,
            max_input=section.max_input_chars,
            page_input=section.page_user_input,
            conversation_fds=section.conversation_fds,
            auto_summarize=section.auto_summarize,
            raw=section.escape == "raw",
        ),
        max_store=parse_size(section.max_store),
        checkpoints=Checkpoints(
            checkpoints,
            retention=Retention(
                section.keep_checkpoints,
                parse_duration(section.keep_checkpoints_for or "0"),
            ),
        ),
    )


@contextmanager
def open_fds(host: Parts, config: Config, left: object = None) -> Iterator[FdService]:
    """Offer the LLM fds that a configuration asks for until the block ends.

    Args:
        host: whose.
        config: checked.
        left: what the program before has left of them; None if nothing.

    Raises:
        HandoverError: what was left is another program's.
        OSError: the directory of the checkpoints cannot be used.
    """
    state_dir = config.host.state_dir
    before = handover.read(left)
    temporary = None if before is None else before.temporary
    if temporary is None and state_dir is None:
        # Without a state directory checkpoints live as long as the host.
        temporary = make_kept("sandhost-fds-")
    if temporary is None and state_dir is not None:
        # Else it is made with the directory in it, and open to everybody.
        os.makedirs(state_dir, mode=0o700, exist_ok=True)  # noqa: PTH103
    directory = temporary or os.path.join(str(state_dir), CHECKPOINTS)  # noqa: PTH118
    try:
        if temporary is not None:
            host.apart.add(temporary)
        service = make_service(host.fs, config, directory)
        service.temporary = temporary
        service.journal = host.journal
        service.drop_numbered(host.log, before)
        host.fs.set_aside(service.store.spool.most_descriptors)
        host.services.fds = service
        host.holders.add(service.descriptors)
        try:
            yield service
        finally:
            host.services.fds = None
            host.holders.discard(service.descriptors)
            service.close()
    finally:
        if temporary is not None:
            host.apart.remove(temporary)
            shutil.rmtree(temporary, ignore_errors=True)
