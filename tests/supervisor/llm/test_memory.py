"""The host's memory for one child's requests to the model is small (attack 42).

A host of its own, whose memory is asked of the kernel; the child is
`tests/helpers/children/hoarder.py`.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT
from tests.helpers.command import TIMEOUT_S, heard, running
from tests.helpers.provider import key_file, provider_process
from tests.helpers.rounds import LONG_ALONE

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
GROWTH = 128 * MIB
LEFT = 40 * MIB
"""Memory that may stay: buffers of open connections, loaded modules."""


def memory_of(pid: int) -> tuple[int, int]:
    """Return (bytes in memory now, the most there ever were) of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines)
    now, most = (int(facts[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return 1024 * now, 1024 * most


@contextmanager
def hoarding(where: Path, kind: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a host with the child that asks for much."""
    (where / "root").mkdir()
    config = where / "config.toml"
    child = (sys.executable, "-m", "tests.helpers.children.hoarder", kind)
    with provider_process() as base_url:
        config.write_text(
            f'[llm]\nbase_url = "{base_url}"\napi_key_file = "{key_file(where)}"\n'
            'endpoint = true\n[tools]\nenabled = ["read_fd", "list_fds"]\n'
        )
        words = ("--config", config, "--sandbox", "none", "--root", where / "root")
        with running(
            *("run", *words, "--", *child), stdin=subprocess.PIPE, cwd=ROOT, stderr=None
        ) as process:
            yield process


# attack 42: what each asks for is refused at once where it would be too much, and answered
# where it is not; what was taken is given back.
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "served", "refused"),
    [
        ("prompt", "OK {", "[Errno 12] Cannot allocate memory"),
        pytest.param(
            *("short_names", None, "failed to read input files data"), marks=LONG_ALONE
        ),
        # Whether two of these meet is the machine's business.
        ("answers", None, None),
        ("endpoint", "OK 200 {", "too_many_bytes"),
        ("images", "OK 200 {", "retry-after 1"),
        ("call", "OK <fd_error", None),
    ],
)
def test_one_child_takes_little_memory(
    tmp_path: Path, kind: str, served: str | None, refused: str | None
) -> None:
    with hoarding(tmp_path, kind) as process:
        assert process.stdin is not None
        heard(process, b"ready\n")
        before, _ = memory_of(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        said = heard(process, b"over\n").decode().splitlines()[:-1]
        _, most = memory_of(process.pid)
        assert most - before < GROWTH, f"{(most - before) / MIB:.0f} MiB"
        deadline = time.monotonic() + TIMEOUT_S
        while memory_of(process.pid)[0] - before > LEFT:
            assert time.monotonic() < deadline, "it was not given back"
            time.sleep(0.02)
        answers = [text.strip('"').replace("\\", "") for text in said]
        assert len(answers) == (12 if kind == "short_names" else 64)
        if refused is not None:
            assert any(refused in text for text in answers), answers
        if served is not None:
            assert any(text.startswith(served) for text in answers), answers
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(TIMEOUT_S) == 0
