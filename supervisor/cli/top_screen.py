"""The terminal of ``sandhost top``: keys in, the screen out, a look per interval.

Rules of this file.

1. The terminal is restored on every way out.
2. A silent host is reported on the screen and asked again: it may be restarting.
3. A key has its effect at once, also while the host is silent.
"""

from __future__ import annotations

import math
import os
import re
import select
import sys
import termios
import time
import tty
from collections import deque
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from supervisor.cli.top import HostLook, Screen, figures
from supervisor.control.client import ControlError, Exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
"""A sequence that begins with ESC, for any key, or one character."""

_ESCAPE_S = 0.05
"""Characters within this time after ESC belong to it: an arrow key, not Escape."""


CONNECT_S = 0.5
"""Longest wait for a connection, which the kernel makes at once; keys wait for it."""


class HostQuestion(NamedTuple):
    """A question or order to a host."""

    do: str
    args: dict[str, Any] | None = None


class HostAnswer(NamedTuple):
    """The host's answer; a ``ControlError`` for silence or a refusal."""

    question: HostQuestion
    result: Any


class HostQuestions:
    """Questions to a host, one after another, while keys are read.

    Args:
        path: its control socket.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._questions: deque[HostQuestion] = deque()
        self._exchange: Exchange | None = None

    def ask(self, *questions: HostQuestion) -> None:
        """Ask when the questions before are answered."""
        self._questions.extend(questions)

    def wait(self, fd: int, until_s: float) -> bool:
        """Wait for a descriptor, an answer, or a moment; return whether fd is ready."""
        fds: list[Any] = [fd]
        if self._exchange is not None:
            fds.append(self._exchange)
            until_s = self._exchange.until_s
        patience_s = max(0.0, until_s - time.monotonic())
        return fd in select.select(fds, (), (), patience_s)[0]

    def answers(self) -> Iterator[HostAnswer]:
        """Yield the answers that are there, and ask the next question."""
        while self._questions:
            question = self._questions[0]
            result: Any
            try:
                if self._exchange is None:
                    self._exchange = Exchange(
                        self._path, *question, connect_s=CONNECT_S
                    )
                if not self._is_answered(self._exchange):
                    return
                result = self._exchange.result()
            except ControlError as why:
                result = why
            self.close()
            yield HostAnswer(self._questions.popleft(), result)

    @staticmethod
    def _is_answered(exchange: Exchange) -> bool:
        while time.monotonic() >= exchange.until_s or _is_ready(exchange):
            if exchange.take():
                return True
        return False

    def close(self) -> None:
        """Give up the open question."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()


def _is_ready(exchange: Exchange) -> bool:
    return bool(select.select((exchange,), (), (), 0)[0])


class Source(NamedTuple):
    """The host or the fleet that is shown.

    Attributes:
        path: its socket.
        look: the question that asks it for its children.
        rows: returns them from the answer, and one line on what is missing.
        fault: returns a fault in the words of what is asked.
    """

    path: str
    look: HostQuestion
    rows: Callable[[Any], tuple[list[dict[str, Any]], str]]
    fault: Callable[[ControlError], ControlError]


def run_screen(source: Source, screen: Screen, interval_s: float) -> None:
    """Show its children until ``q``; stdin and stdout are a terminal."""
    console = Console(highlight=False)
    before: HostLook | None = None
    with (
        closing(HostQuestions(source.path)) as host,
        _keys() as fd,
        Live(console=console, screen=True, auto_refresh=False, transient=True) as live,
    ):
        due_s = 0.0
        while True:
            if time.monotonic() >= due_s:
                host.ask(source.look)
                due_s = math.inf  # until it is answered
            for question, answer in host.answers():
                is_fault = isinstance(answer, ControlError)
                result = source.fault(answer) if is_fault else answer
                if question == source.look:
                    before = _show(screen, before, source, result)
                    due_s = time.monotonic() + interval_s
                else:
                    _tell_kill(screen, question.args or {}, result)
                    due_s = min(due_s, 0.0)
            live.update(_draw(screen, console), refresh=True)
            for key in _read_keys(fd) if host.wait(fd, due_s) else ():
                wish = screen.press(key)
                if wish.quit:
                    return
                if wish.kill:
                    args = {"name": wish.kill, "signal": wish.signal}
                    host.ask(HostQuestion("kill", args))


def _show(
    screen: Screen, before: HostLook | None, source: Source, result: Any
) -> HostLook | None:
    if isinstance(result, ControlError):
        screen.notice = str(result)
        return None
    rows, missing = source.rows(result)
    screen.notice = missing or screen.notice
    now = HostLook(time.monotonic(), rows)
    screen.show(figures(before, now))
    return now


def _tell_kill(screen: Screen, args: dict[str, Any], result: Any) -> None:
    if isinstance(result, ControlError):
        screen.notice = str(result)
    else:
        screen.notice = f"SIG{args['signal']} sent to {args['name']}"


def _draw(screen: Screen, console: Console) -> Text:
    width, height = console.size
    lines, chosen = screen.lines(width, height)
    drawn = Text(no_wrap=True, overflow="crop")
    last = len(lines) - 1
    for number, line in enumerate(lines):
        text = Text(line)  # markup in a name is plain text
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
    """Set the terminal to give each key at once, without showing it."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield fd
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _read_keys(fd: int) -> list[str]:
    """Return the pressed keys; there is at least one."""
    data = os.read(fd, 64)
    if not data:
        return ["q"]  # the terminal is gone
    if data == b"\x1b" and select.select([fd], [], [], _ESCAPE_S)[0]:
        data += os.read(fd, 63)
    return keys_of(data.decode(errors="ignore"))


def keys_of(text: str) -> list[str]:
    """Return the keys in a terminal's bytes: several may come at once."""
    keys = (_KEYS.get(found, found) for found in _KEY.findall(text))
    return [key for key in keys if not key.startswith("\x1b")]
