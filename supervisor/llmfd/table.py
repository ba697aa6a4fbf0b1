"""The LLM fds of one process: numbers, names and marked sections.

Rules of this file.

1. Numbers count from 1 in each process and are never reused; there is no close.
2. ``fd-1`` is taken for ``fd:1``; answers print ``fd:1``.
3. A fork has its parent's descriptors under the same numbers; later changes of one are
   not seen by the other. Contents are shared, and descriptors until one of the two
   changes them, so a fork costs the same at any size.
4. A fork may be made while a call of the parent runs in a worker thread: every change
   of a table holds its lock. A closed table refuses new contents.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, NewType

import msgspec

from hostlib.threads import NestedThreadLock
from supervisor.llmfd.allowance import Replacement
from supervisor.llmfd.errors import (
    FILE_OPERATION,
    INVALID_PARAMETER,
    NOT_FOUND,
    FdError,
)
from supervisor.llmfd.release import give_back

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from supervisor.llmfd.allowance import Allowance
    from supervisor.llmfd.blob import Content
    from supervisor.llmfd.store import Store


FdNumber = NewType("FdNumber", int)

MOST_FDS = 10_000
"""Most descriptors of one process: sharing as many with a fork takes some 3 ms."""

MOST_SECTIONS = 20_000
"""Most marked sections of one process, over all its descriptors."""

MOST_NAME_CHARS = 200

_ID = re.compile(r"fd[:-]([1-9][0-9]{0,17})", re.ASCII)
_LIKE_AN_ID = re.compile(r"(?:fd|temp|ckpt)[:-].*|[0-9]+", re.ASCII | re.IGNORECASE)


class FdState(msgspec.Struct):
    """See ``LlmFd``; ``keys`` are those of its content's blobs."""

    number: int
    keys: list[bytes]
    page_size: int
    source: str
    created: float
    name: str
    sections: dict[str, tuple[int, int]]
    language: str


class TableState(msgspec.Struct):
    """See ``FdTable``."""

    next_number: int
    fds: list[FdState]


@dataclass(slots=True)
class LlmFd:
    """One descriptor.

    Attributes:
        number: as in ``fd:1``.
        content: its text or bytes.
        page_size: characters.
        source: the origin of the content: ``tool:NAME``, ``user_input``, ...
        created: seconds since the epoch.
        name: a second name in calls; empty for none.
        sections: marked lines (first, last) by reference id.
        language: the guessed one; empty before.
    """

    number: FdNumber
    content: Content
    page_size: int
    source: str
    created: float
    name: str = ""
    sections: dict[str, tuple[int, int]] = field(default_factory=dict)
    language: str = ""

    @property
    def id(self) -> str:
        """Return it as answers print it."""
        return f"fd:{self.number}"

    @property
    def is_binary(self) -> bool:
        """Whether it is shown as base64."""
        return self.content.raw is not None

    def snapshot(self) -> FdState:
        """Return it as ``FdTable.restore`` takes it."""
        return FdState(
            self.number,
            self.content.keys,
            self.page_size,
            self.source,
            self.created,
            self.name,
            self.sections,
            self.language,
        )


class FdTable:
    """The descriptors of one process.

    Args:
        store: keeps the contents.
        allowance: charged for new contents; None for no bound.

    Attributes:
        fds: by number.
        next_number: of the next one.
        store: as above.
    """

    def __init__(self, store: Store, allowance: Allowance | None = None) -> None:
        self.fds: dict[int, LlmFd] = {}
        self.next_number = 1
        self.store = store
        self._allowance = allowance
        self._names: dict[str, int] = {}
        self._own: set[int] = set()  # those that no other table shares (rule 3)
        self._lock = NestedThreadLock()
        self._is_closed = False

    def add(
        self, content: Content, source: str, page_size: int, *, name: str = ""
    ) -> LlmFd:
        """Give a content that the caller holds a number; the table holds it then.

        Raises:
            FdError: there are too many or too much, or it cannot be read; the content
                is freed.
        """
        try:
            content.text.pages(page_size)
            with self._lock:
                self._check_count(len(self.fds) + 1)
                if self._allowance is not None:
                    self._allowance.hold(content)
                fd = self._number(content, source, page_size)
                if name:
                    self._names[name] = fd.number
                    fd.name = name
        except BaseException:
            self.store.drop(content)
            raise
        return fd

    def _number(self, content: Content, source: str, page_size: int) -> LlmFd:
        number = FdNumber(self.next_number)
        fd = LlmFd(number, content, page_size, source, time.time())
        self.next_number += 1
        self.fds[number] = fd
        self._own.add(number)
        return fd

    def _own_fd(self, fd: LlmFd) -> LlmFd:
        """Return a descriptor that may change without a fork seeing it."""
        if fd.number not in self._own:
            self.fds[fd.number] = replace(fd, sections=dict(fd.sections))
            self._own.add(fd.number)
        return self.fds[fd.number]

    def _check_count(self, count: int) -> None:
        if self._is_closed:
            raise FdError(FILE_OPERATION, "Cannot store content: the process has ended")
        if count > MOST_FDS:
            text = f"Cannot store content: {MOST_FDS} descriptors are open"
            raise FdError(FILE_OPERATION, text)

    def find(self, fd: str | None, name: str | None = None) -> LlmFd:
        """Return the descriptor of an id or a name; the id wins.

        Raises:
            FdError: ``not_found``; ``invalid_parameter`` if neither is given.
        """
        if fd is not None:
            number = number_of(fd)
            found = self.fds.get(number) if number is not None else None
            if found is None:
                shown = fd if number is None else f"fd:{number}"
                raise FdError(NOT_FOUND, f"File descriptor {shown} not found", fd=shown)
            found.content.touch()
            return found
        if name is None:
            raise FdError(INVALID_PARAMETER, "Missing parameter: fd or name")
        if name not in self._names:
            raise FdError(NOT_FOUND, f"File descriptor {name} not found", fd=name)
        named = self.fds[self._names[name]]
        named.content.touch()
        return named

    def rename(self, fd: LlmFd, name: str) -> None:
        """Change the name of a descriptor.

        Raises:
            FdError: ``invalid_parameter``: it is taken, looks like an id, or is no
                name.
        """
        with self._lock:
            self.check_name(name, fd)
            self.unname(fd)
            self._own_fd(fd).name = name
            self._names[name] = fd.number

    def unname(self, fd: LlmFd) -> None:
        """Remove a descriptor's name."""
        with self._lock:
            if fd.name:
                del self._names[fd.name]
                self._own_fd(fd).name = ""

    def mark(self, fd: LlmFd, ref_id: str, lines: tuple[int, int]) -> None:
        """Mark lines of a descriptor, first and last, in place of an older mark."""
        with self._lock:
            self._own_fd(fd).sections[ref_id] = lines

    def unmark(self, fd: LlmFd, ref_id: str) -> None:
        """Delete a mark."""
        with self._lock:
            del self._own_fd(fd).sections[ref_id]

    def check_name(self, name: str, fd: LlmFd | None = None) -> None:
        """Raise ``FdError`` if ``fd`` may not have this name."""
        about = fd.id if fd is not None else ""
        if not is_name(name):
            text = (
                f"Invalid name: write 1-{MOST_NAME_CHARS} printable characters that"
                " do not look like an id"
            )
            raise FdError(INVALID_PARAMETER, text, fd=about)
        holder = self._names.get(name)
        if holder is not None and (fd is None or holder != fd.number):
            raise FdError(
                INVALID_PARAMETER, f"Name {name} is taken by fd:{holder}", fd=about
            )

    @property
    def sections(self) -> int:
        """Return the number of marked sections."""
        return sum(len(fd.sections) for fd in self.fds.values())

    def holder_of(self, name: str) -> LlmFd | None:
        """Return the descriptor of a name, if there is one."""
        number = self._names.get(name)
        return None if number is None else self.fds[number]

    def fork(self) -> FdTable:
        """Return a copy that changes independently (rule 3)."""
        other = FdTable(self.store, self._allowance)
        with self._lock:
            other.next_number = self.next_number
            other._names = dict(self._names)
            contents = self._contents()
            self.store.hold_all(contents)
            if self._allowance is not None:
                self._allowance.hold_again(contents)
            other.fds = dict(self.fds)
            self._own.clear()
        return other

    def keep_only(self, numbers: set[int]) -> None:
        """Give up every descriptor but these."""
        self.drop([number for number in self.fds if number not in numbers])

    def exchange(
        self, kept: set[int], parts: Iterable[tuple[Content, str]], page_size: int
    ) -> None:
        """Replace all descriptors but some by new ones, or change nothing.

        Args:
            kept: the numbers that stay.
            parts: contents, held for the table, and their sources; each is made when it
                is asked for, so that no more are made than fit.
            page_size: of the new ones.

        Raises:
            FdError: the result is too much, or a part cannot be made.
        """
        done: list[tuple[Content, str]] = []
        with self._lock:
            old = self._contents(except_for=kept)
        gone: list[Content] = []  # freed from the store in any case
        try:
            with Replacement(self._allowance, old) as exchange:
                for content, source in parts:
                    gone.append(content)
                    exchange.add(content)
                    content.text.pages(page_size)
                    done.append((content, source))
                    self._check_count(len(kept) + len(done))
                with self._lock:  # a fork may have been made, or the table closed
                    self._check_count(len(kept) + len(done))
                    exchange.settle(self._contents(except_for=kept))
                    gone = self._forget([n for n in self.fds if n not in kept])
                    for content, source in done:
                        self._number(content, source, page_size)
        finally:
            self.store.drop_all(gone)

    def drop(self, numbers: Iterable[int]) -> None:
        """Give up descriptors."""
        with self._lock:
            contents = self._forget(numbers)
        give_back(self.store, self._allowance, contents)

    def _forget(self, numbers: Iterable[int]) -> list[Content]:
        contents = []
        for number in numbers:
            fd = self.fds[number]
            self.unname(fd)
            del self.fds[number]
            self._own.discard(number)
            contents.append(fd.content)
        return contents

    def enter(self, fd: LlmFd) -> None:
        """Add a restored descriptor, which only this table has.

        The caller holds its content; the table holds it then.
        """
        with self._lock:
            self.fds[fd.number] = fd
            self._own.add(fd.number)
            if fd.name:
                self._names[fd.name] = fd.number
            if self._allowance is not None:
                self._allowance.hold_again((fd.content,))

    def snapshot(self) -> TableState:
        """Return it as ``restore`` takes it."""
        return TableState(self.next_number, [fd.snapshot() for fd in self.fds.values()])

    @classmethod
    def restore(
        cls, state: TableState, store: Store, allowance: Allowance | None
    ) -> FdTable:
        """Return the table of the program before."""
        table = cls(store, allowance)
        table.next_number = state.next_number
        for one in state.fds:
            table.enter(
                LlmFd(
                    FdNumber(one.number),
                    store.content(one.keys),
                    one.page_size,
                    one.source,
                    one.created,
                    one.name,
                    one.sections,
                    one.language,
                )
            )
        return table

    def adopt(self, other: FdTable) -> None:
        """Hold the contents of another, unbounded table instead of its own.

        Raises:
            FdError: ``file_operation``: there is no room; nothing changed.
        """
        with self._lock:
            old, new = self._contents(), other._contents()
            with Replacement(self._allowance, old) as exchange:
                for content in new:
                    exchange.add(content)
                exchange.settle(old)
            self.fds, other.fds = other.fds, {}
            self._names, other._names = other._names, {}
            self._own, other._own = other._own, set()
            self.next_number = other.next_number
        self.store.drop_all(old)

    def close(self) -> None:
        """Give all contents back, many in a thread; refuse new ones."""
        with self._lock:
            self._is_closed = True
            contents = self._contents()
            self.fds = {}
            self._names.clear()
            self._own.clear()
        give_back(self.store, self._allowance, contents)

    def _contents(self, except_for: Collection[int] = ()) -> list[Content]:
        return [fd.content for n, fd in self.fds.items() if n not in except_for]


def number_of(text: str) -> int | None:
    """Return the number of an id (rule 2); None if the text is no id."""
    match = _ID.fullmatch(text)
    return None if match is None else int(match[1])


def is_name(text: str) -> bool:
    """Return whether a text can be a name."""
    return (
        0 < len(text) <= MOST_NAME_CHARS
        and text.isprintable()
        and text == text.strip()
        and not _LIKE_AN_ID.fullmatch(text)
    )


# ``<ref id="...">`` in a model's replies: parts that it names for later use.
#
# One pass over the tags with a stack: linear at any nesting. A tag without its partner
# is ignored. The text of a part is without the tags inside it.

_TAG = re.compile(r"<ref id=\"([^\"<>]{1,200})\">|</ref>")

MOST_REFS = 1000
"""Most parts of one reply; later ones are ignored."""


class Ref(NamedTuple):
    """One marked part of a reply.

    Attributes:
        id: as it was given.
        text: the text between the tags.
    """

    id: str
    text: str


def extract(reply: str) -> tuple[Ref, ...]:
    """Return the parts of a reply, in the order of their ends."""
    bare: list[str] = []  # the reply without tags
    size = 0
    opened: list[tuple[str, int]] = []
    closed: list[tuple[str, int, int]] = []
    position = 0
    for tag in _TAG.finditer(reply):
        bare.append(reply[position : tag.start()])
        size += tag.start() - position
        position = tag.end()
        if tag[1] is not None:
            opened.append((tag[1], size))
        elif opened:
            ref_id, start = opened.pop()
            closed.append((ref_id, start, size))
        if len(closed) == MOST_REFS:
            break
    bare.append(reply[position:])
    text = "".join(bare)
    return tuple(_bound(text, closed))


def _bound(text: str, closed: list[tuple[str, int, int]]) -> list[Ref]:
    """Return the parts up to a total length: deep nesting would be quadratic."""
    left = 8 * len(text) + 1024
    found = []
    for ref_id, start, end in closed:
        left -= end - start
        if left < 0:
            break
        found.append(Ref(ref_id, text[start:end]))
    return found
