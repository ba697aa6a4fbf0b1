"""How many descriptors a host may have, and how many of them are its own."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

RESERVED_DESCRIPTORS = 64
"""Kept from clients: for the host's own files, and what it opens to spawn, to look and to
close. What clients hold, and services for them, counts beside their files
(``Filesystem.set_aside``)."""

CHILDRENS_DESCRIPTORS = RESERVED_DESCRIPTORS // 2
"""Of these, those for children that are started when others have all the rest open."""


FEWEST_CLIENTS = 64
"""That clients may have however few the host has."""


def raise_limit() -> int:
    """Raise RLIMIT_NOFILE to its hard limit; return what it is then."""
    wanted = _hard_limit()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def clients_share(limit: int) -> int:
    """Return how many all clients together may have of so many."""
    return max(FEWEST_CLIENTS, limit - RESERVED_DESCRIPTORS)


def odd_open_files(most: int | None) -> Iterator[str]:
    """Yield what is to be told of a cap on open files that no client here can reach."""
    hard = _hard_limit()
    if most is not None and most > (share := clients_share(hard)):
        yield (
            f"{most} is more than the {share} files that all children together can have"
            f" open: the host itself may have {hard} descriptors (ulimit -Hn); raise that"
            " where the host is started, or write less"
        )


def _hard_limit() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Linux has fs.nr_open and knows no infinite one; others that play it may.
    return 1_048_576 if hard == resource.RLIM_INFINITY else hard
