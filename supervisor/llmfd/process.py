"""The process of one model: a table of descriptors and the calls on it.

Has the parts that every call needs, and ``call`` itself.

Rules of this file.

1. A process does one call at a time; different processes run side by side.
2. A tool's error is an answer (``fd_error``); only an unknown tool raises.
3. A call that reads or stores content, or lists what may be many (``Tool.is_slow``), is
   done in a worker thread: no step in the Trio thread may take longer than 10 ms, since
   it answers every client.
4. A call that may take seconds and changes nothing for others ends with its caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import trio

from hostlib.accounts import Account
from protocol import fdxml
from supervisor.fsproxy.ports import ContentError
from supervisor.llmfd.arguments import Json, Tool, bind
from supervisor.llmfd.errors import INVALID_PARAMETER, MOST_SAID_CHARS, FdError
from supervisor.llmfd.own_checkpoints import OwnCheckpoints
from supervisor.llmfd.selection import lines_of, part_span
from supervisor.llmfd.table import FdTable, TableState
from supervisor.llmfd.tempfiles import TempFiles, TempFilesState
from supervisor.llmfd.threads import in_thread
from supervisor.llmfd.uploads import BegunState, Uploads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from supervisor.llmfd.allowance import Allowance
    from supervisor.llmfd.blob import Blob, Content
    from supervisor.llmfd.checkpoints import Checkpoints
    from supervisor.llmfd.client_files import Files
    from supervisor.llmfd.index import Span
    from supervisor.llmfd.memory_file import MemoryFile
    from supervisor.llmfd.store import Store
    from supervisor.llmfd.table import LlmFd
    from supervisor.llmfd.workspaces import Workspaces

ONLY_READ = frozenset({"read_fd", "search_fd"})
"""Calls that show a part of a content of any length."""

NEED_MODEL = frozenset({"fork", "spawn", "summarize_fd"})
"""Calls that exist only in a host with a model."""

SUMMARIZED = frozenset({"wrap_output", "wrap_input"})
"""Calls whose answer may have a summary, which a model makes."""

SUMMARY_S = 10.0
"""Longest wait for a summary; then the result has none."""


@dataclass(frozen=True, slots=True)
class ContentSettings:
    """How contents are shown (``[file_descriptor]``).

    Attributes:
        page_size: characters of a page.
        max_output: longest tool result that is passed on as it is, characters.
        max_input: the same for user input.
        page_input: whether long user input is stored.
        conversation_fds: whether every message gets a descriptor.
        auto_summarize: whether ``fd_result`` has a summary if possible.
        raw: whether bodies of XML are not escaped.
    """

    page_size: int = 4000
    max_output: int = 8000
    max_input: int = 8000
    page_input: bool = True
    conversation_fds: bool = False
    auto_summarize: bool = False
    raw: bool = False


class UnknownCallError(ContentError):
    """No such tool, or one that is not enabled; the text says so."""


class Summarizer(Protocol):
    """Makes summaries."""

    async def summary(self, process: Process, fd: LlmFd) -> str | None:
        """Return a summary; None if there is none.

        Args:
            process: has the descriptor; its caller pays.
            fd: the long content.
        """


class SharedState(msgspec.Struct):
    """See ``ProcessParts``."""

    owner: str
    temps: TempFilesState


class ProcessState(msgspec.Struct):
    """See ``Process``; ``shared`` is a number in the list of all."""

    shared: int
    table: TableState
    messages: Any
    program: str
    claim: bool
    depth: int
    begun: BegunState
    checkpoints_seen: list[str] | None
    checkpoints_made: list[str]


@dataclass(slots=True)
class ProcessParts:
    """The parts that the processes of one child share.

    Attributes:
        store: the host's contents.
        tools: all calls by name.
        enabled: those that may be called; None for all.
        settings: how contents are shown.
        allowance: bounds their contents.
        temps: their temporary files.
        checkpoints: keep states; None for none.
        owner: has the checkpoints.
        summarizer: None without a model.
        workspaces: those of the child, for checkpoints; None for none.
        copies: account of the copies of conversations that are at work.
    """

    store: Store
    tools: Mapping[str, Tool]
    enabled: frozenset[str] | None = None
    settings: ContentSettings = field(default_factory=ContentSettings)
    allowance: Allowance | None = None
    temps: TempFiles = field(init=False)
    checkpoints: Checkpoints | None = None
    owner: str = ""
    summarizer: Summarizer | None = None
    workspaces: Workspaces | None = None
    copies: Account[int] = field(default_factory=partial(Account, None))

    def __post_init__(self) -> None:
        self.temps = TempFiles(self.store, self.allowance)

    def snapshot(self) -> SharedState:
        """Return it as ``FdService.restore`` restores it."""
        return SharedState(self.owner, self.temps.snapshot())


class Process:
    """One process.

    Args:
        shared: the parts that it shares with others.
        table: its descriptors; None for an empty table.

    Attributes:
        shared: as above.
        table: as above.
        messages: its conversation, in the form of the chat API.
        program: its preset; empty for none.
        threads: bounds its worker threads; None for no bound.
        files: the file system under its client's rights; None for none.
        caller: the client whose quota and rights its calls use; read by the owner.
        claim: whether those rights count in full, or in the restricted view (spec A1).
        depth: number of forks and spawns from a client's own process.
        checkpoints: those of its owner that it may restore.
        begun: its unfinished contents.
    """

    def __init__(self, shared: ProcessParts, table: FdTable | None = None) -> None:
        self.shared = shared
        self.table = table or FdTable(shared.store, shared.allowance)
        self.messages: list[dict[str, Json]] = []
        self.program = ""
        self.threads: trio.CapacityLimiter | None = None
        self.files: Files | None = None
        self.caller: object = None
        self.claim = True
        self.depth = 0
        self.checkpoints = OwnCheckpoints()
        self.begun = Uploads(shared.store, shared.allowance)
        self.turn = trio.Lock()

    # Calls

    async def call(self, name: str, /, *args: object, **kwargs: object) -> bytes:
        """Do a call; return its answer: XML, or the wrapped text if it is short.

        Raises:
            UnknownCallError: no such tool is enabled.
        """
        tool = self.tool(name)
        try:
            work = partial(tool.run, self, **bind(tool, args, kwargs))
            return await self.do(name, work, is_slow=tool.is_slow)
        except FdError as why:
            return _failure(why, kwargs, args)

    async def do(
        self,
        name: str,
        work: Callable[[], bytes | Awaitable[bytes]],
        *,
        is_slow: bool,
    ) -> bytes:
        """Do the work of a call in its turn; return its answer, with a summary.

        Args:
            name: of the call.
            work: does it.
            is_slow: it needs a worker thread.

        Raises:
            FdError: it failed.
        """
        async with self.turn:
            before = self.table.next_number
            answer = await in_thread(work, share=self.threads) if is_slow else work()
            if not isinstance(answer, bytes):
                answer = await answer
            return await self._add_summary(name, answer, before)

    async def _add_summary(self, name: str, answer: bytes, before: int) -> bytes:
        """Return an answer with a summary in the ``fd_result`` of a stored content.

        Args:
            name: of the call.
            answer: has an ``fd_result`` if the call stored a content; a text that only
                looks like one was passed on.
            before: the next number of a descriptor before the call.
        """
        shared = self.shared
        fd = self.table.fds.get(before)
        if (
            not shared.settings.auto_summarize
            or shared.summarizer is None
            or name not in SUMMARIZED
            or fd is None
            or fd.is_binary
            or not answer.startswith(b"<fd_result ")
        ):
            return answer
        summary: str | None = None
        with trio.move_on_after(SUMMARY_S):
            summary = await shared.summarizer.summary(self, fd)
        return answer if not summary else fdxml.add_summary(answer, summary)

    def is_for_caller_alone(self, name: str) -> bool:
        """Return whether a call may be long and is useless once its caller is gone.

        A model would be paid for an answer that has no reader.
        """
        shared = self.shared
        asks = shared.settings.auto_summarize and shared.summarizer is not None
        return name in ONLY_READ | NEED_MODEL or (asks and name in SUMMARIZED)

    def has_begun(self, token: str) -> bool:
        """Return whether a token has an unfinished content."""
        return token in self.begun

    async def put(self, token: str | None, piece: memoryview | bytes) -> str:
        """Add a piece; return its token, a new one for None.

        Raises:
            FdError: there is no room, or no thread to write it.
        """
        return await in_thread(self._put, token, piece, share=self.threads)

    def _put(self, token: str | None, piece: memoryview | bytes) -> str:
        return self.begun.put(token, bytes(piece))

    def tool(self, name: str) -> Tool:
        """Return a tool that may be called.

        Raises:
            UnknownCallError: there is no such tool, or it is not enabled.
        """
        shared = self.shared
        tool = shared.tools.get(name)
        enabled = shared.enabled
        if tool is None:
            if name in NEED_MODEL:
                raise UnknownCallError(f"{name} needs a model, and this host has none")
            raise UnknownCallError(f"unknown name: {name[:MOST_SAID_CHARS]}")
        if enabled is not None and name not in enabled | ALWAYS:
            raise UnknownCallError(f"not enabled: {name}")
        return tool

    # Contents

    def add(self, content: Content, source: str, *, name: str = "") -> LlmFd:
        """Give a content that the caller holds a descriptor of this process."""
        page_size = self.shared.settings.page_size
        return self.table.add(content, source, page_size, name=name)

    def add_text(self, text: str, source: str, *, name: str = "") -> LlmFd:
        """Keep a text and give it a descriptor.

        Raises:
            FdError: ``invalid_parameter``: it has a lone surrogate.
        """
        return self.add(self.put_text(text), source, name=name)

    async def add_waiting(self, content: Content, source: str) -> LlmFd:
        """Add a content as ``add`` does; cut its pages in a worker thread."""
        pages, size = content.text.pages, self.shared.settings.page_size
        try:
            await in_thread(pages, size, share=self.threads)
        except BaseException:
            self.shared.store.drop(content)
            raise
        return self.add(content, source)

    async def keep_text(self, text: str, source: str) -> LlmFd:
        """Keep a text as ``add_text`` does, in a worker thread."""
        return await in_thread(self.add_text, text, source, share=self.threads)

    def add_part(self, text: Blob, span: Span, source: str) -> LlmFd:
        """Give a part of a text a descriptor."""
        return self.add(self._part(text, span), source)

    def _part(self, text: Blob, span: Span) -> Content:
        """Keep a part of a text; the caller holds it."""
        writer = self.shared.store.writer()
        try:
            for piece in text.pieces(*span):
                writer.add(piece)
            return writer.finish()
        finally:
            writer.close()

    def find_named(self, parts: Sequence[Json]) -> list[tuple[LlmFd, Span | None]]:
        """Return the named descriptors, each with its lines or None for all.

        Args:
            parts: ids, or ``{"fd": ..., "start_line": ..., "end_line": ...}``.

        Raises:
            FdError: there is no such descriptor, or no such line.
        """
        found = [
            (self.table.find(str(part["fd"])), part)
            for part in (one if isinstance(one, dict) else {"fd": one} for one in parts)
        ]
        return [(fd, part_span(fd, part)) for fd, part in found]

    def add_lines(self, fd: LlmFd, span: Span) -> LlmFd:
        """Give lines of a descriptor, of this process or another, their own descriptor."""
        return self.add_part(fd.content.text, span, _lines_source(fd, span))

    def keep_only(self, named: Sequence[tuple[LlmFd, Span | None]]) -> None:
        """Give up all descriptors but these; selected lines get a new one.

        Raises:
            FdError: the result is too much; nothing changed.
        """
        page_size = self.shared.settings.page_size
        kept: set[int] = {fd.number for fd, span in named if span is None}
        parts = (
            (self._part(fd.content.text, span), _lines_source(fd, span))
            for fd, span in named
            if span is not None
        )
        self.table.exchange(kept, parts, page_size)
        self.checkpoints.keep_own()

    def put_text(self, text: str) -> Content:
        """Keep a text; the caller holds it."""
        try:
            data = text.encode()
        except UnicodeEncodeError:
            message = "The text has a lone surrogate, which is no character"
            raise FdError(INVALID_PARAMETER, message) from None
        return self.shared.store.put(data)

    # Its life

    @property
    def is_at_work(self) -> bool:
        """Whether a call is being done."""
        return self.turn.locked()

    def fork(self) -> Process:
        """Return a process that starts with all that this one has."""
        child = self._child(self.table.fork())
        child.messages = list(self.messages)  # a message never changes
        child.program = self.program
        child.checkpoints = self.checkpoints.fork()
        return child

    def spawn(self) -> Process:
        """Return a process that starts with nothing of this one."""
        child = self._child(None)
        child.checkpoints.keep_own()
        return child

    def _child(self, table: FdTable | None) -> Process:
        child = Process(self.shared, table)
        child.threads = self.threads
        child.files = self.files
        child.caller = self.caller
        child.claim = self.claim
        child.depth = self.depth + 1
        return child

    def snapshot(self, shared: int, memory: MemoryFile) -> ProcessState:
        """Return it as ``restore`` takes it.

        Args:
            shared: the number of its shared part.
            memory: gets bytes that are in no content yet.
        """
        return ProcessState(
            shared,
            self.table.snapshot(),
            self.messages,
            self.program,
            self.claim,
            self.depth,
            self.begun.snapshot(memory),
            self.checkpoints.seen,
            self.checkpoints.made,
        )

    @classmethod
    def restore(
        cls, state: ProcessState, shared: ProcessParts, memory: MemoryFile
    ) -> Process:
        """Return the process of the program before; the caller sets its client."""
        table = FdTable.restore(state.table, shared.store, shared.allowance)
        process = cls(shared, table)
        process.messages, process.program = state.messages, state.program
        process.claim, process.depth = state.claim, state.depth
        process.begun.restore(state.begun, memory)
        process.checkpoints.seen = state.checkpoints_seen
        process.checkpoints.made = state.checkpoints_made
        return process

    def close(self) -> None:
        """Free all that it holds."""
        self.begun.close()
        self.table.close()

    def offered_tools(self) -> tuple[Tool, ...]:
        """Return the tools that the model of this process may call."""
        enabled = self.shared.enabled
        return tuple(
            tool
            for name, tool in self.shared.tools.items()
            if name not in FOR_PROGRAMS
            and (enabled is None or name in enabled | ALWAYS)
        )


FOR_PROGRAMS = frozenset({"wrap_output", "wrap_input", "keep_fds", "tool_schemas"})
"""Calls of the program around a model; the model does not see them."""

ALWAYS = FOR_PROGRAMS | {"fd_info", "list_fds"}
"""Calls that are not listed: they give nothing that the caller does not have."""


def _lines_source(fd: LlmFd, span: Span) -> str:
    return f"{fd.id} lines {lines_of(fd, span)}"


def _failure(
    why: FdError, kwargs: Mapping[str, object], args: tuple[object, ...]
) -> bytes:
    fd = why.fd
    if not fd:
        asked = kwargs.get("fd", args[0] if args else None)
        if isinstance(asked, str) and asked.startswith(("fd:", "fd-")):
            fd = asked[:MOST_SAID_CHARS].replace("fd-", "fd:", 1)
    return fdxml.failure(why.kind, fd, why.message, why.details)
