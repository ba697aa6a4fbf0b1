"""``[toolexec]`` and ``[toolexec.notify]``: keys and checks of values.

``toolexec/settings.py`` turns them into settings.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from hostlib.user_values import OptionError, check_value, parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

LEAST_LOG_BYTES = 1024 * 1024
"""Smallest ``log_limit``: a window of a MiB is always kept."""

_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\[\]:/]+):(\d{1,5})")


class NotifySection(msgspec.Struct, forbid_unknown_fields=True):
    """``[toolexec.notify]``."""

    command: list[str]
    timeout: str = "30s"
    max_args: int = 8


class ToolexecSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[toolexec]``."""

    listen: list[str] = msgspec.field(
        default_factory=lambda: ["unix", "tcp://127.0.0.1:0"]
    )
    max_executions: int = 64
    timeout: str = "0s"
    verbose: bool = False
    log_limit: str = "256M"
    notify: NotifySection | None = None


def check_toolexec(section: ToolexecSection) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value that cannot be used."""
    yield from check_value("listen", parse_listen, section.listen, OptionError)
    yield from check_value("timeout", parse_duration, section.timeout, OptionError)
    yield from check_value("log_limit", _log_limit, section.log_limit, OptionError)
    if section.max_executions < 1:
        yield "max_executions", "at least 1"
    notify = section.notify
    if notify is not None:
        if not notify.command or not notify.command[0].startswith("/"):
            yield "notify.command", "an absolute path, then arguments"
        if notify.command.count("{args}") > 1:
            yield "notify.command", "{args} once at most"
        if notify.max_args < 0:
            yield "notify.max_args", "at least 0"
        timeout = notify.timeout
        yield from check_value("notify.timeout", parse_duration, timeout, OptionError)


def parse_listen(texts: list[str]) -> tuple[bool, tuple[str, int] | None]:
    """Return whether there are unix sockets, and the address for TCP.

    Raises:
        OptionError: one of the texts is no address.
    """
    unix, tcp = False, None
    for text in texts:
        match = _TCP.fullmatch(text)
        if text == "unix":
            unix = True
        elif match is not None and int(match[2]) < 65_536 and tcp is None:
            tcp = (match[1].strip("[]"), int(match[2]))
        elif match is not None and tcp is not None:
            raise OptionError("one tcp:// address at most")
        else:
            raise OptionError(
                f"not an address: {text!r}; write unix or tcp://HOST:PORT"
            )
    if not texts:
        raise OptionError("nothing to listen on; write unix or tcp://127.0.0.1:0")
    return unix, tcp


def _log_limit(text: str) -> int:
    size_bytes = parse_size(text)
    if size_bytes < LEAST_LOG_BYTES:
        raise OptionError("at least 1M")
    return size_bytes
