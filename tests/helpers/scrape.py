"""A stage's metrics listener, and `curl` as a stranger who asks it.

Used by `tests/supervisor/observe/`; import `stage` of
`tests.helpers.stage` with it.
"""

import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from supervisor.config.metrics import MetricsSection
from supervisor.observe.listener import serve_metrics
from supervisor.observe.registry import Metrics
from tests.helpers import canary
from tests.helpers.stage import Stage


@dataclass(frozen=True, slots=True)
class Reply:
    """The response to curl: the head with its status line, and the body."""

    head: str
    body: str

    @property
    def status(self) -> int:
        """The status code."""
        return int(self.head.split()[1])


class Listener:
    """A listener under test.

    Attributes:
        metrics: the figures that it tells.
        url: its root, without the last slash.
    """

    def __init__(self, metrics: Metrics) -> None:
        assert metrics.address is not None
        self.metrics = metrics
        self.address = metrics.address
        self.url = f"http://{metrics.address[0]}:{metrics.address[1]}"

    async def curl(self, path: str, *options: str) -> Reply:
        """Ask as a stranger does."""
        return await trio.to_thread.run_sync(curl, self.url + path, *options)

    async def figures(self) -> dict[str, float]:
        """Scrape; return the samples by `name{label=value,...}`."""
        return parsed((await self.curl("/metrics")).body)


def curl(url: str, *options: str) -> Reply:
    """Run curl to its end."""
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is not installed")
    done = subprocess.run(
        [program, "-sS", "-i", "--max-time", "10", *options, url],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    canary.told(f"what {url} tells", done.stdout.encode())
    head, _, body = done.stdout.partition("\n\n")
    return Reply(head, body)


def parsed(text: str) -> dict[str, float]:
    """Parse the text of `/metrics` with the client library's own parser."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = (
                sample.value
            )
    return found


@contextlib.asynccontextmanager
async def listening(stage: Stage, *, page: bool = False) -> AsyncIterator[Listener]:
    """Serve a stage's figures at a port that the kernel chooses."""
    section = MetricsSection(listen="tcp://127.0.0.1:0", page=page)
    async with trio.open_nursery() as nursery:
        metrics: Metrics = await nursery.start(serve_metrics, stage.host, section)
        yield Listener(metrics)
        nursery.cancel_scope.cancel()
    del stage.host.journal.taps[:]
