"""``sandhost serve``: the daemon's words.

Turns options into ``ServeOptions`` for ``supervisor.daemon.serve``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hostlib.messages import print_stderr
from hostlib.paths import absolute
from supervisor.cli.help import Command
from supervisor.cli.options import files
from supervisor.cli.options import log_format as log_format_option
from supervisor.cli.options import log_level as log_level_option

if TYPE_CHECKING:
    from supervisor.spawn.launchpad.start import LaunchpadProcess


@click.command(cls=Command, epilog="Example: sandhost serve --config sandhost.toml")
@click.option("--config", metavar="F", shell_complete=files, help="TOML file.")
@click.option(
    "--control", metavar="PATH", shell_complete=files, help="Control socket's place."
)
@log_level_option("info")
@log_format_option
@click.pass_obj
def serve(
    launchpad: LaunchpadProcess,
    config: str | None,
    control: str | None,
    log_level: str,
    log_format: str | None,
) -> int:
    """Be the daemon: keep the configured children.

    It listens at its control socket, where the other commands ask it.
    SIGTERM and SIGINT stop it, SIGHUP reloads. Exit status: 0 all
    went well, 78 the configuration has a fault, else 1.
    """
    from supervisor.config.document import Config  # noqa: PLC0415
    from supervisor.config.loader import ConfigError, load_config  # noqa: PLC0415
    from supervisor.daemon.serve import BAD_CONFIG, ServeOptions, run_daemon  # noqa: PLC0415

    try:
        configured = Config() if config is None else load_config(config)
    except ConfigError as why:
        for fault in why.faults:
            print_stderr("sandhost serve", f"cannot use {config}: {fault}")
        return BAD_CONFIG
    wanted = log_format or configured.host.log_format
    options = ServeOptions(
        config=configured,
        config_path=None if config is None else absolute(config),
        control=control,
        log_level=log_level,
        log_json=None if wanted is None else wanted == "json",
    )
    return run_daemon(launchpad, options)
