"""The recipes of docs/how-to/network.md, as written, with their programs.

All that a program reaches are servers of the test's own, in a net namespace that is all the
world of a host (`tests.helpers.recipeworld`). The tests run the whole product, in its usual
sandbox. A program that is not installed is skipped.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from supervisor.network.rule import parse_rule
from tests.helpers import recipestock as stock
from tests.helpers import recipeworld
from tests.helpers.command import ENVIRONMENT, PROGRAMS, SANDHOST, TIMEOUT_S, sandhost

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "network.md"
SECTIONS = dict(
    section.split("\n", 1)
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
)


def page_rules() -> dict[str, list[str]]:
    """Return the rules of each recipe of the page's table."""
    rows = re.findall(r"^\| (.+) \| (`.+`) \|$", SECTIONS["Recipes"], re.MULTILINE)
    return {name: re.findall(r"`(.+?)`", rules) for name, rules in rows}


def page_command(section: str) -> list[str]:
    """Return the words after `sandhost` of a section's first command."""
    lines = SECTIONS[section].replace("\\\n", "")
    found = re.search(r"^\$ sandhost (.+)$", lines, re.MULTILINE)
    assert found is not None
    return shlex.split(found[1])


class Recipe(NamedTuple):
    """The parts of a recipe's trial; `{place}` is the directory of the world.

    Attributes:
        needs: programs.
        script: prints `SAID` at its end.
    """

    needs: tuple[str, ...]
    script: str


CLONED = "cat {home}/demo/said"
RECIPES = {
    "a Python index and its files": Recipe(
        ("pip",),
        "pip install -q --retries 0 --cert {trust} -i https://index.example.com/simple"
        " --target {home}/lib six && PYTHONPATH={home}/lib python3 -c"
        " 'import six; print(six.SAID)'",
    ),
    "an npm registry": Recipe(
        ("npm", "node"),
        "npm install --silent --no-audit --fetch-retries=0 --cafile={trust}"
        " --registry=https://registry.example.com --prefix {home} demo"
        " && cd {home} && node -p 'require(\"demo\")'",
    ),
    "git over https": Recipe(
        ("git",),
        "git -c http.sslCAInfo={trust} clone -q https://git.example.com/git/demo.git"
        " {home}/demo && " + CLONED,
    ),
    "git over ssh": Recipe(
        ("git", "ssh", "sshd"),
        "install -m 600 {place}/sshd/user_key {home}/key;"
        " export GIT_SSH_COMMAND='ssh -i {home}/key"
        " -o UserKnownHostsFile={place}/sshd/known_hosts';"
        " git clone -q ssh://root@git.example.com/demo.git {home}/demo && " + CLONED,
    ),
    "a database in your own network": Recipe(
        ("psql",),
        "psql -h db.example.internal -U a -d postgres -Atc {query}",
    ),
    "one machine by its address": Recipe(
        ("psql",),
        "psql -h 192.168.7.20 -U a -d postgres -Atc {query}",
    ),
}


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory with what the servers of the world serve."""
    if os.geteuid() or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("a world of its own needs root, unshare(1) and ip(8)")
    # A child that is no root sees it, as the directory in which its host is started.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        stock.fill(Path(name))
        yield Path(name)


class Outcome(NamedTuple):
    """Output of a program and the host, and the journal's events."""

    out: str
    err: str
    events: list[dict[str, object]]


def run(
    place: Path, tmp_path: Path, *words: str, world: tuple[str, ...] = ()
) -> Outcome:
    """Run `sandhost run` in the world, with some words."""
    journal = tmp_path / "journal"
    outer = (
        "unshare",
        "--net",
        "--mount",
        sys.executable,
        recipeworld.__file__,
        *world,
    )
    done = subprocess.run(
        [*outer, str(place), SANDHOST, "run", "--journal", str(journal), *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=TIMEOUT_S, env=ENVIRONMENT, cwd=place,
    )  # fmt: skip
    lines = journal.read_text().splitlines() if journal.exists() else ()
    return Outcome(done.stdout, done.stderr, [json.loads(line) for line in lines])


def network(rules: list[str]) -> list[str]:
    """Return the options for some rules."""
    return [word for rule in rules for word in ("--network", rule)]


def filled(recipe: Recipe, place: Path) -> tuple[str, ...]:
    """Return the command of a recipe; skips the test if a program is missing."""
    for name in recipe.needs:
        if shutil.which(name, path=f"{PROGRAMS}:/usr/sbin") is None:
            pytest.skip(f"{name} is not installed")
    query = f"\"select '{stock.SAID}'\""
    if stock.postgres() is None:
        query = "'select 1'"
    words = {"place": place, "trust": place / "tls-made.pem", "home": "$HOME"}
    return "sh", "-c", recipe.script.format(**words, query=query)


def test_each_recipe_of_the_page_is_tried() -> None:
    assert page_rules().keys() == RECIPES.keys()


# spec NET4: no program has to know of it, and the page's rules are all that it needs.
@pytest.mark.parametrize("name", RECIPES)
def test_a_program_works_with_the_rules_of_its_recipe(
    name: str, place: Path, tmp_path: Path
) -> None:
    rules = page_rules()[name]
    got = run(place, tmp_path, *network(rules), "--", *filled(RECIPES[name], place))
    assert got.out.rstrip().endswith((stock.SAID, "from postgres")), got.err
    assert not [one for one in got.events if one["event"] == "network.refused"]


# spec NET5: a name without a rule does not exist. spec NET11: the rule is told.
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_no_rule_too_many(name: str, place: Path, tmp_path: Path) -> None:
    *others, rule = page_rules()[name]
    rules = network([*others, "other.example.com"])
    got = run(place, tmp_path, *rules, "--", *filled(RECIPES[name], place))
    assert stock.SAID not in got.out
    assert "from postgres" not in got.out
    missed = parse_rule(rule)
    if isinstance(missed.target, str):
        refused = [one for one in got.events if one["event"] == "network.refused"]
        assert refused, got
        assert {one["name"] for one in refused} == {missed.target}
        assert {one["reason"] for one in refused} == {"no-rule"}


# spec NET4: the page's first command, to the letter.
def test_the_first_command_of_the_page_installs(place: Path, tmp_path: Path) -> None:
    got = run(place, tmp_path, *index(place), *page_command("Try it")[1:])
    assert f"six-{stock.VERSION}-py3-none-any.whl" in got.out, got


def index(place: Path) -> list[str]:
    """Return options that tell pip of the index, as a user's own settings do."""
    return [
        *("--env", "PIP_INDEX_URL=https://index.example.com/simple"),
        *("--env", f"PIP_CERT={place / 'tls-made.pem'}"),
        *("--env", "PIP_DEST=/tmp"),
    ]


# spec NET8: a corporate proxy resolves names that the host does not know.
def test_the_command_for_a_corporate_proxy_installs(
    place: Path, tmp_path: Path
) -> None:
    words = page_command("Behind a corporate proxy")[1:]
    behind = ("--behind-proxy",)
    got = run(place, tmp_path, *index(place), *words, world=behind)
    assert f"six-{stock.VERSION}-py3-none-any.whl" in got.out, got
    for name in ("index.example.com", "files.example.com"):
        assert f"the proxy was asked: CONNECT {name}:443" in got.err


# spec NET8: and without it those names are not found.
def test_without_the_proxy_its_names_are_not_found(place: Path, tmp_path: Path) -> None:
    words = page_command("Try it")[1:]
    retries = ("--env", "PIP_RETRIES=0")
    behind = ("--behind-proxy",)
    got = run(place, tmp_path, *index(place), *retries, *words, world=behind)
    assert stock.VERSION not in got.out
    assert "the proxy was asked" not in got.err
    failed = [one for one in got.events if one["event"] == "network.failed"]
    assert {one["name"] for one in failed} == {"index.example.com"}


# spec NET1: the page's configuration has no fault.
def test_the_configuration_of_the_page_has_no_fault(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", SECTIONS["Recipes"], re.DOTALL)
    assert tomllib.loads(text)["policy"]["worker"]["network"]
    config = tmp_path / "page.toml"
    config.write_text(text)
    done = sandhost("check-config", config)
    assert (done.status, done.err) == (0, b"")


LEARN = """
mkfifo in
"$1" run --control run.sock --env "$3" --env "$4" --env "$5" \
  --expose "$2" {run} -- \
  sh -c 'pip download six >&2; echo ready; read -r _' <in |
{{ exec 3>in; read -r _; "$1" {rules}; }}
"""


# spec NET13: the smallest list of rules, as the page shows it.
def test_the_page_shows_what_is_learned(place: Path, tmp_path: Path) -> None:
    text = SECTIONS["Find out what a program needs"]
    commands = re.findall(r"^\$ sandhost (.+)$", text, re.MULTILINE)
    (shown,) = re.findall(r"--rules\n(.*?)```", text, re.DOTALL)
    options, _, _ = commands[0].removeprefix("run --control run.sock").partition(" -- ")
    assert commands[1] == "network child-1 --control run.sock --rules"
    script = LEARN.format(run=options, rules=commands[1])
    outer = ("unshare", "--net", "--mount", sys.executable, recipeworld.__file__)
    words = [word for word in index(place) if word != "--env"]
    done = subprocess.run(
        [*outer, str(place), "sh", "-ec", script, "sh", SANDHOST, place, *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=TIMEOUT_S, env=ENVIRONMENT, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == shown, done
