"""A request of another API as a Chat Completions request (spec MD2).

What ``responses_chat`` and ``messages_chat`` have in common: the result of a translation,
and the error of a request that has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]
"""A JSON object."""


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
