"""``sandhost fs ...``: the files behind FD 3, for shell scripts inside a child.

Rules of this file.

1. It starts fast (within 2.5x of a bare interpreter): it parses arguments by hand, and
   imports only modules that ``vfs.client`` needs.
2. Names are bytes, which go from the shell to the host unchanged.
3. Commands that hold a file open (cat, put, cp) attach a connection of their own.  When
   they are killed, no file stays open and no request is torn on FD 3, which other
   processes of the child share, and an unfinished file is not published.  With a host
   without ATTACH they use FD 3, turn by turn (spec T5).
"""

from __future__ import annotations

import errno
import os
import sys
import time

from protocol import limits
from vfs.client.shell.frame import (
    OK,
    PIECE_BYTES,
    Door,
    StepError,
    UsageError,
    complain,
    own_connection,
    quote,
    read_piece,
    run,
    write,
)
from vfs.client.turn import client_errors

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfs.client import Client


# Steps of commands


class Step:
    """A block whose failure is reported as ``cannot VERB 'NAME': REASON``."""

    __slots__ = ("_names", "_what")

    def __init__(self, verb: str, *names: bytes) -> None:
        self._names = names
        self._what = f"{verb} {' to '.join(map(quote, names))}".rstrip()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, why: BaseException | None, trace: object) -> None:
        # The end of the reader is no failure (``frame``, rule 3).
        if isinstance(why, OSError) and not isinstance(why, BrokenPipeError):
            raise StepError(f"cannot {self._what}: {self._reason(why)}") from why

    def _reason(self, why: OSError) -> str:
        if why.errno == errno.EOVERFLOW:
            return "the directory has more entries than one answer may tell (100,000)"
        last = {os.path.basename(name.rstrip(b"/")) for name in self._names}
        if why.errno == errno.EINVAL and last & {b".", b".."}:
            return "'.' and '..' name no entry of a directory; write its own name"
        return why.strerror or str(why)


class FileStep:
    """A block with an open file of the host, which is closed at its end.

    After a failure the end of the connection closes the file, so that half of it is not
    published; on a shared connection it is closed at once.
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
        with Step("open", self._name):
            self._fileno = self._client.open(self._name, self._mode, self._top_level)
        return self._fileno

    def __exit__(self, kind: object, why: object, trace: object) -> None:
        if kind is None:
            with Step("close", self._name):
                self._client.close(self._fileno)
        elif self._client.is_shared:
            try:
                self._client.close(self._fileno)
            except OSError:
                return  # the first failure is reported


_MANY = sys.maxsize


def main(argv: list[str]) -> int:
    """Run ``sandhost fs`` with the arguments after ``fs``; return the exit status."""
    return run("fs", _run, argv)


def _run(argv: list[str]) -> int:
    word = argv[0] if argv else ""
    if word in ("--help", "-h", "help"):
        return _print(help_text())
    command = COMMANDS.get(word)
    if command is None:
        what = f"unknown command {quote(word)}" if argv else "no command"
        raise UsageError(what)
    options = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    if "--help" in options or "-h" in options:
        return _print(_command_help(word, command))
    call = read(word, command, argv[1:])
    call.client = Door("fs")
    return command.run(call)


# Parsing by hand: argparse alone takes as long as a whole command.


class Command:
    """One command of ``sandhost fs``.

    Attributes:
        run: runs it, and returns the exit status.
        usage: its arguments, in words.
        about: its effect, in one line.
        example: a command line.
        least: fewest names.
        most: most names.
        option: its own option, beside those of all commands; empty for none.
    """

    __slots__ = ("about", "example", "least", "most", "option", "run", "usage")

    def __init__(
        self,
        run: Callable[[FsCall], int],
        usage: str,
        about: str,
        example: str,
        names: tuple[int, int] = (1, 1),
        option: str = "",
    ) -> None:
        self.run = run
        self.usage = usage
        self.about = about
        self.example = example
        self.least, self.most = names
        self.option = option


class FsCall:
    """A parsed command line.

    Attributes:
        names: the arguments.
        option: the command's own option was given.
        top_level: the wanted view; None for that of the environment.
        client: the connection; set before the command runs.
    """

    __slots__ = ("client", "names", "option", "top_level")
    client: Client

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.option = False
        self.top_level: bool | None = None


def read(word: str, command: Command, arguments: list[str]) -> FsCall:
    """Parse the arguments after a command word.

    Raises:
        UsageError: an unknown option, or a wrong number of names.
    """
    call = FsCall()
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            call.names += map(os.fsencode, rest)
        elif argument in ("--top-level", "--restricted"):
            call.top_level = argument == "--top-level"
        elif argument.startswith("-") and argument == command.option:
            call.option = True
        elif argument.startswith("-"):
            raise UsageError(f"unknown option {quote(argument)} for {word}")
        else:
            call.names.append(os.fsencode(argument))
    if not command.least <= len(call.names) <= command.most:
        raise UsageError(
            f"{word} takes {command.usage or 'no name'}, got {len(call.names)} names"
        )
    return call


# The commands


def _cat(call: FsCall) -> int:
    def cat(name: bytes) -> None:
        with FileStep(client, name, "r", call.top_level) as fileno:
            while piece := _read_piece(client, name, fileno):
                _write(piece)

    with own_connection(call.client) as client:
        return _each(call.names, cat)


def _put(call: FsCall) -> int:
    name = call.names[0]
    with own_connection(call.client) as client:
        with FileStep(
            client, name, "a" if call.option else "w", call.top_level
        ) as fileno:
            while piece := _read_stdin():
                with Step("write", name):
                    client.write(fileno, piece)
    return OK


def _cp(call: FsCall) -> int:
    source, target = call.names
    if os.path.normpath(source) == os.path.normpath(target):
        raise StepError(f"{quote(source)} and {quote(target)} are the same file")
    with (
        own_connection(call.client) as client,
        FileStep(client, source, "r", call.top_level) as read_from,
    ):
        # Read before the target is emptied, in case the source cannot be read.  A source
        # that fits into one READ is copied even if the target is the same file.
        piece = _read_piece(client, source, read_from, limits.MAX_READ_BYTES)
        left = 0
        if len(piece) == limits.MAX_READ_BYTES:
            left = _check_apart(call, source, target)
        with FileStep(client, target, "w", call.top_level) as write_to:
            while piece:
                with Step("write", target):
                    client.write(write_to, piece)
                left -= len(piece)
                piece = _read_piece(client, source, read_from)
            if left > 0:
                raise StepError(
                    f"{quote(source)} became {left} bytes shorter while it was copied to"
                    f" {quote(target)}; if both are one file, it is cut off now"
                )
    return OK


def _check_apart(call: FsCall, source: bytes, target: bytes) -> int:
    """Return a source's size; raise if two names look like names of one file.

    STAT shows only size and time.  Without it, ``_cp`` reports lost bytes at the end.
    """
    client, claim = call.client, call.top_level
    is_top_level = client.top_level if claim is None else claim
    try:
        one = client.stat(source, claim)
    except OSError:
        return 0  # it is gone by now
    if target.startswith(b"/") and not is_top_level:
        return one.size  # without the right to read, STAT would be a security event
    try:
        other = client.stat(target, claim)
    except OSError:
        return one.size  # there is no target yet
    if (one.size, one.mtime_ns) == (other.size, other.mtime_ns):
        raise StepError(
            f"{quote(source)} and {quote(target)} look like the same file: size and time"
            " of the last change are equal; copy it to a new name"
        )
    return one.size


def _ls(call: FsCall) -> int:
    name = call.names[0] if call.names else b"."
    with Step("list", name):
        if call.option:
            return _print(call.client.listdir_json(name, call.top_level) + b"\n")
        rows = call.client.listdir(name, call.top_level)
    lines = [
        os.fsencode(entry) + (b"/\n" if kind == "directory" else b"\n")
        for entry, kind in rows
    ]
    return _print(b"".join(sorted(lines)))


def _stat(call: FsCall) -> int:
    name = call.names[0]
    with Step("stat", name):
        if call.option:
            return _print(call.client.stat_json(name, call.top_level) + b"\n")
        found = call.client.stat(name, call.top_level)
    changed = time.strftime(
        "%Y-%m-%dT%H:%M:%SZ", time.gmtime(found.mtime_ns // 1_000_000_000)
    )
    line = f": {found.kind}, {found.size} bytes, changed {changed}\n"
    return _print(name + line.encode())


def _mkdir(call: FsCall) -> int:
    def mkdir(name: bytes) -> None:
        with Step("make directory", name):
            call.client.mkdir(name, call.top_level)

    return _each(call.names, mkdir)


def _rm(call: FsCall) -> int:
    def remove(name: bytes) -> None:
        with Step("remove", name):
            call.client.remove(name, call.top_level)

    return _each(call.names, remove)


def _mv(call: FsCall) -> int:
    old, new = call.names
    with Step("rename", old, new):
        try:
            call.client.rename(old, new, call.top_level)
        except client_errors().UnknownCommandError as why:
            raise OSError(errno.ENOSYS, f"{why.strerror}; use cp and rm") from None
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


# Help

_GENERAL_OPTIONS = """
options:
  --top-level    use the top-level view of the host's files
  --restricted   use the restricted view (neither: $FSPROXY_TOP_LEVEL says which)
  --             what follows are names
  --help         this text
"""


def help_text() -> str:
    """Return the text of ``--help``."""
    rows = "".join(
        f"  {word:5} {command.usage:8} {command.about}\n"
        for word, command in COMMANDS.items()
    )
    return (
        "usage: sandhost fs COMMAND [OPTION]... [NAME]...\n\n"
        "The files that the host keeps for this child.\n\n"
        f"{rows}{_GENERAL_OPTIONS}"
        "\nexample: sandhost fs cat in.txt | sort | sandhost fs put out.txt\n"
        "\nexit status: 0 done, 1 something failed, 2 wrong usage or not in a child\n"
    )


def _command_help(word: str, command: Command) -> str:
    """Return the help of one command."""
    option = f"[{command.option}] " if command.option else ""
    return (
        f"usage: sandhost fs {word} {option}{command.usage}\n\n{command.about}\n"
        f"{_GENERAL_OPTIONS}\nexample: {command.example}\n"
    )


# Parts of commands


def _each(names: list[bytes], step: Callable[[bytes], None]) -> int:
    """Do a step for every name, also after one that failed; return the status."""
    status = OK
    for name in names:
        try:
            step(name)
        except StepError as why:
            status = complain("fs", str(why))
    return status


def _read_piece(
    client: Client, name: bytes, fileno: int, size: int = PIECE_BYTES
) -> bytes:
    with Step("read", name):
        return client.read(fileno, size)


def _read_stdin() -> bytes:
    with Step("read standard input"):
        return read_piece()


def _print(text: bytes | str) -> int:
    _write(text.encode() if isinstance(text, str) else text)
    return OK


def _write(data: bytes) -> None:
    with Step("write to standard output"):
        write(data)
