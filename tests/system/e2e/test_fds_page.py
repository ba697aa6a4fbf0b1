"""The transcript of docs/llm-fds.md, run as it stands there."""

import re
from pathlib import Path

import pytest

from supervisor.llmfd import TOOLS
from supervisor.llmfd.prompt import INSTRUCTIONS
from tests.helpers.command import SANDHOST, sandhost

PAGE = Path(__file__).parents[3] / "docs" / "llm-fds.md"


def block(language: str, number: int = 0) -> str:
    """Return a code block of the page."""
    found: list[str] = re.findall(
        rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    return found[number]


@pytest.mark.slow
def test_every_line_prints_what_stands_below_it(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(block("toml"))
    transcript = block("console")
    commands = re.findall(r"^\$ (.*)$", transcript, re.MULTILINE)
    script = "".join(
        f"echo {_quoted('$ ' + line)}\n{line}\n" for line in commands
    ).replace("sandhost fd", "$0 fd")
    words = ("run", "--config", "config.toml", "--", "sh", "-c", script, SANDHOST)
    outcome = sandhost(*words, cwd=tmp_path)
    assert outcome.err == b""
    assert outcome.out.decode().replace("$0 fd", "sandhost fd") == transcript


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


@pytest.mark.slow
def test_the_whole_configuration_is_one(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(block("toml", 1))
    outcome = sandhost("run", "--config", "config.toml", "--", "true", cwd=tmp_path)
    assert (outcome.status, outcome.err) == (0, b"")


def test_the_page_names_every_call() -> None:
    text = PAGE.read_text()
    missing = [name for name in TOOLS if f"`{name}(" not in text and name not in text]
    assert not missing
    assert "fd_to_file" in INSTRUCTIONS
