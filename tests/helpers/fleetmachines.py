"""Machines of a fleet: namespaces on this one, with a daemon in each.

    with fleet("a", "b") as (a, b):
        assert a.states() == {"a": "up", "b": "up"}
        b.cut()

A machine has a pid, net, mount and ipc namespace, `/run`, `/dev/shm` and groups of
processes of its own; files are shared. Its link goes to a bridge in a further net
namespace. Its pid 1 ends when this process closes a pipe, or ends, and all that the
machine ran ends with it. Needs root, iproute2 and cgroup v2.
"""

import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostlib.linux import processes
from supervisor.cluster import ray_processes
from supervisor.sandbox.groups import Hierarchy, hierarchies

ROOT = Path(__file__).parents[2]
SANDHOST = Path(sys.executable).with_name("sandhost")
PATIENCE_S = 90.0
"""Longest wait for anything, on a machine where much else runs."""

NETWORK = "10.213.0"
HUB = "hub"

HEAD = """
[host]
runtime_dir = "{where}/run"
state_dir = "{where}/state"
grace = "1s"
"""

# Ended processes whose parents are gone come to pid 1: to ignore SIGCHLD reaps them.
INIT = """
import signal, subprocess, sys
for file in sys.argv[1:]:
    with open(file, "w") as group:
        group.write("0")
for place in ("/run", "/dev/shm"):
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""
BRIDGE = (
    f"ip link add {HUB} type bridge && ip link set {HUB} up && echo ready && exec cat"
)
JOIN_GROUPS = (
    'while [ "$1" != -- ]; do echo 0 >"$1" || exit; shift; done; shift; exec "$@"'
)


class UnavailableError(Exception):
    """There can be no such machines here; the text says why."""


@dataclass
class Machine:
    """One machine.

    Attributes:
        name: its own, and its node's.
        address: of its link.
        where: its daemon's directories are in it.
        init: its first process, as this machine numbers it.
        hub: process in the bridge's namespace.
        groups: its groups of processes; the first is of version 2.
        config: of its daemon.
        daemon: the pid of its daemon, as this machine numbers it.
    """

    name: str
    address: str
    where: Path
    init: int
    hub: int
    groups: list[str]
    config: str
    daemon: int = 0

    @property
    def control(self) -> str:
        """The daemon's control socket; any process of this user can ask it."""
        return f"{self.where}/run/control"

    @property
    def directory(self) -> str:
        """Where its node keeps what Ray needs."""
        return f"{self.where}/state/{ray_processes.DIRECTORY}"

    def words(self, *command: str | Path) -> list[str]:
        """Return a command line that runs a command in here."""
        inside = ("nsenter", "-t", str(self.init), "-m", "-n", "-i", "-p", "--")
        enter = ("sh", "-c", JOIN_GROUPS, "sh", *_joins(self.groups), "--", *inside)
        return [*enter, *map(str, command)]

    def run(
        self, *command: str | Path, timeout_s: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in here to its end."""
        return subprocess.run(
            self.words(*command),
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
            env=_environment(), cwd=self.where, timeout=timeout_s, check=False,
        )  # fmt: skip

    def start(self, *command: str | Path, **variables: str) -> None:
        """Start a command in here, which goes on; `stderr` has what it says.

        Args:
            command: its words.
            variables: more of its environment.
        """
        with (self.where / "stderr").open("ab") as err:
            subprocess.run(
                self.words("setsid", "--fork", *command),
                stdin=subprocess.DEVNULL, stdout=err, stderr=err, check=True,
                env={**_environment(), **variables}, cwd=ROOT,
            )  # fmt: skip

    def fleet(self, command: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `sandhost fleet COMMAND` in here."""
        return self.run(SANDHOST, "fleet", command, "--control", self.control, *words)

    def asked(self, command: str, *words: str) -> Any:
        """Return what a command of the fleet prints as JSON.

        Raises:
            AssertionError: it fails.
        """
        done = self.fleet(command, "--json", *words)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def states(self) -> dict[str, str]:
        """Return the states of the fleet's nodes, asked in here."""
        return {node["name"]: node["state"] for node in self.asked("ps")["nodes"]}

    # Its daemon and its node

    def start_daemon(self) -> None:
        """Start the daemon; return when it is ready.

        Raises:
            AssertionError: it is not.
        """
        (self.where / "c.toml").write_text(
            HEAD.format(where=self.where) + self.config.format(where=self.where)
        )
        notify = self.where / "notify"
        notify.unlink(missing_ok=True)
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as ear:
            ear.bind(str(notify))
            ear.settimeout(PATIENCE_S)
            serve = (SANDHOST, "serve", "--config", self.where / "c.toml")
            self.start(*serve, NOTIFY_SOCKET=str(notify))
            try:
                while not ear.recv(4096).startswith(b"READY=1"):
                    pass  # how long its start may last
            except TimeoutError:
                raise AssertionError((self.where / "stderr").read_text()) from None
        self.daemon = _listener(self.control)

    def up(self, *words: str) -> tuple[str, str]:
        """Begin a fleet in here; return its address and the file of its token."""
        named = ("--node", self.name, "--bind", self.address)
        said = self.asked("up", *named, *words)
        return str(said["address"]), str(said["token_file"])

    def join(self, address: str, token_file: str, *words: str) -> None:
        """Join a fleet."""
        named = ("--node", self.name, "--bind", self.address)
        reached = ("--address", address, "--token-file", token_file)
        self.asked("join", *reached, *named, *words)

    # Its processes and its link

    def kill(self, *pids: int) -> None:
        """Kill processes, as this machine numbers them."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_daemon(self) -> None:
        """Kill the daemon."""
        self.kill(self.daemon)

    def pids(self, what: str = "") -> list[int]:
        """Return its processes, as this machine numbers them.

        Args:
            what: only those with this in their command line.
        """
        found = []
        for directory, _, _ in os.walk(self.groups[0]):
            with suppress(OSError):  # removed meanwhile
                numbers = Path(directory, "cgroup.procs").read_text().split()
                found += [int(one) for one in numbers if what in _command_line(one)]
        return found

    def pid_of_ray(self, what: str) -> int:
        """Return a process of its Ray: `raylet`, `ray::NodeActor`, `ray::DirectoryActor`."""
        (found,) = (pid for pid in self.pids(what) if _begins(pid, what))
        return found

    def freeze(self) -> None:
        """Stop all its processes, as the pause of a machine does; its clock goes on."""
        Path(self.groups[0], "cgroup.freeze").write_text("1")
        self._await_frozen(is_frozen=True)

    def thaw(self) -> None:
        """Let its processes go on."""
        Path(self.groups[0], "cgroup.freeze").write_text("0")
        self._await_frozen(is_frozen=False)

    def _await_frozen(self, *, is_frozen: bool) -> None:
        wanted = f"frozen {is_frozen:d}"
        events = Path(self.groups[0], "cgroup.events")
        until(lambda: wanted in events.read_text().splitlines())

    def cut(self) -> None:
        """Take its link from the bridge: what it sends and is sent is lost."""
        self._ip("link", "set", "dev", self.name, "nomaster")

    def restore(self) -> None:
        """Give its link back."""
        self._ip("link", "set", "dev", self.name, "master", HUB)

    def _ip(self, *words: str) -> None:
        _run("nsenter", "-t", str(self.hub), "-n", "ip", *words)


@contextmanager
def machines(*names: str, config: str = "[fleet]\n") -> Iterator[tuple[Machine, ...]]:
    """Yield machines, with a daemon each; at the end nothing of them is left.

    Args:
        names: theirs.
        config: of their daemons, beside directories; `{where}` is the machine's own.

    Raises:
        UnavailableError: there can be none here.
    """
    own = _check()
    with ExitStack() as stack:
        hub = stack.enter_context(_namespace(["unshare", "--net", "sh", "-c", BRIDGE]))
        found = []
        for number, name in enumerate(names, 1):
            made = _machine(name, f"{NETWORK}.{number}", hub, own, config)
            found.append(stack.enter_context(made))
            found[-1].start_daemon()
        yield tuple(found)


@contextmanager
def fleet(*names: str, config: str = "[fleet]\n") -> Iterator[tuple[Machine, ...]]:
    """Yield machines whose nodes are a fleet; the first is its head.

    Args:
        names: as for `machines`.
        config: as for `machines`.

    Raises:
        UnavailableError: there can be none here.
    """
    with machines(*names, config=config) as found:
        joined(*found)
        yield found


def joined(head: Machine, *others: Machine) -> tuple[str, str]:
    """Make a fleet of machines; return its address and the file of its token."""
    reached = head.up()
    for one in others:
        one.join(*reached)
    return reached


def until(is_so: Any, patience_s: float = PATIENCE_S) -> None:
    """Ask until something is so.

    Raises:
        AssertionError: it is not in time.
    """
    end = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < end, "not so in time"
        select.select([], [], [], 0.02)


def _check() -> tuple[Hierarchy, ...]:
    """Return the hierarchies of groups of this process.

    Raises:
        UnavailableError: something is missing.
    """
    if os.geteuid():
        raise UnavailableError("machines in namespaces need root")
    for program in ("ip", "unshare", "nsenter", "setsid"):
        if shutil.which(program) is None:
            raise UnavailableError(f"machines in namespaces need {program}")
    own = hierarchies()
    if not own or own[0].kind != "v2":
        raise UnavailableError("machines in namespaces need cgroup v2")
    return own


@contextmanager
def _machine(
    name: str, address: str, hub: int, own: tuple[Hierarchy, ...], config: str
) -> Iterator[Machine]:
    """Yield a machine without a daemon."""
    with ExitStack() as stack:
        # Short, for Ray has its sockets in there.
        where = Path(tempfile.mkdtemp(prefix=f"{name}-", dir="/tmp"))
        stack.callback(shutil.rmtree, where, ignore_errors=True)
        (where / "run").mkdir(0o700)
        groups = []
        for hierarchy in own:
            group = f"{hierarchy.group}/fleet-{name}-{secrets.token_hex(4)}"
            Path(group).mkdir()
            stack.callback(_remove_groups, group)
            groups.append(group)
        init = (sys.executable, "-I", "-S", "-c", INIT, *_joins(groups))
        namespaces = ("--pid", "--fork", "--mount-proc", "--net", "--mount", "--ipc")
        parent = stack.enter_context(_namespace(["unshare", *namespaces, *init]))
        (pid,) = processes.children_of(parent)
        stack.callback(_end, pid)
        _plug_in(name, address, pid, hub)
        yield Machine(name, address, where, pid, hub, groups, config)


def _plug_in(name: str, address: str, pid: int, hub: int) -> None:
    """Link a machine to the bridge."""
    net = ("nsenter", "-n", "-t")
    end = ("peer", "name", "eth0", "netns", str(pid))
    _run(*net, str(hub), "ip", "link", "add", "name", name, "type", "veth", *end)
    _run(*net, str(hub), "ip", "link", "set", "dev", name, "master", HUB, "up")
    _run(*net, str(pid), "ip", "address", "add", f"{address}/24", "dev", "eth0")
    for link in ("lo", "eth0"):
        _run(*net, str(pid), "ip", "link", "set", link, "up")


@contextmanager
def _namespace(words: list[str]) -> Iterator[int]:
    """Yield the pid of a program that says `ready`, and ends when its input does."""
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != b"ready\n":
            said = process.stderr.read().decode().strip()
            raise UnavailableError(f"cannot make a namespace: {said}")
        try:
            yield process.pid
        finally:
            process.stdin.close()
            process.wait(PATIENCE_S)


def _end(init: int) -> None:
    """Kill a machine's first process, and all others of it by that."""
    os.kill(init, signal.SIGKILL)  # its parent has not reaped it


def _remove_groups(top: str) -> None:
    """Remove a group and those in it; its processes have ended."""
    names = [one for one, _, _ in os.walk(top, topdown=False)]
    for name in names:
        until(lambda: _is_removed(name))  # noqa: B023 - at once


def _is_removed(name: str) -> bool:
    try:
        Path(name).rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # EBUSY: the kernel has not taken its last process out of it yet
        return False
    return True


def _joins(groups: list[str]) -> list[str]:
    """Return the files by which a process of one thread joins groups.

    In version 1 a process that joins by `cgroup.procs` waits for every processor.
    """
    first, *others = groups
    return [f"{first}/cgroup.procs", *(f"{one}/tasks" for one in others)]


def _environment() -> dict[str, str]:
    path = os.pathsep.join((str(SANDHOST.parent), os.defpath))
    return {"PATH": path, "HOME": "/nonexistent", "LANG": "C.UTF-8"}


def _listener(path: str) -> int:
    """Return the process that listens at a socket, as this machine numbers it."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(peer[:4], sys.byteorder)


def _command_line(pid: int | str) -> str:
    with suppress(OSError):  # it has ended
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
        return data.replace(b"\0", b" ").decode(errors="replace")
    return ""


def _begins(pid: int, what: str) -> bool:
    """Tell whether the program or the title of a process is named so."""
    return Path(_command_line(pid).split(" ")[0]).name == what


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"{' '.join(words[-8:])}: {done.stderr.strip()}")
