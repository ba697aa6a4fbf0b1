"""Daemons of a fleet are killed and stopped: no child runs twice, none is left.

Each child appends its incarnation to one file every 10 ms, through a system call that no
host looks at. An older one behind a newer one has run beside its successor.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from hostlib.linux import processes
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.fleetscene import Scene, fleet
from tests.helpers.spawning import Watched, watching
from tests.helpers.stage import PYTHON
from tests.helpers.toolruns import program

pytestmark = pytest.mark.slow

LEASE_S = 3.0
LOOP = """
import os, time
with open({file!r}, "ab", buffering=0) as lines:
    while True:
        lines.write(os.environ["SANDHOST_FLEET_INCARNATION"].encode() + b"\\n")
        time.sleep(0.01)
"""


@contextmanager
def node(
    where: Path, shared: Path, root: Path | None = None, more: str = ""
) -> Iterator[Daemon]:
    """Start a daemon whose fleet children may write to one directory.

    Args:
        where: its files.
        shared: that directory.
        root: of its children's FD 3; None for one of their own.
        more: of its configuration.
    """
    where.mkdir(exist_ok=True)
    workspace = f'[workspace.w]\nbase = "{shared}"\nmode = "direct"\n'
    policy = '[policy.p]\nworkspace = ["w"]\n'
    if root is not None:
        policy += f'root = "{root}"\n'
    with daemon(where, f"[fleet]\n{workspace}{policy}{more}") as one:
        yield one


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a directory in which children of any user may write."""
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o777)
    (path / "lines").touch()
    (path / "lines").chmod(0o666)
    tmp_path.chmod(0o755)
    return path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Return what gives back at the end what a test has taken."""
    with ExitStack() as stack:
        yield stack


def written(shared: Path) -> list[str]:
    """Return the incarnations that have written, in their order."""
    return (shared / "lines").read_text(encoding="ascii").split()


async def link(scene: Scene, one: Daemon, name: str) -> None:
    """Link a daemon, and wait until its node is up."""
    await scene.link(str(one.where / "run" / "control"), name)
    await scene.until(lambda: scene.node(name) == "up")


async def start(scene: Scene, shared: Path, stack: ExitStack) -> Watched:
    """Start a child that writes on and on; return its process."""
    script = LOOP.format(file=str(shared / "lines"))
    scene.spawn("web", *PYTHON, "-c", script, policy="p", restart="always")
    child = await scene.until_running("web")
    await scene.until(lambda: written(shared))
    assert child.pid is not None
    (watched,) = stack.enter_context(watching([child.pid]))
    return watched


def launchpads_of(pid: int) -> list[int]:
    """Return all processes right beneath a daemon: its launchpads."""
    return processes.children_of(pid)


async def gone(scene: Scene, child: Watched) -> None:
    """Wait until a child's process has ended."""
    await scene.until(lambda: not child.is_alive())


def assert_in_order(shared: Path) -> None:
    """Check that no incarnation has written behind a later one."""
    numbers = [int(word) for word in written(shared)]
    assert numbers == sorted(numbers)


# spec FL6
async def test_a_daemon_that_is_killed_leaves_no_child(
    tmp_path: Path, shared: Path, stack: ExitStack
) -> None:
    with node(tmp_path / "a", shared) as one:
        async with fleet(tmp_path / "head", LEASE_S) as scene:
            await link(scene, one, "a")
            child = await start(scene, shared, stack)
            one.process.kill()
            one.process.wait()
            await gone(scene, child)


# spec FL6
@pytest.mark.parametrize("whom", ["daemon", "all"])
async def test_a_stopped_daemon_is_fenced_by_the_kernel(
    tmp_path: Path, shared: Path, stack: ExitStack, whom: str
) -> None:
    with node(tmp_path / "a", shared) as one, node(tmp_path / "b", shared) as other:
        async with fleet(tmp_path / "head", LEASE_S) as scene:
            await link(scene, one, "a")
            child = await start(scene, shared, stack)
            await link(scene, other, "b")
            stopped = [one.process.pid]
            if whom == "all":
                stopped += launchpads_of(one.process.pid)
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            await gone(scene, child)
            await scene.until(lambda: scene.child("web").node == "b")
            await scene.until_running("web")
            await scene.until(lambda: written(shared)[-1] == "2")
            for pid in reversed(stopped):
                os.kill(pid, signal.SIGCONT)
            # It has ended its session, and is a member again with a new one.
            await scene.until(lambda: scene.node("a") == "up")
            assert scene.child("web").node == "b"
            assert_in_order(shared)


# spec FL5, FL6
async def test_a_node_that_is_cut_off_ends_its_children_before_they_are_placed_again(
    tmp_path: Path, shared: Path, stack: ExitStack
) -> None:
    with node(tmp_path / "a", shared) as one, node(tmp_path / "b", shared) as other:
        async with fleet(tmp_path / "head", LEASE_S) as scene:
            await link(scene, one, "a")
            child = await start(scene, shared, stack)
            await link(scene, other, "b")
            scene.cut.add("a")
            await scene.until(lambda: scene.child("web").node == "b")
            assert not child.is_alive()
            await scene.until(lambda: written(shared)[-1] == "2")
            scene.cut.clear()
            await scene.until(lambda: scene.node("a") == "up")
            assert_in_order(shared)


# spec FL5, FL6
async def test_a_daemon_that_died_joins_again_with_nothing_of_before(
    tmp_path: Path, shared: Path, stack: ExitStack
) -> None:
    async with fleet(tmp_path / "head", LEASE_S) as scene:
        with node(tmp_path / "a", shared) as one:
            await link(scene, one, "a")
            child = await start(scene, shared, stack)
            # A launchpad that is stopped ends nothing: the next daemon finds it.
            for pid in launchpads_of(one.process.pid):
                os.kill(pid, signal.SIGSTOP)
            one.process.kill()
            one.process.wait()
        with node(tmp_path / "a", shared) as again:
            assert not child.is_alive()
            await link(scene, again, "a")
            await scene.until_running("web")
            assert scene.child("web").incarnation == 2
            await scene.until(lambda: written(shared)[-1] == "2")
            assert_in_order(shared)


# spec FL6
async def test_a_launchpad_that_is_killed_ends_the_session_alone(
    tmp_path: Path, shared: Path, stack: ExitStack
) -> None:
    with node(tmp_path / "a", shared) as one:
        before = set(launchpads_of(one.process.pid))
        async with fleet(tmp_path / "head", LEASE_S) as scene:
            await link(scene, one, "a")
            child = await start(scene, shared, stack)
            (of_session,) = set(launchpads_of(one.process.pid)) - before
            os.kill(of_session, signal.SIGKILL)
            await gone(scene, child)
            await scene.until(lambda: written(shared)[-1] == "2")
            assert before <= set(launchpads_of(one.process.pid))
            assert_in_order(shared)


USING = """
import os, socket, time
with socket.socket(socket.AF_UNIX) as tools:
    tools.connect(os.environ["AIFO_TOOLEEXEC_URL"].removeprefix("unix://"))
    head = ["POST /exec HTTP/1.1", "Host: localhost", "X-Aifo-Proto: 2"]
    head += ["Content-Type: application/x-www-form-urlencoded", "Content-Length: 7"]
    head += ["Authorization: Bearer " + os.environ["AIFO_TOOLEEXEC_TOKEN"]]
    tools.sendall("\\r\\n".join([*head, "", "tool=go"]).encode())
    print(tools.recv(4096).decode(), flush=True)
    time.sleep(600)
"""


MARK = f"of-the-tool-{os.getpid()}"


def of_the_tool() -> list[int]:
    """Return the processes of the tool: those with the mark as their last word."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if (
                Path("/proc", pid, "cmdline")
                .read_bytes()
                .endswith(f"{MARK}\0".encode())
            ):
                found.append(int(pid))
    return found


# spec FL6: a tool of a child, too, and what has left the tool's session.
async def test_tools_end_with_the_lease_while_the_daemon_is_stopped(
    tmp_path: Path, shared: Path, stack: ExitStack
) -> None:
    loop = "while :; do sleep 0.1; done"
    script = f"setsid sh -c '{loop}' {MARK} & exec sh -c '{loop}' {MARK}"
    where = program(tmp_path / "bin", "go", script)
    tools = "[toolexec]\nlisten = ['unix']\n[sidecar.s]\nkind = 'go'\n"
    tools += f"path = ['{where}']\n"
    root = tmp_path / "root"
    root.mkdir()
    with node(tmp_path / "a", shared, root, tools) as one:
        async with fleet(tmp_path / "head", LEASE_S) as scene:
            await link(scene, one, "a")
            scene.spawn("web", *PYTHON, "-c", USING, policy="p")
            await scene.until_running("web")
            await scene.until(lambda: len(of_the_tool()) == 2)
            tool = stack.enter_context(watching(of_the_tool()))
            os.kill(one.process.pid, signal.SIGSTOP)
            await scene.until(lambda: not any(one.is_alive() for one in tool))
            os.kill(one.process.pid, signal.SIGCONT)
            await scene.until(lambda: scene.node("a") == "up")


LATE = """
import os, pathlib, socket, time
door = socket.socket(fileno=3)
door.sendall(b"OPEN out w false\\n")
number = door.recv(100).split()[1]
pathlib.Path({ready!r}).touch()
while not pathlib.Path({go!r}).exists():
    time.sleep(0.01)
door.sendall(b"WRITE " + number + b" 4\\nlate")
pathlib.Path({sent!r}).touch()
time.sleep(600)
"""


# spec FL6
async def test_a_write_that_a_stopped_daemon_finds_when_it_wakes_is_not_done(
    tmp_path: Path, shared: Path, stack: ExitStack
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with node(tmp_path / "a", shared, root) as one:
        async with fleet(tmp_path / "head", LEASE_S) as scene:
            await link(scene, one, "a")
            ready, go, sent = shared / "ready", shared / "go", shared / "sent"
            script = LATE.format(ready=str(ready), go=str(go), sent=str(sent))
            scene.spawn("web", *PYTHON, "-c", script, policy="p")
            row = await scene.until_running("web")
            assert row.pid is not None
            (child,) = stack.enter_context(watching([row.pid]))
            await scene.until(ready.exists)
            os.kill(one.process.pid, signal.SIGSTOP)
            go.touch()
            await scene.until(sent.exists)  # it is in the socket, within the lease
            await gone(scene, child)
            os.kill(one.process.pid, signal.SIGCONT)
            await scene.until(lambda: scene.child("web").state == "lost")
            await scene.until(lambda: scene.node("a") == "up")
            assert (root / "out").read_bytes() == b""
