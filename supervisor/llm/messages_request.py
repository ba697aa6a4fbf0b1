"""A request of the Messages API as a request of Chat Completions (spec MD2).

Rules of this file.

1. Each field is translated, named in ``dropped``, or refused with its place. A field that
   is null asks for nothing.
2. Chat wants the results of tools directly behind their calls, each as a message. Messages
   has them among the user's blocks: what else came since the calls is held behind them.
3. Time and memory grow as the request does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from supervisor.llm.prompt_size import IMAGE_TOKENS
from supervisor.llm.translation import (
    NO_FORM,
    Object,
    Translation,
    UntranslatableError,
    optional,
    place,
    refuse_unknown,
    required,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

BYTES_PER_TOKEN = 3
"""The estimate of spec MD5: three bytes of a request are a token."""

_DROPPED = frozenset({"metadata", "context_management"})

_REQUEST = _DROPPED | {
    *("model", "stream", "messages", "system", "max_tokens", "stop_sequences"),
    *("temperature", "top_p", "tools", "tool_choice", "thinking", "output_config"),
}

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "allowed_callers": (["direct"],),
    "caller": ({"type": "direct"},),
    "citations": ([], {"enabled": False}),
    "clear_at": ("never",),
    "defer_loading": (False,),
    "eager_input_streaming": (True,),
    "service_tier": ("auto",),
    "speed": ("standard",),
    "transformations": ({},),
}
"""Values that ask for what Chat Completions does anyway."""

_EFFORTS = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""Levels of ``output_config.effort`` as levels that every model with reasoning takes."""

_LOW_BUDGET, _MEDIUM_BUDGET = 2048, 16_000
"""Up to so many tokens of thinking the effort is low, and medium."""

_PARAGRAPH = "\n\n"
"""Between blocks that become one text, for some servers take no list of texts."""


def translate_request(asked: Object, *, has_reasoning: bool = True) -> Translation:
    """Return a request of the Messages API as one of Chat Completions.

    Args:
        asked: the body; its ``model`` and ``stream`` are not looked at.
        has_reasoning: whether the model takes ``reasoning_effort``.

    Raises:
        UntranslatableError: a field is malformed, or has no form in Chat Completions.
    """
    return _Request(has_reasoning=has_reasoning).translate(asked)


def count_tokens_estimate(asked: Object) -> int:
    """Return about how many tokens of input a request is, at least 1.

    The base64 of an image is no text: it counts as ``IMAGE_TOKENS``.
    """
    size_bytes, images = len(msgspec.json.encode(asked)), 0
    for data in _image_data(asked):
        size_bytes -= len(data)
        images += 1
    return -(-size_bytes // BYTES_PER_TOKEN) + images * IMAGE_TOKENS


class _Request:
    """One request on its way into the other form."""

    def __init__(self, *, has_reasoning: bool) -> None:
        self._has_reasoning = has_reasoning
        self._messages: list[Object] = []
        self._dropped: dict[str, None] = {}  # in the order in which they came
        # What the assistant said last (texts and calls), and what was said since, of
        # which the results of its calls are among the messages already (rule 2).
        self._said: tuple[list[str], list[Object]] | None = None
        self._held: list[tuple[str, list[Object]]] = []

    def translate(self, asked: Object) -> Translation:
        found = self._fields(asked, "", _REQUEST)
        self._dropped.update((name, None) for name in found if name in _DROPPED)
        self._hold("system", self._texts(found.get("system", ""), "system"))
        self._take_messages(found.get("messages"))
        body: Object = {"messages": self._messages}
        self._put_tools(body, found)
        self._put_sampling(body, found)
        self._put_output(body, found)
        bound = _count(found, "max_tokens")
        return Translation(body, bound, tuple(self._dropped))

    def _fields(self, value: object, at: str, known: Container[str]) -> Object:
        """Return what an object asks for; each field of it is known."""
        if not isinstance(value, dict):
            raise UntranslatableError(at, "an object is needed")
        found = {}
        for key, inner in value.items():
            if inner is None or inner in _NEUTRAL.get(key, ()):
                continue
            if key == "cache_control":
                self._dropped[key] = None
            else:
                found[key] = inner
        refuse_unknown(found, known, at)
        return found

    # The messages

    def _take_messages(self, value: object) -> None:
        if not isinstance(value, list) or not value:
            raise UntranslatableError("messages", "a list of at least one is needed")
        for number, message in enumerate(value):
            at = f"messages[{number}]"
            found = self._fields(message, at, ("role", "content"))
            content = found.get("content")
            match found.get("role"):
                case "user":
                    self._take_user(content, f"{at}.content")
                case "assistant":
                    self._take_assistant(content, f"{at}.content")
                case "system":
                    self._hold("system", self._texts(content, f"{at}.content"))
                case _:
                    reason = "user, assistant or system is needed"
                    raise UntranslatableError(f"{at}.role", reason)
        if self._said is not None:
            at = f"messages[{len(value) - 1}].role"
            reason = "Chat Completions continues no text of the assistant"
            raise UntranslatableError(at, reason)
        self._release()

    def _take_user(self, value: object, at: str) -> None:
        parts = []
        self._finish_assistant()
        for block, where in _blocks(value, at):
            if block.get("type") == "tool_result":
                parts += self._take_result(block, where)
            else:
                parts.append(self._part(block, where))
        self._hold("user", parts)

    def _take_result(self, value: object, at: str) -> list[Object]:
        """Add a tool's result to the messages; return its images, for the user to show.

        A ``tool`` message holds no image with most providers.
        """
        known = ("type", "tool_use_id", "content", "is_error")
        found = self._fields(value, at, known)
        call = required(found, "tool_use_id", str, at)
        texts, images = [], []
        if optional(found, "is_error", bool, at):
            texts.append("The tool failed.")
        for block, where in _blocks(found.get("content", ""), f"{at}.content"):
            part = self._part(block, where)
            if part["type"] == "image_url":
                images.append(part)
                part = _text_part(f"[Image {len(images)} follows from the user.]")
            texts.append(part["text"])
        content = _PARAGRAPH.join(texts)
        self._messages.append(
            {"role": "tool", "tool_call_id": call, "content": content}
        )
        if images:
            images.insert(0, _text_part(f"Images of the result of {call}:"))
        return images

    def _take_assistant(self, value: object, at: str) -> None:
        self._release()
        texts, calls = self._said = self._said or ([], [])
        for block, where in _blocks(value, at):
            match block.get("type"):
                case "text":
                    texts.append(self._text_block(block, where)["text"])
                case "tool_use":
                    calls.append(self._call(block, where))
                case "thinking" | "redacted_thinking" as kind:
                    self._dropped[f"messages.{kind}"] = None
                case kind:
                    raise _wrong_type(kind, where)

    def _call(self, value: object, at: str) -> Object:
        found = self._fields(value, at, ("type", "id", "name", "input"))
        if "input" not in found:
            raise UntranslatableError(f"{at}.input", "it is missing")
        try:
            # An object; or what a model wrote instead, which Claude Code keeps.
            arguments = msgspec.json.encode(found["input"]).decode()
        except (ValueError, RecursionError):
            raise UntranslatableError(f"{at}.input", "it is no JSON") from None
        function = {"name": required(found, "name", str, at), "arguments": arguments}
        return {
            "id": required(found, "id", str, at),
            "type": "function",
            "function": function,
        }

    def _hold(self, role: str, parts: list[Object]) -> None:
        """Keep a message until each result that goes before it is there (rule 2)."""
        self._finish_assistant()
        if role == "user" and self._held and self._held[-1][0] == role:
            self._held[-1][1].extend(parts)
        elif parts:
            self._held.append((role, parts))

    def _release(self) -> None:
        for role, parts in self._held:
            self._messages.append({"role": role, "content": _content(parts)})
        self._held.clear()

    def _finish_assistant(self) -> None:
        if self._said is None:
            return
        texts, calls = self._said
        self._said = None
        content = _PARAGRAPH.join(texts)
        message: Object = {"role": "assistant", "content": content}
        if calls:
            message = {**message, "content": content or None, "tool_calls": calls}
        self._messages.append(message)

    # The blocks of a message

    def _texts(self, value: object, at: str) -> list[Object]:
        """Return what may hold text only, as parts."""
        return [self._text_block(block, where) for block, where in _blocks(value, at)]

    def _text_block(self, block: Object, at: str) -> Object:
        if block.get("type") != "text":
            raise _wrong_type(block.get("type"), at)
        return self._part(block, at)

    def _part(self, block: Object, at: str) -> Object:
        """Return a block that the model is shown, as a part of a message."""
        match block.get("type"):
            case "text":
                found = self._fields(block, at, ("type", "text"))
                return _text_part(required(found, "text", str, at))
            case "image":
                found = self._fields(block, at, ("type", "source"))
                url = self._image_url(
                    required(found, "source", dict, at), f"{at}.source"
                )
                return {"type": "image_url", "image_url": {"url": url}}
            case "document":
                return self._document(block, at)
            case kind:
                raise _wrong_type(kind, at)

    def _image_url(self, source: Object, at: str) -> str:
        match source.get("type"):
            case "url":
                found = self._fields(source, at, ("type", "url"))
                return required(found, "url", str, at)
            case "base64":
                found = self._fields(source, at, ("type", "media_type", "data"))
                media_type = required(found, "media_type", str, at)
                return f"data:{media_type};base64,{required(found, 'data', str, at)}"
            case kind:
                raise _wrong_type(kind, at)

    def _document(self, block: Object, at: str) -> Object:
        found = self._fields(block, at, ("type", "source", "title", "context"))
        texts = [optional(found, name, str, at) for name in ("title", "context")]
        source = required(found, "source", dict, at)
        at = f"{at}.source"
        if source.get("type") != "text":
            raise _wrong_type(source.get("type"), at)
        found = self._fields(source, at, ("type", "media_type", "data"))
        texts.append(required(found, "data", str, at))
        return _text_part(_PARAGRAPH.join(filter(None, texts)))

    # What stands beside the messages

    def _put_tools(self, body: Object, found: Object) -> None:
        tools = [
            self._tool(tool, f"tools[{number}]")
            for number, tool in enumerate(optional(found, "tools", list) or ())
        ]
        if tools:
            body["tools"] = tools
        if "tool_choice" in found:
            self._put_choice(body, found["tool_choice"])

    def _tool(self, value: object, at: str) -> Object:
        kind = value.get("type") if isinstance(value, dict) else None
        if kind not in (None, "custom"):
            raise _wrong_type(kind, at)
        known = ("type", "name", "description", "input_schema", "strict")
        found = self._fields(value, at, known)
        function: Object = {"name": required(found, "name", str, at)}
        if "description" in found:
            function["description"] = required(found, "description", str, at)
        function["parameters"] = required(found, "input_schema", dict, at)
        if optional(found, "strict", bool, at):
            function["strict"] = True
        return {"type": "function", "function": function}

    def _put_choice(self, body: Object, value: object) -> None:
        at = "tool_choice"
        known = ("type", "name", "disable_parallel_tool_use")
        found = self._fields(value, at, known)
        choice: object
        match found.get("type"):
            case "auto" | "none" as kind:
                choice = kind
            case "any":
                choice = "required"
            case "tool":
                name = required(found, "name", str, at)
                choice = {"type": "function", "function": {"name": name}}
            case kind:
                raise _wrong_type(kind, at)
        is_single = optional(found, "disable_parallel_tool_use", bool, at)
        if "tools" not in body:  # providers then refuse both fields
            if choice not in ("auto", "none"):
                raise UntranslatableError(at, "there are no tools")
            return
        body["tool_choice"] = choice
        if is_single:
            body["parallel_tool_calls"] = False

    def _put_sampling(self, body: Object, found: Object) -> None:
        for name in ("temperature", "top_p"):
            if name in found:
                if type(found[name]) not in (int, float):
                    raise UntranslatableError(name, "a number is needed")
                body[name] = found[name]
        stops = optional(found, "stop_sequences", list)
        for number, stop in enumerate(stops or ()):
            if not isinstance(stop, str):
                at = f"stop_sequences[{number}]"
                raise UntranslatableError(at, "a text is needed")
        if stops:
            body["stop"] = stops

    def _put_output(self, body: Object, found: Object) -> None:
        at = "output_config"
        output = self._fields(found.get(at, {}), at, ("effort", "format"))
        if "format" in output:
            body["response_format"] = self._format(output["format"], f"{at}.format")
        level = None
        if "effort" in output:
            level = _EFFORTS.get(required(output, "effort", str, at))
            if level is None:
                raise UntranslatableError(f"{at}.effort", NO_FORM)
        thinking = self._thinking_effort(found)
        if not self._has_reasoning:
            ignored = {"thinking": "thinking" in found, f"{at}.effort": bool(level)}
        else:
            effort = thinking or level or ("medium" if "thinking" in found else None)
            if effort:
                body["reasoning_effort"] = effort
            ignored = {f"{at}.effort": bool(thinking and level)}
        self._dropped.update((name, None) for name, is_so in ignored.items() if is_so)

    def _format(self, value: object, at: str) -> Object:
        found = self._fields(value, at, ("type", "schema"))
        if found.get("type") != "json_schema":
            raise _wrong_type(found.get("type"), at)
        schema = required(found, "schema", dict, at)
        form = {"name": "answer", "schema": schema, "strict": True}
        return {"type": "json_schema", "json_schema": form}

    def _thinking_effort(self, found: Object) -> str | None:
        """Return the effort that ``thinking`` itself names; None if it names none."""
        if "thinking" not in found:
            return None
        at = "thinking"
        known = ("type", "budget_tokens", "display")
        thinking = self._fields(found[at], at, known)
        if thinking.get("display") not in (None, "summarized", "omitted"):
            raise UntranslatableError(f"{at}.display", NO_FORM)
        match thinking.get("type"):
            case "adaptive":
                return None
            case "disabled":
                return "none"
            case "enabled":
                budget = _count(thinking, "budget_tokens", at)
                if budget <= _LOW_BUDGET:
                    return "low"
                return "medium" if budget <= _MEDIUM_BUDGET else "high"
            case kind:
                raise _wrong_type(kind, at)


def _blocks(value: object, at: str) -> Iterator[tuple[Object, str]]:
    """Yield each block of a content, and its place; a text is one block, or none."""
    if isinstance(value, str):
        if value:
            yield {"type": "text", "text": value}, at
        return
    if not isinstance(value, list):
        raise UntranslatableError(at, "a text or a list is needed")
    for number, block in enumerate(value):
        where = f"{at}[{number}]"
        if not isinstance(block, dict):
            raise UntranslatableError(where, "an object is needed")
        yield block, where


def _text_part(text: str) -> Object:
    return {"type": "text", "text": text}


def _content(parts: list[Object]) -> str | list[Object]:
    """Return parts as the content of a message: a text, if they are nothing else."""
    if all(part["type"] == "text" for part in parts):
        return _PARAGRAPH.join(part["text"] for part in parts)
    return parts


def _count(found: Object, name: str, at: str = "") -> int:
    value = required(found, name, int, at)
    if value < 1:
        raise UntranslatableError(place(at, name), "a number from 1 on is needed")
    return value


def _wrong_type(kind: object, at: str) -> UntranslatableError:
    """Return the refusal of an object for what its ``type`` says."""
    if not isinstance(kind, str):
        return UntranslatableError(f"{at}.type", "a text is needed")
    return UntranslatableError(f"{at}.type", f"{NO_FORM}: {kind[:60]}")


def _image_data(asked: Object) -> Iterator[str]:
    """Yield the base64 of each image and document of a request."""
    ahead = [asked.get("messages")]
    for value in ahead:  # grows while it is walked
        if isinstance(value, list):
            ahead += value
        elif isinstance(value, dict):
            source = value.get("source")
            if isinstance(source, dict) and source.get("type") == "base64":
                data = source.get("data")
                if isinstance(data, str):
                    yield data
            ahead.append(value.get("content"))
