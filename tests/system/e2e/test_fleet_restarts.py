"""Commands of a fleet while a part of it is started again: nothing is lost."""

import base64
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import trio

from hostlib.journal import Journal
from hostlib.threads import in_thread
from hostlib.unix_listener import listen_at
from sandhost import fleet
from supervisor.cluster.names import DOOR
from supervisor.control.server import (
    ControlServer,
    Order,
    Orders,
    Send,
    UnavailableOrderError,
)
from supervisor.fleet.messages import VERSION
from tests.helpers.command import ENVIRONMENT, sandhost
from tests.helpers.fleetdoors import LOG, RUN, Doors, fleet_of, node_at, run_in

pytestmark = pytest.mark.slow

PARTS = pytest.mark.parametrize("part", ["directory", "b"])


@asynccontextmanager
async def two_nodes(where: Path) -> AsyncIterator[Doors]:
    """Join two daemons to a fleet."""
    with node_at(where / "a") as one, node_at(where / "b") as other:
        async with fleet_of(where, a=one, b=other) as scene:
            yield scene


async def states(scene: Doors) -> list[str]:
    """Return the states of all children, once each is over."""
    client = scene.client("a")
    rows = (await scene.call(client.ask, "ps"))["children"]
    for row in rows:
        await scene.call(client.ask, "wait", {"name": row["name"]})
    return [row["state"] for row in (await scene.call(client.ask, "ps"))["children"]]


@asynccontextmanager
async def running(
    scene: Doors, *words: str
) -> "AsyncIterator[subprocess.Popen[bytes]]":
    """Run a command on node b by `fleet run`, and wait until it runs."""
    control = ("--control", scene.control("a"))
    # Not in a thread: those of this loop block signals.
    with subprocess.Popen(  # noqa: ASYNC220
        (*RUN, *control, "--node", "b", "--", *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        await scene.started("b")
        yield process


def say(process: "subprocess.Popen[bytes]", data: bytes) -> None:
    """Write a line of input."""
    assert process.stdin is not None
    process.stdin.write(data)
    process.stdin.flush()


# spec FL1, FL3
async def test_input_of_run_waits_for_a_node_that_is_away(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as scene, running(scene, "cat") as process:
        assert process.stdout is not None
        say(process, b"one\n")
        assert await scene.call(process.stdout.readline) == b"one\n"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.away, "b")
            await scene.call(say, process, b"two\n")
        out, _ = await scene.call(process.communicate, b"three\n")
        assert (process.returncode, out) == (0, b"two\nthree\n")


# spec FL2: children go on without a directory, and so does what they read and write.
async def test_input_and_output_of_run_need_no_directory(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as scene, running(scene, "cat") as process:
        assert process.stdout is not None
        say(process, b"one\n")
        assert await scene.call(process.stdout.readline) == b"one\n"
        await scene.kill_directory()
        await scene.call(say, process, b"two\n")
        assert await scene.call(process.stdout.readline) == b"two\n"
        await scene.begin_directory()
        out, _ = await scene.call(process.communicate, b"three\n")
        assert (process.returncode, out) == (0, b"three\n")


# spec FL1, FL3
@PARTS
async def test_the_end_of_the_input_of_run_is_not_lost(
    tmp_path: Path, part: str
) -> None:
    async with two_nodes(tmp_path) as scene, running(scene, "wc", "-c") as process:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.away, part)
            out, _ = await scene.call(process.communicate, b"")
        assert (process.returncode, out) == (0, b"0\n")


# spec FL3: the last output is read once its node answers again.
@PARTS
async def test_output_of_run_waits_for_a_part_that_is_away(
    tmp_path: Path, part: str
) -> None:
    async with two_nodes(tmp_path) as scene:
        scene.meanwhile("a", "find", partial(end_then_go_away, scene, part))
        script = "echo all; exit 7"
        done = await run_in(scene, "--node", "b", "--", "sh", "-c", script)
        assert (done.status, done.out, done.err) == (7, b"all\n", b"")


async def end_then_go_away(scene: Doors, part: str) -> None:
    """Wait until the only child has ended; then end a part until it is asked for."""
    assert await states(scene) == ["ended"]
    scene.nursery.start_soon(scene.away, part)
    await scene.gone(part)


# spec FL3: its daemon forgets it at once, and has no log of it.
async def test_run_of_a_child_that_ends_in_silence(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as scene:

        async def end() -> None:
            assert await states(scene) == ["ended"]

        scene.meanwhile("a", "find", end)
        script = "exit 4"
        done = await run_in(scene, "--node", "b", "--", "sh", "-c", script, data=b"in")
        assert (done.status, done.out, done.err) == (4, b"", b"")


# spec FL11: the order was done, and the answer that it was refused is lost.
async def test_run_says_why_a_child_was_not_started(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as scene:
        scene.lose_answer("a", "wait")
        done = await run_in(scene, "--node", "b", "--", "/nowhere/program")
        assert (done.status, done.out) == (127, b"")
        text = done.err.decode().splitlines()[-1]
        assert text.startswith("sandhost fleet run: cannot run run-")
        assert "/nowhere/program" in text


# spec FL3, FL8
@PARTS
async def test_run_that_is_ended_meanwhile_ends_its_child(
    tmp_path: Path, part: str
) -> None:
    async with two_nodes(tmp_path) as scene:
        async with running(scene, "sleep", "600") as process:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scene.away, part)
                await scene.gone(part)
                process.send_signal(signal.SIGINT)
                if part != "directory":  # a kill is the directory's alone
                    scene.missed.set()
            assert await in_thread(process.wait, 60) == 130
        assert await states(scene) == ["ended"]


# spec FL3
async def test_run_ends_with_the_reader_of_its_output(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as scene:
        async with running(scene, "yes") as process:
            assert process.stdout is not None
            assert await scene.call(process.stdout.readline) == b"y\n"
            process.stdout.close()
            assert await in_thread(process.wait, 60) == 128 + signal.SIGPIPE
        assert await states(scene) == ["ended"]


class GappedDoor:
    """A door whose only child has an output of which the log lost a part."""

    child: ClassVar[dict[str, object]] = {
        "name": "c",
        "id": "1",
        "node": "a",
        "incarnation": 1,
        "state": "ended",
        "pid": 1,
        "status": 3,
    }

    async def here(self, _words: dict[str, Any]) -> object:
        """Return the version alone."""
        return {"version": VERSION}

    async def show(self, _words: dict[str, Any]) -> object:
        """Return the child."""
        return self.child

    async def spawn(self, _words: dict[str, Any]) -> object:
        """Return the child as the only one of a batch."""
        return [self.child]

    async def items(self, _words: dict[str, Any], send: Send) -> None:
        """Send two pieces of the log; 100 bytes before each are gone."""
        for offset, data in ((100, b"one\n"), (204, b"two\n")):
            text = base64.b64encode(data).decode()
            await send({"offset": offset, "missed": 0, "data": text})

    async def serve(self, listener: trio.SocketListener) -> None:
        """Serve until cancelled."""
        orders: dict[str, Order] = {
            "here": self.here,
            "spawn": self.spawn,
            "find": self.show,
            "wait": self.show,
        }
        recorder = SimpleNamespace(log=LOG, journal=Journal(-1, print))
        await ControlServer(
            recorder, listener, Orders(orders=orders, streams={"items": self.items})
        ).run()


@asynccontextmanager
async def served(where: Path, door: GappedDoor) -> AsyncIterator[tuple[str, ...]]:
    """Yield a command that uses a door."""
    async with (
        listen_at(f"{where}/{DOOR}") as listener,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(door.serve, listener)
        yield (*RUN, "--control", f"{where}/control", "--", "true")
        nursery.cancel_scope.cancel()


# spec FL3, FL11
async def test_run_tells_output_that_was_removed_before_it_was_read(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, GappedDoor()) as command:
        done = await in_thread(sandhost, *command[1:])
    assert (done.status, done.out) == (3, b"one\ntwo\n"), done.err
    missing = b"sandhost fleet run: 100 bytes are missing: they were removed, or lost"
    assert done.err == (missing + b" by a full disk\n") * 2


class SilentDoor(GappedDoor):
    """A door that cannot reach the directory until it is told."""

    def __init__(self) -> None:
        self.is_away = True

    async def show(self, words: dict[str, Any]) -> object:
        """Return the child, once the directory is there."""
        if self.is_away:
            raise UnavailableOrderError("cannot reach the fleet's directory")
        return await super().show(words)


# spec FL11
async def test_run_says_once_that_the_directory_does_not_answer(tmp_path: Path) -> None:
    door = SilentDoor()
    async with served(tmp_path, door) as command:
        # Not in a thread: those of this loop block signals.
        with subprocess.Popen(  # noqa: ASYNC220
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
        ) as process:
            assert process.stderr is not None
            said = await in_thread(process.stderr.readline)
            door.is_away = False
            out, err = await in_thread(process.communicate)
    text = b"sandhost fleet run: cannot reach the fleet's directory; asked again\n"
    assert (said, out) == (text, b"one\ntwo\n")
    assert (process.returncode, err.count(b"directory")) == (3, 0)


# spec FL3
@PARTS
async def test_stop_waits_for_a_part_that_is_away(tmp_path: Path, part: str) -> None:
    async with two_nodes(tmp_path) as scene:
        make = partial(fleet.create, "repo", node="b", control=scene.control("a"))
        child = await scene.call(make)
        await scene.kill_directory() if part == "directory" else await scene.kill("b")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.call, child.stop)
            if part == "directory":
                await scene.missed.wait()
                await scene.begin_directory()
            else:
                await scene.begin("b")
        assert await states(scene) == ["ended"]


# spec FL3: the command runs once, and has ended before the second attempt.
async def test_exec_whose_request_is_repeated_has_its_answer(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as scene:
        make = partial(fleet.create, "repo", node="b", control=scene.control("a"))
        child = await scene.call(make)
        scene.lose_answer("a", "control")
        script = "echo once >> runs; cat runs"
        done = await scene.call(child.exec, ["sh", "-c", script])
        assert (done.status, done.out) == (0, b"once\n")
        await scene.call(child.stop)


# spec FL3
async def test_create_without_an_answer_leaves_no_child(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as scene:
        make = partial(fleet.create, "repo", control=scene.control("a"))
        scene.lose_answer("a", "spawn")
        with pytest.raises(fleet.ControlError, match="directory does not answer"):
            await scene.call(make)
        assert await states(scene) == ["ended"]
        # A refused one ends nothing: the name is another child's.
        child = await scene.call(make, name="box")
        with pytest.raises(fleet.ControlError, match="'box'"):
            await scene.call(make, name="box")
        assert await scene.call(child.state) == "running"
        client = scene.client("a")
        for signal_name in ("KILL", "USR1"):
            words = {"name": "box", "signal": signal_name, "child": "another"}
            with pytest.raises(fleet.ControlError, match="'box'"):
                await scene.call(client.ask, "kill", words)
        assert await scene.call(child.state) == "running"
        await scene.call(child.stop)


# spec FL10
async def test_a_workspace_is_that_of_one_child(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as scene:
        make = partial(
            fleet.create, "repo", name="box", node="b", control=scene.control("a")
        )
        first = await scene.call(make)
        await scene.call(first.stop)
        second = await scene.call(make)
        await scene.call(second.write, "b.txt", b"new")
        for ask in (first.diff, first.commit, first.discard):
            with pytest.raises(fleet.FleetChildError, match="another child has that"):
                await scene.call(ask)
        assert b"+new" in await scene.call(second.diff)
        await scene.call(second.stop)
