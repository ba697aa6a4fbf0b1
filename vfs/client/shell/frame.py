"""What ``sandhost fs``, ``fd`` and ``llm`` have in common inside a child.

The frame around a command (exit statuses, one line for what failed) and the ways of the
standard streams.

Rules of this file.

1. It starts fast: nothing is imported but what ``vfs.client`` needs.
2. One line on stderr for each failure: what, to what, why.  Control characters in it
   become ``?``; the bytes of names stay what they are.
3. A reader of our output that is gone is no failure: it has enough (as ``cat``).
4. Ctrl-C, SIGTERM and SIGHUP cost the child nothing but this process: ``Door``.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # rule 1: `signal` loads enumerations
import os

from vfs.client import Client
from vfs.client.turn import client_errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

    from protocol import messages as m

PIECE_BYTES = 1024 * 1024
"""One piece of a stream: so large that its round trip does not count."""

OK, FAILED, USAGE, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141
"""Exit statuses; the last two are 128 + the number of SIGINT, of SIGPIPE."""

HOLD_S = 30
"""How long a signal waits for a reply.  A search of a gigabyte takes half of it; a model
may take longer, and what then is lost is worth more than the wait."""

QUIET_S = 1
"""How long it waits without a word."""

PARTING_S = 5
"""How long a command that a signal ends may take to clean up behind itself: a host that
does not answer keeps nobody."""

TERMINATING = (_signal.SIGTERM, _signal.SIGHUP)
"""Signals that a command ends by, once it has cleaned up."""

_WAITS = (
    f"waits for the reply, {HOLD_S} s at most; once more ends it at once, and with it"
    " the use of descriptor 3 for the whole child"
)

_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), "?")


class UsageError(Exception):
    """The command line is wrong; the text says how."""


class StepError(Exception):
    """One step failed; the text is the whole line."""


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP has come: what has an end is ended, then ``run`` dies of it.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Door(Client):
    """FD 3 as a command uses it: a signal ends the command between two requests.

    A process that ends inside of one leaves a connection that nobody can use any more
    (``vfs.client.turn``), and it is the whole child's.  So SIGINT, SIGTERM and SIGHUP
    wait for the reply, ``HOLD_S`` at most; a second one does not wait.  There is nothing
    to wait for while another process has its turn, nor on a connection of one's own.

    It ends by an exception, so that what it has begun can be dropped: that may take
    ``PARTING_S``, and one more signal ends it at once.

    Args:
        word: of the command, as in ``sandhost WORD``.

    Attributes:
        last_ok: the last reply behind its ``OK``; empty: none came.  It is there also
            when a signal has come with the reply and its request returned nothing.
    """

    def __init__(self, word: str) -> None:
        super().__init__()
        self.last_ok = b""
        self._word = word
        self._held = 0
        self._ending = 0
        for number in (_signal.SIGINT, *TERMINATING):
            # Who started this may have said that they mean nothing (`&` of a shell).
            if _signal.getsignal(number) != _signal.SIG_IGN:
                _signal.signal(number, self._signalled)
        # Python looks for signals before it waits: one that comes between the two is
        # heard when the wait is broken off.
        _signal.signal(_signal.SIGALRM, _break_off)
        _signal.setitimer(_signal.ITIMER_REAL, QUIET_S, QUIET_S)

    def _ask(self, *args: Any, **more: Any) -> tuple[m.Reply, bytes]:
        """Do as ``BlockingEndpoint`` does; then what a signal has asked for."""
        try:
            return super()._ask(*args, **more)
        finally:
            if self._held:
                self._end(self._held)

    def _receive_line(self, *args: Any) -> m.Reply:
        """Do as ``BlockingEndpoint`` does, and keep what it says."""
        reply = super()._receive_line(*args)
        if reply.ok:
            self.last_ok = reply.text
        return reply

    def _signalled(self, number: int, _: object) -> None:
        if self._held or self._ending or not self._turn.is_taken:
            self._end(self._ending or self._held or number)
        self._held = number
        _signal.signal(_signal.SIGALRM, self._explain)
        _signal.alarm(QUIET_S)

    def _explain(self, number: int, _: object) -> None:
        if not self._held:
            return  # the reply came with the alarm
        _signal.signal(number, self._signalled)
        _signal.alarm(HOLD_S - QUIET_S)
        complain(self._word, _WAITS, 0)

    def _end(self, number: int) -> NoReturn:
        self._held = 0
        self._ending = number
        _signal.signal(_signal.SIGALRM, self._overdue)
        _signal.alarm(PARTING_S)
        if number in TERMINATING:
            raise Terminated(number)
        raise KeyboardInterrupt

    def _overdue(self, _: int, __: object) -> None:
        self._end(self._ending)


def _break_off(_: int, __: object) -> None:
    """Do nothing: whatever handler is due runs as well."""


def run(word: str, work: Callable[[list[str]], int], argv: list[str]) -> int:
    """Do the work of a command; return the exit status.

    Args:
        word: of the command, as in ``sandhost WORD``.
        work: given the arguments, returns the exit status.
        argv: the arguments behind the word.
    """
    try:
        return _outcome(word, work, argv)
    except Terminated as why:
        return _die(why.number)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        _signal.alarm(0)
        # Behind this nobody takes the exception.
        for number in TERMINATING:
            if callable(_signal.getsignal(number)):
                _signal.signal(number, _signal.SIG_DFL)


def _outcome(word: str, work: Callable[[list[str]], int], argv: list[str]) -> int:
    try:
        return work(argv)
    except UsageError as why:
        return complain(word, f"{why}; see: sandhost {word} --help", USAGE)
    except StepError as why:
        return complain(word, str(why))
    except BrokenPipeError:
        return NO_READER  # rule 3
    except OSError as why:
        status = USAGE if isinstance(why, client_errors().NotAChildError) else FAILED
        return complain(word, why.strerror or str(why), status)


def _die(number: int) -> int:
    """End by a signal, as its sender expects to see."""
    _signal.alarm(0)
    _signal.signal(number, _signal.SIG_DFL)
    _signal.raise_signal(number)
    return 128 + number  # the first process of a pid namespace outlives it


def complain(word: str, text: str, status: int = FAILED) -> int:
    """Tell what is wrong, in one line; return the status."""
    line = f"sandhost {word}: {text.translate(_CONTROL)}\n"
    _write_error(line.encode(errors="surrogateescape"))
    return status


def _write_error(line: bytes) -> None:
    try:
        os.write(2, line)
    except OSError:  # closed, or a full disk: the status tells the rest
        return


def shown(name: bytes | str) -> str:
    """Return a name fit for one line of text, quoted."""
    return f"'{os.fsdecode(name).translate(_CONTROL)}'"


def own_connection(client: Client) -> Client:
    """Return a connection of this process's own where the host gives one."""
    try:
        return client.attach()
    except client_errors().ConnectionLostError:
        raise
    except client_errors().FsProxyError:
        return client  # an older host, or the child has all the connections it may


def write(data: bytes) -> None:
    """Write to standard output, waiting for its reader.

    Raises:
        BrokenPipeError: nobody reads it any more.
        StepError: it cannot be written.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(1, view) :]
        except BlockingIOError:
            _wait(1, writable=True)
        except BrokenPipeError:
            raise
        except OSError as why:
            text = f"cannot write to standard output: {why.strerror}"
            raise StepError(text) from why


def read_piece() -> bytes:
    """Return what standard input has next; nothing at its end."""
    while True:
        try:
            return os.read(0, PIECE_BYTES)
        except BlockingIOError:
            _wait(0, writable=False)


def pieces() -> Iterator[bytes]:
    """Yield standard input to its end.

    Raises:
        StepError: it cannot be read.
    """
    while True:
        try:
            piece = read_piece()
        except OSError as why:
            text = f"cannot read standard input: {why.strerror}"
            raise StepError(text) from why
        if not piece:
            return
        yield piece


def _wait(fd: int, *, writable: bool) -> None:
    from vfs.client.waiting import wait  # noqa: PLC0415 - rarely needed

    wait(fd, writable=writable)
