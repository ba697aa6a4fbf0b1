"""Keys in files and the environment: reading, wiping, and closed files (spec L13).

Rules of this file.

1. A key file that other users may read is refused.
2. A key in the environment is removed from it, and from the memory that
   ``/proc/PID/environ`` shows: a client that reads files as the host could read that.
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
"""The variable that holds the key if no file is configured."""

HANDED_OVER = "environment_key"
"""The field of a hand-over with such a key: it was wiped after it was read, so the next
program finds it nowhere else.  It stays in the memory of this process."""

CREDENTIALS = "$CREDENTIALS_DIRECTORY/"
"""The prefix of a key file of systemd's LoadCredential= (systemd.exec(5))."""

MAX_KEY_BYTES = 16_384

_OTHERS = stat.S_IROTH | stat.S_IWOTH

FileIdentity = tuple[int, int]
"""Device and inode; a hard link to a file has the same."""


class KeyFileError(Exception):
    """A key cannot be used; the text says why and what to do."""


class NoCredentialsError(KeyFileError):
    """The service manager gave no credentials: no unit, or one that names none."""


def expand_path(path: str) -> str:
    """Return the path of a key file, with the credentials directory filled in.

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
        (the key, the identity of its file).

    Raises:
        KeyFileError: it cannot be read, others may read it, or it holds no key.
    """
    raw, identity = _read(path)
    return _check_key(raw.strip(), f"key file {path!r}"), identity


def identify_key_file(path: str) -> FileIdentity:
    """Return the identity of a file of secrets that another program reads.

    Raises:
        KeyFileError: it cannot be read, or others may read it.
    """
    return _read(path)[1]


def _read(path: str) -> tuple[bytes, FileIdentity]:
    try:
        fd = os.open(expand_path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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
    return raw, (status.st_dev, status.st_ino)


def take_from_environment() -> str | None:
    """Return the key in the host's environment, and wipe it there (rule 2).

    Raises:
        KeyFileError: the value is no key.
    """
    raw = os.environb.get(ENVIRONMENT.encode())
    if not raw:
        return None
    key = _check_key(raw.strip(), f"${ENVIRONMENT}")
    _wipe(ENVIRONMENT)
    del os.environ[ENVIRONMENT]
    return key


def _check_key(raw: bytes, what: str) -> str:
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
    """Overwrite a variable's value in the process's first environment (proc(5))."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(name.encode())
    if address:
        ctypes.memset(address, ord("x"), len(ctypes.string_at(address)))


def restore_environment(left: object) -> None:
    """Put a key of a hand-over into the environment, for ``take_from_environment``.

    ``/proc/PID/environ`` shows only the environment of the start, so not this key.

    Args:
        left: the model's state from the program before; None for nothing.
    """
    if isinstance(left, dict) and isinstance(left.get(HANDED_OVER), str):
        os.environ[ENVIRONMENT] = left[HANDED_OVER]


class _Handle(Protocol):
    """The part of an open file that `SecretFiles` reads."""

    fd: int

    def identity(self) -> FileIdentity:
        """Return the file's device and inode."""


class SecretFiles:
    """The files of keys, which no client may open, not even with a grant (spec L13)."""

    def __init__(self) -> None:
        self._identities: set[FileIdentity] = set()

    def add(self, files: Mapping[str, FileIdentity]) -> None:
        """Add the files of keys, by their paths."""
        self._identities.update(files.values())

    def __call__(self, handle: _Handle) -> bool:
        """Return whether an open file is one of them."""
        return handle.fd >= 0 and handle.identity() in self._identities
