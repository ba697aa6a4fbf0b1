"""Log lines: what is said when there is hardly anything left to say it with."""

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.helpers.command import ENVIRONMENT, TIMEOUT_S

pytestmark = pytest.mark.slow

# A logger is loaded only where it is started; that takes descriptors.
FIRST_LINE = """
import resource, sys
from hostlib.log import Log
log = Log("WARNING", as_json=sys.argv[1] == "json")
most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, most[1]))
log.write("INFO", "nothing")
log.write("ERROR", "none\x1b left", child_id="c1")
try:
    log.start()
except OSError:
    pass
assert "loguru" not in sys.modules
resource.setrlimit(resource.RLIMIT_NOFILE, most)
log.start()
log.write("WARNING", "some again", child_id="c2")
assert "loguru" in sys.modules
"""


def said(form: str) -> list[str]:
    """Return what is on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINE, form],
        check=True, stderr=subprocess.PIPE, timeout=TIMEOUT_S,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    return done.stderr.decode().splitlines()


# A host that has no descriptor to load its logger with says just that, and goes on.
# attack 18
def test_a_first_line_takes_no_descriptor() -> None:
    first, second = map(json.loads, said("json"))
    assert sorted(first) == sorted(second)
    assert [first[name] for name in ("level", "message", "child_id")] == [
        "ERROR", "none? left", "c1",
    ]  # fmt: skip
    assert (second["message"], second["child_id"]) == ("some again", "c2")


@pytest.mark.parametrize("line", [0, 1])
def test_as_text_likewise(line: int) -> None:
    form = r"\d\d:\d\d:\d\d\.\d{3} (ERROR  |WARNING) (none\? left|some again)"
    assert re.fullmatch(form, said("text")[line])


UNREAD = """
import os, sys
from hostlib.log import Log
log = Log("WARNING", as_json=False)
for number in range(2000):
    log.write("WARNING", f"line {number} " + "x" * 100)
print("blocking" if os.get_blocking(2) else "changed", flush=True)
sys.stdin.readline()
log.write("WARNING", "the last")
"""


def read_all(reader: int) -> bytes:
    """Return what can be read at once."""
    said = b""
    while select.select([reader], (), (), 0)[0]:
        said += os.read(reader, 65_536)
    return said


# The host serves on, and other holders of the descriptor may wait for it as before.
@pytest.mark.parametrize("opened", [os.openpty, os.pipe])
def test_a_log_that_nobody_reads(opened: Callable[[], tuple[int, int]]) -> None:
    reader, writer = opened()
    with subprocess.Popen(
        [sys.executable, "-c", UNREAD],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writer,
        env={**os.environ, **ENVIRONMENT},
    ) as host:  # fmt: skip
        try:
            assert host.stdout is not None
            assert host.stdin is not None
            assert select.select([host.stdout], (), (), TIMEOUT_S)[0]
            assert host.stdout.readline() == b"blocking\n"
            said = read_all(reader)
            host.stdin.write(b"\n")
            host.stdin.close()
            assert not host.wait(TIMEOUT_S)
        finally:
            host.kill()
    said += read_all(reader)
    os.close(reader)
    os.close(writer)
    lines = said.decode().splitlines()
    assert len(lines) < 2000
    assert re.search(r"\d+ lines of log are missing here: ", lines[-2])
    assert lines[-1].endswith("the last")


ENDLESS = """
import sys
from hostlib.log import Log
Log("WARNING", as_json=True).take_stderr()
for _ in range(1000):
    sys.stderr.write("x" * 10)
"""


def test_text_without_an_end_of_line_is_written() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS],
        check=True, stderr=subprocess.PIPE, timeout=TIMEOUT_S,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [set(line["message"]) for line in lines] == [{"x"}, {"x"}]
