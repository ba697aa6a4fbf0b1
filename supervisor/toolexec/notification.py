"""The command of ``[toolexec.notify]``: a host's program for its user.

Rules of this file.

1. A request names it by its basename; it is run by its absolute path.
2. Without ``{args}`` in the configuration, a request's arguments must equal the
   configured ones; with it they replace it, at most ``max_args`` of them.
3. Arguments are never options (attack 49): if one begins with ``-``, ``--`` is put
   before them. If options of the command follow ``{args}``, the request is refused.
4. It runs for the host and not for the child: in ``/``, with a minimal environment.
"""

from __future__ import annotations

import os
from pathlib import PurePath
from typing import TYPE_CHECKING

from protocol.toolexec.requests import printable
from supervisor.toolexec.routes import SpawnPlan, ToolRefusedError
from supervisor.toolexec.starts import Start, StartEndedError

if TYPE_CHECKING:
    from protocol.toolexec.requests import Notify
    from supervisor.toolexec.context import Context
    from supervisor.toolexec.execution import Execution
    from supervisor.toolexec.executions import ChildExecutions
    from supervisor.toolexec.settings import NotifyCommand
    from supervisor.toolexec.wire import Wire

ARGS = "{args}"
"""The place of a request's arguments."""

END_OF_OPTIONS = "--"
"""A word behind it is never an option (POSIX, 12.2)."""

_ENVIRONMENT = ("PATH", "HOME", "LANG", "DISPLAY", "DBUS_SESSION_BUS_ADDRESS")
"""Variables for programs that show something to a user."""


def argv_of(configured: NotifyCommand | None, request: Notify) -> tuple[str, ...]:
    """Return the command line of a request.

    Raises:
        ToolRefusedError: 403, with the reason.
    """
    if configured is None:
        raise _forbidden("no notification command is configured")
    program, *fixed = configured.command
    if request.command != PurePath(program).name:
        raise _forbidden(
            f"'{printable(request.command)}' is not the configured command"
        )
    given = [arg.decode("utf-8", "surrogateescape") for arg in request.args]
    if ARGS not in fixed:
        if given != fixed:
            raise _forbidden("the arguments are not the configured ones")
        return (program, *fixed)
    at = fixed.index(ARGS)
    before, after = fixed[:at], fixed[at + 1 :]
    words = given[: configured.max_args]
    if _has_option(words) and before[-1:] != [END_OF_OPTIONS]:
        if _has_option(after):
            raise _forbidden(
                "an argument begins with '-', and options of the command follow"
            )
        words.insert(0, END_OF_OPTIONS)
    return (program, *before, *words, *after)


def _has_option(words: list[str]) -> bool:
    """Return whether a program may take one of these words for an option."""
    return any(word.startswith("-") for word in words)


async def start(
    context: Context, wire: Wire, owner: ChildExecutions, request: Notify
) -> Execution:
    """Start the notification; it runs when this returns.

    Args:
        context: of the host's ToolExec.
        wire: of the requesting client.
        owner: executions of that client's child.
        request: the request.

    Raises:
        ToolRefusedError: it is not permitted.
        BusyError: no slot is left.
        SpawnError: it cannot be started.
        OSError: another resource for it is missing.
    """
    configured = context.settings.notify
    argv = argv_of(configured, request)
    timeout_s = configured.timeout_s if configured is not None else 0.0
    env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    plan = SpawnPlan(argv[0], argv, env, is_elsewhere=True)
    execution = owner.admit(request.command, keep_all=True)
    execution.start = Start(context.start_watch, wire, timeout_s)
    try:
        with execution.start:
            await execution.spawn(plan, -1)
    except StartEndedError as why:
        await execution.finish_given_up(why.code, "notify")
        return execution
    except BaseException:
        await execution.abandon()
        raise
    await execution.begin(execution.start.left_s, "notify")
    return execution


def _forbidden(why: str) -> ToolRefusedError:
    return ToolRefusedError(403, f"forbidden: {why}\n".encode())
