"""Where files can live: one interface (``base``), the host's disk and plain memory."""

from vfs.backends.base import KEPT, MODES, Backend, FileStatus, Handle, Mode, Removed
from vfs.backends.host import HostDirectory
from vfs.backends.memory import MemoryDirectory
from vfs.backends.mount import MountDirectory

__all__ = [
    "KEPT",
    "MODES",
    "Backend",
    "FileStatus",
    "Handle",
    "HostDirectory",
    "MemoryDirectory",
    "Mode",
    "MountDirectory",
    "Removed",
]
