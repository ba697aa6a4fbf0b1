"""Circles of imports, types included, and the listed violations.

The numbers are what stands today: they only shrink. `ignore_imports` of `pyproject.toml`
has the violations by name.
"""

import tomllib
from functools import cache
from typing import Any

import grimp

from tests.architecture.tree import PACKAGES, ROOT, module_name, product_files

CIRCLES = 0
"""Most circles: groups of modules of which each one leads to each other one."""

LARGEST = 0
"""Most modules in one circle."""

LISTED = 4
"""Most imports in the lists of `ignore_imports`; two contracts may list the same one."""


def circles(graph: grimp.ImportGraph) -> list[set[str]]:
    """Return the strongly connected components of more than one module."""
    left = set(graph.modules)
    found: list[set[str]] = []
    while left:
        module = left.pop()
        reached = graph.find_upstream_modules(module)
        together = reached & graph.find_downstream_modules(module)
        if together:
            found.append({module, *together})
            left -= together
    return found


@cache
def product_graph() -> grimp.ImportGraph:
    """Return every import of the product, those for types included."""
    return grimp.build_graph(
        PACKAGES[0], *PACKAGES[1:], exclude_type_checking_imports=False, cache_dir=None
    )


def contracts() -> list[dict[str, Any]]:
    """Return the contracts of `pyproject.toml`."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    linter = document["tool"]["importlinter"]
    assert linter["exclude_type_checking_imports"] is False
    found: list[dict[str, Any]] = linter["contracts"]
    return found


def test_circles_of_imports_do_not_grow() -> None:
    found = circles(product_graph())
    told = "\n".join(" ".join(sorted(circle)) for circle in found)
    assert len(found) <= CIRCLES, told
    assert max(map(len, found), default=0) <= LARGEST, told


def test_the_graph_holds_every_module_of_the_product() -> None:
    assert {module_name(path) for path in product_files()} <= product_graph().modules


def test_a_circle_is_found_and_a_chain_is_none() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")):
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == [{"b", "c"}]


def test_listed_violations_do_not_grow() -> None:
    listed = {
        entry
        for contract in contracts()
        for entry in contract.get("ignore_imports", ())
    }
    assert len(listed) <= LISTED, sorted(listed)


def test_an_entry_that_is_not_needed_any_more_is_an_error() -> None:
    # That is what the linter makes of one where nothing else is said.
    assert not [
        c["id"] for c in contracts() if "unmatched_ignore_imports_alerting" in c
    ]


def test_the_linter_looks_at_circles_in_every_package() -> None:
    (siblings,) = [c for c in contracts() if c["type"] == "acyclic_siblings"]
    assert set(siblings["ancestors"]) == set(PACKAGES)
    assert not {"depth", "skip_descendants"} & siblings.keys()
