"""What commands share: how they fail, and how they print."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from contextvars import ContextVar

USED_UP = {
    errno.EMFILE: "; raise the limit of open files (ulimit -n)",
    errno.ENFILE: "; close files elsewhere, or raise their number (sysctl fs.file-max)",
    errno.EAGAIN: "; end processes, or raise their number (ulimit -u, pids.max) or the memory"
    " that each may have (ulimit -v)",
    errno.ENOMEM: "; free memory, or raise what may be had (ulimit -v, memory.max)",
    # unix(7): more are on their way than one process may open, of all of its user.
    errno.ETOOMANYREFS: "; end what holds descriptors in flight, or raise the limit of"
    " open files (ulimit -n)",
}
"""What to do where there is too little of something, whatever it was for."""

_TO_DO = USED_UP | {
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
    """What was asked for cannot be done; the text says what and why."""


class ReaderGone(Exception):  # noqa: N818 - it is no fault
    """Nobody reads what a command goes on printing."""


class UsageFault(CommandError):  # noqa: N818 - beside click's own words
    """The words of the command are off.

    Attributes:
        status: to exit with; None for the command's own.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


_CONTROLS, _DELETE = 0x20, 0x7F
"""The first code that is no control character of ASCII, and the one beyond its others."""


def shown_path(why: OSError) -> str:
    """Return the path that an error is of, in quotes; "" where it has none.

    Of a call that was given a descriptor it has that number, which tells a person nothing.
    """
    path = why.filename
    if not isinstance(path, str | bytes):
        return ""
    shown = os.fsdecode(path)
    return "" if shown.startswith("/proc/self/fd/") else repr(shown)


def remedy(why: OSError) -> str:
    """Return what to do about an error of the system, as the end of a line.

    A sentence of our own in place of the kernel's words says that itself.
    """
    if why.strerror != os.strerror(why.errno or 0):
        return ""
    return _TO_DO.get(why.errno or 0, "")


def show_controls(text: str) -> str:
    r"""Return a line with what a terminal might obey as ``^[``, ``\x9b`` or ``\u202e``."""
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def _shown(char: str) -> str:
    if char.isprintable() or char == "\t":
        return char
    code = ord(char)
    if code < _CONTROLS or code == _DELETE:
        return f"^{chr(code ^ 0x40)}"
    return char.encode("ascii", "backslashreplace").decode()


def print_text(text: str) -> None:
    """Print a report; a reader that went away is no fault."""
    print_bytes(text.encode(errors="backslashreplace"))


def stream_text(text: str) -> None:
    """Print a piece of what may go on for ever; see ``stream_bytes``."""
    stream_bytes(text.encode(errors="backslashreplace"))


def stream_bytes(data: bytes) -> None:
    """Print a piece of what may go on for ever.

    Raises:
        CommandError: it cannot be written.
        ReaderGone: the command is to end.
    """
    if not print_bytes(data):
        raise ReaderGone


def out_fd() -> int | None:
    """Return the descriptor of the standard output; None if there is none."""
    return None if sys.stdout is None else sys.stdout.fileno()


def print_bytes(data: bytes) -> bool:
    """Print bytes at once; a reader that went away is no fault.

    Returns:
        Whether there is a reader, as far as is known.

    Raises:
        CommandError: it cannot be written.
    """
    if sys.stdout is None:
        return True
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # The interpreter would complain again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return False
    except OSError as why:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise CommandError(f"cannot write to stdout: {why.strerror}") from None
    return True


def say(title: str, text: str) -> None:
    """Say one line on stderr, if there is one to say it on: the status tells the rest.

    What runs inside a child has ``vfs.client.shell.frame.complain``, which keeps the bytes of names.
    """
    with contextlib.suppress(OSError):
        os.write(2, line_of(title, text))


def line_of(title: str, text: str) -> bytes:
    """Return what is said as one line, in the form of this process's log."""
    line = "".join(c if c.isprintable() else "?" for c in text)
    said = f"{title}: {line}"
    if _speaks_json.get():
        return json_line("ERROR", said)
    data = f"{said}\n".encode(errors="backslashreplace")
    return priority_of("ERROR") + data


_speaks_json: ContextVar[bool] = ContextVar("speaks_json", default=False)


def speak_json(*, as_json: bool) -> None:
    """Set whether stderr of this process is a log in JSON, and nothing but that."""
    _speaks_json.set(as_json)


def speaks_json() -> bool:
    """Tell whether stderr of this process is a log in JSON."""
    return _speaks_json.get()


def json_line(level: str, message: str) -> bytes:
    """Return a line of a JSON log, made without what the log itself has to load.

    Args:
        level: as the log names it.
        message: printable.
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
    """Return what journald reads as a line's priority; nothing for any other stderr.

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
