"""The state of a process in a checkpoint: written as JSON and read back.

Contents are named by the hash of the original bytes: the base64 of binary content is
made again.

Each value that is read is checked before use. Its hash
(``supervisor.llmfd.checkpoint_rows``) is no proof: a user who can write the file can
make one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from supervisor.llmfd.table import FdNumber, FdTable, LlmFd
from supervisor.llmfd.workspaces import WorkspaceSnapshot, is_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from supervisor.llmfd.arguments import Json
    from supervisor.llmfd.blob import Content
    from supervisor.llmfd.store import Store

YEAR_9999 = 253_370_764_800.0
"""The first second beyond the years that a date can have."""

_KEY = re.compile(r"[0-9a-f]{64}")


class CheckpointedProcess(Protocol):
    """The parts of a process that a checkpoint keeps.

    Attributes:
        table: its descriptors.
        messages: as in ``Process``.
        program: as above.
    """

    table: FdTable
    messages: list[dict[str, Json]]
    program: str


@dataclass(frozen=True, slots=True)
class KeptFd:
    """One descriptor, as the state names its values.

    Attributes:
        key: of its content.
        sections: first and last line by reference id.
    """

    number: int
    key: str
    page_size: int
    source: str
    created: float
    name: str
    sections: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """The conversation and the descriptors of a process.

    Attributes:
        next: number of the next descriptor.
        messages: as in ``Process``.
        program: as above.
        fds: in the order of their numbers.
        snapshots: of the child's workspaces, made with it.
    """

    next: int
    messages: list[dict[str, Json]]
    program: str
    fds: tuple[KeptFd, ...]
    snapshots: tuple[WorkspaceSnapshot, ...] = ()


# There


def state_of(
    process: CheckpointedProcess, snapshots: Sequence[WorkspaceSnapshot] = ()
) -> bytes:
    """Return the state of a process and the names of its files' snapshots.

    Each message is a line: writing or reading all at once would hold the interpreter
    for tenths of a second, in any thread.
    """
    messages = process.messages
    document = {
        "next": process.table.next_number,
        "messages": len(messages),
        "program": process.program,
        "fds": [
            {
                "number": fd.number,
                "key": fd.content.original.key.hex(),
                "page_size": fd.page_size,
                "source": fd.source,
                "created": fd.created,
                "name": fd.name,
                "sections": fd.sections,
            }
            for fd in process.table.fds.values()
        ],
    }
    if snapshots:  # else the form of earlier programs, which can read it
        document["snapshots"] = snapshots
    lines = [json.dumps(one).encode() for one in (document, *messages)]
    return b"\n".join(lines)


# Reading


def is_time(value: object) -> bool:
    """Return whether a value is a time that answers can print."""
    return isinstance(value, float) and 0 <= value < YEAR_9999


def is_count(value: object) -> bool:
    """Return whether a value is a count."""
    return type(value) is int and value >= 0


def is_key(value: object) -> bool:
    """Return whether a value is a content's key: only keys are names of files."""
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def is_text(value: object) -> bool:
    """Return whether a value is a text."""
    return isinstance(value, str)


def _is_positive(value: object) -> bool:
    return is_count(value) and value != 0


def _is_sections(value: object) -> bool:
    """Return whether a value maps reference ids to lines."""
    return isinstance(value, dict) and all(map(_is_lines, value.values()))


def _is_lines(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(map(is_count, value)):
        return False
    first, last = value
    return bool(1 <= first <= last)


def _is_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _is_fds(value: object) -> bool:
    """Return whether a value is a list of descriptors with unique numbers and names."""
    if not isinstance(value, list) or not all(match_checks(_FD, row) for row in value):
        return False
    names = [row["name"] for row in value if row["name"]]
    numbers = {row["number"] for row in value}
    return len(numbers) == len(value) and len(set(names)) == len(names)


def match_checks(
    checks: Mapping[str, Callable[[object], bool]], values: object
) -> bool:
    """Return whether values match a table of checks, no more and no less."""
    return (
        isinstance(values, dict)
        and values.keys() == checks.keys()
        and all(check(values[name]) for name, check in checks.items())
    )


_FD: dict[str, Callable[[object], bool]] = {
    "number": _is_positive,
    "key": is_key,
    "page_size": _is_positive,
    "source": is_text,
    "created": is_time,
    "name": is_text,
    "sections": _is_sections,
}

_STATE: dict[str, Callable[[object], bool]] = {
    "next": _is_positive,
    "messages": _is_objects,
    "program": is_text,
    "fds": _is_fds,
}


def read_state(state: bytes) -> CheckpointState | None:
    """Return the state that ``state_of`` wrote; None for any other bytes."""
    head, *lines = state.split(b"\n")
    try:
        document = json.loads(head)
        said = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return None
    if isinstance(document, dict) and (said or document.get("messages") == 0):
        document["messages"] = said if document.get("messages") == len(said) else None
    # Else the form of earlier programs, with the messages inside the document.
    snapshots = _snapshots_of(document)
    if snapshots is None or not match_checks(_STATE, document):
        return None
    fds = tuple(KeptFd(**row) for row in document.pop("fds"))
    kept = CheckpointState(**document, fds=fds, snapshots=snapshots)
    return kept if all(fd.number < kept.next for fd in fds) else None


def snapshots_in(state: bytes) -> tuple[WorkspaceSnapshot, ...]:
    """Return the snapshots of a state; none if it is damaged."""
    try:
        document = json.loads(state.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return ()
    return _snapshots_of(document) or ()


def _snapshots_of(document: object) -> tuple[WorkspaceSnapshot, ...] | None:
    """Return the snapshots of a document; None if it is damaged."""
    if not isinstance(document, dict):
        return None
    found = document.pop("snapshots", [])
    if not isinstance(found, list) or not all(map(is_snapshot, found)):
        return None
    return tuple(WorkspaceSnapshot(*one) for one in found)


def table_of(
    store: Store, kept: CheckpointState, read: Callable[[str], Content]
) -> FdTable:
    """Return the descriptors of a state, their contents held.

    Args:
        store: keeps the contents.
        kept: from ``read_state``.
        read: returns the content of a key, held once; its exceptions pass through.
    """
    table = FdTable(store)
    contents: dict[str, Content] = {}
    try:
        for fd in kept.fds:
            if fd.key not in contents:
                contents[fd.key] = read(fd.key)
            _enter(table, store, fd, contents[fd.key])
    except BaseException:
        table.close()
        raise
    finally:
        for content in contents.values():
            store.drop(content)
    table.next_number = kept.next
    return table


def _enter(table: FdTable, store: Store, fd: KeptFd, content: Content) -> None:
    content.text.pages(fd.page_size)
    table.enter(
        LlmFd(
            FdNumber(fd.number),
            store.hold(content),
            fd.page_size,
            fd.source,
            fd.created,
            fd.name,
            {ref: (first, last) for ref, (first, last) in fd.sections.items()},
        )
    )
