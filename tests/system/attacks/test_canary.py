"""A key that the host knows is nowhere: not for a child, not for who looks in.

Two canaries, one in the environment of a daemon and one in a file, a provider that gives
away whatever key comes with a request, and a top-level child that writes down all that
it can read.  Its files, and all that the daemon tells, are searched.
"""

import base64
import json
import secrets
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.helpers.canary import VARIABLE
from tests.helpers.canary_forms import NAMES, searched_forms
from tests.helpers.command import ENVIRONMENT, SANDHOST, sandhost
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.provider import provider_process
from tests.helpers.stage import CHILDREN
from tests.system.attacks.conftest import words_of

pytestmark = [pytest.mark.slow, pytest.mark.attack]


def hits(keys: tuple[str, ...], told: dict[str, bytes]) -> list[tuple[str, str]]:
    """Return where a key is, and in which form; also within JSON, and JSON in that."""
    found = []
    for name, form in (pair for key in keys for pair in searched_forms(key).items()):
        wanted = {form, in_json := json.dumps(form)[1:-1], json.dumps(in_json)[1:-1]}
        for where, data in told.items():
            if any(one.encode() in data for one in wanted):
                found.append((where, name))
    return found


@pytest.fixture
def canary() -> str:
    """A key that no other test of this machine has."""
    return new_key("canary")


def new_key(name: str) -> str:
    """Make a key that every form writes in another way.

    The two alphabets of base64 differ in what comes of five question marks, wherever they
    begin.
    """
    return f"sk-{name}+{secrets.token_hex(12)}/?????=b"


@pytest.fixture
def provider(canary: str) -> Iterator[str]:
    """A stand-in that expects the canary, as a process of its own; its base URL."""
    with provider_process(key=canary, in_every_form=True) as base_url:
        yield base_url


def told_outside(running: Daemon, port: int) -> Iterator[tuple[str, bytes]]:
    """Yield all that a daemon tells whoever may look in."""
    control = running.where / "run" / "control"
    yield "logs", running.log("searcher")
    orders = ("ps", "clients", "files", "quota", "stats")
    for words in (*((order, "--json") for order in orders), ("doctor", "--leaks")):
        outcome = sandhost(*words, "--control", control)
        yield " ".join(words), outcome.out + outcome.err
    for path in ("/metrics", "/"):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as reply:
            yield path, reply.read()


def other_key(where: Path) -> str:
    """Make a key, and the file `key` with it, for a second model."""
    other = new_key("other")
    (where / "key").write_text(other + "\n")
    (where / "key").chmod(0o600)
    return other


def free_port() -> int:
    """Return a port that nobody listens on at this moment."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


# attack 24, I10, spec L13
@pytest.mark.timeout(300)  # a dozen commands, one after the other
@pytest.mark.parametrize("profile", ["none", "auto"])
def test_a_key_of_the_host_shows_nowhere(
    tmp_path: Path, canary: str, provider: str, profile: str
) -> None:
    other = other_key(tmp_path)
    for name in ("root", "cwd"):
        (tmp_path / name).mkdir()
    program = tmp_path / "cwd" / "searcher.py"
    program.write_bytes((CHILDREN / "searcher.py").read_bytes())
    port = free_port()
    config = f"""
[metrics]
listen = "tcp://127.0.0.1:{port}"
page = true
[llm]
base_url = "{provider}"
endpoint = true
[llm.models.other]
base_url = "{provider}"
api_key_file = "{tmp_path}/key"
[policy.curious]
top_level = true
root = "{tmp_path}/root"
sandbox = "{profile}"
{'network = "host"' if profile == "none" else ""}
[child.searcher]
command = ["{sys.executable}", "-I", "{program}", "{tmp_path}"]
cwd = "{tmp_path}/cwd"
policy = "curious"
[child.other]
command = ["{SANDHOST}", "llm", "chat", "-p", "!leak"]
policy = "other"
[policy.other]
model = "other"
sandbox = "{profile}"
{'network = "host"' if profile == "none" else ""}
"""
    env = {"OPENAI_API_KEY": canary}
    with daemon(tmp_path, config, "--log-level", "debug", env=env) as running:
        running.wait(lambda: b"looked everywhere" in running.log("searcher"), "its end")
        told = dict(told_outside(running, port))
        told |= {"found": (tmp_path / "root" / "found").read_bytes()}
        # Else nothing was given away that could have been found: by an answer, an error.
        for place in (b'"content":"', b"400 "):
            after = b"".join(told["found"].split(place)[1:])
            assert [n for n in NAMES if n.encode() + b": " not in after] == [], place
        assert b"looked everywhere" in told["logs"]
        assert b"sandhost_" in told["/metrics"]
        running.end()
    told["stderr"] = (tmp_path / "stderr").read_bytes()
    for path in (tmp_path / "state").rglob("*"):
        if path.is_file():
            told[str(path)] = path.read_bytes()
    assert hits((canary, other), told) == []


# A shell sees: its own, and all that `/proc` has of whomever it sees.
LOOK = """
env; set
for one in /proc/[0-9]*; do cat $one/environ $one/cmdline $one/status; ls -l $one/fd; done
cat /proc/self/maps /proc/self/mountinfo /proc/self/net/unix
find . "${TMPDIR:-.}" -type f -exec cat {} +
echo "$0 looked everywhere"
"""

# A Python program, its shell, a tool of its host's, and a nested child.
KINDS_OF_CHILDREN = """
import os, subprocess, sys
from vfs.client.tools import ToolClient
look, sandhost = sys.argv[1:]
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            sys.stdout.buffer.write(open(f"/proc/{pid}/{name}", "rb").read())
        except OSError as why:
            print(why)
print(os.environ, "python looked everywhere", flush=True)
subprocess.run(["sh", "-c", look, "shell"])
ToolClient().run("sh", "-c", look, "tool", on_output=lambda data: os.write(1, data))
subprocess.run([sandhost, "relay", "--", "sh", "-c", look, "nested"], pass_fds=(3,))
"""


# attack 24, I10: whoever a child is, and in whatever walls, by its own calls.
def test_no_kind_of_child_sees_a_key(
    tmp_path: Path, canary: str, provider: str, kind: str
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    tmp_path.chmod(0o755)
    options, wrapper = words_of(kind, tmp_path)
    other = other_key(tmp_path)
    config = tmp_path / "walls.toml"
    text = f"""
[llm]
base_url = "{provider}"
endpoint = true
[llm.models.other]
base_url = "{provider}"
api_key_file = "{tmp_path}/key"
[toolexec]
[sidecar.c]
kind = "c-cpp"
path = ["/usr/bin", "/bin"]
allow = ["sh"]
"""
    config.write_text(text + (config.read_text() if config.exists() else ""))
    outcome = sandhost(
        "run", *options, *(() if "--config" in options else ("--config", config)),
        *(("--network", "host") if kind == "none" else ()),
        "--root", root, "--cwd", root,
        "--journal", tmp_path / "journal", "--log-level", "debug",
        "--", *wrapper, sys.executable, "-I", "-c", KINDS_OF_CHILDREN, LOOK, SANDHOST,
        env={**ENVIRONMENT, VARIABLE: canary},
    )  # fmt: skip
    for who in (b"python", b"shell", b"tool", b"nested"):
        assert who + b" looked everywhere" in outcome.out, (who, outcome.err[-2000:])
    told = {"out": outcome.out, "err": outcome.err}
    told["journal"] = (tmp_path / "journal").read_bytes()
    assert hits((canary, other), told) == []


# The search finds what is there: each form, wherever it begins, and JSON in JSON.
def test_the_search_finds_a_key_in_every_form() -> None:
    key = "sk-canary+0123456789abcdef/?????=b"
    for before in (b"", b"x", b"xy", b"xyz"):
        data = before + key.encode() + b"tail"
        offset = len(before) % 3
        text, url = base64.b64encode(data), base64.urlsafe_b64encode(data)
        assert hits((key,), {"": text}) == [("", f"base64 at {offset}")]
        assert hits((key,), {"": url}) == [("", f"base64 of URLs at {offset}")]
    for said, name in (
        (quote(key, safe=""), "URL"),
        (quote(key), "URL with slashes"),
        ("sk-canary%2b0123456789abcdef%2f%3f%3f%3f%3f%3f%3db", "URL in lower case"),
        (r"sk-canary+0123456789abcdef\/?????=b", "JSON of PHP"),
    ):
        for told in (said, json.dumps(said), json.dumps(json.dumps(said))):
            assert hits((key,), {"": told.encode()}) == [("", name)]
