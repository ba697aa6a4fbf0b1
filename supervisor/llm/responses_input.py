"""A conversation of the Responses API as messages of Chat Completions (spec MD2).

Rules of this file.

1. Responses has a list of items; Chat has messages.  The text and the calls of one answer
   are one message, and the results of its calls follow it directly: a provider refuses a
   call whose result stands elsewhere.
2. Ids, states and annotations of an answer are no part of the conversation, and dropped.
   Everything else is translated, or refused by name.
3. Texts are joined once, at the end: time is in proportion to the request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import msgspec

from supervisor.llm.translation import (
    GAP,
    UntranslatableError,
    file_part,
    image_part,
    join_parts,
    no_form,
    objects_in,
    optional,
    place,
    refuse_unknown,
    required,
    text_part,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hostlib.documents import Object

CUSTOM_INPUT = "input"
"""The one parameter of a function that replaces a tool of type ``custom``."""

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Names of functions that Chat Completions accepts."""

_OF_ANSWERS = frozenset({"type", "id", "status", "annotations", "logprobs"})
"""Fields of an answer that are dropped (rule 2)."""

_MESSAGE = _OF_ANSWERS | {"role", "content", "phase"}
_CALL = _OF_ANSWERS | {"call_id", "name", "namespace", "arguments"}
_CUSTOM_CALL = _OF_ANSWERS | {"call_id", "name", "namespace", "input"}
_RESULT = _OF_ANSWERS | {"call_id", "name", "namespace", "output"}
_TEXT = _OF_ANSWERS | {"text"}
"""Known fields of a text."""

_TEXT_PARTS = frozenset({"input_text", "output_text"})


def chat_name(namespace: str | None, name: str, where: str) -> str:
    """Return the name that a function has in Chat Completions.

    Args:
        namespace: its namespace; None for none.
        name: its name there.
        where: the place of the name in the request.

    Raises:
        UntranslatableError: Chat does not accept the name.
    """
    found = name if namespace is None else f"{namespace}__{name}"
    if _NAME.fullmatch(found) is None:
        reason = f"a function's name is 1 to 64 of a-z A-Z 0-9 _ -, not {found[:70]!r}"
        raise UntranslatableError(where, reason)
    return found


@dataclass(slots=True)
class _Turn:
    """One message, and the results of its calls.

    Attributes:
        role: role of the message.
        texts: its texts, joined at the end; for a user, see ``content``.
        content: content of a user's message.
        refusal: refusal of an assistant's message.
        calls: the assistant's calls of functions.
        results: messages with the results of the calls.
        shown: images and files of results, for a user's message: Chat does not take them
            in a result.
    """

    role: str
    texts: list[str] = field(default_factory=list)
    content: str | list[Object] = ""
    refusal: str | None = None
    calls: list[Object] = field(default_factory=list)
    results: list[Object] = field(default_factory=list)
    shown: list[Object] = field(default_factory=list)

    def messages(self) -> list[Object]:
        """Return the turn as messages of Chat Completions."""
        message: Object = {"role": self.role, "content": self.content}
        if self.role != "user":
            message["content"] = GAP.join(self.texts) if self.texts else None
        if self.refusal is not None:
            message["refusal"] = self.refusal
        if self.calls:
            message["tool_calls"] = self.calls
        found = [message, *self.results]
        if self.shown:
            found.append({"role": "user", "content": self.shown})
        return found


class ChatMessages:
    """Chat messages, made of items of the Responses API.

    Attributes:
        dropped: names of fields that were left out, without repetition.
    """

    def __init__(self) -> None:
        self.dropped: dict[str, None] = {}
        self._turns: list[_Turn] = []
        self._turn_of_call: dict[str, _Turn] = {}

    def messages(self) -> list[Object]:
        """Return all messages, in order."""
        return [message for turn in self._turns for message in turn.messages()]

    def add_system(self, text: str) -> None:
        """Add a text to the system message before it, or as a new one.

        Many chat templates take one system message only, as the first.
        """
        if not self._turns or self._turns[-1].role != "system":
            self._turns.append(_Turn("system"))
        self._turns[-1].texts.append(text)

    def add_user(self, content: str | list[Object]) -> None:
        """Add a user's message."""
        self._turns.append(_Turn("user", content=content))

    def add_item(self, item: object, where: str) -> None:
        """Add an item of a request's ``input``.

        Args:
            item: the item, as it was decoded.
            where: its place in the request.

        Raises:
            UntranslatableError: Chat has no form for it.
        """
        if not isinstance(item, dict):
            raise UntranslatableError(where, "an object is needed")
        is_message = item.get("type") is None and "role" in item
        kind = "message" if is_message else required(item, "type", str, where)
        add = self._ADDERS.get(kind)
        if add is None:
            raise no_form(kind, where)
        add(self, item, where)

    # One method for each kind of item

    def _add_message(self, item: Object, where: str) -> None:
        refuse_unknown(item, _MESSAGE, where)
        role = required(item, "role", str, where)
        if role not in {"user", "assistant", "system", "developer"}:
            raise UntranslatableError(place(where, "role"), "there is no such role")
        if item.get("phase") is not None:
            self.dropped["input.phase"] = None
        content = item.get("content")
        at = place(where, "content")
        if role == "assistant":
            self._add_said(content, at)
        elif role == "user":
            self.add_user(
                content if isinstance(content, str) else join_parts(_parts(content, at))
            )
        else:
            self.add_system(_text(content, at))

    def _add_said(self, content: object, where: str) -> None:
        """Add a text of the assistant to its turn, or as a new one."""
        texts, refusals = _said(content, where)
        last = self._open_turn()
        # Two texts without a call between them are two answers.
        turn = last if last is not None and last.calls else self._begin_turn()
        if texts or not refusals:
            turn.texts.append("".join(texts))
        if refusals:
            turn.refusal = "".join(refusals)

    def _add_call(self, item: Object, where: str) -> None:
        refuse_unknown(item, _CALL, where)
        self._call(item, required(item, "arguments", str, where), where)

    def _add_custom_call(self, item: Object, where: str) -> None:
        refuse_unknown(item, _CUSTOM_CALL, where)
        arguments = {CUSTOM_INPUT: required(item, "input", str, where)}
        self._call(item, msgspec.json.encode(arguments).decode(), where)

    def _call(self, item: Object, arguments: str, where: str) -> None:
        name = chat_name(
            optional(item, "namespace", str, where),
            required(item, "name", str, where),
            place(where, "name"),
        )
        call_id = required(item, "call_id", str, where)
        turn = self._open_turn() or self._begin_turn()
        function = {"name": name, "arguments": arguments}
        turn.calls.append({"id": call_id, "type": "function", "function": function})
        self._turn_of_call[call_id] = turn

    def _add_result(self, item: Object, where: str) -> None:
        refuse_unknown(item, _RESULT, where)
        call_id = required(item, "call_id", str, where)
        turn = self._turn_of_call.get(call_id)
        if turn is None:
            reason = "no call before it has this id"
            raise UntranslatableError(place(where, "call_id"), reason)
        output = item.get("output")
        if not isinstance(output, str):
            parts = _parts(output, place(where, "output"))
            output = join_parts([part for part in parts if part["type"] == "text"])
            if shown := [part for part in parts if part["type"] != "text"]:
                said = f"What the call {call_id} returned:"
                turn.shown += [text_part(said), *shown]
                output = output or "See what follows."
        turn.results.append(
            {"role": "tool", "tool_call_id": call_id, "content": output}
        )

    def _drop_reasoning(self, _item: Object, _where: str) -> None:
        self.dropped["input.reasoning"] = None

    def _open_turn(self) -> _Turn | None:
        """Return the assistant's unfinished turn; None once it has a result."""
        if not self._turns:
            return None
        last = self._turns[-1]
        return last if last.role == "assistant" and not last.results else None

    def _begin_turn(self) -> _Turn:
        turn = _Turn("assistant")
        self._turns.append(turn)
        return turn

    _ADDERS: ClassVar[dict[str, Callable[[ChatMessages, Object, str], None]]] = {
        "message": _add_message,
        "function_call": _add_call,
        "function_call_output": _add_result,
        "custom_tool_call": _add_custom_call,
        "custom_tool_call_output": _add_result,
        "reasoning": _drop_reasoning,
    }


def _parts(content: object, where: str) -> list[Object]:
    """Return texts, images and files as parts of a message of Chat Completions."""
    return [_part(part, at) for part, at in _each(content, where)]


def _part(part: Object, where: str) -> Object:
    kind = required(part, "type", str, where)
    if kind in _TEXT_PARTS:
        return text_part(_text_of(part, where))
    if kind == "input_image":
        return _image(part, where)
    if kind == "input_file":
        return _file(part, where)
    raise no_form(kind, where)


def _image(part: Object, where: str) -> Object:
    refuse_unknown(part, {"type", "image_url", "detail"}, where)
    address = required(part, "image_url", str, where)
    found = image_part(address, place(where, "image_url"))
    if (detail := optional(part, "detail", str, where)) is not None:
        found["image_url"]["detail"] = detail
    return found


def _file(part: Object, where: str) -> Object:
    refuse_unknown(part, {"type", "filename", "file_data"}, where)
    data = required(part, "file_data", str, where)
    name = optional(part, "filename", str, where)
    return file_part(data, name or "file", place(where, "file_data"))


def _text(content: object, where: str) -> str:
    """Return a content that must be text."""
    if isinstance(content, str):
        return content
    texts = []
    for part, at in _each(content, where):
        kind = required(part, "type", str, at)
        if kind not in _TEXT_PARTS:
            raise no_form(kind, at)
        texts.append(_text_of(part, at))
    return GAP.join(texts)


def _said(content: object, where: str) -> tuple[list[str], list[str]]:
    """Return the texts and the refusals of an assistant's message."""
    if isinstance(content, str):
        return [content], []
    texts: list[str] = []
    refusals: list[str] = []
    for part, at in _each(content, where):
        kind = required(part, "type", str, at)
        if kind == "refusal":
            refuse_unknown(part, {"type", "refusal"}, at)
            refusals.append(required(part, "refusal", str, at))
        elif kind in _TEXT_PARTS:
            texts.append(_text_of(part, at))
        else:
            raise no_form(kind, at)
    return texts, refusals


def _text_of(part: Object, where: str) -> str:
    refuse_unknown(part, _TEXT, where)
    return required(part, "text", str, where)


def _each(content: object, where: str) -> Iterator[tuple[Object, str]]:
    """Yield the parts of a content with their places."""
    if not isinstance(content, list):
        raise UntranslatableError(where, "a text or a list of parts is needed")
    yield from objects_in(content, where)
