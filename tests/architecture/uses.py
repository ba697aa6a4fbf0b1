"""Which dotted names a module imports, uses and passes: the eye of the ban tests.

Follows aliases (`import os as o`, `from os import kill as k`) within one file. Does not
follow values: `f = os.kill; f(1, 9)` shows the use of `os.kill`, which is enough.
"""

import ast
from collections import deque
from collections.abc import Iterable, Iterator

from tests.architecture.tree import nodes_of


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted module) of every import, function-level ones included.

    `from a import b` yields `a` and `a.b`, for `b` may be a module.
    """
    return _imported_by(nodes_of(tree))


def imported_at_run_time(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted module) of every import but those under `if TYPE_CHECKING:`."""
    return _imported_by(_walk_at_run_time(tree))


def _imported_by(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def _walk_at_run_time(tree: ast.Module) -> Iterator[ast.AST]:
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        node = waiting.popleft()
        yield node
        if isinstance(node, ast.If) and _is_for_types(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _is_for_types(test: ast.expr) -> bool:
    match test:
        case ast.Name(id="TYPE_CHECKING"):
            return True
        case ast.Attribute(value=ast.Name(id="typing"), attr="TYPE_CHECKING"):
            return True
        case _:
            return False


def used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import and every use of an imported name."""
    yield from imported(tree)
    aliases = _aliases(tree)
    for node in nodes_of(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = _dotted(node, aliases)
            if name is not None:
                yield node.lineno, name


def raised_in_groups(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, "raise") of every error but the group's own raised in an `except*`."""
    for node in nodes_of(tree):
        if isinstance(node, ast.TryStar):
            for handler in node.handlers:
                for inner in ast.walk(handler):
                    if isinstance(inner, ast.Raise) and inner.exc is not None:
                        yield inner.lineno, "raise"


def keywords(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every keyword argument of every call."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg is not None:
                    yield node.lineno, keyword.arg


def methods(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, attribute) of every call of an attribute, whatever it belongs to."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.lineno, node.func.attr


def _aliases(tree: ast.AST) -> dict[str, str]:
    found = {}
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                found[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    match node:
        case ast.Name(id=name):
            return aliases.get(name)
        case ast.Attribute(value=value, attr=attr):
            base = _dotted(value, aliases)
            return None if base is None else f"{base}.{attr}"
        case _:
            return None
