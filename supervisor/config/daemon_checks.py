"""What a daemon asks of a configuration that has no fault of its own.

Whether its policies leave the daemon alone that is there (its directories may not be
those that the file names: they are a living daemon's until it ends), and whether this
machine has what they require.
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
    """Return what a daemon cannot use of a configuration; warn of what was not tried.

    Args:
        launcher: starts what is tried.
        machine: what it knows of the layers that this machine gives.
        log: of the host.
        places: where its files are.
        config: checked.
    """
    reached = await in_thread(faults_of_places, places, config)
    found = await try_profiles(launcher, machine, config)
    for key, why in found.untried:
        log.write("WARNING", f"{key}: {why}")
    return (*reached, *found.faults)


def faults_of_places(places: Places, config: Config) -> tuple[Fault, ...]:
    """Return the roots and grants that reach what a daemon has for itself."""
    return tuple(Fault(key, why) for key, why in check_own(config, living=places))
