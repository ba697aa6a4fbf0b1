"""The stores of files: an interface (``base``), the host's directories and mounts."""

from vfs.backends.base import (
    KEPT,
    MODES,
    Backend,
    FileStatus,
    Handle,
    Mode,
    RemovedEntry,
    UnflushedError,
)
from vfs.backends.host import HostDirectory
from vfs.backends.host_file import is_staged
from vfs.backends.mount import MountDirectory

__all__ = [
    "KEPT",
    "MODES",
    "Backend",
    "FileStatus",
    "Handle",
    "HostDirectory",
    "Mode",
    "MountDirectory",
    "RemovedEntry",
    "UnflushedError",
    "is_staged",
]
