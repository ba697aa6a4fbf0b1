"""Log lines: loguru's, imported when the first line is due.

A host that has nothing to say should not wait for its logger: importing it costs as
much as starting three children.  Levels are loguru's names.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import msgspec

from vfs.filesystem import timestamp

if TYPE_CHECKING:
    from loguru import Logger, Message

LEVELS = {"TRACE": 5, "DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40}
"""Level names and their numbers."""

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
        logger = self._logger or self.start()
        line = "".join(c if c.isprintable() else "?" for c in message)
        logger.bind(**fields).log(level, "{}", line)

    def start(self) -> Logger:
        """Set loguru up, for modules that log through it themselves."""
        from loguru import logger  # noqa: PLC0415 - see the module's docstring

        as_json = self._as_json
        if as_json is None:
            as_json = sys.stderr is None or not sys.stderr.isatty()
        logger.remove()
        if as_json:
            logger.add(_write_json, level=self._level, format="{message}", catch=True)
        elif sys.stderr is not None:
            logger.add(sys.stderr, level=self._level, format=_TEXT, catch=True)
        self._logger = logger
        return logger


def _write_json(message: Message) -> None:
    """Write one line of JSON: what happened, when, how bad, about what."""
    record = message.record
    line = {
        "time": timestamp(record["time"].timestamp()),
        "level": record["level"].name,
        "message": record["message"],
        **record["extra"],
    }
    os.write(2, msgspec.json.encode(line) + b"\n")
