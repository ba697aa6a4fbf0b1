"""The APIs of models: a row for each, and the checks of its requests (spec MD2).

Rule: a request is refused if it could cost more than is reserved for it, or reach data that
the provider keeps under the operator's key, for that may be another child's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from supervisor.llm.answer import Answer
from supervisor.llm.embeddings_answer import EmbeddingsAnswer
from supervisor.llm.messages_answer import MessagesAnswer
from supervisor.llm.responses_answer import ResponsesAnswer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hostlib.documents import Object
    from supervisor.llm.answer_reader import AnswerReader

_TIERS = (None, "auto", "default", "flex")

_NEVER: Mapping[str, tuple[object, ...]] = {
    "background": (None, False),
    "previous_response_id": (None,),
    "conversation": (None,),
    "n": (None, 1),
    "models": (None,),
    "fallbacks": (None,),
    "preset": (None,),
    "plugins": (None, []),
}
"""Members that are refused in every API, except with these values: they name data that the
provider keeps, models other than the host's, or tools that the provider runs."""


@dataclass(frozen=True)
class Api:
    """One API.

    Attributes:
        name: its name in the configuration and the journal.
        path: its path beneath a provider's address.
        reader: the reader of its answers.
        items: the member of a request with the conversation.
        bounds: members that bound the output, the usual one first.
        headers: headers of a child's request that are passed on.
        refused: members of a request that are refused, with the allowed values.
        streams: whether answers can be streamed.
    """

    name: str
    path: str
    reader: type[AnswerReader]
    items: str
    bounds: tuple[str, ...] = ()
    headers: frozenset[str] = frozenset()
    refused: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    streams: bool = True

    def least_bound(self, asked: Object, other: int | None) -> int | None:
        """Return the least of a request's bounds and another; None if there is none."""
        bounds = (*(asked.get(name) for name in self.bounds), other)
        return min((one for one in bounds if one is not None), default=None)


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
    {**_NEVER, "service_tier": _TIERS, "prompt": (None,), "store": (None, False)},
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
        "thread": (None,),
        "speed": (None, "standard"),
    },
)

EMBEDDINGS = Api(
    "embeddings",
    "/embeddings",
    EmbeddingsAnswer,
    "input",
    refused=_NEVER,
    streams=False,
)

ASKABLE = {api.name: api for api in (CHAT, RESPONSES, MESSAGES)}
"""The APIs that a model of the configuration can have."""

_BILLED = ("web_search", "web_fetch", "image_generation")
"""Beginnings of the types of tools that a provider runs itself and ``pass`` lets through."""

_NAMED_TOOLS = frozenset({"function", "custom"})
"""Types of tools that the child runs and names itself."""

_CLIENT_TOOLS = _NAMED_TOOLS | {
    "namespace", "local_shell", "apply_patch", "computer", "computer_use_preview",
}  # fmt: skip
"""Types of tools that the child runs; ``_runs_at_child`` has some more."""

_DATED_CLIENT_TOOL = re.compile(r"(bash|text_editor|computer|memory)_[0-9]{8}")
"""Tools of Messages that the child runs; their types end in a date."""

_ITEMS: Mapping[str, str] = {
    "message": "content",
    "function_call": "arguments",
    "function_call_output": "output",
    "custom_tool_call": "input",
    "custom_tool_call_output": "output",
    "local_shell_call": "action",
    "local_shell_call_output": "output",
    "shell_call": "action",
    "shell_call_output": "output",
    "apply_patch_call": "operation",
    "apply_patch_call_output": "status",
    "computer_call": "call_id",
    "computer_call_output": "output",
    "tool_search_call": "arguments",
    "tool_search_output": "tools",
    "additional_tools": "tools",
    "compaction": "encrypted_content",
    "compaction_summary": "encrypted_content",
    "reasoning": "encrypted_content",
}
"""Type of item in the input of Responses -> the member with its content.  An item without it
could refer to data that the provider keeps."""

_BILLED_ITEMS: Mapping[str, str] = {
    "web_search_call": "status",
    "image_generation_call": "result",
}
"""The same for items of the provider's tools, which ``pass`` allows."""


class BadRequestError(ValueError):
    """A request is not allowed; the text begins with the member's name."""


def check_request(api: Api, asked: Object, hosted_tools: str) -> None:
    """Raise ``BadRequestError`` if a request is not allowed.

    Args:
        api: the API of the request.
        asked: the request.
        hosted_tools: ``refuse``, ``drop`` or ``pass``: tools that the provider runs.
    """
    for name, values in api.refused.items():
        if name in asked and not any(_is_same(asked[name], one) for one in values):
            raise BadRequestError(f"{name}: not available through this host")
    _check_forms(api, asked)
    for name in api.bounds:
        _check_bound(name, asked.get(name))
    _check_tools("tools", asked.get("tools"), hosted_tools)
    if _names_file(asked.get(api.items)):
        raise BadRequestError(f"{api.items}: {_KEPT}; send the content itself")


def check_native(api: Api, asked: Object, hosted_tools: str) -> None:
    """Raise ``BadRequestError`` if a request may not be passed on untranslated.

    Args:
        api: the API of the request.
        asked: a request that ``check_request`` has accepted.
        hosted_tools: as of ``check_request``.
    """
    items = asked.get(api.items)
    if not isinstance(items, list):
        return
    for number, item in enumerate(items):
        place = f"{api.items}[{number}]"
        if api is RESPONSES:
            _check_item(place, item, hosted_tools)
        elif api is CHAT and isinstance(item, dict) and item.get("audio") is not None:
            raise BadRequestError(f"{place}.audio: {_KEPT}")


_KEPT = "what the provider keeps is not available through this host"


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


def _check_item(place: str, item: object, hosted_tools: str) -> None:
    """Raise if an item of Responses may not contain its content itself."""
    if not isinstance(item, dict):
        raise BadRequestError(f"{place}: an object")
    content = _content_of(place, item, hosted_tools)
    is_unnamed = item.get("type") == "reasoning" and item.get("id") is None
    if not isinstance(item.get(content), str | list | dict) and not is_unnamed:
        advice = "send the content itself"
        if content == "encrypted_content":
            advice = f'ask with include: ["reasoning.{content}"], and send that'
        raise BadRequestError(f"{place}.{content}: {_KEPT}; {advice}")
    if not _is_local(item.get("environment"), default=True):
        raise BadRequestError(f"{place}.environment: {_KEPT}")
    if not isinstance(item.get("tools"), list | None):
        raise BadRequestError(f"{place}.tools: a list")
    _check_tools(f"{place}.tools", item.get("tools"), hosted_tools)


def _content_of(place: str, item: Object, hosted_tools: str) -> str:
    """Return the member that holds an item's content."""
    kind = item.get("type")
    if kind is None:  # a message if it has a role, else a reference to a kept item
        if not isinstance(item.get("role"), str):
            raise BadRequestError(
                f"{place}.role: {_KEPT}; an item has a type or a role"
            )
        return "content"
    known = {**_ITEMS, **_BILLED_ITEMS} if hosted_tools == "pass" else _ITEMS
    if not isinstance(kind, str) or kind not in known:
        text = "items of this type are not available through this host"
        raise BadRequestError(f"{place}.type: {str(kind)[:60]!r}: {text}")
    return known[kind]


def _check_tools(place: str, tools: object, hosted_tools: str) -> None:
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        _check_tool(f"{place}[{number}]", tool, hosted_tools)


def _check_tool(place: str, tool: object, hosted_tools: str) -> None:
    if not isinstance(tool, dict):
        raise BadRequestError(f"{place}: an object")
    kind = tool.get("type", "function")
    if not isinstance(kind, str):
        raise BadRequestError(f"{place}.type: a text")
    if is_hosted(tool):
        if hosted_tools == "drop":
            return
        _check_hosted(place, kind, tool, hosted_tools)
    if tool.get("model") is not None:
        raise BadRequestError(f"{place}.model: the host says which model is asked")
    if kind in _NAMED_TOOLS:
        _check_name(place, tool)
    elif kind == "namespace":
        _check_namespace(place, tool)


def _check_hosted(place: str, kind: str, tool: Object, hosted_tools: str) -> None:
    if hosted_tools != "pass" or not kind.startswith(_BILLED):
        text = "the provider would run it itself; [llm] hosted_tools says what to do"
        raise BadRequestError(f"{place}.type: {kind[:60]!r}: {text}")
    if _names_file(tool):
        raise BadRequestError(f"{place}: {_KEPT}")


def _check_name(place: str, tool: Object) -> None:
    function = tool.get("function")
    holder = function if isinstance(function, dict) else tool.get("custom", tool)
    if not isinstance(holder, dict) or not isinstance(holder.get("name"), str):
        raise BadRequestError(f"{place}.name: a text")


def _check_namespace(place: str, tool: Object) -> None:
    inner = tool.get("tools")
    if not isinstance(inner, list):
        raise BadRequestError(f"{place}.tools: a list")
    for number, one in enumerate(inner):
        at = f"{place}.tools[{number}]"
        kind = one.get("type") if isinstance(one, dict) else None
        if kind not in ("function", "custom"):
            raise BadRequestError(f"{at}.type: function or custom")
        _check_tool(at, one, "refuse")


def is_hosted(tool: object) -> bool:
    """Return whether a tool is not known to be run by the child."""
    if not isinstance(tool, dict):
        return False
    kind = tool.get("type", "function")
    return isinstance(kind, str) and not _runs_at_child(kind, tool)


def _runs_at_child(kind: str, tool: Object) -> bool:
    if kind == "shell":  # without an environment the provider may use its own
        return _is_local(tool.get("environment"), default=False)
    if kind == "tool_search":
        return tool.get("execution") == "client"
    return kind in _CLIENT_TOOLS or bool(_DATED_CLIENT_TOOL.fullmatch(kind))


def _is_local(environment: object, *, default: bool) -> bool:
    if environment is None:
        return default
    return isinstance(environment, dict) and environment.get("type") == "local"


def _names_file(items: object) -> bool:
    """Return whether a value refers to a file that the provider keeps."""
    return any(
        "file_id" in one
        or "container_id" in one
        or one.get("type") in ("item_reference", "container_upload")
        for one in _objects_in(items)
    )


_NOT_NAMES = ("input", "arguments", "tools")


def _objects_in(value: object) -> Iterator[Object]:
    level = [value]
    while level:
        one = level.pop()
        if isinstance(one, dict):
            yield one
            # Texts of a model or a tool are no references; the schemas of tools may use
            # any name, and have a check of their own.
            level += (v for k, v in one.items() if k not in _NOT_NAMES)
        elif isinstance(one, list):
            level += one


def has_reasoning(api: Api, asked: Mapping[str, object]) -> bool:
    """Return whether a request asks for reasoning, which may cost and not show."""
    if api is MESSAGES:
        thinking = asked.get("thinking")
        return isinstance(thinking, dict) and thinking.get("type") != "disabled"
    effort = asked.get("reasoning_effort")
    if isinstance(reasoning := asked.get("reasoning"), dict):
        effort = reasoning.get("effort", "medium")
    return effort not in (None, "none")
