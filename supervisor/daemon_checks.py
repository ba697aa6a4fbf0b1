"""What a daemon asks of a configuration that has no fault of its own.

Whether its policies leave the daemon alone that is there (its directories may not be
those that the file names: they are a living daemon's until it ends), and whether this
machine has what they require.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from supervisor.config.places import check_own
from supervisor.config.read import Fault
from supervisor.profile_trials import try_profiles
from vfs.hostio import in_thread

if TYPE_CHECKING:
    from supervisor.config.directories import Places
    from supervisor.config.document import Config
    from supervisor.host import Host


async def faults_here(host: Host, places: Places, config: Config) -> tuple[Fault, ...]:
    """Return what a daemon cannot use of a configuration; warn of what was not tried.

    Args:
        host: the daemon's.
        places: where its files are.
        config: checked.
    """
    reached = await in_thread(faults_of_places, places, config)
    found = await try_profiles(host.launcher, host.machine, config)
    for key, why in found.untried:
        host.log.write("WARNING", f"{key}: {why}")
    return (*reached, *found.faults)


def faults_of_places(places: Places, config: Config) -> tuple[Fault, ...]:
    """Return the roots and grants that reach what a daemon has for itself."""
    return tuple(Fault(key, why) for key, why in check_own(config, living=places))
