"""The provider's key is in no page of a child's memory, nor of its tools'."""

import os
import re
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers.canary_forms import searched_forms
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.provider import provider_process
from tests.helpers.stage import CHILDREN
from tests.helpers.toolupgrade import Tools, until

pytestmark = [pytest.mark.slow, pytest.mark.attack]

ASKED = b"[True, True, True, True]"
"""The output of a program that was answered by each way, without the key."""

CONFIG = """
[llm]
base_url = "{base_url}"
api_key_file = "{where}/key"
endpoint = true
[toolexec]
listen = ["unix"]
[sidecar.t]
kind = "c-cpp"
allow = ["sh"]
fd3 = true
path = ["{programs}"]
[policy.p]
root = "{where}/root"
sandbox = "{profile}"
{network}
[child.one]
command = ["/bin/sh", "-c", '''echo "$AIFO_TOOLEEXEC_URL $AIFO_TOOLEEXEC_TOKEN"
exec {asker} child''']
cwd = "{where}/root"
policy = "p"
"""


def pages_of(pid: int) -> Iterator[bytes]:
    """Yield what can be read of a process's memory, each part of its map whole."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        for begin, end in re.findall(r"^(\w+)-(\w+) r", maps, re.MULTILINE):
            try:
                yield os.pread(memory, int(end, 16) - int(begin, 16), int(begin, 16))
            except (OSError, OverflowError):  # the kernel's own: [vvar], [vsyscall]
                continue
    finally:
        os.close(memory)


def askers(running: Daemon) -> list[psutil.Process]:
    """Return the processes of a daemon's that ask the model."""
    beneath = psutil.Process(running.process.pid).children(recursive=True)
    return [one for one in beneath if any("asker.py" in w for w in one.cmdline())]


# attack 24, I10, spec L13, MD1
@pytest.mark.skipif(os.geteuid() != 0, reason="only root looks into each of them")
@pytest.mark.parametrize("profile", ["auto", "none"])
def test_a_key_of_the_host_is_in_no_page_of_a_child_or_a_tool(profile: str) -> None:
    key = f"sk-memory+{secrets.token_hex(12)}/?????=b"
    with (
        tempfile.TemporaryDirectory(prefix="km-", dir="/tmp") as name,
        provider_process(key=key, in_every_form=True) as base_url,
    ):
        where = Path(name)
        where.chmod(0o755)
        (where / "key").touch(mode=0o600)
        (where / "key").write_text(key)
        (where / "root").mkdir()
        program = where / "root" / "asker.py"
        program.write_bytes((CHILDREN / "asker.py").read_bytes())
        asker = f"{sys.executable} -I -S {program}"
        config = CONFIG.format(
            base_url=base_url,
            where=where,
            programs=Path(sys.executable).parent,
            profile=profile,
            network='network = "host"' if profile == "none" else "",
            asker=asker,
        )
        with daemon(where, config) as running:
            tools = Tools(running, where)
            with tools.begin(f"exec {asker} tool") as line:
                until(line, ASKED)
                running.wait(lambda: ASKED in running.log("one"), "the child's calls")
                found = askers(running)
                assert {one.cmdline()[-1] for one in found} == {"child", "tool"}
                for process in found:
                    memory = b"".join(pages_of(process.pid))
                    # Else the scan would find nothing at all.
                    token = process.environ()["OPENAI_API_KEY"]
                    assert memory.count(token.encode()) > 1
                    assert b"[redacted]" in memory
                    forms = searched_forms(key)
                    hits = [n for n, form in forms.items() if form.encode() in memory]
                    assert hits == [], process.cmdline()
