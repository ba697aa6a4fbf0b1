"""What the tests from outside get: commands that are forked, not started (`forkserver`).

Started as it is installed is each command that is looked at while it runs, that a shell or
another program starts, or that needs more than words, directory and environment.
"""

from collections.abc import Iterator

import pytest

from tests.helpers.command import forked_commands
from tests.helpers.forkserver import ForkServer


@pytest.fixture(autouse=True)
def _forked_commands(
    fork_server: ForkServer, daemon_server: ForkServer
) -> Iterator[None]:
    with forked_commands(fork_server, daemon_server):
        yield
