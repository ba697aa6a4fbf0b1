"""The model's endpoint while the host is replaced: one error for a call under way.

The address and the token that a child was told stay good, and so do its connections.
"""

import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from supervisor.control.client import call
from tests.helpers.command import TIMEOUT_S
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.provider import key_file, provider_process
from tests.helpers.replacing import assert_clean, replace_daemon

pytestmark = pytest.mark.slow


TALK = """
import os, sys
from vfs.client import Client

env = os.environ
print(env["OPENAI_BASE_URL"], env["OPENAI_API_KEY"], env["SANDHOST_LLM_SOCKET"])
sys.stdout.flush()
with Client() as client:
    while True:
        with open("going") as going:
            line = going.read()
        client.llm_chat(line, preset="general@talk")
        open("answered", "w").close()
"""


class Scene:
    """A daemon with an endpoint and one child, whose token the test uses."""

    def __init__(self, running: Daemon, where: Path) -> None:
        self.running = running
        self.where = where
        said = running.wait(lambda: running.log("a").decode()).splitlines()[0]
        self.url, self.token, self.path = said.split()

    def connect(self) -> socket.socket:
        """Connect to the port of all."""
        port = int(self.url.rpartition(":")[2].partition("/")[0])
        return socket.create_connection(("127.0.0.1", port), TIMEOUT_S)

    def request(self, text: str, **more: object) -> bytes:
        """Return a request."""
        body = {"messages": [{"role": "user", "content": text}], **more}
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {self.token}\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    def rows(self) -> list[dict[str, Any]]:
        """Return what the provider says of the requests that it got."""
        lines = (self.where / "provider").read_bytes().splitlines()
        return [row for row in map(json.loads, lines) if row["event"] == "request"]

    def pieces(self) -> int:
        """Return how many pieces of answers it has sent."""
        lines = (self.where / "provider").read_bytes().splitlines()
        return sum(json.loads(line)["event"] == "piece" for line in lines)


@contextmanager
def opened() -> Iterator[Scene]:
    """Start a provider and a daemon."""
    with tempfile.TemporaryDirectory(prefix="se-", dir="/tmp") as name:
        where = Path(name)
        log = where / "provider"
        log.touch()
        os.mkfifo(where / "going")
        with provider_process(log) as base_url:
            config = (
                f'[llm]\nbase_url = "{base_url}"\nendpoint = true\n'
                f'api_key_file = "{key_file(where)}"\n'
                "max_tokens = 50\n[llm.quota]\nmax_tokens = 50000\n"
                "[policy.p]\nsandbox = 'none'\n"
                f"[child.a]\ncommand = {json.dumps([sys.executable, '-I', '-c', TALK])}\n"
                f"policy = 'p'\ncwd = '{where}'\n"
            )
            with daemon(where, config) as running:
                yield Scene(running, where)
                assert_clean(running)
                assert running.end() == 0
                assert "ERROR" not in running.said()


def answered(sock: socket.socket) -> tuple[int, bytes]:
    """Receive one reply, of a known length or in chunks."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = sock.recv(65_536)
        assert piece, data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    size = lines.get(b"content-length")
    while (len(body) < int(size)) if size else not body.endswith(b"0\r\n\r\n"):
        piece = sock.recv(65_536)
        assert piece, body
        body += piece
    return int(head.split()[1]), body


# A refused client that goes on sending puts nothing off; its connection ends.
def test_a_refused_request_delays_nothing() -> None:
    with opened() as scene, scene.connect() as refused:
        head = scene.request("a").partition(b"\r\n\r\n")[0]
        wrong = head.replace(scene.token.encode(), b"another")
        refused.sendall(wrong + b"0000\r\n\r\n{")
        assert answered(refused)[0] == 401
        replace_daemon(scene.running)
        with suppress(ConnectionResetError):
            assert refused.recv(1) == b""


# spec L10, L11, I7: one error each, and what was sent is paid.
def test_connections_stay_and_calls_get_one_error() -> None:
    with opened() as scene, scene.connect() as idle, scene.connect() as half:
        idle.sendall(scene.request("one"))
        assert answered(idle)[0] == 200
        request = scene.request("half of it")
        half.sendall(request[:70])
        with scene.connect() as stream, scene.connect() as plain:
            stream.sendall(scene.request("!hang-after=3 !words=9", stream=True))
            plain.sendall(scene.request("!hang-after=1 !words=9"))
            scene.running.wait(lambda: len(scene.rows()) == 3 and scene.pieces() >= 9)
            replace_daemon(scene.running)
            status, body = answered(stream)
            assert (status, body.count(b"interrupted")) == (200, 1)
            assert body.count(b'"content"') >= 2
            assert b"[DONE]" not in body
            status, body = answered(plain)
            assert (status, json.loads(body)["error"]["type"]) == (503, "interrupted")
            assert stream.recv(1) == plain.recv(1) == b""
        half.sendall(request[70:])
        assert answered(half)[0] == 200
        idle.sendall(scene.request("again"))
        assert answered(idle)[0] == 200
        replace_daemon(scene.running)
        idle.sendall(scene.request("and again"))
        assert answered(idle)[0] == 200
        with socket.socket(socket.AF_UNIX) as own:
            own.settimeout(TIMEOUT_S)
            own.connect(scene.path)
            own.sendall(scene.request("by its own socket"))
            assert answered(own)[0] == 200
            own.sendall(scene.request("x").replace(b"Bearer sk-", b"Bearer no-"))
            assert answered(own)[0] == 401
        assert len(scene.rows()) == 7  # none of them twice


# spec L5: what was said under a name is still known.
def test_a_conversation_goes_on() -> None:
    with opened() as scene:
        for word in ("one", "two"):
            (scene.where / "going").touch()
            (scene.where / "going").write_text(f"{word}\n")
            path = scene.where / "answered"
            scene.running.wait(path.exists)
            path.unlink()
            if word == "one":
                replace_daemon(scene.running)
        first, second = (row["prompt_tokens"] for row in scene.rows())
        assert second > first


# A child in the default profile: its loopback is its own. One connection that it keeps,
# one that it makes anew each time.
WITHIN = """
import http.client, os

port = int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}

def status(line):
    line.request("GET", "/v1/models", headers=head)
    reply = line.getresponse()
    reply.read()
    return reply.status

kept = http.client.HTTPConnection("127.0.0.1", port)
while True:
    with open("going") as going:
        going.read()
    anew = http.client.HTTPConnection("127.0.0.1", port)
    print(status(kept), kept.sock.getsockname()[1], status(anew), flush=True)
    anew.close()
"""


def of_the_endpoint(running: Daemon) -> int:
    """How many listeners a daemon explains by its endpoint."""
    found: int = call(running.client.path, "leaks")["explained"]["model endpoint"]
    return found


# spec L13: the next program listens where the one before did, in there too.
def test_a_child_keeps_the_port_in_its_own_net_namespace() -> None:
    with tempfile.TemporaryDirectory(prefix="se-", dir="/tmp") as name:
        where = Path(name)
        where.chmod(0o755)
        os.mkfifo(where / "going")
        with provider_process(where / "provider") as base_url:
            config = (
                f'[llm]\nbase_url = "{base_url}"\nendpoint = true\n'
                f'api_key_file = "{key_file(where)}"\n'
                f"[child.a]\ncommand = {json.dumps([sys.executable, '-I', '-c', WITHIN])}\n"
                f"cwd = '{where}'\n"
            )
            with daemon(where, config) as running:
                for generation in range(2):
                    (where / "going").write_text("on")
                    lines = running.wait(partial(lines_of, running, generation + 1))
                    assert len(set(lines)) == 1, lines
                    assert [lines[0].split()[n] for n in (0, 2)] == ["200", "200"]
                    assert of_the_endpoint(running) == 3
                    replace_daemon(running)
                    assert_clean(running)
                running.client.stop_child("a")
                running.wait(lambda: of_the_endpoint(running) == 1)
                assert_clean(running)
                assert running.end() == 0
                assert "ERROR" not in running.said()


def lines_of(running: Daemon, wanted: int) -> list[str]:
    """The child's output, once it has so many lines."""
    lines = running.log("a").decode().splitlines()
    return lines if len(lines) >= wanted else []
