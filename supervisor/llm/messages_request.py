"""A request of the Messages API as a request of Chat Completions (spec MD2).

Rules of this file.

1. Each field is translated, named in ``dropped``, or refused with its place.  A field that
   is null, or has a value of ``_NEUTRAL``, has no effect.
2. Chat requires the results of tools right after their calls, each as a message.  Messages
   has them among the user's blocks, so other blocks are held until after the results.
3. Time and memory are in proportion to the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from supervisor.llm.prompt_size import IMAGE_TOKENS, LIKELY_BYTES_PER_TOKEN
from supervisor.llm.translation import (
    GAP,
    NO_FORM,
    Translation,
    UntranslatableError,
    file_part,
    image_part,
    join_parts,
    no_form,
    number,
    objects_in,
    optional,
    positive,
    refuse_unknown,
    required,
    text_part,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from hostlib.documents import Object

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
"""Values that equal the behaviour of Chat Completions."""

_EFFORTS = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""Level of ``output_config.effort`` -> a level that every model with reasoning takes."""

_PDF = "application/pdf"

_LOW_BUDGET, _MEDIUM_BUDGET = 2048, 16_000
"""Most tokens of thinking for a low, and a medium effort."""


def translate_request(asked: Object, *, has_reasoning: bool = True) -> Translation:
    """Return a request of the Messages API as one of Chat Completions.

    Args:
        asked: the body; its ``model`` and ``stream`` are ignored.
        has_reasoning: whether the model takes ``reasoning_effort``.

    Raises:
        UntranslatableError: a field is malformed, or has no form in Chat Completions.
    """
    fields = _Fields()
    found = fields.of(asked, "", _REQUEST)
    fields.dropped.update((name, None) for name in found if name in _DROPPED)
    body: Object = {"messages": _Conversation(fields).translate(found)}
    _put_tools(body, found, fields)
    _put_sampling(body, found)
    _put_output(body, found, fields, has_reasoning=has_reasoning)
    bound = positive(found, "max_tokens")
    return Translation(body, bound, tuple(fields.dropped))


def count_tokens_estimate(asked: Object) -> int:
    """Return an estimate of a request's input tokens, at least 1.

    The base64 of an image is not counted as text, but as ``IMAGE_TOKENS``.
    """
    size_bytes, images = len(msgspec.json.encode(asked)), 0
    for data in _base64_in(asked):
        size_bytes -= len(data)
        images += 1
    return -(-size_bytes // LIKELY_BYTES_PER_TOKEN) + images * IMAGE_TOKENS


class _Fields:
    """Reads the objects of a request.

    Attributes:
        dropped: names of fields that were left out, without repetition.
    """

    def __init__(self) -> None:
        self.dropped: dict[str, None] = {}

    def of(self, value: object, at: str, known: Container[str]) -> Object:
        """Return the fields of an object that have an effect (rule 1).

        Raises:
            UntranslatableError: the value is no object, or has an unknown field.
        """
        if not isinstance(value, dict):
            raise UntranslatableError(at, "an object is needed")
        found = {}
        for key, inner in value.items():
            if inner is None or inner in _NEUTRAL.get(key, ()):
                continue
            if key == "cache_control":
                self.dropped[key] = None
            else:
                found[key] = inner
        refuse_unknown(found, known, at)
        return found


class _Conversation:
    """The messages of a request, during their translation.

    Args:
        fields: reads the objects.
    """

    def __init__(self, fields: _Fields) -> None:
        self._fields = fields
        self._messages: list[Object] = []
        # The assistant's last texts and calls; and the parts of others since then, without
        # the results of those calls (rule 2).
        self._said: tuple[list[str], list[Object]] | None = None
        self._held: list[tuple[str, list[Object]]] = []

    def translate(self, found: Object) -> list[Object]:
        """Return the messages for a request's fields."""
        self._hold("system", self._texts(found.get("system", ""), "system"))
        messages = required(found, "messages", list)
        for index, message in enumerate(messages):
            self._take(message, f"messages[{index}]")
        if self._said is not None:
            at = f"messages[{len(messages) - 1}].role"
            reason = "Chat Completions continues no text of the assistant"
            raise UntranslatableError(at, reason)
        self._release()
        if not messages or not self._messages:
            raise UntranslatableError("messages", "there is nothing to answer")
        return self._messages

    def _take(self, message: object, at: str) -> None:
        found = self._fields.of(message, at, ("role", "content"))
        content, at_content = found.get("content"), f"{at}.content"
        match found.get("role"):
            case "user":
                self._take_user(content, at_content)
            case "assistant":
                self._take_assistant(content, at_content)
            case "system":
                self._hold("system", self._texts(content, at_content))
            case _:
                reason = "user, assistant or system is needed"
                raise UntranslatableError(f"{at}.role", reason)

    def _take_user(self, content: object, at: str) -> None:
        self._finish_assistant()
        parts = []
        for block, where in _blocks(content, at):
            if block.get("type") == "tool_result":
                parts += self._take_result(block, where)
            else:
                parts.append(self._part(block, where))
        self._hold("user", parts)

    def _take_result(self, block: Object, at: str) -> list[Object]:
        """Add a tool's result to the messages; return its parts for a user's message.

        Most providers take no image or file in a ``tool`` message.
        """
        known = ("type", "tool_use_id", "content", "is_error")
        found = self._fields.of(block, at, known)
        call_id = required(found, "tool_use_id", str, at)
        texts, shown = [], []
        if optional(found, "is_error", bool, at):
            texts.append("The tool failed.")
        for inner, where in _blocks(found.get("content", ""), f"{at}.content"):
            part = self._part(inner, where)
            if part["type"] != "text":
                shown.append(part)
                name = str(inner["type"]).capitalize()
                part = text_part(f"[{name} {len(shown)} follows from the user.]")
            texts.append(part["text"])
        result = {"role": "tool", "tool_call_id": call_id, "content": GAP.join(texts)}
        self._messages.append(result)
        if shown:
            shown.insert(0, text_part(f"Shown by the result of {call_id}:"))
        return shown

    def _take_assistant(self, content: object, at: str) -> None:
        self._release()
        texts, calls = self._said = self._said or ([], [])
        for block, where in _blocks(content, at):
            match block.get("type"):
                case "text":
                    texts.append(self._part(block, where)["text"])
                case "tool_use":
                    calls.append(self._call(block, where))
                case "thinking" | "redacted_thinking" as kind:
                    self._fields.dropped[f"messages.{kind}"] = None
                case kind:
                    raise no_form(kind, where)

    def _call(self, block: Object, at: str) -> Object:
        found = self._fields.of(block, at, ("type", "id", "name", "input"))
        if "input" not in found:
            raise UntranslatableError(f"{at}.input", "an object is needed")
        try:
            # Of any type: Claude Code keeps the text of a model that is no object.
            arguments = msgspec.json.encode(found["input"]).decode()
        except (ValueError, RecursionError):
            raise UntranslatableError(f"{at}.input", "it is no JSON") from None
        call_id = required(found, "id", str, at)
        function = {"name": required(found, "name", str, at), "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def _hold(self, role: str, parts: list[Object]) -> None:
        """Hold parts until the results that precede them have come (rule 2)."""
        self._finish_assistant()
        if role == "user" and self._held and self._held[-1][0] == role:
            self._held[-1][1].extend(parts)
        elif parts:
            self._held.append((role, parts))

    def _release(self) -> None:
        for role, parts in self._held:
            self._messages.append({"role": role, "content": join_parts(parts)})
        self._held.clear()

    def _finish_assistant(self) -> None:
        if self._said is None:
            return
        texts, calls = self._said
        self._said = None
        message: Object = {"role": "assistant", "content": GAP.join(texts)}
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = calls
        self._messages.append(message)

    # Blocks

    def _texts(self, content: object, at: str) -> list[Object]:
        """Return a content that must be text, as parts."""
        parts = []
        for block, where in _blocks(content, at):
            if block.get("type") != "text":
                raise no_form(block.get("type"), where)
            parts.append(self._part(block, where))
        return parts

    def _part(self, block: Object, at: str) -> Object:
        """Return a block for the model, as a part of a message."""
        match block.get("type"):
            case "text":
                found = self._fields.of(block, at, ("type", "text"))
                return text_part(required(found, "text", str, at))
            case "image":
                found = self._fields.of(block, at, ("type", "source"))
                source = required(found, "source", dict, at)
                return self._image(source, f"{at}.source")
            case "document":
                return self._document(block, at)
            case kind:
                raise no_form(kind, at)

    def _image(self, source: Object, at: str) -> Object:
        match source.get("type"):
            case "url":
                found = self._fields.of(source, at, ("type", "url"))
                return image_part(required(found, "url", str, at), f"{at}.url")
            case "base64":
                found = self._fields.of(source, at, ("type", "media_type", "data"))
                media_type = required(found, "media_type", str, at)
                data = required(found, "data", str, at)
                return image_part(f"data:{media_type};base64,{data}", at)
            case kind:
                raise no_form(kind, at)

    def _document(self, block: Object, at: str) -> Object:
        found = self._fields.of(block, at, ("type", "source", "title", "context"))
        title = optional(found, "title", str, at)
        context = optional(found, "context", str, at)
        source, at_source = required(found, "source", dict, at), f"{at}.source"
        kind = source.get("type")
        if kind not in ("text", "base64"):
            raise no_form(kind, at_source)
        found = self._fields.of(source, at_source, ("type", "media_type", "data"))
        data = required(found, "data", str, at_source)
        if kind == "text":
            return text_part(GAP.join(filter(None, (title, context, data))))
        if context:
            raise UntranslatableError(f"{at}.context", NO_FORM)
        if found.get("media_type") != _PDF:
            raise UntranslatableError(f"{at_source}.media_type", f"{_PDF} is needed")
        name = title or "document.pdf"
        return file_part(f"data:{_PDF};base64,{data}", name, f"{at_source}.data")


# Other fields


def _put_tools(body: Object, found: Object, fields: _Fields) -> None:
    tools = optional(found, "tools", list)
    if tools:
        body["tools"] = [
            _tool(tool, f"tools[{index}]", fields) for index, tool in enumerate(tools)
        ]
    if "tool_choice" in found:
        _put_choice(body, found["tool_choice"], fields)


def _tool(tool: object, at: str, fields: _Fields) -> Object:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in (None, "custom"):
        raise no_form(kind, at)
    known = ("type", "name", "description", "input_schema", "strict")
    found = fields.of(tool, at, known)
    function: Object = {"name": required(found, "name", str, at)}
    if (description := optional(found, "description", str, at)) is not None:
        function["description"] = description
    function["parameters"] = required(found, "input_schema", dict, at)
    if optional(found, "strict", bool, at):
        function["strict"] = True
    return {"type": "function", "function": function}


def _put_choice(body: Object, value: object, fields: _Fields) -> None:
    at = "tool_choice"
    found = fields.of(value, at, ("type", "name", "disable_parallel_tool_use"))
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
            raise no_form(kind, at)
    is_single = optional(found, "disable_parallel_tool_use", bool, at)
    if "tools" not in body:  # providers refuse both fields without tools
        if choice not in ("auto", "none"):
            raise UntranslatableError(at, "there is no tool to call")
        return
    body["tool_choice"] = choice
    if is_single:
        body["parallel_tool_calls"] = False


def _put_sampling(body: Object, found: Object) -> None:
    for name in ("temperature", "top_p"):
        if name in found:
            body[name] = number(found, name)
    stops = optional(found, "stop_sequences", list) or []
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            at = f"stop_sequences[{index}]"
            raise UntranslatableError(at, "a text is needed")
    if stops:
        body["stop"] = stops


def _put_output(
    body: Object, found: Object, fields: _Fields, *, has_reasoning: bool
) -> None:
    """Set the format of the answer and the effort in a body."""
    at = "output_config"
    output = fields.of(found.get(at, {}), at, ("effort", "format"))
    if "format" in output:
        body["response_format"] = _format(output["format"], f"{at}.format", fields)
    level = optional(output, "effort", str, at)
    if level is not None and level not in _EFFORTS:
        raise UntranslatableError(f"{at}.effort", NO_FORM)
    named = None
    effort = None if level is None else _EFFORTS[level]
    if "thinking" in found:
        named = _thinking_effort(found["thinking"], fields)
        effort = named or effort or "medium"
    if has_reasoning and effort:
        body["reasoning_effort"] = effort
    elif "thinking" in found:
        fields.dropped["thinking"] = None
    if level is not None and (named or not has_reasoning):
        fields.dropped[f"{at}.effort"] = None


def _format(value: object, at: str, fields: _Fields) -> Object:
    found = fields.of(value, at, ("type", "schema"))
    if found.get("type") != "json_schema":
        raise no_form(found.get("type"), at)
    schema = required(found, "schema", dict, at)
    form = {"name": "answer", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": form}


def _thinking_effort(value: object, fields: _Fields) -> str | None:
    """Return the effort for ``thinking``; None if the model chooses it."""
    at = "thinking"
    found = fields.of(value, at, ("type", "budget_tokens", "display"))
    if found.get("display") not in (None, "summarized", "omitted"):
        raise UntranslatableError(f"{at}.display", NO_FORM)
    match found.get("type"):
        case "adaptive":
            return None
        case "disabled":
            return "none"
        case "enabled":
            budget = positive(found, "budget_tokens", at)
            if budget <= _LOW_BUDGET:
                return "low"
            return "medium" if budget <= _MEDIUM_BUDGET else "high"
        case kind:
            raise no_form(kind, at)


# Parts of all


def _blocks(content: object, at: str) -> Iterator[tuple[Object, str]]:
    """Yield each block of a content with its place; a text is one block, or none."""
    if isinstance(content, str):
        if content:
            yield text_part(content), at
        return
    if not isinstance(content, list):
        raise UntranslatableError(at, "a text or a list of blocks is needed")
    yield from objects_in(content, at)


def _base64_in(asked: Object) -> Iterator[str]:
    """Yield the base64 of each image and document of a request."""
    ahead = [asked.get("messages")]
    for value in ahead:  # grows while it is walked
        if isinstance(value, list):
            ahead += value
        elif isinstance(value, dict):
            ahead.append(value.get("content"))
            source = value.get("source")
            if isinstance(source, dict) and source.get("type") == "base64":
                data = source.get("data")
                if isinstance(data, str):
                    yield data
