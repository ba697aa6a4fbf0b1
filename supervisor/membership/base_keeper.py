"""The bases that children of a node need: fetched once, held while they are used."""

from __future__ import annotations

import base64
from collections import Counter
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakValueDictionary

import msgspec
import trio

from hostlib.threads import in_thread
from supervisor.fleet.messages import Base  # noqa: TC001 - msgspec looks at it
from supervisor.membership.bases import BaseError, PeerError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

    from supervisor.membership.bases import BaseRow, Bases
    from supervisor.workspace.verbs import Done

BASE_STREAM = "fleet-base"
"""The stream of a daemon that sends a base that was packed there."""

PATIENCE_S = 30.0
"""Longest time for which another node is asked again; then the order is refused."""

PAUSE_S = 1.0
"""Time between two attempts."""

PeerStream: TypeAlias = (
    "Callable[[str, str, Mapping[str, object]], AsyncGenerator[msgspec.Raw, None]]"
)
"""Yields the items of a stream of another node's daemon: node, stream, arguments.

It raises `PeerError`."""


EXPORT_STREAM = "workspace-export"
"""The stream of a daemon that sends the changes of a workspace."""

PIECE_BYTES = 256 * 1024
"""Most bytes of a base in one item of its stream."""


class _Piece(msgspec.Struct):
    """An item of a stream that sends a file; the first one has its size."""

    data: str = ""
    size_bytes: int | None = None


class CommitBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes of a child on another node that are to be committed here.

    Attributes:
        node: of the child.
        workspace: its name there.
        base: that it was made over.
        words: arguments of the verb `commit`, without a name.
    """

    node: str
    workspace: str
    base: Base
    words: dict[str, Any] = {}


class BaseKeeper:
    """The bases of a node.

    Args:
        bases: on the disk.
        peers: asks other nodes.
    """

    def __init__(self, bases: Bases, peers: PeerStream) -> None:
        self._bases = bases
        self._peers = peers
        self._held: Counter[str] = Counter()
        # A lock is there as long as a child waits for its base.
        self._turns: WeakValueDictionary[str, trio.Lock] = WeakValueDictionary()
        self._rows: list[BaseRow] = []

    async def open(self) -> None:
        """Remove what an earlier daemon has left half made.

        Raises:
            OSError: the bases cannot be kept.
        """
        self._rows = await in_thread(self._bases.open)

    def row(self) -> dict[str, object]:
        """Return what `stats` tells of the bases of other nodes that are here."""
        return {"fleet_bases": self._rows}

    @asynccontextmanager
    async def held(self, base: Base) -> AsyncIterator[None]:
        """Let a base stay while a child has it or waits for it."""
        self._held[base.digest] += 1
        try:
            yield
        finally:
            self._held[base.digest] -= 1
            self._held += Counter()  # drops those that nothing holds

    async def ready(self, base: Base) -> str:
        """Return the directory of a base, once it is here.

        Raises:
            PeerError: the node that has it is not reached.
            BaseError: it cannot be kept here, or is kept nowhere any more.
        """
        async with self._turns.setdefault(base.digest, trio.Lock()):
            path = await in_thread(self._bases.find, base.digest)
            if path is None:
                await self._fetch(base)
                path = await in_thread(self._bases.find, base.digest)
        if path is None:
            raise PeerError(f"cannot use base {base.digest}: it was removed meanwhile")
        return path

    async def pack(self, path: str, node: str) -> Base:
        """Pack a directory of this node, whose name is given.

        Raises:
            BaseError: it cannot be.
        """
        return await in_thread(self._bases.pack, path, node)

    async def read(self, digest: str) -> AsyncGenerator[bytes, None]:
        """Yield a base that was packed here, in pieces.

        Raises:
            BaseError: it is not kept any more.
        """
        file = await in_thread(self._bases.open_packed, digest)
        with file:
            while data := await in_thread(file.read, PIECE_BYTES):
                yield data

    async def commit(self, asked: CommitBase) -> Done:
        """Commit what a child has changed on another node to its base here.

        Raises:
            BaseError: the changes do not come, or the packed base is not known any more.
            VerbError: they cannot be committed; as ``commit_layer``.
        """
        from supervisor.workspace.layer_import import (  # noqa: PLC0415 - seldom
            PackedBase,
            commit_layer,
        )

        paths = await in_thread(self._bases.paths_of, asked.base.digest)
        base = PackedBase(asked.base.path, asked.base.packed_ns, paths)
        words = {"name": asked.workspace, "form": "tar"}
        with await in_thread(self._bases.open_unnamed) as file:
            items = self._peers(asked.node, EXPORT_STREAM, words)
            try:
                await _copy(items, file.write)
                await in_thread(file.seek, 0)
            except OSError as why:
                raise _no_room("the changes", why) from None
            state_dir = self._bases.state_dir
            return await in_thread(commit_layer, state_dir, base, file, asked.words)

    async def _fetch(self, base: Base) -> None:
        until_s = trio.current_time() + PATIENCE_S
        while True:
            try:
                await self._fetch_once(base)
            except PeerError:
                if trio.current_time() >= until_s:
                    raise
                await trio.sleep(PAUSE_S)
            except OSError as why:
                raise _no_room(f"base {base.digest}", why) from None
            else:
                self._rows = await in_thread(self._bases.sweep, frozenset(self._held))
                return

    async def _fetch_once(self, base: Base) -> None:
        incoming = await in_thread(self._bases.begin, base)
        try:
            words = {"digest": base.digest}
            items = self._peers(base.node, BASE_STREAM, words)
            await _copy(items, incoming.write)
            await in_thread(self._bases.finish, incoming)
        finally:
            with trio.CancelScope(shield=True):
                await in_thread(self._bases.give_up, incoming)


async def _copy(
    items: AsyncGenerator[msgspec.Raw, None], write: Callable[[bytes], object]
) -> None:
    """Write the bytes of a file that a stream sends, all of them if it says how many.

    Raises:
        PeerError: it sends something else, or ends before.
        OSError: they cannot be written.
    """
    wanted: int | None = None
    come = 0
    async with aclosing(items):
        async for item in items:
            try:
                piece = msgspec.json.decode(item, type=_Piece)
                data = base64.b64decode(piece.data)
            except (msgspec.DecodeError, ValueError) as why:
                raise PeerError(f"cannot read what another node sends: {why}") from None
            if piece.size_bytes is not None:
                wanted = piece.size_bytes
            come += len(data)
            if data:
                await in_thread(write, data)
    if wanted is not None and come != wanted:
        raise PeerError(
            f"cannot read what another node sends: it ends after {come} bytes"
        )


def _no_room(what: str, why: OSError) -> BaseError:
    text = f"cannot keep {what}: {why.strerror}"
    return BaseError(f"{text}; make room in the daemon's state_dir")
