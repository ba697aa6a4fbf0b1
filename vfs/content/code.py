"""Functions and classes of source code, found by tree-sitter's grammars (an extra).

A unit is whole lines: from the line in which it begins, decorators included, to the line
in which it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import re2

from vfs.content.errors import INVALID_PARAMETER, FdError
from vfs.content.pages import Span

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tree_sitter import Node, Tree

    from vfs.content.table import LlmFd

MOST_BYTES = 32 * 1024 * 1024
"""Longest source that is parsed: a tree takes some ten times as much memory."""


@dataclass(frozen=True, slots=True)
class Language:
    """What is to be known of one language.

    Attributes:
        module: its grammar.
        entry: the function in it that gives the grammar.
        suffixes: of file names.
        function: kinds of nodes that are functions.
        classes: kinds of nodes that are classes or what stands for them.
        hint: what only its source is likely to have.
    """

    module: str
    entry: str
    suffixes: tuple[str, ...]
    function: frozenset[str]
    classes: frozenset[str]
    hint: bytes


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
"""What of a content is looked at to guess its language."""


def guess(fd: LlmFd) -> str:
    """Return the language of a text in a word: ``python``, ``json``, ... or ``text``."""
    if not fd.language:
        fd.language = _by_name(fd.source) or _by_content(fd)
    return fd.language


def _by_content(fd: LlmFd) -> str:
    sample = fd.content.text.data[:SAMPLE_BYTES]
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


def _by_name(name: str) -> str:
    dot = name.rfind(".")
    return _BY_SUFFIX.get(name[dot:].lower(), "") if dot >= 0 else ""


def find_code(fd: LlmFd, unit: str) -> Iterator[tuple[str, Span]]:
    """Yield (name, lines) of functions or classes, in the order of the text.

    Raises:
        FdError: ``invalid_parameter``: there is no grammar for it, or it is too long.
    """
    name = guess(fd)
    language = LANGUAGES.get(name)
    if language is None:
        known = ", ".join(LANGUAGES)
        text = f"Content of type {name} has no units of the kind {unit}; known: {known}"
        raise FdError(INVALID_PARAMETER, text, fd=fd.id)
    text_blob = fd.content.text
    if text_blob.size > MOST_BYTES:
        text = f"Content is too long to parse: more than {MOST_BYTES} bytes"
        raise FdError(INVALID_PARAMETER, text, fd=fd.id)
    source = text_blob.data[:]
    kinds = language.function if unit == "function" else language.classes
    for node in _walk(_parse(fd, name, language, source)):
        called = _name_of(node, kinds, unit)
        if called is not None:
            yield called, _whole_lines(source, node)


def _parse(fd: LlmFd, name: str, language: Language, source: bytes) -> Tree:
    try:
        tree_sitter = import_module("tree_sitter")
        grammar = import_module(language.module)
    except ImportError:
        text = f"Units of {name} need its grammar; install sandhost[units]"
        raise FdError(INVALID_PARAMETER, text, fd=fd.id) from None
    parser = tree_sitter.Parser(
        tree_sitter.Language(getattr(grammar, language.entry)())
    )
    tree: Tree = parser.parse(source)
    return tree


def _walk(tree: Tree) -> Iterator[Node]:
    """Yield every node, without recursion: source may be nested 100,000 deep."""
    cursor = tree.walk()
    while True:
        if cursor.node is not None:
            yield cursor.node
        if cursor.goto_first_child():
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return


def _name_of(node: Node, kinds: frozenset[str], unit: str) -> str | None:
    """Return the name of a node that is wanted, None if it is not."""
    if unit == "function" and node.type == "variable_declarator":
        value = node.child_by_field_name("value")
        if value is None or value.type not in _FUNCTION_VALUES:
            return None
    elif node.type not in kinds:
        return None
    if node.type.endswith("_specifier") and node.child_by_field_name("body") is None:
        return None  # `struct a *p` names a structure and defines none
    return _called(node)


_FUNCTION_VALUES = frozenset(
    {"arrow_function", "function_expression", "generator_function"}
)


def _called(node: Node) -> str:
    for field in ("name", "declarator", "type"):
        found = node.child_by_field_name(field)
        while found is not None:
            inner = found.child_by_field_name("declarator")
            if inner is None:
                break
            found = inner
        if found is not None and found.text is not None:
            return found.text.decode("utf-8", "replace")
    return ""


def _whole_lines(source: bytes, node: Node) -> Span:
    outer = node
    while outer.parent is not None and outer.parent.type in _WRAPPERS:
        outer = outer.parent
    start = source.rfind(b"\n", 0, outer.start_byte) + 1
    end = source.find(b"\n", max(outer.end_byte - 1, outer.start_byte)) + 1
    return Span(start, end or len(source))


_WRAPPERS = frozenset({"decorated_definition", "export_statement", "type_declaration"})
