"""Turns a TOML document into Structs and finds all its faults at once.

Unknown keys, missing keys and wrong types, each with its path.

Rules of this file.

1. A fault does not stop the reading: each key is converted alone; a key that cannot be
   converted gets its default, or nothing.
2. A key's path is written as in TOML: ``policy.run.read``.
"""

from __future__ import annotations

import re
import stat
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Union, get_args, get_origin

import msgspec

from hostlib.messages import remedy
from hostlib.user_values import join_key

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


_MSGSPEC_WHERE = re.compile(r" - at `\$(?P<path>[^`]*)`$")


_OTHER_TYPE = re.compile(r"expected (?P<wanted>[a-z |]+), got (?P<given>[a-z]+)")

_IN_TOML = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "an array",
    "list": "an array",
    "object": "a table",
    "dict": "a table",
    "datetime": "a date-time",
    "date": "a date",
    "time": "a time",
}
"""TOML's names of the types of msgspec and Python."""


class Fault(NamedTuple):
    """One fault of a configuration.

    Attributes:
        key: its path; empty for the whole file.
        reason: the fault and its remedy, in one line.
    """

    key: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}" if self.key else self.reason


class DocumentReader:
    """Reads one document.

    Attributes:
        faults: the faults so far.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def has_told(self, key: str) -> bool:
        """Return whether a key could not be read, so that it has another value (rule 1)."""
        return any(key == its or key.startswith(f"{its}.") for its, _ in self.faults)

    def read(self, kind: Any, value: object, path: str = "") -> Any:
        """Convert a value; record its faults.

        Args:
            kind: a Struct, a dict of them, or any type that msgspec converts to.
            value: from ``tomllib``.
            path: its key.

        Returns:
            The converted value; ``msgspec.UNSET`` if there is none.
        """
        kind = _inner_type(kind)
        if _is_struct(kind):
            return self._struct(kind, value, path)
        if get_origin(kind) is dict:
            return self._convert_items(get_args(kind)[1], value, path)
        try:
            return msgspec.convert(value, type=kind)
        except msgspec.ValidationError as why:
            self.faults.append(_word_fault(path, str(why)))
            return msgspec.UNSET

    def _struct(self, kind: Any, value: object, path: str) -> Any:
        if not isinstance(value, dict):
            self._add_type_fault("a table", value, path)
            return msgspec.UNSET
        fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        found: dict[str, Any] = {}
        for key, item in value.items():
            where = f"{path}.{join_key(key)}" if path else join_key(key)
            field = fields.get(key)
            if field is None:
                known = ", ".join(fields)
                self.faults.append(Fault(where, f"unknown key; known are {known}"))
                continue
            read = self.read(field.type, item, where)
            if read is not msgspec.UNSET:
                found[field.name] = read
        for name, field in fields.items():
            if field.required and field.name not in found:
                found[field.name] = (get_origin(field.type) or field.type)()
                if name not in value:
                    where = f"{path}.{name}" if path else name
                    self.faults.append(Fault(where, "is missing"))
        return kind(**found)

    def _convert_items(self, kind: Any, value: object, path: str) -> Any:
        if not isinstance(value, dict):
            self._add_type_fault("a table", value, path)
            return msgspec.UNSET
        found = {}
        for name, item in value.items():
            read = self.read(kind, item, f"{path}.{join_key(name)}")
            if read is not msgspec.UNSET:
                found[name] = read
        return found

    def _add_type_fault(self, what: str, value: object, path: str) -> None:
        given = type(value).__name__
        reason = f"expected {what}, got {_IN_TOML.get(given, given)}"
        self.faults.append(Fault(path, reason))


def _inner_type(kind: Any) -> Any:
    """Return the type inside of an optional one; TOML has no null."""
    if get_origin(kind) in {Union, types.UnionType}:
        left = [part for part in get_args(kind) if part is not type(None)]
        if len(left) == 1:
            return left[0]
    return kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _word_fault(path: str, text: str) -> Fault:
    """Return msgspec's fault: its own path is beneath the key's."""
    match = _MSGSPEC_WHERE.search(text)
    where = path
    if match is not None:
        where += match["path"]
        text = text[: match.start()]
    text = text.replace("`", "")
    return Fault(where, _in_toml_words(text[:1].lower() + text[1:]))


def _in_toml_words(text: str) -> str:
    """Return msgspec's message about a type in the words of TOML, with a remedy."""
    match = _OTHER_TYPE.fullmatch(text)
    if match is None:
        return text
    wanted = match["wanted"].split(" | ")
    if "float" in wanted and "int" in wanted:
        wanted.remove("int")  # covered by number
    words = " or ".join(_IN_TOML.get(name, name) for name in wanted)
    hint = "; write it in quotes" if wanted == ["str"] else ""
    return f"expected {words}, got {_IN_TOML.get(match['given'], match['given'])}{hint}"


def names_of(document: Mapping[str, Any], section: str) -> Collection[str] | None:
    """Return the names in a section as written, those with faults included.

    Returns:
        None if the section is no table: its names are not known.
    """
    found = document.get(section, {})
    return found if isinstance(found, dict) else None


def directory_fault(path: str) -> str:
    """Return why a path is no existing directory; empty if it is one."""
    if not path or "\0" in path:
        return f"not a path: {path!r}"
    try:
        is_directory = stat.S_ISDIR(Path(path).stat().st_mode)
    except FileNotFoundError:
        return f"there is no {path!r}; make it first"
    except OSError as why:
        return f"cannot use {path!r}: {why.strerror}{remedy(why)}"
    return "" if is_directory else f"{path!r} is not a directory"
