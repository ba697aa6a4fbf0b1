"""``sandhost shim``: installs the shims of ToolExec."""

from __future__ import annotations

import click

from supervisor.cli.help import Command
from supervisor.cli.options import directories, files


@click.command(cls=Command, epilog="Example: sandhost shim bin --tool jq")
@click.argument("directory", metavar="DIR", shell_complete=directories)
@click.option(
    "--tool", metavar="NAME", multiple=True, help="One more tool; repeatable."
)
@click.option("--notify", metavar="NAME", help="The notification command.")
@click.option(
    "--config",
    metavar="F",
    shell_complete=files,
    help="Also what its sidecars allow.",
)
@click.option("--only", is_flag=True, help="Those of --tool and --config, no others.")
def shim(
    directory: str,
    *,
    tool: tuple[str, ...],
    notify: str | None,
    config: str | None,
    only: bool,
) -> int:
    """Install commands that run the host's tools.

    DIR gets one of each tool's name; they are POSIX sh and need curl.  Put DIR first into the PATH of a child.
    """
    from hostlib.messages import CommandError, print_text  # noqa: PLC0415
    from supervisor.config.loader import ConfigError, load_config  # noqa: PLC0415
    from supervisor.toolexec.kinds import ALL_TOOLS  # noqa: PLC0415
    from supervisor.toolexec.shim import ShimError, install  # noqa: PLC0415 - one command's

    names = {*tool, *(() if only else ALL_TOOLS)}
    try:
        if config is not None:
            for section in load_config(
                config, once=True, for_daemon=False, is_used=False
            ).sidecar.values():
                names.update(section.allow or ())
        installed = install(directory, names, notify=notify)
    except (ConfigError, ShimError) as why:
        raise CommandError(str(why)) from None
    print_text(f"{len(installed)} shims in {directory}: {' '.join(installed)}\n")
    return 0
