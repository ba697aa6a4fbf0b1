"""Messages of commands: their errors, remedies, and output on stdout and stderr."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import time
from contextvars import ContextVar

USED_UP = {
    errno.EMFILE: "; raise the limit of open files (ulimit -n)",
    errno.ENFILE: "; close files elsewhere, or raise their number (sysctl fs.file-max)",
    errno.EAGAIN: "; end processes, or raise their number (ulimit -u, pids.max) or the memory"
    " that each may have (ulimit -v)",
    errno.ENOMEM: "; free memory, or raise what may be had (ulimit -v, memory.max)",
    # unix(7): a user has more descriptors in flight than one of its processes may open.
    errno.ETOOMANYREFS: "; end what holds descriptors in flight, or raise the limit of"
    " open files (ulimit -n)",
}
"""Remedies for a lack of resources, by errno."""

_REMEDIES = USED_UP | {
    errno.ENOENT: "; name what is there, or make it first",
    errno.ENOTDIR: "; name what is there, or make it first",
    errno.ELOOP: "; name what is there: links go round in a ring",
    errno.ENAMETOOLONG: "; name it by a shorter path",
    errno.EACCES: "; name one that this user may use, or change its rights",
    errno.EROFS: "; name one that can be written",
    errno.EISDIR: "; name another",
    errno.EEXIST: "; name another, or remove it",
    # Of a child's connections alone (spec S7).
    errno.EUSERS: "; close connections, or raise [limits] clients_per_child",
    errno.EFBIG: "; raise the limit on the size of files (ulimit -f)",
    errno.ENOSPC: "; make room there, or name another",
    errno.EDQUOT: "; make room there, or name another",
}


class CommandError(Exception):
    """A command cannot do its work; the text says what and why.

    Attributes:
        status: the exit status; None for the command's default.
    """

    status: int | None = None


class ReaderGone(Exception):  # noqa: N818 - it is no fault
    """The reader of a command's output is gone."""


class UsageFault(CommandError):  # noqa: N818 - beside click's own words
    """The arguments of a command are wrong."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


_CONTROLS, _DELETE = 0x20, 0x7F
"""The first code above the ASCII control characters, and the code of DEL."""


def shown_path(why: OSError) -> str:
    """Return the path of an error in quotes; "" if it has none.

    The number of a descriptor, or a path under ``/proc/self/fd``, tells a person nothing.
    """
    path = why.filename
    if not isinstance(path, str | bytes):
        return ""
    shown = os.fsdecode(path)
    return "" if shown.startswith("/proc/self/fd/") else repr(shown)


def remedy(why: OSError) -> str:
    """Return the remedy for an error of the system, as the end of a line.

    An error with a text of this program already names its remedy.
    """
    if why.strerror != os.strerror(why.errno or 0):
        return ""
    return _REMEDIES.get(why.errno or 0, "")


def show_controls(text: str) -> str:
    r"""Return a line with control characters as ``^[``, ``\x9b`` or ``\u202e``."""
    if text.isprintable():
        return text
    return "".join(map(_show_char, text))


def printable(text: str) -> str:
    """Return a text with ``?`` for control characters, and for invalid ones."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _show_char(char: str) -> str:
    if char.isprintable() or char == "\t":
        return char
    code = ord(char)
    if code < _CONTROLS or code == _DELETE:
        return f"^{chr(code ^ 0x40)}"
    return char.encode("ascii", "backslashreplace").decode()


def print_text(text: str) -> None:
    """Print a report; a reader that is gone is no error."""
    print_bytes(text.encode(errors="backslashreplace"))


def stream_text(text: str) -> None:
    """Print a piece of an output that may be endless; see ``stream_bytes``."""
    stream_bytes(text.encode(errors="backslashreplace"))


def stream_bytes(data: bytes) -> None:
    """Print a piece of an output that may be endless.

    Raises:
        CommandError: stdout cannot be written.
        ReaderGone: the reader is gone, so the command should end.
    """
    if not print_bytes(data):
        raise ReaderGone


def out_fd() -> int | None:
    """Return the descriptor of the standard output; None if there is none."""
    return None if sys.stdout is None else sys.stdout.fileno()


def print_bytes(data: bytes) -> bool:
    """Print bytes at once; return False if the reader is gone.

    Raises:
        CommandError: stdout cannot be written.
    """
    if sys.stdout is None:
        return True
    try:
        sys.stdout.flush()
        _write(data)
    except BrokenPipeError:
        # The interpreter would raise again when it flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return False
    except OSError as why:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise CommandError(f"cannot write to stdout: {why.strerror}") from None
    return True


def _write(data: bytes) -> None:
    """Write to stdout, also to one that another process has made non-blocking."""
    out, left, is_flushed = sys.stdout.buffer, memoryview(data), False
    while not is_flushed:
        try:
            done = out.write(left)  # unbuffered, it may take a part, or None
            left = left[done or 0 :]
            out.flush()
            is_flushed = not left
        except BlockingIOError as why:
            left = left[why.characters_written :]
        if not is_flushed:
            select.select((), (out,), ())


def print_stderr(title: str, text: str) -> None:
    """Write one line of a command to stderr, if there is one.

    Commands inside a child use ``vfs.client.shell.frame.complain``, which keeps the bytes
    of names.
    """
    with contextlib.suppress(OSError):
        os.write(2, stderr_line(title, text))


def stderr_line(title: str, text: str) -> bytes:
    """Return a message as one line, in the form of this process's log."""
    line = printable(text)
    said = f"{title}: {line}"
    if _json_log.get():
        return json_line("ERROR", said)
    data = f"{said}\n".encode(errors="backslashreplace")
    return priority_of("ERROR") + data


_json_log: ContextVar[bool] = ContextVar("is_json_log", default=False)


def set_json_log(*, as_json: bool) -> None:
    """Set whether the stderr of this process is a log in JSON."""
    _json_log.set(as_json)


def is_json_log() -> bool:
    """Return whether the stderr of this process is a log in JSON."""
    return _json_log.get()


def json_line(level: str, message: str) -> bytes:
    """Return a line of a JSON log, without importing a JSON library.

    Args:
        level: a level of the log.
        message: printable text.
    """
    now_s = time.time()
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now_s))
    text = message.encode(errors="backslashreplace").decode()
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    micros = int(now_s % 1 * 1_000_000)
    line = f'{{"time":"{clock}.{micros:06}Z","level":"{level}","message":"{text}"}}\n'
    return priority_of(level) + line.encode()


_PRIORITIES = {
    "ERROR": b"<3>",
    "WARNING": b"<4>",
    "INFO": b"<6>",
    "DEBUG": b"<7>",
    "TRACE": b"<7>",
}


def priority_of(level: str) -> bytes:
    """Return a line's priority prefix for journald; empty for any other stderr.

    Source: sd-daemon(3); JOURNAL_STREAM in systemd.exec(5).
    """
    named = os.environ.get("JOURNAL_STREAM")
    if not named:
        return b""
    try:
        status = os.fstat(2)
    except OSError:
        return b""
    is_journal = named == f"{status.st_dev}:{status.st_ino}"
    return _PRIORITIES[level] if is_journal else b""
