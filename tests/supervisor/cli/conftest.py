"""What the tests of the command line get: commands that are forked, as in `tests/system/e2e`.

What a start imports is asked of commands that are started (`test_app.py`).
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
