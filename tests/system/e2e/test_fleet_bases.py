"""A directory of one node in which children of any node work."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from hostlib.threads import in_thread
from supervisor.cluster.client import FleetClient
from supervisor.control.client import ControlError
from tests.helpers.command import Outcome, sandhost
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.fleetdoors import Doors, fleet_of
from tests.helpers.rounds import LONG

pytestmark = pytest.mark.slow

FLEET = "[fleet]\n"


@contextmanager
def node(where: Path, config: str = FLEET) -> Iterator[Daemon]:
    """Start a daemon that may be a node."""
    where.mkdir()
    with daemon(where, config, grace="1s") as one:
        yield one


def repo(where: Path) -> Path:
    """Return a new directory with two files and a link."""
    top = where / "repo"
    (top / "src").mkdir(parents=True)
    (top / "src" / "a.txt").write_text("hello\n")
    (top / "src" / "old.txt").write_text("old\n")
    (top / "python").symlink_to("/usr/bin/python3")
    return top


async def fleet(scene: Doors, node: str, *words: str) -> Outcome:
    """Run a command of the fleet on a node."""
    control = scene.control(node)
    return await scene.call(
        sandhost, "fleet", words[0], "--control", control, *words[1:]
    )


async def over(scene: Doors, name: str) -> None:
    """Wait until a child is over."""
    await scene.call(scene.client("a").ask, "wait", {"name": name})


def listed(one: Daemon, name: str = "fleet-bases") -> list[str]:
    """Return the names in a directory of a daemon's state."""
    return os.listdir(one.where / "state" / name)


SCRIPT = (
    "set -e; echo more >> src/a.txt; rm src/old.txt; echo new > src/new.txt;"
    " readlink python; pwd"
)


# spec FL10
async def test_a_base_travels_and_the_changes_come_back(tmp_path: Path) -> None:
    top = repo(tmp_path)
    with node(tmp_path / "a") as a, node(tmp_path / "b") as b:
        async with fleet_of(tmp_path, a=a, b=b) as scene:
            await check_refusals(scene, a, top)
            words = ("--workspace", str(top), "--node", "b", "--name", "w")
            done = await fleet(scene, "a", "spawn", *words, "--", "sh", "-c", SCRIPT)
            assert (done.status, done.err) == (0, b"")
            await over(scene, "w")
            (digest,) = listed(b)
            copy = b.where / "state" / "fleet-bases" / digest / "tree"
            said = (await fleet(scene, "a", "logs", "w")).out.splitlines()
            assert said == [b"/usr/bin/python3", os.fsencode(copy)]
            for one in ("a", "b"):
                done = await fleet(scene, one, "diff", "w", "--name-only")
                assert done.out == b"src/a.txt\nsrc/new.txt\nsrc/old.txt\n"
            await check_commits(scene, a, top, copy)
            await check_own_node(scene, a, top)


async def check_refusals(scene: Doors, a: Daemon, top: Path) -> None:
    """Order children in what can be no base."""
    os.mkfifo(top / "pipe")
    done = await fleet(scene, "a", "spawn", "--workspace", str(top), "--", "true")
    assert (done.status, done.said("cannot pack 'pipe'")) == (1, True)
    (top / "pipe").unlink()
    file = str(top / "src" / "a.txt")
    done = await fleet(scene, "a", "spawn", "--workspace", file, "--", "true")
    assert (done.status, done.said("name a directory")) == (1, True)
    assert listed(a, "fleet-packed") == []


async def check_commits(scene: Doors, a: Daemon, top: Path, copy: Path) -> None:
    """Commit from another node than that of the base: refused, and then done."""
    edited, mine = top / "src" / "new.txt", b"mine\n"
    edited.write_bytes(mine)
    done = await fleet(scene, "b", "commit", "w", "--json")
    assert done.status == 1
    ((path, _),) = (one.values() for one in json.loads(done.out)["conflicts"])
    assert (path, edited.read_bytes()) == ("src/new.txt", mine)
    assert (top / "src" / "a.txt").read_text() == "hello\n"
    edited.unlink()
    done = await fleet(scene, "b", "commit", "w", "--json")
    assert (done.status, done.err) == (0, b"")
    applied = ["src/a.txt", "src/new.txt", "src/old.txt"]
    assert json.loads(done.out)["applied"] == applied
    assert (top / "src" / "a.txt").read_text() == "hello\nmore\n"
    assert sorted(os.listdir(top / "src")) == ["a.txt", "new.txt"]
    # The base on the child's node is as it was, and nothing is left on this one.
    assert (copy / "src" / "a.txt").read_text() == "hello\n"
    assert listed(a, "workspaces") == []


async def check_own_node(scene: Doors, a: Daemon, top: Path) -> None:
    """Run children on the node that has the base: they work in it itself."""
    words = ("--workspace", str(top), "--node", "a", "--")
    done = await fleet(scene, "a", "run", *words, "sh", "-c", "pwd; cat src/a.txt")
    assert (done.status, done.err) == (0, b"")
    assert done.out == f"{top}\nhello\nmore\n".encode()
    assert listed(a) == []
    # Nothing was changed, so nothing is kept.
    assert listed(a, "workspaces") == []
    done = await fleet(scene, "a", "run", *words, "touch", "new")
    assert (done.status, done.said("1 changed; 'sandhost fleet diff run-")) == (0, True)


# spec FL4, FL10
async def test_a_child_whose_base_has_not_come_can_be_ended(tmp_path: Path) -> None:
    top = repo(tmp_path)
    with node(tmp_path / "a") as a, node(tmp_path / "b") as b:
        async with fleet_of(tmp_path, a=a, b=b) as scene:
            base = await scene.call(scene.client("a").pack, str(top))
            await scene.kill("a")  # its daemon goes on, and nobody can ask it
            program = {"command": ["true"], "base": base}
            needs = {"node": "b"}
            request = {"name": "w", "program": program, "needs": needs, "wait": True}
            client = scene.client("b")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(refused_to_start, scene, client, request)
                states: list[str] = []
                while states != ["placing"]:
                    rows = (await scene.call(client.ask, "ps"))["children"]
                    states = [row["state"] for row in rows]
                await scene.call(client.ask, "kill", {"name": "w"})
            row = await scene.call(client.ask, "wait", {"name": "w"})
            assert (row["state"], row["status"]) == ("ended", None)
            assert row["reason"] == "ended before it began"
            assert listed(b) == []


async def refused_to_start(
    scene: Doors, client: FleetClient, request: dict[str, Any]
) -> None:
    """Order a child that is ended before it has begun."""
    with pytest.raises(ControlError, match="ended before it began"):
        await scene.call(client.ask, "spawn", request)


# spec FL5, FL10: what it wrote on the lost node stays there, and is listed when it is back.
@pytest.mark.chaos
@pytest.mark.skipif(not LONG, reason="test_directory and this file have the short form")
async def test_a_child_that_is_placed_again_begins_from_its_base(
    tmp_path: Path,
) -> None:
    top = repo(tmp_path)
    script = "cat src/a.txt; echo more >> src/a.txt; exec sleep 600"
    with node(tmp_path / "a") as a, node(tmp_path / "b") as b:
        async with fleet_of(tmp_path, lease_s=8.0, a=a, b=b) as scene:
            client = scene.client("a")

            async def row() -> dict[str, Any]:
                found = await scene.call(client.ask, "find", {"name": "w"})
                return dict(found)

            other = ("--node", "a", "--name", "x", "--", "sleep", "600")
            assert (await fleet(scene, "a", "spawn", *other)).status == 0
            words = ("--workspace", str(top), "--restart", "always", "--name", "w")
            done = await fleet(scene, "a", "spawn", *words, "--", "sh", "-c", script)
            assert (done.status, done.err) == (0, b"")
            before = await scene.call(client.ask, "workspace", {"name": "w"})
            assert before["node"] == "b"  # the one with more room
            while (await fleet(scene, "a", "diff", "w")).status != 1:
                pass  # until it has written
            os.kill(b.process.pid, signal.SIGKILL)
            found = await row()
            while (found["node"], found["state"]) != ("a", "running"):
                found = await row()
            assert found["incarnation"] > 1
            assert found["reason"].startswith("node 'b' lost: ")
            assert found["reason"].endswith("; what it wrote stays there")
            said = b""
            while not said:
                said = (await fleet(scene, "a", "logs", "w")).out
            assert said == b"hello\n"
            own = await scene.call(client.ask, "workspace", {"name": "w"})
            assert (own["node"], own["name"] != before["name"]) == ("a", True)
            with daemon(b.where, FLEET, grace="1s"):
                list_them = ("list", "--json", "--control", scene.control("b"))
                done = await scene.call(sandhost, "workspace", *list_them)
                rows = {one["name"]: one for one in json.loads(done.out)}
                left = rows[before["name"]]
                assert (left["state"], left["changed"]) == ("left behind", 1)


LOCAL = """
[fleet]
[workspace.repo]
base = "{where}/repo"
[policy.works]
workspace = ["repo"]
"""


# spec FL10: by incarnation, also where its daemon or its name was another child's.
async def test_no_other_childs_workspace_is_that_of_a_child(tmp_path: Path) -> None:
    top = repo(tmp_path)
    config = LOCAL.format(where=tmp_path)
    change = ["sh", "-c", "echo other >> src/a.txt"]

    def work(a: Daemon, name: str) -> None:
        a.client.spawn(change, name=name, policy="works")
        a.wait(lambda: name not in [row.name for row in a.client.ps()])

    with node(tmp_path / "a", config) as a:
        await in_thread(work, a, "local")
        a.end()
    with daemon(tmp_path / "a", config, grace="1s") as a:
        async with fleet_of(tmp_path, a=a) as scene:
            for name in ("job", "own"):
                words = ("--workspace", str(top)) if name == "own" else ()
                script = "echo own >> src/a.txt" if name == "own" else "exit 0"
                done = await fleet(
                    scene,
                    "a",
                    "spawn",
                    *words,
                    "--name",
                    name,
                    "--",
                    "sh",
                    "-c",
                    script,
                )
                assert (done.status, done.err) == (0, b"")
                await over(scene, name)
            await has_none(scene, "job")
            # Children of the node alone take their names.
            await in_thread(work, a, "job")
            await in_thread(work, a, "own")
            await has_none(scene, "job")
            done = await fleet(scene, "a", "commit", "own", "--json")
            assert (done.status, done.err) == (0, b"")
    assert (top / "src" / "a.txt").read_text() == "hello\nown\n"


async def has_none(scene: Doors, name: str) -> None:
    """Ask for the workspace of a child that has none."""
    for do in ("diff", "commit"):
        done = await fleet(scene, "a", do, name)
        said = f"cannot find a workspace of '{name}'"
        assert (done.status, done.said(said)) == (2, True)
