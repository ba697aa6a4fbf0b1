"""The numbered rules of the project, and the tests that name them in a comment.

A test says `# spec W2` or `# spec F1, F2`, `# attack 14`, `# I4` on or above a line of
it. Only comments of test files count, so that a word in a string proves nothing.
"""

import io
import re
import tokenize
from functools import cache

from tests.architecture.tree import ROOT, relative, tree_files

# The rules of docs/protocol.md that are in force.
SPEC = (
    *(f"T{n}" for n in range(1, 6)),
    *(f"F{n}" for n in range(1, 10)),
    *(f"O{n}" for n in range(1, 10)),
    *(f"R{n}" for n in range(1, 4)),
    *(f"W{n}" for n in range(1, 7)),
    *("C1", "P1", "X1"),
    *("A1", "A2", "A3", "A3b", "A4", "A5"),
    *(f"S{n}" for n in range(1, 8)),
    *(f"N{n}" for n in range(1, 5)),
    *(f"L{n}" for n in range(1, 16)),
)
# docs/toolexec.md.
TOOLEXEC = tuple(f"E{n}" for n in range(1, 38))
# docs/invariants.md.
INVARIANTS = tuple(f"I{n}" for n in range(1, 11))
INVARIANTS_IN_FORCE = INVARIANTS
# docs/security.md.
_SECURITY = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
_STATED = re.findall(r"^\| (\d+) \|", _SECURITY, re.MULTILINE)
ATTACKS = tuple(
    name for name in map(str, range(1, 71)) if int(name) <= 40 or name in _STATED
)
"""The first forty, and those of the later ones that the page has a row for."""
ATTACKS_IN_FORCE = ATTACKS

_AND = r"(?:\s*,\s*(?:and\s+)?|\s+and\s+)"
_RULE = r"[A-Z]\d+b?\b"
_NAMED = (
    re.compile(rf"\bspec\s+({_RULE}(?:{_AND}{_RULE})*)"),
    re.compile(rf"\battacks?\s+(\d+\b(?:{_AND}\d+\b)*)"),
    re.compile(rf"\b(I\d+\b(?:{_AND}I\d+\b)*)"),
)


def names_in(comment: str) -> set[str]:
    """Return the rules that one comment names: `W2`, `14` (an attack), `I4`."""
    return {
        name
        for pattern in _NAMED
        for match in pattern.finditer(comment)
        for name in re.findall(r"[A-Z]?\d+b?", match.group(1))
    }


@cache
def named_by_tests() -> dict[str, tuple[str, ...]]:
    """Return, for each rule that a test names, the test files that do."""
    found: dict[str, set[str]] = {}
    for path in tree_files():
        file = relative(path)
        if not file.startswith("tests/") or not path.name.startswith("test_"):
            continue
        if path.suffix != ".py" or path.parent == ROOT / "tests" / "architecture":
            continue
        for name in _named_in(path.read_text(encoding="utf-8")):
            found.setdefault(name, set()).add(file)
    return {name: tuple(sorted(files)) for name, files in found.items()}


def _named_in(source: str) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = (token.string for token in tokens if token.type == tokenize.COMMENT)
    return set().union(*(names_in(comment) for comment in comments))
