"""The layers of a child: profiles, their requests, and the results.

1. A requested layer that fails ends the child that tried it: no child runs in less than
   it reports.
2. A layer that this machine lacks and the profile does not require is left out, with the
   reason in the report. A failure that a child could cause (no memory, 16 layers of
   Landlock) refuses the start; a process without the child's files decides
   (``sandbox.orders``).
3. A missing required layer refuses the start: which, why, remedy.
4. A host of root never starts a child as root because ``uid`` failed.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from hostlib.linux.namespace_counts import is_disabled
from supervisor.sandbox import ownership, seccomp_filter
from supervisor.sandbox.groups import GroupBounds
from supervisor.spawn.request import SpawnError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from supervisor.sandbox.shown_files import ShownFiles

NONE, AUTO, REQUIRED = "none", "auto", "required"

LAYERS = {
    "no_new_privs": "Linux 3.5 or newer",
    "capabilities": "Linux 2.6.25 or newer",
    "rlimits": "getrlimit(2)",
    "landlock": "Linux 5.13 or newer, started with 'landlock' among its lsm= modules",
    "seccomp": "Linux with CONFIG_SECCOMP_FILTER, on x86_64 or aarch64",
    "uid": "a host that is root, with the layer mountns and a file system that can"
    " show its files as another user's (Linux 5.12)",
    "userns": "unprivileged user namespaces (sysctl user.max_user_namespaces,"
    " kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)",
    "mountns": "a host that is root, or the layer userns; Linux 5.12 or newer",
    "pidns": "a host that is root, or the layer userns; with the layer mountns",
    "netns": "a host that is root, or the layer userns",
    "ipcns": "a host that is root, or the layer userns",
    "utsns": "a host that is root, or the layer userns",
    "cgroup": "a cgroup that is this user's to divide (systemd: Delegate=yes)",
}
"""Every layer that a profile can name, and its requirements."""

FIRST_USER = ownership.KEEPER + 1
"""First user of root's children, above all subordinate users (login.defs(5))."""

USERS = 767
"""For each pid of a host: so many go into 32 bits for every pid that there can be (2**22),
none of them the last number, which means "nobody"."""

NEEDS_MOUNTNS = ("uid", "pidns")
"""Layers that are nothing without the layer mountns, on whatever machine."""

_ALWAYS = frozenset({"no_new_privs", "capabilities"})
"""Part of every profile but ``none``: they cost nothing and everybody has them."""

NAMESPACES = ("mountns", "pidns", "netns", "ipcns", "utsns")
"""Layers that root makes as it is, and anybody else within a user namespace."""

KEEP_NETWORK = frozenset({"netns", "seccomp"})
"""Layers of which a child with the network ``none`` has one, or it is not kept so."""

SERVES_NETWORK = ("netns", "mountns")
"""Layers without which a network by name is not kept: a namespace for its sockets, and a
root in which no socket is seen by which the host resolves names (spec NET4, NET9)."""

OF_PATHS = frozenset({"mountns", "landlock", "uid"})
"""Layers that can fail for what lies under a child's names; others know none."""

_OF_THE_MACHINE = frozenset(
    {
        errno.ENOSYS,
        errno.EPERM,
        errno.EACCES,
        errno.EINVAL,
        errno.EOPNOTSUPP,
        errno.ENOENT,
        errno.ENODEV,
        errno.EROFS,
    }
)
"""Errors of a kernel that has no such layer, or does not give it to this user."""

_OF_ONE_GROUP = frozenset({errno.ENOENT, errno.ENODEV})
"""Errors of a group that was removed before its child joined it (cgroups(7))."""


@dataclass(frozen=True, slots=True)
class Profile:
    """The walls that a child is to have.

    Attributes:
        name: as the user writes it.
        layers: the layers that a user asks for.
        required: of these, what the child is not started without.
        unix_sockets: it may make sockets of the family unix, which reach whatever of
            their paths it sees. FD 3 and pairs do not, but for pairs of datagrams.
    """

    name: str
    layers: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    unix_sockets: bool = True


PROFILES = {
    NONE: Profile(NONE),
    AUTO: Profile(AUTO, frozenset(LAYERS)),
    REQUIRED: Profile(
        REQUIRED, frozenset(LAYERS), frozenset({"landlock", "seccomp", *_ALWAYS})
    ),
}
"""Those that need no configuration."""


def make_profile(
    name: str, layers: Iterable[str] | None, required: Iterable[str] = ()
) -> Profile:
    """Return a profile of the configuration; ``layers`` None are all."""
    wanted = frozenset(LAYERS if layers is None else layers) | _ALWAYS
    return Profile(name, wanted, frozenset(required))


@dataclass(slots=True)
class Walls:
    """The outcome of a profile for one child: its effective isolation.

    Attributes:
        profile: the profile's name.
        network: ``none``, ``host``, ``rules`` or ``learn``: what it has.
        applied: (layer, detail), as the child said before its exec; without walls, as
            the list of calls says that it made.
        missing: reason by layer that it goes without.
    """

    profile: str = NONE
    network: str = "host"
    applied: tuple[tuple[str, str], ...] = ()
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def lost(self) -> dict[str, str]:
        """The reason by layer that this machine did not give, though it was asked for.

        ``uid`` is none of them: it takes a host that is root, which starts no
        child without it (rule 4).
        """
        return {
            layer: why
            for layer, why in self.missing.items()
            if layer in LAYERS and layer != "uid"
        }

    @property
    def label(self) -> str:
        """The profile's name, and how many of its layers the machine did not give."""
        return f"{self.profile}-{len(self.lost)}" if self.lost else self.profile

    def row(self) -> dict[str, object]:
        """Return it as JSON: ``ps``, the journal and ``doctor`` show this."""
        return {
            "label": self.label,
            "profile": self.profile,
            "layers": [name for name, _ in self.applied],
            "details": dict(self.applied),
            "missing": dict(self.missing),
            "network": self.network,
        }


class Machine:
    """One host's knowledge of its machine, and the users that it has given out.

    Args:
        launchpad_pid: lives as long as the host and is no host: its range of users is
            this host's as well. None: there is none.

    Attributes:
        lacking: reason by layer that could not be had.
        ungiven: of these, the layers that a sysctl forbids, which can change.
        told: (policy, layer) of the losses that the log tells of already.
    """

    def __init__(self, launchpad_pid: int | None = None) -> None:
        self.lacking: dict[str, str] = {}
        self.ungiven: set[str] = set()
        self.told: set[tuple[str | None, str]] = set()
        self._users: Counter[int] = Counter()
        self.launchpad_pid = launchpad_pid
        if os.geteuid() != 0:
            self.lacking["uid"] = "the host is not root"
        elif why_not := ownership.find_chown_fault(FIRST_USER + os.getpid() * USERS):
            self.lacking["uid"] = why_not
        try:
            seccomp_filter.build_here(network=False)
        except seccomp_filter.UnknownMachineError as why:
            self.lacking["seccomp"] = f"no list of system calls for {why}"

    def look_again(self) -> None:
        """Forget that a layer cannot be had, if its sysctl was raised."""
        for layer in tuple(self.ungiven):
            if not is_disabled(layer):
                self.ungiven.discard(layer)
                self.lacking.pop(layer, None)

    def take_user(self) -> int:
        """Return a user number that no other child of this machine's hosts has.

        Raises:
            SpawnError: there is none left.
        """
        # A host's own, by its pids: two hosts that live have none in common.
        pids = (os.getpid(), self.launchpad_pid)
        firsts = [FIRST_USER + pid * USERS for pid in pids if pid is not None]
        own = chain.from_iterable(range(first, first + USERS) for first in firsts)
        user = next((number for number in own if number not in self._users), None)
        if user is None:
            count = USERS * len(firsts)
            why = f"all {count} users of this host have one"
            text = f"cannot start a child: {why}; run a second host"
            raise SpawnError(errno.EAGAIN, "uid", text, why)
        self._users[user] += 1
        return user

    @property
    def users(self) -> frozenset[int]:
        """The user numbers that children have."""
        return frozenset(self._users)

    def keep_user(self, user: int) -> None:
        """Count one more child that has a user."""
        self._users[user] += 1

    def give_user_back(self, user: int) -> None:
        """Count one child less that has this user; nothing of it is left."""
        self._users[user] -= 1
        if not self._users[user]:
            del self._users[user]


@dataclass(slots=True)
class Plan:
    """The layers that one child is asked to put on; made again for each attempt.

    Attributes:
        profile: the profile.
        network: ``none``, ``host``, ``rules`` or ``learn``.
        machine: the layers that this machine gives, as far as they are known.
        missing: reason by layer that this child goes without.
        vanished: of these, layers whose part for this child was gone before it was put
            on. Other children have them.
    """

    profile: Profile
    network: str
    machine: Machine
    missing: dict[str, str] = field(default_factory=dict)
    vanished: dict[str, str] = field(default_factory=dict)

    def wanted(self) -> set[str]:
        """Return the layers to ask for.

        Raises:
            SpawnError: one that is required cannot be had, or root's child no user.
        """
        self.missing.clear()
        self.machine.look_again()
        layers = set(self.profile.layers)
        for layer, why in (self.machine.lacking | self.vanished).items():
            self.leave(layers, layer, why)
        if os.geteuid() == 0:
            why = "the host is root and makes the other namespaces without one"
            self.drop(layers, "userns", why)
        if self.network == "host":
            why = "the network 'host' leaves the child in the host's"
            self.drop(layers, "netns", why)
        if os.geteuid() != 0 and "userns" not in layers:
            for layer in NAMESPACES:
                self.leave(layers, layer, "neither root nor a user namespace")
        for layer in NEEDS_MOUNTNS:
            if "mountns" not in layers:
                self.leave(layers, layer, "needs the layer mountns")
        return layers

    def drop(self, layers: set[str], layer: str, why: str) -> None:
        """Do without a layer that has no use here: the child lacks nothing by that.

        Raises:
            SpawnError: it is required all the same; nothing that a machine could give
                would help.
        """
        layers.discard(layer)
        if layer in self.profile.required:
            text = (
                f"cannot start a child: the sandbox layer {layer!r} is required and not"
                f" made here: {why}; take it out of 'required'"
            )
            raise SpawnError(errno.EINVAL, layer, text, why)

    def leave(self, layers: set[str], layer: str, why: str) -> None:
        """Do without a layer, if it was asked for.

        Raises:
            SpawnError: it is required, or what keeps the child from being root (rule 4).
        """
        if layer in layers:
            layers.discard(layer)
            self.missing[layer] = why
            if layer in self.profile.required:
                raise missing_layer(layer, why)
            if layer == "uid" and os.geteuid() == 0:
                raise would_be_root(why)

    def failed(self, error: SpawnError) -> bool:
        """Record that a layer failed with nothing of any child's.

        Returns:
            Whether the start is to be tried without it.

        Raises:
            SpawnError: it is required, or what keeps the child from being root (rule 4).
        """
        layer = error.stage
        if not is_of_the_machine(error):
            return False
        if layer in self.profile.required:
            raise missing_layer(layer, error.reason, error.errno)
        if layer == "uid":  # not noted: the next start asks again
            raise would_be_root(error.reason, error.errno)
        if layer == "cgroup" and error.errno in _OF_ONE_GROUP:
            self.vanished[layer] = error.reason
            return True
        self.machine.lacking[layer] = error.reason
        if error.errno == errno.ENOSPC:
            self.machine.ungiven.add(layer)
        return True


def is_of_the_machine(error: SpawnError) -> bool:
    """Tell whether it may be the machine that lacks what failed here."""
    if error.errno == errno.ENOSPC:  # otherwise users of this machine cause it
        return is_disabled(error.stage)
    return error.stage in LAYERS and error.errno in _OF_THE_MACHINE


def missing_layer(layer: str, why: str, number: int = errno.ENOSYS) -> SpawnError:
    """Word that a required layer cannot be had."""
    text = (
        f"cannot start a child: the sandbox layer {layer!r} is required and missing:"
        f" {why}; it takes {LAYERS[layer]}"
    )
    return SpawnError(number, layer, text, why)


def not_served(layer: str, why: str, number: int = errno.ENOSYS) -> SpawnError:
    """Word that a network by name cannot be kept: a layer that it takes is missing."""
    text = f"cannot keep the network's rules: the sandbox layer {layer!r} is missing"
    text = f"cannot start a child: {text}: {why}; it takes {LAYERS[layer]}"
    return SpawnError(number, layer, text, why)


def would_be_root(why: str, number: int = errno.EPERM) -> SpawnError:
    """Word that a child of a host that is root cannot have a user of its own (rule 4)."""
    how = "to start it as root, name a profile without the layer 'uid'"
    text = f"cannot start a child as a user of its own: {why}; {how}"
    return SpawnError(number, "uid", text, why)


@dataclass(slots=True)
class WantedWalls:
    """The walls that a child is to have, and the parts made ready for it.

    Attributes:
        profile: the layers.
        network: ``none``, ``host``, ``rules`` or ``learn``.
        files: the files that it is to see.
        bounds: its cgroups.
        is_served: the host serves its net namespace: names, published ports.
        user: a user that may be given to it, None for none.
        made_in: a descriptor of the parent of its own directories, for reading, owned by
            the caller; -1 without one.
        locks: descriptors of the locks of its workspaces, owned by the caller.
        joined: namespaces by name (``launchpad.order``) of the child whose tool this is:
            its users, its mounts if it has made those without a descriptor, its network
            if that is joined; owned by the caller.
        has_command: ``sandhost`` is to be in its ``/usr/local/bin``.
    """

    profile: Profile
    network: str
    files: ShownFiles
    bounds: GroupBounds = field(default_factory=GroupBounds)
    is_served: bool = False
    user: int | None = None
    made_in: int = -1
    locks: tuple[int, ...] = ()
    joined: Mapping[str, int] = field(default_factory=dict)
    has_command: bool = False
