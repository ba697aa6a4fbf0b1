"""Write what the documents take from the code; with `--check`, only compare.

    python docs/generate.py [--check]

Each entry of `DOCUMENTS` is a file and the function that returns its text with the
generated parts renewed. The rest of the file is written by hand and left alone.
"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from supervisor.children import lifecycle
from supervisor.fleet import states
from supervisor.llm.recipe import Recipe, read_recipe, recipe_names
from supervisor.spawn import restarts
from tests.architecture.rules import named_by_tests
from tests.architecture.tree import ROOT

Named = Mapping[str, tuple[str, ...]]

ATTACK = re.compile(r"^\| (\d+) \| ([^|]*) \| ([^|]*)\|.*$", re.MULTILINE)
TABLE = re.compile(
    r"(<!-- generated: table of a ([a-z ]+) -->\n).*?(<!-- end of generated: table -->)",
    re.DOTALL,
)
DRAWN: Mapping[str, Callable[[], str]] = {
    "child": lifecycle.TABLE.draw,
    "kept child": restarts.TABLE.draw,
    "node of the fleet": states.NODES.draw,
    "child of the fleet": states.CHILDREN.draw,
    "membership": states.PHASES.draw,
}
"""The tables of (state, event), by the name that a page gives them."""
AGENTS = re.compile(
    r"(<!-- generated: agents -->\n).*?(<!-- end of generated: agents -->)",
    re.DOTALL,
)
AGENTS_HEAD = (
    "| agent | version | starts | reaches the model | edits | tests | as a user | limits |",
    "|---|---|---|---|---|---|---|---|",
)
INVARIANT = re.compile(r"^(## (I\d+)\..*?^Named by: )[^\n]*$", re.MULTILINE | re.DOTALL)


def security(text: str, named: Named) -> str:
    """Return the page with the last column of the attacks renewed."""

    def row(match: re.Match[str]) -> str:
        number, attack, waits_for = (part.strip() for part in match.groups())
        status = _files(named.get(number, ())) or "not covered yet"
        return f"| {number} | {attack} | {waits_for} | {status} |"

    return ATTACK.sub(row, text)


def invariants(text: str, named: Named) -> str:
    """Return the page with the line "Named by" of each invariant renewed."""

    def section(match: re.Match[str]) -> str:
        files = _files(named.get(match.group(2), ()))
        return f"{match.group(1)}{files or 'no test yet'}"

    return INVARIANT.sub(section, text)


def design(text: str, named: Named) -> str:
    """Return the page with the tables of (state, event) renewed."""
    del named
    return TABLE.sub(lambda match: match[1] + DRAWN[match[2]]() + match[3], text)


def agents(text: str, named: Named) -> str:
    """Return the page with the table of the recipes renewed."""
    del named
    rows = [_agent_row(read_recipe(name)) for name in recipe_names()]
    table = "\n".join([*AGENTS_HEAD, *rows, ""])
    return AGENTS.sub(lambda match: match[1] + table + match[2], text)


def _agent_row(recipe: Recipe) -> str:
    tried = recipe.tried
    if tried is None:
        return f"| `{recipe.agent}` | | no recipe | | | | | {recipe.reason} |"
    did = [tried.starts, tried.reaches, tried.edits, tried.tests, tried.as_user]
    cells = [f"`{recipe.agent}`", recipe.version_tried, *did, recipe.limits]
    return f"| {' | '.join(cells)} |"


DOCUMENTS: tuple[tuple[str, Callable[[str, Named], str]], ...] = (
    ("docs/explanation/design.md", design),
    ("docs/explanation/security.md", security),
    ("docs/explanation/invariants.md", invariants),
    ("docs/reference/agents.md", agents),
)


def main(arguments: list[str]) -> int:
    """Renew the documents; return 1 if `--check` found one that is stale."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python docs/generate.py [--check]\n")
        return 2
    named = named_by_tests()
    stale = []
    for name, renew in DOCUMENTS:
        path = ROOT / name
        old = path.read_text(encoding="utf-8")
        new = renew(old, named)
        if new != old:
            stale.append(path)
            if not arguments:
                path.write_text(new, encoding="utf-8")
    if stale and arguments:
        names = " ".join(str(Path(path).relative_to(ROOT)) for path in stale)
        sys.stderr.write(f"stale: {names}: run `make generate` and commit the result\n")
        return 1
    return 0


def _files(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
