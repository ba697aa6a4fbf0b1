"""Late imports of a host with children: none in Trio's thread.

An import opens files, and whoever can keep these from being opened (attack 41) would keep
the host from everything else. It also takes time that others wait for.
"""

import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import canary
from tests.helpers.command import (
    ENVIRONMENT,
    PROGRAMS,
    SANDHOST,
    TIMEOUT_S,
    sandhost,
)
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.provider import key_file, provider_process
from tests.helpers.scrape import curl
from tests.helpers.toolruns import program
from tests.system.e2e.imports import Imports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name, that children with users of their own may enter."""
    with tempfile.TemporaryDirectory(prefix="sd-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    """A stand-in for a provider in a process of its own; its base URL."""
    with provider_process() as base_url:
        yield base_url


ALL = """
[limits]
deadline = "30s"
[policy.open]
sandbox = "none"
top_level = true
[policy.walled]
[llm]
base_url = "{base}"
api_key_file = "{key}"
endpoint = true
[llm.quota]
max_tokens = 5000000
window = "never"
[llm.presets.agent]
system = "x"
tools = true
[toolexec]
listen = ["unix", "tcp://127.0.0.1:0"]
notify = {{ command = ["{where}/bin/go"] }}
[sidecar.s]
kind = "go"
path = ["{where}/bin"]
workspace = "{where}/work"
[tools]
enabled = ["read_fd", "fd_to_file", "search_fd", "fork", "summarize_fd",
    "create_temp_file", "read_temp_file", "checkpoint_process", "restore_process"]
[metrics]
listen = "tcp://127.0.0.1:{port}"
page = true
[child.kept]
command = ["sleep", "1000"]
restart = "always"
backoff = "1ms"
"""
"""Each section that offers something."""

FILES = r"""
seq 1 400000 | sandhost fs put log; sandhost fs cat log | tail -1
sandhost fs ls; sandhost fs stat log; sandhost fs mv log other; sandhost fs mkdir d
sandhost fs cat none /etc/none; sandhost fs rm other
printf 'WRITE 99 1\nx' >&3; read -r r <&3; echo "$r"
printf 'OPEN none r false\n' >&3; read -r r <&3; echo "$r"
"""

MODEL = r"""
for order in 'one two' '!once=429 a' '!status=500 a' '!broken' '!truncated' '!leak' '!error'
do sandhost llm chat -p "$order" -o out; sandhost fs cat out; done
head -c 300000 /dev/zero | tr '\0' a | sandhost llm chat -i -
sandhost llm chat -r agent@mine -p '!script=[[["list_fds",{}]],"done"]'
sandhost llm quota; sandhost llm config
ask() { curl -sN "$OPENAI_BASE_URL/$1" -H "Authorization: Bearer ${2-$OPENAI_API_KEY}" \
    -H 'Content-Type: application/json' ${3+-d "$3"} | tail -c 60; echo; }
ask models; ask models wrong; ask none
say='"model":"x","messages":[{"role":"user","content":"hello you"}]'
picture='{"type":"image_url","image_url":{"url":"data:image/png;base64,aGFsbG8="}}'
ask chat/completions "$OPENAI_API_KEY" "{$say}"
ask chat/completions "$OPENAI_API_KEY" "{\"stream\":true,$say}"
ask chat/completions "$OPENAI_API_KEY" \
    "{\"model\":\"x\",\"messages\":[{\"role\":\"user\",\"content\":[$picture]}]}"
ask chat/completions "$OPENAI_API_KEY" "{\"model\":3}"
long=$(head -c 100000 /dev/zero | tr '\0' a)
ask chat/completions "$OPENAI_API_KEY" \
    "{\"model\":\"x\",\"messages\":[{\"role\":\"user\",\"content\":\"$long\"}]}"
"""

CONTENTS = r"""
seq 1 5000 | sandhost fd wrap >/dev/null
seq 1 900000 | sandhost fd wrap >/dev/null
call() { printf 'FD_CALL %d\n%s' ${#1} "$1" >&3; read -r r <&3; case "$r" in
    OK*) head -c "${r#OK }" <&3 | head -1;; *) echo "$r";; esac; }
sandhost fd read fd:1 2 | head -1; sandhost fd search fd:1 '4.9$' --regex | head -1
sandhost fd search fd:1 '(' --regex | head -1; sandhost fd search fd:2 '99' | head -1
sandhost fd summarize fd:1 | head -1; sandhost fd write-to-file fd:1 copy | head -1
call '{"name":"fork","arguments":{"prompts":["one","two"]}}'
call '{"name":"create_temp_file","arguments":{"content":"x"}}'
call '{"name":"checkpoint_process","arguments":{}}'
call '{"name":"none"}'; call 'no json'
for unit in function class section paragraph
do call "{\"name\":\"read_fd\",\"arguments\":{\"fd\":\"fd:1\",\"unit\":\"$unit\",\"index\":1}}"
done
"""

TOOLS = r"""
sandhost shim shims >/dev/null; ./shims/go arg; echo "=$?"; ./shims/node; echo "=$?"
url=$AIFO_TOOLEEXEC_URL
at() { case "$url" in unix://*) curl -s --unix-socket "${url#unix://}" "http://x$@";;
    *) curl -s "${url%/exec}$@";; esac; echo; }
at /healthz; at /none; at /exec -d nothing
at /notify -H "Authorization: Bearer $AIFO_TOOLEEXEC_TOKEN" -H 'X-Aifo-Proto: 2' -d 'cmd=go&arg=x'
at /exec -H "Authorization: Bearer $AIFO_TOOLEEXEC_TOKEN" -H 'X-Aifo-Proto: 2' \
    -d "tool=go&cwd=$PWD&arg=x"
"""

NESTED = r"""
sandhost relay --quota 1000 -- sh -c 'sandhost fs ls; sandhost llm chat -p hello; true'
"""

END = "echo over; exec sleep 1000\n"


def configured(where: Path, base_url: str, port: int) -> str:
    """Return a configuration with all sections, and make what it names."""
    program(
        where / "bin", "go", 'printf "tool:%s" "$1"; seq 1 100000 | tail -1; exit 7'
    )
    (where / "work").mkdir()
    (where / "work").chmod(0o777)
    key = key_file(where)
    return ALL.format(base=base_url, key=key, where=where, port=port)


def have_done(running: Daemon, name: str, policy: str, script: str) -> str:
    """Start a child, wait until it has done its work; return what it said."""
    cwd = str(running.where / "work")
    env = {"PATH": PROGRAMS}
    words = ["bash", "-c", script + END]
    running.client.spawn(words, name=name, policy=policy, env=env, cwd=cwd)
    running.wait(lambda: b"over\n" in running.log(name), "its last word")
    return running.log(name).decode()


def free_port() -> int:
    """A port of loopback that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


ORDERS = (
    ("ps",), ("clients",), ("files",), ("quota",), ("stats",), ("logs", "walled"),
    ("events", "--no-follow"), ("top", "--once"), ("trace", "walled"), ("kill", "kept"),
    ("reload",), ("stop", "open"),
)  # fmt: skip


# attack 41, spec S5
def test_a_daemon_with_children_imports_nothing_in_its_own_thread(
    place: Path, provider: str
) -> None:
    port = free_port()
    imports = Imports(place)
    script = FILES + MODEL + CONTENTS + TOOLS + NESTED
    with daemon(
        place, configured(place, provider, port), env=imports.env, forked=False
    ) as running:
        assert imports.new()[0] == "began"
        for policy in ("open", "walled"):
            said = have_done(running, policy, policy, script)
            # So that it is what was to be done.
            for word in (
                "400000\n",
                "has 2 words.",
                "[DONE]",
                "<fd_search",
                "tool:arg",
            ):
                assert word in said, (word, said)
            assert imports.new() == []
        for page in ("metrics", "", "none"):
            curl(f"http://127.0.0.1:{port}/{page}")
        for words in ORDERS:
            outcome = sandhost(*words, "--control", running.client.path)
            assert outcome.status == 0, (words, outcome.err)
        text = (place / "c.toml").read_text()
        (place / "c.toml").write_text(text.replace("sleep", "cat", 1))
        assert running.client.reload().restarted == ["kept"]
        assert imports.new() == []
        running.client.replace()
        running.client.ps()
        before, *after = imports.new()
        assert before == "began", before  # nothing for its leaving
        assert after
        have_done(running, "later", "walled", script)
        assert imports.new() == []
        assert running.end() == 0
        assert imports.new() == []


def imported_by_run(place: Path, script: str, *options: str) -> tuple[list[str], str]:
    """Run a child; return its host's late imports, and all output."""
    imports = Imports(place)
    words = ("--", "bash", "-c", f"echo up; read -r; {script}")
    with subprocess.Popen(
        [SANDHOST, "run", "--journal", str(place / "journal"), *options, *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        cwd=place, env={**ENVIRONMENT, **imports.env},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        imports.new()
        said, _ = process.communicate(b"go\n", TIMEOUT_S)
    canary.told("run", said)
    return imports.new(), said.decode()


# attack 41
@pytest.mark.parametrize("walls", ["none", "auto"])
def test_a_run_without_a_configuration_imports_nothing_more(
    place: Path, walls: str
) -> None:
    script = FILES + "sandhost relay -- sandhost fs ls; sandhost llm quota; exit 3"
    found, said = imported_by_run(place, script, "--sandbox", walls)
    assert "400000\n" in said
    assert found == []


# attack 41
def test_a_run_with_services_imports_nothing_more(place: Path, provider: str) -> None:
    config = place / "c.toml"
    config.write_text(configured(place, provider, free_port()))
    script = "cd $TMPDIR; " + FILES + MODEL + CONTENTS + NESTED + "kill -9 $$"
    found, said = imported_by_run(place, script, "--config", str(config))
    assert "has 2 words." in said
    assert found == []


WORKSPACE = """
[workspace.w]
base = "{where}/work"
[policy.p]
workspace = ["w"]
"""


# attack 41
def test_a_daemon_with_a_workspace_imports_nothing_in_its_own_thread(
    place: Path,
) -> None:
    (place / "work").mkdir()
    (place / "work").chmod(0o777)
    imports = Imports(place)
    with daemon(
        place, WORKSPACE.format(where=place), env=imports.env, forked=False
    ) as running:
        assert imports.new()[0] == "began"
        for number in range(2):
            said = have_done(running, f"c{number}", "p", FILES + "echo hi > made\n")
            assert "400000\n" in said
            running.client.stop_child(f"c{number}")
        assert imports.new() == []
    assert not (place / "work" / "made").exists()
