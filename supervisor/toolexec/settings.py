"""The settings of ToolExec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from supervisor.toolexec.listeners import LISTEN


class NotifyCommand(NamedTuple):
    """The notification command.

    Attributes:
        command: the program's absolute path, and its arguments.
        timeout_s: its time limit, seconds.
        max_args: most arguments of a request.
    """

    command: tuple[str, ...]
    timeout_s: float
    max_args: int


@dataclass(frozen=True, slots=True)
class ToolExecSettings:
    """The settings of ToolExec.

    Attributes:
        unix: whether each child gets a unix socket.
        tcp: (address, port, its source in words); None for no TCP.
        max_executions: at the same time.
        timeout_s: time limit of an execution, seconds; 0 for none.
        is_timeout_forced: whether it overrides a sidecar's own limit.
        verbose: whether to print each run, and frame buffered output.
        log_limit_bytes: most bytes of one execution's output.
        log_dir: has that output; None for the system's temporary directory.
        notify: the notification command; None for none.
    """

    unix: bool = True
    tcp: tuple[str, int, str] | None = ("127.0.0.1", 0, LISTEN)
    max_executions: int = 64
    timeout_s: float = 0.0
    is_timeout_forced: bool = False
    verbose: bool = False
    log_limit_bytes: int = 256 * 1024 * 1024
    log_dir: str | None = None
    notify: NotifyCommand | None = None
