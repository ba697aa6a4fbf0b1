"""`sandhost mcp`: a real MCP client, in a child and alone."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from importlib import metadata
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.helpers.command import (
    ENVIRONMENT,
    SANDHOST,
    finished,
    heard,
    running,
    sandhost,
    shell,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

mcp = pytest.importorskip("mcp")

TEXT = "".join(f"line {n}\n" for n in range(5000))

CLIENT = """
import sys, trio
from mcp import ClientSession, StdioServerParameters, stdio_client

TEXT = "".join(f"line {n}\\n" for n in range(5000))

async def main():
    import os
    names = sys.argv[1:]
    server = StdioServerParameters(command=names[0], args=names[1:], env=dict(os.environ))
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        tools = (await session.list_tools()).tools
        print(*sorted(tool.name for tool in tools))
        for name, arguments in (
            ("wrap_output", {"text": TEXT, "source": "tool:x"}),
            ("read_fd", {"fd": "fd:1", "start_line": 3, "end_line": 3}),
            ("read_fd", {"fd": "fd:9"}),
            ("fd_to_file", {"fd": "fd:1", "file_path": "out.txt", "end_line": 1}),
            ("close_fd", {"fd": "fd:1"}),
        ):
            answer = await session.call_tool(name, arguments)
            print(answer.is_error, answer.content[0].text.splitlines()[:2])

trio.run(main)
"""


def _lines(where: Path, *server: str) -> list[str]:
    """Run a client against a server; what it printed."""
    (where / "client.py").write_text(CLIENT)
    done = subprocess.run(
        [sys.executable, "client.py", *server],
        cwd=where,
        env={**ENVIRONMENT, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        timeout=50,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_alone_it_has_descriptors_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    lines = _lines(tmp_path, SANDHOST, "mcp", "--root", "root")
    names = lines[0].split()
    assert {"read_fd", "search_fd", "wrap_output", "list_fds"} <= set(names)
    assert not {"keep_fds", "tool_schemas"} & set(names)
    assert lines[1].startswith('False [\'<fd_result fd="fd:1"')
    assert lines[2].endswith("'line 2']")
    assert lines[3].startswith('True [\'<fd_error type="not_found" fd="fd:9">\'')
    assert lines[4].startswith('False [\'<fd_write fd="fd:1"')
    assert lines[5].startswith("True ['invalid fd call: unknown name: close_fd'")
    assert (tmp_path / "root" / "out.txt").read_text() == "line 0\n"


def test_in_a_child_it_offers_the_hosts(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[tools]\nenabled = ["read_fd"]\n')
    (tmp_path / "client.py").write_text(CLIENT)
    # The MCP client gives its server descriptors 0 to 2 only, so the door goes another
    # way round: the server is the child, and the client its parent's pipe.
    run = ("run", "--config", "config.toml", "--", SANDHOST, "mcp")
    lines = _lines(tmp_path, SANDHOST, *run)
    assert lines[0].split() == [
        *("fd_info", "list_fds", "read_fd", "wrap_input", "wrap_output")
    ]
    assert lines[2].endswith("'line 2']")
    assert lines[4].startswith("True ['invalid fd call: ")


BEGIN = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


def _call(number: int, name: str, **arguments: object) -> dict[str, object]:
    params = {"name": name, "arguments": arguments}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


def _lines_of(*messages: dict[str, object]) -> bytes:
    return b"".join(json.dumps(message).encode() + b"\n" for message in messages)


@pytest.mark.parametrize("where", ["alone", "in a child"])
def test_what_was_asked_before_the_end_of_stdin_is_answered(
    tmp_path: Path, where: str
) -> None:
    words: tuple[str, ...] = ("mcp",)
    if where != "alone":
        (tmp_path / "c.toml").write_text('[tools]\nenabled = ["read_fd"]\n')
        words = ("run", "--config", "c.toml", "--", SANDHOST, "mcp")
    asked = [BEGIN, *(_call(n, "wrap_output", text=f"text {n}") for n in range(2, 40))]
    (tmp_path / "asked").write_bytes(_lines_of(*asked))
    with (tmp_path / "asked").open() as stdin:
        outcome = sandhost(*words, stdin=stdin, cwd=tmp_path)
    assert (outcome.status, outcome.err) == (0, b"")
    answers = [json.loads(line) for line in outcome.out.splitlines()]
    assert sorted(answer["id"] for answer in answers) == list(range(1, 40))
    assert all("error" not in answer for answer in answers)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("$S mcp <&-", "standard input is closed"),
        ("$S mcp <asked >&-", "standard output is closed"),
        (
            "$S mcp <asked >/dev/full",
            "cannot write to standard output: No space left on device",
        ),
        ("$S mcp 0>there", "cannot read standard input: Bad file descriptor"),
    ],
)
def test_a_stream_that_cannot_be_used_is_told(
    tmp_path: Path, script: str, said: str
) -> None:
    (tmp_path / "asked").write_bytes(_lines_of(BEGIN))
    outcome = shell(script, cwd=tmp_path)
    assert (outcome.status, outcome.out) == (1, b"")
    assert outcome.said(f"sandhost mcp: {said}")


def test_a_client_that_reads_no_more_ends_it_quietly(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    env = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    with running("mcp", env=env, stdin=subprocess.PIPE, stdout=theirs) as process:
        os.close(theirs)
        assert process.stdin is not None
        process.stdin.write(_lines_of(BEGIN))
        process.stdin.flush()
        # Its stdin is still open: an end that comes does not come from there.
        assert process.wait(timeout=60) == 141
        assert finished(process).err == b""
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_though_nobody_takes_its_answers(
    tmp_path: Path, number: int
) -> None:
    env = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    with running("mcp", env=env, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        process.stdin.write(_lines_of(BEGIN))
        process.stdin.flush()
        heard(process, b"serverInfo")
        # An answer that the pipe does not hold, and that nobody takes.
        process.stdin.write(_lines_of(_call(2, "wrap_output", text="x" * 7000)))
        process.stdin.close()
        process.stdin = None
        while not _waiting(process.stdout.fileno()):
            assert process.poll() is None
        process.send_signal(number)
        assert process.wait(timeout=60) == 128 + number
    assert not [*tmp_path.iterdir()]


def _waiting(fd: int) -> int:
    """Return how many bytes a pipe holds."""
    told = fcntl.ioctl(fd, termios.FIONREAD, bytes(4))
    return int.from_bytes(told, sys.byteorder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once_and_leaves_nothing(
    tmp_path: Path, number: int
) -> None:
    env = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    with running("mcp", env=env, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(json.dumps(BEGIN).encode() + b"\n")
        process.stdin.flush()
        heard(process, b"serverInfo")
        assert [*tmp_path.glob("sandhost-fds-*")]
        process.send_signal(number)
        # Its stdin is still open: an end that comes does not come from there.
        assert process.wait(timeout=60) == 128 + number
        assert process.stderr.read() == b""
    assert not [*tmp_path.iterdir()]


# nohup(1), and the `&` of a script.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_it_was_started_to_ignore_does_not_end_it(number: signal.Signals) -> None:
    trap = f"trap '' {number.name.removeprefix('SIG')}; exec \"$@\""
    wrapper = ("sh", "-c", trap, "sh")
    with running("mcp", stdin=subprocess.PIPE, wrapper=wrapper) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(BEGIN).encode() + b"\n")
        process.stdin.flush()
        heard(process, b"serverInfo")
        process.send_signal(number)
        ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
        process.stdin.write(json.dumps(ping).encode() + b"\n")
        process.stdin.flush()
        heard(process, b'"id":2')
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def test_a_wrong_option_is_told(tmp_path: Path) -> None:
    outcome = sandhost("mcp", "--root", "missing", cwd=tmp_path)
    assert outcome.status == 2
    assert outcome.said("cannot use 'missing': no such directory")
    outcome = sandhost("mcp", "--config", "missing", cwd=tmp_path)
    assert outcome.said("cannot read 'missing'")


def test_a_door_that_is_not_there_is_told(tmp_path: Path) -> None:
    env = {**ENVIRONMENT, "FSPROXY_FD": "77"}
    outcome = sandhost("mcp", cwd=tmp_path, env=env)
    assert outcome.status == 2
    assert outcome.err == (
        b"sandhost mcp: descriptor 77 is not open, and there is no FSPROXY_SOCKET: this"
        b" process is not the child of a host; start it with `sandhost run -- COMMAND`\n"
    )


async def test_the_server_runs_in_trio(tmp_path: Path) -> None:
    del tmp_path
    from supervisor.mcp import server as module  # noqa: PLC0415 - needs the extra

    with module.open_own_process(None, None) as process:
        server = await module.make_server(module.own_call(process))
    assert (server.name, server.version) == ("sandhost", metadata.version("sandhost"))
    await trio.lowlevel.checkpoint()


async def test_a_session_ends_when_each_request_is_answered_or_given_up(
    autojump_clock: trio.testing.MockClock,
) -> None:
    from mcp import types  # noqa: PLC0415 - an extra

    from supervisor.mcp.streams import Streams  # noqa: PLC0415 - needs the extra

    del autojump_clock
    streams = Streams(trio.CancelScope())
    await streams.wait_answered()
    for request_id in (1, 1, "a"):
        streams.count_request(
            types.JSONRPCRequest(jsonrpc="2.0", id=request_id, method="m")
        )
    left = [
        types.JSONRPCResponse(jsonrpc="2.0", id=1, result={}),
        types.JSONRPCResponse(jsonrpc="2.0", id=1, result={}),
    ]
    for message in left:
        with trio.move_on_after(60) as scope:
            await streams.wait_answered()
        assert scope.cancelled_caught
        streams.count_answer(message)
    streams.count_request(
        types.JSONRPCNotification(
            jsonrpc="2.0", method="notifications/cancelled", params={"requestId": "a"}
        )
    )
    await streams.wait_answered()
    assert not streams.is_unread


async def test_a_session_ends_when_nobody_is_left_to_read(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mcp import types  # noqa: PLC0415 - an extra

    from supervisor.mcp import streams as module  # noqa: PLC0415 - needs the extra

    del autojump_clock
    ours, theirs = os.pipe()
    look = module.has_no_reader
    monkeypatch.setattr(module, "has_no_reader", lambda _: look(theirs))
    streams = module.Streams(trio.CancelScope())
    streams.count_request(types.JSONRPCRequest(jsonrpc="2.0", id=1, method="m"))
    with trio.move_on_after(60) as scope:
        await streams.wait_answered()
    assert scope.cancelled_caught
    os.close(ours)
    await streams.wait_answered()
    assert streams.is_unread
    os.close(theirs)


def test_what_it_cannot_read_is_answered(tmp_path: Path) -> None:
    env = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    cut = _call(2, "wrap_output", text="cut \ud83d")
    paired = _call(3, "wrap_output", text="whole \U0001f600")
    lines = _lines_of(BEGIN) + b"".join(
        json.dumps(one).encode() + b"\n" for one in (cut, paired)
    )
    with running("mcp", env=env, stdin=subprocess.PIPE) as process:
        out, err = process.communicate(lines + b"no JSON\n", timeout=60)
    assert err == b""
    answers = {one.get("id"): one for one in map(json.loads, out.splitlines())}
    assert answers[2]["error"] == {
        "code": -32602,
        "message": "The request has a lone surrogate, which is no character",
    }
    assert answers[3]["result"]["content"][0]["text"] == "whole \U0001f600"
    assert answers[None]["error"]["code"] == -32700
