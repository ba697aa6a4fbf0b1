"""Calls of fleet children are paid from one account, whatever node they run on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.fleet.clocks import read_clocks
from supervisor.fleet.messages import AskSlice
from supervisor.fleet.slices import ACCOUNT, NEVER
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.fleetscene import CALM_S, Scene, fleet
from tests.helpers.provider import key_file, provider_process
from tests.helpers.sessions import chat_request
from tests.helpers.stage import PYTHON

pytestmark = pytest.mark.slow

ASK = """
import os, pathlib, socket, time
door = socket.socket(fileno=3)
door.sendall({request!r})
reply = door.makefile("rb").readline()
print(reply.decode(), end="", flush=True)
"""


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[str]:
    """Return `[fleet]` and `[llm]` with a stand-in for a provider."""
    with provider_process(tmp_path / "served") as base_url:
        keys = f'base_url = "{base_url}"\napi_key_file = "{key_file(tmp_path)}"\n'
        yield f"[fleet]\n[llm]\n{keys}max_tokens = 10\n"


async def joined(scene: Scene, one: Daemon, node: str) -> None:
    """Link a daemon, and wait until its node is up."""
    await scene.link(str(one.where / "run" / "control"), node)
    await scene.until(lambda: scene.node(node) == "up")


def open_account(scene: Scene, limit: float) -> None:
    """Make the account of the fleet."""
    scene.do(scene.directory.open_account(ACCOUNT, limit, NEVER, read_clocks()))


def asks(scene: Scene) -> list[AskSlice]:
    """Return the requests for slices, each once."""
    heard = (one for one in scene.heard if isinstance(one, AskSlice))
    return list({(one.node, one.number): one for one in heard}.values())


def has_served(where: Path) -> bool:
    """Return whether the provider was asked anything."""
    path = where / "served"
    return path.exists() and bool(path.read_bytes())


async def ask(scene: Scene, one: Daemon, name: str, node: str | None = None) -> bytes:
    """Run a child that asks the model once; return the reply."""
    scene.spawn(
        name, *PYTHON, "-c", ASK.format(request=chat_request(b"abcd")), node=node
    )
    await scene.until(lambda: scene.child(name).state == "ended")
    return one.log(name)


# spec FL7
async def test_a_call_is_paid_from_a_slice_and_settled(
    tmp_path: Path, llm: str
) -> None:
    with daemon(tmp_path, llm) as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            open_account(scene, 1000.0)
            await joined(scene, one, "a")
            assert (await ask(scene, one, "web")).startswith(b"OK ")
            await scene.until(lambda: scene.directory.quota().accounts[0].spent > 0)
            (account,) = scene.directory.quota().accounts
            (taken,) = account.slices
            assert account.spent == taken.size - taken.left
            assert account.free == account.limit - taken.size


# spec FL7
async def test_a_call_for_which_the_fleet_has_no_room_is_refused(
    tmp_path: Path, llm: str
) -> None:
    with daemon(tmp_path, llm) as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            open_account(scene, 3.0)
            await joined(scene, one, "a")
            assert b"quota" in (await ask(scene, one, "web")).lower()
            assert not has_served(tmp_path)


# spec FL7
async def test_without_an_account_no_slice_is_asked_for(
    tmp_path: Path, llm: str
) -> None:
    with daemon(tmp_path, llm) as one:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            await joined(scene, one, "a")
            assert (await ask(scene, one, "web")).startswith(b"OK ")
            assert not asks(scene)


# spec FL7
async def test_a_directory_that_is_away_costs_a_call_and_no_money(
    tmp_path: Path, llm: str
) -> None:
    with daemon(tmp_path, llm) as one:
        async with fleet(tmp_path / "head", lease_s=60.0) as scene:
            open_account(scene, 1000.0)
            await joined(scene, one, "a")
            scene.deaf_to = "AskSlice"
            said = await ask(scene, one, "web")
            assert b"the directory of the fleet does not answer" in said
            assert scene.directory.quota().accounts[0].free == 1000.0


# spec FL7
async def test_what_is_reserved_when_a_daemon_dies_counts_as_spent(
    tmp_path: Path, llm: str
) -> None:
    script = ASK.format(request=chat_request(b"!wait=600 abcd"))
    async with fleet(tmp_path / "head", lease_s=3.0) as scene:
        open_account(scene, 1000.0)
        with daemon(tmp_path, llm) as one:
            await joined(scene, one, "a")
            scene.spawn("web", *PYTHON, "-c", script)
            await scene.until(lambda: scene.directory.quota().accounts[0].slices)
            await scene.until(lambda: has_served(tmp_path))
            one.process.kill()
            one.process.wait()
        with daemon(tmp_path, llm) as again:
            await joined(scene, again, "a")
            await scene.until(lambda: not scene.directory.quota().accounts[0].slices)
            (account,) = scene.directory.quota().accounts
            (asked,) = asks(scene)
            assert account.spent == asked.worst


# spec FL7
async def test_one_calls_head_room_is_given_to_one_of_two_nodes(
    tmp_path: Path, llm: str
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with daemon(tmp_path / "a", llm) as one, daemon(tmp_path / "b", llm) as other:
        async with fleet(tmp_path / "head", lease_s=CALM_S) as scene:
            open_account(scene, 100.0)
            await joined(scene, one, "a")
            await joined(scene, other, "b")
            script = ASK.format(request=chat_request(b"!wait=1 abcd"))
            for node in ("a", "b"):
                scene.spawn(f"web-{node}", *PYTHON, "-c", script, node=node)
            await scene.until(lambda: scene.child("web-a").state == "ended")
            await scene.until(lambda: scene.child("web-b").state == "ended")
            said = [one.log("web-a"), other.log("web-b")]
            assert all(asked.worst <= 100.0 < 2 * asked.worst for asked in asks(scene))
            assert sum(reply.startswith(b"OK ") for reply in said) == 1
