"""Shared parts of all connections of one host's ToolExec."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from hostlib.fairness import Share
from hostlib.handover import Gate
from hostlib.listener import ShortageReport
from hostlib.log import put_line
from hostlib.messages import is_json_log, json_line
from protocol.toolexec import requests
from supervisor.toolexec.slots import ConnectionPlaces
from supervisor.toolexec.starts import StartWatch
from supervisor.toolexec.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hostlib.log import Log
    from supervisor.fsproxy.ports import ChildView
    from supervisor.toolexec.execution import Execution
    from supervisor.toolexec.executions import ChildExecutions
    from supervisor.toolexec.routes import Routes
    from supervisor.toolexec.settings import ToolExecSettings
    from supervisor.toolexec.slots import Descriptors

_CLEAR_LINE = b"\r\x1b[K"


class Context:
    """The parts that connections share.

    Args:
        settings: the configuration.
        routes: the sidecars.
        descriptors: ToolExec's account of the host's descriptors.
        log: of the host.

    Attributes:
        tokens: the owners of requests.
        places: bound the connections of all listeners.
        shortages: tells that no connection can be accepted.
        start_watch: watches slow starts of tools.
        heads: the turn for parsing large heads (``Server``).
        gate: shut while the host is being replaced.
        large_output: makes a handle of a finished execution's output, or returns None
            to have it sent as it is; None without LLM fds.
    """

    def __init__(
        self,
        settings: ToolExecSettings,
        routes: Routes,
        descriptors: Descriptors,
        log: Log,
    ) -> None:
        self.settings = settings
        self.routes = routes
        self.log = log
        self.tokens: Tokens[ChildExecutions] = Tokens()
        self.places = ConnectionPlaces(descriptors)
        self.shortages = ShortageReport(log, "toolexec")
        self.start_watch = StartWatch()
        self.heads = Share()
        self.gate = Gate()
        self.large_output: (
            Callable[[ChildView, Execution], Awaitable[bytes | None]] | None
        ) = None

    def tell(self, text: str) -> None:
        """Print a line about a run, if the operator has asked for that.

        On a terminal a line in progress is cleared first, so that streamed output and
        log lines do not share one (spec: line-safe logs). Without a reader, bytes are
        counted as lines of the log are (``hostlib.log``).
        """
        if not self.settings.verbose:
            return
        line = f"toolexec: {text}"
        with suppress(OSError):  # its reader is gone
            if sys.stdout is not None:
                sys.stdout.flush()
            clear = _CLEAR_LINE if os.isatty(2) else b""
            if not self.log.writes("INFO"):
                printable = requests.printable(line)
                if is_json_log():
                    put_line(json_line("INFO", printable))
                else:
                    put_line(b"%b%b\n" % (clear, printable.encode()))
                return
            if clear:
                put_line(clear)
            self.log.write("INFO", line)
