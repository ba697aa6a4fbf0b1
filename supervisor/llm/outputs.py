"""Output files of an LLM_CHAT: opened before the call, written after it (spec L4).

Rules of this file.

1. Each file is opened before the call, unchanged, so that one that cannot be written costs
   no call.
2. A file that is published on close is opened again, staged, for writing: a reader sees the
   old content or the complete new one (spec A3b).
3. If nothing is written, a file that was made by the first open is removed.
4. Files are closed in worker threads: a distant one may take long.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Self

import trio

from protocol import echo, error
from supervisor.fsproxy.replies import UNAVAILABLE, denied, reason
from vfs import names
from vfs.errors import AccessDeniedError, UnavailableError
from vfs.filesystem import KEPT_WORD
from vfs.policy import PUBLISH_ON_CLOSE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from supervisor.fsproxy.ports import Caller
    from vfs.filesystem import OpenFile


class RefusedError(Exception):
    """An LLM_CHAT is refused; ``reply`` is the reply line."""

    def __init__(self, reply: bytes) -> None:
        super().__init__(reply)
        self.reply = reply


class Outputs:
    """The output files of one call.

    Args:
        caller: the client and its session.
        claim: the effective view.
    """

    def __init__(self, caller: Caller, *, claim: bool) -> None:
        self._caller = caller
        self._claim = claim
        self._files: list[OpenFile] = []
        self._made: list[tuple[bytes, tuple[int, int]]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with trio.CancelScope(shield=True):  # bounded: a few removals
            for file in self._files:
                if file.fileno in self._caller.client.files:
                    with suppress(OSError):  # the file is closed in any case
                        await self._caller.fs.abandon_waiting(file)
            for name, identity in self._made:
                await self._remove(name, identity)

    async def open(self, names: Iterable[bytes]) -> None:
        """Open every file without changing it.

        Raises:
            RefusedError: a file cannot be opened.
        """
        for name in names:
            self._files.append(await self._open(name))
            await trio.lowlevel.checkpoint()

    async def _open(self, name: bytes) -> OpenFile:
        caller = self._caller
        fs, client = caller.fs, caller.client
        try:
            if client.policy.is_distant and not self._claim:
                await names.wait_reachable(client, name)
            try:
                return fs.open(client, name, KEPT_WORD, self._claim)
            except FileNotFoundError:
                file = await fs.open_waiting(client, name, b"a", self._claim)
                if not file.handle.size():
                    self._made.append((name, file.handle.identity()))
                return file
        except AccessDeniedError:
            raise RefusedError(denied(caller, "LLM_CHAT", name)) from None
        except UnavailableError:
            raise RefusedError(UNAVAILABLE) from None
        except OSError as why:
            text = b"failed to open file '" + echo(name) + b"': " + reason(why)
            raise RefusedError(error(text)) from None

    async def write(self, data: bytes) -> None:
        """Write the answer into every file, and close it.

        Raises:
            RefusedError: a file could not be written; earlier ones are written.
        """
        self._made.clear()  # from here on new files stay
        try:
            for file in tuple(self._files):
                await self._write(file, data)
        except OSError as why:
            raise RefusedError(error(b"failed to write: " + reason(why))) from None
        except (AccessDeniedError, UnavailableError):
            raise RefusedError(UNAVAILABLE) from None

    async def _write(self, file: OpenFile, data: bytes) -> None:
        fs = self._caller.fs
        place = file.place
        if place is not None and place.publish == PUBLISH_ON_CLOSE:
            await fs.abandon_waiting(file)
            client = self._caller.client
            file = await fs.open_waiting(client, file.name, b"w", self._claim)
            self._files.append(file)
        else:
            await fs.truncate_waiting(file, 0)
        await fs.write_waiting(file, data)
        await fs.close_waiting(file)

    async def _remove(self, name: bytes, identity: tuple[int, int]) -> None:
        fs, client = self._caller.fs, self._caller.client
        try:
            file = fs.open(client, name, KEPT_WORD, self._claim)
            mine = file.handle.identity() == identity and not file.handle.size()
            await fs.close_waiting(file)
            if mine:
                await names.remove_waiting(client, name, claim=self._claim)
        except (OSError, AccessDeniedError, UnavailableError):
            return  # it was removed, or cannot be reached any more
