"""The reader of answers of the Embeddings API: checked and metered (spec MD5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor.llm.answer_reader import (
    AnswerError,
    AnswerReader,
    ProviderError,
    table_in,
    tokens_in,
)
from supervisor.llm.quota import Usage

if TYPE_CHECKING:
    from hostlib.documents import Object


class EmbeddingsAnswer(AnswerReader):
    """Reads a list of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self._usage: Object = {}

    def _take_event(self, event: Object, size_bytes: int) -> list[Object]:
        raise AnswerError("a stream, where a list of embeddings was asked for")

    def _finish_stream(self) -> Object:
        raise AnswerError("no list of embeddings")

    def _take_plain(self, found: Object) -> None:
        if found.get("error"):
            reason = table_in(found, "error").get("message") or found["error"]
            raise ProviderError(str(reason))
        rows = found.get("data")
        if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
            raise AnswerError("no list of embeddings")
        self._usage = table_in(found, "usage")

    def usage(self) -> Usage | None:
        """See ``AnswerReader``."""
        if "prompt_tokens" not in self._usage:
            return None
        return Usage(tokens_in(self._usage, "prompt_tokens"), 0)
