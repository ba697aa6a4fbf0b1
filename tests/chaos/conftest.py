"""What chaos gets: a host in the test's process, and hosts in processes of their own."""

from collections.abc import Iterator

import pytest

from tests.helpers.figures import tell
from tests.helpers.hostprocess import Hosts, hosts
from tests.helpers.hosts import stage

__all__ = ["stage", "tell"]


@pytest.fixture
def host_processes() -> Iterator[Hosts]:
    """A process that becomes one host after the other."""
    with hosts() as started:
        yield started
