"""Names of modules: nouns, and each once in its room.

A room is a package of the supervisor with all beneath it, or another package as a whole.
The lists only shrink.
"""

from collections import defaultdict
from pathlib import Path

from tests.architecture.tree import module_name, product_files

NO_NOUNS = frozenset(
    {
        *("above", "after", "again", "apart", "away", "before", "beneath", "beside"),
        *("here", "inside", "now", "outside", "soon", "there", "under", "within"),
        *("by", "in", "of", "on", "out", "over", "up", "with", "without"),
    }
)
"""Prepositions and adverbs."""

APPROVED = frozenset(
    {
        "supervisor.llm.opening",
        "supervisor.llmfd.calls.naming",
        "supervisor.llmfd.calls.reading",
        "supervisor.llmfd.calls.wrapping",
        "supervisor.llmfd.opening",
        "supervisor.toolexec.ending",
        "supervisor.workspace.commit_staging",
        "vfs.client.waiting",
        "vfs.opening",
        "vfs.relay.attached",
    }
)
"""Gerunds that are the field's own word for what the module does; one lane's kind; one
that children which live over an upgrade import by this name, once they need it."""

TWICE = {("vfs", "errors"): {"vfs.client.errors", "vfs.errors"}}
"""Names that a room has twice: what a child is told, and what goes wrong in the host."""


def product_names() -> list[str]:
    """Return the dotted names of all modules that are no package."""
    return [module_name(p) for p in product_files() if p.name != "__init__.py"]


def room_of(name: str) -> str:
    """Return the room of a module."""
    parts = name.split(".")
    depth = 2 if parts[0] == "supervisor" and len(parts) > 2 else 1
    return ".".join(parts[:depth])


def is_noun(name: str) -> bool:
    """Tell whether the last word of a module's name may be a noun."""
    last = Path(name.replace(".", "/")).name.strip("_").split("_")[-1]
    return last not in NO_NOUNS and not last.endswith(("ing", "ed"))


def test_a_participle_and_a_preposition_are_told_from_a_noun() -> None:
    assert not is_noun("supervisor.workspace.hiding")
    assert not is_noun("supervisor.network.learned")
    assert not is_noun("supervisor.cli.inside")
    assert is_noun("supervisor.fleet.held_slices")
    assert is_noun("supervisor.__main__")


# CONTRIBUTING: a module is a noun of the field.
def test_a_module_is_named_by_a_noun() -> None:
    wrong = {name for name in product_names() if not is_noun(name)}
    assert wrong - APPROVED == set()
    assert APPROVED - wrong == set(), "not needed any more"


# CONTRIBUTING: basenames are unique within a room.
def test_a_name_stands_for_one_module_of_a_room() -> None:
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name in product_names():
        found[room_of(name), name.rpartition(".")[2]].add(name)
    assert {key: names for key, names in found.items() if len(names) > 1} == TWICE
