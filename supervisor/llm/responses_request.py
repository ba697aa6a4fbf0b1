"""A request of the Responses API as one of Chat Completions (spec MD2).

Rules of this file.

1. Each field that is not null is translated, dropped and named in ``dropped``, or refused by
   its name.  Fields that the endpoint itself reads are skipped here.
2. ``_FIELDS`` lists them in the order of their translation: the choice of a tool comes after
   the tools.
3. No text is repeated for each of many tools: the result is in proportion to the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from supervisor.llm.apis import is_hosted
from supervisor.llm.responses_input import CUSTOM_INPUT, ChatMessages, chat_name
from supervisor.llm.translation import (
    NO_FORM,
    Translation,
    UntranslatableError,
    number,
    objects_in,
    optional,
    place,
    positive,
    refuse_unknown,
    required,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hostlib.documents import Object

_TOOL_DEFAULTS: Object = {
    "defer_loading": False,
    "async": False,
    "allowed_callers": ["direct"],
}
"""Fields of a tool that cannot be translated -> values that have no effect."""


def translate_request(
    asked: Object, *, drops_hosted_tools: bool = False
) -> Translation:
    """Return a request of the Responses API in the form of Chat Completions.

    Args:
        asked: the request, decoded; nothing in it is changed.
        drops_hosted_tools: leave out tools that the provider would run itself; else they
            are refused.

    Raises:
        UntranslatableError: a part of it cannot be translated.
    """
    refuse_unknown(asked, _FIELDS)
    request = _Request(asked, drops_hosted_tools=drops_hosted_tools)
    for name, translate in _FIELDS.items():
        if asked.get(name) is not None:
            translate(request, name)
    return request.finish()


class _Request:
    """A request during its translation.

    Args:
        asked: the request.
        drops_hosted_tools: as of ``translate_request``.
    """

    def __init__(self, asked: Object, *, drops_hosted_tools: bool) -> None:
        self.asked = asked
        self.drops_hosted_tools = drops_hosted_tools
        self.body: Object = {}
        self.max_tokens: int | None = None
        self.conversation = ChatMessages()
        self.dropped = self.conversation.dropped
        self.tools: dict[str, Object] = {}
        self.namespaced: dict[str, tuple[str, str]] = {}
        self.custom: set[str] = set()

    def finish(self) -> Translation:
        """Return the translation."""
        messages = self.conversation.messages()
        if not messages:
            raise UntranslatableError("input", "there is nothing to answer")
        body = {"messages": messages, **self.body}
        if self.tools:
            body["tools"] = list(self.tools.values())
        else:  # without tools they have no effect, and a provider refuses them
            body.pop("tool_choice", None)
            body.pop("parallel_tool_calls", None)
        return Translation(
            body,
            self.max_tokens,
            tuple(self.dropped),
            self.namespaced,
            frozenset(self.custom),
        )

    # Fields

    def leave(self, name: str) -> None:
        """Skip a field that the endpoint reads."""

    def drop(self, name: str) -> None:
        """Leave out a field, whatever its value."""
        self.dropped[name] = None

    def refuse_stored(self, name: str) -> None:
        """Refuse a field that needs a stored answer."""
        reason = "this host stores no answers; send the whole conversation as input"
        raise UntranslatableError(name, reason)

    def instruct(self, name: str) -> None:
        """Translate ``instructions``."""
        self.conversation.add_system(required(self.asked, name, str))

    def converse(self, name: str) -> None:
        """Translate ``input``."""
        items = self.asked[name]
        if isinstance(items, str):
            self.conversation.add_user(items)
            return
        for index, item in enumerate(required(self.asked, name, list)):
            where = f"{name}[{index}]"
            if isinstance(item, dict) and item.get("type") == "additional_tools":
                refuse_unknown(item, {"type", "id", "role", "tools"}, where)
                self._add_tools(item, where)
            else:
                self.conversation.add_item(item, where)

    def offer(self, _name: str) -> None:
        """Translate ``tools``."""
        self._add_tools(self.asked, "")

    def choose(self, name: str) -> None:
        """Translate ``tool_choice``."""
        choice = self.asked[name]
        if choice in ("auto", "none", "required"):
            self._set_choice(choice, name)
            return
        asked = required(self.asked, name, dict)
        kind = required(asked, "type", str, name)
        if kind == "allowed_tools":
            self._allow(asked, name)
            return
        refuse_unknown(asked, {"type", "name", "namespace"}, name)
        function = {"name": self._chosen_name(asked, name)}
        self.body["tool_choice"] = {"type": "function", "function": function}

    def flag(self, name: str) -> None:
        """Copy a field that is true or false."""
        self.body[name] = required(self.asked, name, bool)

    def text(self, name: str) -> None:
        """Copy a field that is a text."""
        self.body[name] = required(self.asked, name, str)

    def number(self, name: str) -> None:
        """Copy a field that is a number."""
        self.body[name] = number(self.asked, name)

    def bound(self, name: str) -> None:
        """Translate ``max_output_tokens``."""
        self.max_tokens = positive(self.asked, name)

    def reason(self, name: str) -> None:
        """Translate ``reasoning``."""
        asked = required(self.asked, name, dict)
        refuse_unknown(asked, {"effort", "summary", "context"}, name)
        if (effort := optional(asked, "effort", str, name)) is not None:
            self.body["reasoning_effort"] = effort
        # The context chooses earlier reasoning to repeat, and there is none here.
        for dropped in ("summary", "context"):
            if asked.get(dropped) is not None:
                self.drop(place(name, dropped))

    def form(self, name: str) -> None:
        """Translate ``text``, the format of the answer."""
        asked = required(self.asked, name, dict)
        refuse_unknown(asked, {"format", "verbosity"}, name)
        if asked.get("verbosity") is not None:
            self.drop("text.verbosity")
        chosen = optional(asked, "format", dict, name)
        if chosen is None:
            return
        where = place(name, "format")
        kind = required(chosen, "type", str, where)
        known = {"type"}
        if kind == "json_schema":
            known |= {"name", "schema", "strict", "description"}
        elif kind not in ("text", "json_object"):
            raise UntranslatableError(place(where, "type"), "there is no such form")
        refuse_unknown(chosen, known, where)
        if kind == "json_object":
            self.body["response_format"] = {"type": kind}
        elif kind == "json_schema":
            self.body["response_format"] = {
                "type": kind,
                kind: {
                    "name": required(chosen, "name", str, where),
                    "schema": required(chosen, "schema", dict, where),
                    **_present_fields(chosen, where, strict=bool, description=str),
                },
            }

    def include(self, name: str) -> None:
        """Drop the one value of ``include`` that has no effect."""
        for index, value in enumerate(required(self.asked, name, list)):
            if value != "reasoning.encrypted_content":
                raise UntranslatableError(f"{name}[{index}]", NO_FORM)
            self.drop(name)

    # Tools

    def _add_tools(self, owner: Object, where: str) -> None:
        """Add the tools of a request, or of an item."""
        for tool, at in _tools_in(owner, where):
            self._add_tool(tool, at)

    def _add_tool(self, tool: Object, where: str) -> None:
        kind = required(tool, "type", str, where)
        if kind == "namespace":
            self._add_namespace(tool, where)
        elif self.drops_hosted_tools and is_hosted(tool):
            self.drop(f"tools.{kind}")
        else:
            self._add_function(tool, where)

    def _add_namespace(self, tool: Object, where: str) -> None:
        refuse_unknown(tool, {"type", "name", "description", "tools"}, where)
        namespace = required(tool, "name", str, where)
        said = optional(tool, "description", str, where)
        # Once, in the first of them (rule 3).
        about = f"About all tools named {namespace}__*: {said}" if said else ""
        for inner, at in _tools_in(tool, where):
            self._add_function(inner, at, namespace, about)
            about = ""

    def _add_function(
        self, tool: Object, where: str, namespace: str | None = None, about: str = ""
    ) -> None:
        """Add a tool that is a function in Chat Completions.

        Args:
            tool: the tool, of type ``function`` or ``custom``.
            where: its place in the request.
            namespace: its namespace.
            about: the beginning of its description.
        """
        kind = required(tool, "type", str, where)
        make = _FUNCTIONS.get(kind)
        if make is None:
            raise _no_tool(tool, where)
        at = place(where, "name")
        own = required(tool, "name", str, where)
        name = chat_name(namespace, own, at)
        if name in self.tools:
            raise UntranslatableError(at, f"a tool before it is called {name} too")
        if namespace is not None:
            self.namespaced[name] = (namespace, own)
        if kind == "custom":
            self.custom.add(name)
        function: Object = {"name": name}
        said = (about, optional(tool, "description", str, where))
        if description := "\n\n".join(filter(None, said)):
            function["description"] = description
        self.tools[name] = {
            "type": "function",
            "function": {**function, **make(tool, where)},
        }

    def _set_choice(self, choice: str, where: str) -> None:
        if choice == "required" and not self.tools:
            raise UntranslatableError(where, "there is no tool to call")
        self.body["tool_choice"] = choice

    def _allow(self, asked: Object, where: str) -> None:
        """Keep only the allowed tools, which has the same effect at every provider."""
        refuse_unknown(asked, {"type", "mode", "tools"}, where)
        mode = required(asked, "mode", str, where)
        if mode not in ("auto", "required"):
            raise UntranslatableError(place(where, "mode"), "there is no such mode")
        allowed = set()
        for tool, at in _tools_in(asked, where):
            if not (self.drops_hosted_tools and is_hosted(tool)):
                refuse_unknown(tool, {"type", "name", "namespace"}, at)
                allowed.add(self._chosen_name(tool, at))
        self.tools = {n: tool for n, tool in self.tools.items() if n in allowed}
        self._set_choice(mode, where)

    def _chosen_name(self, asked: Object, where: str) -> str:
        """Return the name in Chat Completions of a tool that a choice names."""
        kind = required(asked, "type", str, where)
        if kind not in ("function", "custom"):
            raise _no_tool(asked, where)
        at = place(where, "name")
        namespace = optional(asked, "namespace", str, where)
        name = chat_name(namespace, required(asked, "name", str, where), at)
        if name not in self.tools or (name in self.custom) != (kind == "custom"):
            raise UntranslatableError(at, f"there is no {kind} tool {name}")
        return name


def _tools_in(owner: Object, where: str) -> Iterator[tuple[Object, str]]:
    """Yield the tools of an object with their places."""
    return objects_in(required(owner, "tools", list, where), place(where, "tools"))


def _only(wanted: object) -> Callable[[_Request, str], None]:
    """Return a translation that accepts only a value without effect."""

    def check(request: _Request, name: str) -> None:
        value = request.asked[name]
        if type(value) is not type(wanted) or value != wanted:
            only = msgspec.json.encode(wanted).decode()
            reason = f"Chat Completions has no form but for {only}"
            raise UntranslatableError(name, reason)

    return check


def _drop_only(value: object) -> Callable[[_Request, str], None]:
    """Return a translation that drops a field with one value, and refuses others."""
    check = _only(value)

    def drop(request: _Request, name: str) -> None:
        check(request, name)
        request.drop(name)

    return drop


_FIELDS: dict[str, Callable[[_Request, str], None]] = {
    "model": _Request.leave,
    "stream": _Request.leave,
    "stream_options": _Request.leave,
    "background": _only(False),
    "previous_response_id": _Request.refuse_stored,
    "conversation": _Request.refuse_stored,
    "instructions": _Request.instruct,
    "input": _Request.converse,
    "tools": _Request.offer,
    "tool_choice": _Request.choose,
    "parallel_tool_calls": _Request.flag,
    "max_output_tokens": _Request.bound,
    "temperature": _Request.number,
    "top_p": _Request.number,
    "top_logprobs": _only(0),
    "text": _Request.form,
    "reasoning": _Request.reason,
    "truncation": _only("disabled"),
    "user": _Request.text,
    "store": _drop_only(False),
    "include": _Request.include,
    "prompt_cache_key": _Request.drop,
    "client_metadata": _Request.drop,
    "service_tier": _drop_only("auto"),
}
"""Field -> its translation."""


def _function(tool: Object, where: str) -> Object:
    """Return the parts of a ``function`` tool beside its name and description."""
    _refuse_tool_fields(tool, {"parameters", "strict"}, where)
    return _present_fields(tool, where, parameters=dict, strict=bool)


def _custom(tool: Object, where: str) -> Object:
    """Return the same parts for a ``custom`` tool: one parameter, a text."""
    _refuse_tool_fields(tool, {"format"}, where)
    parameter = {"type": "string"}
    form = optional(tool, "format", dict, where) or {"type": "text"}
    at = place(where, "format")
    kind = required(form, "type", str, at)
    if kind == "grammar":
        refuse_unknown(form, {"type", "syntax", "definition"}, at)
        syntax = required(form, "syntax", str, at)
        definition = required(form, "definition", str, at)
        said = f"A text that matches this {syntax} grammar:\n{definition}"
        parameter["description"] = said
    elif kind == "text":
        refuse_unknown(form, {"type"}, at)
    else:
        raise UntranslatableError(place(at, "type"), "there is no such format")
    return {
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_INPUT: parameter},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
    }


_FUNCTIONS: dict[str, Callable[[Object, str], Object]] = {
    "function": _function,
    "custom": _custom,
}
"""Type of tool that becomes a function -> its translation."""


def _refuse_tool_fields(tool: Object, own: set[str], where: str) -> None:
    known = {"type", "name", "description", *own}
    known |= {name for name, value in _TOOL_DEFAULTS.items() if tool.get(name) == value}
    refuse_unknown(tool, known, where)


def _present_fields(owner: Object, where: str, **kinds: type[object]) -> Object:
    """Return the present fields of an object, of those that are known."""
    found = {name: optional(owner, name, kind, where) for name, kind in kinds.items()}
    return {name: value for name, value in found.items() if value is not None}


def _no_tool(tool: Object, where: str) -> UntranslatableError:
    reason = f"Chat Completions has no form for the tool {tool['type'][:50]!r}"
    if is_hosted(tool):
        reason += '; hosted_tools = "drop" in [llm] leaves it out'
    return UntranslatableError(place(where, "type"), reason)
