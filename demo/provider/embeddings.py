"""Answers to requests for embeddings: vectors that depend on the text alone."""

import base64
import hashlib
import json
import struct
from typing import Any

from demo.provider.question import PROMPT_BYTES_PER_TOKEN

DIMENSIONS = 8


def inputs(body: dict[str, Any]) -> list[Any]:
    """Return the inputs of a request: texts, or lists of tokens."""
    given = body.get("input")
    if isinstance(given, list) and not (given and isinstance(given[0], int)):
        return given
    return [] if given is None else [given]


def prompt_tokens(body: dict[str, Any]) -> int:
    """Return the tokens of all inputs: listed ones, or five bytes of text each."""
    return sum(
        len(one)
        if isinstance(one, list)
        else -(-len(one.encode()) // PROMPT_BYTES_PER_TOKEN)
        for one in inputs(body)
    )


def whole(body: dict[str, Any], tokens: int | None) -> dict[str, Any]:
    """Return the answer; without usage where there are no tokens to tell."""
    count = body.get("dimensions") or DIMENSIONS
    listed = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _encoded(_vector(one, count), body.get("encoding_format")),
        }
        for index, one in enumerate(inputs(body))
    ]
    answer = {"object": "list", "data": listed, "model": body.get("model")}
    if tokens is not None:
        answer["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return answer


def _vector(value: Any, count: int) -> list[float]:
    seed = json.dumps(value).encode()
    digests = (hashlib.sha256(b"%d" % at + seed).digest() for at in range(count))
    # A short fraction, so that 32 bits hold it exactly.
    return [(digest[0] - 128) / 128 for digest in digests]


def _encoded(vector: list[float], form: str | None) -> list[float] | str:
    if form != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
