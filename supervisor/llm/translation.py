"""A request of another API as a Chat Completions request, and its answer (spec MD2).

What the translations have in common: their result, the error of a request that has none,
how a field of a request is read, so that each error names it, and how one of an answer is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Container

    from supervisor.llm.pieces import Object

NO_FORM = "Chat Completions has no form for it"

GAP = "\n\n"
"""Between texts that become one message: not every provider takes a list of texts."""

Kind = TypeVar("Kind")

_KINDS: dict[type, str] = {
    str: "a text",
    dict: "an object",
    list: "a list",
    bool: "true or false",
    int: "a whole number",
}


class UntranslatableError(ValueError):
    """A request asks for something that Chat Completions has no form for.

    Attributes:
        field: where in the request, as in ``tools[2].type``.
        reason: why, in a few words.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


@dataclass(slots=True)
class Translation:
    """A request in the form of Chat Completions.

    Attributes:
        body: the request, without its model, its stream and its bound on the output.
        max_tokens: the bound on the output; None for none.
        dropped: names of fields that were left out because they change nothing.
        namespaced: (namespace, name) of each function that was renamed for one.
        custom: names of the functions that stand for tools of type ``custom``.
    """

    body: Object
    max_tokens: int | None = None
    dropped: tuple[str, ...] = ()
    namespaced: dict[str, tuple[str, str]] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()


def optional(
    owner: Object, name: str, kind: type[Kind], where: str = ""
) -> Kind | None:
    """Return a field of a request; None where it is absent or null.

    Args:
        owner: the object that has the field.
        name: the field.
        kind: its type; no other is taken, and a bool is no number.
        where: the object's own place in the request; empty for the request itself.

    Raises:
        UntranslatableError: it has another type.
    """
    value = owner.get(name)
    if value is not None and type(value) is not kind:
        raise UntranslatableError(place(where, name), f"{_KINDS[kind]} is needed")
    return value


def required(owner: Object, name: str, kind: type[Kind], where: str = "") -> Kind:
    """Return a field of a request that must be there, as ``optional`` does.

    Raises:
        UntranslatableError: it is absent, null or of another type.
    """
    value = optional(owner, name, kind, where)
    if value is None:
        raise UntranslatableError(place(where, name), f"{_KINDS[kind]} is needed")
    return value


def refuse_unknown(owner: Object, known: Container[str], where: str = "") -> None:
    """Raise if an object has a field that is not known and not null.

    Raises:
        UntranslatableError: it has one.
    """
    for name, value in owner.items():
        if value is not None and name not in known:
            raise UntranslatableError(place(where, name[:100]), NO_FORM)


def place(where: str, name: str) -> str:
    """Return the place of a field in a request."""
    return f"{where}.{name}" if where else name


# Messages of Chat Completions


def text_part(text: str) -> Object:
    """Return a text as a part of a message."""
    return {"type": "text", "text": text}


def image_part(address: str, where: str) -> Object:
    """Return an image as a part of a message.

    Args:
        address: of the image.
        where: the place of the address in the request.

    Raises:
        UntranslatableError: it may name something of the provider's own.
    """
    if not address.startswith(("data:", "https://", "http://")):
        reason = "the address of an image begins with data:, https: or http:"
        raise UntranslatableError(where, reason)
    return {"type": "image_url", "image_url": {"url": address}}


def file_part(data: str, filename: str, where: str) -> Object:
    """Return a file that comes with a request as a part of a message.

    Args:
        data: the file, as an address that holds it.
        filename: its name.
        where: the place of the data in the request.

    Raises:
        UntranslatableError: it is elsewhere, and the provider would have to fetch it.
    """
    if not data.startswith("data:"):
        raise UntranslatableError(where, "a file begins with data:")
    return {"type": "file", "file": {"filename": filename, "file_data": data}}


def plain(parts: list[Object]) -> str | list[Object]:
    """Return parts as one text if they are nothing else: every provider takes that."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return GAP.join(part["text"] for part in parts)


# Answers of Chat Completions


def choice_in(answer: Object) -> Object:
    """Return the choice that an answer, or a chunk, is made of; empty if it has none."""
    choices = answer.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and not choice.get("index"):
            return choice
    return {}


def reasoning_in(said: Object) -> str:
    """Return the reasoning of a message, or of a piece of one.

    Providers have two names for it, and some send both.
    """
    return text_in(said, "reasoning_content") or text_in(said, "reasoning")


def content_in(said: Object) -> str:
    """Return the text of a message's content, which some providers send in parts."""
    parts = said.get("content")
    if not isinstance(parts, list):
        return text_in(said, "content")
    return "".join(text_in(part, "text") for part in parts if isinstance(part, dict))


def text_in(owner: Object, name: str) -> str:
    """Return a field that is text; empty if it is none."""
    value = owner.get(name)
    return value if isinstance(value, str) else ""
