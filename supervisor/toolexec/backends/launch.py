"""Starts a tool's process in the walls of its child, or as the host runs.

A tool that is started with a narrowed token has no way to the model or to its child's
names: the holder of the token may have neither.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from hostlib.linux.net_namespace import open_net_namespace, open_user_namespace
from supervisor.fsproxy.ports import is_withheld
from supervisor.sandbox import start
from supervisor.spawn.launchpad.words import NET, USERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from supervisor.fsproxy.ports import ChildView, Doors
    from supervisor.parts import Parts
    from supervisor.sandbox.plan import Wanted
    from supervisor.spawn.process import SpawnedProcess
    from supervisor.spawn.request import SpawnRequest
    from supervisor.toolexec.routes import SpawnPlan


_NOT_GIVEN = frozenset({errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM})
"""Errors of these calls on a kernel without them (before 4.10, or gVisor)."""


class Owner(Protocol):
    """The executions of a child, as far as a start needs them.

    Attributes:
        host: has the child.
        child: the child.
        lacks_doors: whether the log says that its tools have no way to the model.
    """

    host: Parts
    child: ChildView
    lacks_doors: bool


def add_doors(owner: Owner, plan: SpawnPlan) -> SpawnPlan:
    """Return a plan whose tool reaches the model, and names, as its child does (MD1).

    The sidecar's value wins. A tool that runs as the host does belongs to no child. A
    kernel that refuses the net namespace of the child starts the tool without it.
    """
    if plan.is_walled and _names_fd(owner) >= 0:
        plan = replace(plan, reaches_names=True)
    doors = _doors_of(owner) if plan.is_walled else None
    if doors is None or not _can_join(owner, doors):
        return plan
    offered = {n: v for n, v in doors.env.items() if not is_withheld(n, plan.env)}
    return replace(plan, env={**offered, **plan.env}, asks_model=True)


def _doors_of(owner: Owner) -> Doors | None:
    model, session = owner.host.services.llm, owner.child.session
    if model is None or session is None:
        return None
    return model.doors_of(session.client)


def _names_fd(owner: Owner) -> int:
    """Return a socket in the net namespace where its child has names; -1 for none."""
    names = owner.host.services.network
    return -1 if names is None else names.inner_fd(owner.child.id)


def _can_join(owner: Owner, doors: Doors) -> bool:
    """Return whether a tool can join its child's namespaces; log once if not.

    Raises:
        OSError: a resource of the host is missing.
    """
    try:
        with _namespaces(doors.listener_fd):
            return True
    except OSError as why:
        if why.errno not in _NOT_GIVEN:
            raise
        if not owner.lacks_doors:
            owner.lacks_doors = True
            text = (
                f"Tools have no way to the model: {why.strerror} (SIOCGSKNS); they run"
                " without OPENAI_BASE_URL, and their child asks in their place"
            )
            owner.host.log.write(
                "WARNING", text, child_id=owner.child.id, reason=why.strerror
            )
        return False


@contextmanager
def _open_namespaces(
    owner: Owner, plan: SpawnPlan, wanted: Wanted
) -> Iterator[Mapping[str, int]]:
    """Yield the namespaces that a tool joins at its start."""
    # Asked for now: an old number may be another socket's.
    doors = _doors_of(owner) if plan.asks_model else None
    inner_fd = -1 if doors is None else doors.listener_fd
    if plan.reaches_names:  # the same namespace
        inner_fd = _names_fd(owner)
    with _namespaces(inner_fd) as joined:
        yield {**joined, **wanted.joined}


@contextmanager
def _namespaces(inner_fd: int) -> Iterator[Mapping[str, int]]:
    """Yield the namespaces of a socket that a child has made; none for -1."""
    if inner_fd < 0:
        yield {}
        return
    with ExitStack() as stack:
        net = open_net_namespace(inner_fd)
        stack.callback(os.close, net)
        joined = {NET: net}
        if os.geteuid() != 0:  # the user namespace in which the child made it
            joined[USERS] = open_user_namespace(net)
            stack.callback(os.close, joined[USERS])
        yield joined


async def launch(
    owner: Owner, plan: SpawnPlan, request: SpawnRequest
) -> SpawnedProcess:
    """Start the process of a plan for one child.

    Args:
        owner: the executions of that child.
        plan: the process.
        request: the same, for the launcher.

    Raises:
        SpawnError: it did not start.
        LaunchpadLost: no process can be started any more.
    """
    host, child = owner.host, owner.child
    wanted = child.wanted
    if not plan.is_walled or wanted is None:
        return await child.launcher.spawn(request)
    # With all walls of the child: a missing layer refuses the start, and is not
    # recorded for the machine, since the workspace may be on any file system.
    kept: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    if child.spec.workspaces:
        from supervisor.workspace.view import unmounted  # noqa: PLC0415 - with one

        kept, unwritten = unmounted(child.spec, wanted)
    layers = frozenset(name for name, _ in child.walls.applied)
    wanted = replace(
        wanted,
        profile=replace(wanted.profile, layers=layers, required=layers),
        cwd=plan.cwd,
        own=(),
        shared=plan.shared,
        kept=(*plan.kept, *kept),
        programs=plan.programs,
        unwritten=unwritten,
        # The present paths: a tool may have moved their parents.
        hidden=host.apart.locations(child.spec.made_in),
    )
    with _open_namespaces(owner, plan, wanted) as wanted.joined:
        process, _ = await start.spawn(child.launcher, host.machine, request, wanted)
    return process
