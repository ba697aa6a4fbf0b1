"""Words, answers and statuses of `sandhost fleet`, on two nodes without Ray."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import trio

from supervisor.cli.fleet import fleet
from supervisor.fleet.messages import VERSION, AskSlice, Session, encode
from supervisor.fleet.slices import ACCOUNT, NEVER
from tests.helpers.command import Outcome, sandhost
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.fleetdoors import Doors, fleet_of
from tests.helpers.fleetscene import CALM_S
from tests.helpers.stage import eventually

pytestmark = pytest.mark.slow

CAPACITY = 3

CONFIG = f"max_children = {CAPACITY}\n[fleet]\n"
"""The end of `[host]`, and a daemon that may be a node."""

SLEEP = ("--", "sleep", "600")


@contextmanager
def node() -> Iterator[Daemon]:
    """Start a daemon with room for three children."""
    # Ray's sockets take short paths alone.
    with TemporaryDirectory(dir="/tmp") as where:
        with daemon(Path(where), CONFIG, grace="1s") as one:
            yield one


class Fleet:
    """Two nodes, a and b, and the command on either."""

    def __init__(self, scene: Doors) -> None:
        self.scene = scene

    async def run(self, where: str, name: str, *words: str) -> Outcome:
        """Run a command of the fleet on a node."""
        given = ("--control", self.scene.control(where), *words)
        return await self.scene.call(sandhost, "fleet", name, *given)

    async def children(self) -> dict[str, dict[str, Any]]:
        """Return the children, as node b shows them."""
        done = await self.run("b", "ps", "--json")
        assert (done.status, done.err) == (0, b"")
        return {row["name"]: row for row in json.loads(done.out)["children"]}

    async def session(self, name: str) -> Session:
        """Return the session of a node."""
        done = await self.run("a", "ps", "--json")
        rows = {row["name"]: row for row in json.loads(done.out)["nodes"]}
        ledger, _, number = rows[name]["session"].rpartition(".")
        return Session(ledger, int(number))

    async def accounts(self) -> list[dict[str, Any]]:
        """Return the accounts, as node a shows them."""
        done = await self.run("a", "quota", "--json")
        assert (done.status, done.err) == (0, b"")
        return list(json.loads(done.out)["accounts"])

    async def refused(self, told: str, *words: str) -> None:
        """Ask for children that are refused at once: nothing is in the table."""
        before = await self.children()
        done = await self.run("a", "spawn", *words)
        assert (done.status, done.out) == (1, b"")
        assert done.said(told), done.err
        assert await self.children() == before

    async def until(self, name: str, state: str) -> dict[str, Any]:
        """Wait for a state of a child; return the child."""
        row = (await self.children())[name]
        while row["state"] != state:
            await trio.sleep(0.1)
            row = (await self.children())[name]
        return row


@asynccontextmanager
async def two_nodes(where: Path, lease_s: float = CALM_S) -> AsyncIterator[Fleet]:
    with node() as one, node() as other:
        async with fleet_of(where, lease_s, a=one, b=other) as scene:
            yield Fleet(scene)


# spec FL4, Forms of `spawn`: all or none, at once.
async def test_what_has_no_place_is_refused_and_is_in_no_table(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as asked:
        done = await asked.run("a", "spawn", "-n", "3", "--name", "w", *SLEEP)
        assert (done.status, done.out, done.err) == (0, b"w-0\nw-1\nw-2\n", b"")
        assert {row["state"] for row in (await asked.children()).values()} == {
            "running"
        }
        await asked.refused("no node has these labels", "--needs", "tpu", *SLEEP)
        # Each of the two is somewhere, and no node has both.
        both = ("--needs", "a", "--needs", "b")
        await asked.refused("no node has these labels", *both, *SLEEP)
        await asked.refused("there is room for 3", "-n", "4", "--name", "x", *SLEEP)
        await asked.refused("the name is taken", "--name", "w-1", *SLEEP)
        await asked.refused("the name is taken", "-n", "2", "--name", "w", *SLEEP)
        await asked.refused("no such node", "--node", "c", *SLEEP)


# spec FL4, Forms of `spawn`: what waits has a name at once.
async def test_a_child_waits_for_a_place_only_where_it_was_asked_for(
    tmp_path: Path,
) -> None:
    async with two_nodes(tmp_path) as asked:
        full = ("-n", str(CAPACITY), "--name", "w", "--node", "a")
        assert (await asked.run("a", "spawn", *full, *SLEEP)).status == 0
        more = ("--node", "a", "--name", "x")
        await asked.refused("there is room for 0", *more, *SLEEP)
        for words in (more, ("--needs", "tpu", "--name", "y")):
            done = await asked.run("b", "spawn", "--wait", *words, *SLEEP)
            assert (done.status, done.out) == (0, f"{words[-1]}\n".encode())
        rows = await asked.children()
        for name in ("x", "y"):
            row = rows[name]
            assert (row["state"], row["node"], row["pid"]) == ("waiting", None, None)
            assert row["reason"]
        assert (await asked.run("b", "kill", "w-0")).status == 0
        assert (await asked.until("x", "running"))["node"] == "a"
        assert (await asked.children())["y"]["state"] == "waiting"
        assert (await asked.run("a", "kill", "y")).status == 0
        assert (await asked.until("y", "ended"))["incarnation"] == 0


# spec FL3, Forms of `spawn`: `--spread` is usual.
@pytest.mark.parametrize(
    ("words", "nodes"), [((), 2), (("--spread",), 2), (("--pack",), 1)]
)
async def test_children_are_spread_or_packed(
    tmp_path: Path, words: tuple[str, ...], nodes: int
) -> None:
    async with two_nodes(tmp_path) as asked:
        done = await asked.run("a", "spawn", "-n", "2", "--name", "w", *words, *SLEEP)
        assert done.status == 0, done.err
        on = {row["node"] for row in (await asked.children()).values()}
        assert len(on) == nodes


# spec FL3, FL11: the fields of Forms, no more and no fewer.
async def test_lists_have_the_fields_that_programs_read(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as asked:
        words = ("--name", "w", "--node", "b", "--restart", "on-failure")
        done = await asked.run("a", "spawn", *words, "--json", *SLEEP)
        (row,) = json.loads(done.out)
        shown = json.loads((await asked.run("a", "ps", "--json")).out)
        assert list(shown) == ["nodes", "children"]
        assert shown["children"] == [row]
        pid = row.pop("pid")
        assert (await asked.scene.call(asked.scene.daemons["b"].row, "w")).pid == pid
        assert row.pop("id")
        assert row == {
            "name": "w", "node": "b", "state": "running", "incarnation": 1,
            "restart": "on-failure", "reason": "", "status": None,
        }  # fmt: skip
        for node, name in zip(shown["nodes"], "ab", strict=True):
            assert node.pop("since") > 0
            assert node.pop("session")
            assert node == {
                "name": name, "state": "up", "reason": "", "capacity": CAPACITY,
                "labels": [name, "gpu"], "version": VERSION,
            }  # fmt: skip
        for where in "ab":
            done = await asked.run(where, "quota", "--json")
            assert json.loads(done.out) == {"accounts": []}


# spec FL7, FL11: the fields of Forms, no more and no fewer.
async def test_slices_have_the_fields_that_programs_read(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, lease_s=8.0) as asked:
        directory = asked.scene.directory
        directory.set_account(ACCOUNT, 1600.0, NEVER)
        for name, worst in (("a", 400.0), ("b", 200.0)):
            session = await asked.session(name)
            asks = AskSlice(name, session, ACCOUNT, 1, worst)
            directory.receive([encode(asks)])
        (account,) = await asked.accounts()
        slices = account.pop("slices")
        assert account == {
            "name": ACCOUNT, "limit": 1600.0, "spent": 0.0, "free": 1000.0,
            "window": NEVER,
        }  # fmt: skip
        assert len({row.pop("id") for row in slices}) == 2
        assert slices == [
            {"node": "a", "size": 400.0, "left": 400.0, "state": "open"},
            {"node": "b", "size": 200.0, "left": 200.0, "state": "open"},
        ]
        await asked.scene.kill("b")
        while slices[1]["state"] == "open":
            (account,) = await asked.accounts()
            slices = account["slices"]
        lost = slices[1]
        assert lost.pop("id")
        assert lost == {"node": "b", "size": 200.0, "left": 200.0, "state": "lost"}


ASKING = {
    ("ps",): 1,
    ("quota",): 1,
    ("top", "--once"): 1,
    ("logs", "w"): 1,
    ("kill", "w"): 1,
    ("trace", "w"): 1,
    ("diff", "w"): 2,
    ("commit", "w"): 2,
    ("forget", "b"): 1,
    ("spawn", *SLEEP): 1,
}
"""Commands that ask the directory and end, and their status where it is silent."""


# spec FL11: by its own word each gives up after 8 s, of the 10 that it has.
async def test_commands_say_that_the_directory_does_not_answer(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as asked, trio.open_nursery() as nursery:
        asked.scene.hold_requests("b")

        async def ask(status: int, *words: str) -> None:
            done = await asked.run("b", *words)
            assert (done.status, done.out) == (status, b""), words
            assert done.said("the fleet's directory does not answer within 8 s"), words

        for words, status in ASKING.items():
            nursery.start_soon(ask, status, *words)


# spec FL3, Forms of `logs` and `kill`: from any node.
async def test_a_child_is_read_and_signalled_from_any_node(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as asked:
        script = 'trap "echo got; exit 3" USR1; echo on $SANDHOST_FLEET_NODE;'
        script += " while :; do sleep 0.05; done"
        words = ("--name", "w", "--node", "a", "--", "sh", "-c", script)
        assert (await asked.run("b", "spawn", *words)).status == 0
        for where in "ab":
            while not (done := await asked.run(where, "logs", "w")).out:
                assert done.status == 0, done.err
            assert done.out == b"on a\n"
        async with trio.open_nursery() as nursery:

            async def follow() -> None:
                done = await asked.run("b", "logs", "-f", "w")
                assert (done.status, done.out) == (0, b"on a\ngot\n")

            nursery.start_soon(follow)
            done = await asked.run("b", "kill", "w", "--signal", "USR1")
            assert (done.status, done.out, done.err) == (0, b"", b"")
        assert (await asked.until("w", "ended"))["status"] == 3
        for name in ("logs", "kill", "trace"):
            done = await asked.run("b", name, "x")
            assert (done.status, done.said("'x'")) == (1, True), name


# spec FL1, Forms: a node that joins twice.
@pytest.mark.parametrize("name", ["up", "join"])
async def test_a_node_that_is_in_a_fleet_enters_none(tmp_path: Path, name: str) -> None:
    pytest.importorskip("ray")
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    words = {"up": (), "join": ("--address", "127.0.0.1:9", "--token-file", str(token))}
    async with two_nodes(tmp_path) as asked:
        done = await asked.run("b", name, *words[name])
        assert (done.status, done.out) == (1, b"")
        assert done.said("this node is in one already")
        shown = json.loads((await asked.run("b", "ps", "--json")).out)
        assert [row["state"] for row in shown["nodes"]] == ["up", "up"]


# spec FL5, Forms of `forget`: a node that may have children is not given up.
async def test_a_node_that_is_up_is_not_forgotten(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as asked:
        for name, told in (("b", "it is up"), ("c", "no such node")):
            done = await asked.run("a", "forget", name)
            assert (done.status, done.out) == (1, b"")
            assert done.said(told), done.err


@contextmanager
def control_alone(one: Daemon) -> Iterator[Daemon]:
    """Yield a daemon as one sees it who finds nothing of it but the control socket."""
    with TemporaryDirectory(dir="/tmp") as elsewhere:
        seen = copy(one)
        seen.where = Path(elsewhere)
        (seen.where / "run").mkdir()
        (seen.where / "run" / "control").symlink_to(one.where / "run" / "control")
        yield seen
        names = sorted(entry.name for entry in seen.where.rglob("*"))
        assert names == ["control", "run"]


def states(one: Daemon) -> list[str]:
    return [row.state for row in one.client.ps()]


# spec FL1
async def test_a_node_needs_nothing_of_its_daemon_but_the_control_socket(
    tmp_path: Path,
) -> None:
    with node() as one, control_alone(one) as seen:
        async with fleet_of(tmp_path, a=seen) as scene:
            asked = scene.client("a").ask
            program = {"command": ["sh", "-c", "echo said; exec sleep 600"]}
            await scene.call(asked, "spawn", {"name": "w", "program": program})
            # `ps` of the daemon shows an ended child no more; its report tells the next actor.
            await scene.kill("a")
            await scene.call(one.client.kill, "w", "KILL")
            await eventually(lambda: "running" not in states(one))
            await scene.begin("a")
            over = await scene.call(asked, "wait", {"name": "w"})
            assert (over["state"], over["status"]) == ("ended", 128 + 9)
            words = ("--control", scene.control("a"), "w")
            done = await scene.call(sandhost, "fleet", "logs", *words)
            assert (done.status, done.out) == (0, b"said\n")
            done = await scene.call(sandhost, "fleet", "trace", *words)
            assert (done.status, b"sleep 600" in done.out) == (0, True)


# spec FL3, Forms: all take `--control`; a wrong command line is status 2.
def test_every_command_takes_the_control_socket() -> None:
    for name, command in fleet.commands.items():
        options = {word for param in command.params for word in param.opts}
        assert "--control" in options, name


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("spawn",), "give a command after --"),
        (("run",), "give a command after --"),
        (("spawn", "-n", "0", "--", "true"), "-n"),
        (("spawn", "-n", "many", "--", "true"), "-n"),
        (("spawn", "--restart", "often", "--", "true"), "--restart"),
        (("kill",), "NAME"),
        (("forget",), "NODE"),
        (("join", "--address", "10.0.0.1:6379"), "--token-file"),
        (("ps", "w"), "w"),
        (("nothing",), "nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_wrong_command_line_is_told(words: tuple[str, ...], told: str) -> None:
    done = sandhost("fleet", *words)
    assert (done.status, done.out) == (2, b"")
    assert done.said(told), done.err
