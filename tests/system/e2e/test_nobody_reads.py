"""An operator who reads no output does not hold a host up, and can stop it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hostlib.log import LINE_BYTES
from tests.helpers.command import (
    ENVIRONMENT,
    TIMEOUT_S,
    heard,
    ignoring,
    running,
    sandhost,
    shell,
)
from tests.helpers.daemon import daemon

pytestmark = pytest.mark.slow

ASKING = """
import sys
from vfs.client import Client
client = Client()
for number in range(400):
    for what in (client.stat, client.open):
        try:
            what("/" + "denied" * 40 + str(number))
        except OSError:
            pass
print("asked", flush=True)
sys.stdin.read()  # what is said of its end is said when there is room again
"""


def filled(writer: int) -> int:
    """Fill a pipe; return how much there is in it."""
    os.set_blocking(writer, False)
    written = 0
    try:
        while True:
            written += os.write(writer, b"x" * 512)
    except BlockingIOError:
        os.set_blocking(writer, True)
        return written


def test_a_full_stderr_holds_up_nobody(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    size = filled(writer)
    (tmp_path / "ask.py").write_text(ASKING)
    command = (sys.executable, tmp_path / "ask.py")
    options = ("--cwd", tmp_path, "--log-level", "debug")
    with running(
        "run", "--sandbox", "none", *options, "--", *command,
        stderr=writer, stdin=subprocess.PIPE,
    ) as host:  # fmt: skip
        os.close(writer)
        assert heard(host, b"asked\n")
        os.read(reader, size)
        host.send_signal(signal.SIGTERM)
        said = b""
        while piece := os.read(reader, 65_536):
            said += piece
        assert host.wait(60) == 143
    os.close(reader)
    assert b"lines of log are missing here" in said


TOOLS = """
[toolexec]
verbose = true
[sidecar.tools]
kind = "c-cpp"
allow = ["true"]
"""

RUNNING = """
from vfs.client.tools import ToolClient
ToolClient().run("true", cwd="/workspace")
print("ran", flush=True)
input()
ToolClient().run("true", cwd="/workspace")
print("again", flush=True)
"""


# Runs of tools are told to each reader.
# spec E34
def test_a_full_stderr_holds_up_no_tool(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(TOOLS)
    reader, writer = os.pipe()
    size = filled(writer)
    command = (sys.executable, "-c", RUNNING)
    with running(
        "run", "--sandbox", "none", "--config", tmp_path / "c.toml", "--", *command,
        stderr=writer, stdin=subprocess.PIPE,
    ) as host:  # fmt: skip
        os.close(writer)
        assert heard(host, b"ran\n")
        os.read(reader, size)
        assert host.stdin is not None
        host.stdin.write(b"\n")
        host.stdin.flush()
        assert heard(host, b"again\n")
        said = b""
        while piece := os.read(reader, 65_536):
            said += piece
        assert host.wait(60) == 0
    os.close(reader)
    missing, last = said.splitlines()
    assert b"1 lines of log are missing here" in missing
    assert last.startswith(b"toolexec: exec ")
    assert last.endswith(b": true ")


def test_a_journal_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    begun = time.monotonic()
    outcome = sandhost("run", "--journal", tmp_path / "pipe", "--", "true")
    assert time.monotonic() - begun < 20
    assert outcome.status == 125
    assert b"No such device or address" in outcome.err
    assert str(tmp_path / "pipe").encode() in outcome.err


def test_a_long_line_is_a_line_of_json_still() -> None:
    program = (
        "from hostlib.log import Log; Log(as_json=True)"
        ".write('ERROR', 'a' * 9000, path='b' * 9000)"
    )
    outcome = shell(f'"$PYTHON" -c "{program}" 2>&1 | "$PYTHON" -c "$READ"', env={
        "PYTHON": sys.executable,
        "READ": "import json, sys; d = sys.stdin.read(); j = json.loads(d);"
        " print(j['level'], len(d))",
    })  # fmt: skip
    level, size = outcome.out.split()
    assert level == b"ERROR"
    assert int(size) <= LINE_BYTES


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_it_was_started_to_ignore_does_not_stop_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = ("sh", "-c", "echo up; read line; exit 7")
    with running(
        "run", "--cwd", tmp_path, "--", *command,
        wrapper=ignoring(number), stdin=subprocess.PIPE,
    ) as host:  # fmt: skip
        assert heard(host, b"up\n")
        for _ in range(10):
            host.send_signal(number)
            time.sleep(0.01)
        assert host.stdin is not None
        host.stdin.write(b"go on\n")
        host.stdin.close()
        assert host.wait(TIMEOUT_S) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR2])
def test_what_a_daemon_was_started_to_ignore_does_nothing_to_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    with daemon(tmp_path, wrapper=ignoring(number)) as running_daemon:
        ignored = Path(f"/proc/{running_daemon.process.pid}/status").read_text()
        mask = int(ignored.split("SigIgn:")[1].split()[0], 16)
        assert mask & 1 << (number - 1)
        running_daemon.send(number)
        assert running_daemon.client.ps() == []
        assert running_daemon.end() == 0


# With SIGCHLD ignored no child can be waited for (waitid(2)): so it is not.
@pytest.mark.parametrize("options", [(), ("--sandbox", "none")])
def test_a_host_that_was_started_to_ignore_the_end_of_its_children(
    options: tuple[str, ...],
) -> None:
    outcome = sandhost(
        "run", *options, "--", "sh", "-c", "exit 7", wrapper=ignoring(signal.SIGCHLD)
    )
    assert (outcome.status, outcome.err) == (7, b"")


def test_what_a_run_says_at_its_start_is_not_waited_for(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    filled(writer)
    command = ("sh", "-c", "echo up; sleep 100")
    env = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    with running("run", "--keep", "--", *command, stderr=writer, env=env) as host:
        os.close(writer)
        assert heard(host, b"up\n")
        host.send_signal(signal.SIGTERM)
        assert host.wait(TIMEOUT_S) == 143
    os.close(reader)


def test_a_run_cannot_be_replaced_and_says_so(tmp_path: Path) -> None:
    control = tmp_path / "control"
    command = ("sh", "-c", "echo up; sleep 100")
    with running("run", "--control", control, "--", *command) as host:
        assert heard(host, b"up\n")
        outcome = sandhost("reload", "--exec", "--control", control)
        assert outcome.status != 0
        assert (
            b"cannot replace the program: the host is not `sandhost serve`"
            in outcome.err
        )
        assert b"internal error" not in outcome.err
