"""The command `sandhost` without its start.

Forks of a process that has imported it.

For `command.sandhost`, which runs a command to its end, for `daemon.daemon`, and for the
stand-in of `provider`. A command that is to be seen starting, or that takes something else
than words, directory, environment and streams from its caller, is started as it is
installed. Used in directories whose conftest has `commands_are_forked`.
"""

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from tests.helpers.steps import Steps

PROGRAM = Path(__file__).parent / "children" / "forkserver.py"

MOST_BYTES = 100_000
"""Of a command line: a request is one datagram, and the kernel has a bound for a start."""

OF_THE_START = ("PYTHON", "LANG", "LC_", "LD_", "MALLOC", "TZ", "LOGURU_", "OPENAI_LOG")
"""Beginnings of variables that an interpreter or its libraries read when they start."""

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE, signal.SIGQUIT, signal.SIGTERM)
"""Signals that may be ignored from the start on."""


class Forked:
    """A command that was forked, with what tests use of `subprocess.Popen`.

    Attributes:
        pid: its own.
        returncode: its exit status, negative by signal; None until `poll` or `wait` saw it.
    """

    def __init__(self, words: list[str], told: int) -> None:
        self._words = words
        self._told = told
        self._text = b""
        self.returncode: int | None = None
        while b"\n" not in self._text:
            more = os.read(told, 100)
            assert more, f"the server of forks did not take {words}"
            self._text += more
        self.pid = int(self._text.split()[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        os.close(self._told)

    def poll(self) -> int | None:
        """Return the exit status; None if it runs."""
        return self.returncode if self._has_ended(0.0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once it has ended.

        Raises:
            subprocess.TimeoutExpired: it takes longer.
        """
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(self._words, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal it, if it was not seen to have ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def _has_ended(self, timeout_s: float | None) -> bool:
        """Take its status, if that was told meanwhile."""
        while self.returncode is None:
            if not select.select([self._told], [], [], timeout_s)[0]:
                return False
            more = os.read(self._told, 100)
            self._text += more
            if not more:
                self.returncode = int(self._text.split()[1])
        return True


class ForkServer:
    """A process that runs commands, and is no test's child.

    Args:
        env: of the interpreter of the commands.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = _of_the_start(env)
        self._inherited = _inherited()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = str(theirs.fileno())
            subprocess.run(
                [sys.executable, str(PROGRAM), number],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict(env),
                cwd="/",
                check=True,
            )

    def takes(self, words: list[str], env: Mapping[str, str]) -> bool:
        """Return whether a command would be the same if it were started."""
        return (
            sum(map(len, words)) < MOST_BYTES
            and not any("\0" in word for word in words)
            and _of_the_start(env) == self._env
            and _inherited() == self._inherited
        )

    def run(
        self,
        words: list[str],
        cwd: str,
        env: Mapping[str, str],
        timeout_s: float,
        steps: Steps | None = None,
        *,
        kind: str = "run",
        data: bytes | None = None,
    ) -> tuple[int, bytes, bytes]:
        """Run a command to its end; return its status and what it said.

        Args:
            words: of the command.
            cwd: its working directory.
            env: its environment.
            timeout_s: how long it may take.
            steps: of its process before.
            kind: names modules imported already (`KINDS` of `children/forkserver.py`).
            data: comes from a pipe as its input; None: there is no input.

        Raises:
            subprocess.TimeoutExpired: it took too long, and was killed.
        """
        with ExitStack() as stack:
            ours, theirs = [], [_open_input(stack, data)]
            for _ in range(3):
                reads, writes = os.pipe2(os.O_CLOEXEC)
                stack.callback(os.close, reads)
                ours.append(reads)
                theirs.append(writes)
            try:
                self._send(words, cwd, env, theirs, steps, kind)
            finally:
                for fd in theirs:
                    os.close(fd)
            out, err, told = _read_all(ours, words, timeout_s)
        return int(told.split()[1]), out, err

    def start(
        self,
        words: list[str],
        cwd: str,
        env: Mapping[str, str],
        streams: list[int],
        steps: Steps | None = None,
        kind: str = "run",
    ) -> Forked:
        """Start a command.

        Args:
            words: of the command.
            cwd: its working directory.
            env: its environment.
            streams: descriptors of its stdin, stdout and stderr.
            steps: of its process before.
            kind: names the modules imported already.
        """
        told, tells = os.pipe2(os.O_CLOEXEC)
        try:
            self._send(words, cwd, env, [*streams, tells], steps, kind)
        finally:
            os.close(tells)
        return Forked(words, told)

    def _send(
        self,
        words: list[str],
        cwd: str,
        env: Mapping[str, str],
        fds: list[int],
        steps: Steps | None,
        kind: str,
    ) -> None:
        request = {
            "kind": kind,
            "words": words,
            "cwd": cwd,
            "env": dict(env),
            "steps": None if steps is None else (steps.code, steps.args),
        }
        socket.send_fds(self._sock, [json.dumps(request).encode()], fds)

    def close(self) -> None:
        """End the process."""
        self._sock.close()


def _open_input(stack: ExitStack, data: bytes | None) -> int:
    """Return a descriptor from which a command reads its input."""
    if data is None:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    reads, writes = os.pipe2(os.O_CLOEXEC)

    def write() -> None:
        with open(writes, "wb", 0) as pipe, suppress(BrokenPipeError):
            pipe.write(data)

    writer = threading.Thread(target=write)
    writer.start()
    stack.callback(writer.join)
    return reads


def _of_the_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: env[name] for name in env if name.startswith(OF_THE_START)}


def _inherited() -> tuple[object, ...]:
    """Return what a process gets from the one that starts it, and that tests change."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in names}
    signals = [signal.getsignal(number) for number in SIGNALS]
    umask = os.umask(0o077)
    os.umask(umask)
    return limits, signals, umask, os.getegid(), os.geteuid()


def _read_all(fds: list[int], words: list[str], timeout_s: float) -> list[bytes]:
    """Read descriptors to their ends; the last one tells whom to kill if it is late."""
    deadline = time.monotonic() + timeout_s
    got = dict.fromkeys(fds, b"")
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    left = set(fds)
    while left:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            with suppress(ProcessLookupError):
                os.kill(int(got[fds[-1]].split()[0]), signal.SIGKILL)
            raise subprocess.TimeoutExpired(words, timeout_s)
        for fd, _ in ready:
            more = os.read(fd, 65_536)
            got[fd] += more
            if not more:
                poll.unregister(fd)
                left.discard(fd)
    return [got[fd] for fd in fds]
