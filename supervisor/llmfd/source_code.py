"""Functions and classes of source code, found by tree-sitter (an extra).

A unit is whole lines: from its first line, decorators included, to its last line.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import re2

from hostlib.threads import ThreadLock, stop_if_cancelled
from supervisor.llmfd.errors import INVALID_PARAMETER, FdError
from supervisor.llmfd.index import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tree_sitter import Node, Point, Tree

    from supervisor.llmfd.index import Buffer
    from supervisor.llmfd.table import LlmFd

MOST_BYTES = 4 * 1024 * 1024
"""Longest source that is parsed: 3 s, or 9 s if it is full of errors.

Freeing a tree is one call into C, which holds the interpreter for 25 ms for each MiB of
common source, and up to 150 for one endless list."""

ALONE_BYTES = 256 * 1024
"""Longest source that is parsed beside others: a tree takes 60 times its source's
memory, or 190 times for one long list."""

PIECE_BYTES = 4096
"""Bytes that the parser gets at once: a token may be as long as the source."""

NODES_AT_ONCE = 256
"""Nodes between two checks whether the caller still waits: 0.1 ms."""

WAIT_S = 0.05
"""Time between two such checks while another source is parsed."""

MOST_NAME_BYTES = 4096
"""Longest name; longer ones are cut."""


@dataclass(frozen=True, slots=True)
class Language:
    """Grammar and node kinds of one language.

    Attributes:
        module: its grammar.
        entry: the function in it that returns the grammar.
        suffixes: those of file names.
        function: node kinds of functions.
        classes: node kinds of classes and their like.
        hint: text that is likely only in its source.
    """

    module: str
    entry: str
    suffixes: tuple[str, ...]
    function: frozenset[str]
    classes: frozenset[str]
    hint: bytes


@dataclass(frozen=True, slots=True)
class Scope:
    """A function or class around others: its name, and the scope around it."""

    name: str
    outer: Scope | None


class CodeUnit(NamedTuple):
    """A function or class.

    Attributes:
        name: as its definition has it.
        span: without the ends of its lines: ``whole_lines`` finds them.
        scope: the scope of its definition; None for the file.
    """

    name: str
    span: Span
    scope: Scope | None


_JS_FUNCTIONS = frozenset(
    {"function_declaration", "generator_function_declaration", "method_definition"}
)
_JS_CLASSES = frozenset({"class_declaration", "abstract_class_declaration"})

LANGUAGES = {
    "python": Language(
        "tree_sitter_python",
        "language",
        (".py", ".pyi"),
        frozenset({"function_definition"}),
        frozenset({"class_definition"}),
        rb"(?m)^[ \t]*(?:(?:async )?def \w+\(.*:|class \w+.*:|from \S+ import |elif .*:)",
    ),
    "typescript": Language(
        "tree_sitter_typescript",
        "language_typescript",
        (".ts", ".mts", ".cts"),
        _JS_FUNCTIONS,
        _JS_CLASSES | {"interface_declaration"},
        rb"(?m)(?:^\s*(?:export )?(?:interface|type|enum) \w+|: (?:string|number|boolean)\b)",
    ),
    "javascript": Language(
        "tree_sitter_javascript",
        "language",
        (".js", ".jsx", ".mjs", ".cjs"),
        _JS_FUNCTIONS,
        _JS_CLASSES,
        rb"(?m)(?:^\s*(?:export |async )*function\b|^\s*(?:const|let|var) \w+ =|=>|===)",
    ),
    "go": Language(
        "tree_sitter_go",
        "language",
        (".go",),
        frozenset({"function_declaration", "method_declaration"}),
        frozenset({"type_spec"}),
        rb"(?m)^(?:package \w+$|func [\w(]|import \(|type \w+ (?:struct|interface))",
    ),
    "rust": Language(
        "tree_sitter_rust",
        "language",
        (".rs",),
        frozenset({"function_item"}),
        frozenset(
            {"struct_item", "enum_item", "trait_item", "impl_item", "union_item"}
        ),
        rb"(?m)^\s*(?:(?:pub )?fn \w+|impl\b|use \w+::|let mut |(?:pub )?struct \w+|#\[)",
    ),
    "c": Language(
        "tree_sitter_c",
        "language",
        (".c", ".h"),
        frozenset({"function_definition"}),
        frozenset({"struct_specifier", "union_specifier", "enum_specifier"}),
        rb"(?m)^\s*(?:#include [<\"]|#define |typedef |(?:static |const )*(?:int|void|char)"
        rb" \*?\w+\()",
    ),
    "java": Language(
        "tree_sitter_java",
        "language",
        (".java",),
        frozenset({"method_declaration", "constructor_declaration"}),
        frozenset(
            {
                *("class_declaration", "interface_declaration"),
                *("enum_declaration", "record_declaration"),
            }
        ),
        rb"(?m)^\s*(?:import java|package [\w.]+;|(?:public|private|protected) )",
    ),
}

_MORE_SUFFIXES = {".tsx": "typescript"}
_BY_SUFFIX = {
    **{suffix: name for name, one in LANGUAGES.items() for suffix in one.suffixes},
    **_MORE_SUFFIXES,
}
_HINTS = {name: re2.compile(one.hint) for name, one in LANGUAGES.items()}
_DATA_HINTS = (
    ("json", re2.compile(rb"\A\s*[\[{](?:\s*[\"\[{\d\]}]|\s*\z)")),
    ("html", re2.compile(rb"(?i)\A\s*<(?:!doctype html|html)")),
    ("xml", re2.compile(rb"\A\s*<\?xml")),
    ("markdown", re2.compile(rb"(?m)\A(?:.*\n){0,20}#{1,6} \S")),
)

SAMPLE_BYTES = 32 * 1024
"""Bytes of a content from which its language is guessed."""


def guess(fd: LlmFd) -> str:
    """Return the language of a text in a word: ``python``, ``json``, ... or ``text``."""
    if not fd.language:
        fd.language = _guess_by_name(fd.source) or _guess_by_content(fd)
    return fd.language


def _guess_by_content(fd: LlmFd) -> str:
    sample = fd.content.text[:SAMPLE_BYTES]
    if sample.startswith(b"#!") and b"python" in sample.partition(b"\n")[0]:
        return "python"
    for name, hint in _DATA_HINTS[:3]:
        if hint.search(sample):
            return name
    scores = [(_score(hint, sample), name) for name, hint in _HINTS.items()]
    best, name = max(scores, key=lambda pair: pair[0])
    if best >= 2 or (best and best * 6 >= sample.count(b"\n") + 1):
        return name
    return "markdown" if _DATA_HINTS[3][1].search(sample) else "text"


def _score(hint: re2._Regexp, sample: bytes) -> int:
    return sum(1 for _ in hint.finditer(sample))


def _guess_by_name(name: str) -> str:
    dot = name.rfind(".")
    return _BY_SUFFIX.get(name[dot:].lower(), "") if dot >= 0 else ""


def find_code(fd: LlmFd, unit: str, name: str | None = None) -> Iterator[CodeUnit]:
    """Yield the functions or classes of a source.

    Args:
        fd: the source.
        unit: one of the two.
        name: its language; None to guess it.

    Raises:
        FdError: ``invalid_parameter``: there is no grammar for it, or it is too long.
    """
    if name is None:
        name = guess(fd)
    language = LANGUAGES.get(name)
    if language is None:
        known = ", ".join(LANGUAGES)
        text = f"Content of type {name} has no units of the kind {unit}; known: {known}"
        raise FdError(INVALID_PARAMETER, text, fd=fd.id)
    blob = fd.content.text
    if blob.size > MOST_BYTES:
        text = (
            f"Content of {blob.size} bytes is too long to be parsed for a {unit}: at"
            f" most {MOST_BYTES} bytes; search it, or read it by lines"
        )
        raise FdError(INVALID_PARAMETER, text, fd=fd.id)
    data = blob.data
    kinds = language.function if unit == "function" else language.classes
    scopes = _Scopes(language.function | language.classes, data)
    with _turn(blob.size):
        tree = parse_source(fd, name, language, data)
        for count, (node, wrapper, scope) in enumerate(_walk(tree, scopes.inner_scope)):
            if not count % NODES_AT_ONCE:
                stop_if_cancelled()
            if _is_wanted(node, kinds, unit):
                found = scopes.receiver_scope(node) or scope
                yield CodeUnit(_name_of(node, data), wrapper or _span(node), found)


_one_long_source = ThreadLock()


@contextmanager
def _turn(size: int) -> Iterator[None]:
    """Wait for a turn to parse a long source: this bounds the memory of all."""
    if size <= ALONE_BYTES:
        yield
        return
    while not _one_long_source.acquire(timeout=WAIT_S):
        stop_if_cancelled()
    try:
        yield
    finally:
        _one_long_source.release()


class _Source:
    """The parser's input; it releases the interpreter now and then.

    A parse is one call into C, which holds the interpreter except in callbacks.

    Attributes:
        failure: an exception that ended it; raised after the parser has returned, since
            it must not pass through it.
    """

    def __init__(self, data: Buffer) -> None:
        self._data = data
        self.failure: BaseException | None = None

    def read(self, offset: int, _: Point) -> bytes:
        """Return bytes at an offset; none at the end."""
        if self.is_over():
            return b""
        return self._data[offset : offset + PIECE_BYTES]

    def is_over(self, *_: object) -> bool:
        """Return whether to give up; asked every 100 steps of the parser."""
        if self.failure is None:
            try:
                stop_if_cancelled()
            except BaseException as why:  # noqa: BLE001 - raised behind the parser
                self.failure = why
        return self.failure is not None


def parse_source(fd: LlmFd, name: str, language: Language, data: Buffer) -> Tree:
    """Return the syntax tree of a source, parsed by its language's grammar."""
    try:
        tree_sitter = import_module("tree_sitter")
        grammar = import_module(language.module)
    except ImportError:
        text = f"Units of {name} need its grammar; install sandhost[units]"
        raise FdError(INVALID_PARAMETER, text, fd=fd.id) from None
    parser = tree_sitter.Parser(
        tree_sitter.Language(getattr(grammar, language.entry)())
    )
    source = _Source(data)
    tree: Tree | None = None
    try:
        tree = parser.parse(source.read, progress_callback=source.is_over)
    except ValueError:  # raised when it was told to give up
        if source.failure is None:
            raise
    del parser  # here, not with the failure: it may hold as much as a tree
    failure, source.failure = source.failure, None
    if failure is not None:
        raise failure
    if tree is None:
        raise RuntimeError("a parser that has a language made no tree")
    return tree


class _Scopes:
    """The scopes of a source.

    Args:
        kinds: the node kinds of scopes.
        data: the source.
    """

    def __init__(self, kinds: frozenset[str], data: Buffer) -> None:
        self._kinds = kinds
        self._data = data

    def inner_scope(self, node: Node, outer: Scope | None) -> Scope | None:
        """Return the scope inside a node."""
        if node.type not in self._kinds:
            return outer
        return Scope(self._bare(_name_of(node, self._data)), outer)

    def receiver_scope(self, node: Node) -> Scope | None:
        """Return the type of a Go method; None for other functions."""
        if node.type != "method_declaration":
            return None
        receiver = node.child_by_field_name("receiver")
        if receiver is None:  # Java has such nodes, too
            return None
        written = self._data[receiver.start_byte : receiver.end_byte]
        words = written[:MOST_NAME_BYTES].decode("utf-8", "replace").strip("() \t,")
        return Scope(self._bare(words.rpartition(" ")[2].lstrip("*")), None)

    @staticmethod
    def _bare(name: str) -> str:
        """Return the name of a type without its parameters."""
        return name.partition("<")[0].partition("[")[0].strip()


def _walk(
    tree: Tree, inner_scope: Callable[[Node, Scope | None], Scope | None]
) -> Iterator[tuple[Node, Span | None, Scope | None]]:
    """Yield every node, the outermost wrapper around it, and its scope.

    Without recursion: source may be nested a million deep. Linear in the text: a node's
    parent (searched from the root) and list of children are never asked for.
    """
    cursor = tree.walk()
    wrappers: list[Span | None] = [None]  # around the content of each ancestor
    scopes: list[Scope | None] = [None]  # as above
    while (node := cursor.node) is not None:
        yield node, wrappers[-1], scopes[-1]
        if cursor.goto_first_child():
            is_wrapper = node.type in _WRAPPERS
            wrappers.append(wrappers[-1] or _span(node) if is_wrapper else None)
            scopes.append(inner_scope(node, scopes[-1]))
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return
            wrappers.pop()
            scopes.pop()


def _span(node: Node) -> Span:
    return Span(node.start_byte, node.end_byte)


_WRAPPERS = frozenset({"decorated_definition", "export_statement", "type_declaration"})


def _is_wanted(node: Node, kinds: frozenset[str], unit: str) -> bool:
    kind = node.type
    if unit == "function" and kind == "variable_declarator":
        value = node.child_by_field_name("value")
        return value is not None and value.type in _FUNCTION_VALUES
    if kind not in kinds:
        return False
    # `struct a *p` names a structure without defining it.
    return (
        not kind.endswith("_specifier") or node.child_by_field_name("body") is not None
    )


_FUNCTION_VALUES = frozenset(
    {"arrow_function", "function_expression", "generator_function"}
)


def _name_of(node: Node, data: Buffer) -> str:
    for field in ("name", "declarator", "type"):
        found = node.child_by_field_name(field)
        while found is not None:
            inner = found.child_by_field_name("declarator")
            if inner is None:
                break
            found = inner
        if found is not None:
            start = found.start_byte
            name = data[start : min(found.end_byte, start + MOST_NAME_BYTES)]
            return name.decode("utf-8", "replace")
    return ""


def whole_lines(fd: LlmFd, span: Span) -> Span:
    """Return the lines of a part of a text."""
    text = fd.content.text
    index = text.index
    before = index.newlines_before(text, span.start)
    inner_scope = index.newlines_before(text, max(span.end - 1, span.start))
    return Span(
        index.line_start(text, before + 1), index.line_start(text, inner_scope + 2)
    )
