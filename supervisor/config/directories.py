"""The directories of a daemon: run-time and state directory, and their locks.

1. The kernel drops the locks (flock) when the daemon ends: their holder alone uses
   these directories. The text of the files is for people and for the sweep; it proves
   nothing.
2. Both directories belong to the daemon's own user, 0700 where they are made here.
3. Children's directories lie in the state directory, unless a path of a socket there
   would be too long (unix(7)): then in the run-time directory, or in a temporary one
   whose name follows from the state directory's, so that the next daemon finds it.
4. A living daemon keeps its directories, whatever its configuration says by now: its
   next program gets them by ``VARIABLE``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hostlib.linux import holdings
from hostlib.paths import (
    CHECKPOINTS,
    LEDGER,
    absolute,
    temporary_directory,
    usual_runtime_dir,
    usual_state_dir,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.config.document import Config
    from supervisor.config.host import HostSection

_DIRECTORY_MODE = 0o700

MAX_SCRATCH_BYTES = 107 - len("/sandhost-12345678/run/toolexec.sock")
"""Longest path of the parent of children's directories: sun_path has 107 bytes."""


VARIABLE = "SANDHOST_PLACES"
"""The variable with a living daemon's directories, for its next program (rule 4)."""

STAY = "other places of a daemon's own need a restart of the host"


@dataclass(frozen=True, slots=True)
class Places:
    """The paths of a daemon; absolute.

    Attributes:
        runtime_dir: lost at a boot.
        state_dir: kept.
        control: the control socket.
        scratch: children's private directories (rule 3).
    """

    runtime_dir: str
    state_dir: str
    control: str
    scratch: str

    @property
    def is_borrowed(self) -> bool:
        """Whether ``scratch`` is a temporary directory."""
        return _is_borrowed(self.scratch, self.runtime_dir, self.state_dir)

    @property
    def lock(self) -> str:
        """The lock file of the run-time directory."""
        return f"{self.runtime_dir}/lock"

    @property
    def state_lock(self) -> str:
        """The lock file of the state directory, which may be the run-time directory, too."""
        return f"{self.state_dir}/state.lock"

    @property
    def logs(self) -> str:
        """The parent of each child's log directory."""
        return f"{self.state_dir}/logs"

    @property
    def journal(self) -> str:
        """The journal's directory."""
        return f"{self.state_dir}/journal"

    @property
    def checkpoints(self) -> str:
        """The directory of LLM fds' checkpoints."""
        return f"{self.state_dir}/{CHECKPOINTS}"

    @property
    def ledger(self) -> str:
        """The file with the spent quota."""
        return f"{self.state_dir}/{LEDGER}"


def places_of(section: HostSection, control: str | None) -> Places:
    """Return the configured paths, or the usual ones (face: [host]).

    Args:
        section: ``[host]``.
        control: the option ``--control``; it takes precedence.
    """
    runtime_dir, state_dir, scratch = directories_of(section)
    named = control or section.control or f"{runtime_dir}/control"
    return Places(runtime_dir, state_dir, absolute(named), scratch)


def directories_of(section: HostSection | None) -> tuple[str, str, str]:
    """Return the directories of a daemon, whether one runs or not.

    These are the run-time directory, the state directory, and that of its children.

    Args:
        section: ``[host]``; None without a configuration.

    Raises:
        FileNotFoundError: one is relative to a working directory that was removed.
    """
    runtime_dir = section.runtime_dir if section is not None else None
    state_dir = section.state_dir if section is not None else None
    runtime_dir = absolute(runtime_dir or usual_runtime_dir())
    state_dir = absolute(state_dir or usual_state_dir())
    return runtime_dir, state_dir, _scratch_of(runtime_dir, state_dir)


def _scratch_of(runtime_dir: str, state_dir: str) -> str:
    usual = f"{state_dir}/scratch"
    digest = hashlib.blake2b(os.fsencode(state_dir), digest_size=8).hexdigest()
    # Unlike any name of a child's directory (``scratch.PREFIX``).
    temporary = f"{temporary_directory()}/.sandhost-{os.geteuid()}-{digest}"
    for path in (usual, f"{runtime_dir}/scratch", temporary):
        if len(os.fsencode(path)) <= MAX_SCRATCH_BYTES:
            return path
    return usual  # a service that needs a socket in there reports it


def hidden_from_children(section: HostSection | None) -> tuple[str, ...]:
    """Return the directories that children see empty, none of them within another.

    Raises:
        FileNotFoundError: as ``directories_of``.
    """
    *own, scratch = directories_of(section)
    return (*own, scratch) if _is_borrowed(scratch, *own) else tuple(own)


def _is_borrowed(scratch: str, *own: str) -> bool:
    """Return whether children's directories are outside of the daemon's own (rule 3)."""
    return not scratch.startswith(tuple(f"{path}/" for path in own))


def text_of(places: Places) -> str:
    """Return paths as a text for ``places_from``."""
    return json.dumps(asdict(places))


def places_from(text: str | None) -> Places | None:
    """Return the paths of the program before; None without one."""
    return None if text is None else Places(**json.loads(text))


def keep_paths(config: Config, living: Places) -> Config:
    """Return a configuration with the paths of a living daemon (rule 4)."""
    host = msgspec.structs.replace(
        config.host,
        runtime_dir=living.runtime_dir,
        state_dir=living.state_dir,
        control=living.control,
    )
    return msgspec.structs.replace(config, host=host)


def make_directories(places: Places) -> None:
    """Make the missing directories.

    Raises:
        OSError: one cannot be made, or belongs to another user; or a temporary one was
            prepared by another user (rule 3).
    """
    for path in (places.runtime_dir, places.state_dir, places.logs, places.scratch):
        Path(path).mkdir(_DIRECTORY_MODE, parents=True, exist_ok=True)
        is_borrowed = places.is_borrowed and path == places.scratch
        # One look: in a temporary directory, another user may replace it until it is ours.
        status = Path(path).stat(follow_symlinks=not is_borrowed)
        if is_borrowed and not _is_closed(status.st_mode):
            text = "it is a link, or open to others; remove it, or name a shorter state_dir"
            raise OSError(errno.EPERM, text, path)
        if status.st_uid != os.geteuid():
            text = f"user {status.st_uid} owns it; give it to {os.geteuid()}, or name another"
            raise OSError(errno.EPERM, text, path)


def _is_closed(mode: int) -> bool:
    """Return whether a mode is that of a directory which its owner alone may enter."""
    return stat.S_ISDIR(mode) and not stat.S_IMODE(mode) & 0o077


def remove_borrowed(places: Places) -> None:
    """Remove the temporary directory of children, if it is empty."""
    if places.is_borrowed:
        with contextlib.suppress(OSError):
            Path(places.scratch).rmdir()


class Predecessor(dict[str, int]):
    """The text of a lock file: ``pid``, ``create_time``, ``launchpad``, ... ."""


class Locks(NamedTuple):
    """The locks of a daemon's directories, as descriptors.

    Attributes:
        runtime: of the run-time directory.
        state: of the state directory.
    """

    runtime: int
    state: int


@contextlib.contextmanager
def lock_directories(
    places: Places, launchpad_pid: int, held: Locks | None = None
) -> Iterator[tuple[Locks, Predecessor | None]]:
    """Lock the directories; yield the locks and a dead predecessor's record.

    Args:
        places: the directories.
        launchpad_pid: the process that the next host looks for if this one dies.
        held: the locks that this process has from its program before.

    Raises:
        OSError: ``EADDRINUSE``: a living host has them; or a file cannot be made.
    """
    before = None
    with contextlib.ExitStack() as stack:
        if held is None:
            locks = Locks(_lock(places.lock, stack), _lock(places.state_lock, stack))
            before = _read(locks.runtime)
            for fd in locks:
                _write(fd, launchpad_pid)
        else:
            locks = held
            for fd in locks:
                stack.callback(os.close, fd)
        yield locks, before
        for fd in locks:
            os.ftruncate(fd, 0)  # after an orderly end there is no process to look for


def _lock(path: str, stack: contextlib.ExitStack) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    stack.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = (_read(fd) or Predecessor()).get("pid", "?")
        text = f"a living host (pid {who}) has it; stop that one or name another"
        raise OSError(errno.EADDRINUSE, text, str(Path(path).parent)) from None
    return fd


def _read(fd: int) -> Predecessor | None:
    try:
        said = json.loads(os.pread(fd, 4096, 0))
        return Predecessor({key: int(value) for key, value in said.items()})
    except (ValueError, TypeError, AttributeError, OSError):
        return None


def _write(fd: int, launchpad_pid: int) -> None:
    said = {}
    for name, pid in (("", os.getpid()), ("launchpad_", launchpad_pid)):
        facts = holdings.process_facts(pid)
        said[f"{name}pid"] = pid
        said[f"{name}create_time"] = 0 if facts is None else facts.create_time
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps(said).encode(), 0)
