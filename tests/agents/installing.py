"""Installs agents from their registries, each beneath a directory of its own."""

import fcntl
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from supervisor.llm.recipe import Recipe
from tests.agents.table import Agent

PROGRAMS = Path(__file__).with_name("programs")
PROGRAM = "program.py"
Order = Callable[..., str]

NO_CONNECTION = re.compile(
    r"from versions: none|Connection(Error)?\b|timed out|"
    r"\b(ECONNREFUSED|ECONNRESET|ENETUNREACH|EHOSTUNREACH|ENOTFOUND|EAI_AGAIN|ETIMEDOUT"
    r"|ERR_SOCKET_TIMEOUT|E404)\b"
)
"""How pip and npm say that a registry is not reached, or has no such package."""


def install(
    agent: Agent,
    recipe: Recipe,
    into: Path,
    *,
    version: str,
    python: str = sys.executable,
    timeout_s: float | None = None,
) -> tuple[Path, str]:
    """Install an agent where it is not yet; return its program and its version.

    Args:
        agent: the agent.
        recipe: names its packages.
        into: where those of all agents are.
        version: of its first package; empty for the newest.
        python: an interpreter that its user may start; one of another has its own place.
        timeout_s: how long an installer may take; None for any time.

    Raises:
        OSError: there is no program to install it by.
        SubprocessError: it cannot be installed; the text is the installer's.
    """
    program = program_of(agent, recipe)
    name = "-".join(filter(None, (agent.name, version)))
    run = partial(order, timeout_s=timeout_s)
    into.mkdir(parents=True, exist_ok=True)
    if "pip" not in recipe.packages:
        first, *others = recipe.packages["npm"]
        packages = [f"{first}@{version or 'latest'}", *others]
        with _locked(into / name) as where:
            return _install_by_npm(agent, first, packages, where, program, run)
    first, *others = recipe.packages["pip"]
    packages = [f"{first}=={version}" if version else first, *others]
    # An environment belongs to the interpreter that made it.
    name += f"-python{sys.version_info.major}.{sys.version_info.minor}"
    name += "" if python == sys.executable else "-as-nobody"
    with _locked(into / name) as where:
        return _install_by_pip(agent, packages, where, program, python, run)


def connection_failure(said: str) -> str:
    """Return the line in which an installer says that it reached no registry, or ""."""
    lines = (line.strip() for line in said.splitlines())
    return next((line for line in lines if NO_CONNECTION.search(line)), "")


def program_of(agent: Agent, recipe: Recipe) -> str:
    """Return the name of an agent's own program in its recipe's command."""
    return agent.program or recipe.command[0]


def order(*words: str, cwd: Path | None = None, timeout_s: float | None = None) -> str:
    """Run a command; return its output.

    Raises:
        SubprocessError: it failed, or took longer than it may.
    """
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=cwd, timeout=timeout_s
    )
    if done.returncode != 0:
        raise subprocess.SubprocessError(done.stderr.strip() or done.stdout.strip())
    return done.stdout


@contextmanager
def _locked(where: Path) -> Iterator[Path]:
    """Keep other runs from a place while an agent is installed there."""
    with open(f"{where}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield where


def _install_by_pip(
    agent: Agent, packages: list[str], where: Path, program: str, base: str, run: Order
) -> tuple[Path, str]:
    python = where / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    if not _is_whole(where) or not python.exists():
        shutil.rmtree(where, ignore_errors=True)
        run(base, "-m", "venv", "--without-pip", str(where))
        run(*pip, "install", "-q", "--retries", "1", *packages)
        _mark(where)
    text = PROGRAMS / f"{agent.name}.txt"
    if text.exists():
        shutil.copy(text, where / PROGRAM)
    name = re.split(r"\[|==", packages[0])[0]
    shown = run(*pip, "show", name)
    version = re.findall(r"^Version: (.*)$", shown, re.MULTILINE)[0]
    return where / "bin" / program, version


def _install_by_npm(
    agent: Agent, name: str, packages: list[str], where: Path, program: str, run: Order
) -> tuple[Path, str]:
    if shutil.which("npm") is None:
        raise FileNotFoundError("npm is not on this machine")
    package = where / "node_modules" / name
    if not _is_whole(where):
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir(parents=True)
        quiet = ("--no-fund", "--no-audit", "--fetch-retries", "1")
        run("npm", "install", *quiet, "--prefix", str(where), *packages)
        if agent.after:
            run(*agent.after, cwd=package)
        _mark(where)
    version = json.loads((package / "package.json").read_text())["version"]
    return where / "node_modules" / ".bin" / program, version


def _is_whole(where: Path) -> bool:
    return (where / ".installed").exists()


def _mark(where: Path) -> None:
    """Mark an installation as whole: one that was cut off is begun anew."""
    (where / ".installed").touch()
