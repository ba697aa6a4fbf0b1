"""The terminal of ``sandhost top``: keys in, the screen out, a look every interval.

Rules of this file.

1. The terminal is given back as it was, on every way out.
2. A host that does not answer is said on the screen and asked again: it may be starting
   anew.
"""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from supervisor.cli.top import Look, Screen, figures
from supervisor.control.client import ControlError, call

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEYS = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "back",
    "\b": "back",
}

_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
"""A sequence that begins with ESC, whatever key it stands for, or one character."""

_ESCAPE_S = 0.05
"""What follows ESC within this time belongs to it: an arrow, not the key."""


def run_screen(path: str, screen: Screen, interval_s: float) -> None:
    """Show a host's children until ``q``; stdin and stdout are a terminal."""
    console = Console(highlight=False)
    before: Look | None = None
    with (
        _keys() as fd,
        Live(console=console, screen=True, auto_refresh=False, transient=True) as live,
    ):
        due_s = 0.0
        while True:
            if time.monotonic() >= due_s:
                before = _look(path, screen, before)
                due_s = time.monotonic() + interval_s
            live.update(_drawn(screen, console), refresh=True)
            for key in _read_keys(fd, max(0.0, due_s - time.monotonic())):
                wish = screen.press(key)
                if wish.quit:
                    return
                if wish.kill:
                    _kill(path, screen, wish.kill, wish.signal)
                    due_s = 0.0


def _look(path: str, screen: Screen, before: Look | None) -> Look | None:
    try:
        now = Look(time.monotonic(), call(path, "ps"))
    except ControlError as why:
        screen.notice = str(why)
        return None
    screen.show(figures(before, now))
    return now


def _kill(path: str, screen: Screen, name: str, signal: str) -> None:
    try:
        call(path, "kill", {"name": name, "signal": signal, "tree": False})
    except ControlError as why:
        screen.notice = str(why)
    else:
        screen.notice = f"SIG{signal} sent to {name}"


def _drawn(screen: Screen, console: Console) -> Text:
    width, height = console.size
    lines, chosen = screen.lines(width, height)
    drawn = Text(no_wrap=True, overflow="crop")
    last = len(lines) - 1
    for number, line in enumerate(lines):
        text = Text(line)  # what looks like markup in a name is none
        if number == 1:
            text.stylize("bold")
        elif number == chosen:
            text.pad_right(max(0, width - len(line)))
            text.stylize("reverse")
        elif number in {0, last}:
            text.stylize("dim")
        drawn.append_text(text)
        if number != last:
            drawn.append("\n")
    return drawn


@contextmanager
def _keys() -> Iterator[int]:
    """Have the terminal give each key at once, without showing it."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _read_keys(fd: int, timeout_s: float) -> list[str]:
    """Return the keys that were pressed, waiting for the first one."""
    if not select.select([fd], [], [], timeout_s)[0]:
        return []
    data = os.read(fd, 64)
    if not data:
        return ["q"]  # the terminal is gone
    if data == b"\x1b" and select.select([fd], [], [], _ESCAPE_S)[0]:
        data += os.read(fd, 63)
    return keys_of(data.decode(errors="ignore"))


def keys_of(text: str) -> list[str]:
    """Return the keys in what a terminal sent: several may come at once."""
    keys = (_KEYS.get(found, found) for found in _KEY.findall(text))
    return [key for key in keys if not key.startswith("\x1b")]
