"""Settings of ToolExec from a configuration and the host's environment.

Rules of this file.

1. Variables of the environment win over the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostlib.user_values import OptionError, parse_duration, parse_size
from supervisor.toolexec.listeners import LISTEN
from supervisor.toolexec.section import parse_listen
from supervisor.toolexec.settings import NotifyCommand, ToolExecSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from supervisor.toolexec.section import NotifySection, ToolexecSection

BIND_HOST = "AIFO_TOOLEEXEC_BIND_HOST"
TIMEOUT_SECS = "AIFO_TOOLEEXEC_TIMEOUT_SECS"


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
