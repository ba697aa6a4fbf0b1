"""Requests of Responses and Messages for a model that is asked by Chat Completions (MD2)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from supervisor.llm import (
    messages_request,
    messages_writer,
    responses_request,
    responses_writer,
)
from supervisor.llm.answer_writers import TranslatedWriter
from supervisor.llm.apis import MESSAGES, RESPONSES

if TYPE_CHECKING:
    from hostlib.redact import Redactor
    from supervisor.llm.answer_writers import AnswerWriter, Maker
    from supervisor.llm.apis import Api
    from supervisor.llm.pieces import Object

TRANSLATED = frozenset({RESPONSES.name, MESSAGES.name})
"""APIs whose requests can be said in Chat Completions."""


@dataclass(frozen=True, slots=True)
class Translated:
    """A request in another API, and what writes its answer.

    Attributes:
        body: the request but for its model, its stream and its bound on the output.
        dropped: members that were left out, for they change nothing.
        writer: writes the answer.
    """

    body: Object
    dropped: tuple[str, ...]
    writer: AnswerWriter


def translate(
    api: Api,
    asked: Object,
    name: str,
    redactor: Redactor,
    *,
    has_reasoning: bool,
    drops_hosted_tools: bool,
) -> Translated:
    """Return a request in the form of Chat Completions.

    Args:
        api: of the request.
        asked: it.
        name: of the model, as the answer bears it.
        redactor: knows every secret.
        has_reasoning: the model can be asked for an effort of reasoning.
        drops_hosted_tools: tools that a provider runs itself are left out.

    Raises:
        UntranslatableError: it has no such form.
    """
    maker: Maker
    if api is MESSAGES:
        found = messages_request.translate_request(asked, has_reasoning=has_reasoning)
        maker = messages_writer.MessagesWriter(asked, found, name)
    else:
        found = responses_request.translate_request(
            asked, drops_hosted_tools=drops_hosted_tools
        )
        if not has_reasoning and found.body.pop("reasoning_effort", None) is not None:
            found.dropped = (*found.dropped, "reasoning.effort")
        now = int(time.time())
        maker = responses_writer.ResponsesWriter(asked, found, name, now)
    writer = TranslatedWriter(redactor, api, maker)
    return Translated(found.body, found.dropped, writer)
