"""Installs agents from their registries, each beneath a directory of its own."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from supervisor.llm.recipe import Recipe
from tests.agents.table import Agent

PROGRAMS = Path(__file__).with_name("programs")
PROGRAM = "program.py"


def install(
    agent: Agent, recipe: Recipe, into: Path, python: str = sys.executable
) -> tuple[Path, str]:
    """Install an agent where it is not yet; return its program and its version.

    Args:
        agent: the agent.
        recipe: names its packages.
        into: where those of all agents are.
        python: an interpreter that its user may start; one of another has its own place.

    Raises:
        OSError: there is no program to install it by.
        SubprocessError: it cannot be installed; the text is the installer's.
    """
    program = program_of(agent, recipe)
    if "pip" not in recipe.packages:
        return _install_by_npm(
            agent, recipe.packages["npm"], into / agent.name, program
        )
    is_own = python == sys.executable
    where = into / (agent.name if is_own else f"{agent.name}-as-nobody")
    return _install_by_pip(agent, recipe.packages["pip"], where, program, python)


def program_of(agent: Agent, recipe: Recipe) -> str:
    """Return the name of an agent's own program in its recipe's command."""
    return agent.program or recipe.command[0]


def order(*words: str, cwd: Path | None = None) -> str:
    """Run a command; return its output.

    Raises:
        SubprocessError: it failed.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode != 0:
        raise subprocess.SubprocessError(done.stderr.strip() or done.stdout.strip())
    return done.stdout


def _install_by_pip(
    agent: Agent, packages: list[str], where: Path, program: str, base: str
) -> tuple[Path, str]:
    python = where / "bin" / "python"
    if not _is_whole(where):
        shutil.rmtree(where, ignore_errors=True)
        order(base, "-m", "venv", str(where))
        order(str(python), "-m", "pip", "install", "-q", *packages)
        _mark(where)
    text = PROGRAMS / f"{agent.name}.txt"
    if text.exists():
        shutil.copy(text, where / PROGRAM)
    name = packages[0].partition("[")[0]
    shown = order(str(python), "-m", "pip", "show", name)
    version = re.findall(r"^Version: (.*)$", shown, re.MULTILINE)[0]
    return where / "bin" / program, version


def _install_by_npm(
    agent: Agent, packages: list[str], where: Path, program: str
) -> tuple[Path, str]:
    if shutil.which("npm") is None:
        raise FileNotFoundError("npm is not on this machine")
    package = where / "node_modules" / packages[0]
    if not _is_whole(where):
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir(parents=True)
        quiet = ("--no-fund", "--no-audit", "--prefix", str(where))
        order("npm", "install", *quiet, *packages)
        if agent.after:
            order(*agent.after, cwd=package)
        _mark(where)
    version = json.loads((package / "package.json").read_text())["version"]
    return where / "node_modules" / ".bin" / program, version


def _is_whole(where: Path) -> bool:
    return (where / ".installed").exists()


def _mark(where: Path) -> None:
    """Mark an installation as whole: one that was cut off is begun anew."""
    (where / ".installed").touch()
