"""Files of tools in their child's root count against the child's limits."""

import errno
import math
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio
import trio.testing

import vfs.growth
from protocol.toolexec import requests
from supervisor.toolexec import growth
from supervisor.toolexec.ending import AT_ONCE
from supervisor.toolexec.execution import PASSED_NOTE, Execution
from supervisor.toolexec.service import read_state
from tests.helpers.stage import eventually
from tests.helpers.toolscene import Reply, Scene, Tenant, opened_scene
from vfs.growth import MovedError
from vfs.places import Place

pytestmark = pytest.mark.slow

ROOM = 100_000


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    """A host; its workspace, the child's root, holds something before."""
    async with opened_scene(tmp_path) as opened:
        (opened.workspace / "old").write_bytes(b"o" * 50_000)
        (opened.workspace / "dir").mkdir()
        yield opened


async def bounded(scene: Scene, **limits: int) -> Tenant:
    """Start a child whose root is the workspace."""
    return await scene.tenant(root=str(scene.workspace), **limits)


async def sh(scene: Scene, tenant: Tenant, script: str) -> Reply:
    """Run a script as a tool of a child."""
    line = f"tool=sh&arg=-c&arg={script.replace(' ', '+').replace('&', '%26')}"
    return await scene.say(
        scene.request(line.encode(), token=tenant.token), tenant=tenant
    )


def used(tenant: Tenant) -> tuple[int, int]:
    """Return what is charged to a child."""
    session = tenant.puppet.child.session
    assert session is not None
    ledger = session.client.ledger
    return ledger.size_bytes.used, ledger.files.used


# spec S7, E19
async def test_what_a_tool_makes_is_charged_when_its_exit_code_is_told(
    scene: Scene,
) -> None:
    tenant = await bounded(scene, max_bytes=ROOM, max_files=10)
    assert (
        await sh(scene, tenant, "head -c 30000 /dev/zero >dir/a; ln -s a b")
    ).code == 0
    assert used(tenant) == (30_001, 2)  # a link has a length, of its target
    fileno = await tenant.puppet.open(b"c", b"w")  # the child's own, beside that
    assert (
        await tenant.puppet.ask(b"WRITE %d 5000\n" % fileno + b"c" * 5000) == b"OK 5000"
    )
    assert used(tenant) == (35_001, 3)
    assert (await sh(scene, tenant, "true")).code == 0
    assert used(tenant) == (35_001, 3)
    full = b"ERROR failed to write: Disk quota exceeded"
    wanted = ROOM - 35_001 + 1
    said = await tenant.puppet.ask(b"WRITE %d %d\n" % (fileno, wanted) + b"c" * wanted)
    assert said == full
    # Removed files are given back, also what lay there before: it is growth that counts.
    assert (await sh(scene, tenant, "rm dir/a old; mv c dir/c")).code == 0
    assert used(tenant) == (5_001 - 50_000, 1)


# spec S7
async def test_a_tool_that_makes_more_than_its_child_may_have_is_ended(
    scene: Scene,
) -> None:
    tenant = await bounded(scene, max_bytes=ROOM)
    with trio.fail_after(30):
        reply = await sh(scene, tenant, "echo begun; yes >f")
    assert reply.code == 128 + 9
    note = b"sandhost: ended, for a limit of its child is passed: bytes\n"
    assert reply.body == b"begun\n" + note
    assert used(tenant)[0] > ROOM


# spec S7
async def test_while_a_limit_is_passed_no_tool_is_started(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "PAUSE_S", math.inf)
    tenant = await bounded(scene, max_bytes=ROOM, max_files=3)
    assert await tenant.puppet.ask(b"MKDIR false made\n") == b"OK"
    refused = "forbidden: tool 'sh' is not permitted while a limit is passed: %s\n"
    for script, limit, names in (
        ("head -c 300000 /dev/zero >f", "bytes", [b"f"]),
        ("touch 1 2 3", "files", [b"1", b"2", b"3"]),
    ):
        # It is done before anybody looks; what it left is counted all the same.
        assert (await sh(scene, tenant, script)).code == 0
        for _ in range(3):
            again = await sh(scene, tenant, "head -c 300000 /dev/zero >more")
            assert (again.status, again.code) == (403, requests.REFUSED)
            assert again.body == (refused % limit).encode()
        assert not (scene.workspace / "more").exists()
        # The child makes room for itself, and has tools again.
        for name in names:
            assert await tenant.puppet.ask(b"REMOVE false %b\n" % name) == b"OK"
        assert (await sh(scene, tenant, "true")).code == 0
    assert used(tenant) == (0, 1)


async def test_a_start_waits_for_the_look_at_what_was_left(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "LAST_LOOK_S", 0.01)
    monkeypatch.setattr(growth, "PAUSE_S", math.inf)
    tenant = await bounded(scene, max_bytes=ROOM)
    assert (await sh(scene, tenant, "true")).code == 0
    real, let_go = vfs.growth.content_of, threading.Event()

    def slow(places: Iterable[Place]) -> vfs.growth.PlacesContent:
        let_go.wait(30)
        return real(places)

    monkeypatch.setattr(vfs.growth, "content_of", slow)
    assert (await sh(scene, tenant, "head -c 300000 /dev/zero >f")).code == 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_refusal, scene, tenant)
        one = scene.tool.children[tenant.puppet.child.id].growth
        assert one is not None
        lock = one.lock
        await eventually(lambda: lock.statistics().tasks_waiting > 0)
        let_go.set()
    assert not (scene.workspace / "g").exists()


async def expect_refusal(scene: Scene, tenant: Tenant) -> None:
    """Run a tool that is refused."""
    assert (await sh(scene, tenant, "echo x >g")).status == 403


async def test_what_could_not_be_looked_at_is_looked_at_before_a_start(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "PAUSE_S", math.inf)
    tenant = await bounded(scene, max_bytes=ROOM)
    assert (await sh(scene, tenant, "true")).code == 0

    def broken(_places: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(vfs.growth, "content_of", broken)
        assert (await sh(scene, tenant, "head -c 300000 /dev/zero >f")).code == 0
        assert (await sh(scene, tenant, "echo x >g")).status == 500
    assert (await sh(scene, tenant, "echo x >g")).status == 403
    assert not (scene.workspace / "g").exists()


# spec S7
async def test_many_small_files_are_too_many_files(scene: Scene) -> None:
    tenant = await bounded(scene, max_files=50)
    script = "i=0; while :; do mkdir d$i; i=$((i%2B1)); done"
    with trio.fail_after(30):
        reply = await sh(scene, tenant, script)
    assert reply.code == 128 + 9
    assert reply.body.endswith(b"limit of its child is passed: files\n")
    assert await tenant.puppet.ask(b"OPEN e w false\n") == (
        b"ERROR failed to open file 'e': Disk quota exceeded"
    )


async def test_another_child_does_not_feel_it(scene: Scene, tmp_path: Path) -> None:
    tenant = await bounded(scene, max_bytes=ROOM)
    (tmp_path / "else").mkdir()
    other = await scene.tenant(root=str(tmp_path / "else"), max_bytes=ROOM)
    assert (await sh(scene, tenant, "yes >f")).code == 128 + 9
    fileno = await other.puppet.open(b"mine", b"w")
    assert await other.puppet.ask(b"WRITE %d 3\nabc" % fileno) == b"OK 3"
    assert used(other) == (3, 0), "files are not bounded, and not counted"


async def test_who_has_no_such_limit_is_not_looked_at(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    monkeypatch.setattr(vfs.growth, "content_of", looks.append)
    tenant = await bounded(scene)
    assert (await sh(scene, tenant, "echo x >f")).code == 0
    assert not looks
    assert used(tenant) == (0, 0)


async def test_a_root_that_cannot_be_looked_at_runs_nothing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await bounded(scene, max_bytes=ROOM)

    def broken(_places: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(vfs.growth, "content_of", broken)
    reply = await sh(scene, tenant, "echo x >f")
    assert reply.status == 500
    assert not (scene.workspace / "f").exists()


async def test_a_tool_that_keeps_the_host_from_looking_is_ended(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await bounded(scene, max_bytes=ROOM)
    assert (await sh(scene, tenant, "true")).code == 0
    looks = []

    def moving(_places: object) -> None:
        looks.append(1)
        raise MovedError

    monkeypatch.setattr(vfs.growth, "content_of", moving)
    with trio.fail_after(30):
        reply = await sh(scene, tenant, "sleep 1000")
    assert reply.code == 128 + 9
    assert b"not known: directories are moved again and again\n" in reply.body
    assert len(looks) >= growth.TRIES


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN])
async def test_a_tool_outlives_a_moment_in_which_the_host_lacks_something_for_a_look(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tenant = await bounded(scene, max_bytes=ROOM)
    assert (await sh(scene, tenant, "true")).code == 0
    real, tries = vfs.growth.content_of, []

    def lacking(places: Iterable[Place]) -> vfs.growth.PlacesContent:
        tries.append(1)
        if len(tries) <= 3:
            raise OSError(number, os.strerror(number))
        (scene.workspace / "go").touch()
        return real(places)

    monkeypatch.setattr(vfs.growth, "content_of", lacking)
    with trio.fail_after(30):
        script = "until test -e go; do sleep 0.01; done; echo done"
        reply = await sh(scene, tenant, script)
    assert (reply.code, reply.body) == (0, b"done\n")


async def test_a_tool_does_not_run_on_where_nobody_can_look(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "BLIND_S", 0.0)
    tenant = await bounded(scene, max_bytes=ROOM)
    assert (await sh(scene, tenant, "true")).code == 0

    def lacking(_places: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(vfs.growth, "content_of", lacking)
    with trio.fail_after(30):
        reply = await sh(scene, tenant, "sleep 1000")
    assert reply.code == 128 + 9
    assert b"not known: Too many open files\n" in reply.body


async def test_one_look_answers_all_who_wait_for_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await bounded(scene, max_bytes=ROOM)
    one = growth.growth_of(tenant.puppet.child)
    assert one is not None
    await one.begin("sh")
    go_on = threading.Event()
    looks = []

    def waiting(_places: object) -> vfs.growth.PlacesContent:
        looks.append(1)
        go_on.wait(30)
        return vfs.growth.PlacesContent(0, 0, 0)

    monkeypatch.setattr(vfs.growth, "content_of", waiting)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.look)
        await eventually(lambda: len(looks) == 1)
        for _ in range(5):  # the first look may be older than their request
            nursery.start_soon(one.look)
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()
    assert len(looks) == 2


async def test_a_file_that_is_removed_while_it_is_open_is_given_back(
    scene: Scene,
) -> None:
    tenant = await bounded(scene, max_bytes=ROOM)
    fileno = await tenant.puppet.open(b"f", b"w")
    assert await tenant.puppet.ask(b"WRITE %d 700\n" % fileno + b"f" * 700) == b"OK 700"
    (scene.workspace / "f").unlink()
    assert (await sh(scene, tenant, "echo abc >g")).code == 0
    assert used(tenant)[0] == 704
    assert await tenant.puppet.ask(b"CLOSE %d\n" % fileno) == b"OK"
    assert (await sh(scene, tenant, "true")).code == 0
    assert used(tenant)[0] == 4


async def test_an_exit_code_does_not_wait_long_for_a_look(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await bounded(scene, max_bytes=ROOM)
    monkeypatch.setattr(growth, "LAST_LOOK_S", 0.01)
    monkeypatch.setattr(growth, "PAUSE_S", math.inf)
    assert (await sh(scene, tenant, "true")).code == 0
    let_go = trio.Event()
    real = growth.Growth.look

    async def slow(self: growth.Growth) -> None:
        await let_go.wait()
        await real(self)

    monkeypatch.setattr(growth.Growth, "look", slow)
    with trio.fail_after(30):
        assert (await sh(scene, tenant, "echo abc >f")).code == 0
    assert used(tenant)[0] == 0
    let_go.set()
    await eventually(lambda: used(tenant)[0] == 4)


# A tool that is killed for a limit is handed over as that, and killed there.
# spec S7
async def test_a_tool_that_passed_a_limit_is_killed_by_the_next_program(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = await bounded(scene, max_bytes=ROOM)
    owner = scene.tool.children[tenant.puppet.child.id]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sh, scene, tenant, "sleep 1000")
        await eventually(lambda: any(one.has_begun for one in owner.live.values()))
        (running,) = owner.live.values()
        running.passed = "bytes"
        running.end(AT_ONCE)
        state, _ = scene.tool.snapshot(ExitStack())
    left = read_state(state)
    assert left is not None
    (handed,) = [one for child in left.children for one in child.executions]
    assert handed.passed == "bytes"
    run = Execution.run

    def run_again(self: Execution, nursery: trio.Nursery, timeout_s: float) -> None:
        self.passed = handed.passed
        run(self, nursery, timeout_s)

    monkeypatch.setattr(Execution, "run", run_again)
    reply = await sh(scene, tenant, "sleep 1000")
    assert reply.code == 128 + signal.SIGKILL
    assert reply.body == PASSED_NOTE % b"bytes"
