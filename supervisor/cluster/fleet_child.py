"""A child of the fleet in the hand of a Python program: `sandhost.fleet`.

It has a workspace of its own and runs `command_server`, so that programs are run in its
walls. It goes through the door of this node, and imports no Ray.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import msgspec

from hostlib.paths import absolute
from hostlib.threads import ThreadLock, in_daemon_thread
from supervisor.client import ChangedPath, WorkspaceCommit
from supervisor.cluster.client import FleetClient
from supervisor.cluster.commands import (
    Commands,
    FleetChildError,
    Seat,
    ask_again,
    pause,
    try_again,
    wait_placed,
)
from supervisor.control.client import ControlError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SILENCE_S = 15.0
"""A child that is held and hears nothing for so long ends by itself."""

SERVER = 'PATH="$PATH:/usr/local/bin" exec sandhost serve-commands "$@"'
"""Run by sh(1) in the child: the command is in its root, and not on every node's PATH."""


class FleetChild(Commands):
    """A child of the fleet, its commands, and a workspace of its own.

    Usable in a `with` block, whose end stops it. Each method raises `ControlError` where
    the fleet refuses or does not answer.

    Args:
        client: asks the fleet.
        row: the child as the fleet shows it.
        holder: that has it end with this program; None if it outlives that.

    Attributes:
        name: of the child.
        node: where it runs.
        incarnation: which of its lives; no other one is asked.
    """

    def __init__(
        self, client: FleetClient, row: Mapping[str, Any], holder: Holder | None
    ) -> None:
        seat = Seat(row["node"], row["name"], row["id"], row["incarnation"])
        super().__init__(client, seat)
        self.name = seat.name
        self.node = seat.node
        self.incarnation = seat.incarnation
        self._id = seat.child
        self._holder = holder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def changes(self, patterns: Sequence[str] = ()) -> list[ChangedPath]:
        """Return what was changed in the workspace."""
        rows = self._do_verb("diff", {"patterns": list(patterns)})
        return msgspec.convert(rows, list[ChangedPath])

    def diff(self, patterns: Sequence[str] = (), *, binary: bool = False) -> bytes:
        """Return what was changed in the workspace, as a patch for `git apply`."""
        words = {"patterns": list(patterns), "binary": binary}
        return b"".join(self._client.patch(*self._workspace(), words))

    def commit(self, patterns: Sequence[str] = (), **how: object) -> WorkspaceCommit:
        """Bring changes to the base: all that is chosen, or nothing.

        A child that runs is stopped meanwhile; one that runs on another node than its
        base has to be over.

        Args:
            patterns: of the paths that are chosen; all, if there are none.
            how: ``but``, ``allow``, ``theirs``, ``mine``, ``skip_conflicts``, ``merge``,
                ``dry_run``, as of `sandhost workspace commit`.
        """
        words = {"only": list(patterns), "freeze": self._runs(), **how}
        base = (self._find_workspace() or {}).get("base")
        if base is None or base["node"] == self.node:
            result = self._do_verb("commit", words)
        else:
            result = self._client.commit(self.name, words)
        return msgspec.convert(result, WorkspaceCommit)

    def discard(self) -> None:
        """Remove the workspace of a child that has ended, with all that was changed."""
        self._do_verb("discard", {})

    def stop(self) -> None:
        """End the child with all that runs in it; a second call does nothing."""
        try:
            with suppress(RefusedError):  # it is over, and listed no more
                _kill(self._client, self.name, self._id)
                words = {"name": self.name, "child": self._id}
                ask_again(self._client, "wait", words)
        finally:
            if self._holder is not None:
                self._holder.release(self.name, self._id)

    def state(self) -> str:
        """Return its state as `fleet ps` shows it; ``ended`` if it is not there.

        Raises:
            ControlError: the fleet does not answer.
        """
        try:
            row = ask_again(self._client, "find", {"name": self.name})
        except RefusedError:
            return "ended"
        return str(row["state"]) if row["id"] == self._id else "ended"

    def _runs(self) -> bool:
        return self.state() in {"running", "unknown"}

    def _workspace(self) -> tuple[str, str]:
        """Return the child's node, and the name of its workspace there."""
        own = self._find_workspace()
        return self.node, self.name if own is None else own["name"]

    def _find_workspace(self) -> Any:
        """Return the workspace of a child with a base; None of one without.

        Raises:
            FleetChildError: the name is another child's by now.
        """
        if ask_again(self._client, "find", {"name": self.name})["id"] != self._id:
            raise FleetChildError(
                f"cannot ask for the workspace of {self.name}: another child has that"
                f" name by now; see `sandhost workspace list` on node {self.node}"
            )
        return ask_again(self._client, "workspace", {"name": self.name})

    def _do_verb(self, verb: str, words: dict[str, Any]) -> Any:
        return self._client.do_verb(*self._workspace(), verb, words)


def create(  # noqa: PLR0913 - one argument each, all by name
    workspace: str,
    *,
    name: str | None = None,
    policy: str | None = None,
    node: str | None = None,
    needs: Sequence[str] = (),
    pack: bool = False,
    wait: bool = False,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    limits: Mapping[str, str] | None = None,
    keep: bool = True,
    detached: bool = False,
    control: str | None = None,
) -> FleetChild:
    """Place a child with a workspace of its own, and return it once it runs.

    Args:
        workspace: the path of a directory of this node, of which another node gets a
            copy; or a workspace in the configuration of the child's node.
        name: of the child; None for a new one.
        policy: ``[policy.NAME]`` of its node.
        node: the only one that will do.
        needs: labels that its node has to have.
        pack: onto the fullest node with room, and not onto the emptiest.
        wait: for a place, where there is none.
        cwd: where commands begin, as the child sees it; None for the workspace.
        env: variables of its commands.
        limits: as of ``--limit``, such as ``{"memory": "512M"}``.
        keep: the changes in the workspace stay when the child has ended.
        detached: it outlives this program; `find` returns it again.
        control: the control socket of this node's daemon; None for the usual one.

    Raises:
        ControlError: this node is in no fleet, or the fleet refuses.
        FleetChildError: the child has ended at once; the text has its reason.
    """
    client = FleetClient(control)
    is_new = name is None
    if name is None:
        name = f"box-{secrets.token_hex(4)}"
    silence = [] if detached else [f"{SILENCE_S:g}"]
    holder = None if detached else holder_of(client.control)
    request = {
        "name": name,
        "program": {
            "command": ["/bin/sh", "-c", SERVER, "sh", *silence],
            "policy": policy,
            "env": dict(env or {}),
            "cwd": cwd,
            **_work_in(client, workspace, node),
            "keeps_workspace": keep,
            "limits": dict(limits or {}),
            "takes_input": True,
        },
        "needs": {
            "labels": list(needs),
            "node": node,
            "strategy": "pack" if pack else "spread",
        },
        "wait": wait,
    }
    row = _spawn(client, request, is_own_name=is_new)
    child_id = row["id"]
    try:
        row = wait_placed(client, row)
        if holder is not None:
            holder.hold(name, child_id)
        child = FleetChild(client, row, holder)
        child.check()
    except BaseException:
        _end(client, name, child_id)
        if holder is not None:
            holder.release(name, child_id)
        raise
    return child


def _spawn(client: FleetClient, request: dict[str, Any], *, is_own_name: bool) -> Any:
    """Return a child that was ordered; an order without an answer leaves no child.

    Args:
        client: asks the fleet.
        request: of `spawn`.
        is_own_name: no other child has it. A given one may be another's: such a child is
            not ended here, but by its own silence, if it does not outlive its program.
    """
    try:
        (row,) = client.spawn(request)
    except RefusedError:
        raise
    except BaseException:  # it may be done, or under way
        if is_own_name:
            _end(client, request["name"], None)
        raise
    return row


def _end(client: FleetClient, name: str, child: str | None) -> None:
    with suppress(ControlError):  # it is over, or ends by its silence
        _kill(client, name, child)


def _kill(client: FleetClient, name: str, child: str | None) -> None:
    words = {"name": name, "signal": "KILL", "child": child}
    ask_again(client, "kill", words)


def _work_in(client: FleetClient, workspace: str, node: str | None) -> dict[str, Any]:
    """Return the part of a program that says where it works."""
    if "/" not in workspace:
        return {"workspace": workspace}
    path = absolute(workspace)
    if node is not None and node == client.ask("here")["node"]:
        return {"workspace": path}
    return {"base": client.pack(path)}


def find(name: str, *, control: str | None = None) -> FleetChild:
    """Return a child that another program has made with ``detached=True``.

    Raises:
        ControlError: this node is in no fleet, or there is no such child.
        FleetChildError: it does not run.
    """
    client = FleetClient(control)
    row = client.ask("find", {"name": name})
    if row["state"] not in {"running", "unknown"}:
        raise FleetChildError(
            f"cannot use {name!r}: it is {row['state']}; make another"
        )
    return FleetChild(client, row, None)


class Holder:
    """This program, as a node's door knows it: children that it holds end with it.

    Args:
        client: asks the door.
    """

    def __init__(self, client: FleetClient) -> None:
        self._client = client
        self._id = secrets.token_hex(8)
        self._names: dict[str, str] = {}  # by the ids of the children
        self._lock = ThreadLock()
        self._is_running = False

    def hold(self, name: str, child: str) -> None:
        """Hold a child from now on.

        Args:
            name: of the child.
            child: its id; another one that has its name by then is not held.

        Raises:
            ControlError: it has ended, or the door does not answer.
        """
        with self._lock:
            self._names[child] = name
            if not self._is_running:
                connection = try_again(self._client, self._connect)
                in_daemon_thread(self._run, connection)
                self._is_running = True
        while not self._tell(name, child):
            pause()  # the connection is being made again

    def release(self, name: str, child: str) -> None:
        """Hold a child no more: it has ended, or is about to."""
        with self._lock:
            self._names.pop(child, None)
        words = {"holder": self._id, "name": name, "child": child, "is_held": False}
        with suppress(ControlError):  # a door that is not there holds nothing, either
            self._client.ask("held", words)

    def _tell(self, name: str, child: str) -> bool:
        """Tell the door what is held; return False where it does not know this program."""
        words = {"holder": self._id, "name": name, "child": child}
        return bool(ask_again(self._client, "held", words))

    def _tell_at_last(self, name: str, child: str) -> None:
        """Tell the door what is held, however long the fleet is away."""
        while child in self._names:
            try:
                self._tell(name, child)
            except RefusedError:  # it has ended
                return
            except ControlError:
                pause()
            else:
                return

    def _connect(self) -> Iterator[object]:
        """Return the connection by which the door knows that this program is there."""
        connection = self._client.hold(self._id)
        next(connection, None)
        return connection

    def _run(self, connection: Iterator[object]) -> None:
        """Keep a connection, and make it anew, for as long as something is held."""
        while True:
            with suppress(ControlError):
                for _ in connection:
                    pass
            with self._lock:
                if not self._names:
                    self._is_running = False
                    return
            pause()
            with suppress(ControlError):
                connection = self._connect()
                with self._lock:
                    held = tuple(self._names.items())
                for child, name in held:
                    self._tell_at_last(name, child)


@cache
def holder_of(control: str) -> Holder:
    """Return the one holder of this program at the door beside a control socket."""
    return Holder(FleetClient(control))
