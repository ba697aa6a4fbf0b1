"""A host that explains what it holds: the stage of the leak check's tests.

Import the fixture `stage` from here: it tells the host what the test itself holds to
talk to its children, so that the report is clean to begin with.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from supervisor.doctor.leaks import check_host
from tests.helpers.hosts import Stage, opened


def own(stage: Stage, *numbers: int) -> None:
    """Say that descriptors of this process are the test's and not the host's."""
    stage.host.holders.add(lambda: [(fd, "test") for fd in numbers])


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """A host that knows what the test holds to talk to its children."""
    async with opened(tmp_path) as stage:
        stage.host.holders.add(
            lambda: [(fd, "test") for fd in (stage.null, *stage.pipes)]
        )
        yield stage


@contextlib.contextmanager
def leaked() -> Iterator[int]:
    """A descriptor that nobody explains."""
    fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


async def clean(stage: Stage) -> dict[str, Any]:
    """Check, and expect to find nothing; gives the report."""
    report: dict[str, Any] = await check_host(stage.host)
    found = {k: v for k, v in report.items() if isinstance(v, list) and v}
    assert report["clean"], found
    assert not found
    assert not any(report["counts"].values())
    return report
