"""The file tools of ``sandhost mcp --files``: read, write, edit, list and search.

System calls of this process, which is part of a child: the kernel decides what they may
reach.

Rules of this file.

1. Each answer is bounded, and says how to get the rest.
2. Only regular files are read or written: a FIFO would block.
3. Functions here may block; the caller runs them in a thread.
"""

# ruff: noqa: PTH103, PTH112, PTH120 - texts and descriptors
from __future__ import annotations

import errno
import fnmatch
import os
import stat
import time
from contextlib import suppress
from itertools import islice
from typing import IO, TYPE_CHECKING, Annotated, Any

import msgspec

from hostlib.threads import stop_if_cancelled

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_CHARS = 30_000
"""Longest answer: some 8,000 tokens."""

MOST_LINES, MOST_LINE_CHARS = 2_000, 2_000
"""Longest answer of READ, and its longest line."""

MOST_EDITED_BYTES = 16 * 1024 * 1024
"""Largest file that EDIT takes into memory."""

MOST_ENTRIES, MOST_MATCHES = 1_000, 500

MOST_SEARCHED_BYTES = 8 * 1024 * 1024
"""Largest file that is searched; longer ones are rarely text."""

SEARCH_S = 20.0
"""Longest search: an agent waits for it."""

_MOST_PROGRAM_BYTES = 2 * 1024 * 1024
"""A compiled expression; see ``supervisor.llmfd.search``."""

_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MATCH_CHARS = 300
_LINE_BYTES = 65_536  # an expression of many states takes a second for it
_LOOK_BYTES = 8192
_SKIPPED = frozenset({".git", ".hg", ".svn", "node_modules", "__pycache__"})

Path = Annotated[
    str,
    msgspec.Meta(
        description="Absolute, or relative to the working directory.", min_length=1
    ),
]


class McpToolError(Exception):
    """A failed call; the text has the reason and the remedy."""


class Read(msgspec.Struct, forbid_unknown_fields=True):
    """Return lines of a text file, with their numbers told where some are left out."""

    path: Path
    offset: Annotated[int, msgspec.Meta(ge=1, description="First line.")] = 1
    limit: Annotated[
        int, msgspec.Meta(ge=1, le=MOST_LINES, description="Most lines.")
    ] = MOST_LINES


class Write(msgspec.Struct, forbid_unknown_fields=True):
    """Make a file, or replace its whole content; missing directories are made."""

    path: Path
    content: str


class Edit(msgspec.Struct, forbid_unknown_fields=True):
    """Replace an exact text in a file, once; refused if it occurs more than once."""

    path: Path
    old: Annotated[str, msgspec.Meta(description="Exact, with blanks and line ends.")]
    new: str
    all: Annotated[bool, msgspec.Meta(description="Replace it everywhere.")] = False


class List(msgspec.Struct, forbid_unknown_fields=True):
    """List a directory: names in order, ``/`` behind directories, ``@`` behind links."""

    path: Path = "."


class Search(msgspec.Struct, forbid_unknown_fields=True):
    """Find lines by a regular expression (RE2) beneath a path: PATH:LINE:TEXT."""

    pattern: Annotated[str, msgspec.Meta(min_length=1, max_length=10_000)]
    path: Path = "."
    glob: Annotated[
        str, msgspec.Meta(description="Only files of such a name, as *.py.")
    ] = "*"
    ignore_case: bool = False


def read(asked: Read) -> str:
    """Return lines of a file, and the line to continue with."""
    found: list[str] = []
    room = MOST_CHARS
    with _open(asked.path, os.O_RDONLY, "read") as file:
        if b"\0" in os.pread(file.fileno(), _LOOK_BYTES, 0):
            how = "look at it by exec (file, xxd)"
            raise McpToolError(f"cannot read {asked.path!r}: it is no text; {how}")
        for number, line in enumerate(_lines_of(file), 1):
            if number < asked.offset:
                continue
            if len(found) >= asked.limit or room < len(line):
                found.append(f"[more; go on with offset={number}]\n")
                break
            room -= len(line)
            found.append(line)
        else:
            if not found and asked.offset > 1:
                text = f"it has fewer than {asked.offset} lines; use a smaller offset"
                raise McpToolError(f"cannot read {asked.path!r}: {text}")
    return "".join(found)


def write(asked: Write) -> str:
    """Write a file; return its size."""
    data = _encode(asked.content, "write", asked.path)
    directory = os.path.dirname(asked.path)
    try:
        if directory:
            os.makedirs(directory, exist_ok=True)
    except OSError as why:
        raise _make_error("write", asked.path, why) from None
    _replace(asked.path, data, "write", os.O_CREAT)
    return f"wrote {len(data)} bytes to {asked.path}"


def edit(asked: Edit) -> str:
    """Replace a text in a file; return the number of times and the first line."""
    path = asked.path
    if not asked.old or asked.old == asked.new:
        text = "old is empty or the same as new; name the text that is to change"
        raise McpToolError(f"cannot edit {path!r}: {text}")
    old, new = (_encode(text, "edit", path) for text in (asked.old, asked.new))
    with _open(path, os.O_RDONLY, "edit") as file:
        if os.fstat(file.fileno()).st_size > MOST_EDITED_BYTES:
            text = f"it has more than {MOST_EDITED_BYTES} bytes; use exec (sed)"
            raise McpToolError(f"cannot edit {path!r}: {text}")
        data = file.read(MOST_EDITED_BYTES)
    count = data.count(old)
    if not count:
        text = "the old text is not in it; read it again and take the text from there"
        raise McpToolError(f"cannot edit {path!r}: {text}")
    if count > 1 and not asked.all:
        how = "give more of the lines around it, or all=true"
        text = f"the old text stands there {count} times; {how}"
        raise McpToolError(f"cannot edit {path!r}: {text}")
    _replace(path, data.replace(old, new), "edit")
    line = data.count(b"\n", 0, data.index(old)) + 1
    return f"replaced {count} in {path}, the first in line {line}"


def list_directory(asked: List) -> str:
    """Return the names in a directory, with the sizes of files."""
    rows = []
    try:
        with os.scandir(asked.path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as why:
        raise _make_error("list", asked.path, why) from None
    for entry in found[:MOST_ENTRIES]:
        if entry.is_symlink():
            rows.append(f"{entry.name}@")
        elif entry.is_dir(follow_symlinks=False):
            rows.append(f"{entry.name}/")
        else:
            with suppress(OSError):  # gone since
                size = entry.stat(follow_symlinks=False).st_size
                rows.append(f"{entry.name}\t{size}")
    if len(found) > MOST_ENTRIES:
        rows.append(f"[{len(found) - MOST_ENTRIES} more; use exec (ls, find)]")
    return _bound(rows, "use exec (ls, find)") or "[empty]"


def search(asked: Search) -> str:
    """Return matching lines, as PATH:LINE:TEXT."""
    expression = _compile(asked)
    if not os.path.lexists(asked.path):
        text = "no such file or directory; look with list"
        raise McpToolError(f"cannot search {asked.path!r}: {text}")
    until_s = time.monotonic() + SEARCH_S
    matches = (
        f"{path}:{number}:{_text_of(line)[:_MATCH_CHARS]}"
        for path in _files_beneath(asked.path, asked.glob, until_s)
        for number, line in enumerate(_read_lines(path), 1)
        if expression.search(line[:_LINE_BYTES])
    )
    rows = list(islice(matches, MOST_MATCHES + 1))
    if len(rows) > MOST_MATCHES:
        rows[MOST_MATCHES:] = ["[more; search a smaller path or a longer pattern]"]
    elif time.monotonic() > until_s:
        rows.append(f"[stopped after {SEARCH_S:g} s; search a smaller path]")
    return _bound(rows, "search a smaller path or a longer pattern") or "[nothing]"


def _compile(asked: Search) -> Any:
    """Return the compiled expression, which takes linear time in the text."""
    import re2  # noqa: PLC0415 - an extra

    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MOST_PROGRAM_BYTES
    options.case_sensitive = not asked.ignore_case
    try:
        return re2.compile(_encode(asked.pattern, "search", "pattern"), options)
    except re2.error as why:
        reason = _text_of(why.args[0] if why.args else why)
        text = f"{reason}; RE2 has no look-around and no back references"
        raise McpToolError(f"cannot search for {asked.pattern!r}: {text}") from None


def _read_lines(path: str) -> list[bytes]:
    """Return the lines of a text file; none of a binary, long or unreadable one."""
    stop_if_cancelled()
    with suppress(McpToolError, OSError), _open(path, os.O_RDONLY, "search") as file:
        if os.fstat(file.fileno()).st_size <= MOST_SEARCHED_BYTES:
            data = file.read(MOST_SEARCHED_BYTES)
            if b"\0" not in data[:_LOOK_BYTES]:
                return data.removesuffix(b"\n").split(b"\n") if data else []
    return []


def _files_beneath(top: str, glob: str, until_s: float) -> Iterator[str]:
    """Yield a file, or the files of a directory, in order; no link is followed."""
    if not os.path.isdir(top):
        yield top
        return
    ahead = [top]
    while ahead and time.monotonic() < until_s:
        directory = ahead.pop()
        below = []
        with suppress(OSError), os.scandir(directory) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                path = entry.path.removeprefix("./")
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in _SKIPPED:
                        below.append(path)
                elif entry.is_file(follow_symlinks=False) and (
                    fnmatch.fnmatch(entry.name, glob) or fnmatch.fnmatch(path, glob)
                ):
                    if time.monotonic() > until_s:
                        return
                    yield path
        ahead += reversed(below)


def _open(path: str, flags: int, doing: str) -> IO[bytes]:
    """Open a regular file (rule 2).

    Raises:
        McpToolError: it is not regular, or this process may not open it.
    """
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as why:
        raise _make_error(doing, path, why) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        kind = "a directory; list it" if os.path.isdir(path) else "no file; use exec"
        raise McpToolError(f"cannot {doing} {path!r}: it is {kind}")
    return os.fdopen(fd, "rb" if flags == os.O_RDONLY else "r+b")


def _replace(path: str, data: bytes, doing: str, flags: int = 0) -> None:
    """Replace the content of a file; its mode, owner and links stay."""
    with _open(path, os.O_RDWR | flags, doing) as file:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file.fileno(), view) :]
            os.ftruncate(file.fileno(), len(data))
        except OSError as why:
            raise _make_error(doing, path, why) from None


def _lines_of(file: IO[bytes]) -> Iterator[str]:
    """Yield lines as text, long ones cut."""
    while line := file.readline(MOST_LINE_CHARS):
        is_cut = len(line) == MOST_LINE_CHARS and not line.endswith(b"\n")
        if is_cut:
            rest = file.readline(MOST_LINE_CHARS)
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(MOST_LINE_CHARS)
        yield _text_of(line) + (" [cut]\n" if is_cut else "")


def _bound(rows: list[str], how: str) -> str:
    """Return rows as lines, as many as fit into an answer."""
    room = MOST_CHARS
    for at, row in enumerate(rows):
        room -= len(row) + 1
        if room < 0:
            return "\n".join([*rows[:at], f"[more; {how}]"])
    return "\n".join(rows)


def _text_of(data: object) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else str(data)


def _encode(text: str, doing: str, what: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        reason = "the text has half a character; send whole ones"
        raise McpToolError(f"cannot {doing} {what!r}: {reason}") from None


def _make_error(doing: str, path: str, why: OSError | ValueError) -> McpToolError:
    how = "look with list"
    if isinstance(why, OSError):
        if why.errno in _NOT_OURS:
            how = "use a path beneath the working directory, or TMPDIR"
        return McpToolError(f"cannot {doing} {path!r}: {why.strerror}; {how}")
    return McpToolError(f"cannot {doing} {path!r}: {why}; {how}")
