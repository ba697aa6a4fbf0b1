"""The frame of ``sandhost fs``, ``fd``, ``llm``: statuses, errors, streams.

1. It starts fast: it imports only modules that ``vfs.client`` needs.
2. One line on stderr for each failure: ``cannot VERB 'NAME': REASON``.  Control characters
   in it become ``?``; other bytes of names stay.
3. The end of the reader of its output is no failure (as for ``cat``).
4. Ctrl-C, SIGTERM and SIGHUP end only this process, not the child's connection: ``Door``.
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
"""Size of a piece of a stream: large enough that its round trip does not count."""

OK, FAILED, USAGE, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141
"""Exit statuses; the last two are 128 + the number of SIGINT, of SIGPIPE."""

HOLD_S = 30
"""How long a signal waits for a reply.  A search of a gigabyte takes half of it; a model may
take longer, and then the connection is lost."""

QUIET_S = 1
"""How long it waits before it tells the user."""

PARTING_S = 5
"""How long a command that a signal ends may clean up, also if the host does not answer."""

TERMINATING = (_signal.SIGTERM, _signal.SIGHUP)
"""Signals by which a command ends, after it has cleaned up."""

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
    """SIGTERM or SIGHUP has come: the command cleans up and dies of the signal.

    Attributes:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Door(Client):
    """FD 3 for a command: a signal ends the command between two requests.

    A process that ends in the middle of a request makes the connection unusable for the
    whole child (``vfs.client.turn``).  So SIGINT, SIGTERM and SIGHUP wait for the reply,
    at most ``HOLD_S``; a second one does not wait.  A signal does not wait while another
    process has its turn, or on a connection of this process only.

    The command ends by an exception, so that it can drop its unfinished work within
    ``PARTING_S``; another signal ends it at once.

    Args:
        word: the command, as in ``sandhost WORD``.

    Attributes:
        last_ok: the last reply after its ``OK``; empty before the first.  It is set also
            if a signal came with the reply, so that its request returned nothing.
    """

    def __init__(self, word: str) -> None:
        super().__init__()
        self.last_ok = b""
        self._word = word
        self._held = 0
        self._ending = 0
        for number in (_signal.SIGINT, *TERMINATING):
            # The shell may have set them to be ignored (`&`).
            if _signal.getsignal(number) != _signal.SIG_IGN:
                _signal.signal(number, self._hold)
        # Python checks for signals before it waits.  The timer ends a wait, so that a
        # signal between the check and the wait is handled, too.
        _signal.signal(_signal.SIGALRM, _break_off)
        _signal.setitimer(_signal.ITIMER_REAL, QUIET_S, QUIET_S)

    def _ask(self, *args: Any, **more: Any) -> tuple[m.Reply, bytes]:
        """Ask as ``BlockingEndpoint`` does; then end if a signal has come."""
        try:
            return super()._ask(*args, **more)
        finally:
            if self._held:
                self._end(self._held)

    def _receive_line(self, *args: Any) -> m.Reply:
        """Receive as ``BlockingEndpoint`` does, and keep the reply's text."""
        reply = super()._receive_line(*args)
        if reply.ok:
            self.last_ok = reply.text
        return reply

    def _hold(self, number: int, _: object) -> None:
        if self._held or self._ending or not self.turn.is_taken:
            self._end(self._ending or self._held or number)
        self._held = number
        _signal.signal(_signal.SIGALRM, self._explain)
        _signal.alarm(QUIET_S)

    def _explain(self, number: int, _: object) -> None:
        if not self._held:
            return  # the reply came with the alarm
        _signal.signal(number, self._hold)
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
    """Do nothing: the signal lets Python run the handlers that are due."""


def run(word: str, work: Callable[[list[str]], int], argv: list[str]) -> int:
    """Do the work of a command; return the exit status.

    Args:
        word: the command, as in ``sandhost WORD``.
        work: takes the arguments, and returns the exit status.
        argv: the arguments after the word.
    """
    try:
        return _outcome(word, work, argv)
    except Terminated as why:
        return _die(why.number)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        _signal.alarm(0)
        # After this no code catches the exception.
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
    """End by a signal, so that the parent sees it in the status."""
    _signal.alarm(0)
    _signal.signal(number, _signal.SIG_DFL)
    _signal.raise_signal(number)
    return 128 + number  # the first process of a pid namespace outlives it


def complain(word: str, text: str, status: int = FAILED) -> int:
    """Write one line about a failure to stderr; return the status."""
    line = f"sandhost {word}: {text.translate(_CONTROL)}\n"
    _write_error(line.encode(errors="surrogateescape"))
    return status


def _write_error(line: bytes) -> None:
    try:
        os.write(2, line)
    except OSError:  # closed, or a full disk; the status remains
        return


def quote(name: bytes | str) -> str:
    """Return a name in quotes, for one line of text."""
    return f"'{os.fsdecode(name).translate(_CONTROL)}'"


def own_connection(client: Client) -> Client:
    """Return a connection of this process only, if the host gives one."""
    try:
        return client.attach()
    except client_errors().ConnectionLostError:
        raise
    except client_errors().FsProxyError:
        return client  # an older host, or the child has its limit of connections


def write(data: bytes) -> None:
    """Write to standard output, waiting for its reader.

    Raises:
        BrokenPipeError: the reader is gone.
        StepError: writing failed.
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
    """Return the next piece of standard input; empty at its end."""
    while True:
        try:
            return os.read(0, PIECE_BYTES)
        except BlockingIOError:
            _wait(0, writable=False)


def pieces() -> Iterator[bytes]:
    """Yield standard input to its end.

    Raises:
        StepError: reading failed.
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
