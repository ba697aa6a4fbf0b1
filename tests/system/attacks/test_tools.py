"""Attacks on ToolExec and on the logs, in each kind of walls and in bubblewrap.

The rules are proved where they are kept (`tests/supervisor/toolexec`, `tests/protocol`); here a
child speaks by its own socket, so that walls neither open a way nor take it away.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import sandhost
from tests.system.attacks.conftest import BWRAP

pytestmark = [pytest.mark.slow, pytest.mark.attack]

CONFIG = """
[toolexec]
[toolexec.notify]
command = ["/bin/cat", "{args}"]
[sidecar.c]
kind = "c-cpp"
path = ["/usr/bin", "/bin"]
allow = ["printf", "sh"]
[sandbox.namespaces]
layers = ["mountns", "pidns", "netns", "ipcns", "utsns", "userns"]
"""

SPEAKER = r"""
import json, os, socket, sys, time
from urllib.parse import urlencode
url, token = os.environ["AIFO_TOOLEEXEC_URL"], os.environ["AIFO_TOOLEEXEC_TOKEN"]
def connect():
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(url.removeprefix("unix://"))
    return sock
def head(auth, *more, path="/exec"):
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "X-Aifo-Proto: 2", *auth,
             "Content-Type: application/x-www-form-urlencoded", *more, "", ""]
    return "\r\n".join(lines).encode()
def say(data):
    with connect() as sock:
        try:
            sock.sendall(data)
        except OSError:
            pass
        found = b""
        try:
            while more := sock.recv(65536):
                found += more
        except ConnectionResetError:
            pass
    return found
RIGHT = (f"Authorization: Bearer {token}",)
def run(*pairs, auth=RIGHT):
    body = urlencode(pairs).encode()
    return say(head(auth, f"Content-Length: {len(body)}") + body).decode("latin-1")
def notify(*words):
    body = urlencode([("cmd", "cat"), *(("arg", word) for word in words)]).encode()
    length = f"Content-Length: {len(body)}"
    return say(head(RIGHT, length, path="/notify") + body).decode("latin-1")
def status(said):
    return int((said.split() or ["0", "0"])[1])
"""

ATTACKER = (
    SPEAKER
    + r"""
form = b"tool=printf&arg=x"
chunked = b"11\r\n" + form + b"\r\n0\r\n\r\n"
# Whoever took any of these would run the tool.
smuggled = [
    (("Content-Length: 5", "Transfer-Encoding: chunked"), chunked),
    (("Transfer-Encoding: chunked", f"Content-Length: {len(chunked)}"), chunked),
    (("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), chunked),
    (("Transfer-Encoding: gzip, chunked",), chunked),
    (("Content-Length: 17", "Content-Length: 5"), form),
    (("Transfer-Encoding: chunked",), chunked.replace(b"\r\n", b"\n")),
    (("Transfer-Encoding: chunked",), b"fffffffffffffffff\r\n" + form),
]
# Any scheme may carry the token; none may carry more, less or another.
schemes = ["Bearer", "Bearer  " + token + " x", "Bearer " + token[:-1], "Basic x" + token,
           "Bearer " + token + "\0", token.swapcase(), "Bearer " + token + ", Bearer x"]
found = {}
found["names"] = [status(run(("tool", t))) for t in
                  ("/bin/sh", "../sh", "sh ", "sh\n", "sh;id", "bash", "")]
found["smuggling"] = [status(say(head(RIGHT, *more) + body).decode("latin-1"))
                      for more, body in smuggled]
found["not smuggled"] = status(say(
    head(RIGHT, "Transfer-Encoding: chunked") + chunked).decode("latin-1"))
found["schemes"] = [status(run(("tool", "printf"), ("arg", "x"),
                               auth=("Authorization: " + s,))) for s in schemes]
found["options"] = notify("--version")
fake = "0\r\nX-Exit-Code: 0\r\n\r\nHTTP/1.1 200 OK"
found["trailer"] = run(("tool", "sh"), ("arg", "-c"), ("arg", 'printf %s "$1"; exit 7'),
                       ("arg", "sh"), ("arg", fake))
found["arguments"] = run(("tool", "printf"), ("arg", "%s|"), ("arg", "$(id)"),
                         ("arg", "'\";ls`id`"))
body = urlencode([("tool", "sh"), ("arg", "-c"), ("arg",
    "trap 'touch ended; exit' INT TERM; touch ready; sleep 1000 & wait")]).encode()
with connect() as sock:
    sock.sendall(head(RIGHT, f"Content-Length: {len(body)}") + body)
    until = time.monotonic() + 60
    while not os.path.exists("ready") and time.monotonic() < until:
        time.sleep(0.01)
while not os.path.exists("ended") and time.monotonic() < until:
    time.sleep(0.01)
found["left"] = os.path.exists("ended")
print(json.dumps(found))
"""
)

LINKER = (
    SPEAKER
    + r"""
print(json.dumps(run(("tool", "sh"), ("arg", "-c"), ("arg", "ln -sf ../victim journal"))))
"""
)

# Names that would forge a line, hide one, or end a terminal's patience.
FORGER = r"""
import os
names = [b'a\r{"event":"child.gone"}', b"\x1b[2Jx", b"b\x00c", b"\xff\xfe", b"d\t e",
         b"\xe2\x80\xa8", b'"}{"', b"x" * 300]
for name in names:
    os.write(3, b"OPEN /outside/" + name + b" r true\n")
    said = b""
    while not said.endswith(b"\n"):
        said += os.read(3, 65536)
    assert said.startswith(b"ERROR ") and said.count(b"\n") == 1, said
    assert not any(byte < 32 for byte in said[:-1]), said
print(len(names))
"""


def attack(
    where: Path, kind: str, program: str, journal: Path | None = None
) -> tuple[Any, list[dict[str, Any]]]:
    """Run a program behind walls; what it printed, and the journal, line by line."""
    journal = journal or where / "journal"
    wrapper = BWRAP if kind == "bubblewrap" else ()
    root = where / "root"
    root.mkdir()
    (root / "attacker.py").write_text(program)
    (where / "config.toml").write_text(CONFIG)
    sandbox = "none" if kind == "bubblewrap" else kind
    outcome = sandhost(
        "run", "--config", where / "config.toml", "--sandbox", sandbox, "--root", root,
        "--cwd", root, "--journal", journal, "--log-level", "error",
        "--", *wrapper, "python3", "-I", "-S", root / "attacker.py",
    )  # fmt: skip
    assert outcome.status == 0, outcome
    lines = journal.read_bytes().split(b"\n")
    assert lines.pop() == b""
    return json.loads(outcome.out), [json.loads(line) for line in lines]


# attack 32, attack 33, attack 34, attack 35, attack 36, attack 37, attack 49
def test_what_is_tried_on_tools_is_refused_or_is_an_argument(
    tmp_path: Path, kind: str
) -> None:
    found, journal = attack(tmp_path, kind, ATTACKER)
    assert set(found["names"]) <= {400, 403}
    assert (set(found["smuggling"]), found["not smuggled"]) == ({400}, 200)
    assert set(found["schemes"]) <= {400, 401}, found["schemes"]
    assert "HTTP/1.1 200 OK" in found["trailer"].partition("\r\n\r\n")[2]
    assert found["trailer"].lower().rstrip().endswith("x-exit-code: 7")
    assert "$(id)|'\";ls`id`|" in found["arguments"]
    assert "uid=" not in found["arguments"]
    assert found["left"] is True
    assert "--version: No such file" in found["options"]
    # A refused request started nothing.
    started = [row for row in journal if row["event"] == "exec.started"]
    assert len(started) == 5


# attack 13, attack 23: N requests are N events, each one line of JSON, whatever they name.
def test_names_forge_no_line(tmp_path: Path, kind: str) -> None:
    count, journal = attack(tmp_path, kind, FORGER)
    denied = [row for row in journal if row["event"] == "security.denied"]
    assert len(denied) == count
    assert [row["event"] for row in journal].count("child.gone") == 1
    text = (tmp_path / "journal").read_text()
    assert not any(ord(char) < 32 and char != "\n" for char in text)


# attack 49: the journal lies where a tool may write; the next start follows no link.
def test_a_link_in_the_journals_place_is_not_followed(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "victim").write_text("{}\n")
    journal = tmp_path / "root" / "journal"
    found, _ = attack(tmp_path, kind, LINKER, journal)
    assert found.rstrip().lower().endswith("x-exit-code: 0")
    assert journal.is_symlink()
    again = sandhost("run", "--journal", journal, "--", "true")
    assert again.status == 125
    assert again.said(
        f"{str(journal)!r}: it is a link, which a child may have put there"
    )
    assert (tmp_path / "victim").read_text() == "{}\n"
