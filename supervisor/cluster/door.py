"""The door of a node: a socket beside the control socket, for `sandhost fleet`.

The conversation is the control socket's, and so are the rules on who may ask. The
requests: `ps`, `quota`, `find`, `workspace`, `here`, `spawn`, `kill`, `forget`, `wait`; `on`
and the stream `items` ask the daemon of any node what its control socket answers; the
streams `leave` and `down` tell which nodes they wait for; the stream `hold` keeps children
for a program.
"""

from __future__ import annotations

import base64
import signal
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeVar

import msgspec
import trio

from hostlib.journal import Journal
from hostlib.unix_listener import listen_at
from hostlib.user_values import OptionError
from supervisor.cluster.directory_service import (
    DECIDED,
    OVER,
    STARTED,
    KillChild,
    Until,
    WaitAnswer,
    WaitFor,
)
from supervisor.cluster.node_service import ControlRequest
from supervisor.cluster.requests import FleetUnavailableError, RequestError
from supervisor.config.child import NAME_RULE, is_child_name, signal_number
from supervisor.config.fleet import WORD_RULE, is_fleet_word
from supervisor.control.server import (
    ControlServer,
    OrderError,
    Orders,
    UnavailableOrderError,
)
from supervisor.fleet.directory import PlacementRequest
from supervisor.fleet.listings import ShownChild, ShownFleet, ShownNode
from supervisor.fleet.messages import VERSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hostlib.log import Log
    from supervisor.cluster.node_service import NodeService
    from supervisor.control.server import Order, Send, Stream

ALIVE_S = 3.0
"""Time between two signs of life for a held child; longest wait for one node's part."""

ANSWER_S = 8.0
"""Longest wait for the directory: commands tell its silence within 10 s (FL11)."""

AGAIN_S = 0.2
"""Time from a request that a directory has not answered to the next attempt."""

LONGEST_LEAVE_S = 60.0
"""Longest wait for a node to leave at `down`: its children have their time to end."""

_NO_ARGS = b"{}"
_OVER = frozenset({"ended", "lost"})
_ENDING: dict[int, Literal["TERM", "KILL"]] = {
    signal.SIGTERM: "TERM",
    signal.SIGKILL: "KILL",
}
"""Signals that end a child for good: its node is asked until it answers."""

_READING = (
    "ps",
    "quota",
    "find",
    "workspace",
    "here",
    "top",
    "held",
    "hold",
    "items",
    "on",
)
"""Requests that are not logged here; a daemon logs the ones that reach it."""

T = TypeVar("T")
P = ParamSpec("P")


class ChildArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of `find`."""

    name: str


class WaitArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of `wait`: until a child is over.

    Attributes:
        child: its id; None for the one that has the name now.
    """

    name: str
    child: str | None = None


class KillArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of `kill`.

    Attributes:
        child: see `KillChild`.
    """

    name: str
    signal: str = "TERM"
    child: str | None = None


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


class HoldArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of `hold`: the holder of children that end with its connection."""

    holder: str


class HeldArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of `held`: a child that a client holds from now on, or no more.

    Attributes:
        child: its id: another one that has its name by then is not held.
    """

    holder: str
    name: str
    child: str
    is_held: bool = True


class ShownWork(msgspec.Struct):
    """The children of all nodes that answer.

    Attributes:
        rows: as of ``ps`` of a daemon, with its node.
        missing: nodes that do not answer, and why.
    """

    rows: list[dict[str, Any]] = []
    missing: dict[str, str] = {}


class LeaveItem(msgspec.Struct, omit_defaults=True):
    """An item of `leave` and `down`.

    Attributes:
        waiting: nodes that have not left yet.
        failed: in the last item: other nodes that did not leave, and why.
    """

    waiting: tuple[str, ...] = ()
    failed: dict[str, str] | None = None


class _Target(NamedTuple):
    """A daemon, and a request to it."""

    node: str
    request: ControlRequest


@dataclass(frozen=True, slots=True)
class _Recorder:
    """Where the door writes; orders stand in the journals of the daemons that do them."""

    log: Log
    journal: Journal


class _HeldChildren(NamedTuple):
    """The children that a program holds, by id, and the scope of its connection."""

    children: dict[str, ShownChild]
    scope: trio.CancelScope


class NodeDoor:
    """The door of one node.

    Args:
        node: whose it is.
    """

    def __init__(self, node: NodeService) -> None:
        self._node = node
        self._held: dict[str, _HeldChildren] = {}

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
            "ps": partial(self._pass_on, "ps"),
            "quota": partial(self._pass_on, "quota"),
            "kill": self._kill,
            "forget": partial(self._pass_on, "forget"),
            "find": self._show,
            "workspace": partial(self._pass_on, "workspace"),
            "spawn": self._spawn,
            "wait": self._wait,
            "on": self._on,
            "here": self._here,
            "top": self._top,
            "held": self._note_held,
        }
        streams: dict[str, Stream] = {
            "items": self._items,
            "hold": self._hold,
            "leave": self._leave,
            "down": self._down,
        }
        return Orders(
            orders={do: _refusing(order) for do, order in orders.items()},
            waiting=frozenset(("spawn", "wait", "on", "held", "top")),
            streams={do: _refusing(stream) for do, stream in streams.items()},
            reading=dict.fromkeys(_READING, _always),
        )

    # The directory

    async def _ask(self, do: str, words: object) -> bytes:
        """Return the directory's answer as JSON.

        Raises:
            RequestError: it refuses.
            FleetUnavailableError: it does not answer in time.
        """
        with trio.move_on_after(ANSWER_S):
            data = msgspec.json.encode(words)
            return await self._node.others.ask_directory(do, data)
        raise _silence()

    async def _ask_again(self, do: str, words: object) -> bytes:
        """Return the directory's answer, also where it is started again meanwhile.

        Raises:
            RequestError: as for `_ask`.
        """
        fault = None
        with trio.move_on_after(ANSWER_S):
            while True:
                try:
                    return await self._ask(do, words)
                except FleetUnavailableError as why:
                    fault = why
                await trio.sleep(AGAIN_S)
        raise fault or _silence()

    async def _pass_on(self, do: str, words: dict[str, Any]) -> msgspec.Raw:
        return msgspec.Raw(await self._ask(do, words))

    async def _read(self, do: str, words: object, kind: type[T]) -> T:
        return msgspec.json.decode(await self._ask(do, words), type=kind)

    async def _spawn(self, words: dict[str, Any]) -> tuple[ShownChild, ...]:
        """Return the children once their daemons have started them: all, or none is left.

        One that may wait is not waited for until it is placed.
        """
        request = msgspec.convert(words, PlacementRequest)
        _check_words(request)
        ids = await self._read("spawn", request, dict[str, str])
        until = DECIDED if request.wait else STARTED
        children = await self._waited(tuple(ids.values()), until)
        for child in children:
            if child.state in _OVER and child.pid is None:
                text = f"cannot spawn {child.name!r}: {child.reason}"
                if len(ids) > 1:
                    text = await self._end_batch(children, text, len(ids))
                raise RequestError(text)
        rows = {child.id: child for child in children}
        restart = request.program.restart
        return tuple(
            rows.get(child_id) or _unlisted(child_id, name, restart)
            for name, child_id in ids.items()
        )

    async def _end_batch(
        self, children: tuple[ShownChild, ...], text: str, count: int
    ) -> str:
        """End the children of a batch; return once they are over, with what to say.

        Args:
            children: those that are listed; the others are over.
            text: the reason.
            count: of the batch.

        Raises:
            FleetUnavailableError: the directory does not answer; some may run.
        """
        left = [child for child in children if child.state not in _OVER]
        ids = tuple(child.id for child in left)
        is_over = False
        try:
            for child in left:
                kill = KillChild(child.name, "KILL", child.id)
                try:
                    await self._ask_again("kill", kill)
                except FleetUnavailableError:
                    raise
                except RequestError:  # it is over, and listed no more
                    continue
            while not is_over:
                data = await self._ask_again("wait", WaitFor(ids, OVER))
                is_over = msgspec.json.decode(data, type=WaitAnswer).is_reached
        except FleetUnavailableError as why:
            raise FleetUnavailableError(
                f"{text}; cannot end the others of the {count}: {why}"
            ) from None
        return f"{text}; the others of the {count} were ended"

    async def _kill(self, words: dict[str, Any]) -> None:
        """End a child for good by TERM or KILL; send it any other signal once."""
        args = msgspec.convert(words, KillArgs)
        try:
            number = signal_number(args.signal)
        except OptionError as why:
            raise RequestError(f"cannot signal {args.name!r}: {why}") from None
        if number in _ENDING:
            kill = KillChild(args.name, _ENDING[number], args.child)
            await self._ask("kill", kill)
            return
        child = await self._find(args.name)
        if args.child not in (None, child.id):
            raise RequestError(f"cannot signal {args.name!r}: it is another child now")
        if child.node is None or child.state not in {"running", "unknown"}:
            raise RequestError(
                f"cannot signal {args.name!r}: it is {child.state}; see `fleet ps`"
            )
        order = {**_life_of(child), "signal": args.signal}
        request = msgspec.json.encode(ControlRequest("kill", order))
        with trio.move_on_after(ANSWER_S):
            await self._node.ask(child.node, "control", request)
            return
        raise RequestError(
            f"cannot signal {args.name!r}: node {child.node!r} does not answer within"
            f" {ANSWER_S:g} s; it may have got the signal"
        )

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
        args = msgspec.convert(words, WaitArgs)
        child = args.child or (await self._find(args.name)).id
        for row in await self._waited((child,), OVER):
            return row
        raise RequestError(
            f"cannot wait for {args.name!r}: it is over, and listed no more; see `fleet"
            " ps`"
        )

    async def _waited(
        self, children: tuple[str, ...], until: Until
    ) -> tuple[ShownChild, ...]:
        """Return those that are still listed, once all have come so far."""
        while True:
            waited = await self._read("wait", WaitFor(children, until), WaitAnswer)
            if waited.is_reached:
                return waited.children

    # Children that end with who holds them

    async def _hold(self, words: dict[str, Any], send: Send) -> None:
        """Hold children for a program: those that it has named end with the connection.

        Each child's own program (`command_server`) gets signs of life, so that it ends
        also where this node actor does not outlive the holder.
        """
        holder = msgspec.convert(words, HoldArgs).holder
        held = self._held[holder] = _HeldChildren({}, trio.CancelScope())
        try:
            with held.scope:
                await send({})
                while True:
                    await trio.sleep(ALIVE_S)
                    with trio.move_on_after(ALIVE_S):
                        async with trio.open_nursery() as nursery:
                            for child in held.children.values():
                                nursery.start_soon(self._tell_alive, child)
        finally:
            if self._held.get(holder) is held:  # else the program is here again
                del self._held[holder]
                with trio.move_on_after(LONGEST_LEAVE_S, shield=True):
                    for child in held.children.values():
                        await self._end_held(child)

    async def _tell_alive(self, child: ShownChild) -> None:
        data = base64.b64encode(b'{"do": "alive"}\n').decode()
        order = {**_life_of(child), "data": data}
        request = msgspec.json.encode(ControlRequest("input", order))
        with suppress(RequestError):  # it has ended, or its node is not reached now
            await self._node.ask(str(child.node), "control", request)

    async def _end_held(self, child: ShownChild) -> None:
        with suppress(RequestError):  # it has ended, or ends by its silence
            await self._ask("kill", KillChild(child.name, "KILL", child.id))

    async def _note_held(self, words: dict[str, Any]) -> bool:
        """Note what a program holds; return False if it has no connection here.

        The connection of one that holds nothing any more ends.

        Raises:
            RequestError: the child has ended: it is not there, or its name is another's.
        """
        args = msgspec.convert(words, HeldArgs)
        child = await self._find(args.name) if args.is_held else None
        if child is not None and child.id != args.child:
            raise RequestError(
                f"cannot hold {args.name!r}: it is over, and another child has its name"
                " now; see `fleet ps`"
            )
        held = self._held.get(args.holder)
        if held is None or held.scope.cancel_called:
            return False
        if child is None:
            held.children.pop(args.child, None)
            if not held.children:
                held.scope.cancel()
        else:
            held.children[args.child] = child
        return True

    # Nodes

    async def _top(self, words: dict[str, Any]) -> ShownWork:
        """Return the children of all daemons as these show them."""
        _check_empty(words)
        fleet = await self._read("ps", {}, ShownFleet)
        work = ShownWork()
        async with trio.open_nursery() as nursery:
            for node in fleet.nodes:
                if node.state in {"up", "unknown"}:
                    nursery.start_soon(self._add_work, node.name, work)
        return work

    async def _add_work(self, node: str, work: ShownWork) -> None:
        request = msgspec.json.encode(ControlRequest("ps"))
        try:
            with trio.fail_after(ALIVE_S):
                found = await self._node.ask(node, "control", request)
        except RequestError as why:
            work.missing[node] = str(why)
        except trio.TooSlowError:
            work.missing[node] = f"it does not answer within {ALIVE_S:g} s"
        else:
            for row in msgspec.json.decode(found, type=list[dict[str, Any]]):
                work.rows.append({**row, "node": node, "id": f"{node}/{row['id']}"})

    async def _here(self, words: dict[str, Any]) -> dict[str, object]:
        """Return what this node is, where it keeps what Ray needs, and its version."""
        _check_empty(words)
        order = self._node.order
        return {
            "node": order.node,
            "is_head": order.is_head,
            "directory": order.directory,
            "version": VERSION,
        }

    async def _leave(self, words: dict[str, Any], send: Send) -> None:
        """Have this node leave; the command that asks ends its Ray."""
        _check_empty(words)
        await self._end_nodes((), send)

    async def _down(self, words: dict[str, Any], send: Send) -> None:
        """Have all nodes leave and end their Ray."""
        _check_empty(words)
        fleet = await self._read("ps", {}, ShownFleet)
        own = self._node.name
        others = (one for one in fleet.nodes if one.name != own)
        await self._end_nodes(tuple(others), send)

    async def _end_nodes(self, others: tuple[ShownNode, ...], send: Send) -> None:
        """Have nodes leave and end their Ray, this one behind the others.

        Raises:
            RequestError: this one does not leave; of others the last item tells that.
        """
        failed: dict[str, str] = {}
        left: set[str] = set()
        own = self._node.name
        refusal: RequestError | None = None
        async with trio.open_nursery() as nursery:
            names = (*(node.name for node in others), own)
            nursery.start_soon(_tell_waiting, names, left, send)
            async with trio.open_nursery() as taking:
                for node in others:
                    taking.start_soon(self._take_down, node, left, failed)
            try:
                await self._node.ask(own, "leave", _NO_ARGS)
            except RequestError as why:
                refusal = why
            # This actor, too: on a Ray of somebody else's no command would end it.
            await self._node.ask(own, "end-ray", _NO_ARGS)
            nursery.cancel_scope.cancel()
        await send(LeaveItem(failed=failed))
        if refusal is not None:
            raise refusal

    async def _take_down(
        self, node: ShownNode, left: set[str], failed: dict[str, str]
    ) -> None:
        """Have another node leave and end its Ray; note how that went."""
        if node.state == "left":
            # A `down` that was interrupted may have left its Ray.
            with suppress(RequestError):
                await self._end_ray(node.name)
            left.add(node.name)
            return
        # Nothing runs any more on a lost one: its fence has ended it.
        wait_s = ALIVE_S if node.state == "lost" else LONGEST_LEAVE_S
        try:
            with trio.fail_after(wait_s):
                await self._node.ask(node.name, "leave", _NO_ARGS)
            await self._end_ray(node.name)
        except RequestError as why:
            failed[node.name] = str(why)
        except trio.TooSlowError:
            failed[node.name] = (
                f"it has not left within {wait_s:g} s; see its daemon, and do"
                " `sandhost fleet leave` there"
            )
        left.add(node.name)

    async def _end_ray(self, node: str) -> None:
        """Have a node that has left end its Ray, also where the command has ended.

        Raises:
            RequestError: it refuses, or does not answer in time.
        """
        with trio.move_on_after(ALIVE_S, shield=True):
            await self._node.ask(node, "end-ray", _NO_ARGS)
            return
        raise RequestError(f"it has not ended its Ray within {ALIVE_S:g} s")

    async def _on(self, words: dict[str, Any]) -> msgspec.Raw:
        target = await self._target(msgspec.convert(words, OnArgs))
        args = msgspec.json.encode(target.request)
        return msgspec.Raw(await self._node.ask(target.node, "control", args))

    async def _items(self, words: dict[str, Any], send: Send) -> None:
        node, request = await self._target(msgspec.convert(words, OnArgs))
        found = self._node.items(node, request.do, request.args)
        async with aclosing(found) as items:
            async for item in items:
                await send(item)

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
        if child.state == "ended" and child.pid is None:
            raise RequestError(
                f"cannot ask for {args.child!r}: it was never started: {child.reason}"
            )
        words = {**args.args, "name": child.name}
        return _Target(child.node, ControlRequest(args.do, words))


def _refusing(do: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Return an order or a stream whose refusals are told to who asked."""

    async def told(*args: P.args, **words: P.kwargs) -> T:
        try:
            return await do(*args, **words)
        except FleetUnavailableError as why:
            raise UnavailableOrderError(str(why)) from None
        except RequestError as why:
            raise OrderError(str(why)) from None

    return told


async def _tell_waiting(names: tuple[str, ...], left: set[str], send: Send) -> None:
    """Tell every now and then which nodes have not left, until cancelled."""
    told: tuple[str, ...] = ()
    with suppress(trio.BrokenResourceError):
        while True:
            await trio.sleep(ALIVE_S)
            waiting = tuple(name for name in names if name not in left)
            if waiting != told:
                await send(LeaveItem(waiting))
                told = waiting


def _silence() -> FleetUnavailableError:
    return FleetUnavailableError(
        f"the fleet's directory does not answer within {ANSWER_S:g} s: its machine may be"
        " cut off, or stopped; children here go on until their lease ends"
    )


def _unlisted(child: str, name: str, restart: str) -> ShownChild:
    """Return the row of a child that has run, and is over and listed no more."""
    reason = "it is over, and listed no more"
    return ShownChild(child, name, None, "ended", 1, restart, reason, None, None)


def _life_of(child: ShownChild) -> dict[str, object]:
    """Return the words of an order for this life of a child, and for no later one."""
    return {
        "name": child.name,
        "child": child.id,
        "incarnation": child.incarnation,
    }


def _check_words(request: PlacementRequest) -> None:
    """Refuse names that no child, no node and no label can have.

    Raises:
        RequestError: one is such; a child would wait for it for ever.
    """
    longest = request.names()[-1]
    if not is_child_name(longest):
        raise RequestError(f"cannot spawn {longest!r:.80}: {NAME_RULE}")
    needs = request.needs
    if needs.node is not None and not is_fleet_word(needs.node):
        raise RequestError(
            f"cannot place on {needs.node!r:.80}: no node is called so; write"
            f" {WORD_RULE}"
        )
    for label in needs.labels:
        if not is_fleet_word(label):
            raise RequestError(
                f"cannot place a child that needs {label!r:.80}: no label is like that;"
                f" write {WORD_RULE}"
            )


def _check_empty(words: dict[str, Any]) -> None:
    if words:
        raise RequestError(
            f"cannot take the arguments {', '.join(words)}: this order has none; leave"
            " them out"
        )


def _always(_words: dict[str, Any]) -> bool:
    return True
