"""Conversations kept in the host; the tools fork, spawn and summarize.

Rules of this file.

1. A conversation is a process: messages and descriptors as one. It is made for one
   LLM_CHAT, or kept under a name (``PRESET@NAME``) until its client is gone.
2. Children run side by side, each under the quota of their client; the failure of one
   is its result and stops no other.
3. A spawn that names a missing thing fails before it starts.
"""

from __future__ import annotations

import errno
import os
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import trio

from protocol import fdxml
from supervisor.llm.conversations import NamedConversations
from supervisor.llmfd import FdError, Param, Tool
from supervisor.llmfd.arguments import FDS, STRING, STRINGS
from supervisor.llmfd.calls.wrapping import describe_excess, wrap
from supervisor.llmfd.errors import FILE_OPERATION, INVALID_PARAMETER, NOT_FOUND
from supervisor.llmfd.preloads import Preloads
from supervisor.llmfd.table import number_of
from supervisor.llmfd.threads import in_thread
from supervisor.llmfd.toolloop import (
    ModelError,
    ToolLoop,
    drop_descriptors,
    find_unanswered,
    size_of,
    summarize_within,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.llm.conversations import ConversationTurn
    from supervisor.llmfd import Json, Process
    from supervisor.llmfd.service import FdService
    from supervisor.llmfd.toolloop import LoopModel, Message, ModelReply
    from vfs.clients import Client

MOST_PROMPTS = 10
"""Most children of one fork."""

MOST_DEPTH = 4
"""Most levels of forks and spawns."""

SUMMARY_S = 60.0
"""Longest wait of ``summarize_fd``."""


class Conversations:
    """The conversations of a host's clients.

    Args:
        service: the LLM fds.
        model: answers.

    Attributes:
        loop: asks the model and does its calls.
        kept: conversations under names.
    """

    def __init__(self, service: FdService, model: LoopModel) -> None:
        self.loop = ToolLoop(model)
        self._service = service
        self.kept: NamedConversations[Process] = NamedConversations()
        for tool in self._tools():
            service.tools[tool.name] = tool
        service.summarizer = self.loop
        service.kept = self.kept
        service.gone_hooks.append(self.client_gone)

    async def answer(self, turn: ConversationTurn) -> ModelReply:
        """Answer a client.

        Raises:
            ModelError: there is no answer; the conversation is unchanged, apart from
                the effects of tools.
            KeptError: there is no room for the conversation.
        """
        client, preset, name = turn.client, turn.preset, turn.preset.conversation
        if name:
            self.kept.check_room(client, name, turn.size_chars)
        process = self.conversation(client, name)
        process.claim = turn.claim
        self._service.give_files(process, client)
        is_kept = self.kept.find(client, name) is process
        try:
            with _restore_preset(process):
                await self.loop.begin(process, preset.name, has_tools=preset.has_tools)
                reply = await self.loop.ask(
                    process, turn.prompt, turn.files, has_tools=preset.has_tools
                )
            if name:
                self.kept.keep(client, name, process, size_of(process.messages))
                is_kept = True
            return reply
        finally:
            if not is_kept:
                process.close()

    def conversation(self, client: Client, name: str = "") -> Process:
        """Return a conversation of a client: the kept one, or a new one.

        A new one has the descriptors that the client has now.
        """
        process = self.kept.find(client, name) if name else None
        if process is None:
            process = self._service.process_of(client).fork()
            process.depth = 0
            process.messages = []
        return process

    def client_gone(self, client: Client) -> None:
        """Forget a client's conversations."""
        for process in self.kept.drop(client):
            process.close()

    # The tools

    def _tools(self) -> tuple[Tool, ...]:
        return (
            Tool(
                "fork",
                "Continue in up to 10 copies of this conversation at once, one for each"
                " prompt; each has all file descriptors. Their answers come back.",
                (Param("prompts", STRINGS, "What each copy is to do", required=True),),
                self.fork,
                is_async=True,
            ),
            Tool(
                "spawn",
                "Ask another program; it sees only what is preloaded for it.",
                (
                    Param("program", STRING, "Name of the program", required=True),
                    Param("query", STRING, "What it is to do", required=True),
                    Param(
                        "additional_preload_fds",
                        FDS,
                        "File descriptors it sees: ids, or {fd, start_line, end_line}",
                    ),
                    Param("additional_preload_files", STRINGS, "Files it sees"),
                    Param("additional_preload_temp_files", STRINGS, "Temporary files"),
                ),
                self.spawn,
                is_async=True,
            ),
            Tool(
                "summarize_fd",
                "Have a summary of a file descriptor made.",
                (
                    Param("fd", STRING, "Descriptor, as in fd:1"),
                    Param("name", STRING, "Name of the descriptor, in place of fd"),
                ),
                self.summarize,
                is_async=True,
            ),
        )

    async def fork(self, process: Process, *, prompts: list[str]) -> bytes:
        """Answer each prompt in a copy of the process."""
        if not 1 <= len(prompts) <= MOST_PROMPTS:
            text = f"Give 1 to {MOST_PROMPTS} prompts"
            raise FdError(INVALID_PARAMETER, text)
        _check_depth(process)
        with _copies(process, len(prompts)):
            answers = await self._answer_copies(process, prompts)
        rows = [
            await self._child_xml(process, number, is_good, text)
            for number, (is_good, text) in enumerate(answers, 1)
        ]
        return fdxml.listing("fork_result", (("children", len(rows)),), rows)

    async def _answer_copies(
        self, process: Process, prompts: list[str]
    ) -> list[tuple[bool, str]]:
        children: list[Process] = []
        answers: list[tuple[bool, str]] = [(False, "not run")] * len(prompts)
        try:
            for _ in prompts:
                children.append(process.fork())
                await trio.lowlevel.checkpoint()  # each may have many descriptors
            async with trio.open_nursery() as nursery:
                for number, child in enumerate(children):
                    await self.loop.begin(child, child.program)
                    await self._open_branch(child, number + 1)
                    nursery.start_soon(
                        self._run, child, prompts[number], answers, number
                    )
        finally:
            for child in children:
                child.close()
        return answers

    async def _open_branch(self, child: Process, number: int) -> None:
        """Answer the calls that are open at the place of the copy."""
        for call_id in find_unanswered(child.messages):
            text = f"You are copy {number}. Do what the user says next."
            message: Message = {
                "role": "tool",
                "tool_call_id": call_id,
                "content": text,
            }
            await self.loop.say(child, message)

    async def _run(
        self,
        child: Process,
        prompt: str,
        answers: list[tuple[bool, str]],
        number: int,
    ) -> None:
        try:
            answers[number] = (True, (await self.loop.ask(child, prompt)).text)
        except ModelError as why:
            answers[number] = (False, str(why))
        except OSError as why:  # no thread can be started
            answers[number] = (False, os.strerror(why.errno or errno.EIO))

    async def _child_xml(
        self, process: Process, number: int, is_good: bool, text: str
    ) -> bytes:
        settings = process.shared.settings
        limit = settings.max_output
        answer = text.encode("utf-8", "replace")
        if len(text) > limit:
            message = describe_excess(limit)
            try:
                content = await in_thread(
                    process.shared.store.put, answer, share=process.threads
                )
                answer = wrap(process, content, f"child:{number}", limit, message)
            except FdError as why:  # rule 2: the others were asked and paid for
                is_good = False
                answer = fdxml.failure(why.kind, why.fd, why.message, why.details)
        attributes = (("index", number), ("success", is_good))
        return fdxml.text_element("child", attributes, answer, raw=settings.raw)

    async def spawn(
        self,
        process: Process,
        *,
        program: str,
        query: str,
        additional_preload_fds: list[Json] | None = None,
        additional_preload_files: list[str] | None = None,
        additional_preload_temp_files: list[str] | None = None,
    ) -> bytes:
        """Answer a query with another program and only the named preloads."""
        if self.loop.model.system(program) is None:
            raise FdError(NOT_FOUND, f"Program {program} not found")
        _check_depth(process)
        with _copies(process, 1), closing(process.spawn()) as child:
            preloads = Preloads(process, child)
            await preloads.add_fds(additional_preload_fds or ())
            await preloads.add_temp_files(additional_preload_temp_files or ())
            await preloads.add_files(additional_preload_files or ())
            await self.loop.begin(child, program, "\n".join(preloads.shown))
            answers = [(False, "not run")]
            await self._run(child, query, answers, 0)
        row = await self._child_xml(process, 1, *answers[0])
        return fdxml.listing("spawn_result", (("program", program),), (row,))

    async def summarize(
        self, process: Process, *, fd: str | None = None, name: str | None = None
    ) -> bytes:
        """Return a summary, or say that there is none."""
        found = process.table.find(fd, name)
        if found.is_binary:
            text = "Binary content cannot be summarized"
            raise FdError(INVALID_PARAMETER, text, fd=found.id)
        summary = await summarize_within(SUMMARY_S, self.loop, process, found)
        attributes = (("fd", found.id), ("available", bool(summary)))
        if not summary:
            return fdxml.empty("fd_summary", attributes)
        data = summary.encode("utf-8", "replace")
        return fdxml.text_element("fd_summary", attributes, data)


@contextmanager
def _restore_preset(process: Process) -> Iterator[None]:
    """Restore the preset of a conversation if a turn fails."""
    messages, system, program = process.messages, process.messages[:1], process.program
    number = process.table.next_number
    try:
        yield
    except BaseException:
        if program and process.messages is messages:
            messages[:1] = system
            process.program = program
            drop_descriptors(process, number)
        raise
    if system and process.messages is messages and messages[0] is not system[0]:
        gone = number_of(str(system[0].get("fd", "")))
        process.table.drop([gone] if gone in process.table.fds else [])


@contextmanager
def _copies(process: Process, count: int) -> Iterator[None]:
    """Count copies of a conversation, and their connections to the model.

    Raises:
        FdError: there are too many.
    """
    copies = process.shared.copies
    if not copies.charge(count):
        text = f"Cannot copy the conversation: {os.strerror(errno.EMFILE)}"
        details = f"{copies.used} copies are at work, of {copies.limit} at most"
        if count <= copies.left:  # so the host refused it
            details = "The host has too few descriptors left for it"
        raise FdError(FILE_OPERATION, text, details)
    try:
        yield
    finally:
        copies.record(-count)


def _check_depth(process: Process) -> None:
    if process.depth >= MOST_DEPTH:
        text = f"No more than {MOST_DEPTH} forks and spawns within each other"
        raise FdError(INVALID_PARAMETER, text)
