"""The Python client of ToolExec: live output, exit codes, broken lines, signals."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.command import read_until
from tests.helpers.toolserver import Faults, ToolServer, tool_server
from vfs.client.tools import BrokenLineError, ToolClient, ToolError

pytestmark = pytest.mark.slow


@pytest.fixture(params=["tcp", "unix"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ToolServer]:
    """A server on TCP or on a unix socket."""
    with tool_server(tmp_path if request.param == "unix" else None) as running:
        yield running


@pytest.fixture
def tools(server: ToolServer) -> ToolClient:
    """A client of it."""
    return ToolClient(server.url, server.token)


def test_a_tool_is_run_with_its_arguments(
    tools: ToolClient, server: ToolServer
) -> None:
    args = ("%s|", "", "a b", "x\ny\n", "é&=+%;", b"\xff\x00"[:1], "@f")
    done = tools.run("printf", *args, cwd="/")
    assert done.exit_code == 0
    assert done.output == b"".join(os.fsencode(arg) + b"|" for arg in args[1:])
    (asked,) = server.asked
    assert asked.all(b"arg") == [os.fsencode(arg) for arg in args]
    assert asked.all(b"cwd") == [b"/"]
    assert asked.headers["x-aifo-proto"] == "2"
    assert asked.headers["x-aifo-exec-id"] == done.exec_id
    assert "x-aifo-detach" not in asked.headers


def test_output_comes_live_and_the_code_from_the_trailer(
    tools: ToolClient, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "gate")
    script = "echo first; read -r line <gate; echo $line; exit 9"
    with tools.start("sh", "-c", script, cwd=tmp_path) as execution:
        pieces = iter(execution)
        assert next(pieces) == b"first\n"
        (tmp_path / "gate").write_text("second\n")
        assert b"".join(pieces) == b"second\n"
        assert execution.exit_code == 9
        assert execution.offset == 13
        assert list(execution) == []


def test_a_megabyte_arrives_whole(tools: ToolClient) -> None:
    got: list[bytes] = []
    done = tools.run("head", "-c", "3000000", "/dev/zero", on_output=got.append)
    assert (done.exit_code, done.output) == (0, b"")
    assert b"".join(got) == bytes(3_000_000)


def test_a_refusal_is_an_error_with_its_code(
    tools: ToolClient, server: ToolServer
) -> None:
    server.faults = Faults(refuse=(409, b"tool 'x' not available\n", 86))
    with pytest.raises(ToolError, match="tool 'x' not available") as refused:
        tools.run("x")
    assert (refused.value.status, refused.value.exit_code) == (409, 86)
    with pytest.raises(ToolError, match="unauthorized"):
        ToolClient(server.url, "wrong").run("x")


def test_a_reply_without_a_code_is_a_broken_line(
    tools: ToolClient, server: ToolServer
) -> None:
    server.faults = Faults(no_trailer=True)
    with pytest.raises(BrokenLineError, match="no exit code"):
        tools.run("true")
    server.faults = Faults(cut_after=[2])
    got: list[bytes] = []
    with pytest.raises(BrokenLineError):
        tools.run("echo", "abcdef", on_output=got.append)
    assert b"".join(got) == b"ab"


# ToolExec 5: nothing is lost on a broken line.
def test_a_detached_tool_is_followed_over_broken_lines(
    tools: ToolClient, server: ToolServer
) -> None:
    server.faults = Faults(cut_after=[0, 1, 70_000, 70_001, 200_000])
    done = tools.run("sh", "-c", "seq 60000; exit 4", detach=True)
    assert done.exit_code == 4
    assert done.output == b"".join(b"%d\n" % n for n in range(1, 60_001))
    assert server.asked[0].headers["x-aifo-detach"] == "1"
    again = [asked.target for asked in server.asked[1:]]
    assert [int(target.partition("=")[2]) for target in again] == [
        *(0, 1, 70_000, 70_001, 200_000),
    ]


def test_a_line_that_breaks_before_the_head_is_asked_for(
    tools: ToolClient, server: ToolServer
) -> None:
    server.faults = Faults(cut_head=1)
    assert tools.run("echo", "hello", detach=True).output == b"hello\n"
    server.faults = Faults(cut_head=1)
    with pytest.raises(BrokenLineError):
        tools.run("echo", "hello")


def test_a_line_that_never_holds_is_given_up(
    tools: ToolClient, server: ToolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfs.client.tools.RESUME_PAUSE_S", 0.0)
    server.faults = Faults(cut_after=[2] * 100)
    got: list[bytes] = []
    with pytest.raises(BrokenLineError, match="broke"):
        tools.run("echo", "hello", detach=True, on_output=got.append)
    assert b"".join(got) == b"he"
    assert len(server.asked) == 7


def test_a_host_that_is_busy_when_it_is_asked_again_is_asked_once_more(
    tools: ToolClient, server: ToolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfs.client.tools.RESUME_PAUSE_S", 0.0)
    server.faults = Faults(cut_after=[2], busy=3)
    assert tools.run("echo", "hello", detach=True).output == b"hello\n"
    server.faults = Faults(cut_after=[2], busy=100)
    with pytest.raises(BrokenLineError, match="busy"):
        tools.run("echo", "hello", detach=True)
    assert server.faults.busy == 94  # as often as a line that breaks at once
    server.faults = Faults(busy=1)
    with tools.start("echo", "hello", exec_id="mine") as execution:
        execution.wait()
    with pytest.raises(ToolError) as refused:  # a first request does not retry
        tools.attach("mine")
    assert refused.value.status == 503


def test_an_execution_can_be_followed_from_anywhere(tools: ToolClient) -> None:
    with tools.start("echo", "hello", exec_id="mine") as execution:
        assert execution.wait() == 0
    late = tools.attach("mine", 2)
    assert b"".join(late) == b"llo\n"
    assert late.exit_code == 0
    with pytest.raises(ToolError) as refused:
        tools.attach("other")
    assert refused.value.status == 404


def test_a_running_tool_is_signalled(tools: ToolClient) -> None:
    with tools.start("sh", "-c", "echo ready; exec sleep 1000") as execution:
        assert next(iter(execution)) == b"ready\n"
        assert execution.signal("INT")
        assert execution.wait() == 130
        assert not execution.signal("TERM")


@pytest.mark.parametrize("name", ["INT", "QUIT", "TERM", "HUP"])
def test_signals_of_this_process_are_handed_on(server: ToolServer, name: str) -> None:
    program = (
        "import os, sys; from vfs.client.tools import ToolClient\n"
        f"script = \"trap 'echo got; exit 6' {name}; echo ready; while :; do sleep 1; done\"\n"
        "done = ToolClient().run('sh', '-c', script, cwd='/',"
        " on_output=lambda data: os.write(1, data))\n"
        "sys.exit(done.exit_code)\n"
    )
    env = {
        **os.environ,
        "AIFO_TOOLEEXEC_URL": server.url,
        "AIFO_TOOLEEXEC_TOKEN": server.token,
    }
    with subprocess.Popen(
        [sys.executable, "-c", program], env=env, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"ready\n")
        process.send_signal(signal.Signals[f"SIG{name}"])
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 6
    assert out.endswith(b"got\n")


def test_handlers_are_as_before(tools: ToolClient) -> None:
    before = signal.getsignal(signal.SIGTERM)
    tools.run("true")
    assert signal.getsignal(signal.SIGTERM) is before
    codes = []
    thread = threading.Thread(
        target=lambda: codes.append(tools.run("sh", "-c", "exit 3").exit_code)
    )
    thread.start()
    thread.join()
    assert codes == [3]


@pytest.mark.parametrize("url", ["", "ftp:x", "http://host/exec", "http://host:x/"])
def test_an_address_that_is_none_is_told(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIFO_TOOLEEXEC_URL", raising=False)
    with pytest.raises(ToolError):
        ToolClient(url, "token")


def test_a_host_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ToolClient(f"unix://{tmp_path}/none", "token").run("true")


def test_importing_it_loads_nothing_heavy() -> None:
    program = (
        "import sys, vfs.client.tools; print(sorted({'socket', 'typing', 'contextlib',"
        " 'json', 'trio', 'signal', 'http', 'msgspec'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, check=True
    )
    assert done.stdout == b"[]\n", done.stderr
