"""``sandhost mcp``: LLM fds for an MCP client; a child has ``sandhost fd``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from supervisor.cli.help import Command
from supervisor.cli.options import directories, files

if TYPE_CHECKING:
    from supervisor.spawn.launchpad.start import LaunchpadProcess


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
@click.option(
    "--files",
    "has_files",
    is_flag=True,
    help="Inside a child: also read, write, edit, list, search and exec.",
)
@click.pass_obj
def mcp(
    launchpad: LaunchpadProcess | None,
    config: str | None,
    root: str | None,
    *,
    has_files: bool,
) -> int:
    """Serve LLM fds to an MCP client on stdin and stdout.

    Inside a child they are the host's, and the options are the host's to say; elsewhere
    they are this program's own.  The tools of --files are system calls of this program, and so in the child's rights.
    """
    from hostlib.extras import check_packages  # noqa: PLC0415 - one's own
    from hostlib.messages import UsageFault  # noqa: PLC0415 - one's own

    try:
        check_packages("serve", "mcp")
    except OSError as why:
        raise UsageFault(str(why.strerror)) from None
    from supervisor.mcp.server import serve  # noqa: PLC0415 - needs Trio and the extra

    return serve(config, root, launchpad if has_files else None)
