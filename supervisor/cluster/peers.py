"""The daemons of other nodes, as a daemon asks them: by the door of its own node."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from supervisor.cluster import daemon_socket
from supervisor.cluster.daemon_socket import DaemonError
from supervisor.membership.bases import PeerError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    import msgspec

    from supervisor.membership.base_keeper import PeerStream


def stream_by(door: str) -> PeerStream:
    """Return what yields the items of a stream of another node's daemon.

    Args:
        door: of this node.
    """

    async def items(
        node: str, do: str, args: Mapping[str, object]
    ) -> AsyncGenerator[msgspec.Raw, None]:
        words = {"node": node, "do": do, "args": dict(args)}
        try:
            async with aclosing(daemon_socket.items(door, "items", words)) as found:
                async for item in found:
                    yield item
        except DaemonError as why:
            raise PeerError(f"cannot ask node {node!r}: {why}") from None

    return items
