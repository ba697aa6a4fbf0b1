"""A child's side of FD 3, blocking: files, directories and the model.

    client = Client()
    with io.TextIOWrapper(client.open_file("data.csv")) as text:
        rows = list(csv.reader(text))

Every method is one request and its reply.  Errors are subclasses of ``OSError``, from
``vfs.client.errors``.  They, file objects and JSON are loaded by the first call that needs
them.  ``vfs.client.connection`` does the I/O; the Trio twin is ``vfs.client.aio``, and
``vfs.client.shell`` is for scripts.
"""

from __future__ import annotations

import os

from protocol import limits
from protocol import messages as m
from vfs.client.connection import BlockingEndpoint
from vfs.client.turn import client_errors

__all__ = [
    "AccessDeniedError",
    "Client",
    "ConnectionLostError",
    "ExistsError",
    "FsProxyError",
    "IsDirectoryError",
    "ModelCallError",
    "NoModelError",
    "NotAChildError",
    "NotDirectoryError",
    "NotFoundError",
    "QuotaExceededError",
    "TooLargeError",
    "UnknownCommandError",
    "UnsendableError",
]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Self

    from _typeshed import ReadableBuffer, WriteableBuffer

    from vfs.client.completion import ChatCompletion
    from vfs.client.decode import Status
    from vfs.client.errors import (
        AccessDeniedError,
        ConnectionLostError,
        ExistsError,
        FsProxyError,
        IsDirectoryError,
        ModelCallError,
        Name,
        NoModelError,
        NotAChildError,
        NotDirectoryError,
        NotFoundError,
        QuotaExceededError,
        TooLargeError,
        UnknownCommandError,
        UnsendableError,
    )
    from vfs.client.file import ProxyFile
else:

    def __getattr__(name: str) -> object:
        """Return an error class: ``from vfs.client import NotFoundError``."""
        if name.endswith("Error") and hasattr(client_errors(), name):
            return getattr(client_errors(), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Client(BlockingEndpoint):
    """A child's connection to its host.

    Names are str, bytes or path-like.  ``top_level`` is the claim of a name (spec A1);
    None uses ``FSPROXY_TOP_LEVEL``.  Several threads, and processes that share the
    descriptors, may use it (spec T5).

    Args: as of ``vfs.client.connection.Endpoint``; a child passes none.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.disconnect()

    # Open files

    def open(self, name: Name, mode: str = "r", top_level: bool | None = None) -> int:
        """Open a file and return its fileno (spec O1).

        Args:
            name: it may not be empty, hold LF, or have blanks at an end.
            mode: ``r``, ``w``, ``a``, ``r+``, ``w+`` or ``a+``.
            top_level: see the class.
        """
        request = m.Open(os.fsencode(name), mode.encode(), self._claim(top_level))
        return self._ask(request, names=(name,))[0].number

    def open_file(
        self, name: Name, mode: str = "r", top_level: bool | None = None
    ) -> ProxyFile:
        """Open a file as an ``io.RawIOBase``; a ``b`` in the mode is ignored."""
        from vfs.client.file import ProxyFile  # noqa: PLC0415 - see the top

        mode = mode.replace("b", "")
        return ProxyFile(self, self.open(name, mode, top_level), name, mode, top_level)

    def read(self, fileno: int, size: int) -> bytes:
        """Read with one READ: at most 16 MiB (spec R1), empty at the end of the file.

        Fewer bytes than ``size`` come only at the end of the file or at that cap.
        """
        return self._ask(m.Read(b"%d" % fileno, size), most=size)[1]

    def readinto(self, fileno: int, buffer: WriteableBuffer) -> int:
        """Read with one READ into a buffer; return the number of bytes."""
        view = memoryview(buffer).cast("B")
        request = m.Read(b"%d" % fileno, len(view))
        return self._ask(request, into=view, most=len(view))[0].number

    def read_all(self, fileno: int) -> bytes:
        """Read to the end of the file."""
        pieces = []
        while piece := self.read(fileno, limits.MAX_READ_BYTES):
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def write(self, fileno: int, data: ReadableBuffer) -> int:
        """Write everything and return its size in bytes.

        Data above the host's cap (16 MiB, or the cap in the host's refusal) goes in
        pieces: all or nothing (spec W2) then holds for each piece, and an error may come
        after some pieces were written.
        """
        view = memoryview(data).cast("B")
        token = b"%d" % fileno
        written = 0
        while True:
            piece = view[written : written + self._write_limit]
            try:
                self._ask(m.Write(token, len(piece)), piece)
            except OSError as why:
                if not self._learn_write_limit(why, len(piece)):
                    raise
                continue
            written += len(piece)
            if written >= len(view):
                return written

    def close(self, fileno: int) -> None:
        """Close a file; its number is gone even after an error (spec C1)."""
        self._ask(m.Close(b"%d" % fileno))

    def seek(self, fileno: int, offset: int) -> int:
        """Set the offset, in bytes from the start of the file, and return it."""
        return self._ask(m.Seek(b"%d" % fileno, offset))[0].number

    def sync(self, fileno: int) -> None:
        """Wait until the file's data is on the disk."""
        self._ask(m.Sync(b"%d" % fileno))

    def truncate(self, fileno: int, size: int) -> None:
        """Set the file's size in bytes; the offset stays."""
        self._ask(m.Truncate(b"%d" % fileno, size))

    # Names

    def stat(self, name: Name, top_level: bool | None = None) -> Status:
        """Return size, time and kind of a name."""
        from vfs.client.decode import status  # noqa: PLC0415 - see the top

        return status(self.stat_json(name, top_level))

    def stat_json(self, name: Name, top_level: bool | None = None) -> bytes:
        """Return the host's JSON for ``stat``."""
        request = m.Stat(self._claim(top_level), os.fsencode(name))
        return self._ask(request, names=(name,))[1]

    def listdir(
        self, name: Name = ".", top_level: bool | None = None
    ) -> list[tuple[str, str]]:
        """List a directory as (name, kind) pairs, in the host's order.

        Names are decoded as by ``os.fsdecode``.
        """
        from vfs.client.decode import entries  # noqa: PLC0415 - see the top

        return entries(self.listdir_json(name, top_level))

    def listdir_json(self, name: Name = ".", top_level: bool | None = None) -> bytes:
        """Return the host's JSON for ``listdir``."""
        request = m.ListDir(self._claim(top_level), os.fsencode(name))
        return self._ask(request, names=(name,))[1]

    def mkdir(self, name: Name, top_level: bool | None = None) -> None:
        """Make a directory."""
        self._ask(m.MakeDir(self._claim(top_level), os.fsencode(name)), names=(name,))

    def remove(self, name: Name, top_level: bool | None = None) -> None:
        """Remove a file or an empty directory."""
        self._ask(m.Remove(self._claim(top_level), os.fsencode(name)), names=(name,))

    def rename(self, old: Name, new: Name, top_level: bool | None = None) -> None:
        """Rename a file or directory; these names may hold any byte but NUL."""
        self._check_known("RENAME")
        first, last = os.fsencode(old), os.fsencode(new)
        request = m.Rename(self._claim(top_level), len(first), len(last))
        self._ask(request, first + last, names=(old, new))

    # The connection

    def ping(self) -> None:
        """Wait until the host has answered."""
        self._ask(m.Ping())

    def caps(self) -> dict[str, object]:
        """Return the host's version, commands, limits and rights, as it sends them."""
        from vfs.client.decode import mapping  # noqa: PLC0415 - see the top

        return mapping(self._ask(m.Caps())[1])

    def commands(self) -> frozenset[str]:
        """Return the commands that the host knows; empty if it has no CAPS.

        The answer is kept.
        """
        if self._commands is None:
            from vfs.client.decode import commands_of  # noqa: PLC0415 - see the top

            try:
                self._commands = commands_of(self.caps())
            except client_errors().UnknownCommandError:
                self._commands = frozenset()
        return self._commands

    def narrow(self, rights: Mapping[str, object]) -> None:
        """Give up rights of this connection for good (spec A5).

        Args:
            rights: the remaining rights: ``read`` and ``write`` (lists of names),
                ``model``, ``quota``.
        """
        from vfs.client.decode import encode_rights  # noqa: PLC0415 - see the top

        self._check_known("NARROW")
        payload = encode_rights(rights)
        self._ask(m.Narrow(len(payload)), payload)

    def attach(self) -> Client:
        """Return a client on one more connection, with at most these rights (spec N4).

        It belongs to this process only.  Its filenos are its own, and ``disconnect``
        or the end of the process closes them.

        Raises:
            UnknownCommandError: the host has no ATTACH, or no way to pass it here.
            FsProxyError: ``EMFILE``: this process has no descriptor left for it.
        """
        if self._attach_fd < 0:
            raise client_errors().no_way_to_attach()
        # Import it now: after the reply there may be no descriptor left for that.
        from vfs.client.waiting import check_passed  # noqa: PLC0415 - few do

        passed: list[int] = []
        try:
            self._ask(m.Attach(), passed=passed)
            client = Client(check_passed(passed), shared=False, dialect=self.dialect)
        except BaseException:
            for fd in passed:
                if fd >= 0:
                    os.close(fd)
            raise
        client.top_level = self.top_level
        client._commands = self._commands
        return client

    def _check_known(self, word: str) -> None:
        """Raise unless the host knows a command that has a payload (spec X1).

        A host that does not know the word takes the payload for requests.
        """
        if word not in self.commands():
            raise client_errors().unknown_command(word)

    # LLM fds

    def fd_call(self, name: str, /, **arguments: object) -> str:
        """Call an LLM fd tool and return its answer: XML, its errors too.

        Args:
            name: ``read_fd``, ``wrap_output``, ...
            arguments: the tool's parameters.

        Raises:
            FsProxyError: there is no such tool, or none at all.
        """
        from vfs.client.decode import encode_call  # noqa: PLC0415 - see the top

        self._check_known("FD_CALL")
        document = encode_call(name, arguments)
        return self._ask(m.FdCall(len(document)), document)[1].decode()

    def fd_put(self, data: ReadableBuffer, token: str | None = None) -> str:
        """Send content of any size; return the token that names it in a call.

        Args:
            data: the content, or a piece of it.
            token: token of the content to which the piece is added; None begins a new
                one.
        """
        self._check_known("FD_PUT")
        view = memoryview(data).cast("B")
        known = None if token is None else token.encode()
        done = 0
        while True:
            piece = view[done : done + self._write_limit]
            try:
                reply = self._ask(m.FdPut(len(piece), known), piece)[0]
            except OSError as why:
                if not self._learn_write_limit(why, len(piece)):
                    raise
                continue
            known = reply.text
            done += len(piece)
            if done >= len(view):
                return known.decode()

    # The model

    def llm_chat(
        self,
        prompt: str = "",
        *,
        preset: str = "",
        input_files: Iterable[Name] = (),
        output_files: Iterable[Name] = (),
        top_level: bool | None = None,
    ) -> ChatCompletion:
        """Ask the model and return its completion (spec L1-L7).

        Args:
            prompt: text of the user.
            preset: key of a system prompt.
            input_files: the host reads them into the message; ``-`` is skipped.
            output_files: the host writes the answer into them.
            top_level: see the class.

        Raises:
            NoModelError: the host has no model.
            QuotaExceededError: the quota is used up, and no call was made.
            ModelCallError: the provider failed.
        """
        from vfs.client.completion import completion  # noqa: PLC0415 - see the top

        body, quota = self.llm_chat_json(
            prompt,
            preset=preset,
            input_files=input_files,
            output_files=output_files,
            top_level=top_level,
        )
        return completion(body, quota)

    def llm_chat_json(
        self,
        prompt: str = "",
        *,
        preset: str = "",
        input_files: Iterable[Name] = (),
        output_files: Iterable[Name] = (),
        top_level: bool | None = None,
    ) -> tuple[bytes, str]:
        """Ask as ``llm_chat``; return the host's JSON and the quota."""
        from vfs.client.decode import chat_parts, quota_of  # noqa: PLC0415 - see the top

        parts = chat_parts(input_files, output_files, prompt, preset)
        request = m.Chat(self._claim(top_level), *map(len, parts))
        reply, body = self._ask(request, b"".join(parts))
        return body, quota_of(reply.text)

    def llm_quota(self) -> str:
        """Return the host's text about the quota (spec L9)."""
        return self._ask(m.Quota())[0].text.decode("utf-8", "replace")

    def llm_config(self) -> dict[str, object]:
        """Return the model's configuration (spec L13)."""
        from vfs.client.decode import mapping  # noqa: PLC0415 - see the top

        return mapping(self.llm_config_json())

    def llm_config_json(self) -> bytes:
        """Return the host's JSON for ``llm_config``."""
        return self._ask(m.Config())[1]
