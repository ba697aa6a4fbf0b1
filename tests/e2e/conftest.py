"""What the tests from outside get: commands that are forked, not started (see `forkserver`).

Started as it is installed is each command that is looked at while it runs, that a shell or
another program starts, or that needs more than words, directory and environment.
"""

from collections.abc import Iterator

import pytest

from tests.helpers.command import forked_commands
from tests.helpers.forkserver import ForkServer


@pytest.fixture(scope="package", autouse=True)
def fork_server() -> Iterator[ForkServer]:
    """What `sandhost` has commands forked by."""
    with forked_commands() as server:
        yield server
