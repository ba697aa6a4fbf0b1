"""One agent in the default sandbox, led by a stand-in, and what came of it.

The agent is started once by ``sandhost run --recipe AGENT --workspace``, unmodified. The
stand-in (`demo/provider`) takes the model's place and leads it through the steps of
`table.py`. `__main__.py` tries all agents, `test_smallest_agents.py` the smallest ones.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import trio

from demo.provider import Provider, serving
from demo.provider.question import APIS
from supervisor.children.environment import fill
from supervisor.llm.recipe import Recipe
from tests.agents.installing import PROGRAM, order, program_of
from tests.agents.table import ALL, CALC, NEW, OLD, TASK, Agent
from tests.architecture.tree import ROOT

KEY = "sk-canary-of-the-agents-0123456789"
TIMEOUT_S = 180
REFUSED = ("starts", "refused", "gives up")
"""The steps of a trial in which all calls but the first are refused."""

GIVEN_UP_S = 60.0
"""How long an agent may go on then."""

DIRECT = ("starts", "asks", "edits", "tests", "ends")
"""The steps of a trial without a host."""

TEST = """import unittest
from calc import add


class Add(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
"""
SANDHOST = str(Path(sys.executable).with_name("sandhost"))
INSTALLATION = (Path(SANDHOST).parents[1], ROOT)
"""The packages of `sandhost` within a child; it is installed as a link to its sources."""


@dataclass(frozen=True)
class Host:
    """How a host is started.

    Attributes:
        words: a command that runs `sandhost`.
        path: directories with the programs of a trial.
        python: an interpreter that its user may start.
        user: the number of its user; None for the user of this process.
    """

    words: tuple[str, ...] = (SANDHOST,)
    path: str = os.pathsep.join((str(Path(SANDHOST).parent), os.environ["PATH"]))
    python: str = sys.executable
    user: int | None = None


@dataclass
class Trial:
    """The result of one agent.

    Attributes:
        agent: the agent.
        columns: those that it can pass.
        host: behind which it runs.
        version: the one that was installed.
        passed: columns that it passed.
        seconds: how long the run took.
        apis: of the provider; the host translates to Chat what is not among them.
        reason: why it was left out, or the last words of one that failed.
    """

    agent: Agent
    columns: tuple[str, ...]
    host: Host = Host()
    version: str = "-"
    passed: set[str] = field(default_factory=set)
    seconds: float = 0.0
    apis: list[str] = field(default_factory=lambda: ["chat"])
    reason: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it passed every column."""
        return self.passed == set(self.columns)

    def row(self) -> str:
        """Return its row of the table."""
        cells = [self._cell(name) for name in shown(self.columns)]
        first = [self.agent.name, self.version]
        return " | ".join([*first, *cells, f"{self.seconds:.0f} s", self.reason])

    def _cell(self, column: str) -> str:
        if self.version == "-" or column not in self.columns:
            return "-"
        return "yes" if column in self.passed else "no"


def shown(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns of the table for what trials can pass."""
    return REFUSED if "gives up" in columns else ALL


@dataclass
class Place:
    """Where one agent runs.

    Attributes:
        top: the directory of the trial.
        host: works there.
    """

    top: Path
    host: Host

    @property
    def base(self) -> Path:
        """The repository that it works in."""
        return self.top / "repo"

    @property
    def home(self) -> Path:
        """The HOME that it has."""
        return self.top / "home"

    @property
    def tmp(self) -> Path:
        """The host's temporary directories."""
        return self.top / "tmp"

    @property
    def journal(self) -> Path:
        """The host's journal."""
        return self.top / "journal"

    @property
    def calc(self) -> str:
        """The file that is to be mended, as it is in the repository."""
        return (self.base / "calc.py").read_text()

    def make(self) -> None:
        """Make it, with a repository that has a failing test."""
        for directory in (self.base, self.tmp, self.home):
            directory.mkdir(parents=True)
        (self.base / "calc.py").write_text(CALC)
        (self.base / "test_calc.py").write_text(TEST)
        git = (
            "git",
            "-C",
            str(self.base),
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b.c",
        )
        order("git", "init", "-q", str(self.base))
        order(*git, "add", ".")
        order(*git, "commit", "-q", "-m", "an addition that subtracts")

    def give(self) -> None:
        """Make all of it the host's user's."""
        if self.host.user is not None:
            for path in (self.top, *self.top.rglob("*")):
                os.chown(path, self.host.user, self.host.user, follow_symlinks=False)


@dataclass(frozen=True)
class Form:
    """How agents are tried.

    Attributes:
        is_direct: without a host; the agent asks the stand-in itself.
        is_native: the stand-in is a provider of all three APIs.
        is_refused: all calls but the first are refused, as beyond a quota.
    """

    is_direct: bool = False
    is_native: bool = False
    is_refused: bool = False


def run_trial(
    trial: Trial, recipe: Recipe, program: Path, scratch: Path, form: Form
) -> None:
    """Run an agent once, and enter what it passed.

    Args:
        trial: of the agent.
        recipe: the agent's.
        program: as it was installed.
        scratch: where the trial has its directory.
        form: how it is tried.
    """
    if form.is_direct:
        trial.columns = tuple(name for name in trial.columns if name in DIRECT)
    if form.is_native:
        trial.apis = [*APIS]
    if form.is_refused:
        # One that only asks and answers asks once, and is never refused.
        asks_once = "edits" not in trial.columns
        trial.columns = tuple(n for n in REFUSED if n != "refused" or not asks_once)
    place = Place(scratch / trial.agent.name, trial.host)
    place.make()
    run = _run_direct if form.is_direct else _run
    trio.run(run, trial, recipe, program, place)


def agent_command(agent: Agent, recipe: Recipe, program: Path) -> list[str]:
    """Return an agent's command, with its program by path."""
    changed = {
        "TASK": TASK,
        "PROGRAM": str(program.parents[1] / PROGRAM),
        program_of(agent, recipe): str(program),
    }
    return [*(changed.get(word, word) for word in recipe.command), *agent.more]


def _filled(value: Any, base: Path) -> Any:
    """Return answers with the workspace put in."""
    return json.loads(json.dumps(value).replace("{base}", str(base)))


# Behind a host


async def _run(trial: Trial, recipe: Recipe, program: Path, place: Place) -> None:
    """Run an agent once in a workspace, and look at what came of it."""
    key_file = place.top / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(KEY)
    async with serving(KEY) as provider:
        provider.script = _filled(trial.agent.answers, place.base)
        is_refused = "gives up" in trial.columns
        config = place.top / "llm.toml"
        config.write_text(
            f'[llm]\nendpoint = true\nbase_url = "{provider.url}"\n'
            f'api = {json.dumps(trial.apis)}\napi_key_file = "{key_file}"\n'
            f"{'max_calls = 1' if is_refused else ''}\n"
            "[llm.quota]\nmax_tokens = 20_000_000\n"
        )
        words = ["run", "--recipe", recipe.agent, "--config", str(config)]
        words += ["--workspace", str(place.base), "--workspace-name", "tried"]
        words += ["--home", str(place.home), "--journal", str(place.journal)]
        words += ["--timeout", str(TIMEOUT_S), "--log-level", "info"]
        command = agent_command(trial.agent, recipe, program)
        if command[0] != str(program) or "PROGRAM" in recipe.command:
            # COMMAND is a shell, or takes a program from there: it is shown by name.
            words += ["--expose", str(program.parents[1])]
        if trial.agent.has_files:
            for place_shown in INSTALLATION:
                words += ["--expose", str(place_shown)]
        place.give()
        began = trio.current_time()
        done = await _sandhost(*words, "--", *command, place=place)
        trial.seconds = trio.current_time() - began
        said = (done.stdout + done.stderr).decode(errors="replace")
        if is_refused:
            _judge_refused(trial, done.returncode, place)
        else:
            await _judge(trial, provider, done.returncode, said, place)
        trial.passed = {*trial.passed} & {*trial.columns}
        if not trial.is_whole:
            _tell(trial, provider, done.returncode, said)


async def _sandhost(*words: str, place: Place) -> subprocess.CompletedProcess[bytes]:
    env = {
        "PATH": place.host.path,
        "HOME": str(place.top),
        "LANG": "C.UTF-8",
        "TMPDIR": str(place.tmp),
        "SANDHOST_STATE": str(place.top / "state"),
    }
    run = partial(
        trio.run_process, capture_stdout=True, capture_stderr=True, check=False
    )
    return await run([*place.host.words, *words], env=env, cwd=place.top)


async def _judge(
    trial: Trial, provider: Provider, status: int, said: str, place: Place
) -> None:
    """Enter what an agent passed."""
    bodies = "".join(json.dumps(one.body) for one in provider.served)
    looked = await _sandhost("workspace", "diff", "tried", "--json", place=place)
    changed = {
        row["path"] for row in json.loads(looked.stdout or b"[]") if "path" in row
    }
    is_untouched = place.calc == CALC
    taken = await _sandhost("workspace", "commit", "tried", "calc.py", place=place)
    written = [*place.home.rglob("*"), *(place.top / "state").rglob("*"), place.journal]
    found = {
        "starts": status not in {125, 126, 127},
        "asks": provider.tokens().calls > 0,
        "edits": is_untouched and "calc.py" in changed,
        "tests": _saw_tests(said + bodies),
        "commits": taken.returncode == 0 and place.calc == CALC.replace(OLD, NEW),
        "keyless": not any(map(_holds_key, written)) and KEY not in said + bodies,
        "charged": abs(_charged(place.journal) - provider.tokens().cost()) < 1,
        "ends": status == 0,
        "clean": not any(place.tmp.iterdir()) and not _left_behind(place),
    }
    trial.passed = {name for name, is_so in found.items() if is_so}


def _judge_refused(trial: Trial, status: int, place: Place) -> None:
    """Enter how an agent took it that all calls but the first were refused."""
    events = [json.loads(line) for line in place.journal.read_text().splitlines()]
    denials = sum(one.get("event") == "quota.denied" for one in events)
    found = {
        "starts": status not in {125, 126, 127},
        "refused": denials > 0,
        "gives up": trial.seconds <= GIVEN_UP_S,
    }
    trial.passed = {name for name, is_so in found.items() if is_so}
    trial.passed &= {*trial.columns}
    trial.reason = f"{denials} refusals, status {status}"


def _saw_tests(said: str) -> bool:
    # aider does not tell the model of a test that passes.
    return "... FAIL" in said and "... ok" in said


def _charged(journal: Path) -> float:
    """Return what the host charged for all calls."""
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    costs = (one["cost"] for one in events if one.get("event") == "llm.called")
    return float(sum(costs))


def _holds_key(path: Path) -> bool:
    is_file = path.is_file() and not path.is_symlink()
    return is_file and KEY.encode() in path.read_bytes()


def _left_behind(place: Place) -> list[int]:
    """Return the processes that still have something of the trial in their words."""
    running = psutil.process_iter(["cmdline"])
    top = str(place.top)
    return [one.pid for one in running if top in " ".join(one.info["cmdline"] or ())]


# Without a host


async def _run_direct(
    trial: Trial, recipe: Recipe, program: Path, place: Place
) -> None:
    """Run an agent once on this machine, and look at what came of it."""
    async with serving(KEY) as provider:
        provider.script = _filled(trial.agent.answers, place.base)
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(place.home),
            "LANG": "C.UTF-8",
            "TMPDIR": str(place.tmp),
            "OPENAI_BASE_URL": provider.url,
            "OPENAI_API_KEY": KEY,
            "ANTHROPIC_BASE_URL": provider.root,
            "ANTHROPIC_AUTH_TOKEN": KEY,
        }
        env |= {name: fill(text, env) for name, text in recipe.env.items()}
        for name, text in recipe.home_files.items():
            path = place.home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(fill(text, env))
        command = agent_command(trial.agent, recipe, program)
        said, status = b"", 124
        began = trio.current_time()
        with trio.move_on_after(TIMEOUT_S):
            done = await trio.run_process(
                command, env=env, cwd=place.base, check=False,
                capture_stdout=True, capture_stderr=True,
            )  # fmt: skip
            said, status = done.stdout + done.stderr, done.returncode
        trial.seconds = trio.current_time() - began
        text = said.decode(errors="replace")
        bodies = "".join(json.dumps(one.body) for one in provider.served)
        found = {
            "starts": status not in {126, 127},
            "asks": provider.tokens().calls > 0,
            "edits": place.calc == CALC.replace(OLD, NEW),
            "tests": _saw_tests(text + bodies),
            "ends": status == 0,
        }
        trial.passed = {name for name, is_so in found.items() if is_so}
        trial.passed &= {*trial.columns}
        if not trial.is_whole:
            _tell(trial, provider, status, text)


def _tell(trial: Trial, provider: Provider, status: int, said: str) -> None:
    """Say what an agent asked and said that did not pass."""
    trial.reason = f"status {status}: {last_line(said)}"
    asked = "".join(f"{o.method} {o.path} {o.status}\n" for o in provider.served)
    left = len(provider.script or ())
    sys.stderr.write(f"{said}\n{asked}{left} answers were not asked for\n")


def last_line(text: str) -> str:
    """Return the last line that an agent or an installer said, cut short."""
    stripped = (line.strip() for line in text.splitlines())
    # Those that begin with a brace are the host's own.
    lines = [line for line in stripped if line and not line.startswith("{")]
    return lines[-1][:100] if lines else "it said nothing"
