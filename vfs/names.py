"""Operations on names: STAT, LIST, MKDIR, REMOVE, RENAME (spec X1).

Each place that may hold the name is tried, nearest first, as for OPEN (``opening``).  A
worker thread does all calls on a distant place (``mounts``).
"""

from __future__ import annotations

import contextlib
import errno
import os
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from hostlib.threads import in_thread
from vfs.backends import MODES
from vfs.errors import AccessDeniedError, UnavailableError, deny_as_target
from vfs.ledger import turn_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfs.backends import Backend, FileStatus, RemovedEntry
    from vfs.clients import Client
    from vfs.ledger import Ledger
    from vfs.policy import Policy

T = TypeVar("T")


def stat(client: Client, name: bytes, *, claim: bool) -> FileStatus:
    """Return size, time and kind of a name (spec X1)."""
    places = _places(client, name, claim=claim, read=True)
    return _ask(places, lambda backend, rest: backend.stat(rest))


async def stat_waiting(client: Client, name: bytes, *, claim: bool) -> FileStatus:
    """Return the same as ``stat``, in a worker thread."""
    look = partial(stat, client, name, claim=claim)
    return await in_thread(look, share=client.ledger.threads)


async def wait_reachable(client: Client, name: bytes) -> None:
    """Wait in a worker thread until a distant place answers, for an OPEN or NARROW.

    It opens and closes the file, so that the server has just answered when the OPEN comes.
    Errors are left to the OPEN.
    """
    await in_thread(_probe, client.policy, name, share=client.ledger.threads)


async def list_waiting(
    client: Client, name: bytes, *, claim: bool, limit: int
) -> list[tuple[bytes, str]]:
    """List a directory in a worker thread, for it may be long (spec X1).

    Raises:
        OSError: ``EOVERFLOW``: it has more than ``limit`` entries, or as for OPEN.
    """

    def list_it() -> list[tuple[bytes, str]]:
        places = _places(client, name, claim=claim, read=True)
        return _ask(places, lambda backend, rest: backend.list(rest, limit))

    return await in_thread(list_it, share=client.ledger.threads)


async def make_directory_waiting(client: Client, name: bytes, *, claim: bool) -> None:
    """Make a directory in a worker thread, and charge it as a file (spec X1)."""
    find = partial(_places, client, name, claim=claim, write=True)
    ledger = client.ledger
    async with turn_of(ledger):
        places = await in_thread(find, share=ledger.threads)
        make = partial(_ask, places, lambda where, rest: where.make_directory(rest))
        with _charge_file(ledger):
            await in_thread(make, share=ledger.threads)


async def remove_waiting(client: Client, name: bytes, *, claim: bool) -> None:
    """Remove a file or an empty directory, in a worker thread (spec X1).

    The bytes of a file that this child has open are given back when it is closed.
    """

    def remove() -> RemovedEntry:
        places = _places(client, name, claim=claim, write=True)
        return _ask(places, lambda backend, rest: backend.remove(rest))

    ledger = client.ledger
    async with turn_of(ledger):
        removed = await in_thread(remove, share=ledger.threads)
        credit(ledger, removed)
        ledger.files.give_back(1)


async def rename_waiting(
    client: Client, old: bytes, new: bytes, *, claim: bool
) -> None:
    """Rename a file or directory, in a worker thread (spec X1)."""

    def rename() -> RemovedEntry | None:
        sources = _places(client, old, claim=claim, read=True, write=True)
        with deny_as_target():
            targets = _places(client, new, claim=claim, write=True)
        return _ask(
            sources,
            lambda source, old_rest: _ask(
                targets,
                lambda target, new_rest: source.rename(old_rest, target, new_rest),
            ),
        )

    ledger = client.ledger
    async with turn_of(ledger):
        replaced = await in_thread(rename, share=ledger.threads)
        if replaced is not None:
            credit(ledger, replaced)
            ledger.files.give_back(1)


def credit(ledger: Ledger | None, removed: RemovedEntry | None) -> None:
    """Give back the size of a removed file, now or at its last close.

    Precondition: it was removed during the caller's turn.
    """
    if ledger is None or not ledger.bounds_size:
        return
    if removed is None or not removed.was_last:
        return
    if removed.identity in ledger.open:
        ledger.open.removed.add(removed.identity)
    else:
        ledger.size_bytes.charge(-removed.size)


def _places(
    client: Client,
    name: bytes,
    *,
    claim: bool,
    read: bool = False,
    write: bool = False,
) -> list[tuple[Backend, bytes]]:
    """Return (backend, rest of the name) of every place to try, nearest first.

    May wait for a distant root.

    Raises:
        UnavailableError: the client's root is gone (spec O4).
        AccessDeniedError: no place covers the name with these rights (spec A3).
    """
    policy = client.policy
    if policy.is_claimed(claim):
        return [(policy.host, name)]
    found = policy.candidates(name, read=read, write=write)
    return [(place.backend, rest) for place, rest in found]


def _ask(places: list[tuple[Backend, bytes]], call: Callable[[Backend, bytes], T]) -> T:
    """Return the result of a call on the nearest place that holds the name.

    Raises:
        AccessDeniedError: the name leads out of each place.
        OSError: as for OPEN.
    """
    denied = AccessDeniedError
    for backend, rest in places:
        try:
            return call(backend, rest)
        except AccessDeniedError as why:
            denied = type(why)  # try the next place, as OPEN does (``opening``)
    raise denied


@contextlib.contextmanager
def _charge_file(ledger: Ledger) -> Iterator[None]:
    """Charge an entry that the block makes; give it back if the block fails.

    Raises:
        OSError: ``EDQUOT``: the limit of files is reached.
    """
    if not ledger.files.charge(1):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    try:
        yield
    except BaseException:
        ledger.files.charge(-1)
        raise


def _probe(policy: Policy, name: bytes) -> None:
    with contextlib.suppress(AccessDeniedError, UnavailableError):
        policy.check_available()
        for place, rest in policy.candidates(name, read=False, write=False):
            with contextlib.suppress(AccessDeniedError, OSError):
                place.backend.open(
                    rest, MODES[b"r"], create=False, exclusive=False, staged=False
                ).close()
