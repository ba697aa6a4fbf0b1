"""The transcript of docs/how-to/large-content.md, run as it stands there."""

import re
from pathlib import Path

import pytest

from supervisor.llmfd import TOOLS
from supervisor.llmfd.toolloop import INSTRUCTIONS
from tests.helpers.command import SANDHOST, sandhost

DOCS = Path(__file__).parents[3] / "docs"
HOW_TO = DOCS / "how-to" / "large-content.md"
PAGE = DOCS / "reference" / "llm-fds.md"


def block(language: str, page: Path = HOW_TO) -> str:
    """Return the first code block of a language in a page."""
    found: list[str] = re.findall(
        rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL
    )
    return found[0]


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
    (tmp_path / "config.toml").write_text(block("toml", PAGE))
    outcome = sandhost("run", "--config", "config.toml", "--", "true", cwd=tmp_path)
    assert (outcome.status, outcome.err) == (0, b"")


def test_the_page_names_every_call() -> None:
    text = PAGE.read_text()
    missing = [name for name in TOOLS if f"`{name}(" not in text and name not in text]
    assert not missing
    assert "fd_to_file" in INSTRUCTIONS
