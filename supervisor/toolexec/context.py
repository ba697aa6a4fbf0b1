"""Parts that all connections of one host's ToolExec share, and ask of it."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from hostlib.fairness import Share
from hostlib.gate import Gate
from hostlib.log import put_line
from hostlib.messages import json_line, speaks_json
from protocol.toolexec import requests
from supervisor.toolexec.slots import Places
from supervisor.toolexec.slow_steps import Lookout
from supervisor.toolexec.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hostlib.log import Log
    from supervisor.fsproxy.ports import ChildView
    from supervisor.toolexec.execution import Execution
    from supervisor.toolexec.executions import ChildExecutions
    from supervisor.toolexec.routes import Routes, Target
    from supervisor.toolexec.settings import ToolExecSettings
    from supervisor.toolexec.slots import Descriptors

_CLEAR_LINE = b"\r\x1b[K"


class Context:
    """The parts that connections share.

    Args:
        settings: what is configured.
        routes: the sidecars.
        descriptors: what ToolExec holds of the host's.
        log: of the host.

    Attributes:
        tokens: whose request it is.
        signals: numbers by name.
        places: for connections, over all that listens.
        lookout: for starts of tools that take long.
        heads: the turn in which large heads are parsed, for parts of it (``Server``).
        gate: shut while the host is being replaced.
        large_output: makes a handle of a finished execution's output, or answers None
            to have it sent as it is; None where nobody can.
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
        self.tokens: Tokens[ChildExecutions] = Tokens()
        self.signals = {
            name.decode(): getattr(signal, f"SIG{name.decode()}")
            for name in requests.SIGNALS
        }
        self.places = Places(descriptors)
        self.lookout = Lookout()
        self.heads = Share()
        self.gate = Gate()
        self.large_output: (
            Callable[[ChildView, Execution], Awaitable[bytes | None]] | None
        ) = None
        self._log = log

    def timeout_of(self, target: Target) -> float:
        """Return the time limit of an execution, seconds; 0 for none."""
        own = 0.0 if self.settings.is_timeout_forced else target.timeout_s
        return own or self.settings.timeout_s

    def log(self, level: str, text: str, **fields: object) -> None:
        """Write a line to the host's log."""
        self._log.write(level, text, **fields)

    def tell(self, text: str) -> None:
        """Say what is run, where that was asked for.

        On a terminal a line in progress is cleared first, so that streamed output and
        log lines do not share one (spec: line-safe logs). It waits for no reader:
        unread bytes are counted, as lines of the log are (``logs``).
        """
        if not self.settings.verbose:
            return
        line = f"toolexec: {text}"
        with suppress(OSError):  # nobody is there to read what it says
            if sys.stdout is not None:
                sys.stdout.flush()
            clear = _CLEAR_LINE if os.isatty(2) else b""
            if not self._log.writes("INFO"):
                printable = requests.printable(line)
                if speaks_json():
                    put_line(json_line("INFO", printable))
                else:
                    put_line(b"%b%b\n" % (clear, printable.encode()))
                return
            if clear:
                put_line(clear)
            self._log.write("INFO", line)
