"""The common parts of translations to Chat Completions and back (spec MD2).

The result of a translation, its error, and readers of fields of requests and answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from hostlib.documents import Object

NO_FORM = "Chat Completions has no form for it"

GAP = "\n\n"
"""Separates texts of one message, for not every provider takes a list of texts."""

Kind = TypeVar("Kind")

_KINDS: dict[type, str] = {
    str: "a text",
    dict: "an object",
    list: "a list",
    bool: "true or false",
    int: "a whole number",
}


class UntranslatableError(ValueError):
    """A request cannot be translated to Chat Completions.

    Attributes:
        field: the place in the request, such as ``tools[2].type``.
        reason: the reason, in a few words.
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
        dropped: names of fields that were left out because they have no effect.
        namespaced: function -> (namespace, name) for functions in a namespace.
        custom: names of functions that replace tools of type ``custom``.
    """

    body: Object
    max_tokens: int | None = None
    dropped: tuple[str, ...] = ()
    namespaced: dict[str, tuple[str, str]] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()


def optional(
    owner: Object, name: str, kind: type[Kind], where: str = ""
) -> Kind | None:
    """Return a field of a request; None if it is absent or null.

    Args:
        owner: the object that has the field.
        name: the field.
        kind: its type; a bool is no number.
        where: the object's place in the request; empty for the request itself.

    Raises:
        UntranslatableError: the field has another type.
    """
    value = owner.get(name)
    if value is not None and type(value) is not kind:
        raise UntranslatableError(place(where, name), f"{_KINDS[kind]} is needed")
    return value


def required(owner: Object, name: str, kind: type[Kind], where: str = "") -> Kind:
    """Return a required field of a request; see ``optional``.

    Raises:
        UntranslatableError: the field is absent, null or of another type.
    """
    value = optional(owner, name, kind, where)
    if value is None:
        raise UntranslatableError(place(where, name), f"{_KINDS[kind]} is needed")
    return value


def positive(owner: Object, name: str, where: str = "") -> int:
    """Return a required field that is a whole number from 1 on; see ``optional``."""
    value = required(owner, name, int, where)
    if value < 1:
        raise UntranslatableError(place(where, name), "a number from 1 on is needed")
    return value


def number(owner: Object, name: str) -> int | float:
    """Return a present field of a request that is a number."""
    value = owner[name]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UntranslatableError(name, "a number is needed")
    return value


def objects_in(items: list[object], where: str) -> Iterator[tuple[Object, str]]:
    """Yield the items of a list, which must be objects, with their places."""
    for index, item in enumerate(items):
        at = f"{where}[{index}]"
        if not isinstance(item, dict):
            raise UntranslatableError(at, "an object is needed")
        yield item, at


def no_form(kind: object, where: str) -> UntranslatableError:
    """Return the refusal of an object because of its ``type``."""
    reason = "a text is needed"
    if isinstance(kind, str):
        reason = f"Chat Completions has no form for {kind[:50]!r} here"
    return UntranslatableError(place(where, "type"), reason)


def refuse_unknown(owner: Object, known: Container[str], where: str = "") -> None:
    """Check that an object has no unknown field that is not null.

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
        address: the address of the image.
        where: the place of the address in the request.

    Raises:
        UntranslatableError: it may refer to data of the provider.
    """
    if not address.startswith(("data:", "https://", "http://")):
        reason = "the address of an image begins with data:, https: or http:"
        raise UntranslatableError(where, reason)
    return {"type": "image_url", "image_url": {"url": address}}


def file_part(data: str, filename: str, where: str) -> Object:
    """Return a file in a request as a part of a message.

    Args:
        data: the file, as a ``data:`` address.
        filename: its name.
        where: the place of the data in the request.

    Raises:
        UntranslatableError: the provider would have to fetch it.
    """
    if not data.startswith("data:"):
        raise UntranslatableError(where, "a file begins with data:")
    return {"type": "file", "file": {"filename": filename, "file_data": data}}


def join_parts(parts: list[Object]) -> str | list[Object]:
    """Return parts as one text if all are texts, which every provider takes."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return GAP.join(part["text"] for part in parts)


# Answers of Chat Completions


def choice_in(answer: Object) -> Object:
    """Return the first choice of an answer or a chunk; empty without one."""
    choices = answer.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and not choice.get("index"):
            return choice
    return {}


def reasoning_in(said: Object) -> str:
    """Return the reasoning of a message or a piece.

    Providers have two names for it, and some send both.
    """
    return text_in(said, "reasoning_content") or text_in(said, "reasoning")


def content_in(said: Object) -> str:
    """Return the text of a message's content, also if it is in parts."""
    parts = said.get("content")
    if not isinstance(parts, list):
        return text_in(said, "content")
    return "".join(text_in(part, "text") for part in parts if isinstance(part, dict))


def text_in(owner: Object, name: str) -> str:
    """Return a field that is text; empty if it is not."""
    value = owner.get(name)
    return value if isinstance(value, str) else ""
