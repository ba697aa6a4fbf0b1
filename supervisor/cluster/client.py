"""The fleet as commands ask it: blocking, by the door of this node alone (FL1)."""

from __future__ import annotations

import base64
import os
from typing import TYPE_CHECKING, Any

import msgspec

from hostlib.unix_names import is_deaf
from supervisor.client import LogEntry, LogMark
from supervisor.cluster.names import DOOR
from supervisor.control import client as control
from supervisor.control.client import (
    ControlError,
    RefusedError,
    SilentError,
    UnavailableError,
)
from supervisor.fleet.messages import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

TIMEOUT_S = 10.0
"""Longest wait for an answer; for a long one, until its next sign of life (FL11)."""

NO_FLEET = (
    "cannot ask the fleet: this node is in none; begin one by `sandhost fleet up`, or join"
    " one by `sandhost fleet join --address A`"
)

ACTOR_ENDED = (
    "cannot ask the fleet: the node actor here has ended; Ray starts it again within 2 s,"
    " else `sandhost fleet leave`, and join again"
)


class FleetClient:
    """The fleet, as this node's door has it.

    Args:
        path: the daemon's control socket; None for the usual one.
        tell: gets the fault when what is asked again has not answered for long.

    Raises:
        ControlError: there is no daemon, or its node is in no fleet.
    """

    def __init__(
        self, path: str | None = None, tell: Callable[[str], None] = lambda _text: None
    ) -> None:
        self.tell = tell
        self.control = control.find_control(path)
        self.door = door_of(self.control)
        if not is_there(self.door):
            control.call(self.control, "stats")  # no daemon: it says so
            raise ControlError(NO_FLEET)
        self._is_same_version = False

    def check_version(self) -> None:
        """Refuse a node actor of another version, as an upgrade in place leaves it.

        It is asked once. A node of any version may leave, so that is not checked.

        Raises:
            RefusedError: it is of another version.
            ControlError: the node actor does not answer in time.
        """
        if self._is_same_version:
            return
        theirs = self.ask("here").get("version")
        if theirs != VERSION:
            told = "an older version" if theirs is None else f"version {theirs!r}"
            raise RefusedError(
                f"cannot ask the fleet: the node actor here has {told}, this sandhost"
                f" {VERSION!r}; `sandhost fleet leave` (`down` at the head), and join"
                " again"
            )
        self._is_same_version = True

    def ask(self, do: str, args: dict[str, Any] | None = None) -> Any:
        """Return what the door answers, as plain values.

        Raises:
            ControlError: it refuses, or nobody answers in time.
        """
        if do != "here":
            self.check_version()
        try:
            return control.call(self.door, do, args, timeout_s=TIMEOUT_S)
        except ControlError as why:
            raise self.fault(why) from None

    def spawn(self, request: dict[str, Any]) -> Any:
        """Start children on their nodes, and return them.

        Args:
            request: as the directory has it.

        Raises:
            RefusedError: none of them is started.
            ControlError: there is no answer: they may be started all the same.
        """
        try:
            return self.ask("spawn", request)
        except RefusedError:
            raise
        except ControlError as why:
            raise type(why)(
                f"{why}; {request['name']!r} may be started all the same: see `sandhost"
                " fleet ps`"
            ) from None

    def leave(self, do: str) -> Iterator[dict[str, Any]]:
        """Have this node leave, or by `down` all; yield how far that is.

        Yields:
            ``waiting``: the nodes that have not left yet; in the last item ``failed``:
            other nodes that did not leave, and why.

        Raises:
            ControlError: it is refused, or nobody answers in time.
        """
        is_over = False
        try:
            for item in control.stream(self.door, do):
                is_over = "failed" in item
                yield item
        except ControlError as why:
            raise self.fault(why) from None
        if not is_over:
            raise self.fault(SilentError())

    def items(
        self, args: dict[str, Any], reader: int | None = None, **more: Any
    ) -> Iterator[Any]:
        """Yield the items of a stream of any node's daemon.

        Args:
            args: which node or child, what, and its arguments.
            reader: a descriptor by which they leave.
            more: as of `control.client.stream`.

        Raises:
            ControlError: it is refused, or nobody answers in time.
            ReaderGone: the reader is gone.
        """
        self.check_version()
        try:
            is_whole = yield from control.stream(
                self.door, "items", args, reader, **more
            )
        except ControlError as why:
            raise self.fault(why) from None
        if not is_whole:
            raise ControlError(ACTOR_ENDED)

    def logs(
        self, name: str, args: dict[str, Any], reader: int | None = None, **more: Any
    ) -> Iterator[LogEntry]:
        """Yield pieces of a child's log, from whatever node it is on.

        Args:
            name: of the child.
            args: of `logs`.
            reader: a descriptor by which they leave.
            more: as for `items`.
        """
        words = {"child": name, "do": "logs", "args": args}
        for item in self.items(words, reader, **more):
            data = base64.b64decode(item["data"])
            marks = msgspec.convert(item.get("marks", ()), tuple[LogMark, ...])
            yield LogEntry(item["offset"], data, item["missed"], marks)

    def hold(self, holder: str) -> Iterator[object]:
        """Have the door know a program for as long as this is read.

        Yields:
            Something, once the door knows it; nothing more until that ends.

        Args:
            holder: id of the program.

        Raises:
            ControlError: it is refused, or the connection ends.
        """
        self.check_version()
        try:
            is_whole = yield from control.stream(self.door, "hold", {"holder": holder})
        except ControlError as why:
            raise self.fault(why) from None
        if not is_whole:
            raise ControlError(ACTOR_ENDED)

    def pack(self, path: str) -> Any:
        """Pack a directory of this node; return the base of a program on any node.

        Raises:
            ControlError: it cannot be packed, or is no base of a workspace.
        """
        return self.ask("on", {"do": "fleet-pack", "args": {"path": path}})

    def commit(self, name: str, words: dict[str, Any]) -> Any:
        """Commit the changes of a child to their base, wherever that is.

        Args:
            name: of the child.
            words: of the verb `commit`, without a name.

        Raises:
            ControlError: it has no workspace, or runs on another node than its base.
        """
        own = self.ask("workspace", {"name": name})
        if own is None or own["node"] == own["base"]["node"]:
            node, workspace = self.workspace(name)
            return self.do_verb(node, workspace, "commit", words)
        if not own["is_over"]:
            raise ControlError(
                f"cannot commit {name!r}: it runs, on another node than its base; end it"
                " first"
            )
        args = {
            "node": own["node"],
            "workspace": own["name"],
            "base": own["base"],
            "words": words,
        }
        asked = {"node": own["base"]["node"], "do": "fleet-commit", "args": args}
        return self.ask("on", asked)["result"]

    def workspace(self, name: str) -> tuple[str, str]:
        """Return the node of a child, and the name of its workspace there.

        Raises:
            ControlError: it has none.
        """
        own = self.ask("workspace", {"name": name})
        if own is not None:
            return own["node"], own["name"]
        row = self.ask("find", {"name": name})
        node = row["node"]
        if node is None:
            raise ControlError(f"cannot ask for {name!r}: it is on no node")
        words = {"node": node, "do": "events", "args": {"follow": False, "lines": None}}
        # An ended child is in no table of its daemon any more: its journal has it.
        events = (item["event"] or {} for item in self.items(words))
        found = opened_by(row["id"], row["incarnation"], events)
        if found is None:
            raise ControlError(
                f"cannot find a workspace of {name!r} on node {node!r}: it has none; give"
                " it a policy with one"
            )
        return str(node), found

    def do_verb(
        self, node: str, workspace: str, verb: str, words: dict[str, Any]
    ) -> Any:
        """Return the result of a verb of `sandhost workspace` on a node."""
        args = {"verb": verb, "name": workspace, **words}
        asked = {"node": node, "do": "workspace", "args": args}
        return self.ask("on", asked)["result"]

    def patch(
        self, node: str, workspace: str, words: dict[str, Any]
    ) -> Iterator[bytes]:
        """Yield a workspace's changes as a patch, in pieces."""
        args = {"name": workspace, **words}
        asked = {"node": node, "do": "workspace-patch", "args": args}
        for item in self.items(asked):
            if "data" in item:
                yield base64.b64decode(item["data"])

    def fault(self, why: ControlError) -> ControlError:
        """Return a fault in words for a user of the fleet."""
        if isinstance(why, RefusedError | UnavailableError):
            return type(why)(refusal(str(why)))
        if is_deaf(self.door):
            return ControlError(ACTOR_ENDED)
        if not isinstance(why, SilentError):
            return why
        return ControlError(
            f"cannot ask the fleet: the node actor here does not answer within"
            f" {TIMEOUT_S:g} s: it is stopped or very busy; try again"
        )


def opened_by(
    child: str, incarnation: int, events: Iterable[Mapping[str, Any]]
) -> str | None:
    """Return the workspace of one life of a fleet's child; None if it has none.

    Args:
        child: its id in the fleet.
        incarnation: which of its lives.
        events: of its node's journal.
    """
    found: str | None = None
    opened: dict[str, str] = {}
    for event in events:
        kind = event.get("event")
        if kind == "host.started":  # the ids of its children begin again
            opened = {}
        elif kind == "workspace.opened":
            opened[event["child_id"]] = str(event["workspace"])
        elif kind == "child.spawned":
            life = event.get("fleet_id"), event.get("incarnation")
            if life == (child, incarnation):
                found = opened.get(event["child_id"])
    return found


def door_of(control_path: str) -> str:
    """Return where the door is: beside the control socket."""
    return f"{os.path.dirname(control_path)}/{DOOR}"  # noqa: PTH120 - a str is wanted


def is_there(door: str) -> bool:
    """Tell whether there is a door: without one, the node is in no fleet."""
    return os.path.lexists(door)


def refusal(text: str) -> str:
    """Return the reason of a refusal without the path of the socket."""
    _, said, reason = text.partition(" refused: ")
    return reason if said else text
