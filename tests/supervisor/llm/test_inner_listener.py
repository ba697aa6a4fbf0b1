"""The endpoint's port within a child's own net namespace."""

import errno
import math
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from hostlib.linux.syscalls import system_call
from supervisor.doctor.leaks import named_descriptors
from supervisor.llm import endpoint
from supervisor.llm.endpoint import DoorState, EndpointState
from supervisor.sandbox import start
from supervisor.sandbox.plan import PROFILES, Profile, make_profile
from supervisor.spawn.inner_pair import InnerListener
from tests.helpers.leaks import no_descriptor_left
from tests.helpers.stage import Puppet, Stage, descriptors, eventually, open_stage
from tests.helpers.stock import names_beneath

pytestmark = pytest.mark.slow

_SYS_PIDFD_GETFD = 438


# A puppet learns: HTTP by the address that it was told, and what listens beside it.
WORDS = """
import socket
URL = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:0/v1")
PORT = int(URL.split(":")[2].split("/")[0])
TOKEN = os.environ.get("OPENAI_API_KEY", "")
held = []

def connect(port=PORT, path=None):
    sock = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
    sock.connect(path or ("127.0.0.1", port))
    sock.settimeout(60)
    return sock

def hold(count, path=None):
    held.extend(connect(path=path) for _ in range(count))

def get(token=None, sock=None):
    sock = sock or connect()
    bearer = TOKEN if token is None else token
    sock.sendall(f"GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\n"
                 f"Authorization: Bearer {bearer}\\r\\n\\r\\n".encode())
    return int(sock.recv(65536).split()[1])

def fault(call):
    try:
        call()
    except OSError as why:
        return why.errno

def listening():
    rows = [line.split() for line in open("/proc/net/tcp")][1:]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"]
"""


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """Return a host with an endpoint, whose children run behind all walls."""
    tmp_path.chmod(0o755)  # noqa: ASYNC240 - of the test's own
    model = {"endpoint": True}
    async with open_stage(tmp_path, log_level="WARNING", model=model) as opened:
        opened.sandbox = PROFILES["auto"]
        yield opened


async def open_puppet(stage: Stage, **changes: Any) -> Puppet:
    """Start a child that knows the words above."""
    puppet = await stage.puppet(**changes)
    await puppet.do(f"exec({WORDS!r}, globals())")
    return puppet


def listeners(stage: Stage) -> int:
    """Return how many listeners the endpoint has beside that of all."""
    return stage.endpoint.statistics().listeners - 1


def made(puppet: Puppet) -> str | None:
    """The child's report about its listener."""
    return dict(puppet.child.walls.applied).get("listener")


def descriptors_of(puppet: Puppet) -> list[int]:
    """The host's descriptors of the way by which the listener came."""
    found = puppet.child.descriptors()
    return [fd for fd, word in found if word == "inner listener"]


def ready_in(stage: Stage) -> set[int]:
    """Return who waits in its last process, in a pid namespace, for an order."""
    found = set()
    for pid, name in names_beneath(stage.launchpad).items():
        with suppress(FileNotFoundError, ProcessLookupError):
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
            (numbers,) = re.findall(r"NSpid:(.*)", status)
            if name == "sandhost-stock" and len(numbers.split()) > 1:
                found.add(pid)
    return found


# Forked for its order, and then from the stock.
@pytest.mark.nobody
async def test_each_child_reaches_the_endpoint_at_its_address(stage: Stage) -> None:
    waited: set[int] = set()
    for number in range(4):
        puppet = await open_puppet(stage)
        assert not waited or puppet.pid in waited
        port = await puppet.do("PORT")
        assert made(puppet) == f"127.0.0.1:{port}, the host's"
        assert await puppet.do("listening()") == [port]
        assert await puppet.do("get()") == 200
        assert await puppet.do(
            "sorted(map(int, os.listdir('/proc/self/fd')))[:-1]"
        ) == [*range(4)]
        assert listeners(stage) == 1
        assert descriptors_of(puppet) == []
        await puppet.kill()
        await eventually(lambda: not listeners(stage))
        if number:
            await eventually(lambda: ready_in(stage))
            waited = ready_in(stage)


# attack 31: it is the model's port alone that has come in.
@pytest.mark.nobody
async def test_what_else_listens_on_the_machine_is_out_of_reach(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        puppet = await open_puppet(stage)
        assert await puppet.do(f"fault(lambda: connect({port}))") == errno.ECONNREFUSED
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()


# spec L13: a token is what counts, whatever way it comes by.
async def test_a_token_opens_its_own_account_by_whatever_way(stage: Stage) -> None:
    one, other = await open_puppet(stage), await open_puppet(stage)
    foreign = await other.do("TOKEN")
    assert await one.do("get('sk-none')") == 401
    assert await one.do(f"get({foreign!r})") == 200
    await other.kill()
    assert await one.do(f"get({foreign!r})") == 401
    assert await one.do("get()") == 200


@pytest.mark.nobody
async def test_what_a_child_has_begun_ends_with_it(stage: Stage) -> None:
    used = stage.host.fs.descriptor_account.used
    statistics = stage.endpoint.statistics
    one, other = await open_puppet(stage), await open_puppet(stage)
    await one.do("hold(3)")
    await one.do("held.append(connect()), get(sock=held[-1])")
    await other.do("hold(2)")
    await eventually(lambda: statistics().connections == 6)
    assert {"model endpoint"} == {
        named_descriptors(stage.host)[one.fileno()] for one in stage.endpoint.listeners
    }
    await one.kill()
    await eventually(lambda: statistics().connections == 2)
    assert listeners(stage) == 1
    assert await other.do("get(sock=held[0])") == 200
    await other.leave()
    await eventually(lambda: not statistics().connections and not listeners(stage))
    assert stage.host.fs.descriptor_account.used == used


# A process outside may hold an end of a connection that the child has made: the host
# does not wait for it to close that, nor for its patience to end.
async def test_connections_without_a_token_end_with_their_child(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "STRANGER_S", math.inf)
    puppet = await open_puppet(stage)
    await puppet.do("hold(1)")
    number = await puppet.do("held[0].fileno()")
    pidfd = os.pidfd_open(puppet.pid)
    try:
        taken = system_call(_SYS_PIDFD_GETFD, pidfd, number)
    except PermissionError:
        pytest.skip("nobody but root may take it")
    finally:
        os.close(pidfd)
    with socket.socket(fileno=taken):
        await eventually(lambda: stage.endpoint.statistics().connections)
        await puppet.kill()
        await eventually(lambda: not stage.endpoint.statistics().connections)


# spec S5, S7: who floods its own listeners keeps nobody else out of theirs.
@pytest.mark.parametrize("by_path", [False, True])
async def test_a_flood_by_a_childs_own_listener_ends_nobody_elses_connection(
    stage: Stage, by_path: bool
) -> None:
    run_dir = stage.where / "run"
    run_dir.mkdir()
    patient = await open_puppet(stage)
    await patient.do("hold(1)")
    await eventually(lambda: stage.endpoint.statistics().strangers == 1)
    flood = await open_puppet(stage, run_dir=str(run_dir), sandbox=PROFILES["none"])
    if not by_path:
        flood = await open_puppet(stage)
    path = str(run_dir / endpoint.SOCKET_NAME) if by_path else None
    await flood.do(f"hold({endpoint.STRANGERS + 20}, {path!r})")
    assert await flood.do("get()") == 200
    assert await patient.do("get(sock=held[0])") == 200


# spec S5: whatever becomes of one child's listener, the host and all others go on.
async def test_a_listener_that_fails_ends_alone(
    stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    before = set(stage.endpoint.listeners)
    puppet = await open_puppet(stage)
    (first,) = stage.endpoint.listeners - before
    other = await open_puppet(stage)
    first.shutdown(socket.SHUT_RDWR)
    await eventually(lambda: listeners(stage) == 1)
    assert "closed a child's own listener: accept failed" in capfd.readouterr().err
    assert await puppet.do("fault(get)") == errno.ECONNREFUSED
    assert await other.do("get()") == 200
    await puppet.kill()
    assert await other.do("get()") == 200


NONE, LANDLOCKED = PROFILES["none"], make_profile("landlock", ["landlock", "seccomp"])


@pytest.mark.nobody
@pytest.mark.parametrize(
    ("changes", "reached"),
    [
        ({"network": "host"}, 200),
        ({"sandbox": NONE, "network": "host"}, 200),
        ({"sandbox": LANDLOCKED, "network": "host"}, 200),
        ({"sandbox": LANDLOCKED}, None),
    ],
)
async def test_where_a_child_has_no_loopback_of_its_own_nothing_changes(
    stage: Stage, changes: dict[str, Any], reached: int | None
) -> None:
    puppet = await open_puppet(stage, **changes)
    assert made(puppet) is None
    assert not listeners(stage)
    # The report names exactly the unreachable listener.
    assert (start.LISTENER in puppet.child.walls.missing) == (reached is None)
    if reached is None:
        assert await puppet.do("fault(get)") is not None
    else:
        assert await puppet.do("get()") == reached


AUTO = PROFILES["auto"]
INSTEAD = {
    AUTO: "use the service's socket by path",
    replace(AUTO, unix_sockets=False): (
        "the service is out of reach; require netns, or set network = 'host'"
    ),
}
"""The advice, by profile: without unix sockets the socket by path is no help."""


@pytest.mark.parametrize("profile", INSTEAD, ids=["paths", "no paths"])
async def test_a_machine_without_net_namespaces_has_none(
    stage: Stage, capfd: pytest.CaptureFixture[str], profile: Profile
) -> None:
    stage.host.machine.lacking["netns"] = "not here"
    puppet = await open_puppet(stage, sandbox=profile)
    assert made(puppet) is None
    assert not listeners(stage)
    assert descriptors_of(puppet) == []
    assert puppet.child.walls.missing["netns"] == "not here"
    said = f"it has no net namespace; {INSTEAD[profile]}"
    assert puppet.child.walls.missing[start.LISTENER] == said
    assert f"goes without its {start.LISTENER}: {said}" in capfd.readouterr().err


async def test_a_child_for_whom_nobody_listens_has_a_loopback_with_nobody_there(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.llm, "endpoint", None)
    puppet = await open_puppet(stage)
    assert made(puppet) is None
    assert await puppet.do("listening()") == []


# The next attempt is another process in another namespace.
async def test_what_an_attempt_that_failed_has_sent_is_not_the_childs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = stage.host.machine
    asked = start.request_layers
    broken: list[bool] = []

    def asks(*args: Any, **more: Any) -> Any:
        found, lost = asked(*args, **more)
        if not broken:  # a layer after the listener, that is the machine's to have
            broken.append(True)
            found["seccomp"] = b"no filter"
        return found, lost

    monkeypatch.setattr(start, "request_layers", asks)
    puppet = await open_puppet(stage)
    assert "seccomp" in machine.lacking
    assert listeners(stage) == 1
    assert await puppet.do("get()") == 200


@pytest.mark.nobody
@pytest.mark.parametrize("room", [0, 1])
async def test_a_host_that_cannot_take_it_says_so_and_the_child_runs(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    room: int,
) -> None:
    receive, add = InnerListener.receive, InnerListener.add_listener

    def received(inner: InnerListener) -> None:
        with no_descriptor_left(but=room):
            receive(inner)

    def added(inner: InnerListener, port: int, serve: Any) -> int:
        for _ in range(room):  # of another service
            add(inner, port + 1, lambda _: pytest.fail("a part"))
        return add(inner, port, serve)

    with monkeypatch.context() as patched:
        patched.setattr(InnerListener, "receive", received)
        patched.setattr(InnerListener, "add_listener", added)
        puppet = await open_puppet(stage)
    why = puppet.child.walls.missing[start.LISTENER]
    assert why == (
        "this host cannot take it: Too many open files; raise the limit of open files"
        " (ulimit -n)"
    )
    log = capfd.readouterr().err
    assert "goes without its listener on its loopback: this host cannot" in log
    assert not listeners(stage)
    for port in range(room + 1):
        fault = await puppet.do(f"fault(lambda: connect(PORT + {port}))")
        assert fault == errno.ECONNREFUSED
    assert descriptors_of(puppet) == []


@pytest.mark.parametrize("profile", INSTEAD, ids=["paths", "no paths"])
async def test_a_child_that_cannot_make_it_goes_without(
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    profile: Profile,
) -> None:
    def shut(*args: Any) -> None:
        made_so(*args)
        args[0].ours.shutdown(socket.SHUT_RDWR)

    made_so = InnerListener.__init__
    with monkeypatch.context() as patched:
        patched.setattr(InnerListener, "__init__", shut)
        puppet = await open_puppet(stage, sandbox=profile)
    assert puppet.child.walls.missing[start.LISTENER] == (
        f"it cannot be made: Broken pipe; {INSTEAD[profile]}"
    )
    assert "netns" in dict(puppet.child.walls.applied)
    assert "goes without its listener" in capfd.readouterr().err
    assert (made(puppet), listeners(stage)) == (None, 0)
    assert descriptors_of(puppet) == []
    assert await puppet.do("listening()") == []
    assert await (await open_puppet(stage)).do("get()") == 200


# I1: whatever happens in between, the pair and what came by it are closed.
@pytest.mark.parametrize("end", ["not found", "cancelled"])
async def test_a_child_that_does_not_start_leaves_no_pair(
    stage: Stage, end: str
) -> None:
    host, before = stage.host, descriptors()
    if end == "not found":
        missing = stage.where / "missing"
        missing.write_text("#!/no/such/interpreter\n")
        missing.chmod(0o755)
        child = await host.spawn(stage.spec((str(missing),)))
        assert child.failure is not None
        assert child.failure.stage == "exec"
        await child.gone.wait()
    else:
        for turns in range(0, 400, 7):  # of the loop, into its start
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(host.spawn, stage.spec(("/bin/true",)))
                    for _ in range(turns):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
    await eventually(lambda: not host.children)
    await eventually(lambda: not listeners(stage))
    assert stage.endpoint.statistics().accounts == 0
    await eventually(lambda: descriptors() == before)


# A child that was started by a program that knew of no such listener.
def test_the_state_of_a_program_before_is_read() -> None:
    plain = {
        "listener_fd": 3,
        "doors": {"client-1": {"token": "t", "listener_fd": 4, "path": b"/a"}},
        "connections": [],
    }
    found = msgspec.convert(plain, EndpointState)
    assert found.doors["client-1"] == DoorState("t", 4, b"/a", -1)


def test_what_is_not_taken_over_is_closed() -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    fds = [pair[0].detach() for pair in pairs]
    left = EndpointState(fds[0], {"c": DoorState("t", fds[1], b"", fds[2])}, [])
    endpoint.close_left(left)
    for _, other in pairs:
        assert other.recv(1) == b""
        other.close()
