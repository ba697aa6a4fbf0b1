"""Runs real agents, as their registries have them, and says what came of each.

    python -m tests.agents [--into DIR] [AGENT...]

Each is installed beneath DIR (a temporary directory if none is named), and started once
by ``sandhost run --workspace`` in the default sandbox, unmodified. A stand-in takes the
model's place (`demo/provider`) and leads it to run a failing test, to mend a file and
to run the test again. It needs the network, to install.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from demo.provider import Provider, serving
from tests.agents.table import AGENTS, CALC, NEW, OLD, TASK, Agent

KEY = "sk-canary-of-the-agents-0123456789"
TIMEOUT_S = 180
TEST = """import unittest
from calc import add


class Add(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
"""
COLUMNS = ("starts", "asks", "edits", "tests", "commits", "keyless", "ends")
SANDHOST = str(Path(sys.executable).with_name("sandhost"))


@dataclass
class Trial:
    """What came of one agent.

    Attributes:
        agent: the agent.
        version: what was installed.
        passed: columns that it passed.
        seconds: how long the run took.
        reason: why it was left out, or the last words of one that failed.
    """

    agent: Agent
    version: str = "-"
    passed: set[str] = field(default_factory=set)
    seconds: float = 0.0
    reason: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it passed every column."""
        return self.passed == set(COLUMNS)

    def row(self) -> str:
        """Return its row of the table."""
        no = "no" if self.version != "-" else "-"
        cells = ["yes" if name in self.passed else no for name in COLUMNS]
        first = [self.agent.package, self.version]
        return " | ".join([*first, *cells, f"{self.seconds:.0f} s", self.reason])


def main() -> int:
    """Try the agents; return 1 if one that was installed did not pass."""
    parser = argparse.ArgumentParser(prog="python -m tests.agents")
    parser.add_argument("--into", type=Path, default=None)
    parser.add_argument("agents", nargs="*", metavar="AGENT")
    given = parser.parse_args()
    unknown = set(given.agents) - {agent.package for agent in AGENTS}
    if unknown:
        parser.error(f"cannot try {', '.join(sorted(unknown))}: it is not in the table")
    chosen = [one for one in AGENTS if one.package in given.agents or not given.agents]
    with tempfile.TemporaryDirectory(prefix="sandhost-agents-") as name:
        os.chmod(name, 0o755)
        into = (given.into or Path(name) / "installed").absolute()
        trials = [_try(agent, into, Path(name)) for agent in chosen]
    head = " | ".join(["agent", "version", *COLUMNS, "time", "reason"])
    sys.stdout.write("\n".join([head, *(trial.row() for trial in trials), ""]))
    return int(any(not one.is_whole and one.version != "-" for one in trials))


def _try(agent: Agent, into: Path, scratch: Path) -> Trial:
    trial = Trial(agent)
    if agent.reason:
        trial.reason = f"left out: {agent.reason}"
        return trial
    try:
        program, trial.version = _install(agent, into / agent.package.split("/")[-1])
    except (OSError, subprocess.SubprocessError) as why:
        trial.reason = f"not installed: {_last_line(str(why))}"
        return trial
    place = scratch / agent.package.split("/")[-1]
    place.mkdir()
    trio.run(_run, trial, program, place)
    sys.stderr.write(f"{trial.row()}\n")
    return trial


def _install(agent: Agent, where: Path) -> tuple[Path, str]:
    """Install an agent where it is not yet; return its program and its version."""
    if agent.registry == "pip":
        python = where / "bin" / "python"
        if not python.exists():
            _order(sys.executable, "-m", "venv", str(where))
            _order(
                str(python), "-m", "pip", "install", "-q", agent.package, *agent.more
            )
        shown = _order(str(python), "-m", "pip", "show", agent.package)
        version = re.findall(r"^Version: (.*)$", shown, re.MULTILINE)[0]
        return where / "bin" / agent.command[0], version
    if shutil.which("npm") is None:
        raise FileNotFoundError("npm is not on this machine")
    modules = where / "node_modules"
    if not modules.exists():
        where.mkdir(parents=True)
        quiet = ("--no-fund", "--no-audit", "--prefix", str(where))
        _order("npm", "install", *quiet, agent.package, *agent.more)
    package = json.loads((modules / agent.package / "package.json").read_text())
    return modules / ".bin" / agent.command[0], package["version"]


def _order(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise subprocess.SubprocessError(done.stderr.strip() or done.stdout.strip())
    return done.stdout


async def _run(trial: Trial, program: Path, place: Path) -> None:
    """Run an agent once in a workspace, and look at what came of it."""
    base = place / "repo"
    _make_repository(base)
    key_file = place / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(KEY)
    async with serving(KEY) as provider:
        provider.script = json.loads(_filled(json.dumps(trial.agent.answers), base))
        config = place / "llm.toml"
        config.write_text(
            f'[llm]\nendpoint = true\nbase_url = "{provider.url}"\n'
            f'api_key_file = "{key_file}"\n'
        )
        began = trio.current_time()
        words = _words(trial.agent, program, base, config)
        done = await _sandhost(*words, place=place)
        trial.seconds = trio.current_time() - began
        said = (done.stdout + done.stderr).decode(errors="replace")
        await _judge(trial, provider, done.returncode, said, place)
    if not trial.is_whole:
        trial.reason = f"status {done.returncode}: {_last_line(said)}"
        sys.stderr.write(f"{said}\n")


def _make_repository(base: Path) -> None:
    base.mkdir()
    (base / "calc.py").write_text(CALC)
    (base / "test_calc.py").write_text(TEST)
    git = ("git", "-C", str(base), "-c", "user.name=a", "-c", "user.email=a@b.c")
    _order("git", "init", "-q", str(base))
    _order(*git, "add", ".")
    _order(*git, "commit", "-q", "-m", "an addition that subtracts")


def _words(agent: Agent, program: Path, base: Path, config: Path) -> list[str]:
    """Return the words of `sandhost run` for an agent."""
    words = ["run", "--config", str(config), "--workspace", str(base)]
    words += ["--workspace-name", "tried", "--timeout", str(TIMEOUT_S)]
    for name, text in agent.environment.items():
        words += ["--env", f"{name}={text}"]
    command = [str(program), *(_filled(word, base) for word in agent.command[1:])]
    if not agent.setup:
        return [*words, "--", *command]
    # COMMAND is the shell then: the agent's installation has to be shown by name.
    words += ["--expose", str(program.parents[1])]
    return [*words, "--", "sh", "-ec", f'{agent.setup}\nexec "$0" "$@"', *command]


def _filled(text: str, base: Path) -> str:
    return text.replace("{base}", str(base)).replace("{task}", TASK)


async def _sandhost(*words: str, place: Path) -> subprocess.CompletedProcess[bytes]:
    env = {
        "PATH": os.pathsep.join((str(Path(SANDHOST).parent), os.environ["PATH"])),
        "HOME": str(place),
        "LANG": "C.UTF-8",
        "TMPDIR": str(place),
        "SANDHOST_STATE": str(place / "state"),
    }
    run = partial(
        trio.run_process, capture_stdout=True, capture_stderr=True, check=False
    )
    return await run([SANDHOST, *words], env=env, cwd=place)


async def _judge(
    trial: Trial, provider: Provider, status: int, said: str, place: Path
) -> None:
    """Enter what an agent passed."""
    base = place / "repo"
    bodies = "".join(json.dumps(one.body) for one in provider.served)
    looked = await _sandhost("workspace", "diff", "tried", "--json", place=place)
    changed = {
        row["path"] for row in json.loads(looked.stdout or b"[]") if "path" in row
    }
    is_untouched = _calc(base) == CALC
    taken = await _sandhost("workspace", "commit", "tried", "calc.py", place=place)
    found = {
        "starts": status not in {125, 126, 127},
        "asks": bool(provider.served),
        "edits": is_untouched and "calc.py" in changed,
        # aider does not tell the model of a test that passes
        "tests": "... ok" in bodies or "... ok" in said,
        "commits": taken.returncode == 0 and _calc(base) == CALC.replace(OLD, NEW),
        "keyless": not any(_holds_key(path) for path in (place / "state").rglob("*"))
        and KEY not in said + bodies,
        "ends": status == 0,
    }
    trial.passed = {name for name, is_so in found.items() if is_so}


def _calc(base: Path) -> str:
    return (base / "calc.py").read_text()


def _holds_key(path: Path) -> bool:
    return path.is_file() and KEY.encode() in path.read_bytes()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:100] if lines else "it said nothing"


if __name__ == "__main__":
    sys.exit(main())
