"""The examples of README.md, run as they stand there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"


def blocks(language: str) -> list[str]:
    """Return the code blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.fixture
def newcomer(tmp_path: Path) -> Path:
    """A directory with a README.md and the Python example in it, and nothing else."""
    shutil.copy(README, tmp_path)
    (program,) = blocks("python")
    (tmp_path / "count.py").write_text(program)
    return tmp_path


def shell(script: str, where: Path) -> subprocess.CompletedProcess[bytes]:
    """Run a block as a user's shell would, with this environment's commands."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-ec", script],
        cwd=where,
        env={"PATH": path, "HOME": str(where), "LANG": "C.UTF-8"},
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_every_example_does_what_the_page_says(newcomer: Path) -> None:
    examples = [block for block in blocks("sh") if "sandhost run" in block]
    assert len(examples) == 4
    words = len(README.read_bytes().split())
    for block in examples[:3]:
        outcome = shell(block, newcomer)
        assert (outcome.returncode, outcome.stderr) == (0, b""), block
        assert (newcomer / "report" / "words.txt").read_text().split() == [str(words)]
    denied = shell(examples[3], newcomer)
    assert denied.returncode == 1
    assert b"cannot open '/etc/hostname': VFS access denied" in denied.stderr


def test_commands_of_the_plan_are_refused_and_not_unknown() -> None:
    outcome = shell("sandhost trace", REPOSITORY)
    assert (outcome.returncode, outcome.stdout) == (2, b"")
    assert outcome.stderr == b"sandhost trace: not available yet\n"
