"""``sandhost mcp``: LLM fds for an MCP client (``sandhost fd`` is in ``inside``)."""

from __future__ import annotations

import click

from supervisor.cli.help import Command
from supervisor.cli.options import directories, files


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
    from supervisor.extras import check_packages  # noqa: PLC0415 - one's own
    from supervisor.say import UsageFault  # noqa: PLC0415 - one's own

    try:
        check_packages("serve", "mcp")
    except OSError as why:
        raise UsageFault(str(why.strerror)) from None
    from supervisor.fds.mcp import serve  # noqa: PLC0415 - needs Trio and the extra

    return serve(config, root)
