"""A mount that the host holds, as a directory: what a child has as its workspace.

Rules of this file.

1. Nothing leads out of the mount: RESOLVE_NO_XDEV beside what ``host`` asks for.
2. What looks a name up, makes, renames or removes something is done as the child's user.
   What is opened then belongs to the host, as elsewhere.
3. It is there for as long as it is held: no path has to name it (spec O4).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hostlib.linux.resolve import DENIED, check_name, open_in_mount
from vfs.backends.acting import acting_as
from vfs.backends.host import HostDirectory
from vfs.errors import AccessDeniedError

if TYPE_CHECKING:
    from vfs.backends.base import Backend, Removed
    from vfs.backends.host_file import StagedHandle


class MountDirectory(HostDirectory):
    """A directory of a mount that is held; see ``base.Backend``.

    Args:
        dir_fd: the directory, owned from now on; -1 for one that the child is yet to make
            (``fill``), in which nothing is found.
        user: whose files are made in it; None for this process's user.
        follow: as of ``HostDirectory``.

    Attributes:
        user: the same.
    """

    __slots__ = ("user",)

    def __init__(self, dir_fd: int, user: int | None, *, follow: bool = True) -> None:
        super().__init__(dir_fd, follow=follow)
        self.user = user

    def fill(self, dir_fd: int) -> None:
        """Hold what the child has made.

        Precondition: it was made without a descriptor.
        """
        self.dir_fd = dir_fd
        self._identity = None
        self.hold()

    @property
    def is_lasting(self) -> bool:
        return True

    @property
    def is_distant(self) -> bool:
        return False  # nothing but local file systems can be a layer

    def identity(self) -> tuple[int, int]:
        if self.dir_fd < 0 and self._identity is None:
            return (-1, -1)
        return super().identity()

    def _open(self, name: bytes, flags: int) -> int:
        try:
            with acting_as(self.user):
                return open_in_mount(self.dir_fd, name, flags | self._flags)
        except OSError as why:
            if why.errno in DENIED:
                raise AccessDeniedError from why
            raise

    def _open_staged(self, name: bytes) -> StagedHandle:
        with acting_as(self.user):
            staged = super()._open_staged(name)
        staged.user = self.user
        return staged

    def _part(self, dir_fd: int, *, follow: bool) -> MountDirectory:
        return MountDirectory(dir_fd, self.user, follow=follow)

    def list(self, name: bytes, limit: int) -> list[tuple[bytes, str]]:
        with acting_as(self.user):
            return super().list(name, limit)

    def make_directory(self, name: bytes) -> None:
        with acting_as(self.user):
            super().make_directory(name)

    def remove(self, name: bytes) -> Removed:
        with acting_as(self.user):
            return super().remove(name)

    def rename(self, old: bytes, target: Backend, new: bytes) -> Removed | None:
        with acting_as(self.user):
            return super().rename(old, target, new)

    def sync_entry(self, name: bytes) -> None:
        with acting_as(self.user):
            super().sync_entry(name)

    def narrow(
        self, name: bytes, *, create: bool
    ) -> tuple[HostDirectory, bytes | None]:
        with acting_as(self.user):
            return super().narrow(name, create=create)

    def open_directory(self, name: bytes) -> int:
        """Open a directory in it, for nothing but being there; the caller's to close.

        Raises:
            AccessDeniedError: the name leads out.
            OSError: it is none, or the user may not go there.
        """
        check_name(name)
        return self._open(name, os.O_PATH | os.O_DIRECTORY)

    def path_of(self, dir_fd: int) -> bytes:
        """Return where a directory lies in it, "" for itself.

        Its links in ``/proc`` begin at the top of a mount that is attached nowhere, or
        where the child sees it.
        """
        top = self.path().rstrip(b"/")
        return os.readlink(b"/proc/self/fd/%d" % dir_fd)[len(top) :].strip(b"/")
