"""The command `sandhost` from outside: real processes, and what they said.

Starting the installed command as a user's shell does, with its stdin, stdout and stderr
in the test's hand, and reading how it ended.
"""

import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import canary
from tests.helpers.forkserver import ForkServer
from tests.helpers.steps import Steps

SANDHOST = str(Path(sys.executable).with_name("sandhost"))
"""The command as it was installed beside this interpreter."""

TIMEOUT_S = 60.0
"""The longest that any command of a test may take, also on a busy machine."""

PROGRAMS = os.pathsep.join((str(Path(SANDHOST).parent), os.defpath))
"""PATH of the tests: the commands of this installation and those of the system."""

ENVIRONMENT = {
    "PATH": PROGRAMS,
    "HOME": "/nonexistent",
    "LANG": "C.UTF-8",
    "TMPDIR": tempfile.gettempdir(),  # removed after the tests (tests/conftest.py)
    canary.VARIABLE: canary.KEY,
}
"""Of whoever starts a host; of this nothing gets to a child but PATH, HOME and LANG."""

IGNORE = "import os, signal, sys; signal.signal(int(sys.argv[1]), signal.SIG_IGN);\
 os.execv(sys.argv[2], sys.argv[2:])"


def ignoring(number: int) -> tuple[str, ...]:
    """Return a wrapper by which a command ignores a signal, as by `trap ''`."""
    return sys.executable, "-c", IGNORE, str(int(number))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended.

    Attributes:
        status: the exit status; negative by signal.
        out: its stdout.
        err: its stderr.
    """

    status: int
    out: bytes
    err: bytes

    def said(self, text: str) -> bool:
        """Whether stderr is exactly one line, not a traceback, and holds a text."""
        lines = self.err.decode(errors="replace").splitlines()
        assert len(lines) == 1, f"not one line: {lines}"
        assert self.err.endswith(b"\n")
        return text in lines[0]


_SERVERS: list[ForkServer] = []
"""Runs commands whose start does not matter; empty if each is started."""

CONFIGURING = ("--config", "--network", "--policy", "--workspace")
"""Beginnings of options with which `run` imports more than without any."""


@contextmanager
def forked_commands(server: ForkServer) -> Iterator[None]:
    """Have commands forked from processes that have imported them."""
    _SERVERS.append(server)
    try:
        yield
    finally:
        _SERVERS.remove(server)


@pytest.fixture(autouse=True)
def commands_are_forked(fork_server: ForkServer) -> Iterator[None]:
    """Fork commands; for a conftest, whose directory's tests all have it."""
    with forked_commands(fork_server):
        yield


def server_of_forks() -> ForkServer | None:
    """Return what forks commands; None where each is started."""
    return _SERVERS[0] if _SERVERS else None


def kind_of(words: list[str]) -> str:
    """Return what a command is forked from: a process that has its imports."""
    name = words[0] if words else ""
    if name in {"run", "pipeline"}:
        return "host" if any(one.startswith(CONFIGURING) for one in words) else "run"
    return {"serve": "host", "check-config": "run"}.get(name, "command")


def sandhost(*words: str | Path, **changes: Any) -> Outcome:
    """Run the command to its end, without a terminal.

    With words, directory, environment, steps and `data` alone it is forked, where that is
    usual. Its input is `data`, from a pipe; without that there is none.
    """
    data: bytes | None = changes.pop("data", None)
    texts = [os.fsdecode(word) for word in words]
    env = changes.get("env", ENVIRONMENT)
    wrapper = changes.get("wrapper") or None
    is_forked = changes.keys() <= {"cwd", "env", "wrapper"}
    is_forked &= wrapper is None or isinstance(wrapper, Steps)
    server = server_of_forks()
    if server is not None and is_forked and server.takes(texts, env):
        _count_host(words)
        cwd = os.fsdecode(changes.get("cwd") or os.getcwd())
        done = server.run(
            texts, cwd, env, TIMEOUT_S, wrapper, kind=kind_of(texts), data=data
        )
        return outcome(*done)
    if data is not None:
        changes["stdin"] = subprocess.PIPE
    with running(*words, **changes) as process:
        return finished(process, data)


def _count_host(words: tuple[str | Path, ...]) -> None:
    canary.ACCOUNT.hosts += bool({"run", "serve", "pipeline"} & set(map(str, words)))


@contextmanager
def running(*words: str | Path, **changes: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start the command; at the end it is killed if it still runs."""
    _count_host(words)
    options: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "env": ENVIRONMENT,
    }
    wrapper = changes.pop("wrapper", ())
    command = [*wrapper, SANDHOST, *words]
    with subprocess.Popen(command, **{**options, **changes}) as process:
        try:
            yield process
        finally:
            process.kill()


def finished(process: subprocess.Popen[bytes], data: bytes | None = None) -> Outcome:
    """Give a command the rest of its input, and wait for its end."""
    out, err = process.communicate(data, timeout=TIMEOUT_S)
    return outcome(process.returncode, out or b"", err or b"")


def outcome(status: int, out: bytes, err: bytes) -> Outcome:
    """Return how a command ended, once the key of the hosts was looked for."""
    canary.told("stdout of a command", out)
    canary.told("stderr of a command", err)
    return Outcome(status, out, err)


def heard(process: subprocess.Popen[bytes], text: bytes) -> bytes:
    """Wait until a running command has printed `text`; all that came until then."""
    assert process.stdout is not None
    return read_until(process.stdout.fileno(), text)


def shell(script: str, **changes: Any) -> Outcome:
    """Run a shell in which `$S` is the command; for redirections and pipes."""
    env = {**ENVIRONMENT, "S": SANDHOST, **changes.pop("env", {})}
    done = subprocess.run(
        ["/bin/sh", "-c", script],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=env,
        timeout=TIMEOUT_S,
        check=False,
        **changes,
    )
    return outcome(done.returncode, done.stdout, done.stderr)


def read_until(fd: int, text: bytes) -> bytes:
    """Read from a descriptor until `text` has come; fail if it does not."""
    deadline = time.monotonic() + TIMEOUT_S
    got = b""
    while text not in got:
        patience = deadline - time.monotonic()
        ready, _, _ = select.select([fd], [], [], max(0.0, patience))
        assert ready, f"{text!r} did not come, but {got!r}"
        try:
            more = os.read(fd, 65_536)
        except OSError:  # EIO: nobody has the terminal any more
            more = b""
        assert more, f"the end came before {text!r}: {got!r}"
        got += more
    canary.told("output of a command", got)
    return got


def beneath(pid: int) -> set[tuple[int, int]]:
    """Return (pid, start) of every process beneath one, as this machine numbers them.

    The number that a child prints is that of its pid namespace.
    """
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (facts := _facts(int(name))) is not None:
            parents[int(name)] = facts
    found = {pid}
    while more := {p for p, (up, _) in parents.items() if up in found} - found:
        found |= more
    return {(p, parents[p][1]) for p in found - {pid}}


def still_there(processes: set[tuple[int, int]]) -> list[int]:
    """Return those that have not ended.

    Ended processes that the machine's init reaps are not awaited.
    """
    found = [(pid, start, _facts(pid)) for pid, start in processes]
    return [pid for pid, start, now in found if now is not None and now[1] == start]


def _facts(pid: int) -> tuple[int, int] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    if fields[:2] == ["Z", "1"]:
        return None
    return int(fields[1]), int(fields[19])


def bound_by_permissions() -> tuple[str, ...]:
    """The prefix by which a command of root obeys permissions of files."""
    return without("dac_override", "dac_read_search")


def without(*capabilities: str) -> tuple[str, ...]:
    """The prefix that drops capabilities; empty for a user without any."""
    if os.geteuid() != 0:
        return ()
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("root may do everything, and setpriv (util-linux) is missing")
    return (setpriv, "--bounding-set=" + ",".join(f"-{name}" for name in capabilities))


@contextmanager
def small_disk(where: Path, size: str) -> Iterator[Path]:
    """Mount a file system of a few blocks; skips the test where that is not given.

    Args:
        where: a directory in which the mount point is made.
        size: as for tmpfs(5).
    """
    point = where / "small"
    point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(point)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)
