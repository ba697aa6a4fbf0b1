"""Signals that end a command: the first counts, after the work under way."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def exit_at_signals() -> None:
    """Have the first of `ENDS` end the program by an exception; ignored ones stay so.

    Later ones do nothing: a terminal that closes sends two, a user may press Ctrl-C again.
    """
    for number in ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _raise_exit)


def ignore_signals() -> None:
    """Have no signal cut an end that has begun."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Have no signal cut the block; for the main thread."""
    before = {number: signal.getsignal(number) for number in ENDS}
    ignore_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_exit(number: int, _frame: object) -> None:
    ignore_signals()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
