"""The commands of LLM fds: ``sandhost fd`` (see ``inside``) and ``sandhost mcp``."""

from __future__ import annotations

import click

from supervisor.cli.help import Command
from supervisor.cli.options import INSIDE, directories, files


@click.command(cls=Command, context_settings=INSIDE, add_help_option=False)
@click.argument("words", nargs=-1)
def fd(words: tuple[str, ...]) -> int:
    """Page through large contents: read, search, wrap ..."""
    from vfs.fdcmd import main  # noqa: PLC0415 - one command's

    return main(list(words))


@click.command(cls=Command, epilog="Example: sandhost mcp --root notes")
@click.option(
    "--config", metavar="F", shell_complete=files, help="Which tools, and page sizes."
)
@click.option(
    "--root",
    metavar="DIR",
    shell_complete=directories,
    help="Where fd_to_file may write.",
)
def mcp(config: str | None, root: str | None) -> int:
    """Serve LLM fds to an MCP client on stdin and stdout.

    Inside a child they are the host's, and the options are the host's to say; elsewhere
    they are this program's own.
    """
    from supervisor.fds.mcp import serve  # noqa: PLC0415 - needs Trio and the extra

    return serve(config, root)
