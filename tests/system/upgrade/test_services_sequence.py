"""Exchange after exchange, with tools that run and LLM fds that are held.

Nothing is lost.

The sum of `test_tools` and `test_fds`, many times.
"""

import ast
import os
import select
import sys
import threading

import pytest

from tests.helpers.command import read_until
from tests.helpers.replacing import assert_clean
from tests.helpers.rounds import LONG
from tests.helpers.toolscene import Reply
from tests.helpers.toolupgrade import Tools, opened_tools, rest, until

pytestmark = pytest.mark.slow

FDS = """
[tools]
enabled = ["read_fd"]
[file_descriptor]
enabled = true
max_memory = "256K"
"""

HOLDS = """
import os, sys
from vfs.client import Client

client = Client()
for size in (20_000, 200_000, 2_000_000):
    token = client.fd_put(b"0123456789abcde\\n" * (size // 16))
    answer = client.fd_call("wrap_output", token=token)
    assert answer.startswith("<fd_result "), answer
os.mkfifo("told")
os.mkfifo("said")
print(os.environ["AIFO_TOOLEEXEC_URL"], os.environ["AIFO_TOOLEEXEC_TOKEN"], flush=True)
with open("told") as told, open("said", "w") as said:
    for line in told:
        seen = [client.fd_call("read_fd", fd=f"fd:{n}", page=2) for n in (1, 2, 3)]
        print(repr(hash(tuple(seen))), file=said, flush=True)
"""

COUNTS = (
    "i=0; while [ ! -e stop ]; do echo $i; i=$((i+1));"
    " [ $((i % {often})) = 0 ] && sleep 0.02; done; exit 9"
)


class Follower:
    """Takes a stream to its end, in a thread of its own."""

    def __init__(self, tools: Tools, proto: int, *, slow: bool) -> None:
        # A whole output has to fit what is kept of it.
        script = COUNTS.format(often=500 if proto == 2 else 10)
        self._sock = tools.begin(script, proto)
        self._sock.settimeout(None)  # a whole output comes when all of it is over
        self._slow = slow
        self._reply: list[Reply] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        parts = b""
        while self._slow and not self._over.is_set():
            parts += self._sock.recv(3_000)
            select.select([], [], [], 0.01)
        self._reply.append(rest(self._sock, parts))

    def reply(self) -> Reply:
        """Return all of it; the tool has been told to end."""
        self._over.set()
        self._thread.join(15)
        assert self._reply, "it did not end"
        return self._reply[0]


def hold_through(rounds: int) -> None:
    """Replace a host so often, and see that nothing is lost and nothing comes twice."""
    command = (sys.executable, "-I", "-c", HOLDS)
    with opened_tools(more=FDS, log_limit="1M", command=command) as tools:
        told, said = (
            os.open(tools.where / name, os.O_RDWR) for name in ("told", "said")
        )

        def held() -> object:
            os.write(told, b"look\n")
            return ast.literal_eval(read_until(said, b"\n").decode())

        try:
            before = held()
            pid = tools.running.row("one").pid
            followers = [
                Follower(tools, proto, slow=slow)
                for proto, slow in ((2, False), (2, True), (1, False))
            ]
            for number in range(rounds):
                headers = (f"X-Aifo-Exec-Id: round-{number}", "X-Aifo-Detach: 1")
                script = f"echo begun; : >up; read -r line <told-{number}; echo $line"
                os.mkfifo(tools.where / f"told-{number}")
                with tools.begin(script, 2, *headers) as sock:
                    until(sock, b"begun\n")
                tools.hear("up")
                tools.replace()
                assert held() == before
                (tools.where / f"told-{number}").write_text(f"{number}\n")
                reply = rest(tools.replay(f"round-{number}", 6))
                assert (reply.body, reply.code) == (b"%d\n" % number, 0)
            assert tools.running.row("one").pid == pid
            assert tools.running.client.stats()["generation"] == rounds
            assert_clean(tools.running)
            (tools.where / "stop").touch()
            for follower in followers:
                reply = follower.reply()
                lines = reply.body.splitlines()
                assert len(lines) > 100
                assert lines == [b"%d" % n for n in range(len(lines))]
                assert reply.code == 9
        finally:
            os.close(told)
            os.close(said)


@pytest.mark.timeout(300)
def test_tools_and_contents_go_through_3_exchanges() -> None:
    hold_through(3)


@pytest.mark.chaos
@pytest.mark.skipif(not LONG, reason="3 exchanges are the short form; see make chaos")
@pytest.mark.timeout(600)
def test_tools_and_contents_go_through_100_exchanges() -> None:
    hold_through(100)
