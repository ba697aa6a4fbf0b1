"""A child's private directories: its root, and a TMPDIR of its own.

They are made when the child is spawned, 0700, and removed in the background when it has
ended, before the host ends (spec S4).
"""

from __future__ import annotations

import os
import shutil
import tempfile

from vfs.hostio import in_thread

PREFIX = "sandhost-"
"""How the names of scratch directories begin."""


class Scratch:
    """The directories of one child.

    Args:
        root: a root that is kept; None for a fresh one.
        keep: leave a fresh root where it is.

    Attributes:
        root: the child's private root.
        tmp: its TMPDIR.

    Raises:
        OSError: they cannot be made.
    """

    def __init__(self, root: str | None, *, keep: bool = False) -> None:
        self._keep = keep
        self._base = tempfile.mkdtemp(prefix=PREFIX)
        self.tmp = os.path.join(self._base, "tmp")
        os.mkdir(self.tmp, 0o700)
        if root is None:
            self.root = os.path.join(self._base, "root")
            os.mkdir(self.root, 0o700)
        else:
            self.root = root

    async def remove(self) -> None:
        """Remove what was made, but a root that is to be kept.

        Cancellation: a removal that has begun is finished.
        """
        await in_thread(_remove, self.tmp)
        if not (self._keep and self.root.startswith(self._base)):
            await in_thread(_remove, self._base)


def _remove(path: str) -> None:
    # A child may have made directories that nobody may enter: open them up first.
    def retry(function: object, name: str, error: object) -> None:
        del function, error
        parent = os.path.dirname(name)
        try:
            os.chmod(parent, 0o700)
            if os.path.isdir(name) and not os.path.islink(name):
                os.chmod(name, 0o700)
                shutil.rmtree(name, ignore_errors=True)
            else:
                os.unlink(name)
        except OSError:
            return

    shutil.rmtree(path, onerror=retry)
