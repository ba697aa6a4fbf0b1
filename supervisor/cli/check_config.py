"""``sandhost check-config``: faults and warnings of a configuration.

Prints the report and returns the exit status.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hostlib.messages import print_stderr, print_text
from supervisor.cli.help import Command
from supervisor.cli.options import as_json as json_option
from supervisor.cli.options import files

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from supervisor.config.document import Config
    from supervisor.config.read import Fault

FAULTY = 2
"""Exit status: there is a fault."""


@click.command(
    "check-config", cls=Command, epilog="Example: sandhost check-config sandhost.toml"
)
@click.argument("file", metavar="F", shell_complete=files, help="TOML file.")
@json_option
def check_config(file: str, *, as_json: bool) -> int:
    """Tell every fault of a configuration.

    Each comes with its key and the reason. A probable mistake is a warning, and no
    fault.

    Exit status: 0 none, 2 some.
    """
    from supervisor.config import crosschecks, loader  # noqa: PLC0415 - one's own
    from supervisor.config.read import Fault  # noqa: PLC0415 - as above

    untried: tuple[tuple[str, str], ...] = ()
    config: Config | None
    try:
        config = loader.load_config(file, once=True, for_daemon=None, is_used=False)
    except loader.ConfigError as why:
        faults, config = why.faults, why.config
    else:
        faults, untried = _try_profiles(config)
    if config is not None:
        missing = crosschecks.missing_packages(config)
        faults = (*faults, *(Fault(key, why) for key, why in missing))
        _tell_warnings(file, config, {fault.key for fault in faults}, untried)
    if as_json:
        from supervisor.observe.tables import to_json as json_of  # noqa: PLC0415

        print_text(json_of([{"file": file, **fault._asdict()} for fault in faults]))
    else:
        for fault in faults:
            where = ": ".join(filter(None, (file, fault.key)))
            print_stderr("sandhost check-config", f"{where}: {fault.reason}")
        if not faults:
            print_text(f"{file}: no faults\n")
    return FAULTY if faults else 0


def _tell_warnings(
    file: str,
    config: Config,
    faulty: Container[str],
    untried: Iterable[tuple[str, str]],
) -> None:
    """Print the warnings, except those of keys that have a fault."""
    from supervisor.config import loader  # noqa: PLC0415 - as above

    for key, text in (
        *loader.warnings(config),
        *loader.machine_warnings(config),
        *untried,
    ):
        if key not in faulty:
            print_stderr("sandhost check-config", f"{file}: {key}: warning: {text}")


def _try_profiles(
    config: Config,
) -> tuple[tuple[Fault, ...], tuple[tuple[str, str], ...]]:
    """Return the faults of the profiles, and (key, reason) of untried ones."""
    from supervisor.config.walls import find_required_profiles  # noqa: PLC0415

    keys = [key for key, *_ in find_required_profiles(config)]
    if not keys:  # the usual case; a start takes a moment
        return (), ()
    from supervisor.config.profile_trials import try_alone  # noqa: PLC0415
    from supervisor.spawn.launchpad.start import start_launchpad  # noqa: PLC0415

    try:
        launchpad = start_launchpad()
    except OSError as error:
        why = f"what it requires could not be tried: no launchpad: {error.strerror}"
        return (), tuple((key, why) for key in keys)
    return try_alone(launchpad, config)
