"""Everything public in the product says what it is.

Where a package has a `base.py`, a method documented there needs no second docstring in
the files beside it: one contract, stated once.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.tree import PACKAGES, parsed, product_files, relative

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def undocumented(
    tree: ast.Module, elsewhere: frozenset[str] = frozenset()
) -> list[str]:
    """Return "line: name" of what is public and has no docstring.

    Args:
        tree: one file.
        elsewhere: names whose contract is stated in another file.
    """
    return [
        f"{getattr(node, 'lineno', 1)}: {name}"
        for name, node in _public(tree, "module")
        if not (ast.get_docstring(node) or "").strip() and name not in elsewhere
    ]


def documented_in_base(path: Path) -> frozenset[str]:
    """Return the methods whose contract the `base.py` beside a file states."""
    base = path.with_name("base.py")
    if base == path or not base.exists():
        return frozenset()
    return frozenset(
        name
        for name, node in _public(parsed(base), "module")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node)
    )


def _public(node: Documented, name: str) -> Iterator[tuple[str, Documented]]:
    yield name, node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return  # definitions in a function are not public
    for child in node.body:
        if not isinstance(
            child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) or child.name.startswith("_"):
            continue
        if not _exempt(child):
            yield from _public(child, child.name)


def _exempt(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether another definition already documents this one."""
    names = {ast.unparse(decorator) for decorator in node.decorator_list}
    return any(
        name.endswith((".setter", ".deleter", "overload", "override")) for name in names
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_public_has_a_docstring(package: str) -> None:
    assert not [
        f"{relative(path)}:{found}"
        for path in product_files()
        if relative(path).startswith(f"{package}/")
        for found in undocumented(parsed(path), documented_in_base(path))
    ]


def test_the_check_sees_what_is_missing() -> None:
    source = "class A:\n    def b(self):\n        def c(): ...\n    def _d(self): ...\n"
    assert undocumented(ast.parse(source)) == ["1: module", "1: A", "2: b"]
    assert undocumented(ast.parse(source), frozenset({"b"})) == ["1: module", "1: A"]


def test_the_product_is_seen_at_all() -> None:
    names = {relative(path).partition("/")[0] for path in product_files()}
    assert names == set(PACKAGES)
