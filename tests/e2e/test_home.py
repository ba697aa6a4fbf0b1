"""What programs that know nothing of the host find: a HOME, a name, a terminal, `/etc`."""

import os
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT, Outcome, sandhost

IS_ROOT = os.geteuid() == 0


def shell(script: str, *options: str) -> Outcome:
    """Run a shell script behind a door."""
    return sandhost("run", *options, "--", "sh", "-c", script)


def says(script: str, *options: str) -> str:
    """Return what it prints; it has to end well."""
    outcome = shell(script, *options)
    assert outcome.status == 0, outcome
    return outcome.out.decode().strip()


# spec HM1
def test_home_is_writable_private_and_gone_afterwards() -> None:
    script = (
        'echo x > "$HOME/.rc" && cat "$HOME/.rc" && stat -c %a "$HOME" && echo "$HOME"'
    )
    content, mode, home = says(script).split()
    assert (content, mode) == ("x", "700")
    assert home != ENVIRONMENT["HOME"]
    assert not Path(home).exists()


# spec HM1
def test_without_walls_home_stays() -> None:
    assert says('echo "$HOME"', "--sandbox", "none") == ENVIRONMENT["HOME"]


# spec HM1
@pytest.mark.parametrize("options", [("--env", "HOME=/x"), ("--pass-env", "HOME")])
def test_a_home_that_is_named_wins(options: tuple[str, str]) -> None:
    expected = "/x" if options[0] == "--env" else ENVIRONMENT["HOME"]
    assert says('echo "$HOME"', *options) == expected


# spec HM1
def test_a_kept_home_is_given_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    script = (
        'echo "$HOME"; echo x >> "$HOME/seen"; cat "$HOME/seen"; stat -c %U "$HOME"'
    )
    me = "root" if IS_ROOT else None
    for runs in (1, 2):
        first, *seen, _ = says(script, "--home", str(home)).split()
        assert first == str(home)
        assert seen == ["x"] * runs
    assert me is None or (home / "seen").owner() == me


# spec HM1
@pytest.mark.skipif(not IS_ROOT, reason="it takes root to have another's directory")
def test_a_kept_home_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 1234, 1234)
    outcome = shell("true", "--home", str(tmp_path))
    assert outcome.status == 125
    assert "HOME belongs to user 1234" in outcome.err.decode()


# spec HM1
@pytest.mark.parametrize("is_kept", [False, True])
def test_the_operator_chooses_the_first_entries(
    tmp_path: Path, *, is_kept: bool
) -> None:
    config = tmp_path / "c.toml"
    kept = f'home = "{tmp_path}/kept"\n' if is_kept else ""
    config.write_text(
        f"[policy.run]\n{kept}"
        'home_files = { ".gitconfig" = "[user]\\nname = A\\n", "a/b" = "2" }\n'
    )
    options = ("--config", str(config))
    script = 'cat "$HOME/.gitconfig" "$HOME/a/b"; echo "$HOME"; echo 3 > "$HOME/a/b"'
    said = says(script, *options)
    assert said.startswith("[user]\nname = A\n2")
    if is_kept:
        assert says('cat "$HOME/a/b"', *options) == "3"


# spec HM1
def test_first_entries_stay_within_home(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[policy.run]\nhome_files = { "../x" = "" }\n')
    outcome = shell("true", "--config", str(config))
    assert outcome.status == 125
    assert "home_files" in outcome.err.decode()
