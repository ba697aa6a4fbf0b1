"""A child's network over the control socket and by the command `sandhost network`."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from supervisor.control.networks import NetworkOrders
from supervisor.control.server import Orders, serve_control
from supervisor.network.section import NetworkSection
from supervisor.network.service import open_network
from supervisor.sandbox.plan import PROFILES
from tests.helpers.command import Outcome, sandhost
from tests.helpers.stage import Puppet, Stage, open_stage

pytestmark = pytest.mark.slow

ASK = """
import socket
def ask(name):
    try:
        return socket.getaddrinfo(name, 443, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except OSError as why:
        return why.errno
"""
UNKNOWN = -2  # EAI_NONAME


class Scene:
    """A host with a control socket, and one child."""

    def __init__(self, stage: Stage, path: str, puppet: Puppet) -> None:
        self.stage = stage
        self.puppet = puppet
        self._path = path

    @property
    def id(self) -> str:
        """Of the child."""
        (child_id,) = self.stage.host.children
        return child_id

    async def network(self, *words: str) -> Outcome:
        """Run `sandhost network`."""
        return await self._run("network", *words)

    async def figures(self) -> dict[str, Any]:
        """Return what the command tells of the child."""
        done = await self.network(self.id, "--json")
        assert not done.status, done.err
        figures: dict[str, Any] = json.loads(done.out)
        return figures

    async def row(self) -> dict[str, Any]:
        """Return what `ps` tells of the child's network."""
        (row,) = json.loads((await self._run("ps", "--json")).out)
        network: dict[str, Any] = row["network"]
        return network

    async def _run(self, *words: str) -> Outcome:
        run = partial(sandhost, *words, "--control", self._path)
        return await trio.to_thread.run_sync(run)


@asynccontextmanager
async def scene(where: Path, **keys: object) -> AsyncIterator[Scene]:
    """Run a host whose child has the network that the keys say."""
    where.chmod(0o755)  # noqa: ASYNC240 - of the test's own
    async with open_stage(where, log_level="WARNING") as stage:
        stage.sandbox = PROFILES["auto"]
        async with open_network(stage.host), trio.open_nursery() as nursery:
            orders = Orders()
            NetworkOrders(stage.host).add_to(orders)
            path = str(where / "control")
            await nursery.start(serve_control, stage.host, path, orders)
            puppet = await stage.puppet(**keys)
            await puppet.do(f"exec({ASK!r}, globals())")
            yield Scene(stage, path, puppet)
            await stage.host.stop(grace_s=0.0)
            nursery.cancel_scope.cancel()


def _rules(*rules: str) -> dict[str, Any]:
    return {"network": "rules", "network_keys": NetworkSection(network=list(rules))}


# spec NET11: what was refused is told with the rule that would allow it.
async def test_what_a_child_was_refused_is_told(tmp_path: Path) -> None:
    async with scene(tmp_path, **_rules("a.test", "b.test:80")) as stage:
        assert await stage.puppet.do("ask('c.test')") == UNKNOWN
        figures = await stage.figures()
        (refused,) = figures.pop("refused")
        assert (refused["name"], refused["port"]) == ("c.test", None)
        assert (refused["reason"], refused["rule"]) == ("no-rule", "c.test:443")
        assert figures == {
            "child_id": stage.id,
            "name": None,
            "mode": "rules",
            "rules": ["a.test", "b.test:80"],
            "names": [],
            "published": [],
            "connections": 0,
            "open": 0,
            "bytes_in": 0,
            "bytes_out": 0,
        }
        row = await stage.row()
        assert row.pop("refused") == refused["count"]
        keys = ("mode", "rules", "published", "connections", "open")
        assert row == {key: figures[key] for key in (*keys, "bytes_in", "bytes_out")}
        text = (await stage.network(stage.id)).out
        assert b"network rules: a.test, b.test:80" in text
        assert b"c.test  refused" in text
        assert b"no-rule; the rule 'c.test:443' would allow it" in text


# spec NET12: rules of a running child change, and the next question obeys.
async def test_rules_of_a_running_child_change(tmp_path: Path) -> None:
    async with scene(tmp_path, **_rules("a.test")) as stage:
        assert await stage.puppet.do("ask('b.test')") == UNKNOWN
        words = ("--allow", "b.test:443,8080", "--deny", "a.test", "--cut")
        done = await stage.network(stage.id, *words)
        assert (done.status, done.out) == (0, b""), done.err
        assert await stage.puppet.do("ask('b.test')") == "198.18.0.2"
        assert await stage.puppet.do("ask('a.test')") == UNKNOWN
        assert (await stage.row())["rules"] == ["b.test:443,8080", "!a.test:443"]
        assert stage.stage.events("network.changed")


# spec NET12: unknown, or a faulty rule: one line on stderr, exit 1, nothing changed.
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--allow", "x..y"), "cannot read the rule 'x..y'"),
        (("--deny", "!a.test"), "it begins with !"),
        (("--allow", "b.test", "--allow", "10.1.0.5/8"), "host bits"),
    ],
)
async def test_a_faulty_change_changes_nothing(
    words: tuple[str, ...], text: str, tmp_path: Path
) -> None:
    async with scene(tmp_path, **_rules("a.test")) as stage:
        done = await stage.network(stage.id, *words)
        assert done.status == 1
        assert text in done.err.decode()
        assert done.err.count(b"\n") == 1
        assert (await stage.row())["rules"] == ["a.test"]
        unknown = await stage.network("nobody", "--allow", "b.test")
        assert unknown.status == 1
        assert b"no such child runs" in unknown.err


# spec NET13: `--rules` prints what would have sufficed, of a child that learns.
async def test_rules_are_printed_of_a_child_that_learns(tmp_path: Path) -> None:
    keys = NetworkSection(network="learn", within=["*"])
    async with scene(tmp_path, network="learn", network_keys=keys) as stage:
        done = await stage.network(stage.id, "--rules")
        assert (done.status, done.out) == (0, b"")
        assert (await stage.row())["mode"] == "learn"
    async with scene(tmp_path, **_rules("a.test")) as stage:
        done = await stage.network(stage.id, "--rules")
        assert done.status == 2
        assert b"does not learn" in done.err


# spec NET12: a child without rules has none to change.
async def test_a_child_without_names_has_figures_and_no_rules(tmp_path: Path) -> None:
    async with scene(tmp_path) as stage:
        figures = await stage.figures()
        assert (figures["mode"], figures["rules"]) == ("none", [])
        assert (await stage.row())["mode"] == "none"
        done = await stage.network(stage.id, "--allow", "a.test")
        assert done.status == 1
        assert b"it has no rules" in done.err
