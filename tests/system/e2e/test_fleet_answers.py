"""Output of a fleet's children that no log has: told, and not waited for."""

import base64
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hostlib.threads import in_thread
from sandhost import fleet
from tests.helpers.command import ENVIRONMENT, sandhost, small_disk
from tests.helpers.fleetdoors import RUN, Doors, fleet_of, node_at, run_in
from tests.helpers.fleetscene import CALM_S

pytestmark = pytest.mark.slow

PATIENCE = "supervisor.cluster.commands.PATIENCE_S"

MUCH = 4_000_000
"""More bytes than a pipe and the buffers before it hold."""


@asynccontextmanager
async def one_node(where: Path) -> AsyncIterator[Doors]:
    """Make a fleet of one daemon."""
    with node_at(where / "a") as one:
        async with fleet_of(where, a=one) as scene:
            yield scene


@asynccontextmanager
async def two_nodes(
    where: Path, lease_s: float = CALM_S
) -> AsyncIterator[tuple[Doors, fleet.FleetChild]]:
    """Make a fleet of two daemons, and a child `box` on the other one."""
    with node_at(where / "a") as one, node_at(where / "b") as other:
        async with fleet_of(where, lease_s, a=one, b=other) as scene:
            make = partial(fleet.create, "repo", name="box", node="b")
            child = await scene.call(make, control=scene.control("a"))
            yield scene, child


@asynccontextmanager
async def slow_run(
    scene: Doors, end: str
) -> AsyncIterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """Run a child that is over when the first of its `MUCH` bytes was read."""
    client = scene.client("a")
    words = (*RUN, "--control", scene.control("a"), "--", "sh", "-c")
    # Not in a thread: those of this loop block signals.
    with subprocess.Popen(  # noqa: ASYNC220
        (*words, f"head -c {MUCH} /dev/zero; {end}"),
        bufsize=0,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        assert await scene.call(process.stdout.read, 1) == b"\0"
        (row,) = (await scene.call(client.ask, "ps"))["children"]
        await scene.call(client.ask, "wait", {"name": row["name"]})
        yield process, row


def logs_of(scene: Doors, node: str, name: str) -> Path:
    """Return where the log of a child is."""
    return scene.daemons[node].where / "state" / "logs" / name


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill a disk while the block runs."""
    filling = disk / "filling"
    with filling.open("wb") as file, suppress(OSError):
        file.write(b"x" * 1_000_000)
    try:
        yield
    finally:
        filling.unlink()


# spec FL3, FL11: answers travel in the child's log.
async def test_a_full_disk_beneath_a_log_is_told(tmp_path: Path) -> None:
    (tmp_path / "a" / "state").mkdir(0o700, parents=True)
    with small_disk(tmp_path, "256k") as disk:
        (tmp_path / "a" / "state" / "logs").symlink_to(disk)
        async with one_node(tmp_path) as scene:
            make = partial(fleet.create, "repo", control=scene.control("a"))
            child = await scene.call(make, name="box")
            lost = r"cannot read the answer of box: \d+ bytes .* lost by a full disk"
            with full(disk):
                with pytest.raises(fleet.FleetChildError, match=lost):
                    await scene.call(child.exec, ["head", "-c", "20000", "/dev/zero"])
                with pytest.raises(fleet.FleetChildError, match="by a full disk"):
                    await scene.call(make)
                done = await run_in(scene, "--", "sh", "-c", "echo lost; exit 3")
                assert (done.status, done.out) == (3, b"")
                assert done.said("5 bytes are missing: they were removed, or lost by")
            ran = await scene.call(child.exec, ["echo", "again"])
            assert (ran.status, ran.out) == (0, b"again\n")
            await scene.call(child.stop)


# spec FL3: they are removed when too many others have ended after their children.
async def test_output_of_run_whose_log_is_removed_is_told(tmp_path: Path) -> None:
    async with one_node(tmp_path) as scene:
        async with slow_run(scene, "true") as (process, row):
            await in_thread(shutil.rmtree, logs_of(scene, "a", row["name"]))
            out, err = await in_thread(process.communicate)
        missing = MUCH - 1 - len(out)
        assert missing > 0
        assert f"run: {missing} bytes are missing: they were removed".encode() in err


# spec FL3: its output is read so slowly that the fleet has forgotten it since.
async def test_run_exits_as_a_child_that_the_fleet_lists_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.fleet.directory.MOST_OVER", 1)
    async with one_node(tmp_path) as scene:
        async with slow_run(scene, "exit 7") as (process, row):
            assert (await run_in(scene, "--", "true")).status == 0
            rows = (await scene.call(scene.client("a").ask, "ps"))["children"]
            assert row["id"] not in {one["id"] for one in rows}
            out, err = await in_thread(process.communicate)
        assert (process.returncode, len(out), err) == (7, MUCH - 1, b"")


# spec FL3
async def test_a_log_that_was_removed_is_not_one_of_a_silent_child(
    tmp_path: Path,
) -> None:
    async with one_node(tmp_path) as scene:
        client, control = scene.client("a"), ("--control", scene.control("a"))

        async def end() -> None:
            (row,) = (await scene.call(client.ask, "ps"))["children"]
            await scene.call(client.ask, "wait", {"name": row["name"]})
            while await scene.call(scene.daemons["a"].client.ps):
                pass
            for words in (("logs",), ("fleet", "logs")):
                done = await scene.call(sandhost, *words, *control, row["name"])
                assert (done.status, done.out, done.err) == (0, b"", b"")
            await in_thread(shutil.rmtree, logs_of(scene, "a", row["name"]))
            for words, status in ((("logs",), 2), (("fleet", "logs"), 1)):
                done = await scene.call(sandhost, *words, *control, row["name"])
                assert (done.status, done.out) == (status, b"")
                assert done.said("or its log was removed: ")

        scene.meanwhile("a", "find", end)
        done = await run_in(scene, "--", "sh", "-c", "exit 4")
        assert (done.status, done.out) == (125, b"")
        assert done.said("has ended with status 4, and its last output is missing")


# spec FL3, FL11
async def test_exec_ends_where_the_log_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_nodes(tmp_path) as (scene, child):
        (file,) = logs_of(scene, "b", "box").glob("*.log")
        os.rename(file, tmp_path / "moved")
        file.symlink_to(tmp_path / "moved")  # is not followed: ELOOP
        monkeypatch.setattr(PATIENCE, 0.5)
        with pytest.raises(fleet.FleetChildError, match="symbolic links") as refusal:
            await scene.call(child.exec, ["sleep", "600"])
        assert "may be done all the same" in str(refusal.value)
        file.unlink()
        os.rename(tmp_path / "moved", file)
        await scene.call(wait_for_no, child, "sleep")
        await scene.call(child.stop)


def wait_for_no(child: fleet.FleetChild, name: str) -> None:
    """Wait until no process of a name is in a child."""
    script = f"while grep -qx {name} /proc/[0-9]*/comm; do sleep 0.05; done"
    assert child.exec(["sh", "-c", script], timeout_s=60).status == 0


# spec FL3, FL11
async def test_exec_without_an_answer_says_that_it_may_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_nodes(tmp_path) as (scene, child):
        scene.lose_answer("a", "control")
        with monkeypatch.context() as hasty:
            hasty.setattr(PATIENCE, 0.0)
            with pytest.raises(fleet.FleetChildError, match="may be done all the same"):
                await scene.call(child.exec, ["sleep", "600"])
        await scene.call(wait_for_no, child, "sleep")
        await scene.call(child.stop)


# spec FL3
async def test_a_child_that_reads_no_more_takes_no_commands(tmp_path: Path) -> None:
    async with one_node(tmp_path) as scene:
        client = scene.client("a")
        program = {
            "command": ["sh", "-c", "exec <&-; echo deaf; exec sleep 600"],
            "takes_input": True,
        }
        await scene.call(client.ask, "spawn", {"name": "box", "program": program})
        child = await scene.call(fleet.find, "box", control=scene.control("a"))
        data = base64.b64encode(b"line\n").decode()
        words = {"child": "box", "do": "input", "args": {"data": data, "end": False}}
        while not (await scene.call(client.ask, "on", words))["is_closed"]:
            pass
        with pytest.raises(fleet.FleetChildError, match="takes no more commands"):
            await scene.call(child.exec, ["true"])
        await scene.call(child.stop)


# spec FL3
async def test_exec_says_which_bytes_of_its_log_are_gone(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (scene, child):
        for file in logs_of(scene, "b", "box").glob("*.log"):
            file.unlink()
        before = r"cannot read the answer of box: \d+ bytes of its log were removed"
        scene.lose_answer("a", "control")  # it is read from before that request
        with pytest.raises(fleet.FleetChildError, match=before):
            await scene.call(child.exec, ["true"])
        await scene.call(child.stop)


# spec FL3, FL5
async def test_exec_on_a_lost_node_says_so(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, lease_s=8.0) as (scene, child):
        await scene.kill("b")
        with pytest.raises(fleet.FleetChildError, match="box on node b is lost: "):
            await scene.call(child.exec, ["true"])
