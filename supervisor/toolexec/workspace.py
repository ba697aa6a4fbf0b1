"""The working directory of a tool: opened beneath the workspace by the kernel.

Rules of this file.

1. The workspace is a held directory. ``.`` is it, ``/workspace/...`` lies beneath it,
   and ``openat2`` checks that, links and ``..`` included (spec A4).
2. A host path is accepted if its directory lies beneath the workspace: its text only
   suggests a name, which must lead to the same directory. Shims send ``$(pwd)``.
3. All other paths get the same answer, so that a child learns nothing of the outside.
4. A directory that a host keeps (``sandbox.ownership``) is no working directory, except
   the child's own there: a tool that begins in it needs no way to it.
"""

from __future__ import annotations

import contextlib
import os

from hostlib.listener import OUT_OF_RESOURCES
from hostlib.threads import in_thread
from supervisor.sandbox import ownership
from supervisor.toolexec.routes import ToolRefusedError
from vfs.errors import AccessDeniedError
from vfs.places import open_directory

NAME = b"/workspace"
"""The name of a workspace for its users."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import trio

    from vfs.backends import MountDirectory


async def open_cwd(
    workspace_fd: int, cwd: bytes, share: trio.CapacityLimiter | None = None
) -> int:
    """Open a working directory.

    Args:
        workspace_fd: the workspace, held.
        cwd: from the request; ``.`` if it has none.
        share: bounds the threads for one child's host paths.

    Returns:
        An O_PATH descriptor; the caller closes it.

    Raises:
        ToolRefusedError: 400: it is no directory beneath the workspace.
        OSError: no descriptor or memory is left.
    """
    rest = beneath_name(cwd)
    if rest is not None:
        with _suppress_missing():
            return open_directory(workspace_fd, rest)
    if cwd.startswith(b"/") and b"\0" not in cwd:
        with _suppress_missing():
            # Anywhere on the host, even on a dead network file system.
            return await in_thread(_open_host_path, workspace_fd, cwd, share=share)
    raise make_refusal()


def open_in_mount(
    directory: MountDirectory, rest: bytes | None, name: bytes | None
) -> int:
    """Open a working directory in the mount of a child's workspace.

    Args:
        directory: its top.
        rest: a name beneath the workspace, from ``beneath_name``.
        name: the same for a path under which the child sees the mount.

    Returns:
        An O_PATH descriptor; the caller closes it.

    Raises:
        ToolRefusedError: 400: it is no directory that the child may enter.
        OSError: no descriptor or memory is left.
    """
    name = name if rest is None else rest
    if name is not None:
        with _suppress_missing(), contextlib.suppress(AccessDeniedError):
            return directory.open_directory(name)
    raise make_refusal()


@contextlib.contextmanager
def _suppress_missing() -> Iterator[None]:
    """Suppress errors of names that lead nowhere, but not a lack of resources."""
    try:
        yield
    except OSError as why:
        if why.errno in OUT_OF_RESOURCES:
            raise


def beneath_name(cwd: bytes) -> bytes | None:
    """Return the name beneath the workspace in a text; None for other texts."""
    if cwd in {b".", NAME}:
        return b"."
    if cwd.startswith(NAME + b"/"):
        return cwd[len(NAME) :].lstrip(b"/") or b"."
    return None


def make_refusal() -> ToolRefusedError:
    """Return the refusal of a working directory."""
    text = b"bad request: cwd is not a directory beneath /workspace\n"
    return ToolRefusedError(400, text)


def path_of(fd: int) -> str:
    """Return the host's present path of a held directory (proc(5))."""
    return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - a str


def is_kept(cwd_fd: int, workspace_fd: int, own: Iterable[str]) -> bool:
    """Return whether a directory lies in one that the host keeps (rule 4).

    Args:
        cwd_fd: the directory, held.
        workspace_fd: its ancestor.
        own: the child's own directories, wherever they lie.

    Raises:
        OSError: no descriptor is left.
    """
    if os.geteuid() != 0:
        return False
    ends = [os.fstat(workspace_fd)]
    for path in own:
        with contextlib.suppress(OSError):  # the child has replaced it
            ends.append(os.lstat(path))
    here = os.dup(cwd_fd)
    try:
        while not any(os.path.samestat(os.fstat(here), end) for end in ends):
            if ownership.is_kept(here):
                return True
            above = os.open("..", os.O_PATH | os.O_CLOEXEC, dir_fd=here)
            if os.path.samestat(os.fstat(above), os.fstat(here)):
                os.close(above)
                return False
            os.close(here)
            here = above
        return False
    finally:
        os.close(here)


def _open_host_path(workspace_fd: int, path: bytes) -> int:
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        top = os.fsencode(path_of(workspace_fd)).rstrip(b"/")
        real = os.fsencode(path_of(fd))
        if real != top and not real.startswith(top + b"/"):
            raise NotADirectoryError
        # The guess by text is checked: a name beneath the held directory.
        ours = open_directory(workspace_fd, real[len(top) :].lstrip(b"/") or b".")
        if not os.path.samestat(os.fstat(ours), os.fstat(fd)):
            os.close(ours)
            raise NotADirectoryError
        return ours
    finally:
        os.close(fd)
