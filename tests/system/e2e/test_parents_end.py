"""A nested client behind a relay whose parent goes: no answer stands for another."""

import sys
from pathlib import Path

import pytest

from tests.helpers.command import SANDHOST, sandhost
from tests.helpers.provider import key_file, provider_process

pytestmark = pytest.mark.slow

SCRIPT = """
import os, socket, sys, time

def attached(line):
    line.sendall(b"ATTACH\\n")
    reply, fds, *_ = socket.recv_fds(line, 100, 1)
    assert reply.startswith(b"OK "), reply
    return socket.socket(fileno=fds[0])

second = attached(socket.socket(fileno=os.dup(3)))
third = attached(second)
third.sendall(b"OPEN out w+ false\\n")
number = third.recv(100)[3:-1]
third.sendall(
    b"LLM_CHAT false 0 0 5 0\\n!hangWRITE %b 5\\nhello" % number
    + b"".join(b"%b %b\\n" % (word, number) for word in (b"SYNC", b"CLOSE"))
    + b"PING\\n"
)
while b"request" not in open(sys.argv[1], "rb").read():
    time.sleep(0.01)
second.close()
data = b""
while piece := third.recv(100):
    data += piece
print(data)
"""


# attack 47, spec T3, S2, N4
@pytest.mark.parametrize("relays", [0, 1, 2])
def test_nothing_is_sent_through_a_relay_once_a_parent_is_closed(
    tmp_path: Path, relays: int
) -> None:
    log = tmp_path / "provider.log"
    (tmp_path / "root").mkdir()
    with provider_process(log) as base_url:
        config = tmp_path / "config.toml"
        config.write_text(
            f'[llm]\nbase_url = "{base_url}"\napi_key_file = "{key_file(tmp_path)}"\n'
        )
        words = ["--config", str(config), "--sandbox", "none", "--log-level", "error"]
        words += ["--root", str(tmp_path / "root"), "--"]
        words += [SANDHOST, "relay", "--"] * relays
        words += [sys.executable, "-c", SCRIPT, str(log)]
        outcome = sandhost("run", *words, cwd=tmp_path)
    assert (outcome.status, outcome.out) == (0, b"b''\n"), outcome.err
    assert (tmp_path / "root" / "out").read_bytes() == b"hello"
