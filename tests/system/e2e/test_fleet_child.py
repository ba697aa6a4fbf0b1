"""A child of the fleet in the hand of a Python program: `sandhost.fleet`."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio

from hostlib.threads import in_thread
from sandhost import fleet
from supervisor.cluster import commands, door, fleet_child, ray_processes
from supervisor.cluster.client import FleetClient
from supervisor.fleet.messages import VERSION
from tests.helpers.command import ENVIRONMENT, sandhost
from tests.helpers.fleetdoors import RUN, Doors, fleet_of, node_at, run_in
from tests.helpers.stage import eventually

pytestmark = pytest.mark.slow


# spec FL3
async def test_a_program_runs_commands_in_a_child_of_its_own(tmp_path: Path) -> None:
    before = own_threads()
    with node_at(tmp_path / "a") as one:
        async with fleet_of(tmp_path, a=one) as scene:
            child = await scene.call(
                fleet.create,
                "repo",
                name="box",
                env={"COLOUR": "red"},
                limits={"open_files": "200"},
                control=scene.control("a"),
            )
            await scene.call(check_commands, child)
            await scene.call(check_files, child)
            base = one.where / "repo"
            assert (base / "a.txt").read_text() == "hello\n"
            assert not (base / "sub").exists()
            done = await scene.call(child.commit, ["a.txt"])
            assert (done.applied, done.left) == (["a.txt"], ["big", "sub", "sub/b.txt"])
            assert (base / "a.txt").read_text() == "hello\nmore\n"
            await scene.call(child.stop)
            await scene.call(child.stop)
            assert await scene.call(child.state) == "ended"
            await eventually(lambda: own_threads() <= before)  # nothing is held
            with pytest.raises(fleet.FleetChildError, match="box on node a is ended"):
                await scene.call(child.exec, ["true"])
            (row,) = await scene.call(one.client.workspaces)
            assert (row.name, row.changed) == ("box", 3)
            await scene.call(child.discard)
            assert await scene.call(one.client.workspaces) == []


def own_threads() -> set[threading.Thread]:
    """Return the threads of this program that Trio has not made."""
    return {one for one in threading.enumerate() if "(in_worker)" in one.name}


COUNTING = (
    'trap "" TERM; trap "echo got" USR1; echo ready; while :; do sleep 0.05; done'
)


# spec FL3, FL4
async def test_a_signal_that_ends_nothing_is_sent_once(tmp_path: Path) -> None:
    with node_at(tmp_path / "a") as one:
        async with fleet_of(tmp_path, a=one) as scene:
            client = scene.client("a")
            control = ("--control", scene.control("a"))
            program = {"command": ["sh", "-c", COUNTING]}
            await scene.call(client.ask, "spawn", {"name": "w", "program": program})
            words = ("fleet", "kill", *control, "-s")
            done = await scene.call(sandhost, *words, "NOSUCH", "w")
            assert (done.status, done.out) == (2, b"")
            assert b"--signal: not a signal: 'NOSUCH'" in done.err
            args = {"name": "w", "signal": "NOSUCH"}
            with pytest.raises(
                fleet.ControlError, match="cannot signal 'w': not a sig"
            ):
                await scene.call(client.ask, "kill", args)
            await scene.call(wait_for_line, client, b"ready")
            done = await scene.call(sandhost, *words, "USR1", "w")
            assert (done.status, done.err) == (0, b"")
            await scene.call(wait_for_line, client, b"got")
            # Only what ends a child is repeated: the directory takes nothing else.
            data = json.dumps({**args, "signal": "USR1"}).encode()
            is_done, _ = await scene.directory.answer(VERSION, "kill", data)
            assert not is_done
            assert (await scene.call(client.ask, "find", {"name": "w"}))["state"] == (
                "running"
            )
            done = await scene.call(sandhost, *words, "9", "w")
            assert (done.status, done.err) == (0, b"")
            over = await scene.call(client.ask, "wait", {"name": "w"})
            assert over["state"] == "ended"
            with pytest.raises(
                fleet.ControlError, match="cannot signal 'w': it is ended"
            ):
                await scene.call(client.ask, "kill", {"name": "w", "signal": "USR1"})


# spec FL3: the node's own child of that name is another one.
async def test_a_child_without_a_node_has_no_trace(tmp_path: Path) -> None:
    with node_at(tmp_path / "a") as one:
        async with fleet_of(tmp_path, a=one) as scene:
            client, control = scene.client("a"), scene.control("a")
            needs = {"labels": ["tpu"]}
            request = {"name": "w", "program": {"command": ["true"]}, "needs": needs}
            await scene.call(client.ask, "spawn", {**request, "wait": True})
            words = ("--", "sh", "-c", "exit 0")
            await scene.call(
                sandhost, "spawn", "--control", control, "--name", "w", *words
            )
            done = await scene.call(
                sandhost, "fleet", "trace", "--control", control, "w"
            )
            assert (done.status, done.out) == (1, b"")
            assert done.said("cannot trace 'w': it is waiting on no node")


# spec FL3, FL11
async def test_a_child_that_was_never_started_has_no_log_and_no_trace(
    tmp_path: Path,
) -> None:
    with node_at(tmp_path / "a") as one:
        async with fleet_of(tmp_path, a=one) as scene:
            client, control = scene.client("a"), scene.control("a")
            request = {"name": "w", "program": {"command": ["/no/such"]}}
            with pytest.raises(fleet.ControlError, match="cannot spawn 'w'"):
                await scene.call(client.ask, "spawn", request)
            for do, verb in (("logs", "ask for"), ("trace", "trace")):
                words = ("fleet", do, "--control", control, "w")
                done = await scene.call(sandhost, *words)
                assert (done.status, done.out) == (1, b"")
                assert done.said(f"cannot {verb} 'w': it was never started: ")


# spec FL4, FL6
async def test_a_signal_is_for_one_life_of_a_child(tmp_path: Path) -> None:
    with node_at(tmp_path / "a") as one:
        async with fleet_of(tmp_path, a=one) as scene:
            client = scene.client("a")

            async def start(script: str) -> None:
                program = {"command": ["sh", "-c", script]}
                await scene.call(client.ask, "spawn", {"name": "w", "program": program})

            async def replace() -> None:
                await scene.call(client.ask, "kill", {"name": "w", "signal": "KILL"})
                await scene.call(client.ask, "wait", {"name": "w"})
                await start(COUNTING.replace("ready", "again"))
                await scene.call(wait_for_line, client, b"again")

            await start(COUNTING)
            await scene.call(wait_for_line, client, b"ready")

            scene.meanwhile("a", "find", replace)
            args = {"name": "w", "signal": "USR1"}
            with pytest.raises(fleet.ControlError, match="incarnation 1 of it does no"):
                await scene.call(client.ask, "kill", args)
            await scene.call(client.ask, "kill", args)
            await scene.call(wait_for_line, client, b"got")
            log = await scene.call(one.log, "w")
            assert log.splitlines() == [b"ready", b"again", b"got"]


# spec FL2: the directory ends with its node's Ray.
async def test_the_head_does_not_leave(tmp_path: Path) -> None:
    # Ray's sockets take short paths alone.
    with TemporaryDirectory(dir="/tmp") as where, node_at(Path(where)) as one:
        async with fleet_of(tmp_path, a=one) as scene:
            words = ("fleet", "leave", "--control", scene.control("a"))
            done = await scene.call(sandhost, *words)
            assert (done.status, done.out) == (1, b"")
            assert b"end the fleet by `sandhost fleet down`" in done.err
            shown = await scene.call(scene.client("a").ask, "ps")
            assert [row["state"] for row in shown["nodes"]] == ["up"]


# spec FL8: the node actor outlives the daemon, and with it all of Ray here.
async def test_a_node_leaves_whose_daemon_was_killed(tmp_path: Path) -> None:
    # Ray's sockets take short paths alone.
    with (
        TemporaryDirectory(dir="/tmp") as where,
        node_at(tmp_path / "a") as one,
        node_at(Path(where)) as other,
    ):
        directory = f"{where}/state/{ray_processes.DIRECTORY}"
        async with fleet_of(tmp_path, a=one, b=other) as scene:
            with ray_processes.locked(directory):
                token = ray_processes.make_token(directory)
            words, control = ("sleep", "600"), scene.control("b")
            ray = ray_processes.start(words, directory, token, control)
            other.process.kill()
            done = await scene.call(sandhost, "fleet", "leave", "--control", control)
            assert (done.status, done.out) == (0, b"")
            assert b"; Ray here is ended" in done.err
            assert await scene.call(ray.wait) == -signal.SIGTERM
            assert not ray_processes.is_there(directory)
            assert not await in_thread(os.path.exists, token)


def wait_for_line(client: FleetClient, line: bytes) -> None:
    """Read the log of `w` until a line is in it, once."""
    said = b""
    for entry in client.logs("w", {"follow": True}):
        said += entry.data
        if line in said:
            break
    assert said.count(line) == 1


def check_commands(child: fleet.FleetChild) -> None:
    """Run commands: statuses, streams, environment, input, and what cannot be run."""
    done = child.exec(["sh", "-c", "echo o; echo e >&2; exit 7"])
    assert (done.status, done.out, done.err) == (7, b"o\n", b"e\n")
    done = child.exec(["sh", "-c", "kill -9 $$"])
    assert done.status == 128 + 9
    script = 'echo $COLOUR $SHAPE $SANDHOST_FLEET_NODE "$PWD"'
    done = child.exec(["sh", "-c", script], env={"SHAPE": "round"}, cwd="/usr")
    assert done.out == b"red round a /usr\n"
    assert child.exec(["cat"], data=b"x" * 100_000).out == b"x" * 100_000
    # It lives on behind the command, as the child does.
    child.exec(["sh", "-c", "sleep 600 & echo $! > $TMPDIR/pid"])
    done = child.exec(["sh", "-c", 'kill -0 "$(cat $TMPDIR/pid)"'])
    assert (done.status, done.err) == (0, b"")
    with pytest.raises(FileNotFoundError, match="/no/such"):
        child.exec(["/no/such"])
    with pytest.raises(FileNotFoundError, match="/no/directory"):
        child.exec(["true"], cwd="/no/directory")
    with pytest.raises(PermissionError, match=r"a\.txt"):
        child.exec(["./a.txt"])
    with pytest.raises(fleet.CommandTimeoutError, match=r"after 0\.5 s") as late:
        child.exec(["sh", "-c", "echo begun; sleep 600"], timeout_s=0.5)
    assert late.value.out == b"begun\n"
    with pytest.raises(fleet.FleetChildError, match="at most 48000 bytes"):
        child.exec(["true", "x" * 60_000])


def check_files(child: fleet.FleetChild) -> None:
    """Read and write files, and look at the changes."""
    child.write("a.txt", b"more\n", append=True)
    assert child.read("a.txt") == b"hello\nmore\n"
    child.write("sub/b.txt", b"", parents=True)
    assert child.read("sub/b.txt") == b""
    size = 3 * 1024 * 1024 + 1  # more than is under way at once
    child.write("big", os.urandom(size))
    assert len(child.read("big")) == size
    assert len(child.exec(["cat", "big"]).out) == size
    with pytest.raises(FileNotFoundError, match="none"):
        child.read("none")
    with pytest.raises(FileNotFoundError, match="none"):
        child.write("none/b.txt", b"")
    with pytest.raises(IsADirectoryError, match="sub"):
        child.read("sub")
    with pytest.raises(OSError, match=r"/usr/b\.txt"):
        child.write("/usr/b.txt", b"")
    paths = [(row.path, row.change) for row in child.changes()]
    added = [("big", "added"), ("sub", "added"), ("sub/b.txt", "added")]
    assert paths == [("a.txt", "modified"), *added]
    assert b"+more\n" in child.diff(["a.txt"])


PROGRAM = """
import sys
from sandhost import fleet
for name in sys.stdin:
    child = fleet.create(
        "repo", name=name.strip(), keep=False, control=sys.argv[1], node="b"
    )
    child.write("b.txt", b"changed")
    print("held", flush=True)
"""


def made(program: "subprocess.Popen[bytes]", name: str) -> bool:
    """Have a program make a child that it holds."""
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write(f"{name}\n".encode())
    program.stdin.flush()
    return program.stdout.readline() == b"held\n"


# spec FL3
async def test_a_child_ends_with_the_program_that_holds_it(tmp_path: Path) -> None:
    with node_at(tmp_path / "a") as one, node_at(tmp_path / "b") as other:
        async with fleet_of(tmp_path, a=one, b=other) as scene:
            words = [sys.executable, "-c", PROGRAM, scene.control("a")]
            pipe = subprocess.PIPE
            with subprocess.Popen(words, stdin=pipe, stdout=pipe) as program:  # noqa: ASYNC220
                assert await scene.call(made, program, "first")
                client = scene.client("a")
                found = await scene.call(fleet.find, "first", control=client.control)
                assert found.node == "b"
                assert await scene.call(found.read, "b.txt") == b"changed"
                # The actor of the program's own node is started again meanwhile.
                await scene.kill("a")
                await scene.begin("a")
                assert await scene.call(made, program, "second")
                assert await scene.call(found.read, "b.txt") == b"changed"
                program.kill()
            for name in ("first", "second"):
                await scene.call(client.ask, "wait", {"name": name})
            assert await scene.call(other.client.workspaces) == []
            assert not (other.where / "repo" / "b.txt").exists()


# spec FL3: its name is another's as soon as it has ended.
async def test_stop_waits_for_its_own_child(tmp_path: Path) -> None:
    with node_at(tmp_path / "a") as one:
        async with fleet_of(tmp_path, a=one) as scene:
            client = scene.client("a")
            child = await scene.call(
                fleet.create, "repo", name="box", control=client.control
            )

            async def replace() -> None:
                await scene.call(client.ask, "wait", {"name": "box"})
                program = {"command": ["sleep", "600"]}
                await scene.call(
                    client.ask, "spawn", {"name": "box", "program": program}
                )

            scene.meanwhile("a", "kill", replace)
            await scene.call(child.stop)
            await scene.call(child.stop)
            row = await scene.call(client.ask, "find", {"name": "box"})
            assert row["state"] == "running"
            await scene.call(client.ask, "kill", {"name": "box"})


# spec FL3: the child that has taken its name gets signs of life all the same.
async def test_stop_lets_go_of_its_own_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "ALIVE_S", 0.1)
    with node_at(tmp_path / "a") as one, node_at(tmp_path / "b") as other:
        async with fleet_of(tmp_path, a=one, b=other) as scene:
            control = scene.control("a")
            make = partial(fleet.create, "repo", name="box", node="b", control=control)

            def replace() -> fleet.FleetChild:
                with make() as first:
                    first.stop()
                    return make()

            second = await scene.call(replace)
            before = scene.asked["b", "control"]
            await eventually(lambda: scene.asked["b", "control"] > before + 1)
            await scene.call(second.stop)


# spec FL3: also where the next node actor is told anew what the program holds.
async def test_a_program_takes_no_child_along_but_its_own(tmp_path: Path) -> None:
    with node_at(tmp_path / "a") as one, node_at(tmp_path / "b") as other:
        async with fleet_of(tmp_path, a=one, b=other) as scene:
            client = scene.client("a")
            words = [sys.executable, "-c", PROGRAM, client.control]
            pipe = subprocess.PIPE
            with subprocess.Popen(words, stdin=pipe, stdout=pipe) as program:  # noqa: ASYNC220
                for name in ("box", "second"):
                    assert await scene.call(made, program, name)
                await scene.call(client.ask, "kill", {"name": "box", "signal": "KILL"})
                await scene.call(client.ask, "wait", {"name": "box"})
                request = {"name": "box", "program": {"command": ["sleep", "600"]}}
                await scene.call(client.ask, "spawn", request)
                before = scene.asked["directory", "find"]
                await scene.kill("a")
                await scene.begin("a")
                await eventually(  # both names are told
                    lambda: scene.asked["directory", "find"] > before + 1
                )
                assert await scene.call(made, program, "third")
                program.kill()
            for name in ("second", "third"):
                await scene.call(client.ask, "wait", {"name": name})
            await scene.call(client.ask, "kill", {"name": "box", "signal": "USR1"})
            row = await scene.call(client.ask, "wait", {"name": "box"})
            assert row["status"] == 128 + signal.SIGUSR1


# spec FL3, FL4: nobody but its caller knows what has the name.
async def test_a_detached_child_whose_order_was_not_answered_goes_on(
    tmp_path: Path,
) -> None:
    with node_at(tmp_path / "a") as one:
        async with fleet_of(tmp_path, a=one) as scene:
            make = partial(fleet.create, "repo", name="box", detached=True)
            scene.lose_answer("a", "spawn")
            with pytest.raises(fleet.ControlError, match="directory does not answer"):
                await scene.call(make, control=scene.control("a"))
            await scene.started("a")
            found = await scene.call(fleet.find, "box", control=scene.control("a"))
            assert (await scene.call(found.exec, ["echo", "on"])).out == b"on\n"
            with pytest.raises(fleet.ControlError, match="the name is taken"):
                await scene.call(make, control=scene.control("a"))
            await scene.call(found.stop)


class Pauses:
    """The pauses of what holds children, and when there has been one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._count = 0
        self._really_pause = commands.pause
        for module in (commands, fleet_child):
            monkeypatch.setattr(module, "pause", self._pause)

    def _pause(self) -> None:
        self._count += 1
        self._really_pause()

    async def wait(self) -> None:
        """Wait for the next pause."""
        before = self._count
        await eventually(lambda: self._count > before)


async def echo(scene: Doors) -> tuple[FleetClient, tuple[str, str]]:
    """Start a child that echoes; return what asks its node, and its name and id."""
    client = scene.client("a")
    program = {"command": ["cat"], "takes_input": True}
    request = {"name": "w", "program": program}
    (row,) = await scene.call(client.ask, "spawn", request)
    return client, ("w", row["id"])


# spec FL1, FL3: the node actor is started again when a child has just been made.
async def test_a_child_is_held_once_the_node_actor_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = Pauses(monkeypatch)
    with node_at(tmp_path / "a") as one:
        async with fleet_of(tmp_path, a=one) as scene:
            client, child = await echo(scene)
            holder = fleet_child.Holder(client)
            await scene.kill("a")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scene.call, holder.hold, *child)
                await pauses.wait()
                await scene.begin("a")
            await scene.call(holder.release, *child)


# spec FL3: however long the directory is away, the door then tells its child.
async def test_a_child_is_held_by_the_next_node_actor_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "ALIVE_S", 0.1)
    monkeypatch.setattr(commands, "PATIENCE_S", 0.0)
    with node_at(tmp_path / "a") as one:
        async with fleet_of(tmp_path, a=one) as scene:
            client, child = await echo(scene)
            holder = fleet_child.Holder(client)
            await scene.call(holder.hold, *child)
            await scene.kill_directory()
            await scene.kill("a")
            before = len((await scene.call(one.log, "w")).splitlines())
            await scene.begin("a")
            scene.missed = trio.Event()
            await scene.missed.wait()
            pauses = Pauses(monkeypatch)
            await pauses.wait()
            await scene.begin_directory()
            lines: list[bytes] = []
            while len(lines) < before + 2:  # one was on its way
                lines = (await scene.call(one.log, "w")).splitlines()
            assert set(lines) == {b'{"do": "alive"}'}
            await scene.call(holder.release, *child)
            await scene.call(client.ask, "kill", {"name": "w"})


# spec FL3
async def test_run_passes_its_input_and_the_statuses_of_starts(tmp_path: Path) -> None:
    with node_at(tmp_path / "a") as one, node_at(tmp_path / "b") as other:
        async with fleet_of(tmp_path, a=one, b=other) as scene:
            data = os.urandom(300_000)
            done = await run_in(scene, "--node", "b", "--", "cat", data=data)
            assert (done.status, done.out, done.err) == (0, data, b"")
            done = await run_in(scene, "--", "head", "-c", "3", data=b"x" * 4_000_000)
            assert (done.status, done.out, done.err) == (0, b"xxx", b"")
            done = await run_in(scene, "--", "/no/such")
            assert (done.status, done.said("/no/such")) == (127, True)
            done = await run_in(scene, "--", str(one.where / "repo" / "a.txt"))
            assert (done.status, done.said("a.txt")) == (126, True)
            done = await run_in(scene, "--needs", "tpu", "--", "true")
            assert (done.status, done.said("no node has these labels")) == (125, True)


# spec FL3
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_run_that_is_ended_ends_its_child(
    tmp_path: Path, number: signal.Signals
) -> None:
    with node_at(tmp_path / "a") as one:
        async with fleet_of(tmp_path, a=one) as scene:
            words = (*RUN, "--control", scene.control("a"), "sleep", "600")
            # Not in a thread: those of this loop block signals.
            with subprocess.Popen(  # noqa: ASYNC220
                words, stdin=subprocess.PIPE, env=ENVIRONMENT
            ) as process:
                await scene.started("a")
                process.send_signal(number)
                status = await in_thread(process.wait, 60)
            assert status == 128 + number
            (row,) = (await scene.call(scene.client("a").ask, "ps"))["children"]
            over = await scene.call(
                scene.client("a").ask, "wait", {"name": row["name"]}
            )
            assert over["state"] == "ended"


# spec FL3, FL4, FL11: the directory takes an order that its command has given up.
async def test_run_leaves_no_child_of_an_order_that_is_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node_at(tmp_path / "a") as one:
        async with fleet_of(tmp_path, a=one) as scene:
            monkeypatch.setattr(door, "ANSWER_S", 0.2)
            may_arrive = scene.hold_requests("a")
            words = (*RUN, "--control", scene.control("a"), "--", "sleep", "600")
            # Not in a thread: those of this loop block signals.
            with subprocess.Popen(  # noqa: ASYNC220
                words, stderr=subprocess.PIPE, env=ENVIRONMENT
            ) as process:
                assert process.stderr is not None
                said = await scene.call(process.stderr.readline)
                assert b"directory does not answer" in said
                process.send_signal(signal.SIGTERM)
                may_arrive.set()
                status = await in_thread(process.wait, 60)
            assert status == 128 + signal.SIGTERM
            monkeypatch.undo()
            children: list[dict[str, str]] = []
            while [row["state"] for row in children] != ["ended"]:
                children = (await scene.call(scene.client("a").ask, "ps"))["children"]


# spec FL3, FL4
async def test_run_waits_for_a_child_whose_start_was_not_told(tmp_path: Path) -> None:
    with node_at(tmp_path / "a") as one, node_at(tmp_path / "b") as other:
        async with fleet_of(tmp_path, a=one, b=other) as scene:
            await scene.kill("b")

            async def look_again() -> None:
                scene.meanwhile("a", "find", partial(scene.begin, "b"))

            scene.meanwhile("a", "find", look_again)
            scene.lose_answer("a", "wait")
            done = await run_in(scene, "--node", "b", "--", "cat", data=b"hello")
            assert (done.status, done.out) == (0, b"hello")
            assert done.said("directory does not answer")


# spec FL1, FL3
async def test_run_outlives_the_node_actor_that_it_asks(tmp_path: Path) -> None:
    with node_at(tmp_path / "a") as one, node_at(tmp_path / "b") as other:
        async with fleet_of(tmp_path, a=one, b=other) as scene:
            async with trio.open_nursery() as nursery:

                async def restart() -> None:
                    await scene.started("b")
                    await scene.kill("a")
                    await scene.begin("a")
                    (tmp_path / "b" / "repo" / "go").touch()

                nursery.start_soon(restart)
                script = (
                    f"until [ -e {tmp_path}/b/repo/go ]; do sleep 0.1; done; echo on"
                )
                done = await run_in(scene, "--node", "b", "--", "sh", "-c", script)
            assert (done.status, done.out, done.err) == (0, b"on\n", b"")


# spec FL3
async def test_run_without_an_input_gives_its_child_none(tmp_path: Path) -> None:
    with node_at(tmp_path / "a") as one:
        async with fleet_of(tmp_path, a=one) as scene:
            words = (*RUN, "--control", scene.control("a"), "--", "wc", "-c")

            def run_closed() -> bytes:
                closed = ("sh", "-c", '"$@" <&-', "sh", *words)
                return subprocess.run(
                    closed, stdout=subprocess.PIPE, env=ENVIRONMENT, check=True
                ).stdout

            assert await scene.call(run_closed) == b"0\n"


# spec FL3, FL11
async def test_run_names_the_node_that_was_lost(tmp_path: Path) -> None:
    with node_at(tmp_path / "a") as one, node_at(tmp_path / "b") as other:
        async with fleet_of(tmp_path, lease_s=8.0, a=one, b=other) as scene:
            async with trio.open_nursery() as nursery:

                async def lose() -> None:
                    await scene.started("b")
                    await scene.kill("b")

                nursery.start_soon(lose)
                done = await run_in(scene, "--node", "b", "--", "sleep", "600")
            assert (done.status, done.said("on node b: ")) == (125, True)


# spec FL3
async def test_top_and_commit_are_those_of_one_host(tmp_path: Path) -> None:
    with node_at(tmp_path / "a") as one, node_at(tmp_path / "b") as other:
        async with fleet_of(tmp_path, a=one, b=other) as scene:
            control = scene.control("a")
            async with trio.open_nursery() as nursery:
                names = {}

                async def make(where: str) -> None:
                    names[where] = await scene.call(
                        fleet.create, "repo", node=where, control=control
                    )

                nursery.start_soon(make, "a")
                nursery.start_soon(make, "b")
            words = ("fleet", "top", "--control", control, "--once")
            done = await scene.call(sandhost, *words, "--json")
            rows = {row["node"]: row for row in json.loads(done.out)}
            assert {key: row["name"] for key, row in rows.items()} == {
                key: child.name for key, child in names.items()
            }
            assert all("cpu_percent" in row for row in rows.values())
            done = await scene.call(sandhost, *words)
            assert done.out.split()[:3] == [b"CHILD", b"NODE", b"STATE"]
            child = names["b"]
            await scene.call(child.write, "a.txt", b"theirs\n")
            await scene.call(child.write, "b.txt", b"new\n")
            (other.where / "repo" / "a.txt").write_text("mine\n")
            more = ("fleet", "commit", "--control", control, child.name, "--freeze")
            done = await scene.call(sandhost, *more)
            assert (done.status, b"conflict   a.txt" in done.out) == (1, True)
            done = await scene.call(
                sandhost, *more, "--theirs", "a.txt", "--except", "b*"
            )
            assert (done.status, done.out) == (0, b"committed  a.txt\n")
            assert (other.where / "repo" / "a.txt").read_text() == "theirs\n"
            assert not (other.where / "repo" / "b.txt").exists()
            # A directory of this node, in which a child of another one works.
            base = one.where / "repo"
            child = await scene.call(fleet.create, str(base), node="b", control=control)
            assert await scene.call(child.read, "a.txt") == b"hello\n"
            await scene.call(child.write, "a.txt", b"from b\n")
            assert b"+from b\n" in await scene.call(child.diff)
            with pytest.raises(fleet.ControlError, match="end it first"):
                await scene.call(child.commit)
            await scene.call(child.stop)
            result = await scene.call(child.commit)
            assert (result.applied, result.left) == (["a.txt"], [])
            assert (base / "a.txt").read_text() == "from b\n"
            for held in names.values():
                await scene.call(held.stop)


PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "fleet.md"


# spec FL3
async def test_the_example_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with node_at(tmp_path / "a") as one:
        makefile = one.where / "repo" / "Makefile"
        makefile.write_text("test:\n\t@echo passed\n")
        async with fleet_of(tmp_path, a=one) as scene:
            env = {**ENVIRONMENT, "SANDHOST_CONTROL": scene.control("a")}

            def do() -> bytes:
                return subprocess.check_output([sys.executable, "-c", example], env=env)

            said = await scene.call(do)
            assert said.startswith(b"0 passed\n")
            assert b"+all tests pass\n" in said
            notes = one.where / "repo" / "notes.txt"
            assert notes.read_text() == "all tests pass\n"
            assert await scene.call(one.client.workspaces) == []
