"""The commands of docs/tutorials/first-run.md: each prints what stands below it."""

import re
import socket
import subprocess
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "tutorials" / "first-run.md").read_text(encoding="utf-8")
INSTALL, _, STEPS = PAGE.partition("\n## 2. ")
BLOCKS: list[tuple[str, str]] = re.findall(
    r"```(sh|console)\n(.*?)```", STEPS, re.DOTALL
)
READY = "until [ -s ~/stand-in.log ]; do sleep 0.05; done\n"


def script(port: int) -> str:
    """Return the page as a script.

    Commands of a transcript are printed before they run.
    """
    lines = [f"export AGENT={ROOT / 'demo' / 'agent.py'}\n"]
    for language, text in BLOCKS:
        if language == "sh":
            lines += [text, READY * ("stand-in.log" in text)]
        for command in re.findall(r"^\$ (.*)$", text, re.MULTILINE) * (
            language == "console"
        ):
            quoted = command.replace("'", "'\\''")
            lines.append(f"echo '$ {quoted}'\n{command}\n")
    return "".join(lines).replace("8765", str(port))


# A new user gets from a clone to a committed workspace by this page alone.
def test_every_command_prints_what_stands_below_it(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = {"HOME": str(tmp_path), "SANDHOST_STATE": str(tmp_path / "state")}
    done = subprocess.run(
        ["sh", "-c", script(port)], cwd=ROOT, env=ENVIRONMENT | own,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    expected = "".join(text for language, text in BLOCKS if language == "console")
    pattern = re.escape(expected).replace(r"\.\.\.", ".+")
    assert re.fullmatch(pattern, done.stdout), done.stdout


def test_the_page_installs_as_the_project_does() -> None:
    assert "make install\n. .venv/bin/activate\n" in INSTALL
    assert re.search(r"^install:", (ROOT / "Makefile").read_text(), re.MULTILINE)
