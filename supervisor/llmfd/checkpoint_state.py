"""What a checkpoint holds of a process, as values of JSON, and the way back.

Contents are named by the hash of what was put in: the base64 of binary content is made
again.

Rule of this file: each value that comes back is looked at before anything is done with
it.  Its hash (``supervisor.llmfd.checkpoint_rows``) is no seal: a user who can write the file can
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
"""Its first second: a time from there on may be none that a date can say."""

_KEY = re.compile(r"[0-9a-f]{64}")


class Conversation(Protocol):
    """What a checkpoint keeps of a process.

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
class KeptState:
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
    process: Conversation, snapshots: Sequence[WorkspaceSnapshot] = ()
) -> bytes:
    """Return the conversation and the descriptors of a process, and of which files.

    Each message is a line: to write or read all at once would hold the interpreter for
    tenths of a second, in whichever thread it is done.
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
    if snapshots:  # else it is as programs before wrote it, and can read it
        document["snapshots"] = snapshots
    lines = [json.dumps(one).encode() for one in (document, *messages)]
    return b"\n".join(lines)


# And back


def is_time(value: object) -> bool:
    """Tell whether a value is a time that answers can print."""
    return isinstance(value, float) and 0 <= value < YEAR_9999


def is_count(value: object) -> bool:
    """Tell whether a value is a number of something."""
    return type(value) is int and value >= 0


def is_key(value: object) -> bool:
    """Tell whether a value names a content: nothing else is the name of a file."""
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def is_text(value: object) -> bool:
    """Tell whether a value is a text."""
    return isinstance(value, str)


def _is_positive(value: object) -> bool:
    return is_count(value) and value != 0


def _are_sections(value: object) -> bool:
    """Tell whether a value is lines by reference id; JSON has no other keys than texts."""
    return isinstance(value, dict) and all(map(_are_lines, value.values()))


def _are_lines(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(map(is_count, value)):
        return False
    first, last = value
    return bool(1 <= first <= last)


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _are_fds(value: object) -> bool:
    """Tell whether a value is descriptors, each with a number and a name of its own."""
    if not isinstance(value, list) or not all(have(_FD, row) for row in value):
        return False
    names = [row["name"] for row in value if row["name"]]
    numbers = {row["number"] for row in value}
    return len(numbers) == len(value) and len(set(names)) == len(names)


def have(checks: Mapping[str, Callable[[object], bool]], values: object) -> bool:
    """Tell whether values are those of a table of checks, no more and no less."""
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
    "sections": _are_sections,
}

_STATE: dict[str, Callable[[object], bool]] = {
    "next": _is_positive,
    "messages": _are_objects,
    "program": is_text,
    "fds": _are_fds,
}


def read_state(state: bytes) -> KeptState | None:
    """Return what ``state_of`` said; None: this is nothing that it returned."""
    head, *lines = state.split(b"\n")
    try:
        document = json.loads(head)
        said = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return None
    if isinstance(document, dict) and (said or document.get("messages") == 0):
        document["messages"] = said if document.get("messages") == len(said) else None
    # Else it is as programs before wrote it: the messages are a part of the document.
    snapshots = _snapshots_of(document)
    if snapshots is None or not have(_STATE, document):
        return None
    fds = tuple(KeptFd(**row) for row in document.pop("fds"))
    kept = KeptState(**document, fds=fds, snapshots=snapshots)
    return kept if all(fd.number < kept.next for fd in fds) else None


def snapshots_in(state: bytes) -> tuple[WorkspaceSnapshot, ...]:
    """Return the snapshots that a state names; none if it is damaged."""
    try:
        document = json.loads(state.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return ()
    return _snapshots_of(document) or ()


def _snapshots_of(document: object) -> tuple[WorkspaceSnapshot, ...] | None:
    """Take the snapshots out of a document; None: these are none."""
    if not isinstance(document, dict):
        return None
    found = document.pop("snapshots", [])
    if not isinstance(found, list) or not all(map(is_snapshot, found)):
        return None
    return tuple(WorkspaceSnapshot(*one) for one in found)


def table_of(store: Store, kept: KeptState, read: Callable[[str], Content]) -> FdTable:
    """Return the descriptors of a state, their contents held.

    Args:
        store: keeps the contents.
        kept: from ``read_state``.
        read: returns the content of a key, held once; what it raises is raised.
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
