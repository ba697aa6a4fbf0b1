"""The local backend: what a tool finds, where it runs, and as whose."""

import os
import signal
import sys
from pathlib import Path

import pytest
import trio

from protocol.toolexec.token import ALL
from supervisor.toolexec.backends.local import tightest
from supervisor.toolexec.routes import ToolRefusedError
from tests.helpers.stage import Stage, eventually, stage
from tests.helpers.toolruns import program, run_tool, sidecars_of, waiting_child

__all__ = ["stage"]

pytestmark = pytest.mark.slow


# ToolExec 4, 6: arguments are bytes; PATH is the sidecar's, then the system's.
async def test_a_tool_runs_with_its_arguments_as_they_are(stage: Stage) -> None:
    bin_dir = program(stage.where / "bin", "node", 'printf "%s|" "$#" "$@"; exit 7')
    async with sidecars_of(stage, n={"kind": "node", "path": [bin_dir]}) as sidecars:
        child = await waiting_child(stage)
        args = (b"a b", b"", "é".encode(), b"\xff", b"$(id)", b"';\"", b"x\ny")
        ran = await run_tool(stage, sidecars, child, "node", *args)
    assert ran.code == 7
    assert ran.out == b"7|" + b"|".join(args) + b"|"


async def test_the_environment_is_the_sidecars(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    monkeypatch.setenv("AIFO_TOOLEEXEC_TOKEN", "canary")
    bin_dir = program(stage.where / "bin", "cargo", "env -0; ulimit -t")
    options = {
        "kind": "rust",
        "path": [bin_dir],
        "env": {"MINE": "1", "CC": "tcc"},
        "limits": {"cpu": 5},
    }
    async with sidecars_of(stage, r=options) as sidecars:
        child = await waiting_child(stage, env={"PATH": "/child", "HIS": "2"})
        ran = await run_tool(stage, sidecars, child, "cargo")
        run_dir = child.spec.run_dir
    assert ran.out.endswith(b"\x005\n")  # the sidecar's limit of CPU seconds
    found = dict(
        pair.decode().split("=", 1) for pair in ran.out.split(b"\0") if b"=" in pair
    )
    # ToolExec 6: the rust kind; `path` before the system's PATH.
    assert found["CARGO_HOME"] == f"{run_dir}/sidecar-r/cargo"
    assert (found["CC"], found["CXX"], found["MINE"]) == ("tcc", "g++", "1")
    assert found["PATH"] == f"{bin_dir}:{os.environ['PATH']}"
    assert found["HOME"].startswith(str(run_dir))
    assert "HIS" not in found
    assert b"canary" not in ran.out  # attack 24


# ToolExec 5: without a workspace of its own /workspace is the calling child's root.
async def test_each_child_has_its_own_root_as_workspace(stage: Stage) -> None:
    bin_dir = program(stage.where / "bin", "go", "pwd; cat secret")
    async with sidecars_of(stage, g={"kind": "go", "path": [bin_dir]}) as sidecars:
        one = await waiting_child(stage, "one")
        two = await waiting_child(stage, "two")
        program(Path(one.spec.root) / "sub", "secret", "of one")
        ran = await run_tool(stage, sidecars, one, "go", cwd=b"/workspace/sub")
        assert ran.out == f"{one.spec.root}/sub\n#!/bin/sh\nof one\n".encode()
        shown = os.fsencode(one.spec.root) + b"/sub"
        assert await run_tool(stage, sidecars, one, "go", cwd=shown) == ran
        for cwd in (b"/workspace/sub", shown):
            with pytest.raises(ToolRefusedError) as refused:
                await run_tool(stage, sidecars, two, "go", cwd=cwd)
            assert refused.value.status == 400


async def test_a_root_that_was_replaced_is_no_workspace(stage: Stage) -> None:
    bin_dir = program(stage.where / "bin", "go", "pwd")
    async with sidecars_of(stage, g={"kind": "go", "path": [bin_dir]}) as sidecars:
        child = await waiting_child(stage)
        os.rename(child.spec.root, f"{child.spec.root}-elsewhere")  # attack 40
        os.mkdir(child.spec.root)
        with pytest.raises(ToolRefusedError):
            await run_tool(stage, sidecars, child, "go")


async def test_a_workspace_of_its_own_is_everybodys(stage: Stage) -> None:
    bin_dir = program(stage.where / "bin", "go", "pwd; ls")
    (stage.where / "shared" / "file").mkdir(parents=True)
    options = {
        "kind": "go",
        "path": [bin_dir],
        "workspace": str(stage.where / "shared"),
    }
    async with sidecars_of(stage, g=options) as sidecars:
        for name in ("one", "two"):
            child = await waiting_child(stage, name)
            ran = await run_tool(stage, sidecars, child, "go")
            assert ran.out == f"{stage.where}/shared\nfile\n".encode()


async def test_a_workspace_that_was_removed_is_told(stage: Stage) -> None:
    options = {"kind": "python", "workspace": str(stage.where / "shared")}
    (stage.where / "shared").mkdir()
    async with sidecars_of(stage, p=options) as sidecars:
        child = await waiting_child(stage)
        (stage.where / "shared").rmdir()
        (stage.where / "shared").mkdir()
        for cwd in (b".", b"/workspace/sub", os.fsencode(stage.where / "shared")):
            with pytest.raises(FileNotFoundError, match=r"'p', .*/shared, was removed"):
                await run_tool(stage, sidecars, child, "python3", cwd=cwd)


async def test_a_workspace_that_is_not_there_is_told(stage: Stage) -> None:
    with pytest.raises(FileNotFoundError, match="/none"):
        async with sidecars_of(stage, g={"kind": "go", "workspace": "/none"}):
            pass


# ToolExec 6: the first running sidecar that has the tool; 409 if none has.
async def test_routing_asks_who_has_the_tool(stage: Stage) -> None:
    empty = {"path": [str(stage.where)]}
    bin_dir = program(stage.where / "bin", "zz-tool", "echo $0")
    lists = {"allow": ["zz-tool"]}
    async with sidecars_of(
        stage,
        n={"kind": "node", "path": [bin_dir], **lists},
        c={"kind": "c-cpp", **empty, **lists},
        r={"kind": "rust", **empty},
    ) as sidecars:
        child = await waiting_child(stage)
        ran = await run_tool(stage, sidecars, child, "zz-tool")
        assert (ran.sidecar, ran.code) == ("n", 0)
        (stage.where / "zz-tool").write_text("#!/bin/sh\n")
        (stage.where / "zz-tool").chmod(0o755)
        # Known for this generation of c; a restart would ask again.
        assert (await run_tool(stage, sidecars, child, "zz-tool")).sidecar == "n"
        assert not sidecars.is_permitted(child, "zz-none", ALL)


async def test_a_tool_that_nobody_has_is_409(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(stage.where))
    async with sidecars_of(stage, g={"kind": "go"}, n={"kind": "node"}) as sidecars:
        child = await waiting_child(stage)
        for tool in ("go", "gcc", "tsc", "pip"):
            with pytest.raises(ToolRefusedError) as refused:
                await run_tool(stage, sidecars, child, tool)
            assert refused.value.status == 409


# ToolExec 6: tsc prefers ./node_modules/.bin/tsc.
async def test_tsc_is_the_projects_own(stage: Stage) -> None:
    bin_dir = program(stage.where / "bin", "tsc", "echo global")
    async with sidecars_of(
        stage,
        n={"kind": "node", "path": [bin_dir]},
    ) as sidecars:
        child = await waiting_child(stage)
        root = Path(child.spec.root)
        assert (await run_tool(stage, sidecars, child, "tsc")).out == b"global\n"
        program(root / "web/node_modules/.bin", "tsc", 'echo "local $0 $1"')
        assert (await run_tool(stage, sidecars, child, "tsc")).out == b"global\n"
        ran = await run_tool(stage, sidecars, child, "tsc", b"x", cwd=b"/workspace/web")
        assert ran.out == f"local {root}/web/node_modules/.bin/tsc x\n".encode()


async def test_a_project_may_be_the_only_one_with_tsc(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/bin:/usr/bin" if not _has_tsc() else "/nowhere")
    async with sidecars_of(stage, n={"kind": "node"}) as sidecars:
        child = await waiting_child(stage)
        program(Path(child.spec.root) / "node_modules/.bin", "tsc", "echo own")
        assert (await run_tool(stage, sidecars, child, "tsc")).out == b"own\n"


def _has_tsc() -> bool:
    return any(os.access(f"{where}/tsc", os.X_OK) for where in ("/bin", "/usr/bin"))


# ToolExec 6: python prefers <cwd>/.venv.
async def test_python_is_that_of_the_virtual_environment(stage: Stage) -> None:
    bin_dir = program(stage.where / "bin", "pip", 'echo "$VIRTUAL_ENV ${PATH%%:*}"')
    options = {"kind": "python", "path": [bin_dir]}
    async with sidecars_of(stage, p=options) as sidecars:
        child = await waiting_child(stage)
        venv = Path(child.spec.root) / "app" / ".venv"
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python3").symlink_to(sys.executable)
        (venv / "pyvenv.cfg").write_text(f"home = {os.path.dirname(sys.executable)}\n")
        code = b"import os, sys; print(sys.prefix, os.environ.get('VIRTUAL_ENV'))"
        inside = await run_tool(
            stage, sidecars, child, "python3", b"-c", code, cwd=b"/workspace/app"
        )
        assert inside.out == f"{venv} {venv}\n".encode()
        outside = await run_tool(stage, sidecars, child, "python3", b"-c", code)
        assert outside.out.endswith(b" None\n")
        found = await run_tool(
            stage,
            sidecars,
            child,
            "pip",
            cwd=b"/workspace/app",
        )
        # It has none, but it is active.
        assert found.out == f"{venv} {venv}/bin\n".encode()


# Face: policy.NAME.tools; spec A5, I8: and what is left of it after NARROW.
async def test_a_child_has_no_more_tools_than_its_policy(stage: Stage) -> None:
    async with sidecars_of(stage, c={"kind": "c-cpp"}) as sidecars:
        free = await waiting_child(stage, "free")
        bound = await waiting_child(stage, "bound", tools=frozenset({"make", "cc"}))
        assert sidecars.is_permitted(free, "gcc", ALL)
        assert sidecars.is_permitted(bound, "make", ALL)
        assert not sidecars.is_permitted(bound, "gcc", ALL)
        assert bound.session is not None
        bound.session.narrow(b'{"tools": ["make"]}')
        assert sidecars.is_permitted(bound, "make", ALL)
        assert not sidecars.is_permitted(bound, "cc", ALL)


def test_limits_are_the_tighter_of_both() -> None:
    assert tightest((), ((0, 5, 6),)) == ((0, 5, 6),)
    assert tightest(((0, 5, -1),), ((0, -1, 6), (1, 2, 3))) == ((0, 5, 6), (1, 2, 3))
    assert tightest(((0, 5, 6),), ((0, 4, 9),)) == ((0, 4, 6),)


# ToolExec 6: a sidecar is started, watched and started again; generations.
# Not `go`: a machine that has Go finds the system's after this one is removed.
async def test_a_started_sidecar_is_watched(stage: Stage) -> None:
    bin_dir = program(stage.where / "bin", "ts-node", "echo ran")
    fifo = stage.where / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    try:
        start = ["/bin/sh", "-c", f"echo $$ >{fifo}; exec sleep 1000"]
        options = {"kind": "node", "path": [bin_dir], "start": start, "sandbox": "none"}
        async with sidecars_of(stage, g=options) as sidecars:
            (sidecar,) = sidecars.sidecars
            child = await waiting_child(stage)
            assert (sidecar.is_running, sidecar.generation) == (True, 1)
            assert (await run_tool(stage, sidecars, child, "ts-node")).out == b"ran\n"
            (stage.where / "bin" / "ts-node").unlink()
            first = await _line(reader)
            pidfd = os.pidfd_open(first)
            signal_and_close(pidfd)
            second = await _line(reader)
            assert second != first
            await eventually(lambda: sidecar.generation == 2)
            # A new generation is asked anew.
            with pytest.raises(ToolRefusedError) as refused:
                await run_tool(stage, sidecars, child, "ts-node")
            assert refused.value.status == 409
        with pytest.raises(ProcessLookupError):
            os.pidfd_open(second)
        started = stage.events("sidecar.started")
        assert [event["pid"] for event in started] == [first, second]
        ended = [event["reason"] for event in stage.events("sidecar.ended")]
        assert ended == ["ended by signal 9", "ended by the host"]
        (restarting,) = stage.events("sidecar.restarting")
        assert (restarting["sidecar"], restarting["reason"]) == ("g", ended[0])
    finally:
        os.close(reader)


# ToolExec 6: "a supervised sandboxed process tree"; attack 24. Children write into its
# workspace, so what it finds there must not run as the host.
async def test_a_sidecars_own_process_has_walls(stage: Stage) -> None:
    if os.geteuid() != 0:
        pytest.skip("a user of its own takes root")
    shared = stage.where / "shared"
    shared.mkdir()
    (stage.where / "secret").write_text("of the host")
    (stage.where / "secret").chmod(0o644)
    script = (
        f"(id -u; cat {stage.where}/secret; echo kept >$HOME/own && cat $HOME/own;"
        " kill -0 1 && echo signalled; grep -c . /proc/net/dev;"
        " grep NoNewPrivs /proc/self/status) >said 2>/dev/null; mv said told;"
        " exec sleep 1000"
    )
    options = {
        "kind": "go",
        "workspace": str(shared),
        "start": ["/bin/sh", "-c", script],
    }
    async with sidecars_of(stage, g=options) as sidecars:
        await eventually((shared / "told").exists)
        lines = (shared / "told").read_text().splitlines()
        assert int(lines[0]) != 0
        assert "of the host" not in lines
        assert "signalled" not in lines
        assert lines[1] == "kept"
        assert int(lines[2]) == interfaces()
        assert lines[3] == "NoNewPrivs:\t1"
        assert (shared / "told").stat().st_uid == 0  # the host's, as all files there
        assert len(stage.host.machine.users) == 1
        del sidecars
    assert not stage.host.machine.users


# attack 11: what it leaves in its HOME is not gone through again, however much it is.
async def test_a_sidecar_keeps_its_user_over_restarts(stage: Stage) -> None:
    if os.geteuid() != 0:
        pytest.skip("a user of its own takes root")
    shared = stage.where / "shared"
    shared.mkdir()
    script = (
        "import os; print(os.getuid(), file=open('told', 'a'));"
        "os.chdir(os.environ['HOME'])\n"
        "for _ in range(1300): os.mkdir('a'); os.chdir('a')"
    )
    start = [sys.executable, "-I", "-S", "-c", script]
    options = {"kind": "go", "workspace": str(shared), "start": start}
    async with sidecars_of(stage, g=options) as sidecars:
        (sidecar,) = sidecars.sidecars
        await eventually(lambda: sidecar.generation == 2)
        await eventually(lambda: len(stage.events("sidecar.ended")) == 2)
    users = (shared / "told").read_text().split()
    assert len(users) == 2
    assert len({*users, "0"}) == 2
    assert not stage.host.machine.users


def interfaces() -> int:
    """Return how many lines tell of the host's network."""
    return len(Path("/proc/net/dev").read_text().splitlines())


async def test_a_sidecar_whose_walls_cannot_be_had_does_not_start(
    stage: Stage,
) -> None:
    stage.host.machine.lacking["landlock"] = "this test"
    start = {"kind": "go", "start": ["/bin/sleep", "1000"], "sandbox": "required"}
    async with sidecars_of(stage, g=start) as sidecars:
        assert not sidecars.sidecars[0].is_running
    (failed,) = stage.events("sidecar.restarting")
    assert "'landlock' is required and missing: this test" in failed["reason"]


async def test_a_sidecar_that_does_not_start_runs_nothing(stage: Stage) -> None:
    bin_dir = program(stage.where / "bin", "go", "echo ran")
    down = {"kind": "go", "path": [bin_dir], "start": ["/nowhere/server"]}
    up = {"kind": "go", "path": [bin_dir]}
    async with sidecars_of(stage, down=down) as sidecars:
        child = await waiting_child(stage, "one")
        with pytest.raises(ToolRefusedError) as refused:
            await run_tool(stage, sidecars, child, "go")
        assert refused.value.status == 409
    async with sidecars_of(stage, down=down, up=up) as sidecars:
        child = await waiting_child(stage, "two")
        assert (await run_tool(stage, sidecars, child, "go")).sidecar == "up"


async def _line(reader: int) -> int:
    await trio.lowlevel.wait_readable(reader)
    return int(os.read(reader, 100).split()[0])


def signal_and_close(pidfd: int) -> None:
    """Kill a process by its pidfd."""
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
