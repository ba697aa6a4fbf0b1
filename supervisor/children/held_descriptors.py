"""Descriptors that a child holds for its start and its end, with a word for each."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping
    from contextlib import AsyncExitStack

ATTACHING = "attaching"
"""The word for a descriptor that is sent to a client."""


class HeldDescriptors:
    """The descriptors of one child that no part of it owns."""

    def __init__(self) -> None:
        self._words: dict[int, str] = {}

    @property
    def words(self) -> Mapping[int, str]:
        """Each descriptor with its word."""
        return self._words

    def find_by_word(self, word: str) -> tuple[int, ...]:
        """Return the descriptors that have a word."""
        return tuple(fd for fd, name in self._words.items() if name == word)

    def add(self, fd: int, word: str) -> None:
        """Hold a descriptor until `close`."""
        self._words[fd] = word

    def keep(self, stack: AsyncExitStack, fd: int, word: str) -> None:
        """Hold a descriptor until a stack is unwound; -1 is none."""
        if fd >= 0:
            self.add(fd, word)
            stack.callback(self.close, fd)

    def close(self, fd: int) -> None:
        """Close one of them."""
        del self._words[fd]
        os.close(fd)

    @contextlib.contextmanager
    def carrying(self, carried: socket.socket) -> Iterator[None]:
        """Hold a socket while it or its copy is sent to a client; close it afterwards."""
        fd = carried.fileno()
        self._words[fd] = ATTACHING
        try:
            yield
        finally:
            del self._words[fd]
            carried.close()
