"""How an OPEN finds its file: which place is asked, and what making a file costs.

Rules of this file.

1. Every place that a name's text may lie in is asked, nearest first, until the kernel
   says that one holds it (spec A3, A4).
2. Where the number of files is bounded, a file is charged before it is made; one that
   is staged takes its name later or never, so room is only reserved for it.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from hostlib.file_closing import INLINE_TRUNCATE_BYTES
from vfs.backends import MODES
from vfs.errors import AccessDeniedError
from vfs.places import PUBLISH_ON_CLOSE

if TYPE_CHECKING:
    from hostlib.accounts import Reservation
    from vfs.backends import Backend, Handle, Mode
    from vfs.ledger import Ledger
    from vfs.places import Place
    from vfs.policy import Policy


def open_restricted(
    policy: Policy, name: bytes, mode: Mode, ledger: Ledger
) -> tuple[Handle, Place, bool, Reservation[int] | None]:
    """Open a name in the restricted view (spec A3).

    Returns:
        (the handle, where it was found, whether it is staged, the entry that is
        reserved for it).

    Raises:
        AccessDeniedError: no place holds the name with the rights that it takes.
        OSError: the open failed.
    """
    for place, rest in policy.candidates(name, read=mode.reads, write=mode.writes):
        staged = mode.empties and place.publish == PUBLISH_ON_CLOSE
        try:
            handle, entry = open_in(place.backend, rest, mode, ledger, staged=staged)
        except AccessDeniedError:
            continue  # it leads out of this place; another one may hold it
        return handle, place, staged, entry
    raise AccessDeniedError


def open_staged(
    policy: Policy, name: bytes, ledger: Ledger, *, top_level: bool
) -> tuple[Handle, Place | None, Reservation[int] | None]:
    """Open a file that takes a name later, wherever it may be written.

    Returns:
        (the handle, where it was found, the entry that is reserved for it).

    Raises:
        AccessDeniedError: no place that may be written holds the name.
        OSError: the open failed.
    """
    mode = MODES[b"w"]
    if top_level:
        handle, entry = open_in(policy.host, name, mode, ledger, staged=True)
        return handle, None, entry
    for place, rest in policy.candidates(name, read=False, write=True):
        try:
            handle, entry = open_in(place.backend, rest, mode, ledger, staged=True)
        except AccessDeniedError:
            continue  # it leads out of this place; another one may hold it
        return handle, place, entry
    raise AccessDeniedError


def open_in(
    backend: Backend, name: bytes, mode: Mode, ledger: Ledger, *, staged: bool
) -> tuple[Handle, Reservation[int] | None]:
    """Open a name in one tree, charging a file that is made where that is bounded.

    Returns:
        (the handle, the entry that is reserved for what is staged).
    """
    if mode.creates and ledger.bounds_files:
        if staged:
            return _open_reserving(backend, name, mode, ledger)
        return _open_counted(backend, name, mode, ledger), None
    create = mode.creates
    handle = backend.open(name, mode, create=create, exclusive=False, staged=staged)
    return handle, None


def _open_counted(backend: Backend, name: bytes, mode: Mode, ledger: Ledger) -> Handle:
    """Open where the number of files is bounded: know whether one is made."""
    exclusive = True
    while True:
        try:
            there = backend.open(
                name, mode, create=False, exclusive=False, staged=False
            )
        except FileNotFoundError:
            pass
        else:
            return there
        if not ledger.files.charge(1):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        try:
            return backend.open(
                name, mode, create=True, exclusive=exclusive, staged=False
            )
        except FileExistsError:
            # Somebody made it meanwhile, or it is a link to nothing: once more.
            ledger.files.charge(-1)
            exclusive = False
        except BaseException:
            ledger.files.charge(-1)
            raise


def _open_reserving(
    backend: Backend, name: bytes, mode: Mode, ledger: Ledger
) -> tuple[Handle, Reservation[int] | None]:
    """Open a staged file; reserve an entry unless there is one that it replaces."""
    entry = None
    try:
        backend.open(name, mode, create=False, exclusive=False, staged=False).close()
    except FileNotFoundError:
        entry = ledger.files.reserve(1)
        if entry is None:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)) from None
    try:
        staged = backend.open(name, mode, create=True, exclusive=False, staged=True)
    except BaseException:
        if entry is not None:
            entry.release()
        raise
    return staged, entry


def emptied_at_once(handle: Handle, ledger: Ledger) -> bool:
    """Truncate a file that was opened with ``w`` and found to be one (O7).

    Returns:
        False if a thread should do it, for there is much to free or the file system is
        distant: nothing is done.

    Raises:
        OSError: it could not be done; the handle is closed.
    """
    if handle.mount.is_distant:
        return False
    try:
        size = handle.size()
        if size > INLINE_TRUNCATE_BYTES:
            return False
        if size:
            handle.truncate(0)
    except BaseException:
        handle.close()
        raise
    if ledger.bounds_size:
        ledger.size_bytes.charge(-size)
    return True
