"""Public modules: those that other packages import, as each package lists them.

The docstring of a package's `__init__` ends with `Public:` and their names. A module that
is not listed may be changed or removed by a look into its own package alone.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.tree import (
    ROOT,
    module_name,
    nodes_of,
    parsed,
    product_files,
    relative,
)

MODULES = {module_name(path): path for path in product_files()}

PACKAGES = (
    "protocol",
    "vfs",
    *sorted(
        name
        for name, path in MODULES.items()
        if name.count(".") == 1 and path.name == "__init__.py" and "supervisor" in name
    ),
)
"""All but `hostlib`, in which every module is for others."""


def test_every_package_of_the_supervisor_is_looked_at() -> None:
    directories = {path.parent.name for path in (ROOT / "supervisor").glob("*/*.py")}
    assert {f"supervisor.{name}" for name in directories} <= set(PACKAGES)


def listed_by(package: str) -> set[str]:
    """Return the modules that a package lists, by their full names."""
    text = ast.get_docstring(parsed(MODULES[package])) or ""
    _, _, names = text.partition("\nPublic:")
    return {f"{package}.{name}" for name in re.findall(r"`+([a-z0-9_.]+)`+", names)}


def imported_from_outside(package: str) -> Iterator[tuple[str, str]]:
    """Yield (module, "file:line" of another package) of each import from a package.

    Imports for types count.  A name that is imported from `__init__` is no module.
    """
    for name, path in MODULES.items():
        if name == package or name.startswith(f"{package}."):
            continue
        for line, target in modules_imported(parsed(path)):
            if target.startswith(f"{package}."):
                yield target, f"{relative(path)}:{line}"


def modules_imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, module of the product) of each import, also within functions."""
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in MODULES else node.module
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name


@pytest.mark.parametrize("package", PACKAGES)
def test_others_import_the_listed_modules_and_no_more(package: str) -> None:
    listed, found = listed_by(package), dict(imported_from_outside(package))
    hidden = [f"{found[name]}: {name}" for name in sorted(found.keys() - listed)]
    where = relative(MODULES[package])
    assert not hidden, f"{where} does not list as public:\n" + "\n".join(hidden)
    unused = sorted(listed - found.keys())
    assert not unused, f"{where} lists what no other package imports: {unused}"


def test_an_import_of_a_module_by_its_package_is_seen() -> None:
    tree = ast.parse(
        "from vfs import policy\nfrom vfs.policy import Policy\nimport vfs"
    )
    names = [name for _, name in modules_imported(tree)]
    assert names == ["vfs.policy", "vfs.policy", "vfs"]
