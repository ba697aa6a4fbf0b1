"""Checks of a daemon on a configuration without faults.

Whether its policies stay out of the running daemon's directories (which stay the same
until it ends, whatever the file names), and whether this machine has the required
layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostlib.threads import in_thread
from supervisor.config.places import check_own
from supervisor.config.profile_trials import try_profiles
from supervisor.config.read import Fault

if TYPE_CHECKING:
    from hostlib.log import Log
    from supervisor.config.directories import Places
    from supervisor.config.document import Config
    from supervisor.sandbox.plan import Machine
    from supervisor.spawn.launcher import Launcher


async def faults_here(
    launcher: Launcher, machine: Machine, log: Log, places: Places, config: Config
) -> tuple[Fault, ...]:
    """Return the faults that a daemon finds; warn of profiles that were not tried.

    Args:
        launcher: starts the trials.
        machine: the layers that this machine gives.
        log: of the host.
        places: the daemon's directories.
        config: checked.
    """
    refusal = await in_thread(faults_of_places, places, config)
    found = await try_profiles(launcher, machine, config)
    for key, why in found.untried:
        log.write("WARNING", f"{key}: {why}")
    return (*refusal, *found.faults)


def faults_of_places(places: Places, config: Config) -> tuple[Fault, ...]:
    """Return the roots and grants that reach a daemon's own directories."""
    return tuple(Fault(key, why) for key, why in check_own(config, living=places))
