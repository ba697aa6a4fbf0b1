"""Every field of a class is handed over, or is named here with its reason."""

import os
from pathlib import Path

import msgspec
import pytest

from tests.vfs.worlds import World
from vfs.backends.host import HostDirectory
from vfs.backends.mount import MountDirectory
from vfs.clients import (
    Client,
    ClientState,
    CounterState,
    FileState,
    OpenFile,
    Tables,
)
from vfs.filesystem import ATTACHED_DESCRIPTORS, OWN_DESCRIPTORS
from vfs.handover import NumberedObjects, Numbering
from vfs.ledger import Ledger, LedgerState
from vfs.places import Place, PlaceState, close_places
from vfs.policy import Policy, PolicyState, UseState

NOT_HANDED_OVER: dict[type, tuple[tuple[type[msgspec.Struct], ...], set[str]]] = {
    Place: (
        (PlaceState,),
        # The first travels as its descriptor and flags; the others follow from it.
        {"backend", "identity", "is_distant", "is_lasting"},
    ),
    HostDirectory: (
        (PlaceState,),
        # `fd` in the form; the others are looked up again.
        {"dir_fd", "_identity", "_mount"},
    ),
    MountDirectory: ((PlaceState,), set()),
    Policy: (
        (PolicyState, UseState),
        # `cwd_fd` in the form; the other follows from the places.
        {"host", "is_distant"},
    ),
    Ledger: (
        (LedgerState,),
        {
            # `limits`, `used` and `file_bytes` in the form.
            *("open_files", "clients", "size_bytes", "files", "max_file_bytes"),
            # They follow from the limits.
            *("bounds_size", "bounds_files"),
            # The order of the forms gives it; the files enter it again.
            *("parent", "open"),
            # At rest they are unused; requests that are read again reserve again.
            *("memory", "payload_memory", "spooled_bytes"),
            *("turn", "_threads", "_sends"),
            # Counted since the program began.
            "too_large",
        },
    ),
    Client: (
        (ClientState,),
        # Among the fields of the form; charged again; by the order of the forms.
        {"ledger", "held", "files", "nested", "parent"},
    ),
    OpenFile: (
        (FileState,),
        {
            # `fd` and `staged`, `has_reserved`, `is_counted` in the form.
            *("handle", "entry", "ledger"),
            # The client whose form has it.
            "client",
            # They follow from place and mode, or are of an export, which is at work.
            *("durability", "entry_is_due", "is_plain"),
            # Set only during an OPEN or a CLOSE.
            *("must_empty", "must_replace", "frees_in_thread"),
            # The size of its descriptor.
            "unpublished_bytes",
        },
    ),
    Tables: (
        (CounterState,),
        # `client` and `fileno` in the form; clients and files enter again.
        {"client_ids", "filenos", "clients", "files"},
    ),
}


@pytest.mark.parametrize("owner", NOT_HANDED_OVER, ids=lambda owner: owner.__name__)
def test_no_field_is_forgotten(owner: type) -> None:
    forms, left_out = NOT_HANDED_OVER[owner]
    handed = {name for form in forms for name in form.__struct_fields__}
    fields = set(vars(owner)["__slots__"])
    assert fields - handed == left_out


# spec A3, A4: a right stays as it was given.
def test_a_policy_is_the_same_afterwards(tmp_path: Path) -> None:
    world = World(tmp_path)
    grant = world.place("in", read=True, publish="on-close", durability="close")
    root = world.place("root", read=True, write=True, relative=b"")
    before = Policy(
        (root, grant),
        top_level=True,
        cwd_fd=world.cwd,
        root=grant,
        tools=frozenset({"a", "b"}),
        model="m",
        quota=1.5,
        image_tokens=7,
    )
    numbers = Numbering()
    assert numbers.number_policy(before) == numbers.number_policy(before) == 0
    data = msgspec.msgpack.encode((numbers.places, numbers.policies))
    form = tuple[list[PlaceState], list[PolicyState]]
    numbered = NumberedObjects.restore(*msgspec.msgpack.decode(data, type=form))
    (after,) = numbered.policies
    assert [_plain(place) for place in after.places] == [_plain(root), _plain(grant)]
    assert after.root is after.places[1]
    assert after.host.dir_fd == world.cwd
    for name in ("top_level", "tools", "model", "quota", "image_tokens", "is_distant"):
        assert getattr(after, name) == getattr(before, name), name
    close_places(before.places)
    world.places.clear()
    os.close(world.cwd)


def _plain(place: Place) -> dict[str, object]:
    values = {name: getattr(place, name) for name in Place.__slots__}
    backend = values.pop("backend")
    return {**values, "backend": (backend.dir_fd, backend.beneath, backend.flags)}


# spec S7: the use of a client, and of those above it, is charged once.
def test_a_client_is_the_same_afterwards(tmp_path: Path) -> None:
    world = World(tmp_path)
    policy = world.policy()
    above = Ledger(open_files=9, clients=8, size_bytes=700, files=6, file_bytes=500)
    parent = Client("c1", "child-1:pipe", policy, above, None)
    client = Client("c2", "child-1:attached", policy, Ledger(above, files=3), parent)
    parent.pid = 12
    client.ledger.size_bytes.charge(40)
    client.ledger.open_files.charge(2)
    client.ledger.before = (1, 2, 3)
    again: Client | None = None
    for before in (parent, client):
        data = msgspec.msgpack.encode(before.snapshot(0))
        state = msgspec.msgpack.decode(data, type=ClientState)
        after = Client.restore(state, policy, again)
        assert after.parent is again
        for name in ("id", "pipe_id", "pid", "connected_at", "policy"):
            assert getattr(after, name) == getattr(before, name), name
        ours, theirs = after.ledger, before.ledger
        for one, other in zip(ours.accounts, theirs.accounts, strict=True):
            assert (one.limit, one.used) == (other.limit, other.used)
        for name in ("before", "max_file_bytes", "bounds_size", "bounds_files"):
            assert getattr(ours, name) == getattr(theirs, name), name
        world.fs.enter(after)
        again = after
    held = OWN_DESCRIPTORS + ATTACHED_DESCRIPTORS
    assert world.fs.descriptor_account.used == held + 2
    world.close()
