"""The program `python -m supervisor.cluster.setup PID`, which has a node join.

A command starts it with an order on stdin, and reads one line of its stdout, the
outcome. It starts Ray, is a driver of it for a moment, makes the actors and ends. Called with
`ray WORDS` it is Ray's own command line, with `probe ADDRESS` a question to a cluster.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hostlib.linux.syscalls import PR_SET_PDEATHSIG, prctl
from hostlib.threads import in_daemon_thread
from supervisor.cluster import ray_processes
from supervisor.cluster.names import LOOPBACK, OWN_PORTS, WORKER_PORTS
from supervisor.cluster.orders import (
    DirectoryOrder,
    NodeOrder,
    SetupOrder,
    SetupOutcome,
)
from supervisor.cluster.ray_adapter import (
    PAUSE_S,
    UP_S,
    AdapterError,
    Cluster,
    Driver,
    foreign_raylet,
    no_reach,
    own_versions,
    raylet_name,
    run_ray,
)
from supervisor.cluster.signals import exit_at_signals, ignore_signals
from supervisor.fleet.messages import RayPlace
from supervisor.network.own_addresses import read_own_addresses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.cluster.ray_processes import Program

OBJECTS_BYTES = 80 * 1024 * 1024
"""Size of Ray's store of objects, which the fleet does not use: Ray's minimum."""


REACH_S = 5.0
"""Longest wait for a connection to the head's machine; Ray itself tries for 40 s."""

PATIENCE_S = 5.0
"""Longest wait for a start to end by a signal.

Ray checks for signals each second, but not for 40 s while it waits for its head.
"""

RESOURCE = "sandhost"
"""Ray's resource of a node, for others to see: as many as children may run there."""

_EVERY = "0.0.0.0"  # noqa: S104 - Ray's head listens on every address

_NO_RESOURCE = (
    f"Ray runs here already, without the resource {RESOURCE!r}, and takes no more of"
    " them; start it with --resources"
)

_NO_DIRECTORY = (
    "the fleet's directory never moves to the Ray here: it is without resource"
)


def set_up(order: SetupOrder) -> SetupOutcome:
    """Bring a node into the fleet; after a failure, end the processes started for it.

    Raises:
        AdapterError: it cannot be.
    """
    directory = order.node.directory
    try:
        return _join(order) if order.head is None else _found(order, order.head)
    except BaseException:
        ray_processes.end(directory)
        raise


def _found(order: SetupOrder, head: DirectoryOrder) -> SetupOutcome:
    address = f"{order.bind}:{order.port}"
    _check_free(order.bind, order.port)
    if order.bind != LOOPBACK:
        _check_free(_EVERY, order.port)
    name = raylet_name(order.node.node)
    words = ["--head", f"--port={order.port}", "--include-dashboard=false"]
    ports = _choose_ports(order.ports)
    process = _start_ray(order, ports, [*words, "--no-monitor"], name)
    _wait_raylet(process, order, address, name)
    with Driver(address, order.bind) as driver:
        node_id = driver.node_id(name)
        driver.make_directory(head, node_id)
        node = _with_ray(order, (*ports.ranges(), (order.port, order.port)))
        driver.make_node(node, node_id, is_again=False)
    return SetupOutcome(address, open_ports=_open_ports(order))


def _join(order: SetupOrder) -> SetupOutcome:
    address = order.address or ""
    _check_free(order.bind, 0)
    _check_reached(address)
    cluster = Cluster(address)
    own_versions().check(cluster.versions, address)
    _check_fleet(cluster, address)
    before = ray_processes.last_raylet(order.node.directory)
    cluster.check_name(order.node.node, before)
    note = ""
    foreign = foreign_raylet(cluster, _own_addresses())
    if foreign is None:
        name = raylet_name(order.node.node)
        ports = _choose_ports(order.ports)
        process = _start_ray(order, ports, [f"--address={address}"], name)
        _wait_raylet(process, order, address, name)
        ranges = ports.ranges()
    else:
        name, node_id = foreign
        workers = ray_processes.worker_ports(node_id)
        ranges = (*_each(cluster.ports_of(name)), *workers)
        note = _note_on_resources(cluster, name, order)
    node = _with_ray(order, ranges)
    with Driver(address, order.bind) as driver:
        driver.make_node(node, driver.node_id(name), is_again=before != "")
    return SetupOutcome(address, open_ports=_open_ports(order), note=note)


def _check_free(bind: str, port: int) -> None:
    """Refuse a place at which nothing can listen: Ray says of it only that it failed.

    Args:
        bind: an address, or `_EVERY`.
        port: 0 for any.

    Raises:
        AdapterError: the address is another machine's, or the port is in use.
    """
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((bind, port))
        except OSError as why:
            is_foreign = why.errno == errno.EADDRNOTAVAIL
            raise AdapterError(
                f"cannot start Ray at {bind}:{port}: {why.strerror}; choose another"
                f" {'by --bind' if is_foreign else 'port'}"
            ) from None


def _check_reached(address: str) -> None:
    """Refuse a head that takes no connection.

    Raises:
        AdapterError: there is none within `REACH_S`.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, UnicodeError) as why:
        reason = getattr(why, "strerror", None) or str(why)
        raise AdapterError(no_reach(address, reason)) from None


def _note_on_resources(cluster: Cluster, raylet: str, order: SetupOrder) -> str:
    """Return what a Ray lacks that its user has started without our resources."""
    notes = []
    if not cluster.has_resource(raylet, RESOURCE):
        notes.append(_NO_RESOURCE)
    if order.resource is not None and not cluster.has_resource(raylet, order.resource):
        notes.append(f"{_NO_DIRECTORY} {order.resource!r}")
    return "; ".join(notes)


def _check_fleet(cluster: Cluster, address: str) -> None:
    """Refuse a Ray on which no fleet was begun; one of a fleet has a token (FL9).

    Raises:
        AdapterError: it is one.
    """
    if cluster.is_fleet():
        return
    why = "no fleet was begun on its Ray"
    words = (sys.executable, "-m", "supervisor.cluster.setup", "probe", address)
    _, errors = ray_processes.run(words, None, b"")
    if not errors:
        why = f"its Ray takes requests without a token, and {why}"
    raise AdapterError(
        f"cannot join {address}: {why}; begin one by `sandhost fleet up`"
    )


class RayPorts(NamedTuple):
    """The ports of Ray on one node.

    Attributes:
        own: Ray's own; of one that is started here in the order of `OWN_PORTS`.
        workers: first and last one of actors.
    """

    own: tuple[int, ...]
    workers: tuple[int, int]

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Return them as first and last port of each range."""
        return (*_each(self.own), self.workers)


def _each(ports: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((port, port) for port in ports)


def _choose_ports(given: tuple[int, int] | None) -> RayPorts:
    """Return the ports for Ray here: all are known before anything listens."""
    if given is not None:
        first, last = given
        workers = first + len(OWN_PORTS)
        return RayPorts(tuple(range(first, workers)), (workers, last))
    with ExitStack() as stack:
        free = [stack.enter_context(socket.socket()) for _ in OWN_PORTS]
        for sock in free:
            sock.bind(("", 0))
        return RayPorts(tuple(sock.getsockname()[1] for sock in free), WORKER_PORTS)


def _with_ray(order: SetupOrder, ports: tuple[tuple[int, int], ...]) -> NodeOrder:
    """Return the order for a node actor, with where Ray may listen here (FL9)."""
    others = (str(one) for one in read_own_addresses() if not one.is_loopback)
    place = RayPlace((order.bind, *sorted(others)), ports)
    return msgspec.structs.replace(order.node, ray=place)


def _open_ports(order: SetupOrder) -> tuple[int, ...]:
    """Return the ports that Ray opens on every address where that is not loopback."""
    if order.bind == LOOPBACK:
        return ()
    return tuple(ray_processes.open_ports(order.node.directory))


def _own_addresses() -> frozenset[str]:
    """Return this machine's addresses."""
    return frozenset(map(str, read_own_addresses()))


def _start_ray(
    order: SetupOrder, ports: RayPorts, more: Sequence[str], name: str
) -> Program:
    directory = order.node.directory
    ray_processes.note_raylet(directory, name)
    words = (
        "--block",
        f"--node-ip-address={order.bind}",
        f"--node-name={name}",
        f"--temp-dir={directory}/{ray_processes.SESSIONS}",
        f"--object-store-memory={OBJECTS_BYTES}",
        f"--resources={_resources(order)}",
        "--num-cpus=0",
        "--num-gpus=0",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        *(f"{key}={port}" for key, port in zip(OWN_PORTS, ports.own, strict=True)),
        f"--min-worker-port={ports.workers[0]}",
        f"--max-worker-port={ports.workers[1]}",
        *more,
    )
    return ray_processes.start(
        (sys.executable, "-m", "supervisor.cluster.setup", "ray", "start", *words),
        directory,
        order.token_file,
        order.node.control,
    )


def _resources(order: SetupOrder) -> str:
    """Return the resources of a node for others to see, as JSON."""
    found = {RESOURCE: order.capacity}
    if order.resource is not None:
        found[order.resource] = 1
    return msgspec.json.encode(found).decode()


def _wait_raylet(process: Program, order: SetupOrder, address: str, name: str) -> None:
    """Return when the head lists a raylet.

    Raises:
        AdapterError: Ray has ended, or does not come up.
    """
    until_s = time.monotonic() + UP_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            break
        try:
            if name in Cluster(address).raylets():
                return
        except AdapterError:
            pass
        ray_processes.pause(PAUSE_S)
    log = f"{order.node.directory}/{ray_processes.LOG}"
    raise AdapterError(
        f"cannot start Ray at {address}: {ray_processes.last_error(log)}; see {log}"
    )


def _probe(address: str) -> int:
    """Ask a cluster whatever; say why that fails."""
    try:
        Cluster(address)
    except AdapterError as why:
        sys.stderr.write(f"{why}\n")
        return 1
    return 0


def _end_with(command: int, directory: str) -> None:
    """End this start with its command, also while Ray lets no signal through.

    Args:
        command: a pidfd.
        directory: of the node.
    """
    select.select([command], [], [])
    ray_processes.pause(PATIENCE_S)
    ray_processes.end(directory)
    os._exit(1)


def main() -> int:
    """Do what the command line or the order says; return the exit status."""
    if sys.argv[1:2] == ["ray"]:
        return run_ray(sys.argv[2:])
    if sys.argv[1:2] == ["probe"]:
        return _probe(sys.argv[2])
    exit_at_signals()
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # its command may be killed
    command = os.pidfd_open(os.getppid())
    if os.getppid() != int(sys.argv[1]):  # it was, before the kernel could tell
        return 1
    out = os.dup(1)
    os.dup2(2, 1)  # lines that Ray prints are no outcome
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=SetupOrder)
    in_daemon_thread(_end_with, command, order.node.directory)
    try:
        outcome = set_up(order)
    except (AdapterError, ray_processes.RayError) as why:
        outcome = SetupOutcome(error=str(why))
    except (SystemExit, KeyboardInterrupt):  # it may have cut the end of a failed start
        ignore_signals()
        ray_processes.end(order.node.directory)
        raise
    os.write(out, msgspec.json.encode(outcome) + b"\n")
    return 0 if outcome.address else 1


if __name__ == "__main__":
    sys.exit(main())
