"""Completion as shells ask for it: commands, options, values, files, children."""

import shutil
from pathlib import Path

import pytest

from supervisor.cli.completion import SHELLS
from tests.helpers.command import ENVIRONMENT, PROGRAMS, Outcome, sandhost, shell
from tests.helpers.daemon import daemon

pytestmark = pytest.mark.slow

BASH = """
source completion || exit 99
COMP_WORDS=({words} "{last}")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
COMP_LINE="${{COMP_WORDS[*]}}"
COMPREPLY=()
{function} sandhost
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def asked(name: str, words: str, last: str) -> list[str]:
    """Ask the program as the script of a shell does; return the words that it offers."""
    line = f"{words} {last}"
    env = {
        **ENVIRONMENT,
        "_SANDHOST_COMPLETE": f"{name}_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": last if name == "fish" else str(len(words.split())),
    }
    outcome = sandhost(env=env)
    assert (outcome.status, outcome.err) == (0, b"")
    lines = outcome.out.decode().strip().splitlines()
    if name == "bash":
        return [line.partition(",")[2] for line in lines]
    if name == "zsh":
        return lines[1::3]
    return [line.partition(",")[2].partition("\t")[0] for line in lines]


def in_shell(name: str, script: str, where: Path) -> Outcome:
    """Run a script of a shell, beside the file ``completion``.

    Skip if it is not there.
    """
    program = shutil.which(name, path=PROGRAMS)
    if program is None:
        pytest.skip(f"{name} is not installed")
    written = sandhost("completion", name)
    assert (written.status, written.err) == (0, b"")
    (where / "completion").write_bytes(written.out)
    (where / "script").write_text(script)
    return shell(f"exec {program} ./script", cwd=where, env={"HOME": str(where)})


@pytest.mark.parametrize("name", SHELLS)
@pytest.mark.parametrize(
    ("words", "last", "offered"),
    [
        ("sandhost", "ki", {"kill"}),
        ("sandhost", "p", {"pipeline", "ps"}),
        ("sandhost run", "--tr", {"--transport"}),
        ("sandhost run --transport", "", {"socketpair", "pipes"}),
        ("sandhost fs", "m", {"mkdir", "mv"}),
        ("sandhost fs mkdir", "m", set()),
        ("sandhost completion", "", set(SHELLS)),
        ("sandhost logs --control /none", "x", set()),  # no host: no names, no fault
    ],
)
def test_a_shell_is_offered_what_fits(
    name: str, words: str, last: str, offered: set[str]
) -> None:
    assert set(asked(name, words, last)) == offered


def test_a_shell_is_offered_the_children_of_the_daemon(tmp_path: Path) -> None:
    config = "".join(
        f"[child.{name}]\npolicy = 'p'\ncommand = ['sleep', '1000']\n"
        for name in ("web", "worker", "other")
    )
    with daemon(tmp_path, f"[policy.p]\nsandbox = 'none'\n{config}") as it:
        for order in ("kill", "stop", "logs"):
            words = f"sandhost {order} --control {it.client.path}"
            assert asked("bash", words, "w") == ["web", "worker"]


def test_the_script_of_bash_completes(tmp_path: Path) -> None:
    script = BASH.format(words="sandhost", last="che", function="_sandhost_completion")
    outcome = in_shell("bash", script, tmp_path)
    assert (outcome.status, outcome.out) == (0, b"check-config\n")
    (tmp_path / "some-file").touch()
    script = BASH.format(
        words="sandhost serve --config", last="some", function="_sandhost_completion"
    )
    outcome = in_shell(
        "bash", f"compopt() {{ kind=$2; }}\n{script}echo $kind", tmp_path
    )
    assert outcome.out == b"\ndefault\n"  # bash has the names of files itself


def test_the_script_of_fish_completes(tmp_path: Path) -> None:
    script = "source completion; or exit 99; complete -C 'sandhost che'"
    outcome = in_shell("fish", script, tmp_path)
    assert outcome.status == 0
    assert outcome.out.split(b"\t")[0] == b"check-config"


def test_the_script_of_zsh_is_one(tmp_path: Path) -> None:
    outcome = in_shell("zsh", "compdef() {}; source ./completion && echo ok", tmp_path)
    assert (outcome.status, outcome.out) == (0, b"ok\n")


def test_an_unknown_shell_is_refused() -> None:
    outcome = sandhost("completion", "csh")
    assert (outcome.status, outcome.out) == (2, b"")
    assert outcome.said("no script for 'csh'; there are: bash, zsh, fish")


def test_a_request_that_is_none_is_refused() -> None:
    outcome = sandhost(env={**ENVIRONMENT, "_SANDHOST_COMPLETE": "bash_source"})
    assert (outcome.status, outcome.out) == (2, b"")
    assert outcome.said("_SANDHOST_COMPLETE: not of a script of sandhost completion")
