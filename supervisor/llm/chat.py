"""One LLM_CHAT, from its four parts to its reply (spec L2-L7, L10, L11).

Rules of this file.

1. A straight line: read the request, check it, open the outputs, call, write, reply.
2. Files are opened with the child's own rights and in its effective view (spec L3, L4).
3. Worker threads read and write files, and decode, join and encode long texts; names are
   counted before they are listed (attack 43).
4. The memory of a text is reserved before it is decoded (attack 42).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from hostlib.footprint import message_bytes
from hostlib.threads import in_thread
from protocol import echo, error, invalid, limits
from supervisor.fsproxy.handlers.llm import CHAT_FORMS, INLINE_BYTES, LEAVE_S
from supervisor.fsproxy.replies import denied, no_memory_error
from supervisor.llm.conversations import KeptError, Turn, user_text
from supervisor.llm.gateway import LARGE_BYTES, FailedCallError
from supervisor.llm.outputs import Outputs, RefusedError
from supervisor.llm.presets import DEFAULT_PRESET
from supervisor.llm.quota import QuotaError
from vfs import names
from vfs.errors import AccessDeniedError, UnavailableError

if TYPE_CHECKING:
    from supervisor.fsproxy.ports import Caller
    from supervisor.llm.conversations import Dialogues
    from supervisor.llm.gateway import Completion
    from supervisor.llm.models import Models
    from vfs.filesystem import OpenFile

MAX_INPUT_BYTES = 8 * 1024 * 1024
"""Most text of input files in one call (spec L3)."""

MOST_NAME_BYTES = 100
"""Longest name of a conversation."""

MOST_PRESET_BYTES = 4096
"""Longest preset, with the name of its conversation, that is looked up."""

MOST_NAMES = 10_000
"""Most names of input files, and of output files: opening this many takes some tenths of a
second."""

NO_INPUTS = error(b"failed to read input files data")
NO_OUTPUTS = error(b"failed to read output files data")
EXCEEDED = error(b"quota exceeded: cannot make LLM call")


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
    reply: bytes | None = None
    async with Outputs(caller, claim=claim) as opened:
        try:
            with caller.while_connected(LEAVE_S):
                # No call begins for a client that is gone (spec L10).
                await trio.lowlevel.checkpoint_if_cancelled()
                try:
                    prompt = await _decode(caller, prompt_data, CHAT_FORMS - 2)
                except UnicodeDecodeError:
                    raise RefusedError(error(b"invalid prompt encoding")) from None
                chosen = _resolve_preset(models, prompt, preset)
                files = await _read_inputs(caller, inputs, claim=claim)
                await opened.open(await _names(outputs, NO_OUTPUTS))
                said = (prompt, tuple(files))
                completion = await _ask(
                    caller, models, dialogues, chosen, said, claim=claim
                )
                reply = await _finish(caller, models, opened, completion)
        except RefusedError as why:
            reply = why.reply
        except QuotaError:
            reply = EXCEEDED
        except KeptError as why:
            reply = invalid(
                "preset", preset[:MOST_NAME_BYTES] + b": " + str(why).encode()
            )
        except FailedCallError as why:
            reply = error(b"OpenAI API call failed: " + echo(why.reason.encode()))
    return reply


async def _finish(
    caller: Caller, models: Models, opened: Outputs, completion: Completion
) -> bytes:
    """Write the outputs and return the reply; not cancelled, for the call is paid."""
    try:
        caller.reserved_memory().add(2 * len(completion.data))
    except OSError as why:
        raise RefusedError(no_memory_error(why)) from None
    with trio.CancelScope(shield=True):  # bounded: a few writes to files
        text = completion.text
        if len(text) > LARGE_BYTES:
            await opened.write(await in_thread(text.encode))
        else:
            await opened.write(text.encode())
    status = models.accounts.status_text(caller.client).encode()
    return b"OK %d %b\n%b" % (len(completion.data), status, completion.data)


def _reserve(caller: Caller, size_bytes: int) -> None:
    memory = caller.reserved_memory()
    try:
        memory.raise_to(memory.size_bytes + size_bytes)
    except OSError as why:
        raise RefusedError(no_memory_error(why)) from None


async def _decode(caller: Caller, data: bytes, forms: int = 0) -> str:
    """Return bytes of the user as text, after reserving memory for it.

    Args:
        caller: the client and its session.
        data: the bytes.
        forms: number of copies for which memory is reserved already.

    Raises:
        RefusedError: there is no memory for the text.
        UnicodeDecodeError: the bytes are no text.
    """
    if len(data) <= LARGE_BYTES:
        _reserve(caller, message_bytes(data) - forms * len(data))
        return data.decode()
    _reserve(caller, await in_thread(message_bytes, data) - forms * len(data))
    return await in_thread(data.decode)


async def _names(text: bytes, refusal: bytes) -> list[bytes]:
    """Return names as ``_names_in``, in a worker thread if there may be many."""
    if len(text) <= INLINE_BYTES:
        return _names_in(text, refusal)
    return await in_thread(_names_in, text, refusal)


def _names_in(text: bytes, refusal: bytes) -> list[bytes]:
    """Return the names in lines, without ``-``, which is the child's own stream.

    Raises:
        RefusedError: there are more lines than ``MOST_NAMES``, or one is no file's name.
    """
    if text.count(b"\n") > MOST_NAMES:  # count before listing: 8 MiB took 0.4 s
        raise RefusedError(refusal)
    names = [name for name in text.split(b"\n") if name and name != b"-"]
    if len(names) > MOST_NAMES:  # the last line may have no LF
        raise RefusedError(refusal)
    if any(len(name) > limits.MAX_LINE_BYTES for name in names):
        raise RefusedError(refusal)
    return names


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A resolved preset; ``program`` is None if the request names none."""

    program: str | None = None
    system: str = ""
    has_tools: bool = False
    name: str = ""


def _resolve_preset(models: Models, prompt: str, preset: bytes) -> _Chosen:
    """Return the system prompt and conversation of a preset (spec L5)."""
    if not preset and prompt:
        return _Chosen()
    if len(preset) > MOST_PRESET_BYTES:
        raise RefusedError(invalid("preset", preset))
    text = preset.decode(errors="surrogateescape") or DEFAULT_PRESET
    program, at, name = text.partition("@")
    system = models.presets.get(program)
    if system is None or (at and not _is_name(name)):
        raise RefusedError(invalid("preset", preset))
    return _Chosen(program, system, models.has_tools(program), name)


def _is_name(name: str) -> bool:
    """Return whether a text may name a conversation."""
    return name.isprintable() and 0 < len(name.encode()) <= MOST_NAME_BYTES


async def _ask(
    caller: Caller,
    models: Models,
    dialogues: Dialogues,
    chosen: _Chosen,
    said: tuple[str, tuple[tuple[str, str], ...]],
    *,
    claim: bool,
) -> Completion:
    """Return the model's last completion, after one call or a loop with tools (L7)."""
    if chosen.program is not None and (chosen.has_tools or chosen.name):
        system, has_tools = chosen.system, chosen.has_tools
        first = (caller.client, claim, chosen.program, system, has_tools, chosen.name)
        return await dialogues.answer(Turn(*first, *said))
    messages = []
    if chosen.program is not None:
        messages.append({"role": "system", "content": chosen.system})
    prompt, files = said
    if len(prompt) + sum(len(text) for _, text in files) > LARGE_BYTES:
        text, size = await in_thread(_user_message, prompt, files)
    else:
        text, size = _user_message(prompt, files)
    if text:
        messages.append({"role": "user", "content": text})
    size += len(chosen.system.encode())
    call = models.call(caller.client, messages, claim=claim, size_bytes=size)
    return await models.gateway.complete(call)


def _user_message(prompt: str, files: tuple[tuple[str, str], ...]) -> tuple[str, int]:
    """Return the user's message, and its size in bytes."""
    text = user_text(prompt, files)
    return text, len(text.encode())


async def _read_inputs(
    caller: Caller, text: bytes, *, claim: bool
) -> list[tuple[str, str]]:
    """Return (name, content) of the input files (spec L3)."""
    found = []
    left = MAX_INPUT_BYTES
    for name in await _names(text, NO_INPUTS):
        data = await _read_input(caller, name, left, claim=claim)
        left -= len(data)
        try:
            content = await _decode(caller, data)
        except UnicodeDecodeError:
            raise RefusedError(NO_INPUTS) from None
        found.append((name.decode(errors="replace"), content))
    return found


async def _read_input(caller: Caller, name: bytes, most: int, *, claim: bool) -> bytes:
    fs, client = caller.fs, caller.client
    try:
        if client.policy.is_distant and not claim:
            await names.wait_reachable(client, name)
        file = fs.open(client, name, b"r", claim)
    except AccessDeniedError:
        denied(caller, "LLM_CHAT", name)
        raise RefusedError(NO_INPUTS) from None
    except (UnavailableError, OSError):
        raise RefusedError(NO_INPUTS) from None
    try:
        try:
            _reserve(caller, min(file.handle.size(), most))
            data = await in_thread(_read_all, file, most, share=client.ledger.threads)
        finally:
            await fs.close_waiting(file)
    except OSError:
        raise RefusedError(NO_INPUTS) from None
    if len(data) > most:
        raise RefusedError(NO_INPUTS)
    return data


def _read_all(file: OpenFile, most: int) -> bytes:
    """Read a file to its end, or to one byte beyond the bound."""
    pieces = []
    left = most + 1
    while left and (piece := file.read_wait(min(left, 1 << 20))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
