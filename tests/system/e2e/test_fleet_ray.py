"""A fleet on Ray, from outside.

The commands, two nodes of this machine, and kills.
"""

import ipaddress
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hostlib.unix_names import is_deaf
from supervisor.cluster import ray_processes
from tests.helpers.addresses import own_address
from tests.helpers.command import ENVIRONMENT, SANDHOST, Outcome, sandhost
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.rounds import LONG
from tests.helpers.stage import PYTHON

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


# A lease that bears how long a busy machine takes to start an actor again.
FLEET = """
[fleet]
lease = "12s"
[fleet.quota]
max_tokens = 5000
window = "never"
[workspace.repo]
base = "{where}/repo"
[policy.agent]
workspace = ["repo"]
[policy.bare]
sandbox = "none"
"""
PORTS = "21700-21760"
PORTS_OF_HEAD = "21900-21960"
OWN = own_address()
NETWORK = """
[policy.wide]
network = ["{address}:{ports}"]
"""
if OWN is not None:
    FLEET += NETWORK.format(
        address=OWN, ports=",".join(str(port) for port in range(21_700, 21_761))
    )
UNFENCED = FLEET.replace("[fleet]", "[fleet]\nunfenced = true", 1)


@dataclass
class Place:
    """A daemon of this machine that may be a node.

    Attributes:
        where: its directories are in it.
    """

    name: str
    where: Path
    daemon: Daemon

    @property
    def control(self) -> str:
        """The daemon's control socket."""
        return f"{self.where}/run/control"

    @property
    def directory(self) -> str:
        """Where its node keeps what Ray needs."""
        return f"{self.where}/state/{ray_processes.DIRECTORY}"

    def fleet(self, *words: str) -> Outcome:
        """Run a command of the fleet on this node."""
        return sandhost("fleet", words[0], "--control", self.control, *words[1:])

    def shown(self) -> Any:
        """Return what `fleet ps` shows here."""
        done = self.fleet("ps", "--json")
        assert done.status == 0, done.err
        return json.loads(done.out)

    def states(self) -> dict[str, str]:
        """Return the nodes' states."""
        return {node["name"]: node["state"] for node in self.shown()["nodes"]}


@contextmanager
def place(name: str, config: str = FLEET) -> Iterator[Place]:
    """Start a daemon; at the end all that was started for its node is ended."""
    # Short, for Ray has its sockets in there.
    where = Path(tempfile.mkdtemp(prefix="f", dir="/tmp"))
    (where / "repo").mkdir()
    (where / "repo" / "a.txt").write_text("hello\n")
    with daemon(where, config.format(where=where), grace="1s") as one:
        found = Place(name, where, one)
        try:
            yield found
        finally:
            ray_processes.end(found.directory)
    shutil.rmtree(where)


def until(reached: Callable[[], bool], longest_s: float = 0.5) -> None:
    """Wait until something is so; the test's own timeout is the longest wait.

    Args:
        reached: tells it; most ask by a command, or look at all processes.
        longest_s: between two questions; less where a moment must not be missed.
    """
    pause_s = 0.05
    while not reached():
        select.select([], [], [], pause_s)
        pause_s = min(2 * pause_s, longest_s)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def pids_of(directory: str, what: str) -> list[int]:
    """Return the processes that were started for a node whose command names something."""
    found = []
    for one in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            marks = (one / "environ").read_bytes().split(b"\0")
            is_its_own = f"{ray_processes.MARK}={directory}".encode() in marks
            if is_its_own and what.encode() in (one / "cmdline").read_bytes():
                found.append(int(one.name))
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def assert_nothing_left(*places: Place) -> None:
    for one in places:
        assert not ray_processes.is_running(one.directory)
        left = set(os.listdir(one.directory))
        assert not left & {ray_processes.SESSIONS, ray_processes.TOKEN}
        assert is_deaf(f"{one.where}/run/fleet") or not os.path.exists(
            f"{one.where}/run/fleet"
        )
    assert not [name for name in os.listdir("/dev/shm") if "plasma" in name]


# spec FL1, FL2, FL5, FL9, FL11
@pytest.mark.chaos
def test_a_fleet_comes_up_survives_kills_and_leaves_nothing() -> None:
    with place("a") as a, place("b", UNFENCED) as b:
        done = a.fleet("ps")
        assert done.status == 1
        assert done.said("this node is in none; begin one by `sandhost fleet up`")
        address, token = check_start(a)
        assert a.states() == {"a": "up"}
        words = ("join", "--address", address, "--token-file")
        check_refusals(a, b, words, token)
        # Another address than 127.0.0.1, though it is on loopback, too.
        named = ("--node", "b", "--labels", "gpu,big", "--bind", "127.0.0.2")
        done = b.fleet(*words, token, *named, "--ports", PORTS)
        assert done.status == 0
        check_ports(b, done, PORTS)
        assert not set(listening(a).values()) & EVERY
        assert b.states() == {"a": "up", "b": "up"}
        check_token(a, token)
        check_children(a, b)
        check_reach(a, b, token)
        check_off(a)
        check_off(b)
        if os.geteuid() == 0:
            check_workspace(a, b)
            if LONG:  # its parts that need no cluster: test_ray_sandbox
                check_sandboxes(a, b, address, token)
        check_restarts(a, b)
        check_kill_of_raylet(a, b)
        if LONG:  # Ray sees after 17 s that the raylet was killed
            done = b.fleet(*words, token, "--node", "b")
            # An actor of b that Ray had started on a would have kept its name.
            assert (done.status, done.err) == (0, b"")
            assert len(pids_of(a.directory, "ray::NodeActor")) == 1
        else:
            assert b.fleet("leave").said("Ray here is ended")
        with restarted(a):
            done = (b if LONG else a).fleet("down")
            assert (done.status, done.err) == (0, b"")
            until(lambda: not Path(a.directory, ray_processes.TOKEN).exists())
            assert_nothing_left(a, b)


# spec FL1, FL8
@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_start_ends_with_its_command(number: signal.Signals) -> None:
    with place("a") as a:
        words = ("up", "--control", a.control, "--port", str(free_port()))
        with subprocess.Popen((SANDHOST, "fleet", *words), env=ENVIRONMENT) as command:
            until(lambda: ray_processes.is_running(a.directory), longest_s=0.05)
            while command.poll() is None:  # again, as an impatient user does
                command.send_signal(number)
                select.select([], [], [], 0.05)
        assert command.returncode in {128 + number, -number}
        until(lambda: not ray_processes.is_there(a.directory))
        until(lambda: not Path(a.directory, ray_processes.TOKEN).exists())
        assert_nothing_left(a)
        assert a.fleet("ps").said("this node is in none")


USERS = ("--disable-usage-stats", "--num-cpus=0")
PORTS_OF_USER = ("--min-worker-port=21800", "--max-worker-port=21840")
RAY = str(Path(sys.executable).with_name("ray"))


@contextmanager
def users_ray(token: str | None, *words: str) -> Iterator[list[int]]:
    """Start Ray as its user does, beside all nodes; yield its processes."""
    with tempfile.TemporaryDirectory(prefix="u", dir="/tmp") as where:
        # The marks of its processes, by which this test finds and ends them.
        env = ray_processes.environment(token) | {ray_processes.MARK: where}
        started = [RAY, "start", f"--temp-dir={where}/ray", *USERS, *words]
        said = Path(where) / "out"
        try:
            with said.open("wb") as out:
                done = subprocess.run(
                    started, env=env, stdout=out, stderr=out, check=False
                )
            assert done.returncode == 0, said.read_text()
            yield pids_of(where, "")
        finally:
            ray_processes.end(where)


# spec FL1, FL8, FL9
@pytest.mark.chaos
def test_a_node_on_a_ray_that_runs_already_leaves_it_alone() -> None:
    if OWN is None:
        pytest.skip("this machine has no address but loopback")
    with place("a") as a, place("b") as b:
        port = free_port()
        at = ("--bind", OWN, "--port", str(port), "--ports", PORTS_OF_HEAD)
        done = a.fleet("up", "--node", "a", *at, "--json")
        assert done.status == 0, done.err
        check_ports(a, done, PORTS_OF_HEAD, port)
        address, token = json.loads(done.out).values()
        named = ("--node", "b", "--bind", OWN, "--token-file", token)
        words = ("join", *named, "--address")
        with users_ray(token, f"--address={address}", *PORTS_OF_USER) as pids:
            check_killed_join(a, b, (*words, address))
            done = b.fleet(*words, address)
            assert done.status == 0, done.err
            assert done.said("without the resource 'sandhost'")
            assert not ray_processes.is_running(b.directory)
            assert a.states() == {"a": "up", "b": "up"}
            spawned = ("--node", "b", "--name", "w", "--", "sleep", "600")
            assert a.fleet("spawn", *spawned).status == 0
            child = row_of(a, "w")["pid"]
            done = b.fleet("leave")
            assert (done.status, done.err) == (0, b"")
            until(lambda: a.states()["b"] == "left")
            assert not os.path.exists(f"/proc/{child}")
            until(lambda: is_deaf(f"{b.where}/run/fleet"))
            assert_nothing_left(b)
            assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
            # Nor is it the node's after the daemon was killed.
            assert b.fleet(*words, address).status == 0
            kill(b.daemon.process.pid)
            assert b.fleet("leave").said("no daemon at")
            until(lambda: is_deaf(f"{b.where}/run/fleet"))
            assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
        until(lambda: a.states()["b"] == "lost")
        assert a.fleet("forget", "b").status == 0
        done = a.fleet("down")
        assert (done.status, done.err) == (0, b"")


def check_killed_join(a: Place, b: Place, words: tuple[str, ...]) -> None:
    """Kill a join that has made its node's actor: on a user's Ray nobody ends that."""
    (directory,) = pids_of(a.directory, "DirectoryActor")
    os.kill(directory, signal.SIGSTOP)
    try:
        command = (SANDHOST, "fleet", *words, "--control", b.control)
        with subprocess.Popen(command, env=ENVIRONMENT) as join:
            until(lambda: bool(actors_of(b)), longest_s=0.05)
            join.kill()
        until(lambda: not actors_of(b))
    finally:
        os.kill(directory, signal.SIGCONT)
    until(lambda: is_deaf(f"{b.where}/run/fleet"))


def actors_of(one: Place) -> list[int]:
    """Return the processes that have a node's log open, as its actor has."""
    log = f"{one.directory}/{ray_processes.ACTORS_LOG}"
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdecimal() and os.readlink(process / "fd" / "2") == log:
                found.append(int(process.name))
    return found


# spec FL9
@pytest.mark.chaos
def test_a_ray_without_a_token_is_not_joined() -> None:
    if OWN is None:
        pytest.skip("this machine has no address but loopback")
    with place("c") as c:
        port = str(free_port())
        head = ("--head", f"--port={port}", "--include-dashboard=false")
        with users_ray(None, *head):
            (c.where / "token").write_text("0" * 64)
            (c.where / "token").chmod(0o600)
            given = ("--token-file", str(c.where / "token"))
            done = c.fleet("join", "--address", f"{OWN}:{port}", *given)
            assert done.status == 1
            assert done.said("takes requests without a token")
            assert_nothing_left(c)


def check_refusals(a: Place, b: Place, words: tuple[str, ...], token: str) -> None:
    """Begin and join in ways that are refused; nothing has changed."""
    assert a.fleet("up").said("this node is in one already")
    assert b.fleet(*words, token, "--node", "a").said("a node of that name")
    wrong = b.where / "wrong"
    wrong.write_text("0" * 64)
    wrong.chmod(0o644)
    assert b.fleet(*words, str(wrong)).said("others may read it; chmod 600")
    wrong.chmod(0o600)
    assert b.fleet(*words, str(wrong)).said(
        "its token is another one; give the address and the token file"
    )
    address = words[2]
    with another_version(address, token) as told:
        done = b.fleet(*words, token)
        assert done.status == 1
        assert all(done.said(version) for version in told)
    assert_nothing_left(b)
    assert a.states() == {"a": "up"}


EVERY = {"0.0.0.0", "::"}  # noqa: S104 - looked for


def check_ports(one: Place, entered: Outcome, ports: str, *heads: int) -> None:
    """Look at the ports on which a node's Ray listens: all of them are in the range.

    Those that are open on every address are told.

    Args:
        one: the node, whose address is not 127.0.0.1.
        entered: its `up` or `join`.
        ports: the range.
        heads: the port of the fleet's head, which is beside the range, if it is here.
    """
    first, last = map(int, ports.split("-"))
    found = listening(one)
    own = found.keys() - set(heads)
    assert own
    assert all(first <= port <= last for port in own), own
    is_open = sorted(port for port, where in found.items() if where in EVERY)
    assert len(is_open) >= 2 + len(heads)
    assert set(is_open) >= set(heads)
    told = entered.err.decode().partition("this machine: ")[2].partition(";")[0]
    assert sorted(map(int, told.split(", "))) == is_open


def listening(one: Place) -> dict[int, str]:
    """Return the ports on which a node's Ray listens, with their addresses."""
    inodes = set()
    for pid in pids_of(one.directory, ""):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(fd))
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == "0A" and f"socket:[{row[9]}]" in inodes:
                address, _, port = row[1].partition(":")
                # Words of the processor's order.
                parts = struct.iter_unpack("=I", bytes.fromhex(address))
                words = [struct.pack("!I", *word) for word in parts]
                found = ipaddress.ip_address(b"".join(words))
                mapped = getattr(found, "ipv4_mapped", None)
                ports[int(port, 16)] = str(mapped or found)
    return ports


def check_token(a: Place, token: str) -> None:
    """Look for the token in all command lines and environments, and in all files."""
    assert os.stat(token).st_mode & 0o777 == 0o600
    secret = Path(token).read_bytes()
    assert len(pids_of(a.directory, "")) >= 5
    for process in Path("/proc").glob("[0-9]*"):
        for part in ("cmdline", "environ"):
            with suppress(OSError):
                assert secret not in (process / part).read_bytes()
    files = [one for one in a.where.rglob("*") if one.is_file()]
    assert Path(a.directory, ray_processes.ACTORS_LOG) in files
    assert len(files) > 20  # Ray's logs, too
    holders = [one for one in files if secret in one.read_bytes()]
    assert holders == [Path(token)]


OFF = ("dashboard.py", "ray.util.client.server", "log_monitor.py", "monitor.py")
"""Programs of what is off: dashboard, client server, log monitor, autoscaler."""

REACH = """
import json, os, socket, sys
ports, sockets, paths = json.loads(sys.argv[1])
reached = [name for name in os.environ if "RAY" in name]
for place in ports:
    try:
        socket.create_connection(place, 5).close()
        reached.append(place)
    except OSError:
        pass
for path in sockets:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        reached.append(path)
    except OSError:
        pass
for path in paths:
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).close()
        reached.append(path)
    except OSError:
        pass
print(json.dumps(reached))
"""


def check_reach(a: Place, b: Place, token: str) -> None:
    """Let children reach for Ray: one that is fenced, and one that finds it there."""
    ports = [
        ["127.0.0.1" if where in EVERY else where, port]
        for one in (a, b)
        for port, where in listening(one).items()
    ]
    assert len(ports) > 4
    sockets = [str(one) for one in Path(a.directory).rglob("*") if one.is_socket()]
    assert len(sockets) > 1
    paths = [token, f"{a.directory}/{ray_processes.SESSIONS}", a.directory]
    words = ("--", *PYTHON, "-c", REACH, json.dumps([ports, sockets, paths]))
    assert json.loads(a.fleet("run", "--node", "a", *words).out) == []
    done = a.fleet("run", "--node", "a", "--policy", "bare", *words)
    assert done.said("needs a sandbox")
    done = a.fleet("run", "--node", "b", "--policy", "bare", *words)
    assert json.loads(done.out) == [*ports, *sockets, *paths]


def check_off(one: Place) -> None:
    """Look for programs of Ray that a fleet does not use."""
    for name in OFF:
        assert not pids_of(one.directory, name), name


SETTINGS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
}
"""Variables of all programs of Ray on a node, beside the token's path."""

SWITCHES = {
    "--include-dashboard=false",
    "--include-log-monitor=false",
    "--disable-usage-stats",
    "--no-monitor",
}
"""Words with which the head's Ray is started."""

PROGRAMS = ("gcs_server", "raylet/raylet", "ray::DirectoryActor", "ray::NodeActor")
"""Some programs of the head, by words of their command lines."""


def check_start(a: Place) -> tuple[str, str]:
    """Begin a fleet; all of Ray has a token, and nothing runs that is not used.

    Returns:
        Its address, and the file of its token.
    """
    port = str(free_port())
    # The user's own settings for Ray do not count.
    users = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "1"}
    words = ("fleet", "up", "--control", a.control, "--node", "a", "--port", port)
    done = sandhost(*words, env={**ENVIRONMENT, **users})
    assert (done.status, done.err) == (0, b"")
    address, token = f"127.0.0.1:{port}", f"{a.directory}/{ray_processes.TOKEN}"
    said = f"--address {address} --token-file F`, F being a copy of {token}\n"
    assert done.out.decode().endswith(said)
    found = [pid for name in PROGRAMS for pid in pids_of(a.directory, name)]
    assert len(found) >= len(PROGRAMS)
    for pid in found:
        settings = SETTINGS | {"RAY_AUTH_TOKEN_PATH": token}
        assert variables(pid).items() >= settings.items()
    (start,) = pids_of(a.directory, "supervisor.cluster.setup")
    words_of_start = Path(f"/proc/{start}/cmdline").read_text().split("\0")
    assert set(words_of_start) >= SWITCHES
    # As many as children may run here, for others to see.
    (node,) = a.shown()["nodes"]
    assert f'--resources={{"sandhost":{node["capacity"]}}}' in words_of_start
    check_off(a)
    return address, token


def variables(pid: int) -> dict[str, str]:
    """Return the environment of a process, as it was started."""
    lines = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def check_children(a: Place, b: Place) -> None:
    """Start children on both nodes, look at them and end them, from either."""
    script = "echo on $SANDHOST_FLEET_NODE; exec sleep 600"
    done = a.fleet("spawn", "-n", "2", "--name", "w", "--", "sh", "-c", script)
    assert (done.status, done.out) == (0, b"w-0\nw-1\n")
    rows = {row["name"]: row for row in b.shown()["children"]}
    assert sorted(row["node"] for row in rows.values()) == ["a", "b"]
    assert {row["state"] for row in rows.values()} == {"running"}
    for name, row in rows.items():
        said = f"on {row['node']}\n".encode()
        for one in (a, b):
            until(lambda: one.fleet("logs", name).out == said)  # noqa: B023 - at once
        top = json.loads(a.fleet("top", "--json").out)
        assert (row["node"], row["pid"]) in [(one["node"], one["pid"]) for one in top]
        trace = a.fleet("trace", name)
        assert (trace.status, trace.err) == (0, b"")
        assert b"spawned" in trace.out or b"started" in trace.out
    done = a.fleet("spawn", "--name", "w-0", "--", "true")
    assert (done.status, done.said("the name is taken")) == (1, True)
    done = a.fleet("spawn", "--needs", "tpu", "--", "true")
    assert (done.status, done.said("no node has these labels")) == (1, True)
    done = a.fleet("spawn", "-n", "9999", "--name", "x", "--", "true")
    assert (done.status, done.said("there is room for")) == (1, True)
    done = a.fleet("spawn", "--name", "y", "--", "/no/such")
    assert (done.status, done.said("/no/such")) == (1, True)
    assert len(b.shown()["children"]) == 3
    done = a.fleet(
        "run", "--needs", "gpu", "--", "sh", "-c", "echo o; echo e >&2; exit 7"
    )
    assert (done.status, done.out, done.err) == (7, b"o\n", b"e\n")
    for name in rows:
        assert a.fleet("kill", name).status == 0
    until(lambda: {row["state"] for row in b.shown()["children"]} == {"ended"})
    (account,) = json.loads(a.fleet("quota", "--json").out)["accounts"]
    assert (account["limit"], account["spent"], account["slices"]) == (5000, 0, [])
    assert (account["free"], account["window"]) == (5000, "never")


@contextmanager
def restarted(a: Place) -> Iterator[None]:
    """Kill a's daemon and start it again: its children are gone, and it joins anew."""
    before = a.shown()
    pids = [row["pid"] for row in before["children"] if row["state"] == "running"]
    assert pids
    kill(a.daemon.process.pid)
    with daemon(a.where, FLEET.format(where=a.where), grace="1s"):
        until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
        until(lambda: a.states()["a"] == "up")
        session = before["nodes"][0]["session"]
        until(lambda: a.shown()["nodes"][0]["session"] != session)
        until(lambda: row_of(a, "again")["incarnation"] == 3)
        until(lambda: row_of(a, "again")["state"] == "running")
        done = sandhost("doctor", "--leaks", "--control", a.control)
        assert done.status == 0, done.out
        yield


def row_of(one: Place, name: str) -> dict[str, Any]:
    """Return a child as `fleet ps` shows it."""
    rows = {row["name"]: row for row in one.shown()["children"]}
    return dict(rows[name])


def check_workspace(a: Place, b: Place) -> None:
    """Look at a child's changes from another node, and commit them there."""
    words = ("--policy", "agent", "--node", "b", "--name", "ws")
    script = "echo more >> a.txt; exec sleep 600"
    assert a.fleet("spawn", *words, "--", "sh", "-c", script).status == 0
    until(lambda: a.fleet("diff", "ws").status == 1)
    done = a.fleet("diff", "ws")
    assert done.err == b""
    assert b"+more\n" in done.out
    assert a.fleet("kill", "ws").status == 0
    until(lambda: a.shown()["children"][-1]["state"] == "ended")
    done = a.fleet("commit", "ws")
    assert (done.status, done.out, done.err) == (0, b"committed  a.txt\n", b"")
    assert (b.where / "repo" / "a.txt").read_text() == "hello\nmore\n"


SANDBOXES = """
import sys
import ray
import sandhost.ray
from supervisor.cluster.ray_adapter import Driver

with Driver(sys.argv[1], "127.0.0.1"):
    boxes = [sandhost.ray.create(sys.argv[2], env={"COLOUR": "red"}) for _ in range(2)]
    for box in boxes:
        done = ray.get(box.exec.remote("echo $COLOUR > c.txt; cat a.txt; exit 3"))
        content = ray.get(box.read_file.remote("c.txt")).decode()
        status = ray.get(box.get_status.remote()).value
        name = ray.get(box.get_instance_id.remote())
        print(done.exit_code, done.stdout.strip(), content.strip(), status, name)
    exec(sys.argv[3].replace("/srv/repo", sys.argv[2]))
    sys.stdout.flush()
    sys.stdin.readline()
    ray.kill(boxes[0])  # its process ends at once
    sys.stdin.readline()
"""

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "fleet.md"


# spec FL3
def check_sandboxes(a: Place, b: Place, address: str, token: str) -> None:
    """Make sandboxes by Ray's interface; they end with the actor, and the driver."""
    example = PAGE.read_text().partition("```py\n")[2].partition("```")[0]
    base = a.where / "repo"
    (base / "Makefile").write_text("test:\n\t@echo passed $(CI)\n")
    words = [sys.executable, "-c", SANDBOXES, address, str(base), example]
    env = ray_processes.environment(token)
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe) as driver:
        assert driver.stdout is not None
        names = []
        for _ in range(2):
            *said, name = driver.stdout.readline().decode().split()
            assert said == ["3", "hello", "red", "RUNNING"]
            names.append(name)
        assert driver.stdout.readline() == b"0 passed 1\n"
        places = {one.name: one for one in (a, b)}
        home = places[row_of(a, names[0])["node"]]
        assert names[0] in [one.name for one in home.daemon.client.workspaces()]
        assert pids_of(home.directory, "ray::Sandbox")
        assert driver.stdin is not None
        driver.stdin.write(b"\n")
        driver.stdin.flush()
        until(lambda: row_of(a, names[0])["state"] == "ended")
        assert row_of(a, names[1])["state"] == "running"
        driver.kill()
    until(lambda: {row_of(a, name)["state"] for name in names} == {"ended"})
    left = [one.name for place in (a, b) for one in place.daemon.client.workspaces()]
    assert not set(names) & set(left)


def check_restarts(a: Place, b: Place) -> None:
    """Kill actors: they are started again on their nodes, and the sessions go on."""
    sessions = [node["session"] for node in a.shown()["nodes"]]
    for one, what in ((a, "Directory"), (b, "NodeActor")):
        (pid,) = pids_of(one.directory, f"ray::{what}")
        kill(pid)
        until(partial(new_actor, one.directory, what, pid))
        until(lambda: b.fleet("ps").status == 0)
    assert b.states() == {"a": "up", "b": "up"}
    assert [node["session"] for node in a.shown()["nodes"]] == sessions


def check_kill_of_raylet(a: Place, b: Place) -> None:
    """Kill b's raylet: it takes the node's Ray with it, and the daemon goes on."""
    # Spread over both nodes, the second and the fourth are on b.
    children = {"x": "no", "once": "no", "y": "no", "again": "always"}
    for name, restart in children.items():
        words = ("--name", name, "--restart", restart, "--", "sleep", "600")
        assert a.fleet("spawn", *words).status == 0
    before = {row["name"]: row for row in a.shown()["children"]}
    assert [before[name]["node"] for name in children] == ["a", "b", "a", "b"]
    (raylet,) = pids_of(b.directory, "/raylet/raylet")
    kill(raylet)
    until(lambda: not ray_processes.is_running(b.directory))
    until(lambda: a.states()["b"] == "lost")
    after = {row["name"]: row for row in a.shown()["children"]}
    assert after["once"]["state"] == "lost"
    assert not os.path.exists(f"/proc/{before['once']['pid']}")
    assert not os.path.exists(f"/proc/{before['again']['pid']}")
    until(lambda: row_of(a, "again")["state"] == "running")
    again = row_of(a, "again")
    assert (again["node"], again["incarnation"]) == ("a", 2)
    assert a.fleet("forget", "b").status == 0
    assert b.daemon.process.poll() is None


REWRITE = """
import json, sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
key = b"CLUSTER_METADATA"
before = client.internal_kv_get(key, b"cluster")
client.internal_kv_put(key, sys.argv[2].encode() or before, True, b"cluster")
sys.stdout.buffer.write(before)
"""


@contextmanager
def another_version(address: str, token: str) -> Iterator[list[str]]:
    """Have a head tell another version of Ray; yields both, as they must be named."""
    env = ray_processes.environment(token)

    def rewrite(text: str) -> bytes:
        words = [sys.executable, "-c", REWRITE, address, text]
        done = subprocess.run(words, env=env, stdout=subprocess.PIPE, check=True)
        return bytes(done.stdout)

    before = rewrite("")
    found = json.loads(before)
    changed = {**found, "ray_version": "2.59.0"}
    rewrite(json.dumps(changed))
    try:
        yield [
            f"Ray {one['ray_version']} on Python {one['python_version']}"
            for one in (found, changed)
        ]
    finally:
        rewrite(before.decode())


def new_actor(directory: str, what: str, before: int) -> bool:
    """Return whether an actor has another process than before."""
    pids = pids_of(directory, f"ray::{what}")
    return bool(pids) and before not in pids
