"""Words that the glossary rejects are no part of a name in the product."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT, nodes_of, parsed, product_files, relative

GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"

OTHER_MEANING = {
    "server": "a listener with its connections, and a model's or a name's server",
    "job": "slow work of one request, done by its session",
    "fd": "the usual word in names for a descriptor; a fileno is called `fileno`",
}
"""Rejected for one thing, and the word for another one: not held in names."""

EXCEPTIONS = {"is_upgrade": "the header Upgrade of HTTP"}
"""Names that have a rejected word of a protocol."""

WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def rejected_words(page: str) -> set[str]:
    """Return the single words in the third column of the glossary's tables."""
    found: set[str] = set()
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[0] != "word":
            found |= {
                word.strip()
                for word in cells[2].split(",")
                if re.fullmatch(r"[a-z]+", word.strip())
            }
    return found


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of each name that a file defines or binds."""
    for node in nodes_of(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case _:
                pass


def names_with(words: set[str], tree: ast.Module) -> list[str]:
    """Return "line: name" of each defined name that has one of some words."""
    return [
        f"{line}: {name}"
        for line, name, parts in split_names(tree)
        if name not in EXCEPTIONS and words & parts
    ]


def split_names(tree: ast.Module) -> tuple[tuple[int, str, frozenset[str]], ...]:
    """Return (line, name, its words) of each name that a file defines or binds."""
    return tuple(
        (line, name, frozenset(word.lower() for word in WORD.findall(name)))
        for line, name in defined_names(tree)
    )


@cache
def product_names() -> tuple[tuple[Path, int, str, frozenset[str]], ...]:
    """Return (file, line, name, its words) of each name of the product."""
    return tuple(
        (path, *found)
        for path in product_files()
        for found in split_names(parsed(path))
    )


HELD = rejected_words(GLOSSARY.read_text(encoding="utf-8")) - OTHER_MEANING.keys()


# CONTRIBUTING: one word for one thing.
@pytest.mark.parametrize("word", sorted(HELD))
def test_a_rejected_word_is_no_part_of_a_name(word: str) -> None:
    assert not [
        f"{relative(path)}:{line}: {name}"
        for path, line, name, words in product_names()
        if word in words and name not in EXCEPTIONS
    ]


def test_the_glossary_rejects_words_at_all() -> None:
    assert {"guest", "jail", "plugin", "upgrade"} <= HELD
    rejected = rejected_words(GLOSSARY.read_text(encoding="utf-8"))
    assert rejected >= OTHER_MEANING.keys()


def test_each_exception_is_a_name_of_the_product() -> None:
    names = {name for _, _, name, _ in product_names()}
    assert names >= EXCEPTIONS.keys()


def test_the_check_sees_such_names() -> None:
    source = (
        "class JailServer:\n    def open_guest(self, a_jail):\n        x.guest = 1\n"
    )
    assert names_with({"jail", "guest"}, ast.parse(source)) == [
        "1: JailServer",
        "2: open_guest",
        "2: a_jail",
        "3: guest",
    ]
    assert not names_with({"age"}, ast.parse("jailage = usage = page = 1"))
