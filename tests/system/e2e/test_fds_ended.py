"""Children that are killed in the middle of a call of LLM fds."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.command import TIMEOUT_S, finished, heard, running
from tests.helpers.provider import key_file, provider_process

pytestmark = pytest.mark.slow

LINE = b"0123456789abcde\n"
COUNT = 6_000_000

EXPORTS = f"""
import json, os, sys, time
from vfs.client import Client

client = Client()
piece, token = {LINE!r} * 500_000, None
for _ in range({COUNT} // 500_000):
    token = client.fd_put(piece, token) if token else client.fd_put(piece)
client.fd_call("wrap_output", token=token)
print(os.getpid(), flush=True)
call = {{"fd": "fd:1", "file_path": "out", "mode": sys.argv[1]}}
if sys.argv[1] == "insert":
    call["insert_at_line"] = 1
client.fd_call("fd_to_file", **call)
open(sys.argv[2], "w").close()
time.sleep(60)
"""

ASKS = """
import os, sys
from vfs.client import Client

client = Client()
print(os.getpid(), flush=True)
client.llm_chat(sys.argv[1], preset=sys.argv[2])
"""


def wait(condition: Callable[[], bool]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def used(root: Path, process: int) -> int:
    """Return how much a host has written to files beneath a directory, bytes."""
    found = 0
    for name in os.listdir(f"/proc/{process}/fd"):
        try:
            link = os.readlink(f"/proc/{process}/fd/{name}")
            if link.startswith(f"{root}/"):
                found = max(found, os.stat(f"/proc/{process}/fd/{name}").st_size)
        except FileNotFoundError:  # closed since it was listed
            continue
    return found


# spec S2: what was sent is done, whole; nothing else is left, and the host goes on.
@pytest.mark.parametrize("mode", ["write", "append", "insert"])
def test_an_export_of_a_killed_child_is_whole(tmp_path: Path, mode: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").write_bytes(b"old\n")
    (tmp_path / "c.toml").write_text('[tools]\nenabled = ["read_fd", "fd_to_file"]\n')
    words = ("run", "--config", "c.toml", "--root", str(root), "--sandbox", "none")
    done = tmp_path / "done"
    child = (sys.executable, "-c", EXPORTS, mode, str(done))
    with running(*words, "--", *child, cwd=tmp_path) as process:
        pid = int(heard(process, b"\n"))
        # In the middle, unless this process was held up that long: whole it is anyway.
        wait(lambda: used(root, process.pid) > len(LINE) * 1000 or done.exists())
        os.kill(pid, signal.SIGKILL)
        outcome = finished(process)
    assert (outcome.status, outcome.err) == (137, b"")
    whole = LINE * COUNT
    expected = {"write": whole, "append": b"old\n" + whole, "insert": whole + b"old\n"}
    assert (root / "out").read_bytes() == expected[mode]
    assert os.listdir(root) == ["out"]


# spec L10, S2: in the middle of a loop, kept under a name or not.
@pytest.mark.parametrize("name", ["agent", "agent@mine"])
def test_a_conversation_of_a_killed_child_ends(tmp_path: Path, name: str) -> None:
    log = tmp_path / "provider.log"
    fork = ["fork", {"prompts": ["!hang", "!hang"]}]
    prompt = "!script=" + json.dumps([[fork], "done"], separators=(",", ":"))
    with provider_process(log) as url:
        (tmp_path / "c.toml").write_text(
            f'[llm]\nbase_url = "{url}"\napi_key_file = "{key_file(tmp_path)}"\n'
            'max_tokens = 100\n[llm.presets.agent]\nsystem = "x"\ntools = true\n'
            '[tools]\nenabled = ["read_fd", "fork"]\n'
            "[file_descriptor]\nconversation_fds = true\n"
        )
        options = ("--sandbox", "none", "--journal", "journal")  # the pid is a pid here
        words = ("run", "--config", "c.toml", *options, "--")
        child = (sys.executable, "-c", ASKS, prompt, name)
        with running(*words, *child, cwd=tmp_path) as process:
            pid = int(heard(process, b"\n"))
            wait(
                lambda: (
                    log.exists() and log.read_bytes().count(b'"event": "request"') == 3
                )
            )
            os.kill(pid, signal.SIGKILL)
            outcome = finished(process)
    assert (outcome.status, outcome.err) == (137, b"")
    rows = [json.loads(row) for row in (tmp_path / "journal").read_text().splitlines()]
    called = [row["outcome"] for row in rows if row["event"] == "llm.called"]
    assert sorted(called) == ["cancelled", "cancelled", "ok"]
