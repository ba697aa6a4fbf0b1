"""How many descriptors a host may have, and how many of them are its own."""

from __future__ import annotations

import resource

RESERVED_DESCRIPTORS = 64
"""Kept from clients: for the host's own files, and what it opens to spawn, to look and to
close. What clients hold, and services for them, counts beside their files
(``Filesystem.set_aside``)."""

CHILDRENS_DESCRIPTORS = RESERVED_DESCRIPTORS // 2
"""Of these, those for children that are started when others have all the rest open."""


def raise_limit() -> int:
    """Raise RLIMIT_NOFILE to its hard limit; return what it is then."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1_048_576 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
