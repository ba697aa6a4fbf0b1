"""Children on the machines of a fleet, from a Python program.

from sandhost import fleet

with fleet.create("/srv/repo") as child:
    print(child.exec(["make", "test"]).status)
"""

from supervisor.cluster.commands import (
    CommandResult,
    CommandTimeoutError,
    FleetChildError,
)
from supervisor.cluster.fleet_child import FleetChild, create, find
from supervisor.control.client import ControlError

__all__ = [
    "CommandResult",
    "CommandTimeoutError",
    "ControlError",
    "FleetChild",
    "FleetChildError",
    "create",
    "find",
]
