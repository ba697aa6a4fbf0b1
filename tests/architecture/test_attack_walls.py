"""Each attack runs in each kind of walls, as docs/explanation/security.md says.

And as which users.

Asked of pytest itself, which collects what it would run; no test is run here.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture import rules
from tests.architecture.tree import ROOT

KINDS = ("none", "auto", "namespaces", "bubblewrap")
ATTACK_FILES = tuple(sorted((ROOT / "tests" / "system" / "attacks").glob("test_*.py")))

ROW = re.compile(r"^\| (\d+) \| [^|]* \| ([^|]*?) ?\|", re.MULTILINE)
CASE = re.compile(r"^(tests/system/attacks/\w+\.py)::(\w+)(?:\[(.*)\])?$", re.MULTILINE)


def attacks_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (test, attack) for each attack that a comment on or in a test names."""
    for _, test, name in rules.tests_naming(path):
        if name.isdecimal():
            yield test, name


@cache
def collected() -> dict[tuple[str, str], set[str]]:
    """Return the kinds of walls that each test of the attacks has: (file, name)."""
    words = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    done = subprocess.run(
        [sys.executable, *words, "tests/system/attacks"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    found: dict[tuple[str, str], set[str]] = {}
    for file, name, parameters in CASE.findall(done.stdout):
        kinds = set(parameters.split("-")) & set(KINDS)
        found.setdefault((file, name), set()).update(kinds)
    return found


def kinds_of_attacks() -> dict[str, set[str]]:
    """Return the kinds of walls in which each attack is tried."""
    found: dict[str, set[str]] = {name: set() for name in rules.ATTACKS}
    for path in ATTACK_FILES:
        for test, attack in attacks_of(path):
            kinds = collected()[path.relative_to(ROOT).as_posix(), test]
            found[attack] |= kinds
    return found


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_each_attack_runs_in_the_walls_that_the_document_says() -> None:
    text = (ROOT / "docs" / "explanation" / "security.md").read_text(encoding="utf-8")
    stated = {
        number: set(KINDS) if walls == "all" else set(re.findall(r"`(\w+)`", walls))
        for number, walls in ROW.findall(text)
    }
    assert tuple(stated) == rules.ATTACKS
    assert kinds_of_attacks() == stated


def test_whoever_has_no_rights_tries_them_too() -> None:
    from tests.system.attacks.test_unprivileged import BY_NOBODY, NOT_BY_NOBODY  # noqa: PLC0415

    names = sorted(path.stem.removeprefix("test_") for path in ATTACK_FILES)
    assert sorted([*BY_NOBODY, *NOT_BY_NOBODY]) == names
    assert all(NOT_BY_NOBODY.values()), "each says why"
