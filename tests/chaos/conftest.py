"""What chaos gets: a host in the test's process, and hosts in processes of their own."""

import faulthandler
from collections.abc import Iterator

import pytest

from tests.helpers.figures import tell
from tests.helpers.hostprocess import Hosts, hosts
from tests.helpers.hosts import stage

__all__ = ["stage", "tell"]


@pytest.fixture(autouse=True)
def _no_dump() -> None:
    """Call off the dump of all stacks: chaos takes long, and has time limits of its own."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def host_processes() -> Iterator[Hosts]:
    """A process that becomes one host after the other."""
    with hosts() as started:
        yield started
