"""Asking a host: one question over its control socket, one answer.

The client's side: blocking and without Trio, for commands such as ``ps``. The wire has
one JSON object a line each way:

    {"v":1,"do":"ps"}  ->  {"v":1,"ok":true,"result":[...]}  or  {"v":1,"ok":false,"error":"..."}

A refusal has ``"unavailable":true`` where the same may be asked again. An order has
arguments: ``{"v":1,"do":"kill","args":{"name":"web"}}``. A stream is answered by
``{"v":1,"item":...}`` lines and ``{"v":1,"end":true}``. A host that is silent for a
while sends a space: JSON's white space before the next line.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
import time
from typing import TYPE_CHECKING, Any

from hostlib.messages import CommandError, ReaderGone
from hostlib.paths import CONTROL_VARIABLE, usual_control_paths
from hostlib.unix_names import is_deaf, short_name
from supervisor.control.lines import LineReader, LineTooLongError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

VERSION = 1
"""Version of the questions; a host refuses any other."""

LASTING = frozenset(
    {
        *("spawn", "kill", "stop-child", "input"),
        *("reload", "replace", "workspace", "network"),
        *("fleet-leave", "held", "on", "top", "wait"),  # at a fleet's door
    }
)
"""Requests that may take longer than a question."""

TIMEOUT_S = 10.0
"""Bounds a whole question, as on the host's side; for an order or a stream, the wait
for the first byte and for each next one."""

NO_LOG = "no log of"
"""Begins the refusal of a log that is not there, as of a child that said nothing."""

_RECEIVE_BYTES = 65_536
_INSTANT_S = 0.001  # 0 is another mode of a socket


class ControlError(CommandError):
    """No answer, or a refusal; the text is one line with the reason and the remedy."""


class RefusedError(ControlError):
    """A host that answers, and refuses."""


class UnavailableError(ControlError):
    """A host that answers, and cannot do it now; the same may be asked again."""


class SilentError(ControlError):
    """A host that does not answer in time."""


def control_path(given: str | None) -> str | None:
    """Return the socket of the option, of ``$SANDHOST_CONTROL``, or a usual one.

    Args:
        given: the option ``--control``; None where it was not given.

    Returns:
        None if none is named and no usual path has a socket.
    """
    named = given or os.environ.get(CONTROL_VARIABLE)
    if named:
        return named
    found = [path for path in usual_control_paths() if not _reason_against(path)]
    listening = (path for path in found if not is_deaf(path))
    return next(listening, found[0]) if len(found) > 1 else next(iter(found), None)


def find_control(given: str | None) -> str:
    """Return the socket to ask; see ``control_path``.

    Raises:
        ControlError: there is none; the text names each path that was tried.
    """
    path = control_path(given)
    if path is None:
        tried = ", ".join(
            f"{path!r} {_reason_against(path) or 'has just come'}"
            for path in usual_control_paths()
        )
        raise ControlError(
            f"cannot find a host: {tried}; start sandhost serve, or name a socket by"
            f" --control or ${CONTROL_VARIABLE}"
        )
    return path


def _reason_against(path: str) -> str:
    """Return the reason why a usual path has no usable socket; "" if it has one."""
    try:
        os.lstat(path)
        owner = os.stat(path.rpartition("/")[0]).st_uid  # noqa: PTH116 - as below
    except (FileNotFoundError, NotADirectoryError):
        return "is not there"
    except OSError as why:
        return f"cannot be used ({why.strerror})"
    # Another user may make a directory of this name beneath /tmp first.
    is_foreign = owner not in {os.geteuid(), 0} and path.startswith("/tmp/")  # noqa: S108
    return "is another user's" if is_foreign else ""


def call(
    path: str,
    do: str,
    args: dict[str, Any] | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Ask one question, or give one order, and return the answer.

    Args:
        path: the host's control socket.
        do: the name of the question or order.
        args: of an order.
        timeout_s: seconds for a question; of an order, until the next sign of life.

    Returns:
        The host's answer: rows of a table, or an object; plain JSON values.

    Raises:
        ControlError: the host is silent or refuses.
    """
    with contextlib.closing(Exchange(path, do, args, timeout_s)) as exchange:
        while not exchange.take():
            pass
        return exchange.result()


class Exchange:
    """One question under way, for callers that also wait for other things.

    Args:
        path: the host's control socket.
        do: as for ``call``.
        args: as above.
        timeout_s: as above.
        connect_s: seconds for the connection; None for as many.

    Attributes:
        until_s: when the host has been silent for too long (``time.monotonic``).

    Raises:
        ControlError: the socket has no listener.
    """

    def __init__(
        self,
        path: str,
        do: str,
        args: dict[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
        connect_s: float | None = None,
    ) -> None:
        self._path = path
        self._may_last = do in LASTING
        self._timeout_s = timeout_s
        self._reader = LineReader()
        self._reply = b""
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _connect(self._line, path, timeout_s if connect_s is None else connect_s)
            # A busy host sends this and closes before it reads the question.
            with contextlib.suppress(BrokenPipeError):
                self._line.sendall(_request(do, args), socket.MSG_NOSIGNAL)
        except TimeoutError:
            self._line.close()
            raise _silence(path, timeout_s) from None
        except BaseException:
            self._line.close()
            raise
        self.until_s = time.monotonic() + timeout_s

    def fileno(self) -> int:
        """Return the descriptor that becomes readable with the next part of the reply."""
        return self._line.fileno()

    def take(self) -> bool:
        """Wait for the next part of the reply; return whether it was the last.

        Raises:
            ControlError: no part has come in time.
        """
        try:
            self._line.settimeout(max(_INSTANT_S, self.until_s - time.monotonic()))
            part = self._line.recv(_RECEIVE_BYTES)
        except TimeoutError:
            raise _silence(self._path, self._timeout_s) from None
        except OSError as why:
            text = f"no answer at {self._path!r}: {why.strerror}"
            raise ControlError(text) from None
        if self._may_last:
            self.until_s = time.monotonic() + self._timeout_s
        try:
            lines = self._reader.feed(part)
        except LineTooLongError:
            return True
        if lines:
            self._reply = lines[0]
        return not part or bool(lines)

    def result(self) -> Any:
        """Return the answer, once the last part is there.

        Raises:
            ControlError: the host refuses, or the reply is no answer.
        """
        return _result(self._path, self._reply)

    def close(self) -> None:
        """Close the connection; the host skips an order that it has not begun."""
        self._line.close()


def stream(
    path: str,
    do: str,
    args: dict[str, Any] | None = None,
    reader: int | None = None,
    beside: Callable[[], tuple[int, float]] = lambda: (-1, TIMEOUT_S),
) -> Generator[Any, None, bool]:
    """Yield the items of a stream until it ends, or the host does.

    Args:
        path: the host's control socket.
        do: its name.
        args: its arguments.
        reader: the descriptor to which the caller writes the items; None for none.
        beside: called before each wait: does other work, and returns the descriptor to
            wait for, too, or -1, and the longest wait in seconds.

    Returns:
        False if the host has ended, and with it the stream.

    Raises:
        ControlError: the host is silent or refuses.
        ReaderGone: the reader is gone.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        _connect(line, path, TIMEOUT_S)
        try:
            with contextlib.suppress(BrokenPipeError):
                line.sendall(_request(do, args), socket.MSG_NOSIGNAL)
            for reply in _lines(line, reader, beside):
                answer = json.loads(reply)
                if answer.get("ok") is False:
                    raise _refusal(path, answer)
                if answer.get("end"):
                    break
                yield answer["item"]
        except TimeoutError:
            raise _silence(path, TIMEOUT_S) from None
        except ConnectionError:
            return False
        except (ValueError, KeyError, AttributeError):
            raise ControlError(
                f"cannot ask {path!r}: no sandhost of this version answers; name its"
                " control socket"
            ) from None
    return True


def _lines(
    line: socket.socket, reader: int | None, beside: Callable[[], tuple[int, float]]
) -> Iterator[bytes]:
    """Yield the received lines.

    Raises:
        ReaderGone: the reader is gone.
        TimeoutError: not even a heart-beat was received.
        ConnectionError: the host has ended.
    """
    lines = LineReader()
    until_s = time.monotonic() + TIMEOUT_S
    while True:
        found = _wait(line, reader, beside(), until_s)
        if line.fileno() in found:
            data = line.recv(_RECEIVE_BYTES)
            yield from lines.feed(data)
            if not data:
                if rest := lines.rest():
                    yield rest
                raise ConnectionResetError
            until_s = time.monotonic() + TIMEOUT_S
        elif reader in found:
            raise ReaderGone
        elif time.monotonic() >= until_s:
            raise TimeoutError


def _wait(
    line: socket.socket, reader: int | None, beside: tuple[int, float], until_s: float
) -> set[int | None]:
    """Return the descriptors that are ready, or none when it is time for other work."""
    other, patience_s = beside
    poll = select.poll()
    poll.register(line, select.POLLIN)
    if reader is not None:
        poll.register(reader, 0)  # POLLERR: the other end of a pipe is closed, poll(2)
    if other >= 0:
        poll.register(other, select.POLLIN)
    left_s = min(patience_s, until_s - time.monotonic())
    return {fd for fd, _ in poll.poll(max(0.0, left_s) * 1000)}


def _silence(path: str, timeout_s: float) -> SilentError:
    return SilentError(
        f"no answer at {path!r} within {timeout_s:g} s: the host is stopped or very"
        " busy; try again"
    )


def _request(do: str, args: dict[str, Any] | None) -> bytes:
    question: dict[str, Any] = {"v": VERSION, "do": do}
    if args:
        question["args"] = args
    return json.dumps(question).encode() + b"\n"


def _connect(line: socket.socket, path: str, timeout_s: float) -> None:
    line.settimeout(timeout_s)
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - one call, no import
        if not stat.S_ISSOCK(mode):
            raise ControlError(f"cannot ask {path!r}: it is not a socket")
        with short_name(path) as name:
            line.connect(name)
    except FileNotFoundError:
        raise ControlError(
            f"cannot ask {path!r}: there is no such socket; name the socket of a host"
            " (--control)"
        ) from None
    except ConnectionRefusedError:
        raise ControlError(
            f"cannot ask {path!r}: its host has ended; start one at this path, or name"
            " another socket (--control)"
        ) from None
    except PermissionError:
        raise ControlError(
            f"cannot ask {path!r}: permission denied; a host answers its own user and"
            " root"
        ) from None
    except TimeoutError:  # the listener's queue is full
        raise _silence(path, timeout_s) from None
    except OSError as why:
        raise ControlError(f"cannot ask {path!r}: {why.strerror or why}") from None


def _result(path: str, line: bytes) -> Any:
    try:
        answer = json.loads(line)
    except ValueError:  # neither JSON nor UTF-8
        answer = None
    if not isinstance(answer, dict) or answer.get("v") != VERSION:
        raise ControlError(
            f"cannot ask {path!r}: no sandhost of this version answers; name its"
            " control socket"
        )
    if answer.get("ok") is not True:
        raise _refusal(path, answer)
    return answer.get("result")


def _refusal(path: str, answer: dict[str, Any]) -> ControlError:
    kind = UnavailableError if answer.get("unavailable") is True else RefusedError
    return kind(f"the host at {path!r} refused: {answer.get('error')}")
