"""Commands in a child, and the program there that runs them; without a fleet."""

import base64
import fcntl
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PROGRAM = "import sys; from supervisor.__main__ import main; main()"


LEAVING = """
import fcntl, os, subprocess
fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 20)
os.write(1, b"hi\\n")
for _ in range(4):
    subprocess.Popen(["yes"])
os._exit(3)
"""


class Server:
    """The program, and the two ends of its conversation."""

    def __init__(self, where: Path, *words: str) -> None:
        command = [sys.executable, "-c", PROGRAM, "serve-commands", *words]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=where, env=env
        )

    def send(self, key: str, do: str, **words: Any) -> None:
        """Send a request."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"id": key, "do": do, **words}).encode())
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def answers(self, key: str) -> Iterator[dict[str, Any]]:
        """Yield the answers to a request, the outcome last."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            if answer["id"] == key:
                yield answer
                if "over" in answer:
                    return

    def outcome(self, key: str) -> Any:
        """Return the outcome of a request."""
        return list(self.answers(key))[-1]["over"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server whose commands begin in a directory of their own."""
    one = Server(tmp_path)
    with one.process:
        yield one
        one.process.kill()


# spec FL3
def test_the_same_request_twice_is_done_once(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        server.send("1", "run", command=["sh", "-c", "echo x >> a"])
    assert server.outcome("1")["status"] == 0
    for _ in range(2):
        server.send("2", "write", path="b")
        server.send(
            "2", "input", at=0, data=base64.b64encode(b"yz").decode(), end=False
        )
    server.send("2", "input", at=2, data="", end=True)
    assert server.outcome("2") == {"status": 0}
    assert (tmp_path / "a").read_text() == "x\n"
    assert (tmp_path / "b").read_text() == "yz"


# spec FL3
def test_output_waits_for_its_reader(server: Server) -> None:
    server.send("1", "run", command=["head", "-c", "3000000", "/dev/zero"])
    size, told = 0, 0
    for answer in server.answers("1"):
        size += len(base64.b64decode(answer.get("out", "")))
        assert size - told <= 1024 * 1024 + 32_768
        if size - told >= 1024 * 1024:
            # It has stopped there: nothing more has come meanwhile.
            server.send(f"check-{told}", "check")
            assert next(server.answers(f"check-{told}"))["over"] == {"status": 0}
            for _ in range(2):  # twice is once: it tells all that was taken
                server.send("1", "took", bytes=size)
            told = size
    assert size == 3_000_000


# spec FL3
def test_a_file_that_would_block_is_refused(server: Server, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    server.send("1", "read", path="fifo")
    assert server.outcome("1")["errno"] == 22
    server.send("2", "run", command=["/etc/passwd\0"])
    assert server.outcome("2")["errno"] == 22


# spec FL3: a process that it has left writes on, and faster than anybody reads.
def test_a_command_is_over_with_its_own_process(server: Server) -> None:
    assert server.process.stdout is not None
    fcntl.fcntl(server.process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    server.send("1", "run", command=[sys.executable, "-c", LEAVING])
    said, over = b"", {}
    for answer in server.answers("1"):
        said += base64.b64decode(answer.get("out", ""))
        over = answer.get("over", {})
        assert len(said) < 4_000_000  # a window, and a full pipe
    assert over == {"status": 3, "is_late": False}
    assert b"hi\n" in said
    server.send("2", "check")
    assert server.outcome("2") == {"status": 0}


# spec FL3
@pytest.mark.parametrize(
    "words",
    [
        {"command": []},
        {"command": 4},
        {"command": ["true", 4]},
        {"command": ["true"], "env": {"N": 4}},
        {"command": ["true"], "env": "N"},
        {"command": ["true"], "cwd": 4},
        {"command": ["true"], "timeout_s": "5"},
        {"command": ["true"], "timeout_s": float("nan")},
        {"command": ["true"], "timeout_s": 10**400},
        {},
    ],
)
def test_a_command_that_is_none_is_refused(
    server: Server, words: dict[str, Any]
) -> None:
    server.send("1", "run", **words)
    assert server.outcome("1")["errno"] == 22
    server.send("2", "check")
    assert server.outcome("2") == {"status": 0}


# spec FL3
@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'"do"',
        b"{}",
        b'{"id": [], "do": "run"}',
        b'{"id": "1", "do": "input"}',
        b'{"id": "1", "do": "input", "at": 0, "data": "*", "end": 1}',
        b'{"id": "1", "do": "took", "bytes": "all"}',
    ],
)
def test_a_line_that_is_no_request_ends_nothing(server: Server, line: bytes) -> None:
    server.send("1", "run", command=["cat"], has_input=True)
    assert server.process.stdin is not None
    assert server.process.stderr is not None
    server.process.stdin.write(line + b"\n")
    server.process.stdin.flush()
    said = server.process.stderr.readline()
    assert said.startswith(b"sandhost serve-commands: cannot read a request: ")
    server.send("1", "input", at=0, data="", end=True)
    assert server.outcome("1")["status"] == 0


# spec FL3: poll(2) takes 24 days at most.
@pytest.mark.parametrize("timeout_s", [1e8, float("inf")])
def test_a_command_may_have_any_time(server: Server, timeout_s: float) -> None:
    server.send("1", "run", command=["sleep", "0.1"], timeout_s=timeout_s)
    assert server.outcome("1") == {"status": 0, "is_late": False}


# spec FL3
def test_a_server_that_hears_nothing_ends_with_its_commands(tmp_path: Path) -> None:
    server = Server(tmp_path, "0.5")
    with server.process:
        server.send("1", "run", command=["sleep", "600"])
        server.send("2", "run", command=["sh", "-c", "echo $$; exec sleep 600"])
        pid = int(base64.b64decode(next(server.answers("2"))["out"]))
        assert server.process.wait(timeout=60) == 0
        assert server.process.stderr is not None
        assert b"nobody was heard for 0.5 s" in server.process.stderr.read()
    assert is_over(pid)


# spec FL3
def test_a_server_ends_with_its_input(tmp_path: Path) -> None:
    server = Server(tmp_path)
    with server.process:
        server.send("1", "run", command=["sh", "-c", "echo $$; exec sleep 600"])
        pid = int(base64.b64decode(next(server.answers("1"))["out"]))
        server.process.communicate(timeout=60)
        assert server.process.returncode == 0
    assert is_over(pid)


def is_over(pid: int) -> bool:
    """Wait for the end of a process of another parent; True once it is there."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(fd):
        return bool(select.select([fd], [], [], 60)[0])
