"""Ray's processes of one node on this machine: their start, and their end.

Nothing here imports Ray. Rules of this file.

1. All processes that are started for a node carry its directory in their environment
   (`MARK`), and so do those that they start: only processes with it are ended, by
   pidfd. `ray stop` ends every Ray of a machine: it is never used.
2. The token stands in a file of mode 0600, never in an environment, a command line or a
   log (FL9).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from hostlib.linux.processes import end_processes
from hostlib.paths import CONTROL_VARIABLE
from hostlib.private_files import open_private
from hostlib.unix_names import is_deaf

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DIRECTORY = "fleet"
"""Name of the directory of a node's files for Ray, in the daemon's state directory."""

MARK = "SANDHOST_FLEET_DIRECTORY"
"""Variable that Ray's processes of a node carry, and no child of the fleet."""

TOKEN, SESSIONS, LOCK, STORE = "token", "ray", "lock", "directory"
LOG, ACTORS_LOG, RAYLET = "ray.log", "actors.log", "raylet"
"""Names in that directory."""

_HEAD = b"gcs_server"
"""Word in the command line of the program that only a head runs."""

LISTEN = "0A"
"""State of a socket that listens, as proc_pid_net(5) has it."""

LOCK_S = 10.0
"""Longest wait for a command that starts or ends Ray here: an end takes that long."""

PAUSE_S = 0.1
"""Time between two attempts to take that lock."""

GRACE_S = 3.0
"""Time from SIGTERM to SIGKILL, in which Ray tells the head that a node leaves."""

MOST_SESSIONS_BYTES = 107 - len(
    "/session_2026-11-27_11-25-23_036337_1234567/sockets/plasma_store.1"
)
"""Longest path of the sessions' directory: Ray's sockets are in there (unix(7))."""


Program: TypeAlias = subprocess.Popen[bytes]
"""A program that was started and is watched."""


class RayError(Exception):
    """Ray cannot be started or ended here; the text says why and what to do."""


def directory_of(state_dir: str) -> str:
    """Return the directory of a node, in its daemon's state directory.

    Raises:
        RayError: Ray's sockets would have too long a path in there.
    """
    directory = f"{state_dir}/{DIRECTORY}"
    size = len(os.fsencode(f"{directory}/{SESSIONS}"))
    if size > MOST_SESSIONS_BYTES:
        raise RayError(
            f"cannot have Ray's sockets in {directory!r}: its path has"
            f" {size - MOST_SESSIONS_BYTES} bytes too many; set a shorter host.state_dir"
        )
    return directory


@contextlib.contextmanager
def locked(directory: str) -> Iterator[int]:
    """Keep other commands from starting and ending Ray here; yield the lock.

    One that ends Ray is waited for: `leave` returns before Ray has ended.

    Raises:
        RayError: one does so for long, or the directory cannot be used.
    """
    try:
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = open_private(f"{directory}/{LOCK}")
    except OSError as why:
        raise RayError(
            f"cannot use {directory!r}: {why.strerror}; make it writable"
        ) from None
    try:
        _lock(fd)
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    """Take the lock of a file.

    Raises:
        RayError: another process has it for long.
    """
    until_s = time.monotonic() + LOCK_S
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.monotonic() >= until_s:
            raise RayError(
                "cannot join or leave a fleet: another command does so on this node;"
                " wait for its end"
            )
        pause(PAUSE_S)


def make_token(directory: str) -> str:
    """Write a new token into a file that only this user may read; return its path."""
    return _write_token(directory, secrets.token_hex(32).encode())


def copy_token(directory: str, given: str) -> str:
    """Copy the token of a fleet into a node's directory; return the copy's path.

    Ray reads it whenever it starts an actor again: the file that was given may be gone.

    Raises:
        RayError: it cannot be read, or has none.
    """
    try:
        token = Path(given).read_bytes()
    except OSError as why:
        raise RayError(
            f"cannot read the token in {given!r}: {why.strerror}; copy the file that"
            " `sandhost fleet up` has named"
        ) from None
    if not re.fullmatch(rb"[!-~]+", token.strip()):
        raise RayError(
            f"cannot use {given!r}: it has no token; copy the file that `sandhost fleet"
            " up` has named"
        )
    return _write_token(directory, token)


def _write_token(directory: str, token: bytes) -> str:
    path = f"{directory}/{TOKEN}"
    Path(path).unlink(missing_ok=True)
    fd = open_private(path)
    try:
        os.write(fd, token)
    finally:
        os.close(fd)
    return path


def environment(token_file: str | None) -> dict[str, str]:
    """Return the environment of a program that uses Ray, without Ray's own settings.

    Nor has it a database's password: others of the user could read it there.

    Args:
        token_file: None for a program that has no token.
    """
    kept = {key: value for key, value in os.environ.items() if not _is_of_ray(key)}
    kept.pop("PGPASSWORD", None)
    kept["RAY_AUTH_MODE"] = "disabled"
    if token_file is not None:
        kept |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_file}
    return kept | {
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
        "RAY_USAGE_STATS_ENABLED": "0",
        # The memory of this machine is the host's to watch: it would kill our actors.
        "RAY_memory_monitor_refresh_ms": "0",
        # Beats must not wait behind everything else: Ray's workers are at 15 by default.
        "RAY_worker_niceness": "0",
        # A worker that sets its title leaves the environment as the kernel shows it.
        "SPT_NOENV": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _is_of_ray(key: str) -> bool:
    return key.startswith(("RAY_", "SANDHOST_FLEET_")) or key == "SPT_NOENV"


def marked_environment(directory: str, token_file: str, control: str) -> dict[str, str]:
    """Return the environment of what is ended with the node; actors find its daemon."""
    return environment(token_file) | {MARK: directory, CONTROL_VARIABLE: control}


def start(
    words: Sequence[str], directory: str, token_file: str, control: str
) -> Program:
    """Start a program of Ray's for a node; it outlives this process.

    Raises:
        RayError: it cannot be started.
    """
    path = f"{directory}/{LOG}"
    try:
        Path(f"{directory}/{SESSIONS}").mkdir(mode=0o700, exist_ok=True)
        log = open_private(path)
        try:
            os.ftruncate(log, 0)
            return subprocess.Popen(
                words,
                env=marked_environment(directory, token_file, control),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        finally:
            os.close(log)
    except OSError as why:
        raise RayError(
            f"cannot start Ray in {directory!r}: {why.strerror}; make it writable"
        ) from None


def run(
    words: Sequence[str],
    token_file: str | None,
    data: bytes,
    fds: tuple[int, ...] = (),
) -> tuple[bytes, str]:
    """Run a program that uses Ray; return what it said on stdout and stderr.

    Args:
        words: of its command line.
        token_file: of the fleet; None for none.
        data: its standard input.
        fds: descriptors that it has too, by the same numbers.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words,
        env=environment(token_file),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        pass_fds=fds,
    ) as program:
        try:
            out, errors = program.communicate(data)
        except BaseException:
            _end_program(program)
            raise
    return out, errors.decode(errors="replace")


def _end_program(program: Program) -> None:
    """End a program that ends what it has begun, unless Ray holds it up for long."""
    program.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(LOCK_S)
    program.kill()


def is_socket(path: str) -> bool:
    """Tell whether there is a socket of a name."""
    return Path(path).is_socket()


def note_raylet(directory: str, name: str) -> None:
    """Keep the name of the raylet that a node has from now on."""
    Path(directory, RAYLET).write_text(name, encoding="utf-8")


def last_raylet(directory: str) -> str:
    """Return the name of the raylet that a node had last; nothing if it had none."""
    try:
        return Path(directory, RAYLET).read_text(encoding="utf-8")
    except OSError:
        return ""


def last_error(log: str) -> str:
    """Return what Ray has said last that tells of an error; of a log that it wrote."""
    text = Path(log).read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "ERR" in line]
    return (errors or lines or ["it says nothing"])[-1][:300]


def pause(length_s: float) -> None:
    """Wait; for programs that have no loop."""
    select.select([], [], [], length_s)


def is_running(directory: str) -> bool:
    """Tell whether anything runs that was started for a node."""
    for _, pidfd in _marked(directory):
        os.close(pidfd)
        return True
    return False


def is_head(directory: str) -> bool:
    """Tell whether a node's Ray is the head of its fleet."""
    found = False
    for pid, pidfd in _marked(directory):
        os.close(pidfd)
        with contextlib.suppress(OSError):  # it has ended
            found |= _HEAD in Path(f"/proc/{pid}/cmdline").read_bytes()
    return found


def open_ports(directory: str) -> list[int]:
    """Return the ports of a node's programs that are open on every address."""
    sockets = set()
    for pid, pidfd in _marked(directory):
        os.close(pidfd)
        with contextlib.suppress(OSError):  # it has ended
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    sockets.add(str(fd.readlink()))
    rows = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            text = Path("/proc/self/net", name).read_text(encoding="ascii")
            rows += [line.split() for line in text.splitlines()[1:]]
    ports = set()
    for row in rows:
        address, _, port = row[1].partition(":")
        # Zeros alone, or those of IPv4 within IPv6: ::ffff:0.0.0.0.
        is_open = row[3] == LISTEN and not address.strip("0F")
        if is_open and f"socket:[{row[9]}]" in sockets:
            ports.add(int(port, 16))
    return sorted(ports)


def worker_ports(node_id: str) -> tuple[tuple[int, int], ...]:
    """Return the ports of actors of a raylet here, as first and last of each range.

    Raises:
        RayError: its command line is not to be seen.
    """
    words = _raylet_words(node_id)
    if words.get("worker_port_list"):
        return tuple((int(port),) * 2 for port in words["worker_port_list"].split(","))
    first, last = int(words["min_worker_port"]), int(words["max_worker_port"])
    if first == 0:  # Ray leaves the choice to the kernel
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii")
        least, most = map(int, text.split())
        return ((least, most),)
    return ((first, last),)


def _raylet_words(node_id: str) -> dict[str, str]:
    """Return the options of a raylet, as its command line has them."""
    wanted = f"--node_id={node_id}"
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            line = (process / "cmdline").read_bytes().decode(errors="replace")
            words = line.split("\0")
            if wanted in words:
                pairs = (word[2:].partition("=") for word in words if word[:2] == "--")
                return {key: value for key, _, value in pairs}
    raise RayError(
        "cannot join: the command line of Ray's raylet here is not to be seen, so its"
        " ports are not known; run the daemon as a user that may read /proc"
    )


def is_there(directory: str) -> bool:
    """Tell whether anything of a node's Ray is left: a process, or its files."""
    return is_running(directory) or Path(directory, SESSIONS).exists()


def remove_deaf(door: str) -> None:
    """Remove the socket of a door that was killed."""
    if is_socket(door) and is_deaf(door):
        Path(door).unlink(missing_ok=True)


def end(directory: str) -> None:
    """End all that was started for a node, and remove Ray's sessions and the token.

    Raises:
        RayError: something does not end.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        _end_marked(directory, number)
    # Processes that one of them had just started.
    for _ in range(10):
        if not _end_marked(directory, signal.SIGKILL):
            break
    else:
        raise RayError(
            f"cannot end Ray of {directory!r}: its processes do not go; see its"
            f" {LOG}, and end those that have {MARK} in their environment"
        )
    shutil.rmtree(f"{directory}/{SESSIONS}", ignore_errors=True)
    Path(f"{directory}/{TOKEN}").unlink(missing_ok=True)


def _end_marked(directory: str, number: int) -> bool:
    """Signal what was started for a node and await its end; return whether any was."""
    with contextlib.ExitStack() as stack:
        pidfds = []
        for _, pidfd in _marked(directory):
            stack.callback(os.close, pidfd)
            pidfds.append(pidfd)
        end_processes(pidfds, number, GRACE_S)
    return bool(pidfds)


def _marked(directory: str) -> Iterator[tuple[int, int]]:
    """Yield each process that carries the mark, but this one, with a pidfd of it."""
    wanted = f"{MARK}={directory}".encode()
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or int(process.name) == os.getpid():
            continue
        try:
            pidfd = os.pidfd_open(int(process.name))
        except OSError:  # gone
            continue
        try:
            is_marked = wanted in (process / "environ").read_bytes().split(b"\0")
        except OSError as why:  # gone, or another user's
            is_marked = False
            if why.errno not in {errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM}:
                os.close(pidfd)
                raise
        if is_marked:
            yield int(process.name), pidfd
        else:
            os.close(pidfd)


def end_later(directory: str) -> None:
    """Have a process of its own end all that was started for a node, this one too."""
    # The shell ends at once: so its program is no child of a worker, whose children Ray
    # ends with it.
    words = ("sh", "-c", '"$@" &', "sh", sys.executable, "-m", __name__, directory)
    kept = {key: value for key, value in os.environ.items() if not _is_of_ray(key)}
    null = subprocess.DEVNULL
    subprocess.run(
        words, env=kept, stdin=null, stdout=null, stderr=null,
        start_new_session=True, check=False,
    )  # fmt: skip


if __name__ == "__main__":
    with locked(sys.argv[1]):
        end(sys.argv[1])
