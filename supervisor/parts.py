"""The shared parts of one host, while it is open.

Children, and the services that they are offered, find here what is the host's: its
tables, its journal, its launcher. ``host`` adds the children.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import trio

from hostlib.allocator import return_free_pages, return_large_pieces
from hostlib.keys import SecretFiles, expand_path
from hostlib.linux.descriptors import clients_share, raise_limit
from hostlib.linux.holdings import Baseline
from hostlib.linux.host_proc import shows_host
from hostlib.listener_set import ListenerSet
from supervisor.fleet.fence import Fence
from supervisor.fsproxy.client_events import ClientEvents
from supervisor.fsproxy.dispatch import HANDLERS
from supervisor.fsproxy.ports import Services
from supervisor.fsproxy.pump import Pump
from supervisor.fsproxy.session import Session
from supervisor.sandbox.fork_watch import ForkWatch
from supervisor.sandbox.groups import Groups, Reserve
from supervisor.sandbox.host_directories import HiddenDirectories
from supervisor.sandbox.plan import Machine
from supervisor.spawn.process import LaunchpadLost
from supervisor.usage.workspace_sizes import WorkspaceSizes
from vfs.filesystem import Filesystem
from vfs.payload import DEFAULT_BUDGET_BYTES, PayloadBudget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hostlib.journal import Journal
    from hostlib.keys import FileIdentity
    from hostlib.log import Log
    from supervisor.fsproxy.ports import ChildView
    from supervisor.spawn.launcher import Launcher
    from vfs.clients import Client

TIDY_AFTER_S = (0.02, 0.1, 0.5)
"""Times at which groups with dying processes are removed again.

After them, the start of the next child does it.
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """Bounds of a host (face: [host] and [limits]).

    Attributes:
        max_write_bytes: largest WRITE (spec W3).
        payload_budget_bytes: memory for payloads over all clients (spec W3).
        clients_per_child: connections of one child, itself included (spec S7).
        deadline_s: for a message that began and a reply that is not taken (spec F8).
        grace_s: between SIGTERM and SIGKILL (spec S6).
        max_children: children at once.
        open_files_per_client: of a child for which nothing else is said.
        written: directories in which children and tools may have made links.
        hidden: directories that children see empty (``sandbox.host_directories``).
    """

    max_write_bytes: int = 16 * 1024 * 1024
    payload_budget_bytes: int = DEFAULT_BUDGET_BYTES
    clients_per_child: int = 64
    deadline_s: float = 30.0
    grace_s: float = 5.0
    max_children: int = 1000
    open_files_per_client: int = 256
    written: frozenset[str] = frozenset()
    hidden: tuple[str, ...] = ()


class Roster(Protocol):
    """Knows more of children than their processes tell: names, restarts, reasons.

    Attributes:
        log_dropped_bytes: output of children that no log could keep.
    """

    log_dropped_bytes: int

    @property
    def configured(self) -> int:
        """How many children stand in the configuration."""
        ...

    def extra_fields_of(self, child: ChildView) -> dict[str, object]:
        """Return what is to be added to a child's row of ``ps``."""
        ...

    def absent_rows(self) -> Iterable[dict[str, object]]:
        """Yield rows of children that have no process now."""
        ...


class Parts:
    """The shared parts of one host; ``Host`` is all of it.

    Attributes:
        generation: programs that this process was before (``handover``).
        baseline: descriptors and processes of before, for the leak check.
        door_sockets: accepts programs of all children without FD 3.
        services: its offers to children beside files.
        machine: its knowledge of the layers that this machine gives.
        groups: where its children's groups of processes come from.
        refused: how often limits of children that are gone refused something, by limit.
        fence: knows children of a fleet, and lets their effects go out.
        forks: which children run into their limit of processes again and again.
        sizes: how much was changed in the workspaces that children have.
        told_of_audits: the gaps of audits that the log has told of.
        mounting: held while a workspace that children share is mounted.
        apart: its own directories, which no child sees into.
        holders: each yields (descriptor, a word for it) that something beside the
            host's own parts holds: a control socket, a scratch directory.
        roster: adds to ``ps``; None without kept children.
        nursery: where what outlives a child's end runs; None before it is open.
    """

    def __init__(
        self, launcher: Launcher, settings: Settings, journal: Journal, log: Log
    ) -> None:
        self.generation = 0
        self.baseline = Baseline.now()
        self.holders: set[Callable[[], Iterable[tuple[int, str]]]] = set()
        self.apart = HiddenDirectories(settings.hidden)
        self.holders.add(self.apart.descriptors)
        self.launcher = launcher
        self.settings = settings
        self.journal = journal
        self.log = log
        self.pump = Pump()
        self.door_sockets = ListenerSet("door sockets")
        self.services = Services()
        self.machine = Machine(launcher.launchpad_pid)
        self.groups = Reserve()
        self.fence = Fence()
        self.refused: Counter[str] = Counter()
        self.forks = ForkWatch(journal)
        self.budget = PayloadBudget(settings.payload_budget_bytes)
        self.budget.on_freed = return_free_pages
        soft = raise_limit()
        return_large_pieces()
        self.fs = Filesystem(max_descriptors=clients_share(soft))
        self.fs.shows_host = shows_host
        self.events = ClientEvents(journal, self.child_of, log.write)
        self.fs.on_denied = self.events.denied
        if journal.is_on or log.writes("INFO"):
            self.fs.observer = self.events
        self.roster: Roster | None = None
        self.nursery: trio.Nursery | None = None
        self.told_of_audits: set[str] = set()
        self.mounting = trio.Lock()
        self.sizes = WorkspaceSizes()
        self._secret_files = SecretFiles()
        self._is_tidying = False

    def child_of(self, client: Client) -> str:
        """Return the id of the child behind a client."""
        return client.pipe_id.partition(":")[0]

    def hide_key_files(self, files: Mapping[str, FileIdentity]) -> None:
        """Keep files of keys from all children, by system calls and by FD 3."""
        if files:
            self._secret_files.add(files)
            self.fs.is_secret = self._secret_files
            self.apart.files |= frozenset(map(expand_path, files))

    def open_session(
        self,
        client: Client,
        fds: tuple[int, int],
        dialect: int,
        on_closed: Callable[[Session], None],
    ) -> Session:
        """Make the conversation of a client.

        Args:
            client: whose.
            fds: requests come from the first, replies go to the second; the session's.
            dialect: 1 or 2.
            on_closed: called once, when it is over.
        """
        return Session(
            self.pump,
            self.fs,
            client,
            *fds,
            self.budget,
            handlers=HANDLERS,
            services=self.services,
            dialect=dialect,
            max_write_bytes=self.settings.max_write_bytes,
            deadline_s=self.settings.deadline_s,
            on_closed=on_closed,
            check_effect=self.fence.check_of(self.child_of(client)),
        )

    async def restock(self) -> None:
        """Make the next child's groups, so that it may wait in them (ADR 47)."""
        spare = self.groups.restock()
        if spare is not None:
            with contextlib.suppress(LaunchpadLost):  # its owner hears of it
                await self.launcher.spare(spare.describe_groups())

    def give_groups_back(self, groups: Groups) -> None:
        """Remove the groups of a child that is gone, or see to it that they go soon."""
        is_gone = self.groups.give_back(groups)
        if not is_gone and not self._is_tidying and self.nursery is not None:
            self._is_tidying = True
            self.nursery.start_soon(self._tidy)

    async def _tidy(self) -> None:
        for pause_s in TIDY_AFTER_S:
            await trio.sleep(pause_s)
            if self.groups.tidy():
                break
        self._is_tidying = False
