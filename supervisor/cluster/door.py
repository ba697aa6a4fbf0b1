"""The door of a node: a socket beside the control socket, for `sandhost fleet`.

The conversation is the control socket's, and so are the rules on who may ask. The requests:
`ps`, `quota`, `find`, `spawn`, `kill`, `forget`, `wait`, `leave`, `down`; `on` and the
stream `items` ask the daemon of any node what its control socket answers.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import trio

from hostlib.journal import Journal
from hostlib.unix_listener import listen_at
from supervisor.cluster.directory_service import (
    DECIDED,
    OVER,
    STARTED,
    Until,
    Waited,
    WaitFor,
)
from supervisor.cluster.node_service import ControlRequest
from supervisor.cluster.requests import RequestError
from supervisor.control.server import ControlServer, OrderError, Orders
from supervisor.fleet.directory import ShownChild, ShownFleet, SpawnRequest

if TYPE_CHECKING:
    from hostlib.log import Log
    from supervisor.cluster.node_service import NodeService
    from supervisor.control.server import Order, Send, Stream

LONGEST_LEAVE_S = 60.0
"""For a node to leave at `down`: its children have their time to end."""

_NO_ARGS = b"{}"

T = TypeVar("T")


class ChildArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of `find`, and of `wait`: until a child is over."""

    name: str


class OnArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of `on` and `items`: what a daemon is asked.

    Attributes:
        node: whose daemon; None for that of the child.
        child: a child of the fleet; its daemon's name for it is put into the arguments
            as ``name``.
    """

    do: str
    args: dict[str, Any] = {}
    node: str | None = None
    child: str | None = None


class _Target(NamedTuple):
    """A daemon, and what it is asked."""

    node: str
    request: ControlRequest


@dataclass(frozen=True, slots=True)
class _Recorder:
    """Where the door writes; orders stand in the journals of the daemons that do them."""

    log: Log
    journal: Journal


class Door:
    """The door of one node.

    Args:
        node: whose it is.
    """

    def __init__(self, node: NodeService) -> None:
        self._node = node

    async def serve(
        self,
        path: str,
        log: Log,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve the socket until cancelled; then its file is removed.

        Raises:
            OSError: the socket cannot be there.
        """
        recorder = _Recorder(log, Journal(-1, partial(log.write, "WARNING")))
        async with listen_at(path) as listener:
            server = ControlServer(recorder, listener, self._orders())
            task_status.started()
            await server.run()

    def _orders(self) -> Orders:
        orders: dict[str, Order] = {
            "ps": partial(self._ask, "ps"),
            "quota": partial(self._ask, "quota"),
            "kill": partial(self._ask, "kill"),
            "forget": partial(self._ask, "forget"),
            "find": self._show,
            "spawn": self._spawn,
            "wait": self._wait,
            "leave": self._leave,
            "down": self._down,
            "on": self._on,
        }
        streams: dict[str, Stream] = {"items": self._items}
        return Orders(
            orders={do: _refusing(order) for do, order in orders.items()},
            waiting=frozenset(("spawn", "wait", "on")),
            streams=streams,
            reading=dict.fromkeys(("ps", "quota", "find", "items"), _always),
        )

    # The directory

    async def _ask(self, do: str, words: dict[str, Any]) -> msgspec.Raw:
        answer = await self._node.others.ask_directory(do, msgspec.json.encode(words))
        return msgspec.Raw(answer)

    async def _read(self, do: str, words: object, kind: type[T]) -> T:
        data = msgspec.json.encode(words)
        answer = await self._node.others.ask_directory(do, data)
        return msgspec.json.decode(answer, type=kind)

    async def _spawn(self, words: dict[str, Any]) -> tuple[ShownChild, ...]:
        """Return the children once their daemons have started them.

        One that may wait is not waited for until it is placed.
        """
        request = msgspec.convert(words, SpawnRequest)
        names = await self._read("spawn", request, tuple[str, ...])
        children = await self._waited(names, DECIDED if request.wait else STARTED)
        for child in children:
            if child.state == "ended" and child.status is None:
                raise RequestError(f"cannot spawn {child.name!r}: {child.reason}")
        return children

    async def _show(self, words: dict[str, Any]) -> ShownChild:
        return await self._find(msgspec.convert(words, ChildArgs).name)

    async def _find(self, name: str) -> ShownChild:
        """Return a child.

        Raises:
            RequestError: there is none of that name.
        """
        find = {"name": name}
        child = await self._read("find", find, ShownChild | None)  # type: ignore[arg-type]
        if child is None:
            raise RequestError(f"cannot find {name!r}: no such child; see `fleet ps`")
        return child

    async def _wait(self, words: dict[str, Any]) -> ShownChild:
        name = msgspec.convert(words, ChildArgs).name
        for child in await self._waited((name,), OVER):
            return child
        raise RequestError(f"cannot wait for {name!r}: no such child; see `fleet ps`")

    async def _waited(
        self, names: tuple[str, ...], until: Until
    ) -> tuple[ShownChild, ...]:
        while True:
            waited = await self._read("wait", WaitFor(names, until), Waited)
            if waited.is_reached:
                return waited.children

    # Nodes

    async def _leave(self, words: dict[str, Any]) -> msgspec.Raw:
        """Have this node leave; the command that asks ends its Ray."""
        _check_empty(words)
        left = await self._node.ask(self._node.name, "leave", _NO_ARGS)
        await self._node.ask(self._node.name, "end-ray", _NO_ARGS)
        return msgspec.Raw(left)

    async def _down(self, words: dict[str, Any]) -> dict[str, str]:
        """Have all nodes leave and end their Ray; return those that did not, and why."""
        _check_empty(words)
        fleet = await self._read("ps", {}, ShownFleet)
        failed: dict[str, str] = {}
        async with trio.open_nursery() as nursery:
            for node in fleet.nodes:
                if node.name != self._node.name and node.state in {"up", "unknown"}:
                    nursery.start_soon(self._take_down, node.name, failed)
        await self._node.ask(self._node.name, "leave", _NO_ARGS)
        await self._node.ask(self._node.name, "end-ray", _NO_ARGS)
        return failed

    async def _take_down(self, node: str, failed: dict[str, str]) -> None:
        """Have another node leave and end its Ray; note it if it does not."""
        try:
            with trio.fail_after(LONGEST_LEAVE_S):
                await self._node.ask(node, "leave", _NO_ARGS)
                await self._node.ask(node, "end-ray", _NO_ARGS)
        except RequestError as why:
            failed[node] = str(why)
        except trio.TooSlowError:
            failed[node] = (
                f"it has not left within {LONGEST_LEAVE_S:g} s; see its daemon, and do"
                " `sandhost fleet leave` there"
            )

    async def _on(self, words: dict[str, Any]) -> msgspec.Raw:
        target = await self._target(msgspec.convert(words, OnArgs))
        args = msgspec.json.encode(target.request)
        return msgspec.Raw(await self._node.ask(target.node, "control", args))

    async def _items(self, words: dict[str, Any], send: Send) -> None:
        try:
            node, request = await self._target(msgspec.convert(words, OnArgs))
            found = self._node.items(node, request.do, request.args)
            async with aclosing(found) as items:
                async for item in items:
                    await send(item)
        except RequestError as why:
            raise OrderError(str(why)) from None

    async def _target(self, args: OnArgs) -> _Target:
        if args.child is None:
            return _Target(
                args.node or self._node.name, ControlRequest(args.do, args.args)
            )
        child = await self._find(args.child)
        if child.node is None:
            raise RequestError(
                f"cannot ask for {args.child!r}: it is {child.state} on no node"
            )
        words = {**args.args, "name": child.name}
        return _Target(child.node, ControlRequest(args.do, words))


def _refusing(order: Order) -> Order:
    """Return an order whose refusals are told to who asked."""

    async def do(words: dict[str, Any]) -> object:
        try:
            return await order(words)
        except RequestError as why:
            raise OrderError(str(why)) from None

    return do


def _check_empty(words: dict[str, Any]) -> None:
    if words:
        raise RequestError(
            f"cannot take the arguments {', '.join(words)}: this order has none; leave"
            " them out"
        )


def _always(_words: dict[str, Any]) -> bool:
    return True
