"""The hand-over of places, policies, clients and open files, as plain structures.

Rules of this file.

1. A descriptor is handed over by its number, which stays the same across exec(2); so do
   the locks of its open file (flock).
2. No path is resolved again: a place stays the directory that it was, also if it was
   renamed, and a right stays as it was given (spec A3, A4).
3. An object without such a form (a file without a descriptor) is refused by name.
"""

from __future__ import annotations

import os
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from hostlib.accounts import Reservation
from hostlib.handover import HandoverError
from vfs.backends import MODES, HostDirectory, MountDirectory
from vfs.backends.host_file import HostHandle, StagedHandle, StagedState
from vfs.clients import Client, OpenFile
from vfs.ledger import Ledger
from vfs.places import Place
from vfs.policy import Policy

if TYPE_CHECKING:
    from vfs.filesystem import Filesystem

POLICY_EXTRAS = ("image_tokens", "model", "quota", "tools")
"""The attributes of a policy beside its places: plain values, or sets of them."""


class PlaceState(msgspec.Struct):
    """A place; see ``Place``."""

    fd: int
    beneath: bool
    flags: int
    prefixes: tuple[bytes, ...]
    only: bytes | None
    read: bool
    write: bool
    relative: bytes | None
    publish: str
    durability: str
    is_mount: bool = False
    user: int | None = None


class PolicyState(msgspec.Struct):
    """A policy; places are numbers in ``Numbering.places``."""

    top_level: bool
    cwd_fd: int
    places: list[int]
    root: int | None
    more: dict[str, Any] = {}


class FileState(msgspec.Struct):
    """An open file; ``place`` is a number, as in a policy."""

    fileno: int
    name: bytes
    mode: str
    opened_at: float
    is_top_level: bool
    fd: int
    offset: int
    place: int | None
    is_counted: bool
    staged: StagedState | None = None
    has_reserved: bool = False
    is_removed: bool = False

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that the file owns."""
        return (self.fd,) if self.staged is None else (self.fd, self.staged.dir_fd)


class ClientState(msgspec.Struct):
    """A client with its ledger; ``policy`` is a number in ``Numbering.policies``."""

    id: str
    pipe_id: str
    pid: int | None
    connected_at: float
    policy: int
    limits: tuple[int | None, ...]
    used: list[int]
    file_bytes: int | None = None
    before: tuple[int, int, int] | None = None


class CounterState(msgspec.Struct):
    """The next client id and fileno, which are never given twice (I4)."""

    client: int
    fileno: int


class Numbering:
    """Numbers for the places and policies to which several objects refer.

    Each place is owned by one child or conversation; others only refer to it.

    Attributes:
        places: the state of each place, by its number.
        policies: the state of each policy, by its number.
        fds: every descriptor that is handed over.
    """

    def __init__(self) -> None:
        self.places: list[PlaceState] = []
        self.policies: list[PolicyState] = []
        self.fds: set[int] = set()
        self._places: dict[int, int] = {}  # number by id; policies keep them alive
        self._policies: dict[int, int] = {}

    def number_place(self, place: Place) -> int:
        """Return the number of a place that another object owns."""
        number = self._places.get(id(place))
        if number is None:
            number = self._places[id(place)] = len(self.places)
            self.places.append(place_state(place))
        return number

    def number_owned_place(self, place: Place) -> int:
        """Return the number of a place, and add its descriptors to ``fds``."""
        self.fds.update(place.backend.descriptors())
        return self.number_place(place)

    def number_policy(self, policy: Policy) -> int:
        """Return the number of a policy."""
        number = self._policies.get(id(policy))
        if number is None:
            places = [self.number_place(place) for place in policy.places]
            root = None if policy.root is None else self.number_place(policy.root)
            number = self._policies[id(policy)] = len(self.policies)
            self.policies.append(policy_state(policy, places, root))
        return number


class Numbered(NamedTuple):
    """The restored places and policies, by their numbers."""

    places: list[Place]
    policies: list[Policy]


# Snapshots


def place_state(place: Place) -> PlaceState:
    """Return the state of a place.

    Raises:
        HandoverError: the place is no directory of the host.
    """
    backend = place.backend
    if not isinstance(backend, HostDirectory):
        raise HandoverError(f"a place of kind {type(backend).__name__} stays here")
    return PlaceState(
        fd=backend.dir_fd,
        beneath=backend.beneath,
        flags=backend.flags,
        prefixes=place.prefixes,
        only=place.only,
        read=place.read,
        write=place.write,
        relative=place.relative,
        publish=place.publish,
        durability=place.durability,
        is_mount=isinstance(backend, MountDirectory),
        user=backend.user if isinstance(backend, MountDirectory) else None,
    )


def policy_state(policy: Policy, places: list[int], root: int | None) -> PolicyState:
    """Return the state of a policy whose places have these numbers."""
    return PolicyState(
        top_level=policy.top_level,
        cwd_fd=policy.host.dir_fd,
        places=places,
        root=root,
        more={
            name: sorted(value) if isinstance(value, frozenset) else value
            for name in POLICY_EXTRAS
            if (value := getattr(policy, name, None)) is not None
        },
    )


def file_state(file: OpenFile, place: int | None) -> FileState:
    """Return the state of an open file.

    Raises:
        HandoverError: the file has no descriptor, or must still be truncated.
    """
    handle = file.handle
    if not isinstance(handle, HostHandle) or handle.fd < 0 or file.must_empty:
        raise HandoverError(f"file {file.fileno} is not one that can change hands")
    staged = None
    if isinstance(handle, StagedHandle):
        staged = handle.snapshot()
    return FileState(
        fileno=file.fileno,
        name=file.name,
        mode=file.mode.text,
        opened_at=file.opened_at,
        is_top_level=file.is_top_level,
        fd=handle.fd,
        offset=file.offset,
        place=place,
        is_counted=file.ledger is not None,
        staged=staged,
        has_reserved=file.entry is not None,
        is_removed=file.ledger is not None and file.ledger.open.has_removed(file),
    )


def client_state(client: Client, policy: int) -> ClientState:
    """Return the state of a client and its ledger."""
    ledger = client.ledger
    return ClientState(
        id=client.id,
        pipe_id=client.pipe_id,
        pid=client.pid,
        connected_at=client.connected_at,
        policy=policy,
        limits=tuple(account.limit for account in ledger.accounts),
        used=[account.used for account in ledger.accounts],
        file_bytes=ledger.max_file_bytes,
        before=ledger.before,
    )


def counter_state(fs: Filesystem) -> CounterState:
    """Return the state of the counters; each skips a number."""
    tables = fs.tables
    return CounterState(next(tables.client_ids), next(tables.filenos))


# Restoring


def place_from(state: PlaceState) -> Place:
    """Return the place of a state."""
    backend = HostDirectory(state.fd, beneath=state.beneath)
    if state.is_mount:
        backend = MountDirectory(state.fd, state.user)
    backend.flags = state.flags
    return Place(
        backend,
        state.prefixes,
        only=state.only,
        read=state.read,
        write=state.write,
        relative=state.relative,
        publish=state.publish,
        durability=state.durability,
    )


def policy_from(state: PolicyState, places: list[Place]) -> Policy:
    """Return the policy of a state.

    Args:
        state: the state.
        places: all places, by their numbers.
    """
    root = None if state.root is None else places[state.root]
    policy = Policy((), top_level=state.top_level, cwd_fd=state.cwd_fd, root=root)
    # Set afterwards: places in one another have already shared their rights.
    policy.places = tuple(places[number] for number in state.places)
    policy.is_distant = any(place.is_distant for place in policy.places)
    for name, value in state.more.items():
        setattr(policy, name, frozenset(value) if isinstance(value, list) else value)
    return policy


def ledger_from(state: ClientState, parent: Ledger | None) -> Ledger:
    """Return the ledger of a client's state, with its use."""
    open_files, clients, size_bytes, files = state.limits
    ledger = Ledger(
        parent,
        open_files=open_files,
        clients=clients,
        size_bytes=size_bytes,
        files=files,
        file_bytes=state.file_bytes,
    )
    for account, used in zip(ledger.accounts, state.used, strict=True):
        account.used = used
    ledger.before = state.before
    return ledger


def client_from(
    state: ClientState, policy: Policy, ledger: Ledger, parent: Client | None
) -> Client:
    """Return the client of a state; it is in no table yet."""
    client = Client(state.id, state.pipe_id, policy, ledger, parent)
    client.pid = state.pid
    client.connected_at = state.connected_at
    return client


def enter_client(fs: Filesystem, client: Client) -> None:
    """Put a restored client into the table."""
    fs.enter(client)


def enter_file(
    fs: Filesystem, client: Client, state: FileState, place: Place | None
) -> OpenFile:
    """Put a restored file into the tables; it is charged already."""
    ledger = client.ledger
    file = OpenFile(
        state.fileno,
        state.name,
        MODES[state.mode.encode()],
        client,
        _handle_from(state, place),
        state.is_top_level,
        place,
        ledger if state.is_counted else None,
        state.staged is not None,
    )
    file.opened_at = state.opened_at
    file.offset = state.offset
    fs.tables.files[file.fileno] = client.files[file.fileno] = file
    if file.staged:
        fs.hold(client, 1)
    if state.has_reserved:
        file.entry = Reservation([(account, 1) for account in ledger.files.path()])
    if state.is_counted:
        ledger.open.add(file, is_removed=state.is_removed)
    return file


def _handle_from(state: FileState, place: Place | None) -> HostHandle:
    if state.staged is None:
        return HostHandle(state.fd, os.fstat(state.fd))
    handle = StagedHandle(state.fd, state.staged)
    backend = None if place is None else place.backend
    handle.user = backend.user if isinstance(backend, MountDirectory) else None
    return handle


def enter_counters(fs: Filesystem, state: CounterState) -> None:
    """Set the counters to continue those of the program before (I4)."""
    fs.tables.client_ids = count(state.client)
    fs.tables.filenos = count(state.fileno)
