"""Log lines on stderr: loguru's in a daemon, the same without loguru in ``run``.

Importing loguru takes as long as starting three children, and opens files: a daemon
imports it before it has children, ``run`` never.  Writing a line imports nothing, since a
process can block the opening of a file, and so the host.  Levels are loguru's names.

Writing never waits: lines that a pipe or terminal does not take at once are counted, and
the count is written when it takes lines again.  For that the first log opens the pipe or
terminal anew, non-blocking.  If this user may not open it (a terminal of another user), a
line may wait for a terminal that has room for a part of it.
"""

from __future__ import annotations

import os
import select
import stat
import sys
import time
import warnings
from contextlib import suppress
from io import TextIOBase
from typing import TYPE_CHECKING

import msgspec

from hostlib.clock import timestamp
from hostlib.messages import json_line, printable, priority_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from loguru import Logger, Message

LEVELS = {"TRACE": 5, "DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40}
"""Level names and their numbers."""

LINE_BYTES = select.PIPE_BUF
"""Longest line: a pipe that is ready takes so much at once."""

_ROOM_BYTES = LINE_BYTES - len(b"<4>\n")
_FIELD_CHARS = 64  # of each field of a line that is too long

_TEXT = "{time:HH:mm:ss.SSS} {level: <7} {message}"  # loguru ends the line itself


class Log:
    """Writes log lines to stderr.

    Args:
        level: lowest level that is written.
        as_json: one JSON object a line; else text.  None: text on a terminal only.

    Attributes:
        is_json: one JSON object a line.
    """

    def __init__(self, level: str = "WARNING", *, as_json: bool | None = None) -> None:
        self._threshold = LEVELS[level]
        self._level = level
        if as_json is None:
            as_json = sys.stderr is None or not sys.stderr.isatty()
        self.is_json = as_json
        self._logger: Logger | None = None
        _stderr.reopen()

    def writes(self, level: str) -> bool:
        """Return whether lines of a level are written."""
        return LEVELS[level] >= self._threshold

    def write(self, level: str, message: str, **fields: object) -> None:
        """Write one line; control characters in ``message`` become ``?`` (attack 23)."""
        if LEVELS[level] < self._threshold:
            return
        line = printable(message)
        if self._logger is None:
            self._write_bare(level, line, fields)
        else:
            self._logger.bind(**fields).log(level, "{}", line)

    def _write_bare(self, level: str, line: str, fields: dict[str, object]) -> None:
        """Write a line in the form of loguru."""
        now = time.time()
        with suppress(OSError):  # there is no stderr
            if self.is_json:
                _put_json(now, level, line, fields)
            else:
                clock = time.strftime("%H:%M:%S", time.localtime(now))
                text = f"{clock}.{int(now % 1 * 1000):03} {level: <7} {line}\n"
                _put_text(level, text)

    def start(self) -> Logger:
        """Set up loguru, before there are children.

        Raises:
            ImportError, MemoryError, OSError: loguru cannot be loaded; lines are written
                without it.
        """
        from loguru import logger  # noqa: PLC0415 - see the module's docstring

        logger.remove()
        if self.is_json:
            logger.add(_write_json, level=self._level, format="{message}", catch=True)
        elif sys.stderr is not None:
            logger.add(_write_text, level=self._level, format=_TEXT, catch=True)
        self._logger = logger
        return logger

    def take_stderr(self) -> None:
        """Make lines of this log of all text that this process writes to stderr.

        Libraries and the interpreter write warnings, tracebacks and exceptions in
        ``__del__`` there.  Of an exception only the kind and place are logged: its text
        may hold a peer's data.
        """
        sys.stderr = _Lines(self)
        warnings.showwarning = self._show_warning
        sys.unraisablehook = self._show_unraisable
        from hostlib.threads import show_faults  # noqa: PLC0415 - Trio comes with it

        show_faults(self._show_fault)

    def write_stray(self, line: str) -> None:
        """Write a line of stderr; not by loguru, which reports its own faults there."""
        if self.writes("WARNING"):
            text = printable(line)
            self._write_bare("WARNING", text, {})

    def _show_warning(
        self, message: Warning | str, category: type[Warning], *_: object, **__: object
    ) -> None:
        self.write_stray(f"{category.__name__}: {message}")

    def _show_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        self._show_fault(unraisable.exc_value)

    def _show_fault(self, why: BaseException | None) -> None:
        if why is not None:
            self.write_stray(f"Fault that nothing waits for: {place_of(why)}")


def place_of(why: BaseException) -> str:
    """Return the kind and place of an exception."""
    while isinstance(why, BaseExceptionGroup):
        why = why.exceptions[0]
    place = why.__traceback__
    if place is None:
        return type(why).__name__
    while place.tb_next is not None:
        place = place.tb_next
    # Not with ``traceback``, which opens the source file.
    code = place.tb_frame.f_code
    where = f"{code.co_filename}:{place.tb_lineno}"
    return f"{type(why).__name__} in {code.co_name}, {where}"


class _Lines(TextIOBase):
    """A replacement of ``sys.stderr``: each line is a line of the log."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log
        self._begun = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        if len(self._begun) >= LINE_BYTES:  # without an end it would grow for ever
            lines.append(self._begun)
            self._begun = ""
        for line in lines:
            if line.strip():
                self._log.write_stray(line)
        return len(text)


def _write_json(message: Message) -> None:
    record = message.record
    _put_json(
        record["time"].timestamp(),
        record["level"].name,
        record["message"],
        record["extra"],
    )


def _put_json(
    time_s: float, level: str, message: str, fields: dict[str, object]
) -> None:
    """Write one line of JSON: time, level, message and fields."""
    line: dict[str, object] = {
        "time": timestamp(time_s),
        "level": level,
        "message": message,
    }
    data = _encode(line | fields)
    if len(data) > _ROOM_BYTES:  # shorten it, so that it stays a line of JSON
        line["message"] = message[: LINE_BYTES // 8]
        data = _encode(line | dict(_short_fields(fields)))
    if len(data) > _ROOM_BYTES:
        data = _encode(line)
    _stderr.write(priority_of(level) + data + b"\n", as_json=True)


def _encode(line: dict[str, object]) -> bytes:
    """Return JSON without characters that a terminal obeys (attack 23)."""
    data = msgspec.json.encode(line)
    if data.isascii() and b"\x7f" not in data:
        return data
    return "".join(map(_escape, data.decode())).encode()


def _escape(char: str) -> str:
    """Return a character for JSON; an unprintable one as escapes of its UTF-16."""
    if char.isprintable():
        return char
    units = char.encode("utf-16-be").hex()
    return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))


def _short_fields(fields: dict[str, object]) -> Iterable[tuple[str, object]]:
    """Yield short fields, and the beginnings of those that are text."""
    for name, value in fields.items():
        if isinstance(value, str):
            yield name, value[:_FIELD_CHARS]
        elif value is None or isinstance(value, int | float):
            yield name, value


def _write_text(message: Message) -> None:
    _put_text(message.record["level"].name, str(message))


def _put_text(level: str, text: str) -> None:
    put_line(priority_of(level) + text.encode("utf-8", "backslashreplace"))


class _Stderr:
    """Descriptor 2, and a description of its own of the pipe or terminal behind it.

    The description of descriptor 2 is shared with other processes, so it is not made
    non-blocking.

    Attributes:
        lost: number of lines that were dropped since the last written one.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._fd = -1  # non-blocking; -1: only descriptor 2
        self._is_cut = False  # the terminal took only a part of the last line

    def reopen(self) -> None:
        """Open the pipe or terminal behind descriptor 2, once."""
        if self._fd >= 0:
            return
        with suppress(OSError):  # not permitted, no stderr or no /proc
            if stat.S_ISFIFO(os.fstat(2).st_mode) or os.isatty(2):
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                self._fd = os.open("/proc/self/fd/2", flags)

    def write(self, line: bytes, *, as_json: bool = False) -> None:
        """Write a line of at most ``LINE_BYTES``, or count it as lost."""
        if self.lost:
            text = f"{self.lost} lines of log are missing here: stderr was full"
            note = json_line("WARNING", text) if as_json else f"{text}\n".encode()
            if self._is_taken(note):
                self.lost = 0
        if self.lost or not self._is_taken(line):
            self.lost += 1

    def _is_taken(self, line: bytes) -> bool:
        """Write a line without waiting; return whether all of it was taken."""
        if self._fd < 0:
            # A ready pipe takes PIPE_BUF bytes at least (pipe(7)).
            if not select.select((), (2,), (), 0)[1]:
                return False
            os.write(2, line)
            return True
        if self._is_cut:
            line = b"\n" + line
        try:
            taken = os.write(self._fd, line)
        except BlockingIOError:
            return False
        self._is_cut = taken < len(line)
        return not self._is_cut


_stderr = _Stderr()


def put_line(line: bytes) -> None:
    """Write a line to stderr, cut at ``LINE_BYTES``, without waiting.

    Raises:
        OSError: there is no stderr.
    """
    _stderr.write(line if len(line) <= LINE_BYTES else line[: LINE_BYTES - 1] + b"\n")
