"""Fixtures of the attacks: a real host in each kind of walls, and the leak check.

Without walls, the door alone stops an attack; with them, the same has to hold. A
test that has the argument `kind`, or a stage that has it, runs once in each; one for which
some kind promises nothing names the others (`@only(...)`) and says why. The column "walls"
of the attacks in docs/explanation/security.md is compared with what is collected here.

A test with other parameters as well tries each of them in `auto` and in one more kind, the
next one in turn, and each kind with some of them; the whole product is marked `chaos`, for
the long form.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.sandbox import ownership
from supervisor.sandbox.plan import FIRST_USER, PROFILES, make_profile
from tests.helpers.command import commands_are_forked
from tests.helpers.figures import tell
from tests.helpers.rounds import LONG
from tests.helpers.stage import Stage, open_stage

__all__ = [
    "commands_are_forked",
    "kind",
    "readable",
    "stage",
    "tell",
    "why_no_bubblewrap",
]

LAYERS = ("mountns", "pidns", "netns", "ipcns", "utsns", "userns")
NAMESPACES = make_profile("namespaces", list(LAYERS))
"""The walls of bubblewrap alone."""

AS_ROOT = replace(PROFILES["auto"], layers=PROFILES["auto"].layers - frozenset({"uid"}))
"""The walls that the root of a user namespace, without users to give, has."""

HAS_NO_USERS = os.geteuid() == 0 and bool(ownership.find_chown_fault(FIRST_USER))

WALLS = {
    "none": PROFILES["none"],
    "auto": AS_ROOT if HAS_NO_USERS else PROFILES["auto"],
    "namespaces": NAMESPACES,
}
KINDS = (*WALLS, "bubblewrap")

BWRAP = (
    "bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev",
    "--",
)  # fmt: skip
"""COMMAND in bubblewrap: what a user has who trusts that more than this program."""


def closed_bwrap(read: tuple[str, ...], write: tuple[str, ...]) -> tuple[str, ...]:
    """Return bubblewrap that shows of the machine's temporary directory only these."""
    words = [*BWRAP[:-1], "--tmpfs", tempfile.gettempdir()]
    for name in (*read, sys.prefix):
        words += ["--ro-bind", name, name]
    for name in write:
        words += ["--bind", name, name]
    return (*words, "--")


def only(*kinds: str) -> pytest.MarkDecorator:
    """Have a test run in these kinds of walls, and in no others."""
    assert set(kinds) < set(KINDS)
    return pytest.mark.parametrize("kind", kinds, indirect=True)


def words_of(
    kind: str, where: Path, *, has_users: bool = True
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (options of `run`, words before COMMAND) for a kind of walls.

    Args:
        kind: of walls.
        where: a directory for a file.
        has_users: if the host is root, it may give children users.
    """
    if kind == "bubblewrap":
        return ("--sandbox", "none"), BWRAP
    config = where / "walls.toml"
    layers = ", ".join(f'"{layer}"' for layer in LAYERS)
    config.write_text(f"[sandbox.namespaces]\nlayers = [{layers}]\n")
    if kind == "auto" and not has_users:
        layers = ", ".join(f'"{layer}"' for layer in AS_ROOT.layers)
        config.write_text(f"[sandbox.as-root]\nlayers = [{layers}]\n")
        return ("--config", str(config), "--sandbox", "as-root"), ()
    return ("--config", str(config), "--sandbox", kind), ()


@pytest.fixture(scope="session")
def why_no_bubblewrap() -> str:
    """Why it cannot be tried; empty if it can. Asked outside of any host, which reaps."""
    if shutil.which("bwrap") is None:
        return "bubblewrap (bwrap) is not installed"
    tried = subprocess.run([*BWRAP, "true"], capture_output=True, check=False)
    said = tried.stderr.decode().strip()
    return f"bwrap cannot make namespaces here: {said}" if tried.returncode else ""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, why_no_bubblewrap: str) -> str:
    """The walls of a test's children."""
    if request.param == "bubblewrap" and why_no_bubblewrap:
        pytest.skip(why_no_bubblewrap)
    name: str = request.param
    return name


@pytest.hookimpl(tryfirst=True)  # before marks choose
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave what is more than each parameter in two kinds of walls to the long form."""
    more = beyond_two_kinds(items)
    for item in more:
        item.add_marker(pytest.mark.chaos)
    if more and not LONG:
        config.hook.pytest_deselected(items=list(more))
        items[:] = [item for item in items if item not in more]


def beyond_two_kinds(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the items of a whole product that only the long form runs."""
    tests: dict[tuple[Path, str], dict[tuple[str, ...], dict[str, pytest.Item]]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            kind = item.callspec.params.get("kind")
            if kind in KINDS:
                words = item.callspec.id.split("-")
                words.remove(kind)
                cases = tests.setdefault((item.path, item.originalname), {})
                cases.setdefault(tuple(words), {})[kind] = item
    found: set[pytest.Item] = set()
    for cases in tests.values():
        for number, by_kind in enumerate(cases.values()):
            others = [kind for kind in KINDS if kind in by_kind and kind != "auto"]
            for turn, kind in enumerate(others):
                if number % len(others) != turn and turn % len(cases) != number:
                    found.add(by_kind[kind])
    return found


@pytest.fixture
def readable(tmp_path: Path) -> Path:
    """A directory for tests that others than its owner may enter."""
    tmp_path.chmod(0o755)
    return tmp_path


def put_behind(stage: Stage, kind: str) -> None:
    """Have the children of a host start behind walls; without any, in bubblewrap."""
    if kind == "bubblewrap":
        stage.wrapper = BWRAP
    else:
        stage.sandbox = WALLS[kind]


@pytest.fixture
async def stage(readable: Path, kind: str) -> AsyncIterator[Stage]:
    """A host with the settings that `run` has, and children behind these walls."""
    async with open_stage(readable) as opened:
        put_behind(opened, kind)
        yield opened
