"""Fixtures of chaos: a host in the test's process, and hosts in their own ones."""

import faulthandler
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.figures import tell
from tests.helpers.stage import stage
from tests.system.chaos.hostprocess import Hosts, hosts

__all__ = ["stage", "tell"]


@pytest.fixture(autouse=True)
def _no_dump() -> None:
    """Call off the dump of all stacks.

    Chaos takes long, and has time limits of its own.
    """
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def checker() -> Iterator[subprocess.Popen[bytes]]:
    """The process that checks files of records (`records.py`)."""
    command = [sys.executable, "-I", str(Path(__file__).with_name("records.py"))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def host_processes() -> Iterator[Hosts]:
    """A process that becomes one host after the other, for the tests of a file."""
    with hosts() as started:
        yield started
