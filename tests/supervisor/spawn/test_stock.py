"""Children in stock: who waits for what, what they hold, and that nobody is told."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from hostlib.linux import processes
from supervisor.sandbox.plan import PROFILES, make_profile
from supervisor.spawn.launchpad.order import Order
from supervisor.spawn.launchpad.prefork import SHAPES, Stock
from tests.helpers.command import small_disk
from tests.helpers.stage import Stage, eventually, open_stage
from tests.helpers.stock import names_beneath, only_stock_beneath, stock_of

pytestmark = pytest.mark.slow

NAMESPACES = ["mountns", "pidns", "netns", "ipcns", "utsns", "userns"]
KINDS = {
    # The least that takes a fork.
    "privileges": make_profile("privileges", ["no_new_privs"]),
    "landlock": make_profile("landlock", ["landlock", "seccomp"]),
    "namespaces": make_profile("namespaces", NAMESPACES),
    "auto": PROFILES["auto"],
}


@pytest.fixture
def readable(tmp_path: Path) -> Path:
    """A directory that others than its owner may enter."""
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.fixture
async def stage(readable: Path) -> AsyncIterator[Stage]:
    """A host."""
    async with open_stage(readable) as opened:
        opened.sandbox = KINDS["privileges"]
        yield opened


async def waiting(stage: Stage) -> int:
    """Ask for a kind of child until one waits for the next order; its pid."""
    for _ in range(3):
        await (await stage.sh("exit 0")).wait_gone()
    await eventually(lambda: len(ready_in(stage)) == 1)
    return ready_in(stage)[0]


def ready_in(stage: Stage) -> list[int]:
    """Return who waits, and is in the process that is to become the program."""
    levels = 2 if "pidns" in stage.sandbox.layers else 1
    found = []
    for pid, name in names_beneath(stage.launchpad).items():
        status = Path(f"/proc/{pid}/status")
        with suppress(FileNotFoundError, ProcessLookupError):
            (numbers,) = re.findall(r"NSpid:(.*)", status.read_text())
            if name == "sandhost-stock" and len(numbers.split()) >= levels:
                found.append(pid)
    return found


def held_by(pid: int) -> list[str]:
    """Return what the descriptors of a process refer to."""
    found = []
    for place in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found.append(str(place.readlink()))
    return sorted(found)


@pytest.mark.parametrize("kind", KINDS)
async def test_who_waited_becomes_the_next_child(stage: Stage, kind: str) -> None:
    stage.sandbox = KINDS[kind]
    fresh = await stage.sh("exit 0")
    pid = await waiting(stage)
    child = await stage.sh("read nothing; exit 7", stdio=(stage.null,) * 3)
    assert child.process is not None
    assert child.process.pid == pid
    assert await child.wait_gone() == 7
    # It is in as much as one that was forked for its order.
    assert child.walls.missing == fresh.walls.missing
    layers = [name for name, _ in child.walls.applied]
    assert sorted(layers) == sorted(name for name, _ in fresh.walls.applied)


@pytest.mark.skipif(os.geteuid() != 0, reason="nobody but root may look into it")
@pytest.mark.skipif(not shutil.which("strace"), reason="strace is missing")
async def test_who_was_started_runs_before_another_is_forked(
    stage: Stage, tmp_path: Path
) -> None:
    await waiting(stage)
    calls = tmp_path / "calls"
    filtered = [
        "-e",
        "trace=clone,clone3,fork,vfork,select,pselect6",
        "-e",
        "signal=none",
    ]
    argv = ["strace", "-o", str(calls), *filtered, "-p", str(stage.launchpad)]
    # From this thread: in those that wait for file systems, signals are blocked.
    process = subprocess.Popen(argv, stderr=subprocess.PIPE)  # noqa: ASYNC220
    try:
        assert process.stderr is not None
        said = await trio.to_thread.run_sync(process.stderr.readline)
        assert b"attached" in said
        await waiting(stage)  # three more, and who waits for the next
    finally:
        process.terminate()
        await trio.to_thread.run_sync(process.communicate)
    made = [line.partition("(")[0] for line in calls.read_text().splitlines()]
    waits = [name in {"select", "pselect6"} for name in made if name.isidentifier()]
    assert waits.count(False) >= 3, made
    assert waits[0], "the first of them took who waited, and ran before another did"


async def test_a_host_of_one_child_has_no_stock(stage: Stage) -> None:
    child = await stage.sh("exit 0")
    await child.wait_gone()
    assert await stage.host.launcher.stock() == ()
    assert processes.children_of(stage.launchpad) == []


# spec T2, attack 6: it holds nothing of the launchpad, and nothing of another child.
@pytest.mark.skipif(os.geteuid() != 0, reason="nobody but root may look into it")
async def test_who_waits_holds_nothing_of_anybody(stage: Stage) -> None:
    stage.sandbox = PROFILES["auto"]
    puppet = await stage.puppet()  # a live child, whose ends the launchpad forgot
    pid = await waiting(stage)
    stderr = os.readlink(f"/proc/{stage.launchpad}/fd/2").partition(":")[0]
    usual = [os.devnull, os.devnull, stderr, "/", "anon_inode", "pipe", "socket"]

    def holds_its_own() -> bool:
        held = held_by(pid)
        kinds = sorted(target.partition(":")[0] for target in held)
        sockets = {target for target in held if target.startswith("socket:")}
        # The launchpad's copy of its end of the line is closed right after the fork.
        shared = sockets & set(held_by(stage.launchpad))
        return kinds == sorted(usual) and not shared

    # 0, 1, 2; the top of a fresh root and rules made beforehand, its pipe of reports, its
    # line; and no more than that once it has done what it does before it waits.
    await eventually(holds_its_own)
    assert (await puppet.ask(b"PING\n")) == b"OK"
    await puppet.leave()


async def test_who_waits_sleeps_and_so_does_the_launchpad(stage: Stage) -> None:
    pid = await waiting(stage)
    both = (pid, stage.launchpad)
    await eventually(lambda: all(state(p) == "S" for p in both))
    # The rest of a start may take its time; a host that looks again and again
    # has no such moment.
    for _ in range(10):
        before = [wake_ups(p) for p in both]
        # Not to wait for something: this is the time in which nothing is to happen.
        await trio.sleep(0.3)
        if [wake_ups(p) for p in both] == before:
            return
    pytest.fail("one of them wakes up again and again")


def state(pid: int) -> str:
    """Return the letter for what a process does."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wake_ups(pid: int) -> int:
    """Return how often a process went to sleep so far."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


async def test_a_death_in_stock_is_nobodys(stage: Stage) -> None:
    pid = await waiting(stage)
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: pid not in processes.children_of(stage.launchpad))
    child = await stage.sh("exit 3")
    assert await child.wait_gone() == 3
    assert {row["child_id"] for row in stage.events("child.exited")} == {
        f"child-{number}" for number in range(1, 5)
    }
    stage.assert_nothing_left()


async def test_an_order_for_one_who_is_stopped_can_be_taken_back(stage: Stage) -> None:
    pid = await waiting(stage)
    os.kill(pid, signal.SIGSTOP)
    state = Path(f"/proc/{pid}/stat")  # it takes all that comes until it is stopped
    await eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
    with trio.move_on_after(0.2) as scope:
        await stage.sh("exit 0")
    assert scope.cancelled_caught
    await eventually(lambda: pid not in processes.children_of(stage.launchpad))
    assert await (await stage.sh("exit 4")).wait_gone() == 4
    stage.assert_nothing_left()


async def test_the_last_kinds_displace_those_before(stage: Stage) -> None:
    pids = set()
    more = [make_profile(name, [name]) for name in ("netns", "utsns")]
    for profile in (*KINDS.values(), *more):
        stage.sandbox = profile
        for _ in range(3):
            await (await stage.sh("exit 0")).wait_gone()
        await eventually(lambda: 1 <= len(stock_of(stage.launchpad)) <= SHAPES)
        pids |= set(stock_of(stage.launchpad))
    await eventually(lambda: len(stock_of(stage.launchpad)) <= SHAPES)
    assert len(pids) > SHAPES or os.geteuid() != 0  # for others some are of one shape
    assert only_stock_beneath(stage.launchpad)


# Files gone or replaced since: the rules made beforehand are not what is wanted.
async def test_rules_made_beforehand_are_for_what_is_there_now(stage: Stage) -> None:
    stage.sandbox = KINDS["landlock"]
    tools = stage.where / "tools"
    tools.mkdir()
    cwd = str(tools)
    (tools / "note").write_text("before")
    out = stage.where / "out"
    for _ in range(3):
        await (await stage.sh("cat note", cwd=cwd)).wait_gone()
    await eventually(lambda: stock_of(stage.launchpad))
    (tools / "note").unlink()
    tools.rename(stage.where / "old")
    (stage.where / "old" / "secret").write_text("secret")
    tools.mkdir()
    (tools / "note").write_text("after")
    with out.open("wb") as file:
        script = f"cat note; cat {stage.where}/old/secret"
        stdio = (stage.null, file.fileno(), stage.null)
        child = await stage.sh(script, cwd=cwd, stdio=stdio)
        assert await child.wait_gone() == 1
    assert out.read_bytes() == b"after"


@pytest.mark.skipif(os.geteuid() != 0, reason="nobody but root mounts here")
async def test_what_is_mounted_after_a_child_began_to_wait_is_seen(
    stage: Stage, readable: Path
) -> None:
    stage.sandbox = PROFILES["auto"]
    before = await waiting(stage)
    out = stage.where / "out"
    with small_disk(readable, "64k") as disk, out.open("wb") as file:
        (disk / "note").write_text("on the disk")
        stdio = (stage.null, file.fileno(), stage.null)
        child = await stage.sh("cat note", cwd=str(disk), stdio=stdio)
        assert await child.wait_gone() == 0
        # Nor does anything keep what is to be unmounted.
        await eventually(lambda: before not in names_beneath(stage.launchpad))
    assert out.read_bytes() == b"on the disk"


async def test_files_of_the_system_that_were_replaced_are_the_new_ones(
    stage: Stage,
) -> None:
    stage.sandbox = PROFILES["auto"]
    tools = stage.where / "tools"
    tools.mkdir()
    cwd, out = str(tools), stage.where / "out"
    for _ in range(3):
        await (await stage.sh("exit 0", cwd=cwd)).wait_gone()
    await eventually(lambda: stock_of(stage.launchpad))
    tools.rename(stage.where / "old")
    tools.mkdir()
    (tools / "note").write_text("after")
    with out.open("wb") as file:
        stdio = (stage.null, file.fileno(), stage.null)
        child = await stage.sh("cat note", cwd=cwd, stdio=stdio)
        assert await child.wait_gone() == 0
    assert out.read_bytes() == b"after"


# The child's own /etc/passwd lies beneath what all of the kind see.
async def test_a_child_that_is_shown_the_machines_etc_starts_each_time(
    stage: Stage,
) -> None:
    stage.sandbox = KINDS["namespaces"]
    for status in range(4):
        child = await stage.sh(f"exit {status}", expose=("/etc",))
        assert await child.wait_gone() == status
        wanted = status > 0  # two of the kind have come
        await eventually(lambda: not wanted or ready_in(stage))  # noqa: B023


async def test_fresh_children_are_as_well_off_when_the_stock_is_empty(
    stage: Stage,
) -> None:
    stage.sandbox = PROFILES["auto"]
    await waiting(stage)
    statuses: list[int] = []

    async def one(number: int) -> None:
        statuses.append(await (await stage.sh(f"exit {number}")).wait_gone())

    async with trio.open_nursery() as nursery:
        for number in range(12):
            nursery.start_soon(one, number)
    assert sorted(statuses) == list(range(12))
    stage.assert_nothing_left()


# ---------------------------------------------------------------- purely


class _Waiting:
    """Stands for a child where only its identity counts."""


def put(stock: Stock) -> Any:
    """Have one more made, if one is wanted."""
    kind = stock.find_missing()
    assert kind is not None
    order = stock.order_for(kind)
    assert isinstance(order, Order)
    kind.child = _Waiting()  # type: ignore[assignment]
    return kind.child


GROUP = ((b"/sys/fs/cgroup/next-1", b"cgroup.procs"),)
OTHER = ((b"/sys/fs/cgroup/child-9", b"cgroup.procs"),)


def test_one_who_waits_in_groups_gets_an_order_for_these_only() -> None:
    stock = Stock()
    for _ in range(2):
        assert stock.take({"cgroup": OTHER}) is None
    assert stock.find_missing() is None  # no groups were announced
    stock.set_spare(GROUP)
    child = put(stock)
    assert stock.take({"cgroup": OTHER}) is None
    assert stock.take({"cgroup": GROUP}) is child
    assert stock.take_surplus() == []


def test_groups_that_another_kind_gets_are_left_by_who_waits_there() -> None:
    stock = Stock()
    for _ in range(2):
        stock.take({"cgroup": OTHER})
    stock.set_spare(GROUP)
    child = put(stock)
    assert stock.take({"cgroup": GROUP, "netns": None}) is None
    assert stock.take_surplus() == [child]


def test_rules_are_those_that_all_orders_had() -> None:
    stock = Stock()
    usr, one, two = (b"/usr", "execute"), (b"/a", "write"), (b"/b", "write")
    stock.take({"landlock": ((usr, one), True)})
    stock.take({"landlock": ((usr, two), True)})
    kind = stock.find_missing()
    assert kind is not None
    assert stock.order_for(kind).likely_rules == ((usr,), True)


def test_rules_of_what_the_fresh_root_has_anew_are_not_made_beforehand() -> None:
    stock = Stock()
    usr, packages = (b"/usr", "execute"), (b"/srv/packages", "list")
    rules = (usr, packages, (b"/proc", "read"), (b"/tmp", "write"))
    for _ in range(2):
        stock.take({"mountns": in_root((), ()), "landlock": (rules, True)})
    kind = stock.find_missing()
    assert kind is not None
    assert stock.order_for(kind).likely_rules == ((usr,), True)


def in_root(links: Any, trees: Any, files: Any = ()) -> Any:
    """Return the words of a fresh root."""
    return links, trees, b"/", files, b""


READ, WRITTEN, MAPPED = (
    (b"/usr", "execute", False),
    (b"/srv/a", "write", False),
    (b"/opt", "execute", True),
)


def test_mounts_made_beforehand_are_those_that_all_orders_read() -> None:
    stock = Stock(sees_mounts=True)
    cwd = (b"/srv/a/src", "execute", False)
    link, other = (b"/bin", b"usr/bin"), (b"/a", b"/b")
    stock.take({"mountns": in_root((link, other), (READ, MAPPED, cwd))})
    stock.take({"mountns": in_root((link,), (READ, MAPPED, WRITTEN, cwd))})
    kind = stock.find_missing()
    assert kind is not None
    # One that lies in what is not there yet comes after it.
    assert stock.order_for(kind).likely_root == ((READ,), (link,))


# A root with the machine's /etc could not take the child's own /etc/passwd.
def test_a_tree_in_which_orders_make_entries_is_not_mounted_beforehand() -> None:
    stock = Stock(sees_mounts=True)
    etc, inner = (b"/etc", "read", False), (b"/etc/ssl", "read", False)
    own = ((b"/etc/passwd", b"me"),)
    for name in (b"/opt/first", b"/opt/second"):
        opt = (b"/opt", "read", False)
        links = ((name, b"/usr"),)
        stock.take({"mountns": in_root(links, (READ, etc, inner, opt), own)})
    kind = stock.find_missing()
    assert kind is not None
    assert stock.order_for(kind).likely_root == ((READ,), ())


def test_who_waits_in_older_mounts_is_given_up_and_asked_for_again() -> None:
    stock = Stock(sees_mounts=True)
    words = {"mountns": in_root((), (READ,))}
    for _ in range(2):
        stock.take(words)
    child = put(stock)
    stock.drop_roots()
    assert stock.take_surplus() == [child]
    assert stock.find_missing() is None
    assert stock.take(words) is None
    assert stock.find_missing() is not None


def test_without_word_of_mounts_no_child_waits_in_a_mount_namespace() -> None:
    stock = Stock()
    for _ in range(2):
        stock.take({"mountns": in_root((), (READ,))})
    kind = stock.find_missing()
    assert kind is not None
    assert stock.order_for(kind).likely_root is None


def test_a_kind_that_failed_in_stock_has_to_be_asked_for_again() -> None:
    stock = Stock()
    stock.take({})
    stock.take({})
    stock.discard(put(stock))
    assert stock.find_missing() is None
    stock.take({})
    assert stock.find_missing() is None
    stock.take({})
    assert stock.find_missing() is not None
