"""The settings of ToolExec, from a configuration and the host's environment.

Variables of the environment win over the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hostlib.user_values import OptionError, parse_duration, parse_size
from supervisor.toolexec.listeners import LISTEN
from supervisor.toolexec.section import parse_listen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from supervisor.toolexec.section import NotifySection, ToolexecSection

BIND_HOST = "AIFO_TOOLEEXEC_BIND_HOST"
TIMEOUT_SECS = "AIFO_TOOLEEXEC_TIMEOUT_SECS"


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


def toolexec_settings(
    section: ToolexecSection, environ: Mapping[str, str], log_dir: str | None = None
) -> ToolExecSettings:
    """Return the settings of a checked section and the environment.

    Raises:
        OSError: a variable of the environment cannot be used.
    """
    unix, listen = parse_listen(section.listen)
    tcp = None if listen is None else (*listen, LISTEN)
    bind_host = environ.get(BIND_HOST)
    if bind_host:
        tcp = (bind_host, 0 if listen is None else listen[1], BIND_HOST)
    return ToolExecSettings(
        unix=unix,
        tcp=tcp,
        max_executions=section.max_executions,
        timeout_s=_timeout(section.timeout, environ),
        is_timeout_forced=bool(environ.get(TIMEOUT_SECS)),
        verbose=section.verbose,
        log_limit_bytes=parse_size(section.log_limit),
        log_dir=log_dir,
        notify=_notify(section.notify),
    )


def _notify(section: NotifySection | None) -> NotifyCommand | None:
    if section is None:
        return None
    timeout_s = parse_duration(section.timeout)
    return NotifyCommand(tuple(section.command), timeout_s, section.max_args)


def _timeout(text: str, environ: Mapping[str, str]) -> float:
    given = environ.get(TIMEOUT_SECS)
    if not given:
        return parse_duration(text)
    try:
        return parse_duration(given)
    except OptionError as why:
        raise OSError(22, f"cannot use {TIMEOUT_SECS}: {why}") from None
