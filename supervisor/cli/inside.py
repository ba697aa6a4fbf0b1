"""``sandhost fs`` and ``sandhost llm``, for their place in the help and in completion.

The program does them without this module, which takes the framework to import
(``supervisor.__main__``).
"""

from __future__ import annotations

import click

from supervisor.cli.help import Command
from supervisor.cli.options import INSIDE, one_of


@click.command(cls=Command, context_settings=INSIDE, add_help_option=False)
@click.argument("words", nargs=-1)
def fs(words: tuple[str, ...]) -> int:
    """Read and write files: cat, put, ls, stat, cp ..."""
    from vfs.fscmd import main  # noqa: PLC0415 - one command's

    return main(list(words))


@click.command(cls=Command, context_settings=INSIDE, add_help_option=False)
@click.argument("words", nargs=-1, shell_complete=one_of("chat", "quota", "config"))
def llm(words: tuple[str, ...]) -> int:
    """Ask the model: chat, quota, config."""
    from vfs.llmcmd import main  # noqa: PLC0415 - one command's

    return main(list(words))
