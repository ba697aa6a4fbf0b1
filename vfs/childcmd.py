"""What ``sandhost fs``, ``fd`` and ``llm`` have in common inside a child.

What it is: the frame around a command (exit statuses, one line for what failed) and the
ways of the standard streams.  What it is not: it knows no command.

Rules of this file.

1. It starts fast: nothing is imported but what ``vfs.client`` needs.
2. One line on stderr for each failure: what, to what, why.  Control characters in it
   become ``?``; the bytes of names stay what they are.
3. A reader of our output that is gone is no failure: it has enough (as ``cat``).
"""

from __future__ import annotations

import os

from vfs.client_turn import client_errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfs.client import Client

PIECE_BYTES = 1024 * 1024
"""One piece of a stream: so large that its round trip does not count."""

OK, FAILED, USAGE, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141
"""Exit statuses; the last two are 128 + the number of SIGINT, of SIGPIPE."""

_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), "?")


class UsageError(Exception):
    """The command line is wrong; the text says how."""


class StepError(Exception):
    """One step failed; the text is the whole line."""


def run(word: str, work: Callable[[list[str]], int], argv: list[str]) -> int:
    """Do the work of a command; return the exit status.

    Args:
        word: of the command, as in ``sandhost WORD``.
        work: given the arguments, returns the exit status.
        argv: the arguments behind the word.
    """
    try:
        return work(argv)
    except UsageError as why:
        return complain(word, f"{why}; see: sandhost {word} --help", USAGE)
    except StepError as why:
        return complain(word, str(why))
    except BrokenPipeError:
        return NO_READER  # rule 3
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as why:
        status = USAGE if isinstance(why, client_errors().NotAChildError) else FAILED
        return complain(word, why.strerror or str(why), status)


def complain(word: str, text: str, status: int = FAILED) -> int:
    """Tell what is wrong, in one line; return the status."""
    line = f"sandhost {word}: {text.translate(_CONTROL)}\n"
    os.write(2, line.encode(errors="surrogateescape"))
    return status


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
    """Write to standard output, waiting for whoever reads it."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(1, view) :]
        except BlockingIOError:
            _wait(1, writable=True)


def read_piece() -> bytes:
    """Return what standard input has next; nothing at its end."""
    while True:
        try:
            return os.read(0, PIECE_BYTES)
        except BlockingIOError:
            _wait(0, writable=False)


def pieces() -> Iterator[bytes]:
    """Yield standard input to its end."""
    while piece := read_piece():
        yield piece


def _wait(fd: int, *, writable: bool) -> None:
    from vfs.client_rare import wait  # noqa: PLC0415 - rarely needed

    wait(fd, writable=writable)
