"""The description of a child: one frozen record from the command line or code."""

from __future__ import annotations

import errno
import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from hostlib.linux.syscalls import open_exactly
from hostlib.messages import remedy
from hostlib.user_values import Limits
from supervisor.fleet.fence import FleetLife  # noqa: TC001 - as below
from supervisor.network.section import NetworkSection  # noqa: TC001 - as below
from supervisor.sandbox.link_checks import check_ways
from supervisor.sandbox.plan import PROFILES, Profile
from supervisor.workspace.use import WorkspaceUse  # noqa: TC001 - a hand-over reads it
from vfs.errors import AccessDeniedError
from vfs.places import PUBLISH_DIRECT, Place, close_places, open_place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MINIMAL_ENV = ("PATH", "HOME", "LANG", "TERM")
"""Variables of the host's environment that a child gets by default."""

_UNLIMITED = Limits()


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The description of a child.

    Attributes:
        command: program and arguments.
        cwd: its working directory.
        root: its private root; the restricted view's relative names start here.
        run_dir: a directory of its own for sockets that services offer it; None if
            nothing is configured that needs one.
        made_in: a descriptor of the directory in which ``run_dir`` was made, owned by the
            caller for as long as there is such a child; -1 without one.
        env: its whole environment, without the door's variables.
        own_env: names in it that were set for this child; no service changes these.
        top_level: it may take the top-level view (spec A1).
        read: grants to read, as the host sees the paths.
        write: grants to write.
        dialect: 1 or 2 (spec O5).
        transport: ``socketpair`` or ``pipes`` (spec T1).
        publish: when a ``w`` shows in the root and the grants (spec A3b).
        durability: when fsync is paid: ``none``, ``close``, ``write``.
        timeout_s: its time limit, seconds; None for none.
        max_open_files: most files open at once.
        max_bytes: most that files may grow by, bytes.
        max_files: most files that may be made.
        max_file_bytes: the largest that a file may grow to.
        rlimits: (resource, soft, hard) as for setrlimit(2).
        stdio: the host's descriptors that become 0, 1 and 2.
        stop_signal: the signal that asks it to end.
        tools: the tools that may be run for it; None for those of every sidecar.
        umask: None for the host's.
        sandbox: the layers that it runs in.
        network: ``none``, ``host``, ``rules`` or ``learn``; without layers it has the
            host's in place of ``none``.
        network_keys: the settings of names that it may reach, and of its ports that are
            published; None if the host serves nothing in its net namespace.
        group_limits: the bounds of its cgroups, over all its processes.
        tmp_dir: its TMPDIR, if that is its own to write in a sandbox.
        home_dir: its HOME, as above.
        kept_home: a directory of the operator that it has as its HOME, to write.
        expose: paths that the operator shows it, to read and execute by system calls.
        home_files: the first entries of its HOME, if that is its own and empty.
        template_env: variables of a recipe, with places that are filled in at its start.
        template_files: of a recipe, entries of HOME with such places.
        audit: the journal is told which files of its workspaces it opens and changes.
        name: its name in a configuration; None for one that has none.
        model: the model that it may ask; None for the one of its view (spec L6).
        quota: weighted tokens for it and all nested in it; None for the host's alone.
        image_tokens: reserved for each image that it shows a model; None for the default.
        workspaces: directories in which it works by system calls of its own.
        has_workspace_root: its private root is the first of these; ``root`` is the path
            under which it sees that.
        account: the name of its charges, also over its restarts; None for those of
            a child that no configuration names, which end with it.
        policy: the policy of a configuration that it is under, if it is under one.
        fleet: its life in the fleet; None for a child of this host alone.
    """

    command: tuple[str, ...]
    cwd: str
    root: str
    run_dir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    top_level: bool = False
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    dialect: int = 2
    transport: str = "socketpair"
    publish: str = PUBLISH_DIRECT
    durability: str = "none"
    timeout_s: float | None = None
    max_open_files: int = 256
    max_bytes: int | None = None
    max_files: int | None = None
    max_file_bytes: int | None = None
    rlimits: tuple[tuple[int, int, int], ...] = ()
    stdio: tuple[int, int, int] = (0, 1, 2)
    stop_signal: int = signal.SIGTERM
    umask: int | None = None
    name: str | None = None
    tools: frozenset[str] | None = None
    sandbox: Profile = PROFILES["none"]
    network: str = "none"
    network_keys: NetworkSection | None = None
    tmp_dir: str | None = None
    group_limits: Limits = _UNLIMITED
    model: str | None = None
    quota: float | None = None
    image_tokens: int | None = None
    account: str | None = None
    made_in: int = -1
    policy: str | None = None
    own_env: frozenset[str] = frozenset()
    workspaces: tuple[WorkspaceUse, ...] = ()
    home_dir: str | None = None
    kept_home: str | None = None
    has_workspace_root: bool = False
    expose: tuple[str, ...] = ()
    home_files: dict[str, str] = field(default_factory=dict)
    template_env: dict[str, str] = field(default_factory=dict)
    template_files: dict[str, str] = field(default_factory=dict)
    audit: bool = False
    fleet: FleetLife | None = None

    @property
    def walls_env(self) -> dict[str, str]:
        """The variables for a nested child's relay; none for the usual profile."""
        env = {} if self.sandbox.layers else {"FSPROXY_SANDBOX": "none"}
        if self.sandbox.layers and self.network == "host":
            env["FSPROXY_NETWORK"] = "host"
        if self.workspaces and self.workspaces[0].is_writable:
            env["FSPROXY_WORKSPACE"] = self.workspaces[0].base
        return env

    def is_within_reach(self, url: str | None) -> bool:
        """Return whether its walls let it reach a listener of the host.

        Args:
            url: of a listener that is not the child's own; a socket's path is in no
                directory that every profile admits. None without a listener.
        """
        if url is None or not self.sandbox.layers:
            return url is not None
        return self.network == "host" and not url.startswith("unix:")

    @property
    def own_dirs(self) -> tuple[str, ...]:
        """The directories that the child may write in each profile."""
        own = (self.tmp_dir, self.run_dir, self.home_dir)
        return tuple(path for path in own if path is not None)

    @property
    def written_dirs(self) -> dict[str, bool]:
        """Every directory in which the child may have made what is there.

        And whether it may read it.
        """
        whole = self.own_dirs
        if not self.has_workspace_root:
            whole = (*whole, self.root)
        if self.kept_home is not None:
            whole = (*whole, self.kept_home)
        granted = {path: path in (*self.read, *whole) for path in self.write}
        return {**dict.fromkeys(whole, True), **granted}

    @property
    def _linked_roots(self) -> tuple[str, ...]:
        """Its root, if the child may have made links there that the host sees."""
        is_apart = self.has_workspace_root and self.workspaces[0].mode != "direct"
        return () if is_apart else (self.root,)

    @property
    def _has_made_root(self) -> bool:
        """Whether its root was made with its TMPDIR (``scratch``, rule 4)."""
        tmp = self.tmp_dir
        return tmp is not None and os.path.dirname(tmp) == os.path.dirname(self.root)  # noqa: PTH120 - text

    @property
    def top_level_word(self) -> str:
        """The right as the child's environment says it."""
        return "true" if self.top_level else "false"

    @property
    def _grants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.read, *self.write)))

    def readable(self, places: Iterable[Place]) -> tuple[str, ...]:
        """Return the grants to read, without links; ``places`` are of ``open_places``."""
        granted = tuple(places)[1:]
        return tuple(
            os.fsdecode(place.prefixes[-1])
            for path, place in zip(self._grants, granted, strict=True)
            if path in self.read
        )

    @contextmanager
    def run_dir_held(self) -> Iterator[int]:
        """Open ``run_dir``, for as long as a block lasts.

        It is the directory that was made, even if its parent was replaced (``scratch``, rule
        3); without ``made_in`` it is the directory of that name, reached without links.

        Returns:
            A descriptor, for reading.

        Raises:
            OSError: there is none, or a link in its place.
        """
        if self.run_dir is None:
            raise FileNotFoundError(errno.ENOENT, "it has no directory of its own")
        path = self.run_dir if self.made_in < 0 else os.path.basename(self.run_dir)  # noqa: PTH119 - text
        found = open_exactly(os.fsencode(path), self.made_in)
        try:
            dir_fd = os.open(
                ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=found
            )
        finally:
            os.close(found)
        try:
            yield dir_fd
        finally:
            os.close(dir_fd)

    def open_places(
        self, written: Iterable[str] = (), root: Place | None = None
    ) -> tuple[Place, ...]:
        """Resolve and hold the root and the grants (spec A3).

        Args:
            root: its root, if that is held already; it is owned from now on.
            written: more directories in which a child or a tool may have made links.

        Raises:
            OSError: one of them cannot be reached, or the root is no directory; its path
                is in ``filename``.
        """
        hold = partial(open_place, publish=self.publish, durability=self.durability)
        if root is None:
            root = hold(self.root, read=True, write=True, relative=b"")
        places = [root]
        try:
            _check_directory(self.root, places[0])
            grants = self._grants
            for path in grants:
                may_read, may_write = path in self.read, path in self.write
                with _granted("read" if may_read else "write", path):
                    places.append(hold(path, read=may_read, write=may_write))
            paths = (os.fsdecode(place.prefixes[-1]) for place in places)
            held = dict(zip((self.root, *grants), paths, strict=True))
            if self._has_made_root:
                _check_way(self.root, held[self.root])
            for path in grants:
                self._check_grant(path, held[path])
            check_ways(held, (*written, *self._linked_roots, *self.write))
        except BaseException:
            close_places(places)
            raise
        return tuple(places)

    def _check_grant(self, path: str, real: str) -> None:
        """Raise ``OSError`` for a grant that goes round a workspace, to its base.

        Args:
            path: as it is written.
            real: the same without links.
        """
        for use in self.workspaces:
            if use.mode == "direct":
                continue
            if f"{real}/".startswith(f"{use.base}/"):
                how = f"it lies in workspace {use.base!r}, and names the base"
            elif path in self.write and f"{use.base}/".startswith(f"{real}/"):
                how = f"it may be written and holds the base of workspace {use.base!r}"
            else:
                continue
            raise OSError(errno.EINVAL, f"{how}; leave the grant out", path)


@contextmanager
def _granted(key: str, path: str) -> Iterator[None]:
    """Say of an error of the system that it is a grant's, and where that is written."""
    try:
        yield
    except (OSError, AccessDeniedError) as error:
        why = not_held(path, error)
        text = f"{why.strerror} (granted by --{key}, or by {key} of its policy)"
        raise OSError(why.errno, f"{text}{remedy(why)}", why.filename) from None


def not_held(path: str, error: OSError | AccessDeniedError) -> OSError:
    """Return why a grant cannot be held in the words of the kernel, and with a path.

    Args:
        path: as it is written.
        error: of ``open_place``.
    """
    if not isinstance(error, OSError):
        # As many links as the kernel follows, and nothing behind them.
        return OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    why = error
    if error.errno == errno.EISDIR:
        # It ends as a directory's name does, and names a file, or nothing.
        try:
            os.stat(path)  # noqa: PTH116 - pathlib drops that end
        except OSError as told:
            why = told
    return OSError(why.errno, why.strerror, error.filename or path)


def _check_directory(path: str, root: Place) -> None:
    """Raise ``OSError`` if what is held is a file, or one that is yet to be made.

    That is a grant; as a root it would answer every name with "not available".
    """
    if root.only is None:
        return
    # A command that shows only the reason (``ps``) still says what it is about.
    if os.path.exists(path):  # noqa: PTH110 - a str, and no pathlib yet
        why = "the root is no directory; name another, or put a directory there"
        raise NotADirectoryError(errno.ENOTDIR, why, path)
    why = "there is no such root; make it first"
    raise FileNotFoundError(errno.ENOENT, why, path)


def _check_way(root: str, held: str) -> None:
    """Raise ``OSError`` if a root that was made here is reached by a link now."""
    if held != root:
        why = (
            "a link has come to stand on the way to it; have it made where nobody else"
            " writes (TMPDIR; of a daemon [host] state_dir)"
        )
        raise OSError(errno.ELOOP, why, root)


def minimal_env(tmp: str) -> dict[str, str]:
    """Return the environment of a child for which nothing else is said."""
    env = {name: os.environ[name] for name in MINIMAL_ENV if name in os.environ}
    env.setdefault("PATH", os.defpath.lstrip(":"))
    env["TMPDIR"] = tmp
    return env
