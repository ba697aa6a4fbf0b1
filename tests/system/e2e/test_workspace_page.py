"""The examples of docs/how-to/workspaces.md.

Every command prints what stands below it.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "workspaces.md"
EXAMPLES = dict(
    re.findall(
        r"^## (.*?)\n\n```console\n(.*?)```",
        PAGE.read_text(),
        re.MULTILINE | re.DOTALL,
    )
)


def printed(commands: list[str], where: Path) -> str:
    """Run commands of an example one by one; return them with what they print."""
    base = where / "project"
    base.mkdir()
    (base / "notes.txt").write_text("one\n")
    (base / "todo.txt").write_text("nothing\n")
    own = {"SANDHOST_STATE": str(where / "state"), "HOME": str(where)}
    lines = []
    for command in commands:
        done = subprocess.run(
            ["sh", "-c", command], cwd=base, env=ENVIRONMENT | own,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=60, check=False,
        )  # fmt: skip
        lines += [f"$ {command}\n", done.stdout]
    return "".join(lines)


# spec WS5, WS6, WS8, WS10, WS11
@pytest.mark.parametrize("title", EXAMPLES)
def test_every_command_prints_what_stands_below_it(title: str, tmp_path: Path) -> None:
    example = EXAMPLES[title]
    commands = re.findall(r"^\$ (.*)$", example, re.MULTILINE)
    expected = re.escape(example).replace(r"\.\.\.", ".+")
    found = printed(commands, tmp_path)
    assert re.fullmatch(expected, found), found


def test_there_are_ten_examples() -> None:
    assert len(EXAMPLES) >= 10
