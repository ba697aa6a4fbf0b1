"""Tools of every part of a hand-over: its error, its plain values, its gate."""

from __future__ import annotations

import os
from typing import TypeVar

import msgspec
import trio

T = TypeVar("T")


class HandoverError(Exception):
    """An object cannot be handed over, so the host stays with its program."""


def state_from(left: object, form: type[T], what: str) -> T:
    """Return a struct from the plain values of a hand-over.

    Args:
        left: the values.
        form: the struct.
        what: the name of the part, for the error.

    Raises:
        HandoverError: the values come from another version of the program.
    """
    try:
        return msgspec.convert(left, form)
    except msgspec.ValidationError as why:
        raise HandoverError(f"cannot restore {what}: {why}") from None


def text_as_bytes(value: object) -> object:
    """Return a plain structure with bytes for text, so that it may be not UTF-8."""
    match value:
        case str():
            return os.fsencode(value)
        case dict():
            return {text_as_bytes(k): text_as_bytes(v) for k, v in value.items()}
        case list() | tuple():
            return [text_as_bytes(item) for item in value]
        case _:
            return value


def bytes_as_text(value: object) -> object:
    """Return the inverse of ``text_as_bytes``, with lists for tuples."""
    match value:
        case bytes():
            return os.fsdecode(value)
        case dict():
            return {bytes_as_text(k): bytes_as_text(v) for k, v in value.items()}
        case list():
            return [bytes_as_text(item) for item in value]
        case _:
            return value


class Gate:
    """A gate for tasks, shut while the host is being replaced; open at first."""

    def __init__(self) -> None:
        self._opened: trio.Event | None = None

    def shut(self) -> None:
        """Make tasks wait until ``open``."""
        self._opened = trio.Event()

    def open(self) -> None:
        """Let waiting tasks and all later ones pass."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.set()

    async def wait_open(self) -> None:
        """Wait while the gate is shut.

        Not a checkpoint while it is open.
        """
        while self._opened is not None:
            await self._opened.wait()
