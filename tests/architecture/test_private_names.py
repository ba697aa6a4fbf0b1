"""Private names of the product are in no test.

A test looks at `statistics()`, at a public attribute or at what a client sees. A private
name ties it to how a thing is done, and a change of that breaks a test that holds no rule.
"""

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from tests.architecture.tree import (
    PACKAGES,
    nodes_of,
    parsed,
    product_files,
    relative,
    tree_files,
)

OF_NAMED_TUPLES = frozenset({"_asdict", "_fields", "_make", "_replace"})
"""Public names of `typing.NamedTuple`, whatever they begin with."""


def is_private(name: str) -> bool:
    """Return whether a name is its owner's alone; `__init__` is everybody's."""
    is_own = name.startswith("_") and not name.startswith("__") and name != "_"
    return is_own and name not in OF_NAMED_TUPLES


@cache
def private_names() -> frozenset[str]:
    """Return the private names that the product gives: functions, classes, attributes."""
    return frozenset(
        name
        for path in product_files()
        for node in nodes_of(parsed(path))
        for name in given_names(node)
        if is_private(name)
    )


def given_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node gives to something."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.ClassDef(name=name):
            yield name
        case ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case _:
            pass


def uses(tree: ast.Module, known: frozenset[str]) -> list[str]:
    """Return "line: name" of each use of a private name of the product."""
    return [
        f"{getattr(node, 'lineno', 0)}: {name}"
        for node in nodes_of(tree)
        for name in used_names(node)
        if is_private(name) and name in known
    ]


def used_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node takes from another's object or module."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            pass
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
            pass
        case ast.Attribute(attr=name):
            yield name
        case ast.ImportFrom(module=str(module), names=names):
            if module.partition(".")[0] in PACKAGES:
                yield from (one.name for one in names)
        case ast.Call(args=args) if len(args) > 1:  # monkeypatch.setattr, and its like
            yield from texts(args)
        case _:
            pass


def texts(arguments: list[ast.expr]) -> Iterator[str]:
    """Yield the last part of each text among the arguments of a call."""
    for one in arguments:
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value.rpartition(".")[2]


# CONTRIBUTING: no private attribute of the product in a test.
def test_no_test_uses_a_private_name_of_the_product() -> None:
    found = [
        f"{relative(path)}:{one}"
        for path in tree_files()
        if path.suffix == ".py" and relative(path).startswith("tests/")
        for one in uses(parsed(path), private_names())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("pump._epoll.poll(0)", ["1: _epoll"]),
        ("hall.pump._epoll = made", ["1: _epoll"]),
        ("from vfs.policy import _ODD", ["1: _ODD"]),
        ("monkeypatch.setattr(pump, '_epoll', made)", ["1: _epoll"]),
        ("monkeypatch.setattr('supervisor.fsproxy.pump._epoll', made)", ["1: _epoll"]),
        ("watch(pump, '_epoll')", ["1: _epoll"]),
        ("self._epoll = cls._epoll", []),
        ("super()._epoll()", []),
        ("other._mine", []),
        ("pump.__class__", []),
        ("from tests.helpers import _epoll", []),
    ],
)
def test_a_use_of_a_private_name_is_found(source: str, found: list[str]) -> None:
    known = frozenset({"_epoll", "_ODD", "__class__"})
    assert uses(ast.parse(source), known) == found
