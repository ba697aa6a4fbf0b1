"""Log lines: what is said when there is hardly anything left to say it with."""

import json
import os
import re
import subprocess
import sys

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
