"""A mount that the host holds, as a directory: the workspace of a child.

Rules of this file.

1. No name leads out of the mount: RESOLVE_NO_XDEV beside the flags of ``host``.
2. Names are looked up, made, renamed and removed as the child's user.  Open files are the
   host's, as in other directories.
3. The mount lives as long as it is held, and needs no path (spec O4).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hostlib.linux.resolve import DENIED, check_name, open_in_mount
from vfs.backends.fsuser import act_as
from vfs.backends.host import HostDirectory
from vfs.errors import AccessDeniedError

if TYPE_CHECKING:
    from vfs.backends.base import Backend, RemovedEntry
    from vfs.backends.host_file import StagedHandle


class MountDirectory(HostDirectory):
    """A directory of a mount that is held; see ``base.Backend``.

    Args:
        dir_fd: the directory, owned from now on; -1 for one that the child will make
            (``fill``), which is empty until then.
        user: the owner of new files; None for this process's user.
        follow: as of ``HostDirectory``.

    Attributes:
        user: as above.
    """

    __slots__ = ("user",)

    def __init__(self, dir_fd: int, user: int | None, *, follow: bool = True) -> None:
        super().__init__(dir_fd, follow=follow)
        self.user = user

    def fill(self, dir_fd: int) -> None:
        """Hold the directory that the child has made.

        Precondition: this object has no descriptor.
        """
        self.dir_fd = dir_fd
        self._identity = None
        self.hold()

    @property
    def is_lasting(self) -> bool:
        return True

    @property
    def is_distant(self) -> bool:
        return False  # only local file systems can be a layer

    def identity(self) -> tuple[int, int]:
        if self.dir_fd < 0 and self._identity is None:
            return (-1, -1)
        return super().identity()

    def _open(self, name: bytes, flags: int) -> int:
        try:
            with act_as(self.user):
                return open_in_mount(self.dir_fd, name, flags | self.flags)
        except OSError as why:
            if why.errno in DENIED:
                raise AccessDeniedError from why
            raise

    def _open_staged(self, name: bytes) -> StagedHandle:
        with act_as(self.user):
            staged = super()._open_staged(name)
        staged.user = self.user
        return staged

    def _part(self, dir_fd: int, *, follow: bool) -> MountDirectory:
        return MountDirectory(dir_fd, self.user, follow=follow)

    def list(self, name: bytes, limit: int) -> list[tuple[bytes, str]]:
        with act_as(self.user):
            return super().list(name, limit)

    def make_directory(self, name: bytes) -> None:
        with act_as(self.user):
            super().make_directory(name)

    def remove(self, name: bytes) -> RemovedEntry:
        with act_as(self.user):
            return super().remove(name)

    def rename(self, old: bytes, target: Backend, new: bytes) -> RemovedEntry | None:
        with act_as(self.user):
            return super().rename(old, target, new)

    def sync_entry(self, name: bytes) -> None:
        with act_as(self.user):
            super().sync_entry(name)

    def narrow(
        self, name: bytes, *, create: bool
    ) -> tuple[HostDirectory, bytes | None]:
        with act_as(self.user):
            return super().narrow(name, create=create)

    def open_directory(self, name: bytes) -> int:
        """Open a directory in it with O_PATH; the caller owns the descriptor.

        Raises:
            AccessDeniedError: the name leads out.
            OSError: it is no directory, or the user may not reach it.
        """
        check_name(name)
        return self._open(name, os.O_PATH | os.O_DIRECTORY)

    def path_of(self, dir_fd: int) -> bytes:
        """Return the path of a directory in it; "" for itself.

        Links in ``/proc`` begin at the top of a detached mount, or at its place in the
        child's view.
        """
        top = self.path().rstrip(b"/")
        return os.readlink(b"/proc/self/fd/%d" % dir_fd)[len(top) :].strip(b"/")
