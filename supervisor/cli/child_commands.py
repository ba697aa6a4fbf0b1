"""``sandhost fs``, ``llm`` and ``fd`` in help, completion and manual.

The program runs them without this module, whose framework is slow to import
(``supervisor.__main__``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from supervisor.cli.help import Command
from supervisor.cli.options import COMMAND_LINE, first_of
from vfs.client.shell import fd as shell_fd
from vfs.client.shell import fs as shell_fs
from vfs.client.shell import llm as shell_llm

if TYPE_CHECKING:
    from collections.abc import Callable

_SETTINGS: dict[str, Any] = {**COMMAND_LINE, "ignore_unknown_options": True}


class ChildCommand(Command):
    """A command that parses its words itself and writes its own help.

    Args:
        text: makes its help.
    """

    def __init__(
        self, name: str | None, *, text: Callable[[], str], **more: Any
    ) -> None:
        super().__init__(
            name, context_settings=_SETTINGS, add_help_option=False, **more
        )
        self.text = text

    def get_help(self, _ctx: click.Context) -> str:
        """Return its help."""
        return self.text()


@click.command(cls=ChildCommand, text=shell_fs.help_text)
@click.argument("words", nargs=-1, shell_complete=first_of(shell_fs.COMMANDS))
def fs(words: tuple[str, ...]) -> int:
    """Read and write files: cat, put, ls, stat, cp ..."""
    return shell_fs.main(list(words))


@click.command(cls=ChildCommand, text=shell_llm.help_text)
@click.argument("words", nargs=-1, shell_complete=first_of(("chat", "quota", "config")))
def llm(words: tuple[str, ...]) -> int:
    """Ask the model: chat, quota, config."""
    return shell_llm.main(list(words))


@click.command(cls=ChildCommand, text=shell_fd.help_text)
@click.argument(
    "words", nargs=-1, shell_complete=first_of((*shell_fd.COMMANDS, "put", "call"))
)
def fd(words: tuple[str, ...]) -> int:
    """Page through large contents: read, search, wrap ..."""
    return shell_fd.main(list(words))
