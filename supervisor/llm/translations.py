"""Translations of Responses and Messages requests to Chat Completions (spec MD2)."""

from __future__ import annotations

import time
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
    from hostlib.documents import Object
    from hostlib.redact import Redactor
    from supervisor.llm.answer_writers import Maker
    from supervisor.llm.apis import Api
    from supervisor.llm.translation import Translation

TRANSLATED = frozenset({RESPONSES.name, MESSAGES.name})
"""APIs whose requests can be translated to Chat Completions."""


def translate(
    api: Api,
    asked: Object,
    name: str,
    redactor: Redactor,
    *,
    has_reasoning: bool,
    drops_hosted_tools: bool,
) -> tuple[Translation, TranslatedWriter]:
    """Return a request in the form of Chat Completions, and the writer of its answer.

    Args:
        api: the API of the request.
        asked: the request.
        name: the name of the model in the answer.
        redactor: knows every secret.
        has_reasoning: the model takes an effort of reasoning.
        drops_hosted_tools: leave out tools that a provider runs itself.

    Raises:
        UntranslatableError: the request cannot be translated.
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
    return found, TranslatedWriter(redactor, api, maker)
