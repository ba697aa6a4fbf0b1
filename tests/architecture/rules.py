"""The numbered rules of the project, and the tests that name them in a comment.

A test says `# spec W2` or `# spec F1, F2`, `# attack 14`, `# I4` on or above a line of
it. Only comments of test files count, so that a word in a string proves nothing.
"""

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.tree import ROOT, nodes_of, parsed, relative, tree_files

# The rules of docs/reference/protocol.md that are in force.
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
# docs/reference/toolexec.md.
TOOLEXEC = tuple(f"E{n}" for n in range(1, 38))
# Workspaces, and what programs find that know nothing of the host.
WORKSPACES = (
    *(f"WS{n}" for n in range(1, 21)),
    *("WS2a", "WS3a", "WS3b", "WS3c", "WS11a", "WS12a"),
    *(f"HM{n}" for n in range(1, 9)),
)
WORKSPACES_TO_BUILD: tuple[str, ...] = ()
"""Those that no code keeps yet; none is ever added."""
WORKSPACES_OF_ROOT = {
    "HM8": "a cgroup is given to a host that is root",
}
"""Those that no host of another user can keep, and why."""
# The APIs by which programs ask the model.
MODEL_DOORS = tuple(f"MD{n}" for n in range(1, 9))
# The network by name.
NETWORK = tuple(f"NET{n}" for n in range(1, 16))
NETWORK_TO_BUILD: tuple[str, ...] = ()
"""Those that no code keeps yet; none is ever added."""
NETWORK_OF_ROOT: dict[str, str] = {}
"""Those that no host of another user can keep, and why."""
# Children on many machines.
FLEET = tuple(f"FL{n}" for n in range(1, 12))
FLEET_TO_BUILD: tuple[str, ...] = ()
"""Those that no code keeps yet; none is ever added."""
# docs/explanation/invariants.md.
INVARIANTS = tuple(f"I{n}" for n in range(1, 11))
INVARIANTS_IN_FORCE = INVARIANTS
# docs/explanation/security.md.
_SECURITY = (ROOT / "docs" / "explanation" / "security.md").read_text(encoding="utf-8")
_STATED = re.findall(r"^\| (\d+) \|", _SECURITY, re.MULTILINE)
ATTACKS = tuple(
    name for name in map(str, range(1, 71)) if int(name) <= 40 or name in _STATED
)
"""The first forty, and those of the later ones that the page has a row for."""
ATTACKS_IN_FORCE = ATTACKS

_AND = r"(?:\s*,\s*(?:and\s+)?|\s+and\s+)"
_RULE = r"(?:(?:WS|HM|MD|NET|FL)\d+[abc]?|[A-Z]\d+b?)\b"
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
        for name in re.findall(r"[A-Z]*\d+[abc]?", match.group(1))
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
        for _, name in _named_in(path):
            found.setdefault(name, set()).add(file)
    return {name: tuple(sorted(files)) for name, files in found.items()}


@cache
def _named_in(path: Path) -> tuple[tuple[int, str], ...]:
    """Return (line, rule) for each rule that a comment of a file names."""
    with path.open("rb") as file:
        return tuple(
            (token.start[0], name)
            for token in tokenize.tokenize(file.readline)
            if token.type == tokenize.COMMENT
            for name in names_in(token.string)
        )


def tests_naming(path: Path) -> Iterator[tuple[ast.AST, str, str]]:
    """Yield (test, its name, rule) for each rule that a comment on or in a test names."""
    before = 0
    for node in parsed(path).body:
        end = node.end_lineno or node.lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for line, name in _named_in(path):
                if before < line <= end and node.name.startswith("test_"):
                    yield node, node.name, name
        before = end


_AS_A_USER_ALONE = frozenset(
    {
        "passed_by_nobody",
        "file_passed_by_nobody",
        "nobodys_command",
        "run_as_a_user",
    }
)
"""Functions that run something as a user of no rights, or in a user namespace."""
_AS_EACH = "each_host"
"""A parameter of tests that run with a host of root, and with one of such a user."""
_AS_A_USER = _AS_A_USER_ALONE | {_AS_EACH}


@cache
def marked_for_nobody() -> dict[str, frozenset[str]]:
    """Return the tests marked `nobody`, by their files, sorted."""
    found: dict[str, frozenset[str]] = {}
    for path in tree_files():
        file = relative(path)
        if not file.startswith("tests/") or path.suffix != ".py":
            continue
        if "mark.nobody" not in path.read_text(encoding="utf-8"):
            continue
        tests = (
            node.name
            for node in parsed(path).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and any(_is_mark_of_nobody(part) for part in node.decorator_list)
        )
        if names := frozenset(tests):
            found[file] = names
    return found


def _is_mark_of_nobody(decorator: ast.expr) -> bool:
    """Return whether a decorator marks a test, or some of its parameters, so."""
    return any(
        isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.nobody"
        for node in ast.walk(decorator)
    )


def named_for_users() -> set[str]:
    """Return the rules that a test names which is run as a user of no rights.

    Such a test is marked `nobody`, calls what runs something as that user, or has a host
    of each kind.
    """
    found = set()
    for path in tree_files():
        if not relative(path).startswith("tests/") or path.suffix != ".py":
            continue
        marked = marked_for_nobody().get(relative(path), frozenset())
        source = path.read_text(encoding="utf-8")
        if not marked and not any(name in source for name in _AS_A_USER):
            continue
        for test, name, rule in tests_naming(path):
            if name in marked or _names_used(test) & _AS_A_USER:
                found.add(rule)
    return found


def is_named_for_root(rule: str) -> bool:
    """Return whether a test names a rule that does more than run something as a user."""
    return any(
        named == rule and not _names_used(test) & _AS_A_USER_ALONE
        for file in named_by_tests().get(rule, ())
        for test, _, named in tests_naming(ROOT / file)
    )


def _names_used(tree: ast.AST) -> set[str]:
    nodes = nodes_of(tree)
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}
