"""The files that a child is to see by its own system calls, beside the system's.

``visible.view_of`` makes rules of them; which of them are refused ``exposed_paths`` says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from supervisor.sandbox.held_mount import HeldMount

if TYPE_CHECKING:
    from collections.abc import Mapping

    from supervisor.sandbox.host_directories import Location


@dataclass(frozen=True, slots=True)
class ShownMount:
    """A mount that a child sees under a path: the host's, or one that it makes itself.

    Attributes:
        path: without symbolic links.
        fd: a descriptor of it, owned by the caller; each child sees a copy. -1: the child
            makes an overlay in its user namespace.
        is_writable: else it is to read and execute.
        own: of such an overlay, the directory of its layer, without symbolic links.
        namespace: as of ``HeldMount``.
    """

    path: str
    fd: int = -1
    is_writable: bool = True
    own: str = ""
    namespace: int = -1

    def copy(self) -> int:
        """Return a descriptor of a copy that one child can see; a mount of the host's.

        Raises:
            OSError: it cannot be copied.
        """
        held = HeldMount(self.fd, self.namespace)
        return held.copy(is_writable=self.is_writable)

    def inside(self, path: str) -> str:
        """Return what a path beneath it is called from its top."""
        return path[len(self.path) :].strip("/") or "."


@dataclass(slots=True)
class ShownFiles:
    """The files that a child is to see beside the system's, and where its mounts lie.

    Attributes:
        cwd: its working directory, as a path.
        own: directories of its own, to write.
        kept: more that it may write, as it is.
        shared: more that it may write, where what is root's is shown as its own. Where
            there are any, the program is a tool.
        home: a directory of the operator to write, where what is root's is shown as its
            own; "" for none.
        programs: more that it may read and execute.
        unwritten: bases of workspaces that it is to read and execute, and not to write.
        exposed: paths that the operator shows it by name, to read and execute.
        readable: its grants to read, without links.
        theirs: places that it may write by FD 3 or by tools, that hold its own, or that
            other children may write; and whether it may read that.
        hidden: directories that are to look empty where they lie in what it sees, but
            for what is its own there.
        mounts: mounts of the host's that it sees.
    """

    cwd: str
    own: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    home: str = ""
    programs: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    exposed: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    theirs: Mapping[str, bool] = field(default_factory=dict)
    hidden: tuple[Location, ...] = ()
    mounts: tuple[ShownMount, ...] = ()

    def mount_of(self, path: str) -> ShownMount | None:
        """Return the mount of the host's that a path is in, if it is in one."""
        for mount in self.mounts:
            if f"{path}/".startswith(f"{mount.path}/"):
                return mount
        return None

    def shown(self, path: str) -> str:
        """Return where this host can look at what the child has at a path."""
        mount = self.mount_of(path)
        if mount is None:
            return path
        if mount.fd >= 0:
            return f"/proc/self/fd/{mount.fd}/{mount.inside(path)}"
        written = f"{mount.own}/upper/{mount.inside(path)}"
        return written if os.path.lexists(written) else path

    @property
    def paths(self) -> tuple[str, ...]:
        """Visible files that are not everybody's, but for its program."""
        others = (
            *(*self.own, *self.kept, *self.shared),
            *(*self.programs, *self.unwritten, *self.exposed),
        )
        return (self.cwd, *others, *((self.home,) if self.home else ()))
