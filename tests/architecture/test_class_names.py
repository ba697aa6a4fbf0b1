"""Names of classes: one for one thing, but for those that are listed.

With two of a name a reader has to look up which one is meant. The
list only shrinks; a class that only its module uses has a name with an underscore.
"""

import ast
from collections import Counter

from tests.architecture.tree import nodes_of, parsed, product_files

SHARED = {
    3: ("Change Command Connection Usage "),
    2: (
        "AccessDeniedError Backend Child ChildRow ChildState Client Commands "
        "Config ConnectionState Contents Endpoint Event Exec Execution "
        "FramingError GoneError InUseError KillArgs Model Moment Node NodeState "
        "Outbound Owner ProcessState Program Read Refusal Request Server "
        "Session Start State Step Store UnavailableError Write "
    ),
}
"""Names that more than one class has, by the number of classes.

Some are words of a wire or of a tool that a model calls (`Read`, `Exec`);
some are the two ends of one thing (`Client`, `Execution`, `AccessDeniedError`).
"""


def shared_names() -> dict[str, int]:
    """Return the public names that more than one class of the product has."""
    names = Counter(
        node.name
        for path in product_files()
        for node in nodes_of(parsed(path))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return {name: number for name, number in names.items() if number > 1}


# CONTRIBUTING: one word for one thing.
def test_a_class_has_a_name_of_its_own() -> None:
    listed = {name: number for number, text in SHARED.items() for name in text.split()}
    found = shared_names()
    assert {n: k for n, k in found.items() if k > listed.get(n, 1)} == {}
    assert {n: k for n, k in listed.items() if k > found.get(n, 1)} == {}, (
        "fewer than listed: shorten the list"
    )
