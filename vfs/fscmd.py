"""``sandhost fs ...``: the files behind FD 3, for shell scripts inside a child.

Rules of this file.

1. It starts fast (within 2.5x of a bare interpreter): arguments are read by hand, and
   nothing is imported but what ``vfs.client`` needs.
2. Names are bytes: what the shell gave goes to the host unchanged.
3. What holds a file open (cat, put, cp) asks for a connection of its own.  Killed at
   any moment it then leaves neither an open file nor a torn request on the FD 3 that
   the other processes of the child share, and a file that it did not finish is not
   published.  A host without ATTACH is used through FD 3, turn by turn (spec T5).
4. One line on stderr for each failure: what, to what, why.
"""

from __future__ import annotations

import os
import sys
import time

from vfs.client import Client
from vfs.client_turn import client_errors
from vfs.fscmd_line import Call, Command, UsageError, read, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

PIECE_BYTES = 1024 * 1024
"""One READ, one WRITE: so large that its round trip does not count."""

OK, FAILED, USAGE, INTERRUPTED, NO_READER = 0, 1, 2, 130, 141
"""Exit statuses; the last two are 128 + the number of SIGINT, of SIGPIPE."""

_MANY = sys.maxsize


class StepError(Exception):
    """One step failed; the text is the whole line."""


class Doing:
    """A step: what fails inside is told as ``cannot VERB 'NAME': REASON``."""

    __slots__ = ("_what",)

    def __init__(self, verb: str, name: bytes | None = None) -> None:
        self._what = verb if name is None else f"{verb} {shown(name)}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, why: BaseException | None, trace: object) -> None:
        # A reader that is gone is no failure of ours (see ``main``).
        if isinstance(why, OSError) and not isinstance(why, BrokenPipeError):
            raise StepError(f"cannot {self._what}: {why.strerror or why}") from why


def main(argv: list[str]) -> int:
    """Run ``sandhost fs`` with the arguments behind ``fs``; return the exit status."""
    try:
        return _run(argv)
    except UsageError as why:
        return _complain(f"{why}; see: sandhost fs --help", USAGE)
    except StepError as why:
        return _complain(str(why))
    except BrokenPipeError:
        return NO_READER  # whoever reads our output has enough: say nothing, as `cat`
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as why:
        status = USAGE if isinstance(why, client_errors().NotAChildError) else FAILED
        return _complain(why.strerror or str(why), status)


def _run(argv: list[str]) -> int:
    word = argv[0] if argv else ""
    if word in ("--help", "-h", "help"):
        return _print(_help().general(COMMANDS))
    command = COMMANDS.get(word)
    if command is None:
        what = f"unknown command {shown(os.fsencode(word))}" if argv else "no command"
        raise UsageError(what)
    options = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    if "--help" in options or "-h" in options:
        return _print(_help().of_command(word, command))
    call = read(word, command, argv[1:])
    call.client = Client()
    return command.run(call)


def _help() -> ModuleType:
    import vfs.fscmd_help  # noqa: PLC0415 - rarely needed

    return vfs.fscmd_help


# The commands


def _cat(call: Call) -> int:
    def cat(name: bytes) -> None:
        with Opened(client, name, "r", call.top_level) as fileno:
            while piece := _read_piece(client, name, fileno):
                _write(piece)

    with _own_connection(call.client) as client:
        return _each(call.names, cat)


def _put(call: Call) -> int:
    name = call.names[0]
    with _own_connection(call.client) as client:
        with Opened(
            client, name, "a" if call.option else "w", call.top_level
        ) as fileno:
            while piece := _read_stdin():
                with Doing("write", name):
                    client.write(fileno, piece)
    return OK


def _cp(call: Call) -> int:
    source, target = call.names
    if os.path.normpath(source) == os.path.normpath(target):
        raise StepError(f"{shown(source)} and {shown(target)} are the same file")
    with (
        _own_connection(call.client) as client,
        Opened(client, source, "r", call.top_level) as read_from,
    ):
        # First: what cannot be read must not empty the target.
        piece = _read_piece(client, source, read_from)
        with Opened(client, target, "w", call.top_level) as write_to:
            while piece:
                with Doing("write", target):
                    client.write(write_to, piece)
                piece = _read_piece(client, source, read_from)
    return OK


def _ls(call: Call) -> int:
    name = call.names[0] if call.names else b"."
    with Doing("list", name):
        if call.option:
            return _print(call.client.listdir_json(name, call.top_level) + b"\n")
        rows = call.client.listdir(name, call.top_level)
    lines = [
        os.fsencode(entry) + (b"/\n" if kind == "directory" else b"\n")
        for entry, kind in rows
    ]
    return _print(b"".join(sorted(lines)))


def _stat(call: Call) -> int:
    name = call.names[0]
    with Doing("stat", name):
        if call.option:
            return _print(call.client.stat_json(name, call.top_level) + b"\n")
        found = call.client.stat(name, call.top_level)
    changed = time.strftime(
        "%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.mtime_ns // 1_000_000_000)
    )
    line = f": {found.kind}, {found.size} bytes, changed {changed}\n"
    return _print(name + line.encode())


def _mkdir(call: Call) -> int:
    def mkdir(name: bytes) -> None:
        with Doing("make directory", name):
            call.client.mkdir(name, call.top_level)

    return _each(call.names, mkdir)


def _rm(call: Call) -> int:
    def remove(name: bytes) -> None:
        with Doing("remove", name):
            call.client.remove(name, call.top_level)

    return _each(call.names, remove)


def _mv(call: Call) -> int:
    old, new = call.names
    with Doing(f"rename {shown(old)} to", new):
        call.client.rename(old, new, call.top_level)
    return OK


COMMANDS = {
    "cat": Command(
        _cat,
        "NAME...",
        "write files to standard output",
        "sandhost fs cat notes.txt | wc -w",
        (1, _MANY),
    ),
    "put": Command(
        _put,
        "NAME",
        "make NAME hold what standard input brings (--append: add it)",
        "date | sandhost fs put --append log.txt",
        option="--append",
    ),
    "cp": Command(
        _cp, "FROM TO", "copy a file", "sandhost fs cp draft.md final.md", (2, 2)
    ),
    "ls": Command(
        _ls,
        "[NAME]",
        "list a directory, without NAME the root; directories end in / (--json)",
        "sandhost fs ls src",
        (0, 1),
        "--json",
    ),
    "stat": Command(
        _stat,
        "NAME",
        "tell kind, size and time of the last change (--json)",
        "sandhost fs stat --json notes.txt",
        option="--json",
    ),
    "mkdir": Command(
        _mkdir, "NAME...", "make directories", "sandhost fs mkdir out", (1, _MANY)
    ),
    "rm": Command(
        _rm,
        "NAME...",
        "remove files and empty directories",
        "sandhost fs rm old.txt out",
        (1, _MANY),
    ),
    "mv": Command(
        _mv,
        "FROM TO",
        "rename a file or directory",
        "sandhost fs mv a.txt b.txt",
        (2, 2),
    ),
}
"""The commands, by word."""


# What the commands are made of


def _own_connection(client: Client) -> Client:
    """Return a connection of this process's own where there is one (rule 3)."""
    try:
        return client.attach()
    except client_errors().ConnectionLostError:
        raise
    except client_errors().FsProxyError:
        return client  # an older host, or the child has all the connections it may


def _each(names: list[bytes], step: Callable[[bytes], None]) -> int:
    """Do a step for every name; one that fails does not keep the others from it."""
    status = OK
    for name in names:
        try:
            step(name)
        except StepError as why:
            status = _complain(str(why))
    return status


class Opened:
    """A file of the host, open for a while.

    Closed at the end.  After a failure it is left to the end of the connection, so that
    half of a file is not published; on a shared connection that would be too late.
    """

    __slots__ = ("_client", "_fileno", "_mode", "_name", "_top_level")

    def __init__(
        self, client: Client, name: bytes, mode: str, top_level: bool | None
    ) -> None:
        self._client = client
        self._name = name
        self._mode = mode
        self._top_level = top_level
        self._fileno = 0

    def __enter__(self) -> int:
        with Doing("open", self._name):
            self._fileno = self._client.open(self._name, self._mode, self._top_level)
        return self._fileno

    def __exit__(self, kind: object, why: object, trace: object) -> None:
        if kind is None:
            with Doing("close", self._name):
                self._client.close(self._fileno)
        elif self._client.is_shared:
            try:
                self._client.close(self._fileno)
            except OSError:
                return  # what failed before is what is told


def _read_piece(client: Client, name: bytes, fileno: int) -> bytes:
    with Doing("read", name):
        return client.read(fileno, PIECE_BYTES)


def _read_stdin() -> bytes:
    with Doing("read standard input"):
        while True:
            try:
                return os.read(0, PIECE_BYTES)
            except BlockingIOError:
                _wait(0, writable=False)


def _print(text: bytes | str) -> int:
    _write(text.encode() if isinstance(text, str) else text)
    return OK


def _write(data: bytes) -> None:
    with Doing("write to standard output"):
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(1, view) :]
            except BlockingIOError:
                _wait(1, writable=True)


def _wait(fd: int, *, writable: bool) -> None:
    from vfs.client_rare import wait  # noqa: PLC0415 - rarely needed

    wait(fd, writable=writable)


def _complain(text: str, status: int = FAILED) -> int:
    os.write(2, os.fsencode(f"sandhost fs: {text}\n"))
    return status
