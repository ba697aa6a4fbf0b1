r"""A Python client of a host's control socket, typed and blocking.

    from supervisor.client import HostClient

    host = HostClient("/run/sandhost/control")
    child = host.spawn(["/usr/bin/worker"], policy="worker")
    for entry in host.logs(child.name, follow=True):
        sys.stdout.buffer.write(entry.data)

The questions, orders and streams of ``control.client`` as methods with Structs for
rows; keys that a newer host adds are ignored.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from supervisor.control.client import ControlError, call, find_control, stream
from supervisor.network.statistics import NetworkStatistics

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "ChangedPath",
    "Changes",
    "ChildRow",
    "ClientRow",
    "ControlError",
    "Event",
    "FileRow",
    "HostClient",
    "LogEntry",
    "LogMark",
    "NetworkStatistics",
    "Signalled",
    "Spawned",
    "Stopping",
    "Usage",
    "WorkspaceCommit",
    "WorkspaceRow",
]

NEXT_PROGRAM_S = 60.0
"""How long the next program of a host may take to answer: it imports its modules first,
which takes a second, and more on a busy machine."""

T = TypeVar("T")


class Usage(msgspec.Struct, frozen=True):
    """The use of the machine by a process."""

    state: str
    cpu_time_s: float
    rss_bytes: int
    threads: int
    descendants: int
    cpu_percent: float | None = None
    descriptors: int | None = None


class ChildRow(msgspec.Struct, frozen=True):
    """One child: running, or kept and between two processes."""

    id: str
    state: str
    command: list[str]
    name: str | None = None
    pid: int | None = None
    create_time: int | None = None
    client_id: str | None = None
    started_at: str | None = None
    restart: str = "no"
    restarts: int = 0
    reason: str | None = None
    status: int | None = None
    log_dropped_bytes: int = 0
    incarnation: int | None = None
    usage: Usage | None = None


class ClientRow(msgspec.Struct, frozen=True):
    """One connection (spec S1)."""

    id: str
    pipe_id: str
    open_files: list[int]
    connected_at: str
    parent_id: str | None = None
    pid: int | None = None
    child: str | None = None


class FileRow(msgspec.Struct, frozen=True):
    """One open file (spec S1)."""

    fileno: int
    filename: str
    mode: str
    client_id: str
    opened_at: str
    is_top_level: bool
    child: str | None = None


class Spawned(msgspec.Struct, frozen=True):
    """A child that was started; without a process if it has ended already."""

    name: str
    id: str | None = None
    pid: int | None = None
    client_id: str | None = None


class Signalled(msgspec.Struct, frozen=True):
    """A child that was signalled, and the signal's number."""

    id: str
    pid: int
    signal: int


class Changes(msgspec.Struct, frozen=True):
    """The changes of a reload, by name; ``needs_restart`` are sections."""

    started: list[str]
    stopped: list[str]
    restarted: list[str]
    unchanged: list[str]
    needs_restart: list[str]


class Stopping(msgspec.Struct, frozen=True):
    """How far a stop of the host is.

    Attributes:
        blocking: children that had to be killed since the last report; ten in all.
        overdue: how many had to be killed so far.
        left: children that have not ended.
    """

    blocking: list[dict[str, Any]]
    overdue: int = 0
    left: int = 0


class LogMark(msgspec.Struct, frozen=True, array_like=True):
    """The known facts about a child's output from an offset on.

    Attributes:
        offset: in all that the child ever said.
        time_s: when it came, seconds since the epoch.
        stream: ``out`` or ``err``.
        begins: a new process of the child began to speak there.
    """

    offset: int
    time_s: float
    stream: str
    begins: bool


class LogEntry(msgspec.Struct, frozen=True):
    """A piece of what a child said.

    Attributes:
        offset: of its first byte in all that the child ever said.
        data: the bytes.
        missed: bytes before it that rotation removed before they were read.
        marks: the notes of the log on this piece; the first may begin before it.
    """

    offset: int
    data: bytes
    missed: int
    marks: tuple[LogMark, ...] = ()


class Event(msgspec.Struct, frozen=True):
    """One line of the journal; ``event`` is None where ``missed`` bytes are told."""

    offset: int
    missed: int
    event: dict[str, Any] | None = None


class WorkspaceRow(msgspec.Struct, frozen=True):
    """One workspace of a daemon.

    Attributes:
        changed: paths; None where it could not be looked at.
        bytes: of these paths; None where it could not be looked at.
        cut_off: its last run (``durable = false``) was cut off before it was synced.
    """

    name: str
    base: str
    mode: str
    state: str
    child: str | None
    changed: int | None
    bytes: int | None
    created_at: str | None = None
    snapshots: list[str] = []
    cut_off: bool = False


class ChangedPath(msgspec.Struct, frozen=True):
    """One path that was changed in a workspace.

    Attributes:
        path: None for one that is not UTF-8; it stands in base64 in ``path_b64`` then.
        change: ``added``, ``modified``, ``deleted``, ``mode``, ``type``, ``renamed``.
    """

    change: str
    kind: str
    size: int
    mode: int
    path: str | None = None
    path_b64: str | None = None
    old_size: int | None = None


class WorkspaceCommit(msgspec.Struct, frozen=True):
    """The result of a commit or a trial; a path that is not UTF-8 is ``{path_b64}``.

    ``hidden`` are those of ``guarded`` that no ``allow`` takes; ``merged`` those of
    ``applied`` that got the changes of both sides.
    """

    applied: list[str | dict[str, str]]
    conflicts: list[dict[str, str]]
    guarded: list[str | dict[str, str]]
    hidden: list[str | dict[str, str]]
    left: list[str | dict[str, str]]
    merged: list[str | dict[str, str]] = []


class HostClient:
    """One host.

    Args:
        path: its control socket; None for ``$SANDHOST_CONTROL`` or a usual place.
        reader: a descriptor by which streams leave; they raise `ReaderGone` once its other
            end is closed.

    Raises:
        ControlError: no socket is named and none is in a usual place.
    """

    def __init__(self, path: str | None = None, reader: int | None = None) -> None:
        self.path = find_control(path)
        self._reader = reader

    # Each raises ControlError: the host does not answer, or it refuses.

    def ps(self) -> list[ChildRow]:
        """Return its children."""
        return msgspec.convert(call(self.path, "ps"), list[ChildRow])

    def clients(self) -> list[ClientRow]:
        """Return its clients, nested ones included."""
        return msgspec.convert(call(self.path, "clients"), list[ClientRow])

    def files(self) -> list[FileRow]:
        """Return the files that its clients have open."""
        return msgspec.convert(call(self.path, "files"), list[FileRow])

    def stats(self) -> dict[str, Any]:
        """Return figures of the host itself."""
        return msgspec.convert(call(self.path, "stats"), dict[str, Any])

    def spawn(
        self,
        command: list[str] | None = None,
        *,
        name: str | None = None,
        policy: str | None = None,
        **more: object,
    ) -> Spawned:
        """Start a child: a command, or a configured one by its name.

        Args:
            command: program and arguments; None for a configured child.
            name: of the child.
            policy: its rights, as ``[policy.NAME]`` has them.
            more: ``restart``, ``env``, ``cwd``, ``dialect``, ``transport``,
                ``stop_signal``.
        """
        args = {"command": command, "name": name, "policy": policy, **more}
        return self._order("spawn", Spawned, args)

    def kill(self, name: str, signal: str = "TERM", *, tree: bool = False) -> Signalled:
        """Signal a child, or all of its process tree."""
        args = {"name": name, "signal": signal, "tree": tree}
        return self._order("kill", Signalled, args)

    def stop_child(self, name: str, grace_s: float | None = None) -> int | None:
        """Stop a child for good, wait, and return its exit status."""
        args = {"name": name, "grace": grace_s}
        status: int | None = self._order("stop-child", dict, args)["status"]
        return status

    def reload(self) -> Changes:
        """Make the host read its configuration anew; return what has changed."""
        return self._order("reload", Changes, {})

    def replace(self) -> int:
        """Replace the host's program by the next one; its children go on.

        Returns:
            How many programs it was before this one.

        Raises:
            ControlError: it was not, and goes on as it was.
        """
        before = self.stats().get("generation")
        if not isinstance(before, int):
            raise ControlError(
                "cannot replace the program: the host is not `sandhost serve`; restart it"
                " instead"
            )
        try:
            call(self.path, "replace", {})
        except ControlError:
            # No answer is a good one: the program that was asked is gone.  The next
            # one takes the connection that waits at the same socket.
            row = call(self.path, "stats", timeout_s=NEXT_PROGRAM_S)
            if row["generation"] <= before:
                raise
        return before + 1

    def stop(self, grace_s: float | None = None) -> Iterator[Stopping]:
        """End the host; yield what it waits for, until it has ended."""
        for item in stream(self.path, "stop", _given({"grace": grace_s})):
            yield msgspec.convert(item, Stopping)

    def logs(
        self,
        name: str,
        *,
        follow: bool = False,
        lines: int | None = None,
        offset: int | None = None,
        since_s: float | None = None,
    ) -> Iterator[LogEntry]:
        """Yield what a child said: all, its last lines, from an offset, since a time."""
        args = {
            "name": name,
            "follow": follow,
            "lines": lines,
            "offset": offset,
            "since": since_s,
        }
        for item in stream(self.path, "logs", _given(args), self._reader):
            data = base64.b64decode(item["data"])
            marks = msgspec.convert(item.get("marks", ()), tuple[LogMark, ...])
            yield LogEntry(item["offset"], data, item["missed"], marks)

    def events(
        self, *, follow: bool = True, lines: int | None = 0, offset: int | None = None
    ) -> Iterator[Event]:
        """Yield what the journal says from now on, or from some lines before."""
        args = {"follow": follow, "lines": lines, "offset": offset}
        # None is a value here: all lines.
        for item in stream(self.path, "events", args, self._reader):
            yield msgspec.convert(item, Event)

    def workspace(self, verb: str, **arguments: object) -> Any:
        """Do a verb of ``sandhost workspace``; return its result as plain values.

        Args:
            verb: as the command has it: ``list``, ``diff``, ``commit``, ``discard``,
                ``snapshot``, ``restore``, ``fork``.
            arguments: of ``supervisor.workspace.verbs``.
        """
        words = {"verb": verb, **arguments}
        return call(self.path, "workspace", _given(words))["result"]

    def network(
        self,
        name: str,
        *,
        allow: list[str] | None = None,
        deny: list[str] | None = None,
        cut: bool = False,
    ) -> NetworkStatistics:
        """Return what a child reached and was refused, after a change of its rules.

        Args:
            name: of the child, or its id.
            allow: rules to add; the next connection obeys.
            deny: rules to refuse.
            cut: reset what is open and not allowed any more.
        """
        words = {"name": name, "allow": allow, "deny": deny, "cut": cut}
        answer = call(self.path, "network", _given(words))
        return msgspec.convert(answer["network"], NetworkStatistics)

    def learned_rules(self, name: str) -> list[str] | None:
        """Return the rules that would have sufficed; None if a child does not learn."""
        answer = call(self.path, "network", {"name": name})
        return msgspec.convert(answer["learned"], list[str] | None)

    def workspaces(self) -> list[WorkspaceRow]:
        """Return its workspaces."""
        return msgspec.convert(self.workspace("list"), list[WorkspaceRow])

    def workspace_diff(
        self, name: str, patterns: list[str] | None = None
    ) -> list[ChangedPath]:
        """Return what was changed in a workspace."""
        rows = self.workspace("diff", name=name, patterns=patterns)
        return msgspec.convert(rows, list[ChangedPath])

    def workspace_patch(self, name: str, **arguments: object) -> Iterator[bytes]:
        """Yield what was changed in a workspace as a patch, in pieces."""
        words = {"name": name, **arguments}
        for item in stream(self.path, "workspace-patch", words):
            if "data" in item:
                yield base64.b64decode(item["data"])

    def workspace_export(self, name: str, form: str) -> Iterator[bytes]:
        """Yield what was changed as ``patch`` for git or ``tar`` (OCI), in pieces."""
        words = {"name": name, "form": form}
        for item in stream(self.path, "workspace-export", words):
            if "data" in item:
                yield base64.b64decode(item["data"])

    def workspace_commit(self, name: str, **arguments: object) -> WorkspaceCommit:
        """Bring changes to the base: what is chosen, or nothing."""
        result = self.workspace("commit", name=name, **arguments)
        return msgspec.convert(result, WorkspaceCommit)

    def workspace_discard(self, name: str) -> None:
        """Remove a workspace and all that was changed in it."""
        self.workspace("discard", name=name)

    def _order(self, do: str, kind: type[T], args: dict[str, Any]) -> T:
        return msgspec.convert(call(self.path, do, _given(args)), kind)


def _given(args: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in args.items() if value is not None}
