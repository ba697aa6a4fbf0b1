"""The number of descriptors of a host, and the part that is reserved for itself."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

RESERVED_DESCRIPTORS = 64
"""Descriptors that clients do not get: for the host's own files, and those that it opens
to spawn and to read /proc.  Descriptors that clients or services for them hold are charged
with their files (``Filesystem.descriptor_account``)."""

CHILDRENS_DESCRIPTORS = RESERVED_DESCRIPTORS // 2
"""The part of them for starting children while other children have the rest open."""


FEWEST_CLIENTS = 64
"""Descriptors that clients may have even if the host has few."""


def raise_limit() -> int:
    """Raise RLIMIT_NOFILE to its hard limit, and return that."""
    wanted = _hard_limit()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def clients_share(limit: int) -> int:
    """Return the descriptors of all clients together, for a limit of the host."""
    return max(FEWEST_CLIENTS, limit - RESERVED_DESCRIPTORS)


def open_files_warnings(most: int | None) -> Iterator[str]:
    """Yield a warning about a cap on open files that no client of this host can reach."""
    hard = _hard_limit()
    if most is not None and most > (share := clients_share(hard)):
        yield (
            f"{most} is more than the {share} open files of all children together: the"
            f" host may have {hard} descriptors; raise ulimit -Hn of the host, or write less"
        )


def _hard_limit() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Linux has fs.nr_open instead of infinity; systems that emulate it may not.
    return 1_048_576 if hard == resource.RLIM_INFINITY else hard


def descriptors_by_file(
    files: set[tuple[int, int]],
) -> list[tuple[tuple[int, int], int]]:
    """Return (file, descriptor) of each descriptor of this process on given files."""
    found = []
    for name in os.listdir("/proc/self/fd") if files else ():
        fd = int(name)
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed
            status = os.fstat(fd)
            identity = (status.st_dev, status.st_ino)
            if identity in files:
                found.append((identity, fd))
    return found
