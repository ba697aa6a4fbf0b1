"""Starts a tool's process in the walls of its child, or as the host runs.

A tool that is started with a narrowed token has no way to the model or to its child's
names: the holder of the token may have neither.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from hostlib.linux.net_namespace import open_net_namespace, open_user_namespace
from supervisor.fsproxy.ports import is_withheld
from supervisor.sandbox import start
from supervisor.sandbox.plan import LAYERS
from supervisor.spawn.launchpad.words import NET, USERS
from supervisor.spawn.request import SpawnRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from supervisor.fsproxy.ports import ChildView
    from supervisor.parts import Parts
    from supervisor.spawn.process import SpawnedProcess
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


def open_doors(
    owner: Owner, plan: SpawnPlan, stack: ExitStack
) -> tuple[dict[str, str], Mapping[str, int]]:
    """Return a tool's environment and namespaces, with doors as its child (MD1).

    The sidecar's value wins. A kernel that refuses the net namespace of the child starts
    the tool without the model. Where the child has names, they are in that namespace.

    Args:
        owner: the executions of the child.
        plan: of a tool in the child's walls.
        stack: closes the namespaces.

    Raises:
        OSError: a resource of the host is missing.
    """
    services, session = owner.host.services, owner.child.session
    env, joined = plan.env, {}
    doors = None
    if services.llm is not None and session is not None:
        doors = services.llm.doors_of(session.client)
    if doors is not None:
        try:
            joined = _open_namespaces(doors.listener_fd, stack)
        except OSError as why:
            if why.errno not in _NOT_GIVEN:
                raise
            _tell_lacking(owner, why)
        else:
            offered = {n: v for n, v in doors.env.items() if not is_withheld(n, env)}
            env = {**offered, **env}
    if services.network is not None and not joined:
        inner_fd = services.network.inner_fd(owner.child.id)
        joined = _open_namespaces(inner_fd, stack)
    return env, joined


def _open_namespaces(inner_fd: int, stack: ExitStack) -> dict[str, int]:
    """Return the namespaces of a socket that a child has made; none for -1."""
    if inner_fd < 0:
        return {}
    net = open_net_namespace(inner_fd)
    stack.callback(os.close, net)
    joined = {NET: net}
    if os.geteuid() != 0:  # the user namespace in which the child made it
        joined[USERS] = open_user_namespace(net)
        stack.callback(os.close, joined[USERS])
    return joined


def _tell_lacking(owner: Owner, why: OSError) -> None:
    """Log once that a child's tools cannot join its namespaces."""
    if owner.lacks_doors:
        return
    owner.lacks_doors = True
    text = (
        f"Tools have no way to the model: {why.strerror} (SIOCGSKNS); they run"
        " without OPENAI_BASE_URL, and their child asks in their place"
    )
    owner.host.log.write("WARNING", text, child_id=owner.child.id, reason=why.strerror)


async def launch(
    owner: Owner,
    plan: SpawnPlan,
    cwd_fd: int,
    fds: tuple[tuple[int, int], ...],
    *,
    with_doors: bool,
) -> SpawnedProcess:
    """Start the process of a plan for one child: the one place where a tool begins.

    Args:
        owner: the executions of that child.
        plan: the process.
        cwd_fd: its working directory.
        fds: (descriptor, number in the tool).
        with_doors: whether it may reach the model and names as its child does.

    Raises:
        SpawnError: it did not start.
        LaunchpadLost: no process can be started any more.
        OSError: a resource of the host is missing.
    """
    host, child = owner.host, owner.child
    wanted = child.wanted
    request = SpawnRequest(
        executable=plan.executable,
        argv=plan.argv,
        env=plan.env,
        cwd_fd=cwd_fd,
        fds=fds,
        rlimits=plan.rlimits,
    )
    if not plan.is_walled or wanted is None:
        return await child.launcher.spawn(request)
    # With all walls of the child: a missing layer refuses the start, and is not
    # recorded for the machine, since the workspace may be on any file system.
    kept: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    if child.spec.workspaces:
        from supervisor.workspace.view import unmounted  # noqa: PLC0415 - with one

        kept, unwritten = unmounted(child.spec, wanted)
    layers = frozenset(name for name, _ in child.walls.applied if name in LAYERS)
    files = replace(
        wanted.files,
        cwd=plan.cwd,
        own=(),
        shared=plan.shared,
        kept=(*plan.kept, *kept),
        programs=plan.programs,
        unwritten=unwritten,
        # The present paths: a tool may have moved their parents.
        hidden=host.apart.locations(child.spec.made_in),
    )
    profile = replace(wanted.profile, layers=layers, required=layers)
    wanted = replace(wanted, profile=profile, files=files)
    with ExitStack() as stack:
        if with_doors:
            env, joined = open_doors(owner, plan, stack)
            request = replace(request, env=env)
            wanted.joined = {**joined, **wanted.joined}
        # It looks at what the child has made, as often as the child asks for a tool.
        process, _ = await start.spawn(
            child.launcher, host.machine, request, wanted, share=child.threads
        )
    return process
