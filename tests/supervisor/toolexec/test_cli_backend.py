"""Containers through docker's and podman's command line, with a stand-in for both.

No engine is needed, and none was at hand when this was written: the stand-in runs here
what a container would run, so what is shown is what the commands say, not what an engine
makes of them.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hostlib.linux import processes
from hostlib.log import Log
from protocol.toolexec.token import ALL
from supervisor.fleet.fence import FleetLife
from supervisor.toolexec.backends import container
from supervisor.toolexec.backends.container import INSIDE
from supervisor.toolexec.routes import ToolRefusedError
from tests.helpers.command import ENVIRONMENT, sandhost
from tests.helpers.stage import CHILDREN, Stage, eventually, stage
from tests.helpers.stock import strangers
from tests.helpers.toolruns import program, run_tool, sidecars_of, waiting_child
from tests.supervisor.toolexec.shells import SHELLS

__all__ = ["stage"]

pytestmark = pytest.mark.slow


class Engine:
    """The stand-in, and what was asked of it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()
        script = f'exec {sys.executable} -I -S {CHILDREN}/engine.py "$@"'
        self.cli = program(home, "docker", script) + "/docker"

    def section(self, **more: Any) -> dict[str, Any]:
        """Say a sidecar in a container of it."""
        workspace = self.home / "shared"
        workspace.mkdir(exist_ok=True)
        return {
            "kind": "rust",
            "backend": "docker",
            "cli": self.cli,
            "image": "toolchain:1",
            "workspace": str(workspace),
            **more,
        }

    def calls(self, verb: str) -> list[list[str]]:
        """Return what followed a verb, for each time it was asked."""
        with suppress(FileNotFoundError):
            lines = (self.home / "calls").read_text().splitlines()
            found = [json.loads(line) for line in lines]
            return [words[1:] for words in found if words[0] == verb]
        return []

    def do(self, *words: str) -> None:
        """Have it do something."""
        subprocess.run([self.cli, *words], check=True)

    def containers(self) -> list[str]:
        """Return those that there are."""
        with suppress(FileNotFoundError):
            return sorted(os.listdir(self.home / "containers"))
        return []


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that stands for another host."""
    with subprocess.Popen(["/bin/sleep", "1000"]) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A stand-in with no containers."""
    found = Engine(tmp_path / "engine")
    monkeypatch.setenv("HOME", str(found.home))
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    return found


# ToolExec 6: backends docker and podman, through their CLI.
async def test_a_tool_runs_in_the_container(stage: Stage, engine: Engine) -> None:
    bin_dir = program(
        engine.home / "bin", "cargo", 'printf "%s|" "$@"; env; pwd; exit 3'
    )
    section = engine.section(path=[bin_dir], env={"MINE": "1"})
    (engine.home / "shared" / "sub").mkdir()
    async with sidecars_of(stage, r=section) as sidecars:
        name = f"sandhost-{os.getpid()}-r"
        assert engine.containers() == [name]
        (words,) = engine.calls("run")
        assert words[:3] == ["-d", "--name", name]
        assert words[-3:] == ["toolchain:1", "sleep", "infinity"]
        child = await waiting_child(stage)
        args = (b"a b", b"", b"$(id)", "é\n".encode())
        ran = await run_tool(
            stage, sidecars, child, "cargo", *args, cwd=b"/workspace/sub"
        )
        assert (ran.sidecar, ran.code) == ("r", 3)
        assert ran.out.startswith(b"|".join(args) + b"|")
        assert f"\nIN_CONTAINER={name}\n".encode() in ran.out
        assert b"\nCARGO_HOME=/var/tmp/sandhost/cargo\n" in ran.out
        assert b"|MINE=1\n" in ran.out
        assert ran.out.endswith(f"{engine.home}/shared/sub\n".encode())
        assert b"canary" not in ran.out
        # The engine's command has no use for a directory of the child's.
        target = await sidecars.route(child, "cargo", b".", ALL)
        cwd_fd = await target.open_cwd(b".", child)
        plan = await target.command(child, "cargo", (), cwd_fd)
        os.close(cwd_fd)
        assert (plan.is_elsewhere, plan.cwd) == (True, "/")
        (_, words) = engine.calls("exec")
        assert words[:5] == ["-i", "-w", "/workspace/sub", name, "sh"]
        with pytest.raises(ToolRefusedError) as refused:
            await run_tool(stage, sidecars, child, "rustc-none")
        assert refused.value.status == 403
    assert engine.containers() == []


# spec FL6: what runs in a container does not end with a launchpad of this host.
async def test_a_fenced_child_of_a_fleet_has_no_tools_in_a_container(
    stage: Stage, engine: Engine
) -> None:
    bin_dir = program(engine.home / "bin", "cargo", "echo here")
    local = {"kind": "rust", "path": [bin_dir]}
    where = engine.section(path=[bin_dir])
    life = FleetLife("a", "c1", 1)
    stage.host.fence.judge = lambda _: None
    async with sidecars_of(stage, r=where) as sidecars:
        child = await waiting_child(stage, fleet=life)
        with pytest.raises(ToolRefusedError, match="outlives the lease") as refused:
            await run_tool(stage, sidecars, child, "cargo")
        assert refused.value.status == 403
        free = await waiting_child(stage, "free", fleet=replace(life, is_fenced=False))
        assert (await run_tool(stage, sidecars, free, "cargo")).out == b"here\n"
    async with sidecars_of(stage, r=where, here=local) as sidecars:
        assert (await run_tool(stage, sidecars, child, "cargo")).sidecar == "here"


async def test_the_engines_command_is_told_where_its_engine_is(
    stage: Stage, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {
        "DOCKER_HOST": "tcp://engine:2376",
        "DOCKER_TLS_VERIFY": "1",
        "DOCKER_CERT_PATH": "/certificates",
    }
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    async with sidecars_of(stage, r=engine.section()) as sidecars:
        child = await waiting_child(stage)
        (target,) = sidecars.sidecars
        plan = await target.command(child, "cargo", (), target.workspace_fd)
    assert where.items() <= plan.env.items()
    assert "OPENAI_API_KEY" not in plan.env


async def test_what_the_container_lacks_is_409_and_asked_once(
    stage: Stage, engine: Engine
) -> None:
    section = engine.section(allow=["zz-tool"])
    async with sidecars_of(stage, r=section) as sidecars:
        child = await waiting_child(stage)
        for _ in range(2):
            with pytest.raises(ToolRefusedError) as refused:
                await run_tool(stage, sidecars, child, "zz-tool")
            assert refused.value.status == 409
        assert len(engine.calls("exec")) == 1


async def test_an_engine_that_fails_says_nothing_of_its_containers_tools(
    stage: Stage, engine: Engine
) -> None:
    bin_dir = program(engine.home / "bin", "cargo", "echo here")
    async with sidecars_of(stage, r=engine.section(path=[bin_dir])) as sidecars:
        child = await waiting_child(stage)
        (engine.home / "restarting").touch()
        with pytest.raises(ToolRefusedError) as refused:
            await run_tool(stage, sidecars, child, "cargo")
        assert refused.value.status == 409
        (engine.home / "restarting").unlink()
        assert (await run_tool(stage, sidecars, child, "cargo")).out == b"here\n"


async def test_the_projects_own_programs_come_first(
    stage: Stage, engine: Engine
) -> None:
    section = engine.section(kind="node", allow=["tsc", "python3"])
    shared = engine.home / "shared"
    program(shared / "node_modules/.bin", "tsc", 'echo "own $0 $1"')
    program(shared / ".venv/bin", "python3", 'echo "$VIRTUAL_ENV $1"')
    async with sidecars_of(stage, n=section) as sidecars:
        child = await waiting_child(stage)
        ran = await run_tool(stage, sidecars, child, "tsc", b"x")
        assert ran.out == b"own ./node_modules/.bin/tsc x\n"
        ran = await run_tool(stage, sidecars, child, "python3", b"x")
        assert ran.out == f"{shared}/.venv x\n".encode()


# Programs of a project are looked up on this side as elsewhere: a program, beneath
# the working directory, and nothing that is waited for.
@pytest.mark.parametrize(
    ("tool", "make", "has"),
    [
        ("tsc", "program", True),
        ("tsc", "nothing", False),
        ("tsc", "text", False),
        ("tsc", "directory", False),
        ("tsc", "fifo", False),
        ("tsc", "link out", True),  # known only inside the container
        ("zz-tool", "program", False),  # projects have none of their own
    ],
)
async def test_a_project_may_have_what_the_container_lacks(
    stage: Stage, engine: Engine, tool: str, make: str, has: bool
) -> None:
    section = engine.section(kind="node", allow=["tsc", "zz-tool"])
    project = engine.home / "shared" / "project"
    where = project / "node_modules/.bin"
    where.mkdir(parents=True)
    made = where / tool
    match make:
        case "program":
            program(where, tool, "exit 0")
        case "text":
            made.write_text("no program")
        case "directory":
            made.mkdir()
        case "fifo":
            os.mkfifo(made, 0o777)
        case "link out":
            made.symlink_to("/bin/sh")
        case _:
            assert make == "nothing"
    async with sidecars_of(stage, n=section) as sidecars:
        child = await waiting_child(stage)
        (sidecar,) = sidecars.sidecars
        assert await sidecar.has(child, tool, b"/workspace/project") == has
        assert not await sidecar.has(child, tool, b"/workspace/elsewhere")
        assert not await sidecar.has(child, tool, b"/workspace/..")


async def test_a_container_that_ends_is_started_again(
    stage: Stage, engine: Engine
) -> None:
    async with sidecars_of(stage, r=engine.section()) as sidecars:
        (sidecar,) = sidecars.sidecars
        name = f"sandhost-{os.getpid()}-r"
        fifo = engine.home / "containers" / name / "stopped"
        os.close(os.open(fifo, os.O_WRONLY))
        await eventually(lambda: sidecar.generation == 2)
        assert engine.containers() == [name]
        assert len(engine.calls("run")) == 2


async def test_one_that_cannot_start_says_why(
    stage: Stage, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine.home / "broken").touch()
    said: list[str] = []
    monkeypatch.setattr(Log, "write", lambda _log, _level, text, **_: said.append(text))
    async with sidecars_of(stage, r=engine.section()) as sidecars:
        child = await waiting_child(stage)
        with pytest.raises(ToolRefusedError) as refused:
            await run_tool(stage, sidecars, child, "cargo")
        assert refused.value.status == 409
    assert "Sidecar 'r' is down" in said[0]
    assert "cannot start a container of 'toolchain:1': Error: no such image" in said[0]


# attack 39: what a host that crashed has left is removed, what belongs to a living
# one is not.
async def test_containers_of_dead_hosts_are_removed(
    stage: Stage, engine: Engine
) -> None:
    with sleeping() as other:
        started = processes.read_parent_and_start(other.pid)
        assert started is not None
        labels = {
            "dead": "1:1",
            "reused": f"{other.pid}:{started[1] + 1}",
            "strange": "x",
            "living": f"{other.pid}:{started[1]}",
        }
        for name, label in labels.items():
            words = ["run", "--name", name, "--label", f"{container.LABEL}={label}"]
            engine.do(*words, "-v", "/:/workspace")
        async with sidecars_of(stage, r=engine.section()):
            assert "living" in engine.containers()
            assert len(engine.containers()) == 2
        assert engine.containers() == ["living"]


async def test_an_engine_that_does_not_answer_delays_nobody_for_ever(
    stage: Stage, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "ASK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(container.CliSidecar.ask, "__kwdefaults__", {"timeout_s": 0.2})
    program(engine.home, "docker", "exec sleep 1000")
    async with sidecars_of(stage, r=engine.section()) as sidecars:
        (sidecar,) = sidecars.sidecars
        assert not sidecar.is_running
    # A start that was given up while it was under way is reaped a moment later.
    await eventually(lambda: not strangers(stage.launchpad))


STUBBORN = (
    "trap 'echo int' INT; trap 'echo hup' HUP; trap 'echo usr1' USR1; trap 'exit 9' TERM;"
    " echo on; while :; do sleep 0.05; done 2>/dev/null"
)

ASK = """
from vfs.client.tools import ToolClient
tools = ToolClient()
run = tools.start("cargo", cwd="/workspace")
said, names = b"", ["USR1", "HUP", "INT", "TERM"]
for piece in run:
    said += piece
    while names and said.count(b"\\n") > 4 - len(names):
        assert run.signal(names.pop(0))
print(said.split(), run.exit_code, run.signal("INT"))
"""


def in_a_run(engine: Engine, code: str, **section: Any) -> str:
    """Have a child of `sandhost run` do something with a tool in a container."""
    bin_dir = program(engine.home / "bin", "cargo", STUBBORN)
    words = ["[toolexec]", "[sidecar.r]"]
    for key, value in engine.section(path=[bin_dir], **section).items():
        words.append(f"{key} = {json.dumps(value)}")
    (engine.home / "c.toml").write_text("\n".join(words))
    done = sandhost(
        *("run", "--config", str(engine.home / "c.toml"), "--sandbox", "none", "--"),
        *(sys.executable, "-c", code),
        env={**ENVIRONMENT, "HOME": str(engine.home)},
    )
    assert done.status == 0, done.err
    assert engine.containers() == []
    return done.out.decode()


# A signal to an engine's command does not get into the container.
# spec E36
def test_signals_reach_a_tool_in_a_container(engine: Engine) -> None:
    said = in_a_run(engine, ASK)
    assert said == "[b'on', b'usr1', b'hup', b'int'] 9 False\n"


# spec E25
def test_a_time_limit_asks_a_tool_in_a_container_first(engine: Engine) -> None:
    code = (
        "from vfs.client.tools import ToolClient; done = ToolClient().run('cargo', cwd='/workspace');"
        " print(done.output.split(), done.exit_code)"
    )
    said = in_a_run(engine, code, timeout="3s")
    note = b"aifo-coder proxy timeout".split()
    assert said == f"{[b'on', b'int', *note]} 124\n"


# Inside the container: the shell that runs a tool, and ends it when the line ends.


@pytest.fixture(params=SHELLS, ids=lambda words: words[0])
def inside(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[..., subprocess.Popen[bytes]]:
    """Start a tool as it is started inside a container."""

    def start(*command: str) -> subprocess.Popen[bytes]:
        words: tuple[str, ...] = request.param
        try:
            return subprocess.Popen(
                [*words, "-c", INSIDE, "sh", "", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                cwd=tmp_path,
            )
        except FileNotFoundError:
            pytest.skip(f"{words[0]} is not installed")

    return start


def test_the_shell_inside_is_transparent(
    inside: Callable[..., subprocess.Popen[bytes]],
) -> None:
    with inside("/bin/sh", "-c", "cat; echo $1; exit 7", "sh", "a b") as process:
        assert process.stdout is not None
        assert process.stdout.read() == b"a b\n"  # its own input is empty
        assert process.wait(timeout=60) == 7


def test_it_hands_signals_on(inside: Callable[..., subprocess.Popen[bytes]]) -> None:
    script = (
        "trap 'echo got' USR1; trap 'exit 5' INT; echo on; while :; do sleep 0.05; done"
    )
    with inside("/bin/sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"on\n"
        process.stdin.write(b"USR1\nNONE\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"got\n"
        process.stdin.write(b"INT\n")
        process.stdin.flush()
        assert process.wait(timeout=60) == 5


def test_it_ends_the_tool_when_its_input_ends(
    inside: Callable[..., subprocess.Popen[bytes]],
) -> None:
    script = "trap '' TERM; sleep 1000 & echo $!; wait; sleep 1000"
    with inside("/bin/sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        grandchild = os.pidfd_open(int(process.stdout.readline()))
        process.stdin.close()
        assert process.wait(timeout=60) == -signal.SIGKILL
        ended, _, _ = select.select([grandchild], [], [], 15.0)
        os.close(grandchild)
        assert ended
