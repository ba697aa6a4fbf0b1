"""Machines in which a fleet is killed and measured are apart, and leave nothing."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.fleetmachines import Machine, UnavailableError, machines
from tests.helpers.spawning import watching

pytestmark = pytest.mark.slow

REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 1), timeout=float(sys.argv[2]))
except ConnectionRefusedError:
    print("reached")
except OSError:
    print("not reached")
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Return what gives back at the end what a test has taken."""
    with ExitStack() as stack:
        yield stack


def reach(one: Machine, other: Machine, patience_s: float) -> str:
    """Tell whether a machine reaches another one: it refuses, for nobody listens."""
    words = (sys.executable, "-I", "-S", "-c", REACH, other.address, str(patience_s))
    return one.run(*words).stdout.strip()


# spec FL8: the tests of kills stand on these machines
def test_machines_are_apart_can_be_cut_off_and_leave_nothing(stack: ExitStack) -> None:
    ends = stack.enter_context(ExitStack())
    try:
        a, b = ends.enter_context(machines("a", "b"))
    except UnavailableError as why:
        pytest.skip(str(why))
    assert a.daemon in a.pids()
    assert a.daemon not in b.pids()
    assert reach(a, b, 60.0) == "reached"
    b.cut()
    assert reach(a, b, 0.2) == "not reached"
    b.restore()
    assert reach(a, b, 60.0) == "reached"
    b.freeze()
    b.thaw()
    assert reach(b, a, 60.0) == "reached"
    found = stack.enter_context(watching([*a.pids(), *b.pids()]))
    b.freeze()
    ends.close()
    assert not any(one.is_alive() for one in found)
    left = [*a.groups, *b.groups, str(a.where), str(b.where)]
    assert not [name for name in left if os.path.exists(name)]
    links = {one.name for one in Path("/sys/class/net").iterdir()}
    assert not links & {"a", "b", "hub"}
