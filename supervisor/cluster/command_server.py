"""The program of a child that runs commands: `sandhost serve-commands`, inside it.

Requests come on its standard input, one JSON object a line, answers leave on its standard
output the same way (`commands` is the other end). Rules of this file.

1. A command has a session of its own, and is over with its own process: the bytes in
   its pipes then are its last output.
2. Of each command at most `WINDOW_BYTES` are under way: its reader tells how much it has
   taken of all that was said.
3. The same request twice is done once; one that cannot be read is refused.
4. At the end of its input, or after too long a silence, this program ends, and its child
   with it: no client holds the child any more.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import math
import os
import select
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress

from hostlib.linux.syscalls import PR_SET_DUMPABLE, prctl

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

WINDOW_BYTES = 1024 * 1024
"""Most bytes of output under way to its reader: a fiftieth of a log's size."""

PIECE_BYTES = 32_768
"""Most bytes of a file or an output in one answer."""

LONGEST_WAIT_S = 3600.0
"""Longest wait of one poll(2), which takes 24 days at most."""

MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""Exceptions that a request of an unknown form causes."""


class _Task:
    """A request that is being done.

    Attributes:
        deadline_s: when it is ended; None for never.
        said: bytes of all its output.
        read: bytes of that which its reader has taken.
        taken: bytes of its input.
    """

    def __init__(self, say: Callable[..., None]) -> None:
        self.deadline_s: float | None = None
        self.said = 0
        self.read = 0
        self.taken = 0
        self.is_over = False
        self._say = say

    def fds(self) -> Iterator[tuple[int, int]]:
        """Yield the descriptors that it waits for, and the events."""
        yield from ()

    def step(self, fd: int) -> None:
        """Go on: a descriptor is ready."""

    def go_on(self) -> None:
        """Do what waits for nothing but a reader."""

    def take(self, data: bytes, *, is_last: bool) -> None:
        """Take a piece of its input."""

    def end(self) -> None:
        """End it at once."""

    def finish(self, **how: Any) -> None:
        """Say how it has ended."""
        self.is_over = True
        self._say(over=how)

    def fail(self, why: OSError) -> None:
        """Say by which error it has ended."""
        self.finish(errno=why.errno or errno.EIO, path=why.filename)

    def put(self, stream: str, data: bytes) -> None:
        """Send a piece of output."""
        self.said += len(data)
        self._say(**{stream: base64.b64encode(data).decode()})

    @property
    def has_room(self) -> bool:
        """Whether more output may be under way."""
        return self.said - self.read < WINDOW_BYTES


class _Command(_Task):
    """A command.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, request: dict[str, Any], say: Callable[..., None]) -> None:
        super().__init__(say)
        timeout_s = request.get("timeout_s")
        if timeout_s is not None:
            if math.isnan(timeout_s):
                raise ValueError("no time")
            self.deadline_s = time.monotonic() + timeout_s
        cwd = request.get("cwd") or os.getcwd()
        self._process = subprocess.Popen(
            request["command"],
            stdin=subprocess.PIPE if request.get("has_input") else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env={**os.environ, "PWD": cwd, **(request.get("env") or {})},
            start_new_session=True,
        )
        self._is_late = False
        self._pidfd = os.pidfd_open(self._process.pid)
        self._outputs: dict[int, str] = {}
        for pipe, stream in (
            (self._process.stdout, "out"),
            (self._process.stderr, "err"),
        ):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._outputs[pipe.fileno()] = stream
        self._input = (
            -1 if self._process.stdin is None else self._process.stdin.fileno()
        )
        self._waiting = bytearray()
        self._is_complete = False
        if self._input >= 0:
            os.set_blocking(self._input, False)

    def fds(self) -> Iterator[tuple[int, int]]:
        """Yield its pipes and its pidfd, with the events to wait for."""
        yield self._pidfd, select.POLLIN
        if self.has_room:
            for fd in self._outputs:
                yield fd, select.POLLIN
        if self._waiting:
            yield self._input, select.POLLOUT

    def step(self, fd: int) -> None:
        """Read output, write input, or note the end."""
        if fd == self._pidfd:
            self._note_end()
        elif fd == self._input:
            self._write()
        elif fd in self._outputs:
            self._read(fd)

    def _read(self, fd: int) -> int:
        """Send a piece of output; return its size."""
        try:
            data = os.read(fd, PIECE_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            del self._outputs[fd]  # the pipe is closed with the process
            return 0
        self.put(self._outputs[fd], data)
        return len(data)

    def take(self, data: bytes, *, is_last: bool) -> None:
        """Keep a piece for the command to read."""
        self._waiting += data
        self._is_complete |= is_last
        self._write()

    def _write(self) -> None:
        if self._input < 0:
            self._waiting.clear()
            return
        try:
            while self._waiting:
                del self._waiting[: os.write(self._input, self._waiting)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._waiting.clear()
            self._is_complete = True
        if self._is_complete:
            self._close_input()

    def _close_input(self) -> None:
        if self._process.stdin is not None and self._input >= 0:
            with suppress(OSError):
                self._process.stdin.close()
            self._input = -1

    def end(self) -> None:
        """Kill its session's processes, as far as they are in its group."""
        self._is_late = True
        self.deadline_s = None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _note_end(self) -> None:
        status = self._process.wait()
        for fd in tuple(self._outputs):
            # A process that it has left may fill the pipe faster than this reads it.
            left = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
            while left > 0 and (size := self._read(fd)):
                left -= size
        self._close_input()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        os.close(self._pidfd)
        status = 128 - status if status < 0 else status
        self.finish(status=status, is_late=self._is_late)


class _File(_Task):
    """A file that is read or written.

    Raises:
        OSError: it cannot be opened, or is none.
    """

    def __init__(self, request: dict[str, Any], say: Callable[..., None]) -> None:
        super().__init__(say)
        path, how = request["path"], os.O_RDONLY
        self._is_read = request["do"] == "read"
        if not self._is_read:
            how = os.O_APPEND if request.get("append") else os.O_TRUNC
            how |= os.O_WRONLY | os.O_CREAT
            if request.get("parents"):
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        # A FIFO that nobody has open would block.
        self._fd = os.open(path, how | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        mode = os.fstat(self._fd).st_mode
        if not stat.S_ISREG(mode):
            os.close(self._fd)
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(code, os.strerror(code), path)

    def go_on(self) -> None:
        """Send the next pieces of what is read."""
        while self._is_read and self.has_room and not self.is_over:
            try:
                data = os.read(self._fd, PIECE_BYTES)
            except OSError as why:
                self._close()
                self.fail(why)
                return
            if data:
                self.put("out", data)
            else:
                self.end()

    def take(self, data: bytes, *, is_last: bool) -> None:
        """Write a piece."""
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as why:
            self._close()
            self.fail(why)
            return
        if is_last:
            self.end()

    def end(self) -> None:
        """Close it."""
        if not self.is_over:
            self._close()
            self.finish(status=0)

    def _close(self) -> None:
        os.close(self._fd)


_KINDS = {"run": _Command, "read": _File, "write": _File}
CHECK = "check"
"""Name of the request that is answered at once."""


class CommandServer:
    """Requests on one descriptor, answers on another.

    Args:
        fds: the two.
        silence_s: how long nothing may be said; None for as long as its input is open.
    """

    def __init__(self, fds: tuple[int, int], silence_s: float | None) -> None:
        self._in, self._out = fds
        self._silence_s = silence_s
        self._tasks: dict[str, _Task] = {}
        self._known: set[str] = set()
        self._pending = b""
        self._heard_s = time.monotonic()

    def run(self) -> int:
        """Do requests until nobody holds this any more; return the exit status."""
        while self._step() and not self._is_deserted():
            pass
        for task in self._tasks.values():
            task.end()
        return 0

    def _step(self) -> bool:
        """Do what can be done once something is ready; return False at the input's end."""
        poll = select.poll()
        poll.register(self._in, select.POLLIN)
        owners: dict[int, _Task] = {}
        for task in self._tasks.values():
            for fd, events in task.fds():
                poll.register(fd, events)
                owners[fd] = task
        ready = [fd for fd, _ in poll.poll(self._patience_ms())]
        for fd in ready:
            if fd in owners and not owners[fd].is_over:
                owners[fd].step(fd)
        is_open = self._in not in ready or self._hear()
        now_s = time.monotonic()
        for task in self._tasks.values():
            if task.deadline_s is not None and now_s >= task.deadline_s:
                task.end()
            task.go_on()
        self._tasks = {key: one for key, one in self._tasks.items() if not one.is_over}
        return is_open

    def _is_deserted(self) -> bool:
        """Return whether nothing was said for too long."""
        silence_s = self._silence_s
        if silence_s is None or time.monotonic() - self._heard_s <= silence_s:
            return False
        text = f"sandhost serve-commands: nobody was heard for {silence_s:g} s"
        os.write(2, f"{text}\n".encode())
        return True

    def _patience_ms(self) -> float | None:
        times = [task.deadline_s for task in self._tasks.values()]
        if self._silence_s is not None:
            times.append(self._heard_s + self._silence_s + 0.1)
        known = [time_s for time_s in times if time_s is not None]
        if not known:
            return None
        return 1000 * max(0.0, min(min(known) - time.monotonic(), LONGEST_WAIT_S))

    def _hear(self) -> bool:
        """Do the requests that are there; return False at the end of the input."""
        data = os.read(self._in, 65_536)
        if not data:
            return False
        self._heard_s = time.monotonic()
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            try:
                self._do(json.loads(line))
            except MALFORMED as why:
                text = f"sandhost serve-commands: cannot read a request: {why!r}"
                os.write(2, f"{text}\n".encode())
        return True

    def _do(self, request: dict[str, Any]) -> None:
        key, do = request.get("id", ""), request["do"]
        if (do in _KINDS or do == CHECK) and key not in self._known:
            self._known.add(key)
            self._begin(key, request)
        task = self._tasks.get(key)
        if task is None or task.is_over:
            return
        if do == "input" and request["at"] == task.taken:
            data = base64.b64decode(request["data"], validate=True)
            task.taken += len(data)
            task.take(data, is_last=request["end"])
        elif do == "took":
            task.read = max(task.read, request["bytes"])
        elif do == "end":
            task.end()

    def _begin(self, key: str, request: dict[str, Any]) -> None:
        def say(**answer: object) -> None:
            self._send({"id": key, **answer})

        if request["do"] == CHECK:
            _Task(say).finish(status=0)
            return
        try:
            task = _KINDS[request["do"]](request, say)
        except OSError as why:
            _Task(say).fail(why)
        except MALFORMED as why:
            _Task(say).fail(OSError(errno.EINVAL, str(why)))
        else:
            self._tasks[key] = task

    def _send(self, answer: dict[str, object]) -> None:
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(self._out, data) :]


def main(argv: list[str]) -> int:
    """Serve commands in this child; the only argument is the longest silence."""
    prctl(PR_SET_DUMPABLE, 0)  # else commands could write answers of their own
    silence_s = float(argv[0]) if argv else None
    sys.stdout.flush()
    return CommandServer((0, 1), silence_s).run()
