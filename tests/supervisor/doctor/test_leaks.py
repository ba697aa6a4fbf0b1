"""A host's tables against /proc.

Everything it holds is explained, every leak is seen.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from hostlib.linux.holdings import Baseline
from supervisor.control.server import serve_control
from supervisor.doctor import leaks
from supervisor.doctor.leaks import check_host, named_descriptors
from supervisor.sandbox.plan import make_profile
from supervisor.sandbox.scratch import Scratch
from tests.helpers.spawning import ROOT, watching
from tests.helpers.stage import Stage, eventually, stage
from tests.helpers.stock import stock_of
from vfs.payload import PayloadBudget

pytestmark = pytest.mark.slow

__all__ = ["stage"]

ASKING = (
    "import sys; from supervisor.cli.doctor import find_leaks;"
    " text, status = find_leaks(sys.argv[1], as_text=False);"
    " open(sys.argv[2], 'w').write(text); sys.exit(status)"
)


def own(stage: Stage, *numbers: int) -> None:
    """Say that descriptors of this process are the test's and not the host's."""
    stage.host.holders.add(lambda: [(fd, "test") for fd in numbers])


@contextlib.contextmanager
def leaked() -> Iterator[int]:
    """A descriptor that nobody explains."""
    fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


async def clean(stage: Stage) -> dict[str, Any]:
    """Check, and expect to find nothing; gives the report."""
    report: dict[str, Any] = await check_host(stage.host)
    found = {k: v for k, v in report.items() if isinstance(v, list) and v}
    assert report["clean"], found
    assert not found
    assert not any(report["counts"].values())
    return report


# ---------------------------------------------------------------- nothing to find


# spec S4
@pytest.mark.parametrize("transport", ["socketpair", "pipes"])
async def test_a_host_at_work_explains_everything(stage: Stage, transport: str) -> None:
    puppet = await stage.puppet(transport=transport, publish="on-close")
    await puppet.open(b"a", b"w")
    await puppet.open(b"b", b"a")
    if transport == "socketpair":
        await puppet.do("attached()")
    report = await clean(stage)
    explained = report["explained"]
    assert explained["open file"] == 3  # a staged file holds its directory too
    assert explained["pidfd"] == 1
    assert explained["working directory"] == 1
    assert explained["root or grant"] == 1
    # Its own and the attached one; two pipes and the socket beside them.
    assert explained["connection"] == (2 if transport == "socketpair" else 3)
    assert explained["pump"] == 2
    assert explained["launchpad"] == 2
    assert explained["journal"] == 1


# spec S4
async def test_nothing_is_found_after_a_child_was_killed(stage: Stage) -> None:
    puppet = await stage.puppet()
    await puppet.open(b"a", b"w")
    await puppet.do("daemon()")
    puppet.tell("send(b'WRITE 1000 1000000\\n' + bytes(5000))")
    await puppet.kill()
    report = await clean(stage)
    assert set(report["explained"]) <= {
        "standard",
        "pump",
        "door sockets",
        "launchpad",
        "journal",
        "table of mounts",
        "test",
    }


async def test_children_that_come_and_go_are_no_leaks(stage: Stage) -> None:
    going_on = True

    async def come_and_go() -> None:
        while going_on:
            await (await stage.spawn("/bin/true")).wait_gone()

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(come_and_go)
        for _ in range(3):
            await clean(stage)
        going_on = False


async def test_a_spooled_payload_is_explained(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.host.budget = PayloadBudget(0)
    puppet = await stage.puppet()
    fileno = await puppet.open(b"a", b"w")
    puppet.tell(f"send(b'WRITE {fileno} 100000\\n' + bytes(50_000))")
    await puppet.hear()
    await eventually(lambda: "payload" in named_descriptors(stage.host).values())
    session = puppet.child.session
    assert session is not None
    payload = session.inbound.payload
    assert payload is not None
    assert payload.is_spooled
    await clean(stage)
    copy = os.dup(payload.descriptors()[0])  # as a mapping keeps one of its own
    await clean(stage)
    os.close(copy)
    assert await puppet.do("send(bytes(50_000)) and line()") == b"OK 100000"


# I1
async def test_a_file_that_a_thread_is_closing_is_explained(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    puppet = await stage.puppet(durability="close")
    fileno = await puppet.open(b"a", b"w")
    fd = stage.host.fs.tables.files[fileno].handle.fd
    let_go, fsync = threading.Event(), os.fsync

    def slow(number: int) -> None:
        let_go.wait(60)
        fsync(number)

    monkeypatch.setattr(os, "fsync", slow)
    puppet.tell(f"ask(b'CLOSE {fileno}\\n')")
    try:
        await eventually(lambda: fileno not in stage.host.fs.tables.files)
        assert named_descriptors(stage.host)[fd] == "open file"
        await clean(stage)
    finally:
        let_go.set()
    assert await puppet.hear() == b"OK"
    assert "open file" not in named_descriptors(stage.host).values()


async def test_a_narrowed_client_explains_its_new_places(stage: Stage) -> None:
    (stage.root / "sub").mkdir()
    puppet = await stage.puppet()
    rights = b'{"read":["sub"]}'
    reply = await puppet.ask(b"NARROW %d\n%b" % (len(rights), rights))
    assert reply.startswith(b"OK")
    assert (await clean(stage))["explained"]["root or grant"] == 2


async def test_a_scratch_directory_is_explained_by_its_holder(stage: Stage) -> None:
    scratch = Scratch(None)
    stage.host.holders.add(scratch.descriptors)
    report = await clean(stage)
    assert report["explained"]["scratch directory"] == 1
    assert await scratch.remove() is None
    assert "scratch directory" not in (await clean(stage))["explained"]


# ---------------------------------------------------------------- descriptors


async def test_a_descriptor_that_nobody_explains_is_shown(stage: Stage) -> None:
    with leaked() as fd:
        report = await check_host(stage.host)
    assert not report["clean"]
    assert report["descriptors"] == [{"fd": fd, "link": "/dev/null"}]
    assert report["counts"] == {
        "descriptors": 1,
        "rows": 0,
        "processes": 0,
        "zombies": 0,
        "staged": 0,
        "workspaces": 0,
    }


async def test_a_copy_of_an_explained_descriptor_is_a_leak(stage: Stage) -> None:
    puppet = await stage.puppet()
    session = puppet.child.session
    assert session is not None
    copy = os.dup(session.read_fd)
    report: dict[str, Any] = await check_host(stage.host)
    os.close(copy)
    assert [row["fd"] for row in report["descriptors"]] == [copy]


async def test_what_was_there_before_the_host_is_not_its(tmp_path: Path) -> None:
    with leaked() as fd:
        baseline = Baseline.now()
        assert baseline.descriptors[fd] == "/dev/null"
    assert fd not in Baseline.now().descriptors


async def test_a_number_that_was_given_anew_is_not_excused(stage: Stage) -> None:
    with leaked() as fd:
        stage.host.baseline.descriptors[fd] = "/dev/zero"
        report: dict[str, Any] = await check_host(stage.host)
        assert [row["fd"] for row in report["descriptors"]] == [fd]
        stage.host.baseline.descriptors[fd] = "/dev/null"
        await clean(stage)


async def test_what_is_there_for_a_moment_is_no_leak(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = 0
    with contextlib.ExitStack() as stack:
        look = leaks.list_descriptors

        def meanwhile(host: Any) -> Any:
            nonlocal moments
            moments += 1
            if moments < leaks.ROUNDS:
                return look(host)
            stack.close()
            return look(host)

        monkeypatch.setattr(leaks, "list_descriptors", meanwhile)
        stack.enter_context(leaked())
        await clean(stage)
    assert moments == leaks.ROUNDS


# ---------------------------------------------------------------- rows


# I5
async def test_a_client_whose_child_is_gone_is_shown(stage: Stage) -> None:
    puppet = await stage.puppet()
    client = stage.host.fs.tables.clients[puppet.client_id]
    await puppet.kill()
    stage.host.fs.tables.clients[client.id] = client
    report = await check_host(stage.host)
    del stage.host.fs.tables.clients[client.id]
    assert report["rows"] == [
        {"table": "clients", "id": client.id, "why": "its child is gone"}
    ]


async def test_a_client_that_nobody_serves_is_shown(stage: Stage) -> None:
    puppet = await stage.puppet()
    fs = stage.host.fs
    served = fs.tables.clients[puppet.client_id]
    ghost = fs.connect(served.policy, served.ledger, served.pipe_id)
    report = await check_host(stage.host)
    fs.disconnect(ghost, "test")
    assert report["rows"] == [
        {"table": "clients", "id": ghost.id, "why": "no connection is its"}
    ]


async def test_a_file_whose_client_is_gone_is_shown(stage: Stage) -> None:
    puppet = await stage.puppet()
    fileno = await puppet.open(b"a", b"w")
    tables = stage.host.fs.tables
    file = tables.files[fileno]
    await puppet.kill()
    tables.files[fileno] = file
    report = await check_host(stage.host)
    del tables.files[fileno]
    assert report["rows"] == [
        {"table": "files", "id": fileno, "why": "its client is gone"}
    ]


# attack 27: the child's pid is another process's now
async def test_a_child_whose_process_is_another_is_shown(stage: Stage) -> None:
    puppet = await stage.puppet()
    process = puppet.child.process
    assert process is not None
    process.create_time -= 1
    report: dict[str, Any] = await check_host(stage.host)
    process.create_time += 1
    assert report["rows"] == [
        {"table": "children", "id": puppet.child.id, "why": "its process is gone"}
    ]
    # Nor does the row explain the process that has the number.
    assert [row["pid"] for row in report["processes"]] == [puppet.pid]


# ---------------------------------------------------------------- processes


@contextlib.asynccontextmanager
async def stopped(pid: int) -> AsyncIterator[int]:
    """Stop a process for the length of the block; gives its pidfd."""
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGSTOP)
        yield pidfd
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGCONT)
        os.close(pidfd)


@contextlib.contextmanager
def own_sleeper() -> Iterator[tuple[int, int]]:
    """A child of this process, not of the launchpad: (pid, pidfd); killed by a test."""
    pid = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
    pidfd = os.pidfd_open(pid)
    try:
        yield pid, pidfd
    finally:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)


# spec S4, attack 28
async def test_what_a_dead_child_left_is_shown_until_it_is_swept(stage: Stage) -> None:
    puppet = await stage.puppet()
    daemon = await puppet.do("daemon()")
    process = puppet.child.process
    assert process is not None
    with watching([puppet.pid]) as (dead,):
        own(stage, dead.pidfd)
        async with stopped(stage.launchpad) as pidfd:
            own(stage, pidfd)
            process.send_signal(signal.SIGKILL)
            await dead.ended()
            report: dict[str, Any] = await check_host(stage.host)
    assert [row["pid"] for row in report["processes"]] == [daemon]
    assert [row["pid"] for row in report["zombies"]] == [puppet.pid]
    await puppet.child.wait_gone()
    await clean(stage)


async def test_a_process_and_a_zombie_of_the_host_itself_are_shown(
    stage: Stage,
) -> None:
    with own_sleeper() as (sleeper, pidfd):
        own(stage, pidfd)
        report: dict[str, Any] = await check_host(stage.host)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        await trio.lowlevel.wait_readable(pidfd)
        after: dict[str, Any] = await check_host(stage.host)
    assert [row["pid"] for row in report["processes"]] == [sleeper]
    assert report["processes"][0]["name"] == "sleep"
    assert report["zombies"] == []
    assert [row["pid"] for row in after["zombies"]] == [sleeper]
    await clean(stage)


# ---------------------------------------------------------------- asked from outside


# spec S1
async def test_a_host_is_asked_over_its_control_socket(stage: Stage) -> None:
    answer = stage.where / "answer"
    path = str(stage.where / "control")
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, stage.host, path)
        # By a child of its own: whoever is started otherwise would be a leak.
        asking = await stage.spawn(
            sys.executable, "-c", ASKING, path, str(answer), cwd=str(ROOT)
        )
        assert await asking.wait_gone() == 0
        clean_report = json.loads(answer.read_text())
        with leaked() as fd:
            asking = await stage.spawn(
                sys.executable, "-c", ASKING, path, str(answer), cwd=str(ROOT)
            )
            assert await asking.wait_gone() == 1
        report = json.loads(answer.read_text())
        nursery.cancel_scope.cancel()
    assert clean_report["clean"] is True
    assert clean_report["explained"]["control socket"] == 1
    assert clean_report["explained"]["control connection"] == 1
    assert report["descriptors"] == [{"fd": fd, "link": "/dev/null"}]


async def test_every_part_names_descriptors_that_are_open(stage: Stage) -> None:
    puppet = await stage.puppet()
    await puppet.open(b"a", b"w")
    named = named_descriptors(stage.host)
    assert all(os.fstat(fd) for fd in named)
    assert Counter(named.values())["open file"] == 1


# A child that waits for an order is the launchpad's, and no leftover.
async def test_children_in_stock_are_no_leaks(stage: Stage) -> None:
    stage.sandbox = make_profile(
        "privileges", ["no_new_privs"]
    )  # the least that is kept
    for _ in range(3):
        await (await stage.sh("exit 0")).wait_gone()
    await eventually(lambda: stock_of(stage.launchpad))
    (waiting,) = await stage.host.launcher.stock()
    assert [waiting[0]] == stock_of(stage.launchpad)
    await clean(stage)
