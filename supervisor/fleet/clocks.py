"""The clocks of this machine, as the fleet's parts read them (FL5)."""

from __future__ import annotations

import time

from supervisor.fleet.step import Moment


def read_clocks() -> Moment:
    """Return the time as this machine reads it."""
    return Moment(time.clock_gettime(time.CLOCK_BOOTTIME), time.time())
