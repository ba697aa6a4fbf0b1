"""The stand-in for a model's provider, as a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.architecture.tree import ROOT
from tests.helpers.command import ENVIRONMENT
from tests.helpers.llmscene import KEY


@contextmanager
def provider_process(log: Path | None = None) -> Iterator[str]:
    """Run it; yield its base URL.

    Args:
        log: what it appends a line to for each request, and for each piece sent.
    """
    command = [sys.executable, "-m", "demo.provider", "--key", KEY]
    if log is not None:
        command += ["--log", str(log)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().decode().strip()
        finally:
            process.kill()
