"""Mounts that a child makes in its user namespace, on their way to the host.

They are made in ``launchpad.overlay``; what the host does with them is in ``child``.
"""

from __future__ import annotations

import errno
import os

from supervisor.spawn.inner_pair import InnerPair


class InnerMounts(InnerPair):
    """The way of a child's mounts to the host."""

    def receive(self) -> list[int]:
        """Return a descriptor of each mount, in the order of the request; the caller's.

        Precondition: the child is its program by now.

        Raises:
            OSError: this process may open no more.
        """
        fds = self._next()
        if not fds:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return fds
