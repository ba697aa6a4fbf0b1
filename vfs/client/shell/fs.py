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
    read_piece,
    run,
    shown,
    write,
)
from vfs.client.turn import client_errors

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable

    from vfs.client import Client


# The steps of ``sandhost fs``: what fails in one is told in one line.
#
# Two contexts that its commands are made of.


class Doing:
    """A step: what fails inside is told as ``cannot VERB 'NAME': REASON``."""

    __slots__ = ("_names", "_what")

    def __init__(self, verb: str, *names: bytes) -> None:
        self._names = names
        self._what = f"{verb} {' to '.join(map(shown, names))}".rstrip()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, why: BaseException | None, trace: object) -> None:
        # A reader that is gone is no failure of ours (``frame``, rule 3).
        if isinstance(why, OSError) and not isinstance(why, BrokenPipeError):
            raise StepError(f"cannot {self._what}: {self._reason(why)}") from why

    def _reason(self, why: OSError) -> str:
        if why.errno == errno.EOVERFLOW:
            return "the directory has more entries than one answer may tell (100,000)"
        last = {os.path.basename(name.rstrip(b"/")) for name in self._names}
        if why.errno == errno.EINVAL and last & {b".", b".."}:
            return "'.' and '..' name no entry of a directory; write its own name"
        return why.strerror or str(why)


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


_MANY = sys.maxsize


def main(argv: list[str]) -> int:
    """Run ``sandhost fs`` with the arguments behind ``fs``; return the exit status."""
    return run("fs", _run, argv)


def _run(argv: list[str]) -> int:
    word = argv[0] if argv else ""
    if word in ("--help", "-h", "help"):
        return _print(help_text())
    command = COMMANDS.get(word)
    if command is None:
        what = f"unknown command {shown(word)}" if argv else "no command"
        raise UsageError(what)
    options = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    if "--help" in options or "-h" in options:
        return _print(_command_help(word, command))
    call = read(word, command, argv[1:])
    call.client = Door("fs")
    return command.run(call)


# How a command line is read: by hand, for argparse alone costs as much as a whole command
# may.


class Command:
    """One command.

    Attributes:
        run: does it, and returns the exit status.
        usage: its arguments, in words.
        about: what it does, in one line.
        example: a command line.
        least: fewest names.
        most: most names.
        option: an option of its own, beside those of all; empty for none.
    """

    __slots__ = ("about", "example", "least", "most", "option", "run", "usage")

    def __init__(
        self,
        run: Callable[[Call], int],
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


class Call:
    """A command line that was read.

    Attributes:
        names: the arguments.
        option: the command's own option was given.
        top_level: the view asked for; None: what the environment says.
        client: the connection; there when the command runs.
    """

    __slots__ = ("client", "names", "option", "top_level")
    client: Client

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.option = False
        self.top_level: bool | None = None


def read(word: str, command: Command, arguments: list[str]) -> Call:
    """Read the arguments behind a command word.

    Raises:
        UsageError: an option that the command has not, or not as many names as it takes.
    """
    call = Call()
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            call.names += map(os.fsencode, rest)
        elif argument in ("--top-level", "--restricted"):
            call.top_level = argument == "--top-level"
        elif argument.startswith("-") and argument == command.option:
            call.option = True
        elif argument.startswith("-"):
            raise UsageError(f"unknown option {shown(argument)} for {word}")
        else:
            call.names.append(os.fsencode(argument))
    if not command.least <= len(call.names) <= command.most:
        raise UsageError(
            f"{word} takes {command.usage or 'no name'}, got {len(call.names)} names"
        )
    return call


# The commands


def _cat(call: Call) -> int:
    def cat(name: bytes) -> None:
        with Opened(client, name, "r", call.top_level) as fileno:
            while piece := _read_piece(client, name, fileno):
                _write(piece)

    with own_connection(call.client) as client:
        return _each(call.names, cat)


def _put(call: Call) -> int:
    name = call.names[0]
    with own_connection(call.client) as client:
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
        own_connection(call.client) as client,
        Opened(client, source, "r", call.top_level) as read_from,
    ):
        # First: what cannot be read must not empty the target.  And as much as one READ
        # gives: a target that is the source by another name is written as it was.
        piece = _read_piece(client, source, read_from, limits.MAX_READ_BYTES)
        left = 0
        if len(piece) == limits.MAX_READ_BYTES:
            left = _check_apart(call, source, target)
        with Opened(client, target, "w", call.top_level) as write_to:
            while piece:
                with Doing("write", target):
                    client.write(write_to, piece)
                left -= len(piece)
                piece = _read_piece(client, source, read_from)
            if left > 0:
                raise StepError(
                    f"{shown(source)} became {left} bytes shorter while it was copied to"
                    f" {shown(target)}; if both are one file, it is cut off now"
                )
    return OK


def _check_apart(call: Call, source: bytes, target: bytes) -> int:
    """Return a source's size; raise if two names look like names of one file.

    STAT tells no more than that, and where it must not be asked what was lost is told.
    """
    client, claim = call.client, call.top_level
    is_top_level = client.top_level if claim is None else claim
    try:
        one = client.stat(source, claim)
    except OSError:
        return 0  # it is gone by now
    if target.startswith(b"/") and not is_top_level:
        return one.size  # where one may write only, to ask would be a security event
    try:
        other = client.stat(target, claim)
    except OSError:
        return one.size  # there is no target yet
    if (one.size, one.mtime_ns) == (other.size, other.mtime_ns):
        raise StepError(
            f"{shown(source)} and {shown(target)} look like the same file: size and time"
            " of the last change are equal; copy it to a new name"
        )
    return one.size


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
    with Doing("rename", old, new):
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
    """Return what ``--help`` says."""
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


# What the commands are made of


def _each(names: list[bytes], step: Callable[[bytes], None]) -> int:
    """Do a step for every name; one that fails does not keep the others from it."""
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
    with Doing("read", name):
        return client.read(fileno, size)


def _read_stdin() -> bytes:
    with Doing("read standard input"):
        return read_piece()


def _print(text: bytes | str) -> int:
    _write(text.encode() if isinstance(text, str) else text)
    return OK


def _write(data: bytes) -> None:
    with Doing("write to standard output"):
        write(data)
