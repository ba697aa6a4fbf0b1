"""Finding the file of an OPEN in the client's places, and charging new files.

Rules of this file.

1. Each place that may hold the name is tried, nearest first, until the kernel finds that
   one holds it (spec A3, A4).
2. If the number of files is bounded, a file is charged before it is made; for a staged
   file, which gets its name later or never, an entry is only reserved.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from hostlib.large_files import INLINE_TRUNCATE_BYTES
from vfs.errors import AccessDeniedError
from vfs.places import PUBLISH_ON_CLOSE

if TYPE_CHECKING:
    from hostlib.accounts import Reservation
    from vfs.backends import Backend, Handle, Mode
    from vfs.ledger import Ledger
    from vfs.places import Place
    from vfs.policy import Policy


def open_restricted(
    policy: Policy, name: bytes, mode: Mode, ledger: Ledger, *, replaces: bool = False
) -> tuple[Handle, Place, bool, Reservation[int] | None]:
    """Open a name in the restricted view (spec A3).

    Args:
        policy: has the places.
        name: as on the wire.
        mode: how to open it.
        ledger: charged for a new file.
        replaces: stage the file in any place, not only in those that publish on close.

    Returns:
        (the handle, its place, whether it is staged, the entry reserved for it).

    Raises:
        AccessDeniedError: no place holds the name with the rights of the mode.
        OSError: the open failed.
    """
    for place, rest in policy.candidates(name, read=mode.reads, write=mode.writes):
        staged = replaces or (mode.empties and place.publish == PUBLISH_ON_CLOSE)
        try:
            handle, entry = open_in(place.backend, rest, mode, ledger, staged=staged)
        except AccessDeniedError:
            continue  # it leads out of this place; another one may hold it
        return handle, place, staged, entry
    raise AccessDeniedError


def open_in(
    backend: Backend, name: bytes, mode: Mode, ledger: Ledger, *, staged: bool
) -> tuple[Handle, Reservation[int] | None]:
    """Open a name in one tree; charge a new file if their number is bounded.

    Returns:
        (the handle, the entry reserved for a staged file).
    """
    if mode.creates and ledger.bounds_files:
        if staged:
            return _open_reserving(backend, name, mode, ledger)
        return _open_counted(backend, name, mode, ledger), None
    create = mode.creates
    handle = backend.open(name, mode, create=create, exclusive=False, staged=staged)
    return handle, None


def _open_counted(backend: Backend, name: bytes, mode: Mode, ledger: Ledger) -> Handle:
    """Open a file; charge it if it is made."""
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
            # It was made meanwhile, or is a dangling link: try again.
            ledger.files.charge(-1)
            exclusive = False
        except BaseException:
            ledger.files.charge(-1)
            raise


def _open_reserving(
    backend: Backend, name: bytes, mode: Mode, ledger: Ledger
) -> tuple[Handle, Reservation[int] | None]:
    """Open a staged file; reserve an entry unless it replaces a file."""
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


def truncate_inline(handle: Handle, ledger: Ledger) -> bool:
    """Truncate a file that was opened with ``w``, if that is quick (O7).

    Returns:
        False if a thread must do it: the file is long, or its file system is distant.

    Raises:
        OSError: truncating failed; the handle is closed.
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
