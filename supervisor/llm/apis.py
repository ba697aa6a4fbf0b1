"""The APIs that models are asked by: a row for each, and what a request of it may not ask.

What it is: the table behind the endpoint's doors and the providers' addresses (spec MD2).
What it is not: how answers are read (``answer``, ``responses_answer``,
``messages_answer``), or how one API is said in another (``translation``).

Rule: a request is refused where it could cost more than is reserved for it, or reach what
the provider keeps under the operator's key, for that may be another child's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from supervisor.llm.answer import Answer
from supervisor.llm.embeddings_answer import EmbeddingsAnswer
from supervisor.llm.messages_answer import MessagesAnswer
from supervisor.llm.responses_answer import ResponsesAnswer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from supervisor.llm.answer_reader import AnswerReader
    from supervisor.llm.pieces import Object

_TIERS = (None, "auto", "default", "flex")

_NEVER: Mapping[str, tuple[object, ...]] = {
    "background": (None, False),
    "previous_response_id": (None,),
    "conversation": (None,),
    "n": (None, 1),
}
"""Members that no API is asked with, but for these values."""


@dataclass(frozen=True)
class Api:
    """One API.

    Attributes:
        name: in the configuration and the journal.
        path: beneath a provider's address.
        reader: reads its answers.
        items: the member of a request that holds what is said.
        bounds: members that bound the output, the usual one first.
        headers: of a child's request, those that belong to the API and are passed on.
        refused: members of a request, and the values that they may have.
        streams: whether answers can come in pieces.
    """

    name: str
    path: str
    reader: type[AnswerReader]
    items: str
    bounds: tuple[str, ...] = ()
    headers: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    streams: bool = True


CHAT = Api(
    "chat",
    "/chat/completions",
    Answer,
    "messages",
    ("max_tokens", "max_completion_tokens"),
    frozenset({"openai-beta"}),
    {
        **_NEVER,
        "best_of": (None, 1),
        "store": (None, False),
        "service_tier": _TIERS,
        "web_search_options": (None,),
        "audio": (None,),
        "modalities": (None, ["text"]),
        "prediction": (None,),
    },
)

RESPONSES = Api(
    "responses",
    "/responses",
    ResponsesAnswer,
    "input",
    ("max_output_tokens",),
    frozenset({"openai-beta"}),
    {**_NEVER, "service_tier": _TIERS, "prompt": (None,)},
)

MESSAGES = Api(
    "messages",
    "/messages",
    MessagesAnswer,
    "messages",
    ("max_tokens",),
    frozenset({"anthropic-version", "anthropic-beta"}),
    {
        **_NEVER,
        "service_tier": (None, "auto", "standard_only"),
        "container": (None,),
        "mcp_servers": (None, []),
    },
)

EMBEDDINGS = Api(
    "embeddings",
    "/embeddings",
    EmbeddingsAnswer,
    "input",
    refused={"n": (None, 1)},
    streams=False,
)

ASKABLE = {api.name: api for api in (CHAT, RESPONSES, MESSAGES)}
"""What the configuration can say that a model speaks."""

_HOSTED = ("web_search", "web_fetch", "image_generation")
"""Beginnings of the types of tools that a provider runs itself, and bills by the call."""

_KEPT = ("file_search", "code_interpreter", "code_execution", "mcp", "container")
"""Beginnings of those that reach what the provider keeps, or addresses that the host does
not know."""


class BadRequestError(ValueError):
    """A request asks for what it may not; the text begins with the member's name."""


def check_request(api: Api, asked: Object, hosted_tools: str) -> None:
    """Raise ``BadRequestError`` if a request may not be asked.

    Args:
        api: by which.
        asked: it.
        hosted_tools: ``refuse``, ``drop`` or ``pass``: tools that the provider runs.
    """
    for name, values in api.refused.items():
        if name in asked and not any(_is_same(asked[name], one) for one in values):
            raise BadRequestError(f"{name}: not available through this host")
    _check_forms(api, asked)
    for name in api.bounds:
        _check_bound(name, asked.get(name))
    for number, tool in enumerate(_tools_of(asked)):
        _check_tool(f"tools[{number}]", tool, hosted_tools)
    if _names_file(asked.get(api.items)):
        text = "what the provider keeps is not available through this host"
        raise BadRequestError(f"{api.items}: {text}; send the content itself")


def _is_same(value: object, allowed: object) -> bool:
    # 1 and True are equal to Python.
    return type(value) is type(allowed) and value == allowed


def _check_forms(api: Api, asked: Object) -> None:
    if not isinstance(asked.get("model"), str | None):
        raise BadRequestError("model: a text")
    if not isinstance(asked.get("stream"), bool | None):
        raise BadRequestError("stream: true or false")
    if api.streams and not isinstance(asked.get("stream_options"), dict | None):
        raise BadRequestError("stream_options: an object")
    if not isinstance(asked.get("tools"), list | None):
        raise BadRequestError("tools: a list")
    if api is CHAT and not (
        isinstance(asked.get("messages"), list) and asked["messages"]
    ):
        raise BadRequestError("messages: a list of at least one")


def _check_bound(name: str, value: object) -> None:
    if value is not None and (type(value) is not int or value < 1):
        raise BadRequestError(f"{name}: a whole number from 1 on")


def _tools_of(asked: Object) -> list[object]:
    found = asked.get("tools")
    return found if isinstance(found, list) else []


def _check_tool(place: str, tool: object, hosted_tools: str) -> None:
    if not isinstance(tool, dict):
        raise BadRequestError(f"{place}: an object")
    kind = tool.get("type", "function")
    if not isinstance(kind, str):
        raise BadRequestError(f"{place}.type: a text")
    if kind.startswith((*_HOSTED, *_KEPT)):
        if hosted_tools == "drop" or (
            hosted_tools == "pass" and kind.startswith(_HOSTED)
        ):
            return
        text = "the provider would run it itself; [llm] hosted_tools says what to do"
        raise BadRequestError(f"{place}.type: {kind[:60]!r}: {text}")
    if kind in ("function", "custom"):
        function = tool.get("function")
        holder = function if isinstance(function, dict) else tool.get("custom", tool)
        if not isinstance(holder, dict) or not isinstance(holder.get("name"), str):
            raise BadRequestError(f"{place}.name: a text")


def is_hosted(tool: object) -> bool:
    """Tell whether a tool of a request is run by the provider itself."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind.startswith((*_HOSTED, *_KEPT))


def _names_file(items: object) -> bool:
    """Tell whether something names what the provider has kept."""
    return any(
        "file_id" in one or one.get("type") in ("item_reference", "container_upload")
        for one in _objects_in(items)
    )


def _objects_in(value: object) -> Iterator[Object]:
    level = [value]
    while level:
        one = level.pop()
        if isinstance(one, dict):
            yield one
            # What a model or a tool has written names nothing to a provider.
            level += (v for k, v in one.items() if k not in ("input", "arguments"))
        elif isinstance(one, list):
            level += one


def has_reasoning(api: Api, asked: Mapping[str, Any]) -> bool:
    """Tell whether a request asks for reasoning, which may be paid and not shown."""
    if api is MESSAGES:
        thinking = asked.get("thinking")
        return isinstance(thinking, dict) and thinking.get("type") != "disabled"
    effort = asked.get("reasoning_effort")
    if isinstance(reasoning := asked.get("reasoning"), dict):
        effort = reasoning.get("effort", "medium")
    return effort not in (None, "none")
