"""One LLM_CHAT, from its four parts to its reply (spec L2-L7, L10, L11).

1. A straight line: read the request, check it, open the outputs, call, write, reply.
2. Files are opened with the child's own rights and in its effective view (spec L3, L4).
   Outputs are opened before the call, so that one that cannot be written costs no call.
3. Worker threads read, write and close files, and decode, join and encode long texts;
   names are counted before they are listed (attack 43).
4. The memory of a text is reserved before it is decoded (attack 42).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Self

import trio

from hostlib.footprint import message_bytes
from hostlib.threads import LARGE_BYTES, in_thread, in_thread_if
from protocol import echo, error, invalid, limits
from supervisor.fsproxy.ports import INLINE_BYTES, LEAVE_S, TEXT_FORMS
from supervisor.fsproxy.replies import UNAVAILABLE, denied, no_memory_error, reason
from supervisor.llm.conversations import (
    ChosenPreset,
    ConversationTurn,
    KeptError,
    user_text,
)
from supervisor.llm.gateway import FailedCallError
from supervisor.llm.presets import DEFAULT_PRESET
from supervisor.llm.quota import QuotaError
from vfs import names
from vfs.errors import AccessDeniedError, UnavailableError
from vfs.filesystem import KEPT_WORD
from vfs.places import PUBLISH_ON_CLOSE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supervisor.fsproxy.ports import Caller
    from supervisor.llm.conversations import Dialogues
    from supervisor.llm.gateway import Call, Completion
    from supervisor.llm.models import Models
    from vfs.clients import OpenFile
    from vfs.payload import MemoryReservation

MAX_INPUT_BYTES = 8 * 1024 * 1024
"""Most text of input files in one call (spec L3)."""

MOST_NAME_BYTES = 100
"""Longest name of a conversation."""

MOST_PRESET_BYTES = 4096
"""Longest preset, with the name of its conversation, that is looked up."""

MOST_NAMES = 10_000
"""Most names of input files, and of output files: opening this many takes some tenths of a
second."""

SHIELD_S = 5.0
"""How long files are written and removed for a client that is gone; one that waits gets
all of them."""

NO_PROMPT = error(b"invalid prompt encoding")
NO_INPUTS = error(b"failed to read input files data")
NO_OUTPUTS = error(b"failed to read output files data")
EXCEEDED = error(b"quota exceeded: cannot make LLM call")


class ChatRefusedError(Exception):
    """An LLM_CHAT is refused; ``reply`` is the reply line."""

    def __init__(self, reply: bytes) -> None:
        super().__init__(reply)
        self.reply = reply


async def answer(
    caller: Caller,
    models: Models,
    dialogues: Dialogues,
    claim: bool,
    parts: tuple[bytes, ...],
) -> bytes | None:
    """Answer one LLM_CHAT.

    Args:
        caller: the client and its session.
        models: the host's models.
        dialogues: conversations, and answers with tools.
        claim: the effective view, for which the caller has the right.
        parts: input files, output files, prompt, preset.

    Returns:
        The reply; None if its client is gone.
    """
    inputs, outputs, prompt_data, preset = parts
    client, memory = caller.client, caller.reserved_memory()
    reply: bytes | None = None
    async with Outputs(caller, claim=claim) as opened:
        try:
            with caller.while_connected(LEAVE_S):
                # No call begins for a client that is gone (spec L10).
                await trio.lowlevel.checkpoint_if_cancelled()
                prompt = await _decode(memory, prompt_data, NO_PROMPT, TEXT_FORMS)
                chosen = _resolve_preset(models, prompt, preset)
                files = await _read_inputs(caller, memory, inputs, claim=claim)
                await opened.open(await _names(outputs, NO_OUTPUTS))
                turn = ConversationTurn(client, claim, chosen, prompt, files)
                # A loop with tools, or a conversation.
                if chosen.has_tools or chosen.conversation:
                    completion = await dialogues.answer(turn)
                else:
                    completion = await models.gateway.complete(
                        await _call(models, turn)
                    )
                await _write(memory, opened, completion)
                status = models.accounts.node_of(client).status_text().encode()
                data = completion.data
                reply = b"OK %d %b\n%b" % (len(data), status, data)
        except ChatRefusedError as why:
            reply = why.reply
        except QuotaError:
            reply = EXCEEDED
        except KeptError as why:
            reply = invalid(
                "preset", preset[:MOST_NAME_BYTES] + b": " + str(why).encode()
            )
        except FailedCallError as why:
            reply = error(b"OpenAI API call failed: " + echo(why.reason.encode()))
        except BlockingIOError as why:  # no thread can be started
            reply = error(b"OpenAI API call failed: " + reason(why))
    return reply


def _reserve(memory: MemoryReservation, size_bytes: int) -> None:
    try:
        memory.raise_to(memory.size_bytes + size_bytes)
    except OSError as why:
        raise ChatRefusedError(no_memory_error(why)) from None


async def _decode(
    memory: MemoryReservation, data: bytes, refusal: bytes, forms: int = 0
) -> str:
    """Return bytes of the user as text, after reserving memory for it.

    Args:
        memory: the reservation of the request.
        data: the bytes.
        refusal: the reply if they are no text.
        forms: copies of the text for which memory is reserved already.

    Raises:
        ChatRefusedError: they are no text, or there is no memory for it.
    """
    is_long = len(data) > LARGE_BYTES
    size_bytes = await in_thread_if(is_long, message_bytes, data)
    _reserve(memory, size_bytes - forms * len(data))
    try:
        return await in_thread_if(is_long, data.decode)
    except UnicodeDecodeError:
        raise ChatRefusedError(refusal) from None


async def _names(text: bytes, refusal: bytes) -> list[bytes]:
    """Return names as ``_names_in``, in a worker thread if there may be many."""
    return await in_thread_if(len(text) > INLINE_BYTES, _names_in, text, refusal)


def _names_in(text: bytes, refusal: bytes) -> list[bytes]:
    """Return the names in lines, without ``-``, which is the child's own stream.

    Raises:
        ChatRefusedError: there are more lines than ``MOST_NAMES``, or one is no file's name.
    """
    if text.count(b"\n") > MOST_NAMES:  # count before listing: 8 MiB took 0.4 s
        raise ChatRefusedError(refusal)
    names = [name for name in text.split(b"\n") if name and name != b"-"]
    if len(names) > MOST_NAMES:  # the last line may have no LF
        raise ChatRefusedError(refusal)
    if any(len(name) > limits.MAX_LINE_BYTES for name in names):
        raise ChatRefusedError(refusal)
    return names


def _resolve_preset(models: Models, prompt: str, preset: bytes) -> ChosenPreset:
    """Return the preset that a request names, and its conversation (spec L5)."""
    if not preset and prompt:
        return ChosenPreset()
    if len(preset) > MOST_PRESET_BYTES:
        raise ChatRefusedError(invalid("preset", preset))
    text = preset.decode(errors="surrogateescape") or DEFAULT_PRESET
    program, at, name = text.partition("@")
    system = models.presets.get(program)
    if system is None or (at and not _is_name(name)):
        raise ChatRefusedError(invalid("preset", preset))
    return ChosenPreset(program, system, models.has_tools(program), name)


def _is_name(name: str) -> bool:
    """Return whether a text may name a conversation."""
    return name.isprintable() and 0 < len(name.encode()) <= MOST_NAME_BYTES


async def _call(models: Models, turn: ConversationTurn) -> Call:
    """Return the call for a turn that ends with its answer."""
    is_long = turn.size_chars > LARGE_BYTES
    text, size_bytes = await in_thread_if(
        is_long, _user_message, turn.prompt, turn.files
    )
    messages = []
    system = turn.preset.system
    if turn.preset.name:
        messages.append({"role": "system", "content": system})
    if text:
        messages.append({"role": "user", "content": text})
    size_bytes += len(system.encode())
    return models.call(turn.client, messages, claim=turn.claim, size_bytes=size_bytes)


def _user_message(prompt: str, files: tuple[tuple[str, str], ...]) -> tuple[str, int]:
    """Return the user's message, and its size in bytes."""
    text = user_text(prompt, files)
    return text, len(text.encode())


async def _read_inputs(
    caller: Caller, memory: MemoryReservation, text: bytes, *, claim: bool
) -> tuple[tuple[str, str], ...]:
    """Return (name, content) of the input files (spec L3)."""
    found = []
    left = MAX_INPUT_BYTES
    for name in await _names(text, NO_INPUTS):
        data = await _read_input(caller, memory, name, left, claim=claim)
        left -= len(data)
        content = await _decode(memory, data, NO_INPUTS)
        found.append((name.decode(errors="replace"), content))
    return tuple(found)


async def _read_input(
    caller: Caller, memory: MemoryReservation, name: bytes, most: int, *, claim: bool
) -> bytes:
    fs, client = caller.fs, caller.client
    try:
        if client.policy.is_distant and not claim:
            await names.wait_reachable(client, name)
        file = fs.open(client, name, b"r", claim)
    except AccessDeniedError:
        denied(caller, "LLM_CHAT", name)
        raise ChatRefusedError(NO_INPUTS) from None
    except (UnavailableError, OSError):
        raise ChatRefusedError(NO_INPUTS) from None
    try:
        try:
            _reserve(memory, min(file.handle.size(), most))
            data = await in_thread(_read_all, file, most, share=client.ledger.threads)
        finally:
            await fs.close_waiting(file)
    except OSError:
        raise ChatRefusedError(NO_INPUTS) from None
    if len(data) > most:
        raise ChatRefusedError(NO_INPUTS)
    return data


def _read_all(file: OpenFile, most: int) -> bytes:
    """Read a file to its end, or to one byte beyond the bound."""
    pieces = []
    left = most + 1
    while left and (piece := file.read_wait(min(left, 1 << 20))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


async def _write(
    memory: MemoryReservation, opened: Outputs, completion: Completion
) -> None:
    """Write the outputs; not cancelled for ``SHIELD_S``, for the call is paid."""
    try:
        memory.add(2 * len(completion.data))
    except OSError as why:
        raise ChatRefusedError(no_memory_error(why)) from None
    with trio.CancelScope(shield=True) as scope:
        text = completion.text
        is_long = len(text) > LARGE_BYTES
        await opened.write(await in_thread_if(is_long, text.encode), scope)


class Outputs:
    """The output files of one call, opened before it and written after it (spec L4).

    A file that is published on close is opened again, staged, for writing: a reader sees
    the old content or the complete new one (spec A3b).  If nothing is written, a file that
    was made by the first open is removed.

    Args:
        caller: the client and its session.
        claim: the effective view.
    """

    def __init__(self, caller: Caller, *, claim: bool) -> None:
        self._caller = caller
        self._claim = claim
        self._files: list[OpenFile] = []
        self._made: list[tuple[bytes, tuple[int, int]]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        until = trio.current_time() + SHIELD_S
        with trio.CancelScope(shield=True) as scope:
            for file in self._files:
                if file.fileno in self._caller.client.files:
                    with suppress(OSError):  # the file is closed in any case
                        await self._caller.fs.abandon_waiting(file)
                scope.shield = trio.current_time() < until
            for name, identity in self._made:
                await self._remove(name, identity)
                scope.shield = trio.current_time() < until

    async def open(self, names: Iterable[bytes]) -> None:
        """Open every file without changing it.

        Raises:
            ChatRefusedError: a file cannot be opened.
        """
        for name in names:
            self._files.append(await self._open(name))
            await trio.lowlevel.checkpoint()

    async def _open(self, name: bytes) -> OpenFile:
        caller = self._caller
        fs, client = caller.fs, caller.client
        try:
            if client.policy.is_distant and not self._claim:
                await names.wait_reachable(client, name)
            try:
                return fs.open(client, name, KEPT_WORD, self._claim)
            except FileNotFoundError:
                file = await fs.open_waiting(client, name, b"a", self._claim)
                if not file.handle.size():
                    self._made.append((name, file.handle.identity()))
                return file
        except AccessDeniedError:
            raise ChatRefusedError(denied(caller, "LLM_CHAT", name)) from None
        except UnavailableError:
            raise ChatRefusedError(UNAVAILABLE) from None
        except OSError as why:
            text = b"failed to open file '" + echo(name) + b"': " + reason(why)
            raise ChatRefusedError(error(text)) from None

    async def write(self, data: bytes, scope: trio.CancelScope) -> None:
        """Write the answer into every file, and close it.

        Args:
            data: the answer.
            scope: a shield, which ends after ``SHIELD_S``.

        Raises:
            ChatRefusedError: a file could not be written; earlier ones are written.
        """
        until = trio.current_time() + SHIELD_S
        self._made.clear()  # from here on new files stay
        try:
            for file in tuple(self._files):
                await self._write(file, data)
                scope.shield = trio.current_time() < until
        except OSError as why:
            raise ChatRefusedError(error(b"failed to write: " + reason(why))) from None
        except (AccessDeniedError, UnavailableError):
            raise ChatRefusedError(UNAVAILABLE) from None

    async def _write(self, file: OpenFile, data: bytes) -> None:
        fs = self._caller.fs
        place = file.place
        if place is not None and place.publish == PUBLISH_ON_CLOSE:
            await fs.abandon_waiting(file)
            client = self._caller.client
            file = await fs.open_waiting(client, file.name, b"w", self._claim)
            self._files.append(file)
        else:
            await fs.truncate_waiting(file, 0)
        await fs.write_waiting(file, data)
        await fs.close_waiting(file)

    async def _remove(self, name: bytes, identity: tuple[int, int]) -> None:
        fs, client = self._caller.fs, self._caller.client
        try:
            file = fs.open(client, name, KEPT_WORD, self._claim)
            mine = file.handle.identity() == identity and not file.handle.size()
            await fs.close_waiting(file)
            if mine:
                await names.remove_waiting(client, name, claim=self._claim)
        except (OSError, AccessDeniedError, UnavailableError):
            return  # it was removed, or cannot be reached any more
