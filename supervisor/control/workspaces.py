"""The orders and streams about workspaces over a daemon's control socket.

Calls each verb of ``workspace.verbs`` in a thread, and journals it.
"""

from __future__ import annotations

import base64
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hostlib.threads import in_thread
from supervisor.control.server import OrderError, Orders, Send
from supervisor.fleet.fence import FencedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.host import Host
    from supervisor.workspace.verbs import Done

    Write = Callable[[str, dict[str, Any], int], list[str]]

PIECE_BYTES = 256 * 1024
"""Bytes of a patch in one item of the stream."""


READING_VERBS = frozenset({"list", "diff"})
"""Verbs that change nothing: the journal omits them."""


class WorkspaceOrders:
    """The orders about one daemon's workspaces.

    Args:
        host: has the journal.
        state_dir: has the workspaces.
    """

    def __init__(self, host: Host, state_dir: str) -> None:
        self._host = host
        self._state_dir = state_dir

    def add_to(self, orders: Orders) -> None:
        """Register the orders and streams."""
        orders.orders["workspace"] = self._do
        orders.streams["workspace-patch"] = self._patch
        orders.streams["workspace-export"] = self._export
        orders.reading["workspace"] = _is_reading

    async def _do(self, words: dict[str, Any]) -> dict[str, object]:
        """Do a verb: ``{"verb": ..., its arguments}``."""
        verb = words.get("verb")
        if not isinstance(verb, str):
            raise OrderError("cannot tell what to do: there is no verb; name one")
        arguments = {key: value for key, value in words.items() if key != "verb"}
        if not _is_reading(words):
            self._check_fence(arguments.get("name"))
        done = await in_thread(_attempt, self._state_dir, verb, arguments)
        if done.event is not None:
            name, fields = done.event
            self._host.journal.write(name, workspace=arguments.get("name"), **fields)
        return {"result": done.result, "notes": done.notes}

    def _check_fence(self, name: object) -> None:
        """Let a workspace of fleet children change its base, or itself (spec FL6).

        Raises:
            OrderError: the lease of one that works in it is over.
        """
        for child in self._host.children.values():
            if any(use.name == name for use in child.spec.workspaces):
                try:
                    self._host.fence.check(child.id)
                except FencedError as why:
                    raise OrderError(str(why)) from None

    async def _patch(self, words: dict[str, Any], send: Send) -> None:
        """Send a patch in pieces; the first item has notes for the user."""
        await self._send_file(_write_patch, words, send)

    async def _export(self, words: dict[str, Any], send: Send) -> None:
        """Send an export in pieces: a patch for git, or a layer for container tools."""
        await self._send_file(_write_export, words, send)

    async def _send_file(self, write: Write, words: dict[str, Any], send: Send) -> None:
        fd, notes = await in_thread(_file_of, write, self._state_dir, words)
        try:
            await send({"notes": notes, "size_bytes": os.fstat(fd).st_size})
            while data := await in_thread(os.read, fd, PIECE_BYTES):
                await send({"data": base64.b64encode(data).decode()})
        finally:
            os.close(fd)


def _is_reading(arguments: dict[str, Any]) -> bool:
    """Return whether a verb changes nothing."""
    return arguments.get("verb") in READING_VERBS


def _attempt(state_dir: str, verb: str, arguments: dict[str, Any]) -> Done:
    from supervisor.workspace.verbs import VerbError, do_verb  # noqa: PLC0415 - when asked

    try:
        return do_verb(state_dir, verb, arguments)
    except VerbError as why:
        raise OrderError(str(why)) from None


def _file_of(
    write: Write, state_dir: str, words: dict[str, Any]
) -> tuple[int, list[str]]:
    """Return an unnamed file with the result of a writer, at its beginning."""
    from supervisor.workspace.verbs import VerbError  # noqa: PLC0415 - as above

    fd, path = tempfile.mkstemp(prefix=".patch-", dir=state_dir)
    try:
        Path(path).unlink()
        notes = write(state_dir, words, fd)
        os.lseek(fd, 0, os.SEEK_SET)
    except (VerbError, msgspec.ValidationError) as why:
        os.close(fd)
        raise OrderError(str(why)) from None
    except BaseException:
        os.close(fd)
        raise
    return fd, notes


def _write_patch(state_dir: str, words: dict[str, Any], file: int) -> list[str]:
    from supervisor.workspace import verbs  # noqa: PLC0415 - as above

    return verbs.write_patch(
        state_dir, msgspec.convert(words, verbs.DiffArguments), file
    )


def _write_export(state_dir: str, words: dict[str, Any], file: int) -> list[str]:
    from supervisor.workspace import verbs  # noqa: PLC0415 - as above

    return verbs.write_export(
        state_dir, msgspec.convert(words, verbs.ExportArguments), file
    )
