"""The program's table of commands: what a start imports, and how help shows them."""

import re
import subprocess
import sys

import pytest

from supervisor.cli.app import COMMANDS
from tests.helpers.command import ENVIRONMENT, sandhost
from tests.helpers.spawning import ROOT

pytestmark = pytest.mark.slow

NAMES = [name for entries in COMMANDS.values() for name in entries]

RUN_NEEDS = {
    *("click", "msgspec", "trio"),
    *("attr", "attrs", "idna", "outcome", "sniffio", "sortedcontainers"),  # of trio
    "typing_extensions",  # of click's or msgspec's, where it is there
    *("hostlib", "protocol", "supervisor", "vfs"),
}
"""All that `run` loads beside the standard library."""

OF_THE_ENVIRONMENT = {"_distutils_hack", "sitecustomize", "usercustomize"}
"""Modules that an interpreter loads by itself, if they exist."""


def imports(*words: str) -> set[str]:
    """Return the names of the modules that a command's process loads."""
    done = subprocess.run(
        [sys.executable, "-v", "-m", "supervisor", *words],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    return set(re.findall("^import '([^']+)' #", done.stderr, re.MULTILINE))


def of_commands(loaded: set[str]) -> set[str]:
    """Return the loaded modules of the command line itself."""
    package = "supervisor.cli."
    return {name.removeprefix(package) for name in loaded if name.startswith(package)}


# spec face: a start of `run` is at most 1.5 times its imports.
def test_run_loads_no_module_of_another_command() -> None:
    loaded = imports("run", "--", "true")
    roots = {name.partition(".")[0] for name in loaded}
    foreign = roots - sys.stdlib_module_names - OF_THE_ENVIRONMENT
    assert {"click", "msgspec", "trio"} <= foreign <= RUN_NEEDS
    assert of_commands(loaded) == {"app", "help", "network_options", "options", "run"}
    others = {"client", "control", "fds", "handover", "llm", "relay", "serve", "shim"}
    assert not loaded & {f"supervisor.{name}" for name in others | {"toolexec"}}
    slow = {"asyncio", "email", "http", "importlib.metadata", "multiprocessing"}
    assert not loaded & slow


@pytest.mark.parametrize("words", ["", "--help", "--version"])
def test_what_is_told_of_the_whole_loads_no_command(words: str) -> None:
    loaded = imports(*(words.split() or ["-h"]))
    assert of_commands(loaded) == {"app", "help"}
    assert not loaded & {"trio", "msgspec", "rich"}


def test_a_table_loads_neither_trio_nor_another_command() -> None:
    loaded = imports("ps", "--help")
    assert of_commands(loaded) == {"app", "help", "options", "tables"}
    assert not loaded & {"trio", "msgspec", "rich"}


def test_help_shows_the_commands_by_group() -> None:
    outcome = sandhost("--help")
    assert (outcome.status, outcome.err) == (0, b"")
    text = outcome.out.decode()
    shown: dict[str, list[str]] = {}
    for block in text.split("\n\n"):
        head, _, rest = block.strip().partition(":\n")
        shown[head] = re.findall(r"^  (\S+)  ", rest, re.MULTILINE)
    for group, entries in COMMANDS.items():
        assert shown[group] == list(entries)
    assert "..." not in text.replace("[ARG]...", "").replace(" ...", "")  # cut short


def test_help_can_be_asked_for_by_one_letter() -> None:
    assert sandhost("-h") == sandhost("--help")


@pytest.mark.parametrize("name", NAMES)
def test_a_command_tells_its_words_and_an_example(name: str) -> None:
    outcome = sandhost(name, "--help")
    assert (outcome.status, outcome.err) == (0, b"")
    text = outcome.out.decode()
    assert re.search(rf"xample.*: .*sandhost {name}\b", text)
    assert sandhost(name, "-h") == outcome


INSIDE = {"fs", "llm", "fd"}
"""Commands whose help is not the framework's."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in INSIDE])
def test_the_table_has_the_first_line_of_a_commands_help(name: str) -> None:
    text = sandhost(name, "--help").out.decode()
    first = " ".join(text.split("\n\n")[1].split())
    entries = {key: of[key] for of in COMMANDS.values() for key in of}
    assert first == entries[name].help


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("frob",), "No such command 'frob'"),
        (("kil",), "Did you mean 'kill'?"),
        (("kill", "--tre", "x"), "Did you mean '--tree'?"),
        (("--bogus",), "No such option '--bogus'"),
        (("logs", "-n", "x", "c"), "--lines: not a number: 'x'; write 0 or more"),
        (("logs", "-n", "-1", "c"), "--lines: not a number: '-1'; write 0 or more"),
        (("top", "--interval", "x"), "--interval: not a time: 'x'; write seconds"),
        (("stop", "--grace", "x"), "--grace: not a time: 'x'; write seconds"),
        (("spawn", "--env", "K", "--", "a"), "--env: not a variable: 'K'; write"),
        (("doctor", "--control", "c"), "--control names a host for --leaks; add it"),
        (("trace", "c", "--journal", "/nope"), "or directory; name what is there"),
        (("shim", "/dev/null"), "File exists; name another, or remove it"),
        (("logs",), "Missing argument 'CHILD'; see 'sandhost logs --help'"),
    ],
)
def test_what_is_not_there_is_told_with_what_is_like_it(
    words: tuple[str, ...], said: str
) -> None:
    outcome = sandhost(*words)
    assert (outcome.status, outcome.out) == (2, b"")
    assert outcome.said(said)
