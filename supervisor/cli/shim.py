"""``sandhost shim``: installs the shims of ToolExec."""

from __future__ import annotations

from typing import Annotated

import typer

_Tools = Annotated[
    list[str] | None,
    typer.Option("--tool", metavar="NAME", help="One more tool; repeatable."),
]
_Only = Annotated[
    bool, typer.Option("--only", help="Those of --tool and --config, no others.")
]
_Notify = Annotated[
    str | None,
    typer.Option("--notify", metavar="NAME", help="The notification command."),
]
_Config = Annotated[
    str | None,
    typer.Option("--config", metavar="F", help="Also what its sidecars allow."),
]


def shim(
    directory: Annotated[str, typer.Argument(metavar="DIR")],
    tool: _Tools = None,
    notify: _Notify = None,
    config: _Config = None,
    only: _Only = False,
) -> int:
    """Install commands of the tools' names into DIR; each has the host run its tool.

    They are POSIX sh and need curl.  Put DIR first into the PATH of a child.
    """
    from supervisor.config.document import ConfigError, load_config  # noqa: PLC0415
    from supervisor.say import CommandError, print_text  # noqa: PLC0415
    from supervisor.shim import ShimError, install  # noqa: PLC0415 - one command's
    from supervisor.toolexec.kinds import ALL_TOOLS  # noqa: PLC0415

    names = {*(tool or ()), *(() if only else ALL_TOOLS)}
    try:
        if config is not None:
            for section in load_config(
                config, once=True, for_daemon=False
            ).sidecar.values():
                names.update(section.allow or ())
        installed = install(directory, names, notify=notify)
    except (ConfigError, ShimError) as why:
        raise CommandError(str(why)) from None
    print_text(f"{len(installed)} shims in {directory}: {' '.join(installed)}\n")
    return 0
