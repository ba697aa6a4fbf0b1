"""How a command brings this machine's daemon into a fleet, and takes it out again.

Blocking, for the command line's process; nothing of Ray is imported here. An `enter` that
fails leaves nothing; `leave` ends by pidfd all that `enter` has started.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hostlib.extras import missing_package
from hostlib.paths import absolute
from hostlib.unix_names import is_deaf
from supervisor.cluster import ray_processes
from supervisor.cluster.client import NO_FLEET, FleetClient, door_of, is_there
from supervisor.cluster.orders import (
    DirectoryOrder,
    NodeOrder,
    SetupOrder,
    SetupOutcome,
)
from supervisor.cluster.ray_processes import RayError
from supervisor.cluster.signals import signals_ignored
from supervisor.config.fleet import (
    MOST_WORDS,
    WORD_RULE,
    is_address,
    is_fleet_word,
)
from supervisor.control.client import ControlError, RefusedError, call, find_control
from supervisor.fleet.link import LEAVE_REQUEST
from supervisor.fleet.store_address import is_postgres

if TYPE_CHECKING:
    from collections.abc import Callable


HEAD_STAYS = (
    "cannot leave: the fleet's directory is on this node, and ends with it; end the fleet"
    " by `sandhost fleet down`"
)


class FleetFigures(msgspec.Struct, frozen=True):
    """A daemon's `[fleet]`, as `stats` tells it.

    The first three are what a node takes where its command says nothing; the others are
    of a head.
    """

    address: str | None
    node: str | None
    labels: list[str]
    lease_s: float
    store: str | None
    max_tokens: float | None
    window: str


class _Figures(msgspec.Struct, frozen=True):
    """The part of `stats` that is needed here."""

    state_dir: str
    max_children: int
    fleet: FleetFigures | None


class DaemonPlace(NamedTuple):
    """A daemon, and where it keeps what its node of a fleet needs."""

    control: str
    directory: str
    capacity: int
    fleet: FleetFigures | None


class Options(NamedTuple):
    """The words of a command line on a node.

    Attributes:
        node: its name; None for that of `[fleet]`, else the machine's.
        labels: none for those of `[fleet]`.
        address: of the head to join; None for that of `[fleet]`.
        token_file: of the fleet to join; None to begin one.
    """

    node: str | None
    labels: tuple[str, ...]
    bind: str
    port: int
    ports: tuple[int, int] | None
    address: str | None = None
    token_file: str | None = None


class AdmittedNode(NamedTuple):
    """A node that is up.

    Attributes:
        open_ports: those that listen on every address of this machine.
        note: a hint about Ray here for the operator; often empty.
    """

    address: str
    token_file: str
    open_ports: tuple[int, ...]
    note: str


def find_place(control: str | None) -> DaemonPlace:
    """Return the daemon that is meant.

    Raises:
        ControlError: it does not answer, or is too old.
        RayError: its directory has too long a path.
    """
    path = find_control(control)
    try:
        figures = msgspec.convert(call(path, "stats"), _Figures)
    except msgspec.ValidationError:
        raise ControlError(
            f"cannot join a fleet: the daemon at {path!r} is of another version; start"
            " it again with this one"
        ) from None
    directory = ray_processes.directory_of(figures.state_dir)
    # A node actor has another working directory.
    return DaemonPlace(absolute(path), directory, figures.max_children, figures.fleet)


def find_left_place(control: str | None) -> DaemonPlace:
    """Return the daemon that is meant, or the place of one that does not answer.

    Its node's door tells the directory: the node actor outlives the daemon.

    Raises:
        ControlError: neither answers.
        RayError: as for `find_place`.
    """
    try:
        return find_place(control)
    except ControlError:
        path = find_control(control)
        if is_there(door_of(path)):
            with suppress(ControlError):
                directory = FleetClient(path).ask("here")["directory"]
                return DaemonPlace(path, directory, 0, None)
        raise


def enter(place: DaemonPlace, options: Options) -> AdmittedNode:
    """Start Ray and the actors here; return when the node is up.

    Raises:
        RayError: it cannot be, and nothing of it is left.
    """
    if missing := missing_package("ray"):
        raise RayError(f"cannot join a fleet: {missing}")
    settings = place.fleet
    if settings is None:
        raise RayError(
            "cannot join a fleet: the daemon's configuration has no [fleet]; add it and"
            " start the daemon again"
        )
    if is_postgres(settings.store) and (missing := missing_package("postgres")):
        raise RayError(f"cannot join a fleet: {missing}")
    node = options.node
    if node is None:
        node = settings.node or socket.gethostname()
    labels = options.labels or tuple(settings.labels)
    _check_words(node, labels)
    with ray_processes.locked(place.directory) as lock:
        door = door_of(place.control)
        is_served = ray_processes.is_socket(door) and not is_deaf(door)
        if is_served or ray_processes.is_running(place.directory):
            raise RayError(
                "cannot join a fleet: this node is in one already; see `sandhost fleet"
                " ps`, or leave it first by `sandhost fleet leave`"
            )
        address = (
            None if options.token_file is None else _head_address(options, settings)
        )
        token = (
            ray_processes.make_token(place.directory)
            if options.token_file is None
            else ray_processes.copy_token(place.directory, options.token_file)
        )
        order = SetupOrder(
            NodeOrder(
                node,
                labels,
                place.control,
                place.directory,
                is_head=address is None,
            ),
            token,
            options.bind,
            address,
            options.port,
            options.ports,
            place.capacity,
            _head(place.directory, settings) if address is None else None,
            _resource_of(settings.store),
        )
        try:
            return _set_up(order, lock)
        except BaseException:
            # The start ends what it has made, unless it was killed.
            with signals_ignored():
                ray_processes.end(place.directory)
                ray_processes.remove_deaf(door)
            raise


def _check_words(node: str, labels: tuple[str, ...]) -> None:
    """Refuse a name or a label that `[fleet]` could not have.

    Raises:
        RayError: it is one.
    """
    for option, words in (("--node", (node,)), ("--labels", labels)):
        for word in words:
            if not is_fleet_word(word):
                raise RayError(
                    f"cannot join a fleet: {option}: {word!r:.80} is no such word; write"
                    f" {WORD_RULE}"
                )
    if len(labels) > MOST_WORDS:
        raise RayError(
            f"cannot join a fleet: --labels: {len(labels)} are too many; write at most"
            f" {MOST_WORDS}"
        )


def _head_address(options: Options, settings: FleetFigures) -> str:
    """Return the address of the head that is to be joined.

    Raises:
        RayError: neither the command nor the configuration says it, or it is none.
    """
    address = settings.address if options.address is None else options.address
    if address is None:
        raise RayError(
            "cannot join a fleet: its address is not given; name it by --address, or as"
            " `address` in [fleet]"
        )
    if not is_address(address):
        raise RayError(
            f"cannot join a fleet: --address {address!r:.80} has another form; write"
            " IP:PORT, as in 10.0.0.1:6379"
        )
    return address


def _head(directory: str, settings: FleetFigures) -> DirectoryOrder:
    """Return the order for the directory of a fleet that begins here."""
    return DirectoryOrder(
        settings.store or f"{directory}/{ray_processes.STORE}",
        settings.lease_s,
        settings.max_tokens,
        settings.window,
        _resource_of(settings.store),
    )


def _resource_of(store: str | None) -> str | None:
    """Return Ray's name for the nodes that name one PostgreSQL; None for a file.

    Ray starts a directory anew on one of them: there it has the password, too.
    """
    if store is None or not is_postgres(store):
        return None
    return f"sandhost-store-{hashlib.sha256(store.encode()).hexdigest()[:16]}"


def _set_up(order: SetupOrder, lock: int) -> AdmittedNode:
    """Start Ray and the actors here.

    Args:
        order: how.
        lock: of this node, which the start has too: it may outlive its command.

    Raises:
        RayError: they are not up; of a start that was killed, some may be left.
    """
    words = (sys.executable, "-m", "supervisor.cluster.setup", str(os.getpid()))
    data, errors = ray_processes.run(
        words, order.token_file, msgspec.json.encode(order), (lock,)
    )
    try:
        outcome = msgspec.json.decode(data, type=SetupOutcome)
    except msgspec.DecodeError:
        lines = errors.strip().splitlines() or ["it says nothing"]
        log = f"{order.node.directory}/{ray_processes.LOG}"
        raise RayError(
            f"cannot start Ray: its start failed: {lines[-1]}; see {log}, and try again"
        ) from None
    if outcome.address is None:
        raise RayError(outcome.error)
    return AdmittedNode(
        outcome.address, order.token_file, outcome.open_ports, outcome.note
    )


def leave(
    place: DaemonPlace,
    ask: Callable[[FleetClient], object],
    *,
    may_end_fleet: bool = False,
) -> str | None:
    """Take this node out of its fleet, and end its Ray; return what was not as usual.

    One that was interrupted, at whatever moment, is finished by the next.

    Args:
        place: the daemon.
        ask: asks the fleet first; its children end.
        may_end_fleet: the fleet's directory may be here, and ends then.

    Raises:
        RayError: there is no fleet here, its directory is here, or something does not
            end.
    """
    door = door_of(place.control)
    with ray_processes.locked(place.directory):
        try:
            ask(FleetClient(place.control))
        except ControlError as why:
            if not ray_processes.is_there(place.directory):
                return _leave_without_ray(place, str(why))
            if ray_processes.is_head(place.directory) and not may_end_fleet:
                raise RayError(HEAD_STAYS) from None
            ray_processes.end(place.directory)
            said = "children here end with their lease"
            # Only now: a node actor that Ray starts again would have it join anew.
            if not isinstance(why, RefusedError) and _has_left(place.control):
                said = "so are its children"
            ray_processes.remove_deaf(door)
            return f"{why}; Ray here is ended, {said}"
        ray_processes.end(place.directory)
        ray_processes.remove_deaf(door)
    return None


def _leave_without_ray(place: DaemonPlace, reason: str) -> str:
    """Have a daemon leave by itself; return that it has.

    Args:
        place: the daemon.
        reason: why its node actor was not asked.

    Raises:
        RayError: it was no node, it refuses, or its node actor is on a Ray of others.
    """
    # Another node's `down` has left the socket, which asks to leave again.
    ray_processes.remove_deaf(door_of(place.control))
    if is_there(door_of(place.control)):
        raise RayError(reason)
    ray_processes.end(place.directory)  # a token that an interrupted one has left
    try:
        node = call(place.control, LEAVE_REQUEST)["node"]
    except ControlError as why:
        raise RayError(str(why)) from None
    if node is None:
        raise RayError(NO_FLEET)
    return (
        f"nothing of Ray is left here; node {node!r} has left, and its children have"
        " ended"
    )


def _has_left(control: str) -> bool:
    """Have a daemon leave whose Ray has ended; return whether it has answered."""
    try:
        call(control, LEAVE_REQUEST)
    except ControlError:  # without a daemon nothing of the fleet runs
        return False
    return True
