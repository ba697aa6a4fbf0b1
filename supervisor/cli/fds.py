"""The commands of LLM fds: ``sandhost fd`` (for ``--help`` only) and ``sandhost mcp``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

_LINE = {"allow_interspersed_args": False}


def register(app: typer.Typer) -> None:
    """Add the commands."""
    commands: tuple[tuple[str, Callable[..., int], str | None], ...] = (
        ("fd", _fd, None),
        ("mcp", _mcp, "Example: sandhost mcp --root notes"),
    )
    for name, run, epilog in commands:
        settings = _LINE if name == "fd" else None
        app.command(name, context_settings=settings, epilog=epilog)(run)


def _fd(words: Annotated[list[str] | None, typer.Argument()] = None) -> int:
    """Inside a child: read, search, wrap, write-to-file ... on FD 3."""
    from vfs.fdcmd import main  # noqa: PLC0415 - never reached by the script

    return main(words or [])


def _mcp(
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="F", help="Which tools, and page sizes."),
    ] = None,
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="DIR", help="Where fd_to_file may write."),
    ] = None,
) -> int:
    """Serve LLM fds to an MCP client on stdin and stdout.

    Inside a child they are the host's, and the options are the host's to say; elsewhere
    they are this program's own.
    """
    from supervisor.fds.mcp import serve  # noqa: PLC0415 - needs Trio and the extra

    return serve(config, root)
