"""Signals that end a command as Ctrl-C does: what it has begun ends before."""

from __future__ import annotations

import signal
import sys

ENDS = (signal.SIGTERM, signal.SIGHUP)


def exit_at_signals() -> None:
    """Have SIGTERM and SIGHUP raise SystemExit from now on; ignored ones stay ignored."""
    for number in ENDS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _raise_exit)


def ignore_signals() -> None:
    """Have no signal cut an end that has begun: a terminal that closes sends some."""
    for number in (*ENDS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _raise_exit(number: int, _frame: object) -> None:
    ignore_signals()
    sys.exit(128 + number)
