"""Rows as a unified patch that ``git apply`` takes.

Text that was modified is compared by git(1), because its hunks are the ones that people and
``git apply`` know. Everything else is written here.

Sources: git-diff(1), "Generating patch text with -p"; git's binary patches: zlib in base85.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import mmap
import os
import stat
import tempfile
import zlib
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from hostlib.linux.files import closing_fd
from supervisor.workspace.changes import Change, Row
from supervisor.workspace.git import find_git, run_git
from supervisor.workspace.layers import walk_sorted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from supervisor.workspace.layers import LayeredTree, TreeNode

_BINARY_LOOK_BYTES = 8000
"""Bytes of a file that git searches for a NUL, the mark of a binary file."""

_BIG_FILE_BYTES = 512 << 20
"""Size above which git takes a file as binary unread (core.bigFileThreshold).

Its ``index`` line is left out where a patch works without one.
"""

_COMPARED_BYTES, _COMPARED_LINES = 64 << 20, 1_000_000
"""Largest two sides of a text; beyond, they are binary: git takes 80 bytes a line."""

_BATCH_FILES, _BATCH_BYTES = 256, 64 << 20
_READ_BYTES = 1 << 20
_PATCH = "patch"
_BASE85_LINE_BYTES, _BASE85_LINE_LETTERS = 52, 65
_BASE85_BLOCK_BYTES = 1024 * _BASE85_LINE_BYTES
_TEXT_KINDS = (stat.S_IFREG, stat.S_IFLNK)
_ESCAPES = {7: b"a", 8: b"b", 9: b"t", 10: b"n", 11: b"v", 12: b"f", 13: b"r"}


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a section.

    Attributes:
        tree: that it is in.
        node: a regular file or a symbolic link.
    """

    tree: LayeredTree
    node: TreeNode

    @property
    def git_mode(self) -> bytes:
        if self.node.kind == stat.S_IFLNK:
            return b"120000"
        return b"100755" if self.node.status.st_mode & stat.S_IXUSR else b"100644"

    @property
    def size_bytes(self) -> int:
        return self.node.status.st_size

    def is_binary(self) -> bool:
        if self.node.kind == stat.S_IFLNK:
            return False
        if self.size_bytes > _BIG_FILE_BYTES:
            return True
        for data in self.pieces(_BINARY_LOOK_BYTES):
            return b"\0" in data
        return False

    def pieces(self, size_bytes: int = _READ_BYTES) -> Iterator[bytes]:
        """Yield the content in pieces of at most that size."""
        if self.node.kind == stat.S_IFLNK:
            yield self.tree.read_link(self.node)
            return
        with closing_fd(self.tree.open_file(self.node)) as fd:
            while data := os.read(fd, size_bytes):
                yield data

    def count_lines(self) -> tuple[int, bool]:
        """Return how many lines there are, and whether the last one ends."""
        count, last = 0, b""
        for data in self.pieces():
            count += data.count(b"\n")
            last = data[-1:]
        is_complete = last in {b"", b"\n"}
        return count + (not is_complete), is_complete

    def git_hash(self) -> bytes:
        """Return the name that git gives the content."""
        digest = hashlib.sha1(usedforsecurity=False)
        digest.update(b"blob %d\0" % self.size_bytes)
        for data in self.pieces():
            digest.update(data)
        return digest.hexdigest().encode()


@dataclass(frozen=True, slots=True)
class _Section:
    """One path in a patch: it came, went, or became another.

    Attributes:
        path: in both trees.
        old: the side of before; None if it came.
        new: the side of now; None if it went.
        is_same: both have one content.
    """

    path: bytes
    old: _Side | None
    new: _Side | None
    is_same: bool = False

    def sides(self) -> Iterator[_Side]:
        """Yield the sides that there are."""
        for side in (self.old, self.new):
            if side is not None:
                yield side


def write_patch(
    base: LayeredTree, merged: LayeredTree, rows: Iterable[Row], *, binary: bool = False
) -> Iterator[bytes]:
    """Yield a patch in pieces, one section after the other.

    Args:
        base: the base alone.
        merged: the workspace's layers, the base the last of them.
        rows: of ``compare`` without renames; the caller may have left some out.
        binary: binary files in git's form; else they are named.

    Raises:
        NoGitError: text was modified, and there is no git.
        OSError: something cannot be read.
    """
    batch: list[_Section] = []
    size_bytes = 0
    for row in rows:
        for section in _sections(base, merged, row):
            batch.append(section)
            size_bytes += sum(side.size_bytes for side in section.sides())
            if len(batch) >= _BATCH_FILES or size_bytes >= _BATCH_BYTES:
                yield from _write_batch(batch, binary=binary)
                batch, size_bytes = [], 0
    yield from _write_batch(batch, binary=binary)


def _sections(base: LayeredTree, merged: LayeredTree, row: Row) -> Iterator[_Section]:
    if row.change is Change.DELETED or row.change is Change.TYPE:
        for node in walk_sorted(base, row.old) if row.old else ():
            if node.kind in _TEXT_KINDS:
                yield _Section(node.path, _Side(base, node), None)
        if row.new is not None and row.new.kind in _TEXT_KINDS:
            yield _Section(row.path, None, _Side(merged, row.new))
        return
    if row.new is None or row.new.kind not in _TEXT_KINDS:
        return
    old = None if row.old is None else _Side(base, row.old)
    is_same = row.change is Change.MODE
    section = _Section(row.path, old, _Side(merged, row.new), is_same)
    if not is_same or _modes(section):
        yield section


def _write_batch(batch: Sequence[_Section], *, binary: bool) -> Iterator[bytes]:
    binaries = {number for number, one in enumerate(batch) if _is_binary(one)}
    texts = {
        number: section
        for number, section in enumerate(batch)
        if number not in binaries and section.old and section.new
    }
    with _compare(texts) as hunks:
        for number, section in enumerate(batch):
            is_binary = number in binaries
            yield _header(section, is_full=binary and is_binary)
            if not is_binary:
                yield from _text_body(section, hunks.pieces(number))
            elif not section.is_same:
                yield from _binary_body(section) if binary else _binary_line(section)


def _binary_line(section: _Section) -> Iterator[bytes]:
    """Yield the line that stands for what is not shown."""
    old = _name(b"a/", section.path) if section.old else b"/dev/null"
    new = _name(b"b/", section.path) if section.new else b"/dev/null"
    yield b"Binary files %s and %s differ\n" % (old, new)


def _is_binary(section: _Section) -> bool:
    """Tell whether a section has no text, or two that git should not compare."""
    if any(side.is_binary() for side in section.sides()):
        return True
    if section.old is None or section.new is None or section.is_same:
        return False
    size_bytes = sum(side.size_bytes for side in section.sides())
    if size_bytes <= _COMPARED_LINES or size_bytes > _COMPARED_BYTES:
        return size_bytes > _COMPARED_BYTES
    lines = sum(side.count_lines()[0] for side in section.sides())
    return lines > _COMPARED_LINES


def _modes(section: _Section) -> bytes:
    """Return the lines that say that a mode has changed, or came, or went."""
    old, new = section.old, section.new
    if old is None:
        return b"new file mode %s\n" % new.git_mode if new else b""
    if new is None:
        return b"deleted file mode %s\n" % old.git_mode
    if old.git_mode == new.git_mode:
        return b""
    return b"old mode %s\nnew mode %s\n" % (old.git_mode, new.git_mode)


def _header(section: _Section, *, is_full: bool) -> bytes:
    old, new, path = section.old, section.new, section.path
    modes = _modes(section)
    line = b"diff --git %s %s\n" % (_name(b"a/", path), _name(b"b/", path))
    is_big = any(side.size_bytes > _BIG_FILE_BYTES for side in section.sides())
    if section.is_same or (is_big and not is_full):
        return line + modes
    hashes = [side.git_hash() if side else b"0" * 40 for side in (old, new)]
    short = hashes if is_full else [value[:7] for value in hashes]
    mode = b"" if modes or old is None else b" " + old.git_mode
    return line + modes + b"index %s..%s%s\n" % (short[0], short[1], mode)


def _text_body(section: _Section, hunks: Iterator[bytes]) -> Iterator[bytes]:
    if section.old is None and section.new is not None:
        hunks = _whole(section.new, b"+")
    elif section.new is None and section.old is not None:
        hunks = _whole(section.old, b"-")
    first = next(hunks, b"")
    if not first:
        return
    path = section.path
    # git ends a name with a blank in it by a TAB, for patch(1).
    end = b"\t\n" if b" " in path else b"\n"
    for sign, prefix, side in (
        (b"---", b"a/", section.old),
        (b"+++", b"b/", section.new),
    ):
        if side is None:
            yield sign + b" /dev/null\n"
        else:
            yield sign + b" " + _name(prefix, path) + end
    yield first
    yield from hunks


def _whole(side: _Side, sign: bytes) -> Iterator[bytes]:
    """Yield the one hunk of a text that came or went, in pieces."""
    lines, is_complete = side.count_lines()
    if not lines:
        return
    count = b"1" if lines == 1 else b"1,%d" % lines
    where = b"-0,0 +" + count if sign == b"+" else b"-" + count + b" +0,0"
    yield b"@@ " + where + b" @@\n"
    is_begun = False
    for data in side.pieces():
        yield (b"" if is_begun else sign) + _sign(data, sign)
        is_begun = not data.endswith(b"\n")
    if not is_complete:
        yield b"\n\\ No newline at end of file\n"


def _sign(data: bytes, sign: bytes) -> bytes:
    """Return a piece of a text with a sign before each line that begins in it."""
    signed = data.replace(b"\n", b"\n" + sign)
    return signed[:-1] if data.endswith(b"\n") else signed


def _binary_body(section: _Section) -> Iterator[bytes]:
    yield b"GIT binary patch\n"
    for side in (section.new, section.old):
        size = 0 if side is None else side.size_bytes
        yield b"literal %d\n" % size
        yield from _base85_lines(side.pieces() if side else iter(()))
        yield b"\n"


def _base85_lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield what is deflated as git writes it: a letter for the length, then base85."""
    left = b""
    for data in _deflate(pieces):
        left += data
        while len(left) >= _BASE85_BLOCK_BYTES:
            yield _full_lines(left[:_BASE85_BLOCK_BYTES])
            left = left[_BASE85_BLOCK_BYTES:]
    end = len(left) - len(left) % _BASE85_LINE_BYTES
    yield _full_lines(left[:end])
    if left[end:]:
        size = len(left) - end
        letter = bytes((size + 64 if size <= 26 else size + 70,))
        yield letter + base64.b85encode(left[end:], pad=True) + b"\n"


def _full_lines(data: bytes) -> bytes:
    text = base64.b85encode(data)
    starts = range(0, len(text), _BASE85_LINE_LETTERS)
    return b"".join(
        b"z" + text[at : at + _BASE85_LINE_LETTERS] + b"\n" for at in starts
    )


def _deflate(pieces: Iterable[bytes]) -> Iterator[bytes]:
    deflate = zlib.compressobj(zlib.Z_BEST_SPEED)
    for data in pieces:
        yield deflate.compress(data)
    yield deflate.flush()


def _name(prefix: bytes, path: bytes) -> bytes:
    """Return a name as git writes it: in quotes where it has unusual bytes."""
    if not _is_to_quote(path):
        return prefix + path
    text = bytearray(b'"' + prefix)
    for byte in path:
        if byte in b'"\\':
            text += b"\\" + bytes((byte,))
        elif byte in _ESCAPES:
            text += b"\\" + _ESCAPES[byte]
        elif byte < 0x20 or byte >= 0x7F:
            text += b"\\%03o" % byte
        else:
            text.append(byte)
    return bytes(text) + b'"'


def _is_to_quote(path: bytes) -> bool:
    return any(byte < 0x20 or byte >= 0x7F or byte in b'"\\' for byte in path)


class _Hunks:
    """The hunks of numbered copies, in a file that git wrote."""

    def __init__(self, patch: IO[bytes]) -> None:
        self._patch = patch
        self._places = dict(_find_hunks(patch))

    def pieces(self, number: int) -> Iterator[bytes]:
        """Yield the hunks of one copy in pieces; nothing if it did not differ."""
        start, end = self._places.get(number, (0, 0))
        while start < end:
            self._patch.seek(start)
            data = self._patch.read(min(_READ_BYTES, end - start))
            start += len(data)
            yield data


def _find_hunks(patch: IO[bytes]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the number of each copy, and where its hunks are."""
    if not patch.seek(0, os.SEEK_END):
        return
    with mmap.mmap(patch.fileno(), 0, access=mmap.ACCESS_READ) as text:
        start = 0
        while start < len(text):
            # No line of content begins like this: each has a sign before it.
            end = text.find(b"\ndiff --git ", start) + 1 or len(text)
            first_line = text[start : text.find(b"\n", start)]
            hunks = text.find(b"\n@@ ", start, end) + 1
            if hunks:
                yield int(first_line.rpartition(b"/")[2]), (hunks, end)
            start = end


@contextlib.contextmanager
def _compare(texts: dict[int, _Section]) -> Iterator[_Hunks]:
    """Give the hunks of the sections that modify text, by git."""
    if not texts:
        yield _Hunks(io.BytesIO())
        return
    git = find_git("compare text", "use --stat or --json")
    with tempfile.TemporaryDirectory(prefix="sandhost-diff-") as top:
        for number, section in texts.items():
            for directory, side in (("old", section.old), ("new", section.new)):
                if side is not None:
                    _write_copy(os.path.join(top, directory), number, side)
        _compare_copies(git, top)
        with open(os.path.join(top, _PATCH), "rb") as patch:
            yield _Hunks(patch)


def _write_copy(directory: str, number: int, side: _Side) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory)
    with open(os.path.join(directory, str(number)), "wb") as copy:
        copy.writelines(side.pieces())


def _compare_copies(git: str, top: str) -> None:
    options = "--no-index --no-color --no-ext-diff --no-textconv --no-renames -U3"
    words = [*options.split(), f"--output={_PATCH}", "--text", "old", "new"]
    done = run_git(git, ["diff", *words], top)
    if done.returncode not in {0, 1}:
        reason = done.stderr.decode(errors="replace").strip()
        raise OSError(0, f"git diff failed: {reason}")
