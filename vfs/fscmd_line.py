"""How a command line of ``sandhost fs`` is read.

By hand: argparse alone costs as much as a whole command may.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from vfs.client import Client

_CONTROL = bytes(63 if c < 32 or c == 127 else c for c in range(256))


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


class UsageError(Exception):
    """The command line is wrong; the text says how."""


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
            what = shown(os.fsencode(argument))
            raise UsageError(f"unknown option {what} for {word}")
        else:
            call.names.append(os.fsencode(argument))
    if not command.least <= len(call.names) <= command.most:
        raise UsageError(
            f"{word} takes {command.usage or 'no name'}, got {len(call.names)} names"
        )
    return call


def shown(name: bytes) -> str:
    """Return a name fit for one line of text, quoted."""
    return f"'{os.fsdecode(name.translate(_CONTROL))}'"
