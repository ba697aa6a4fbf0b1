"""Where a key comes from, and that it stays there no longer than needed (spec L13).

Rules of this file.

1. A file that others may read holds no secret: it is refused.
2. A key that came by the environment is taken out of it, also out of the memory that
   ``/proc/PID/environ`` shows: who may read files as the host may read that one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from typing import TYPE_CHECKING, Protocol

from hostlib.redact import MIN_SECRET_CHARS

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVIRONMENT = "OPENAI_API_KEY"
"""Holds the key where no file is configured."""

HANDED_OVER = "environment_key"
"""Where such a key stands in what is handed over: it was wiped when it was read, and the
next program finds it nowhere else. It travels in memory of this process only."""

CREDENTIALS = "$CREDENTIALS_DIRECTORY/"
"""How a key file of systemd's LoadCredential= is named (systemd.exec(5))."""

MAX_KEY_BYTES = 16_384

_OTHERS = stat.S_IROTH | stat.S_IWOTH

FileIdentity = tuple[int, int]
"""Device and inode: a link to a file has the same."""


class KeyFileError(Exception):
    """A key cannot be used; the text says why and what to do."""


class NoCredentialsError(KeyFileError):
    """The service manager gave none: this is not its unit, or the unit names none."""


def expanded(path: str) -> str:
    """Return the path of a key file with its directory of credentials put in.

    Raises:
        NoCredentialsError: there is no such directory.
    """
    if not path.startswith(CREDENTIALS):
        return path
    directory = os.environ.get(CREDENTIALS[1:-1])
    if directory is None:
        raise NoCredentialsError(
            f"cannot use key file {path!r}: systemd gave no credentials; add"
            " LoadCredential= to the unit"
        )
    return f"{directory}/{path.removeprefix(CREDENTIALS)}"


def read_key(path: str) -> tuple[str, FileIdentity]:
    """Read a key file.

    Returns:
        (the key, what tells the file from any other).

    Raises:
        KeyFileError: it cannot be read, others may read it, or it holds no key.
    """
    try:
        fd = os.open(expanded(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if status.st_mode & _OTHERS:
                raise KeyFileError(
                    f"cannot use key file {path!r}: other users may read or change it;"
                    " chmod 600 it"
                )
            raw = os.read(fd, MAX_KEY_BYTES)
        finally:
            os.close(fd)
    except OSError as why:
        raise KeyFileError(f"cannot use key file {path!r}: {why.strerror}") from None
    return _checked(raw.strip(), f"key file {path!r}"), (status.st_dev, status.st_ino)


def take_from_environment() -> str | None:
    """Take the key out of the host's environment, for good (rule 2).

    Raises:
        KeyFileError: what is there is no key.
    """
    raw = os.environb.get(ENVIRONMENT.encode())
    if not raw:
        return None
    key = _checked(raw.strip(), f"${ENVIRONMENT}")
    _wipe(ENVIRONMENT)
    del os.environ[ENVIRONMENT]
    return key


def _checked(raw: bytes, what: str) -> str:
    try:
        key = raw.decode("ascii")
    except UnicodeDecodeError:
        key = ""
    if not key:
        raise KeyFileError(f"cannot use {what}: it holds no key")
    if not (key.isprintable() and " " not in key):
        raise KeyFileError(f"cannot use {what}: it holds more than one key")
    if len(key) < MIN_SECRET_CHARS:
        raise KeyFileError(
            f"cannot use {what}: a key has at least {MIN_SECRET_CHARS} characters;"
            " leave it out for a server that needs none"
        )
    return key


def _wipe(name: str) -> None:
    """Overwrite a variable's value where the process was given it (proc(5), environ)."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(name.encode())
    if address:
        ctypes.memset(address, ord("x"), len(ctypes.string_at(address)))


def restore_environment(left: object) -> None:
    """Put a key that was handed over where ``take_from_environment`` looks.

    ``/proc/PID/environ`` shows what a process was started with, and never this.

    Args:
        left: what the program before has left of the model; None for nothing.
    """
    if isinstance(left, dict) and isinstance(left.get(HANDED_OVER), str):
        os.environ[ENVIRONMENT] = left[HANDED_OVER]


class _Handle(Protocol):
    """What `SecretFiles` looks at of an open file."""

    fd: int

    def identity(self) -> FileIdentity:
        """Return what tells the file from any other."""


class SecretFiles:
    """Tells which files no client may have, whatever its rights: those of keys (L13)."""

    def __init__(self) -> None:
        self._identities: set[FileIdentity] = set()

    def add(self, files: Mapping[str, FileIdentity]) -> None:
        """Add the files of keys, by their paths."""
        self._identities.update(files.values())

    def __call__(self, handle: _Handle) -> bool:
        """Tell whether an open file is one of them."""
        return handle.fd >= 0 and handle.identity() in self._identities
