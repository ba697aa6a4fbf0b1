"""The order for one child, and the child's reports on its way there.

The order that a forked process carries out, and the frames of the pipe by which it
reports.

Rule: an order that was forked along is complete. One that comes later, by a socket, to
a child in stock (``launchpad.prefork``) has before that only what every order of its
shape says.
"""

from __future__ import annotations

import errno
import marshal
import os

from supervisor.spawn.launchpad.words import HELD, JOINS, LOCKS, SENT

TYPE_CHECKING = False

if TYPE_CHECKING:
    import _socket
    from collections.abc import Iterator
    from typing import Any

    from supervisor.spawn.launchpad.layers.common_root import CommonRoot
    from supervisor.spawn.launchpad.layers.fresh_root import Tree
    from supervisor.spawn.launchpad.layers.landlock import Ruleset

    Trees = tuple[Tree, ...]
    Links = tuple[tuple[bytes, bytes], ...]

# Room for all that one child reports; a detail is a path or a part of a "#!" line.
REPORT_BYTES = 16_384
# A single report is written whole, PIPE_BUF is 4096.
DETAIL_BYTES = 1024

# The file of a group that only version 2 would have written: a process can be forked
# into such a group. In version 1 it is ``tasks``, which moves a single thread, and that
# the kernel does at once.
GROUP_TO_FORK_INTO = b"cgroup.procs"

# The first word of a report; the last report is the pipe's end.
FORKING, BECAME, APPLIED, GAVE_UP, ENDED = range(5)

Rules = tuple[tuple[bytes, str], ...]


class Order:
    """The order for one child.

    Attributes:
        applied: (layer, detail) of what has been put on.
        cwd: the working directory's path without links, where a fresh root was made; its
            descriptor says what has to be there. b"" if that one is taken as it is.
        group: the directory of its group of processes, version 2; -1 for none.
        joined: namespaces of the child whose tool it is, by name.
        init: of the pid namespace that it was forked into; -1 for none.
        is_bounded: nothing is left in its bounding set of capabilities.
        is_in_group: it was forked into that group.
        is_in_overlay: its working directory lies in an overlay that it has made.
        held: mounts that the host has made, in the order in which "mountns" names them.
        likely_root: trees and links that the order, still to come, will have most likely
            in its fresh root; None if it is not known to have one.
        likely_rules: rules of Landlock that it will have most likely, and whether it
            restricts TCP; None if nothing is known.
        line: where the order comes from; None if it is here.
        locks: descriptors that are kept open until nothing of the child is left.
        mounts_fd: by which overlays that it makes go to the host; -1 for none.
        listener_fd: by which a listener that it makes goes to the host; -1 for none.
        owners: the user namespace that shows root's files as its own; -1 for none.
        report: where it tells what becomes of it.
        root: made of `likely_root` while the order was awaited.
        ruleset: made of `likely_rules` while it was awaited.
    """

    __slots__ = (
        "applied",
        "argv",
        "cwd",
        "cwd_fd",
        "env",
        "executable",
        "group",
        "held",
        "init",
        "is_bounded",
        "is_in_group",
        "is_in_overlay",
        "joined",
        "layers",
        "likely_root",
        "likely_rules",
        "line",
        "listener_fd",
        "locks",
        "mounts_fd",
        "owners",
        "report",
        "rlimits",
        "root",
        "ruleset",
        "sources",
        "targets",
        "umask",
    )

    def __init__(self, layers: dict[str, Any]) -> None:
        """Make an order of which only these layers are known."""
        self.layers = layers
        self.executable = b""
        self.argv: tuple[bytes, ...] = ()
        self.env: dict[bytes, bytes] = {}
        self.targets: tuple[int, ...] = ()
        self.rlimits: tuple[tuple[int, int, int], ...] = ()
        self.umask: int | None = None
        self.cwd = b""
        self.cwd_fd = -1
        self.listener_fd = -1
        self.mounts_fd = -1
        self.joined: dict[str, int] = {}
        self.sources: list[int] = []
        self.held: list[int] = []
        self.locks: list[int] = []
        self.applied: list[tuple[str, str]] = []
        self.likely_rules: tuple[Rules, bool] | None = None
        self.likely_root: tuple[Trees, Links] | None = None
        self.root: CommonRoot | None = None
        self.ruleset: Ruleset | None = None
        self.owners = -1
        self.group = -1
        self.is_in_group = False
        self.is_in_overlay = False
        self.is_bounded = False
        self.init = -1
        self.report = -1
        self.line: _socket.socket | None = None

    def fill(self, body: tuple[Any, ...], fds: list[int]) -> None:
        """Take in a SPAWN message, without its kind and id, and its descriptors.

        Raises:
            ValueError: It has too few or too many fields.
            OSError: Descriptors are missing: this process may open no more.
        """
        (
            self.executable,
            self.argv,
            self.env,
            self.targets,
            self.rlimits,
            self.umask,
            self.layers,
        ) = body
        listens = "listener" in self.layers
        trees = (self.layers.get("mountns") or ((), ()))[1]
        mounts = sum(kind == HELD for _, kind, _ in trees)
        sends = SENT in self.layers
        locks = self.layers.get(LOCKS, 0)
        joins = self.layers.get(JOINS, ())
        others = mounts + len(joins) + sends + listens
        if len(fds) != 1 + locks + len(self.targets) + others:
            raise OSError(errno.EMFILE, "a descriptor was not received")
        self.cwd_fd, *self.sources = fds
        self.locks, self.sources = self.sources[:locks], self.sources[locks:]
        if listens:
            self.listener_fd = self.sources.pop()
        if sends:
            self.mounts_fd = self.sources.pop()
        if joins:
            self.joined = dict(zip(joins, self.sources[-len(joins) :], strict=True))
            del self.sources[-len(joins) :]
        count = len(self.targets)
        self.sources, self.held = self.sources[:count], self.sources[count:]

    def open_group(self) -> None:
        """Open the group of version 2 that the child is to be forked into, if any."""
        groups = self.layers.get("cgroup", ())
        named = [where for where, name in groups if name == GROUP_TO_FORK_INTO]
        if named:
            try:
                self.group = os.open(
                    named[0], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
                )
            except OSError:  # the child does not find it either, and says so
                return


def frame(*message: Any) -> bytes:
    """Return a report as it stands in the pipe: two bytes of length, the message."""
    body = marshal.dumps(message)
    return len(body).to_bytes(2, "little") + body


def reports(heard: bytes) -> Iterator[tuple[Any, ...]]:
    """Yield what a starting child reports, in order.

    ``(FORKING,)``: two processes are about to be forked, of unknown pids.
    ``(BECAME, pid, init)``: this process ends, the child is `pid` now.
    ``(APPLIED, ((layer, detail), ...))``: what it runs in, if the exec succeeds.
    ``(GAVE_UP, errno, stage, detail)``: it ends.
    """
    while len(heard) >= 2:
        size = int.from_bytes(heard[:2], "little")
        yield marshal.loads(heard[2 : 2 + size])  # noqa: S302 - our own fork wrote it
        heard = heard[2 + size :]
