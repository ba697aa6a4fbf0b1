"""What is done to names: STAT, LIST, MKDIR, REMOVE, RENAME (spec X1).

Every place that a name's text may lie in is asked, nearest first, as for OPEN
(``filesystem`` has the rules).

Where a place is distant (``mounts``) a worker thread does all that looks at it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from hostlib.threads import in_thread
from vfs.backends import MODES
from vfs.errors import AccessDeniedError, UnavailableError, about_the_target
from vfs.ledger import turn_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfs.backends import Backend, FileStatus, Removed
    from vfs.clients import Client
    from vfs.ledger import Ledger
    from vfs.policy import Policy

T = TypeVar("T")


def stat(client: Client, name: bytes, *, claim: bool) -> FileStatus:
    """Tell size, time and kind of a name (spec X1)."""
    places = _places(client, name, claim=claim, read=True)
    return _ask(places, lambda backend, rest: backend.stat(rest))


async def stat_waiting(client: Client, name: bytes, *, claim: bool) -> FileStatus:
    """Tell it like ``stat``, in a worker thread."""
    look = partial(stat, client, name, claim=claim)
    return await in_thread(look, share=client.ledger.threads)


async def wait_reachable(client: Client, name: bytes) -> None:
    """Wait, in a worker thread, until an OPEN or NARROW in a distant place need not.

    The file is opened and closed, nothing more: what the OPEN does then finds a
    server that has just answered.  What is wrong the OPEN will say.
    """
    await in_thread(_knock, client.policy, name, share=client.ledger.threads)


async def list_waiting(
    client: Client, name: bytes, *, claim: bool, limit: int
) -> list[tuple[bytes, str]]:
    """List a directory, in a worker thread: it may be a long one (spec X1).

    Raises:
        OSError: ``EOVERFLOW``: it has more than ``limit`` entries, or as for OPEN.
    """

    def list_it() -> list[tuple[bytes, str]]:
        places = _places(client, name, claim=claim, read=True)
        return _ask(places, lambda backend, rest: backend.list(rest, limit))

    return await in_thread(list_it, share=client.ledger.threads)


def make_directory(client: Client, name: bytes, *, claim: bool) -> None:
    """Make a directory; it counts as a file that was made (spec X1).

    Precondition: nobody else has the turn (``ledger.must_wait``).
    """
    places = _places(client, name, claim=claim, write=True)
    with _charged_file(client.ledger):
        _ask(places, lambda backend, rest: backend.make_directory(rest))


async def make_directory_waiting(client: Client, name: bytes, *, claim: bool) -> None:
    """Make it like ``make_directory``, in a worker thread."""
    find = partial(_places, client, name, claim=claim, write=True)
    ledger = client.ledger
    async with turn_of(ledger):
        places = await in_thread(find, share=ledger.threads)
        make = partial(_ask, places, lambda where, rest: where.make_directory(rest))
        with _charged_file(ledger):
            await in_thread(make, share=ledger.threads)


async def remove_waiting(client: Client, name: bytes, *, claim: bool) -> None:
    """Remove a file or an empty directory, in a worker thread (spec X1).

    The bytes of a file that this child has open are given back when it is closed.
    """

    def remove() -> Removed:
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
    """Rename within what the client may write, in a worker thread (spec X1)."""

    def rename() -> Removed | None:
        sources = _places(client, old, claim=claim, read=True, write=True)
        with about_the_target():
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


def credit(ledger: Ledger | None, removed: Removed | None) -> None:
    """Give back the size of what is gone, or have its last close do that.

    Precondition: it went during the caller's turn.
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
    """Return (backend, rest of the name) of every place to ask, nearest first.

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
    """Return what the nearest place says that the name does not lead out of.

    Raises:
        AccessDeniedError: it leads out of each of them.
        OSError: as for OPEN.
    """
    denied = AccessDeniedError
    for backend, rest in places:
        try:
            return call(backend, rest)
        except AccessDeniedError as why:
            denied = type(why)  # the next, as for OPEN (``opening``)
    raise denied


@contextlib.contextmanager
def _charged_file(ledger: Ledger) -> Iterator[None]:
    """Charge an entry that is made inside, unless that fails.

    Raises:
        OSError: ``EDQUOT``: no more may be made.
    """
    if not ledger.files.charge(1):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    try:
        yield
    except BaseException:
        ledger.files.charge(-1)
        raise


def _knock(policy: Policy, name: bytes) -> None:
    with contextlib.suppress(AccessDeniedError, UnavailableError):
        policy.check_available()
        for place, rest in policy.candidates(name, read=False, write=False):
            with contextlib.suppress(AccessDeniedError, OSError):
                place.backend.open(
                    rest, MODES[b"r"], create=False, exclusive=False, staged=False
                ).close()
