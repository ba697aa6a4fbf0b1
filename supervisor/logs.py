"""Log lines: loguru's, imported when the first line is due.

A host that has nothing to say should not wait for its logger: importing it costs as
much as starting three children.  Levels are loguru's names.

Nobody is waited for either: what a pipe or a terminal does not take at once is counted, and
that is told when it takes lines again.  And what is said may be that there are no descriptors
left, or no memory: then it is said without loguru.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from vfs.filesystem import timestamp

if TYPE_CHECKING:
    from loguru import Logger, Message

LEVELS = {"TRACE": 5, "DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40}
"""Level names and their numbers."""

LINE_BYTES = select.PIPE_BUF
"""Longest line: what a pipe that is ready takes at once."""

_TEXT = "{time:HH:mm:ss.SSS} {level: <7} {message}"  # loguru ends the line itself


class Log:
    """Writes log lines to stderr.

    Args:
        level: lowest level that is written.
        as_json: one JSON object a line; else text.  None: text on a terminal only.
    """

    def __init__(self, level: str = "WARNING", *, as_json: bool | None = None) -> None:
        self._threshold = LEVELS[level]
        self._level = level
        self._as_json = as_json
        self._logger: Logger | None = None

    def writes(self, level: str) -> bool:
        """Whether lines of a level are written at all."""
        return LEVELS[level] >= self._threshold

    def write(self, level: str, message: str, **fields: object) -> None:
        """Write one line; control characters in ``message`` become ``?`` (attack 23)."""
        if LEVELS[level] < self._threshold:
            return
        line = "".join(c if c.isprintable() else "?" for c in message)
        try:
            logger = self._logger or self.start()
        except (OSError, ImportError, MemoryError):  # it cannot be read: the next may
            self._write_bare(level, line, fields)
        else:
            logger.bind(**fields).log(level, "{}", line)

    def _write_bare(self, level: str, line: str, fields: dict[str, object]) -> None:
        """Write a line as loguru would."""
        now = time.time()
        with suppress(OSError):  # there is no stderr
            if self._is_json():
                _put_json(now, level, line, fields)
            else:
                clock = time.strftime("%H:%M:%S", time.localtime(now))
                text = f"{clock}.{int(now % 1 * 1000):03} {level: <7} {line}\n"
                put_line(text.encode("utf-8", "backslashreplace"))

    def _is_json(self) -> bool:
        if self._as_json is None:
            return sys.stderr is None or not sys.stderr.isatty()
        return self._as_json

    def start(self) -> Logger:
        """Set loguru up, for modules that log through it themselves."""
        from loguru import logger  # noqa: PLC0415 - see the module's docstring

        logger.remove()
        if self._is_json():
            logger.add(_write_json, level=self._level, format="{message}", catch=True)
        elif sys.stderr is not None:
            logger.add(_write_text, level=self._level, format=_TEXT, catch=True)
        self._logger = logger
        return logger


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
    """Write one line of JSON: what happened, when, how bad, about what."""
    line = {"time": timestamp(time_s), "level": level, "message": message, **fields}
    data = msgspec.json.encode(line)
    if len(data) >= LINE_BYTES:  # as much of it as is a line of JSON still
        line = {name: line[name] for name in ("time", "level", "message")}
        line["message"] = message[: LINE_BYTES // 8]
        data = msgspec.json.encode(line)
    _stderr.write(data + b"\n")


def _write_text(message: Message) -> None:
    put_line(str(message).encode("utf-8", "backslashreplace"))


class _Stderr:
    """Descriptor 2, which is others' too: it cannot be made non-blocking for this alone.

    Attributes:
        lost: lines that it did not take since it took one.
    """

    def __init__(self) -> None:
        self.lost = 0

    def write(self, line: bytes) -> None:
        """Write a line of ``LINE_BYTES`` at most, or count it."""
        if self.lost and self._is_ready():
            os.write(
                2, b"%d lines of log are missing here: nobody read them\n" % self.lost
            )
            self.lost = 0
        if self._is_ready():
            os.write(2, line)
        else:
            self.lost += 1

    @staticmethod
    def _is_ready() -> bool:
        # Then a pipe takes PIPE_BUF bytes at least, without a wait (pipe(7)).
        return bool(select.select((), (2,), (), 0)[1])


_stderr = _Stderr()


def put_line(line: bytes) -> None:
    """Write a line to stderr, or as much of it as ``LINE_BYTES``; wait for nobody.

    Raises:
        OSError: there is no stderr.
    """
    _stderr.write(line if len(line) <= LINE_BYTES else line[: LINE_BYTES - 1] + b"\n")
