"""What the stand-in notes of each request, and the tokens that it counts."""

from dataclasses import dataclass
from typing import Any, Self

WEIGHTS = {"input": 1.0, "cached": 0.25, "cache_write": 1.0, "output": 4.0}
"""What a token costs where a configuration names no weights."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one call or of several.

    Attributes:
        calls: how many.
        input: all of the prompts, cached ones included.
        cached: of the input, read from the cache.
        cache_write: of the input, written to the cache.
        output: of the answers, reasoning included.
        reasoning: of the output.
    """

    calls: int = 0
    input: int = 0
    cached: int = 0
    cache_write: int = 0
    output: int = 0
    reasoning: int = 0

    def __add__(self, other: Self) -> "Tokens":
        names = self.__slots__
        return Tokens(*(getattr(self, name) + getattr(other, name) for name in names))

    def cost(self, **weights: float) -> float:
        """Return the weighted tokens; weights that are not named are `WEIGHTS`."""
        weight = WEIGHTS | weights
        plain = self.input - self.cached - self.cache_write
        return (
            plain * weight["input"]
            + self.cached * weight["cached"]
            + self.cache_write * weight["cache_write"]
            + self.output * weight["output"]
        )


@dataclass
class Served:
    """One request, and how much of an answer was sent.

    Attributes:
        path: of the request.
        headers: of the request, names in lower case.
        body: of the request.
        data: the body's bytes.
        method: of the request.
        api: which one was asked: chat, responses, messages, count_tokens, embeddings,
            models; empty for another path.
        prompt_tokens: its count of the prompt.
        cached: tokens of the prompt that it reports as cached.
        written: tokens of the prompt that it reports as written to the cache.
        hidden: tokens of reasoning that no piece shows.
        thoughts: pieces of reasoning that were sent.
        pieces: tokens of the answer that were sent, those of reasoning included.
        reported: its report of the whole answer; None where it made none.
        status: of the answer.
        done: the whole answer was sent.
        number: of the request, from 0.
    """

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    data: bytes = b""
    method: str = "POST"
    api: str = ""
    prompt_tokens: int = 0
    cached: int = 0
    written: int = 0
    hidden: int = 0
    thoughts: int = 0
    pieces: int = 0
    reported: int | None = None
    status: int = 0
    done: bool = False
    number: int = 0

    @property
    def authorization(self) -> str:
        """What the request showed as its right to ask."""
        found = self.headers.get("authorization") or self.headers.get("x-api-key")
        return found or ""

    @property
    def tokens(self) -> Tokens:
        """What it counts for this call; nothing for one that was refused."""
        if self.status != 200 or self.api in {"", "models", "count_tokens"}:
            return Tokens()
        output = self.pieces + self.hidden if self.reported is None else self.reported
        reasoning = self.hidden + self.thoughts
        sent = (self.cached, self.written, output, reasoning)
        return Tokens(1, self.prompt_tokens, *sent)
