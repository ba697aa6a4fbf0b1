"""Docstrings and comments of Python files: named subjects, short first lines.

The packages that are not held to it yet are listed in `NOT_YET`, which only shrinks.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from tests.architecture.tree import nodes_of, parsed, relative, tree_files

LONGEST_FIRST_LINE = 80
LONGEST_HEAD_LINES = 12
"""Most lines of a module's docstring."""
SHORT_HEADS = ("hostlib/", "protocol/", "supervisor/llm/", "vfs/")
"""Trees whose modules are held to that."""
HIDES = re.compile(
    r"(?:^|(?<=[.!?] ))(?:who|whoever|what|nobody)\b(?!:)", re.IGNORECASE
)
"""The beginning of a sentence without a subject that a reader knows."""
ENTRY_HIDES = re.compile(
    r"^ +\**\w+: ((?:who|whoever|what|nobody)\b(?!:).*)", re.IGNORECASE | re.MULTILINE
)
"""The same in an entry of `Args:`, `Attributes:` or `Raises:`."""
MAY_HIDE = re.compile(
    r"#(?:[#:\s]*|[^\n]*[.!?] )(?:who|whoever|what|nobody)\b", re.IGNORECASE
)
"""A line that may be a comment with such a beginning: others need not be taken apart."""

NOT_YET = frozenset(
    {
        "demo",
        "demo/provider",
    }
)
"""Packages whose sentences are not mended yet; a package beneath one is listed by itself."""

PYTHON = tuple(path for path in tree_files() if path.suffix == ".py")
HELD = tuple(path for path in PYTHON if relative(path.parent) not in NOT_YET)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Return (line, text) of each comment; the lines of one block are one comment."""
    first, last, block = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        row, column = token.start
        alone = not token.line[:column].strip()
        if not (alone and row == last + 1):
            yield first, " ".join(block)
            first, block = row, []
        block.append(token.string.lstrip("#:").strip())
        last = row if alone else 0
    yield first, " ".join(block)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return (line, text) of each docstring, those below a constant or field included."""
    for node in nodes_of(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
            case _:
                pass


def sentences_without_subject(source: str, tree: ast.Module) -> list[str]:
    """Return "line: beginning" of each sentence that begins with who, what or nobody."""
    texts = list(comments(source)) if MAY_HIDE.search(source) else []
    for line, text in docstrings(tree):
        texts += [(line, " ".join(part.split())) for part in _parts(text)]
        texts += [(line, entry) for entry in ENTRY_HIDES.findall(text)]
    return [
        f"{line}: {text[found.start() : found.start() + 60]}"
        for line, text in sorted(texts)
        for found in HIDES.finditer(text)
    ]


def _parts(docstring: str) -> list[str]:
    """Return the paragraphs, items and sections of a docstring."""
    return re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s|:\n\s*", docstring)


def long_first_lines(tree: ast.Module) -> list[str]:
    """Return "line: text" of each first docstring line that is too long."""
    found = []
    for node in nodes_of(tree):
        if isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if len(first) > LONGEST_FIRST_LINE:
                found.append(f"{getattr(node, 'lineno', 1)}: {first}")
    return found


# CONTRIBUTING: subjects are child, client, tool, caller, host.
def test_a_sentence_of_a_package_has_a_subject() -> None:
    assert not [
        f"{relative(path)}:{found}"
        for path in HELD
        for found in sentences_without_subject(
            path.read_text(encoding="utf-8"), parsed(path)
        )
    ]


# CONTRIBUTING: the result in one line.
def test_the_first_line_of_a_docstring_is_short() -> None:
    assert not [
        f"{relative(path)}:{found}"
        for path in HELD
        for found in long_first_lines(parsed(path))
    ]


# CONTRIBUTING: a module docstring has at most 12 lines.
def test_the_docstring_of_a_module_is_short() -> None:
    heads = {
        relative(path): ast.get_docstring(parsed(path)) or ""
        for path in PYTHON
        if relative(path).startswith(SHORT_HEADS)
    }
    assert len(heads) > 100
    long = [
        name for name, head in heads.items() if head.count("\n") >= LONGEST_HEAD_LINES
    ]
    assert not long


def test_a_package_that_is_not_held_yet_is_one_of_the_project() -> None:
    assert {relative(path.parent) for path in PYTHON} >= NOT_YET


def test_the_check_sees_such_a_sentence() -> None:
    source = '''"""Fine. What it is."""
X = 1
"""Whoever asks."""
# A host waits, and
# nobody else does
def f():
    """Return it.

    Args:
        what: is not a sentence.
        *words: what it says.
        other: but
            what goes on is none either.

    Returns:
        What is asked.
    """
    return 1  # who knows
'''
    assert sentences_without_subject(source, ast.parse(source)) == [
        "1: What it is.",
        "3: Whoever asks.",
        "7: What is asked.",
        "7: what it says.",
        "18: who knows",
    ]


def test_the_check_sees_a_long_first_line() -> None:
    source = f'"""{"a" * 81}\n\n{"b" * 90}\n"""\n\ndef f():\n    """{"c" * 80}"""\n'
    assert long_first_lines(ast.parse(source)) == [f"1: {'a' * 81}"]
