"""What chaos gets: hosts in processes of their own, and the number of rounds."""

from collections.abc import Iterator

import pytest

from tests.helpers.hostprocess import Hosts, hosts


@pytest.fixture
def host_processes() -> Iterator[Hosts]:
    """A process that becomes one host after the other."""
    with hosts() as started:
        yield started
