"""How the host under test is started: the one module here that knows its face.

Two ways: the command `sandhost run` for one child, as a user types it, and a host
inside a Trio program for what the command does not show (many children at once, the
moment a child is gone).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple

import trio

from benchmarks.measure import MeasureError
from supervisor.host import Host as EmbeddedHost
from supervisor.host import open_host as open_embedded_host
from supervisor.observe.families import families
from supervisor.observe.registry import attach_metrics
from supervisor.parts import Settings
from supervisor.spawn.launchpad.start import start_launchpad
from supervisor.spec import ChildSpec, minimal_env

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


def run_trio(
    program: Callable[[*Arguments], Awaitable[Result]], *arguments: *Arguments
) -> Result:
    """Run a Trio program that holds a host.

    Raises:
        MeasureError: as the program raised it, taken out of the groups that the
            nurseries of the host put around it.
    """
    try:
        return trio.run(program, *arguments)
    except BaseExceptionGroup as group:
        faults, others = group.split(MeasureError)
        if faults is None or others is not None:
            raise
        error: BaseException = faults
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise MeasureError(str(error)) from group


def run_command(
    sandhost: Path,
    root: Path,
    child: Sequence[str],
    *,
    top_level: bool = True,
    transport: str = "socketpair",
    sandbox: str = "none",
) -> list[str]:
    """Return the command line of a host with one child.

    Args:
        sandhost: the command under test.
        root: the child's private root, kept at the end.
        child: its program and arguments.
        top_level: whether it may have the whole file system.
        transport: "socketpair" or "pipes".
        sandbox: its profile. The door is measured here, walls in `sandbox`.
    """
    view = ["--top-level"] if top_level else []
    options = ["--root", str(root), "--transport", transport]
    walls = ["--sandbox", sandbox]
    return [str(sandhost), "run", *walls, *view, *options, "--", *child]


class HostedChild(Protocol):
    """A child of the host under test."""

    async def wait_gone(self) -> int:
        """Wait until nothing of the child is left and return its exit status.

        Nothing: no row in any table of the host, no descriptor, no process, and
        128+n for a child ended by signal n.
        """
        ...


class Host(Protocol):
    """A running host, made by `open_host`."""

    async def spawn(self, argv: Sequence[str]) -> HostedChild:
        """Start a top-level child with FD 3 as a socketpair."""
        ...

    def rows(self) -> int:
        """Return how many rows its tables of clients and open files hold in all."""
        ...

    def snapshot(self) -> int:
        """Make the snapshot of its figures that a scrape makes; return how many."""
        ...


class _EmbeddedHost:
    """The host's own Python interface, as the benchmarks need it."""

    def __init__(self, host: EmbeddedHost, root: Path) -> None:
        self._host = host
        self._root = root

    async def spawn(self, argv: Sequence[str]) -> HostedChild:
        spec = ChildSpec(
            command=tuple(argv),
            cwd=str(self._root),
            root=str(self._root),
            env=minimal_env(str(self._root)),
            top_level=True,
        )
        child = await self._host.spawn(spec)
        if child.failure is not None:
            raise MeasureError(child.failure.text)
        return child

    def rows(self) -> int:
        tables = self._host.fs.tables
        return len(tables.clients) + len(tables.files)

    def snapshot(self) -> int:
        return len(families(attach_metrics(self._host)))


@asynccontextmanager
async def open_host(root: Path) -> AsyncIterator[Host]:
    """Run a host in this Trio program; its children are ended with it.

    Args:
        root: the private root of every child.

    Raises:
        MeasureError: the host cannot be started.
    """
    try:
        launchpad = start_launchpad()
    except OSError as why:
        raise MeasureError(f"cannot start the launchpad: {why.strerror}") from None
    settings = Settings(max_children=2000)
    async with open_embedded_host(launchpad, settings) as host:
        yield _EmbeddedHost(host, root)
