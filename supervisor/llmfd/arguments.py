"""Parameters of tools: one table row for the checker and for the model.

Rules of this file.

1. ``null`` is the same as absent.
2. A value of a wrong type, an unknown or a missing parameter is an ``FdError`` that the
   model can act on, never an exception of Python.
3. JSON schemas are made from the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from supervisor.llmfd.errors import INVALID_PARAMETER, FdError
from supervisor.llmfd.table import number_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

STRING, INTEGER, BOOLEAN, STRINGS, FDS, BLOCKS, TEXT = (
    *("string", "integer", "boolean", "list of strings"),
    *("list of descriptors", "list of blocks", "text"),
)
"""Kinds of parameters; TEXT is a string or ``{"token": ...}``."""


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter.

    Attributes:
        name: as in a call.
        kind: one of the kinds above.
        about: for the model.
        required: whether a call without it is refused.
        choices: the allowed strings; empty for any.
    """

    name: str
    kind: str
    about: str
    required: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tool:
    """One call.

    Attributes:
        name: as in ``[tools] enabled``.
        about: for the model.
        params: in the order of positional arguments.
        run: does it with the process and the parameters; at once, or awaited.
        is_async: whether ``run`` is awaited.
        is_slow: whether it needs a worker thread: it reads or stores content, or lists
            what may be many.
    """

    name: str
    about: str
    params: tuple[Param, ...]
    run: Callable[..., bytes | Awaitable[bytes]]
    is_async: bool = False
    is_slow: bool = False


def bind(
    tool: Tool, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return the checked parameters of a call.

    Raises:
        FdError: ``invalid_parameter``.
    """
    about = _named_fd(kwargs)
    given = dict(kwargs)
    if len(args) > len(tool.params):
        text = f"{tool.name} takes at most {len(tool.params)} parameters"
        raise FdError(INVALID_PARAMETER, text, fd=about)
    for param, value in zip(tool.params, args, strict=False):
        if param.name in given:
            text = f"Parameter {param.name} is given twice"
            raise FdError(INVALID_PARAMETER, text, fd=about)
        given[param.name] = value
    known = {param.name: param for param in tool.params}
    unknown = [name for name in given if name not in known]
    if unknown:
        text = f"Unknown parameter {unknown[0]}; {tool.name} takes: " + ", ".join(known)
        raise FdError(INVALID_PARAMETER, text, fd=about)
    values = {}
    for param in tool.params:
        value = given.get(param.name)
        if value is not None:
            values[param.name] = _check_value(param, value, about)
        elif param.required:
            text = f"Missing parameter: {param.name}"
            raise FdError(INVALID_PARAMETER, text, fd=about)
    return values


def _named_fd(kwargs: Mapping[str, object]) -> str:
    """Return the descriptor that a call names, as answers print it."""
    fd = kwargs.get("fd")
    if not isinstance(fd, str):
        return ""
    number = number_of(fd)
    return fd if number is None else f"fd:{number}"


def _check_value(param: Param, value: object, about: str) -> object:
    if not _CHECKS[param.kind](value):
        found = _WORDS.get(type(value), "something else")
        text = f"Parameter {param.name} must be {_kind(param.kind)}, not {found}"
        raise FdError(INVALID_PARAMETER, text, fd=about)
    if param.choices and value not in param.choices:
        text = f"Parameter {param.name} must be one of: " + ", ".join(param.choices)
        raise FdError(INVALID_PARAMETER, text, fd=about)
    return value


def _kind(kind: str) -> str:
    article = "an" if kind[0] in "aeiou" else "a"
    return f"{article} {kind}"


def is_token(value: object) -> bool:
    """Return whether a value stands for content that was put in before."""
    return (
        isinstance(value, dict)
        and list(value) == ["token"]
        and isinstance(value["token"], str)
    )


def _is_fd_part(value: object) -> bool:
    if isinstance(value, str):
        return True
    if not isinstance(value, dict) or not isinstance(value.get("fd"), str):
        return False
    lines = {"start_line", "end_line"}
    numbers = all(v is None or type(v) is int for k, v in value.items() if k in lines)
    return numbers and set(value) <= {"fd", *lines}


_CHECKS: dict[str, Callable[[object], bool]] = {
    STRING: lambda value: isinstance(value, str),
    INTEGER: lambda value: type(value) is int,
    BOOLEAN: lambda value: type(value) is bool,
    STRINGS: lambda value: (
        isinstance(value, list) and all(isinstance(item, str) for item in value)
    ),
    FDS: lambda value: isinstance(value, list) and all(map(_is_fd_part, value)),
    BLOCKS: lambda value: (
        isinstance(value, list) and all(isinstance(item, dict) for item in value)
    ),
    TEXT: lambda value: isinstance(value, str) or is_token(value),
}

_WORDS: dict[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number with a fraction",
    bool: "a boolean",
    list: "a list",
    dict: "an object",
}

_PART_SCHEMA: dict[str, Json] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {
                "fd": {"type": "string"},
                "start_line": {"type": "integer"},
                "end_line": {"type": "integer"},
            },
            "required": ["fd"],
            "additionalProperties": False,
        },
    ]
}

_SCHEMAS: dict[str, dict[str, Json]] = {
    STRING: {"type": "string"},
    INTEGER: {"type": "integer"},
    BOOLEAN: {"type": "boolean"},
    STRINGS: {"type": "array", "items": {"type": "string"}},
    FDS: {"type": "array", "items": _PART_SCHEMA},
    BLOCKS: {"type": "array", "items": {"type": "object"}},
    TEXT: {"type": "string"},
}


def parameters_schema(tool: Tool) -> dict[str, Json]:
    """Return the JSON schema of a tool's parameters."""
    properties: dict[str, Json] = {}
    for param in tool.params:
        entry: dict[str, Json] = {**_SCHEMAS[param.kind], "description": param.about}
        if param.choices:
            entry["enum"] = list(param.choices)
        properties[param.name] = entry
    required: list[Json] = [param.name for param in tool.params if param.required]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def chat_schema(tool: Tool) -> dict[str, Json]:
    """Return a tool in the form of the chat API."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.about,
            "parameters": parameters_schema(tool),
        },
    }
