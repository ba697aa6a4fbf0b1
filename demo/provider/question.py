"""What a request says, whatever its API: texts, tools, bounds and tokens.

Tokens are counted in a simple way: five bytes of a prompt's texts are one, and so is
each word of an answer, or twelve characters of a tool's arguments. A dense count takes
each byte for a token, those of tools and schemas too, as a provider may at most.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Api = Literal["chat", "responses", "messages"]
APIS: tuple[Api, ...] = get_args(Api)

PROMPT_BYTES_PER_TOKEN = 5
IMAGE_TOKENS = 2000
MESSAGE_TOKENS = 4

BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
COUNTED = (
    "tools", "functions", "response_format", "tool_choice", "stop", "user", "text",
    "stop_sequences",
)  # fmt: skip
"""Fields beside the messages that a dense count takes in."""

ROUND_ITEMS = frozenset({"function_call", "custom_tool_call", "reasoning"})
"""Items of a Responses request that the model said, beside its messages."""

MORE_TOOLS = "additional_tools"
"""The type of an input item that offers tools."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the request offers.

    Attributes:
        name: its own.
        is_custom: it takes one text, not JSON.
        namespace: the one of Responses that holds it, if any.
        schema: of its arguments.
    """

    name: str
    is_custom: bool = False
    namespace: str | None = None
    schema: Json | None = None


class Question:
    """A request, read.

    Attributes:
        api: whose form it has.
        body: the request's.
        messages: its messages, or its input items.
        tools: those that it offers and that a client runs, by name.
    """

    def __init__(self, api: Api, body: Json) -> None:
        self.api = api
        self.body = body
        name = "input" if api == "responses" else "messages"
        said = body.get(name) or []
        plain = [{"role": "user", "content": said}]
        self.messages: list[Json] = plain if isinstance(said, str) else said
        # Codex puts its tools into the input where it knows the model.
        offers = [body, *(m for m in self.messages if m.get("type") == MORE_TOOLS)]
        offered = (tool for offer in offers for tool in _tools(api, offer))
        self.tools = {tool.name: tool for tool in offered}

    @property
    def bound(self) -> int | None:
        """The most tokens of an answer."""
        return next(
            (self.body[n] for n in BOUNDS if self.body.get(n) is not None), None
        )

    @property
    def last_text(self) -> str:
        """The text of the last message, or of the last tool's result."""
        return _text(self.messages[-1]) if self.messages else ""

    def rounds(self) -> tuple[int, str]:
        """Return answers since the user last spoke, and what the user said then."""
        rounds = 0
        was_said = False
        for message in reversed(self.messages):
            if _is_user(message):
                return rounds, _text(message)
            is_said = message.get("role") == "assistant" or (
                message.get("type") in ROUND_ITEMS
            )
            # The items of one answer of Responses stand in a row.
            joined = is_said and was_said and self.api == "responses"
            rounds += is_said and not joined
            was_said = is_said
        return rounds, ""

    def count(self, *, dense: bool = False) -> int:
        """Return the tokens of the prompt."""
        preface = [self.body.get("instructions"), self.body.get("system")]
        messages = [{"content": part} for part in preface if part] + self.messages
        if dense:
            return sum(map(_dense, messages)) + sum(
                _size(self.body[name]) for name in COUNTED if name in self.body
            )
        size = sum(_told_bytes(message) for message in messages)
        return -(-size // PROMPT_BYTES_PER_TOKEN)


def fault_of(api: Api, body: Json) -> str | None:
    """Return why a request cannot be read; None if it can."""
    said = body.get("input" if api == "responses" else "messages") or []
    if isinstance(said, str) and api != "responses":
        return "messages are no text"
    if not isinstance(said, str) and not _are_objects(said):
        return "messages have to be objects"
    more = [m for m in said if isinstance(m, dict) and m.get("type") == MORE_TOOLS]
    for offer in (body, *more):
        if not _are_tools(api, offer.get("tools") or []):
            return "tools have to be objects with a name"
    bounds = [body[name] for name in BOUNDS if body.get(name) is not None]
    if not all(isinstance(bound, int) and bound > 0 for bound in bounds):
        return "the bound of the answer has to be a number above 0"
    return None


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _are_tools(api: Api, tools: Any) -> bool:
    if not _are_objects(tools):
        return False
    for tool in tools:
        inner = tool.get("function") if api == "chat" else tool
        if tool.get("type") == "namespace" and not _are_tools(
            api, tool.get("tools") or []
        ):
            return False
        has_name = isinstance(inner, dict) and isinstance(inner.get("name"), str)
        if tool.get("type") in {"function", "custom"} and not has_name:
            return False
    return True


def _tools(api: Api, body: Json) -> Iterator[Tool]:
    for tool in body.get("tools") or ():
        match api, tool.get("type"):
            case "chat", "function":
                function = tool["function"]
                yield Tool(function["name"], schema=function.get("parameters"))
            case "responses", "function":
                yield Tool(tool["name"], schema=tool.get("parameters"))
            case "responses", "custom":
                yield Tool(tool["name"], is_custom=True)
            case "responses", "namespace":
                for inner in _tools(api, tool):
                    yield replace(inner, namespace=tool["name"])
            case "messages", _ if "name" in tool:
                yield Tool(tool["name"], schema=tool.get("input_schema"))
            case _:
                pass  # one that the provider runs itself


def _is_user(message: Json) -> bool:
    """Return whether a message is the user's own; results of tools are not."""
    if message.get("role") != "user":
        return False
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return not any(part.get("type") == "tool_result" for part in parts)


def _text(message: Json) -> str:
    content = message.get("content")
    return " ".join(_texts(message.get("output") if content is None else content))


def _texts(value: object) -> Iterator[str]:
    """Yield the texts of a content: a text, or parts that may hold further parts."""
    match value:
        case str():
            yield value
        case list():
            for part in value:
                yield from _texts(part)
        case {"text": str(text)} | {"thinking": str(text)}:
            yield text
        case {"content": inner}:
            yield from _texts(inner)
        case _:
            pass  # a picture, a call


def _told_bytes(message: Json) -> int:
    content = message.get("content")
    if isinstance(content, str) or "role" not in message:
        return len(_text(message).encode())
    return len(str(content or "").encode())


def _dense(message: Json) -> int:
    """Count as many tokens as a provider may at most: one for each byte of text."""
    total = MESSAGE_TOKENS + len(str(message.get("name") or "").encode())
    total += sum(_size(message[n]) for n in CALLED if message.get(n))
    content = message.get("content") or message.get("output") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    for part in parts:
        text = part.get("text")
        if text is None and part.get("type") in {"tool_use", "tool_result", "thinking"}:
            text = json.dumps(part, ensure_ascii=False)
        total += IMAGE_TOKENS if text is None else len(text.encode())
    return total


CALLED = ("tool_calls", "arguments", "input", "tools")
"""Fields of a message or an item that hold tools or calls of them."""


def _size(value: object) -> int:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return len(text.encode())
