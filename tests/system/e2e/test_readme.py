"""The examples of README.md and docs/tutorials/files.md, run as they stand there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.llm.recipe import read_recipe
from tests.agents.table import AGENTS

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[3]
README = REPOSITORY / "README.md"
FILES = REPOSITORY / "docs" / "tutorials" / "files.md"


def blocks(language: str, page: Path) -> list[str]:
    """Return the code blocks of one language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.fixture
def newcomer(tmp_path: Path) -> Path:
    """A directory with a README.md and the Python example in it, and nothing else."""
    shutil.copy(README, tmp_path)
    (program,) = blocks("python", FILES)
    (tmp_path / "count.py").write_text(program)
    return tmp_path


def shell(
    script: str, where: Path, programs: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a block as a user's shell would, with this environment's commands."""
    places = [programs, Path(sys.executable).parent, os.environ["PATH"]]
    return subprocess.run(
        ["sh", "-ec", script],
        cwd=where,
        env={
            "PATH": ":".join(str(one) for one in places if one is not None),
            "HOME": str(where),
            "SANDHOST_STATE": str(where.with_name("state")),
            "OPENAI_API_KEY": "sk-" + "a" * 40,
            "LANG": "C.UTF-8",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_every_example_does_what_the_page_says(newcomer: Path) -> None:
    examples = [block for block in blocks("sh", FILES) if "sandhost run" in block]
    assert len(examples) == 4
    words = len(README.read_bytes().split())
    for block in examples[:3]:
        outcome = shell(block, newcomer)
        assert (outcome.returncode, outcome.stderr) == (0, b""), block
        assert (newcomer / "report" / "words.txt").read_text().split() == [str(words)]
    denied = shell(examples[3], newcomer)
    assert denied.returncode == 1
    assert b"cannot open '/etc/hostname': VFS access denied" in denied.stderr


def test_an_agent_works_is_looked_at_and_is_taken(tmp_path: Path) -> None:
    project, programs = tmp_path / "project", tmp_path / "bin"
    project.mkdir()
    programs.mkdir()
    (project / "a.txt").write_text("one\n")
    (settings,) = blocks("toml", README)
    (project / "agents.toml").write_text(settings)
    (programs / "AGENT").write_text(
        '#!/bin/sh\n[ -n "$OPENAI_BASE_URL" ] && echo two >> a.txt\n'
        'echo "$OPENAI_API_KEY"\n'
    )
    (programs / "AGENT").chmod(0o755)
    (block,) = (block for block in blocks("sh", README) if "sandhost run" in block)
    run, *others = [line for line in block.splitlines() if line]
    done = shell(run, project, programs)
    assert done.returncode == 0, done.stderr
    assert b"aaaa" not in done.stdout
    assert (project / "a.txt").read_text() == "one\n"
    diff, commit = (shell(line, project) for line in others)
    assert b"\n+two\n" in diff.stdout
    assert commit.stdout == b"committed  a.txt\n"
    assert (project / "a.txt").read_text() == "one\ntwo\n"


def test_the_page_of_agents_says_what_came_of_each() -> None:
    page = (REPOSITORY / "docs" / "reference" / "agents.md").read_text()
    for agent in AGENTS:
        version = re.escape(read_recipe(agent.name).version_tried)
        assert re.search(rf"^\| `{agent.name}` \| {version} \|", page, re.MULTILINE)
