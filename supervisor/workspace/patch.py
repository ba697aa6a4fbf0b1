"""Rows as a unified patch that ``git apply`` takes.

Text that was modified is compared by git(1), because its hunks are the ones that people and
``git apply`` know. Everything else is written here.

Sources: git-diff(1), "Generating patch text with -p"; git's binary patches: zlib in base85.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import stat
import tempfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from supervisor.workspace.changes import Change, Row
from supervisor.workspace.git import find_git, run_git

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from supervisor.workspace.layers import LayeredTree, Node

_BINARY_LOOK_BYTES = 8000
"""How much of a file git looks at for a NUL, which makes it binary."""

_BIG_FILE_BYTES = 512 << 20
"""Larger files are binary without a look: git's core.bigFileThreshold."""

_BATCH_FILES, _BATCH_BYTES = 256, 64 << 20
_READ_BYTES = 1 << 20
_BASE85_LINE_BYTES = 52
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
    node: Node

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
        fd = self.tree.open_file(self.node)
        try:
            while data := os.read(fd, size_bytes):
                yield data
        finally:
            os.close(fd)

    def content(self) -> bytes:
        return b"".join(self.pieces())

    def git_hash(self) -> bytes:
        """Return the name that git gives the content."""
        digest = hashlib.sha1(usedforsecurity=False)
        digest.update(b"blob %d\0" % self.size_bytes)
        for data in self.pieces():
            digest.update(data)
        return digest.hexdigest().encode()


@dataclass(frozen=True, slots=True)
class _Section:
    """What a patch says of one path: it came, went, or became another."""

    path: bytes
    old: _Side | None
    new: _Side | None

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
        for node in files_beneath(base, row.old):
            yield _Section(node.path, _Side(base, node), None)
        if row.new is not None and row.new.kind in _TEXT_KINDS:
            yield _Section(row.path, None, _Side(merged, row.new))
        return
    if row.new is None or row.new.kind not in _TEXT_KINDS:
        return
    old = None if row.old is None else _Side(base, row.old)
    section = _Section(row.path, old, _Side(merged, row.new))
    if row.change is not Change.MODE or _modes(section):
        yield section


def files_beneath(tree: LayeredTree, node: Node | None) -> Iterator[Node]:
    """Yield a file or link; of a directory those that lie beneath it."""
    pending = [] if node is None else [node]
    while pending:
        node = pending.pop()
        if node.is_directory:
            with tree.read(node) as reader:
                pending += sorted(reader.entries(), key=lambda n: n.path, reverse=True)
        elif node.kind in _TEXT_KINDS:
            yield node


def _write_batch(batch: Sequence[_Section], *, binary: bool) -> Iterator[bytes]:
    texts: dict[int, _Section] = {}
    binaries: set[int] = set()
    for number, section in enumerate(batch):
        if any(side.is_binary() for side in section.sides()):
            binaries.add(number)
        elif section.old is not None and section.new is not None:
            texts[number] = section
    hunks = _compare_texts(texts)
    for number, section in enumerate(batch):
        yield _header(section, is_full=binary and number in binaries)
        if number not in binaries:
            yield from _text_body(section, hunks.get(number, b""))
        elif binary:
            yield from _binary_body(section)
        elif not _is_unchanged(section):
            old = _name(b"a/", section.path) if section.old else b"/dev/null"
            new = _name(b"b/", section.path) if section.new else b"/dev/null"
            yield b"Binary files %s and %s differ\n" % (old, new)


def _is_unchanged(section: _Section) -> bool:
    """Tell whether only the mode is another."""
    old, new = section.old, section.new
    return old is not None and new is not None and old.git_hash() == new.git_hash()


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
    hashes = [side.git_hash() if side else b"0" * 40 for side in (old, new)]
    if hashes[0] == hashes[1]:
        return line + modes
    short = hashes if is_full else [value[:7] for value in hashes]
    mode = b"" if modes or old is None else b" " + old.git_mode
    return line + modes + b"index %s..%s%s\n" % (short[0], short[1], mode)


def _text_body(section: _Section, hunks: bytes) -> Iterator[bytes]:
    if section.old is None and section.new is not None:
        hunks = _whole(section.new.content(), b"+")
    elif section.new is None and section.old is not None:
        hunks = _whole(section.old.content(), b"-")
    if not hunks:
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
    yield hunks


def _whole(content: bytes, sign: bytes) -> bytes:
    """Return the one hunk of a text that came or went."""
    if not content:
        return b""
    lines = content.split(b"\n")
    is_complete = not lines[-1]
    if is_complete:
        lines.pop()
    count = b"1" if len(lines) == 1 else b"1,%d" % len(lines)
    where = b"-0,0 +" + count if sign == b"+" else b"-" + count + b" +0,0"
    body = b"".join(sign + line + b"\n" for line in lines)
    end = b"" if is_complete else b"\\ No newline at end of file\n"
    return b"@@ " + where + b" @@\n" + body + end


def _binary_body(section: _Section) -> Iterator[bytes]:
    if _is_unchanged(section):
        return
    yield b"GIT binary patch\n"
    for side in (section.new, section.old):
        size = 0 if side is None else side.size_bytes
        yield b"literal %d\n" % size
        yield from _base85_lines(side.pieces() if side else iter(()))
        yield b"\n"


def _base85_lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield what is deflated as git writes it: a letter for the length, then base85."""
    deflate = zlib.compressobj(zlib.Z_BEST_SPEED)
    left = b""
    for data in (*_deflated(deflate, pieces), None):
        left += deflate.flush() if data is None else data
        end = len(left) if data is None else len(left) - len(left) % _BASE85_LINE_BYTES
        lines = []
        for start in range(0, end, _BASE85_LINE_BYTES):
            line = left[start : min(start + _BASE85_LINE_BYTES, end)]
            size = len(line)
            letter = bytes((size + 64 if size <= 26 else size + 70,))
            lines.append(letter + base64.b85encode(line, pad=True) + b"\n")
        left = left[end:]
        yield b"".join(lines)


def _deflated(deflate: zlib._Compress, pieces: Iterator[bytes]) -> Iterator[bytes]:
    for data in pieces:
        yield deflate.compress(data)


def _name(prefix: bytes, path: bytes) -> bytes:
    """Return a name as git writes it: in quotes where it has unusual bytes."""
    if not _needs_quotes(path):
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


def _needs_quotes(path: bytes) -> bool:
    return any(byte < 0x20 or byte >= 0x7F or byte in b'"\\' for byte in path)


def _compare_texts(texts: dict[int, _Section]) -> dict[int, bytes]:
    """Return the hunks of the sections that modify text, by git."""
    if not texts:
        return {}
    git = find_git("compare text", "use --stat or --json")
    with tempfile.TemporaryDirectory(prefix="sandhost-diff-") as top:
        for number, section in texts.items():
            for directory, side in (("old", section.old), ("new", section.new)):
                if side is not None:
                    _write_copy(os.path.join(top, directory), number, side)
        return _hunks(_compare_copies(git, top))


def _write_copy(directory: str, number: int, side: _Side) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory)
    with open(os.path.join(directory, str(number)), "wb") as copy:
        copy.writelines(side.pieces())


def _compare_copies(git: str, top: str) -> bytes:
    options = "--no-index --no-color --no-ext-diff --no-textconv --no-renames -U3"
    done = run_git(git, ["diff", *options.split(), "--text", "old", "new"], top)
    if done.returncode not in {0, 1}:
        reason = done.stderr.decode(errors="replace").strip()
        raise OSError(0, f"git diff failed: {reason}")
    return done.stdout


def _hunks(patch: bytes) -> dict[int, bytes]:
    """Return the hunks of each numbered copy in what git wrote."""
    found: dict[int, bytes] = {}
    # No line of content begins like this: each has a sign before it.
    for section in (b"\n" + patch).split(b"\ndiff --git ")[1:]:
        head, at, hunks = section.partition(b"\n@@ ")
        number = int(head.partition(b"\n")[0].rpartition(b"/")[2])
        if at:
            found[number] = at[1:] + hunks.rstrip(b"\n") + b"\n"
    return found
