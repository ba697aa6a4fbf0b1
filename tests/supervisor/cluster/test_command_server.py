"""Commands in a child, and the program there that runs them; without a fleet."""

import base64
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
            server.send("1", "took", bytes=size - told)
            told = size
    assert size == 3_000_000


# spec FL3
def test_a_file_that_would_block_is_refused(server: Server, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    server.send("1", "read", path="fifo")
    assert server.outcome("1")["errno"] == 22
    server.send("2", "run", command=["/etc/passwd\0"])
    assert server.outcome("2")["errno"] == 22


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
