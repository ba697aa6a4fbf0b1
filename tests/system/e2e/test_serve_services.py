"""`sandhost serve` with each section that offers something.

Model, tools, fds, figures.
"""

import json
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.canary import KEY
from tests.helpers.command import PROGRAMS, sandhost, small_disk
from tests.helpers.daemon import Daemon, daemon, left_in
from tests.helpers.provider import key_file, provider_process
from tests.helpers.scrape import curl, parsed
from tests.helpers.toolruns import program

pytestmark = pytest.mark.slow


POLICY = "[policy.open]\nsandbox = 'none'\nroot = '{where}/root'\n"
"""For children that look at the machine themselves."""

FD_CALL = r"""
call='{"name":"list_fds"}'; printf 'FD_CALL %d\n%s' ${#call} "$call" >&3
read -r r <&3; case "$r" in OK*) head -c "${r#OK }" <&3; echo;; *) echo "$r";; esac
"""

UNASKED = r"""
for name in OPENAI_BASE_URL OPENAI_API_KEY AIFO_TOOLEEXEC_URL AIFO_TOOLEEXEC_TOKEN
do eval "[ -n \"\${$name}\" ]" && echo "$name"; done; echo over; exec sleep 1000
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name: an address of a unix socket has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="sd-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def provider() -> Iterator[str]:
    """A stand-in for a provider in a process of its own; its base URL."""
    with provider_process() as base_url:
        yield base_url


def llm(where: Path, base_url: str, more: str = "") -> str:
    """`[llm]`."""
    keys = f'base_url = "{base_url}"\napi_key_file = "{key_file(where)}"\n'
    return f"[llm]\n{keys}endpoint = true\n[llm.quota]\nmax_tokens = 5000\n{more}"


def toolexec(where: Path) -> str:
    """`[toolexec]` with one sidecar, which has the tool `go`."""
    program(where / "bin", "go", 'printf "tool:%s" "$1"; exit 7')
    return (
        "[toolexec]\nlisten = ['unix']\n"
        f"[sidecar.s]\nkind = 'go'\npath = ['{where}/bin']\n"
    )


FDS = "[tools]\nenabled = ['read_fd']\n[file_descriptor]\nenabled = true\n"


def child(name: str, script: str, more: str = "") -> str:
    """A shell child under the policy `open`, by TOML's rules for literal strings."""
    command = f"command = ['sh', '-c', '''{script}''']\npolicy = 'open'\n"
    return f"[child.{name}]\n{command}env = {{ PATH = '{PROGRAMS}' }}\n{more}"


def policy(where: Path) -> str:
    """The policy of these children, and their root."""
    (where / "root").mkdir(exist_ok=True)
    return POLICY.format(where=where)


def said(running: Daemon, name: str, last: str) -> list[str]:
    """Wait until a child has said its last word; return its lines."""
    running.wait(lambda: last in running.log(name).decode().splitlines(), last)
    return running.log(name).decode().splitlines()


def says(running: Daemon, text: str, times: int) -> bool:
    """Whether the child `a` has said something so often."""
    return running.log("a").decode().count(text) >= times


def free_port() -> int:
    """A port of loopback that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def quota(running: Daemon) -> dict[str, Any]:
    """The row of the host's own account."""
    outcome = sandhost("quota", "--json", "--control", running.client.path)
    assert outcome.status == 0, outcome.err
    row: dict[str, Any] = json.loads(outcome.out)[0]
    return row


# ---------------------------------------------------------------- each section


def test_children_of_a_daemon_have_all_that_is_configured(
    place: Path, provider: str
) -> None:
    script = (
        "sandhost llm chat -p 'one two three'\n"
        'curl -s "$OPENAI_BASE_URL/models" -H "Authorization: Bearer $OPENAI_API_KEY"'
        " | head -c 10; echo\n"
        "./shims/go arg; echo =$?" + FD_CALL + "echo over; exec sleep 1000"
    )
    assert sandhost("shim", place / "root" / "shims").status == 0
    cwd = f"cwd = '{place}/root'\n"
    config = (
        policy(place)
        + llm(place, provider)
        + toolexec(place)
        + FDS
        + child("a", script, cwd)
    )
    with daemon(place, config) as running:
        lines = said(running, "a", "over")
        assert lines == [
            "The message has 3 words.",
            lines[1],
            "tool:arg=7",
            '<fd_list count="0"/>',
            "over",
        ]
        assert lines[1].startswith("{")
        assert quota(running)["spent"] > 0
        names = {event.event["event"] for event in _events(running)}
        assert {"llm.called", "exec.started", "exec.ended"} <= names
        assert running.end() == 0
    assert KEY not in running.said()
    assert not left_in(place)


def _events(running: Daemon) -> list[Any]:
    found = running.client.events(follow=False, lines=None)
    return [event for event in found if event.event is not None]


@pytest.mark.parametrize("section", ["", "llm", "toolexec", "fds"])
def test_a_child_has_nothing_that_is_not_configured(
    place: Path, provider: str, section: str
) -> None:
    sections = {
        "": "",
        "llm": llm(place, provider),
        "toolexec": toolexec(place),
        "fds": FDS,
    }
    config = policy(place) + sections[section] + child("a", FD_CALL + UNASKED)
    expected = {
        "llm": ["OPENAI_BASE_URL", "OPENAI_API_KEY"],
        "toolexec": ["AIFO_TOOLEEXEC_URL", "AIFO_TOOLEEXEC_TOKEN"],
    }
    with daemon(place, config) as running:
        first, *names, _ = said(running, "a", "over")
        assert names == expected.get(section, [])
        is_there = first == '<fd_list count="0"/>'
        assert is_there == (section == "fds")
        assert is_there or first == "ERROR LLM fds not available"
        assert running.end() == 0


def test_a_child_that_is_spawned_later_and_one_that_comes_back_have_it_too(
    place: Path,
) -> None:
    again = "restart = 'always'\nbackoff = '1ms'\n"
    config = policy(place) + FDS + child("a", FD_CALL + "exec sleep 1000", again)
    with daemon(place, config) as running:
        there = b'<fd_list count="0"/>\n'
        running.wait(lambda: running.log("a") == there)
        running.client.kill("a", "KILL")
        running.wait(lambda: running.log("a") == there * 2, "its return")
        command = ["sh", "-c", FD_CALL]
        running.client.spawn(command, name="b", policy="open")
        running.wait(lambda: running.log("b") == there, "the other's word")


def test_figures_and_the_page_are_told_where_the_configuration_says(
    place: Path,
) -> None:
    url = f"127.0.0.1:{free_port()}"
    config = f"[metrics]\nlisten = 'tcp://{url}'\npage = true\n" + "".join(
        f"[child.{name}]\ncommand = ['sleep', '1000']\n" for name in "ab"
    )
    with daemon(place, config) as running:
        found = parsed(curl(f"http://{url}/metrics").body)
        assert found["sandhost_children{state=running}"] == 2
        assert found["sandhost_log_dropped_bytes_total"] == 0
        page = curl(f"http://{url}/")
        assert page.status == 200
        assert "sleep" in page.body
        assert running.end() == 0
    with daemon(place, config.replace("page = true", "")):
        assert curl(f"http://{url}/").status == 404
        assert curl(f"http://{url}/metrics").status == 200


def test_a_listener_that_cannot_be_had_is_one_line(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        config = f"[metrics]\nlisten = 'tcp://127.0.0.1:{port}'\n"
        with daemon(place, config, ready=False) as running:
            assert running.process.wait(60) == 1
    (line,) = running.said().splitlines()
    assert "in use" in line


# ---------------------------------------------------------------- over its life


def test_a_reload_names_the_sections_that_need_a_restart(
    place: Path, provider: str
) -> None:
    config = (
        policy(place)
        + llm(place, provider)
        + toolexec(place)
        + FDS
        + child("a", "exec sleep 1000")
    )
    changes = {
        "llm": ("max_tokens = 5000", "max_tokens = 1"),
        "toolexec": ("listen = ['unix']", "listen = ['unix']\nmax_executions = 3"),
        "sidecar": ("kind = 'go'", "kind = 'go'\ntimeout = '9s'"),
        "tools": ("['read_fd']", "['read_fd', 'search_fd']"),
        "file_descriptor": ("enabled = true", "enabled = true\nescape = 'raw'"),
        "metrics": ("[tools]", "[metrics]\n[tools]"),
        "limits": ("[tools]", "[limits]\ndeadline = '9s'\n[tools]"),
    }
    file = place / "c.toml"
    with daemon(place, config) as running:
        text = file.read_text()
        pid = running.row("a").pid
        for section, (before, after) in changes.items():
            assert before in text
            file.write_text(text.replace(before, after, 1))
            done = running.client.reload()
            assert done.needs_restart == [section]
            assert done.unchanged == ["a"]
            file.write_text(text)
            running.client.reload()
        assert running.row("a").pid == pid
        running.wait(lambda: "need a restart of the host" in running.said())


# A charge is on the disk before the answer goes out.
def test_the_quotas_ledger_survives_kill_9_and_a_restart(
    place: Path, provider: str
) -> None:
    script = "sandhost llm chat -p 'one two three'; echo; echo over; exec sleep 1000"
    config = policy(place) + llm(place, provider, "window = 'never'\n")
    config += child("a", script)
    spent: list[float] = []
    for _ in range(2):
        with daemon(place, config) as running:
            said(running, "a", "over")
            running.wait(lambda: running.row("a").state == "running")
            running.wait(
                lambda: running.log("a").count(b"over\n") == len(spent) + 1, "answer"
            )
            row = quota(running)
            assert (row["limit"], row["reserved"]) == (5000, 0)
            spent.append(row["spent"])
            running.send(signal.SIGKILL)
            assert running.process.wait(60) == -signal.SIGKILL
    assert spent[0] > 0
    assert spent[1] == 2 * spent[0]
    # A quota that is used up stays so.
    tight = config.replace("max_tokens = 5000", f"max_tokens = {int(spent[1])}")
    with daemon(place, tight) as running:
        running.wait(lambda: running.log("a").count(b"over\n") == 3, "its refusal")
        assert b"quota exceeded" in running.log("a")
        assert quota(running)["spent"] == spent[1]


# spec L10: a child's own quota is its name's: dying is no way around it, and neither is
# the death of the host, nor its replacement.
@pytest.mark.parametrize(("window", "end"), [("never", "kill"), ("run", "replace")])
def test_a_childs_quota_is_that_of_all_its_lives(
    place: Path, provider: str, window: str, end: str
) -> None:
    script = (
        "sandhost llm chat -p '!prompt-tokens=30 !words=0' || touch over\n"
        "sandhost llm quota; test -e over && exec sleep 1000; exit 3"
    )
    config = policy(place).replace("\n", "\nquota = 50\n", 1)
    more = f"cwd = '{place}/root'\nrestart = 'always'\nbackoff = '10ms'\n"
    config += llm(place, provider, f"window = '{window}'\n") + child("a", script, more)
    config = config.replace("endpoint = true\n", "")  # it is never handed over
    used = "60.0/50 weighted tokens (120.0% used, 0.0 remaining)"
    over = place / "root" / "over"
    with ExitStack() as stack:
        running = stack.enter_context(daemon(place, config))
        # Two lives spend, the third is refused.
        running.wait(partial(says, running, used, 2), used)
        assert b"quota exceeded" in running.log("a")
        over.unlink()
        if end == "kill":
            running.send(signal.SIGKILL)
            assert running.process.wait(60) == -signal.SIGKILL
            running = stack.enter_context(daemon(place, config))
        else:
            running.client.replace()
            running.client.kill("a")
        running.wait(partial(says, running, used, 3), used)
        assert over.exists()
        assert running.log("a").count(b"quota exceeded") == 2


def test_what_a_full_disk_loses_is_a_figure(place: Path) -> None:
    url = f"127.0.0.1:{free_port()}"
    config = f"[policy.open]\nsandbox = 'none'\n[metrics]\nlisten = 'tcp://{url}'\n"
    with small_disk(place, "256k") as point:
        (place / "state").symlink_to(point)
        with daemon(place, config) as running:
            command = ["sh", "-c", "head -c 1000000 /dev/zero; echo; exec sleep 1000"]
            running.client.spawn(command, name="x", policy="open", cwd=str(point))
            name = "sandhost_log_dropped_bytes_total"
            figures = f"http://{url}/metrics"
            running.wait(lambda: parsed(curl(figures).body)[name] > 500_000, name)
            lost = parsed(curl(figures).body)[name]
            assert lost <= 1_000_001
            # A counter does not fall when the child is gone.
            running.client.stop_child("x")
            assert parsed(curl(figures).body)[name] >= lost
            assert running.end() == 0


def test_a_daemons_sockets_for_services_go_with_their_child(place: Path) -> None:
    config = policy(place) + toolexec(place)
    config += child("a", 'echo "${AIFO_TOOLEEXEC_URL#unix://}"; echo over; sleep 1000')
    with daemon(place, config) as running:
        path = Path(said(running, "a", "over")[0])
        assert path.is_socket()
        running.client.stop_child("a")
        assert not path.exists()
