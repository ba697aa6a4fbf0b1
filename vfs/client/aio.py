"""A child's side of FD 3 for Trio: the methods of ``vfs.client.Client``, awaited.

A request that is cancelled after it has begun gets a quarter of a second to end.  If it
does not, the connection cannot be used any more, and every later call raises
``ConnectionLostError``.  So a long request that may be cancelled (LLM_CHAT) belongs on a
connection of its own: ``attach``.  ``vfs.client.aio_connection`` does the I/O.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Self

from protocol import limits
from protocol import messages as m
from vfs.client.aio_connection import AsyncEndpoint
from vfs.client.decode import (
    Status,
    chat_parts,
    commands_of,
    encode_call,
    encode_rights,
    entries,
    mapping,
    quota_of,
    status,
)
from vfs.client.errors import UnknownCommandError, no_way_to_attach, unknown_command
from vfs.client.waiting import check_passed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from _typeshed import ReadableBuffer

    from vfs.client.completion import ChatCompletion
    from vfs.client.errors import Name


class AsyncClient(AsyncEndpoint):
    """A child's connection to its host; see ``vfs.client.Client``.

    Several tasks may use it; they are served in order.  There is no ``open_file``: file
    objects of the standard library do not await.

    Args: as of ``vfs.client.connection.Endpoint``; a child passes none.

    Cancellation: see the top of this file.
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.disconnect()

    # Open files

    async def open(
        self, name: Name, mode: str = "r", top_level: bool | None = None
    ) -> int:
        """Open a file and return its fileno."""
        request = m.Open(os.fsencode(name), mode.encode(), self._claim(top_level))
        return (await self._ask(request, names=(name,)))[0].number

    async def read(self, fileno: int, size: int) -> bytes:
        """Read with one READ: at most 16 MiB, empty at the end of the file."""
        return (await self._ask(m.Read(b"%d" % fileno, size), most=size))[1]

    async def read_all(self, fileno: int) -> bytes:
        """Read to the end of the file."""
        pieces = []
        while piece := await self.read(fileno, limits.MAX_READ_BYTES):
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def write(self, fileno: int, data: ReadableBuffer) -> int:
        """Write everything, above the host's cap in pieces, and return its size."""
        view = memoryview(data).cast("B")
        token = b"%d" % fileno
        written = 0
        while True:
            piece = view[written : written + self._write_limit]
            try:
                await self._ask(m.Write(token, len(piece)), piece)
            except OSError as why:
                if not self._learn_write_limit(why, len(piece)):
                    raise
                continue
            written += len(piece)
            if written >= len(view):
                return written

    async def close(self, fileno: int) -> None:
        """Close a file; its number is gone even after an error."""
        await self._ask(m.Close(b"%d" % fileno))

    async def seek(self, fileno: int, offset: int) -> int:
        """Set the offset, in bytes from the start of the file, and return it."""
        return (await self._ask(m.Seek(b"%d" % fileno, offset)))[0].number

    async def sync(self, fileno: int) -> None:
        """Wait until the file's data is on the disk."""
        await self._ask(m.Sync(b"%d" % fileno))

    async def truncate(self, fileno: int, size: int) -> None:
        """Set the file's size in bytes; the offset stays."""
        await self._ask(m.Truncate(b"%d" % fileno, size))

    # Names

    async def stat(self, name: Name, top_level: bool | None = None) -> Status:
        """Return size, time and kind of a name."""
        request = m.Stat(self._claim(top_level), os.fsencode(name))
        return status((await self._ask(request, names=(name,)))[1])

    async def listdir(
        self, name: Name = ".", top_level: bool | None = None
    ) -> list[tuple[str, str]]:
        """List a directory as (name, kind) pairs, in the host's order."""
        request = m.ListDir(self._claim(top_level), os.fsencode(name))
        return entries((await self._ask(request, names=(name,)))[1])

    async def mkdir(self, name: Name, top_level: bool | None = None) -> None:
        """Make a directory."""
        request = m.MakeDir(self._claim(top_level), os.fsencode(name))
        await self._ask(request, names=(name,))

    async def remove(self, name: Name, top_level: bool | None = None) -> None:
        """Remove a file or an empty directory."""
        request = m.Remove(self._claim(top_level), os.fsencode(name))
        await self._ask(request, names=(name,))

    async def rename(self, old: Name, new: Name, top_level: bool | None = None) -> None:
        """Rename a file or directory."""
        await self._check_known("RENAME")
        first, last = os.fsencode(old), os.fsencode(new)
        request = m.Rename(self._claim(top_level), len(first), len(last))
        await self._ask(request, first + last, names=(old, new))

    # The connection

    async def ping(self) -> None:
        """Wait until the host has answered."""
        await self._ask(m.Ping())

    async def caps(self) -> dict[str, object]:
        """Return the host's version, commands, limits and rights, as it sends them."""
        return mapping((await self._ask(m.Caps()))[1])

    async def commands(self) -> frozenset[str]:
        """Return the commands that the host knows; empty if it has no CAPS."""
        if self._commands is None:
            try:
                self._commands = commands_of(await self.caps())
            except UnknownCommandError:
                self._commands = frozenset()
        return self._commands

    async def narrow(self, rights: Mapping[str, object]) -> None:
        """Give up rights of this connection for good."""
        await self._check_known("NARROW")
        payload = encode_rights(rights)
        await self._ask(m.Narrow(len(payload)), payload)

    async def attach(self) -> AsyncClient:
        """Return a client on one more connection, with at most these rights."""
        if self._attach_fd < 0:
            raise no_way_to_attach()
        passed: list[int] = []
        try:
            await self._ask(m.Attach(), passed=passed)
            client = AsyncClient(
                check_passed(passed), shared=False, dialect=self.dialect
            )
        except BaseException:
            for fd in passed:
                if fd >= 0:
                    os.close(fd)
            raise
        client.top_level = self.top_level
        client._commands = self._commands
        return client

    async def _check_known(self, word: str) -> None:
        """Raise unless the host knows a command that has a payload (spec X1)."""
        if word not in await self.commands():
            raise unknown_command(word)

    # LLM fds

    async def fd_call(self, name: str, /, **arguments: object) -> str:
        """Call an LLM fd tool and return its answer: XML, its errors too."""
        await self._check_known("FD_CALL")
        document = encode_call(name, arguments)
        return (await self._ask(m.FdCall(len(document)), document))[1].decode()

    async def fd_put(self, data: ReadableBuffer, token: str | None = None) -> str:
        """Send content of any size; return the token that names it in a call."""
        await self._check_known("FD_PUT")
        view = memoryview(data).cast("B")
        known = None if token is None else token.encode()
        done = 0
        while True:
            piece = view[done : done + self._write_limit]
            try:
                reply = (await self._ask(m.FdPut(len(piece), known), piece))[0]
            except OSError as why:
                if not self._learn_write_limit(why, len(piece)):
                    raise
                continue
            known = reply.text
            done += len(piece)
            if done >= len(view):
                return known.decode()

    # The model

    async def llm_chat(
        self,
        prompt: str = "",
        *,
        preset: str = "",
        input_files: Iterable[Name] = (),
        output_files: Iterable[Name] = (),
        top_level: bool | None = None,
    ) -> ChatCompletion:
        """Ask the model and return its completion."""
        from vfs.client.completion import completion  # noqa: PLC0415 - for those who ask

        parts = chat_parts(input_files, output_files, prompt, preset)
        request = m.Chat(self._claim(top_level), *map(len, parts))
        reply, body = await self._ask(request, b"".join(parts))
        return completion(body, quota_of(reply.text))

    async def llm_quota(self) -> str:
        """Return the host's text about the quota."""
        return (await self._ask(m.Quota()))[0].text.decode("utf-8", "replace")

    async def llm_config(self) -> dict[str, object]:
        """Return the model's configuration."""
        return mapping((await self._ask(m.Config()))[1])
