"""Starting a tool's process: in all that its child runs in, or as the host runs.

Rule: what a narrowed token starts has no way to the model, nor to its child's names, for
its holder may have none.
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
"""Errors of these where the kernel lacks them (before 4.10, or gVisor), or refuses."""


class Owner(Protocol):
    """The executions of a child, as the start of one needs them.

    Attributes:
        host: whose child it is.
        child: the child.
        lacks_doors: its log says that its tools have no way to the model.
    """

    host: Parts
    child: ChildView
    lacks_doors: bool


def with_doors(owner: Owner, plan: SpawnPlan) -> SpawnPlan:
    """Return a plan whose tool reaches the model, and names, as its child does (MD1).

    The sidecar's value wins. One that runs as the host does belongs to no child alone.
    Where the kernel does not give the net namespace of the child, a tool starts
    without.
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
    """Return a socket in the net namespace in which its child has names; -1 for none."""
    names = owner.host.services.network
    return -1 if names is None else names.inner_fd(owner.child.id)


def _can_join(owner: Owner, doors: Doors) -> bool:
    """Tell whether a tool can join the namespaces of its child's doors; say once if not.

    Raises:
        OSError: the host lacks something now.
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
def _joined(
    owner: Owner, plan: SpawnPlan, wanted: Wanted
) -> Iterator[Mapping[str, int]]:
    """Give the namespaces that a tool joins, for its start."""
    # Asked for here: a number that was kept may be another socket's by now.
    doors = _doors_of(owner) if plan.asks_model else None
    inner_fd = -1 if doors is None else doors.listener_fd
    if plan.reaches_names:  # the same namespace
        inner_fd = _names_fd(owner)
    with _namespaces(inner_fd) as joined:
        yield {**joined, **wanted.joined}


@contextmanager
def _namespaces(inner_fd: int) -> Iterator[Mapping[str, int]]:
    """Give the namespaces that a child made a socket in; none for -1, the host's own."""
    if inner_fd < 0:
        yield {}
        return
    with ExitStack() as stack:
        net = open_net_namespace(inner_fd)
        stack.callback(os.close, net)
        joined = {NET: net}
        if os.geteuid() != 0:  # the user namespace that the child made it in
            joined[USERS] = open_user_namespace(net)
            stack.callback(os.close, joined[USERS])
        yield joined


async def launch(
    owner: Owner, plan: SpawnPlan, request: SpawnRequest
) -> SpawnedProcess:
    """Start what a plan says, for one child.

    Args:
        owner: the executions of that child.
        plan: what is to be started.
        request: the same, for the launcher.

    Raises:
        SpawnError: it did not start.
        LaunchpadLost: nothing can be started any more.
    """
    host, child = owner.host, owner.child
    wanted = child.wanted
    if not plan.is_walled or wanted is None:
        return await child.launcher.spawn(request)
    # No less than the child has: what cannot be had here refuses the start, and
    # says nothing of the machine, for the workspace may be on any file system.
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
        # Where they are now: a tool may have moved what they lie in.
        hidden=host.apart.locations(child.spec.made_in),
    )
    with _joined(owner, plan, wanted) as wanted.joined:
        process, _ = await start.spawn(child.launcher, host.machine, request, wanted)
    return process
