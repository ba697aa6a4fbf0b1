"""`sandhost reload --exec` and SIGUSR2.

The daemon's program is replaced, nothing else.
"""

import json
import os
import re
import signal
import socket
import subprocess
from functools import partial
from pathlib import Path

import pytest

from supervisor.config.directories import VARIABLE, Places, text_of
from supervisor.control.client import ControlError, call
from supervisor.handover.state import versions
from tests.helpers.command import ENVIRONMENT, SANDHOST, TIMEOUT_S, sandhost
from tests.helpers.daemon import Daemon, daemon, left_in
from tests.helpers.replacing import SEQUENCE, assert_clean, replace_daemon

pytestmark = pytest.mark.slow

TALKER = '["/bin/sh", "-c", "n=0; while read -r line; do echo $line; done <going"]'


# spec T3: children that count over the door miss nothing; pids, names, logs stay.
@pytest.mark.timeout(300)
def test_a_daemon_is_replaced_while_its_children_count(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "numbers").write_bytes(b"".join(b"%07d\n" % n for n in range(100_000)))
    stop = tmp_path / "stop"
    config = f'[policy.p]\nroot = "{root}"\nsandbox = "none"\n'
    for name, attached, transport in (("a", 0, "socketpair"), ("b", 2, "pipes")):
        command = json.dumps([*SEQUENCE, name, str(attached), str(stop)])
        config += (
            f'[child.{name}]\ncommand = {command}\npolicy = "p"\n'
            f'transport = "{transport}"\n'
        )
    with daemon(tmp_path, config) as running:
        before = {row.name: row.pid for row in running.client.ps()}
        for _ in range(3):
            replace_daemon(running)
            assert {row.name: row.pid for row in running.client.ps()} == before
        running.send(signal.SIGUSR2)
        running.hear("RELOADING=1")
        running.hear("READY=1")
        assert running.client.stats()["generation"] == 4
        assert_clean(running)
        stop.touch()
        for name in ("a", "b"):
            running.wait(lambda: {r.state for r in running.client.ps()} == {"ended"})
            said = running.log(name).decode()
            assert said.startswith("done "), said
            turns = int(said.split()[1])
            wanted = b"".join(b"%07d\n" % number for number in range(turns))
            assert (root / f"{name}.0.appended").read_bytes() == wanted
        assert running.end() == 0
    assert "ERROR" not in running.said()


def test_names_restarts_logs_and_waits_are_kept(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "going")
    config = (
        f'[policy.p]\nsandbox = "none"\n'
        f'[child.talks]\ncommand = {TALKER}\ncwd = "{tmp_path}"\npolicy = "p"\n'
        'restart = "always"\nbackoff = "10ms"\n'
        '[child.waits]\ncommand = ["false"]\nrestart = "always"\nbackoff = "1h"\n'
        '[child.ended]\ncommand = ["true"]\n'
    )
    with daemon(tmp_path, config) as running:
        adhoc = running.client.spawn(["/bin/sh", "-c", "exec sleep 1000"], name="adhoc")
        running.wait(lambda: running.row("waits").state == "backing off")
        running.wait(lambda: running.row("ended").state == "ended")
        with (tmp_path / "going").open("w") as going:
            print("one", file=going, flush=True)
            running.wait(lambda: running.log("talks") == b"one\n")
            pid = running.row("talks").pid
            replace_daemon(running)
            assert_clean(running)
            assert running.row("talks").pid == pid
            assert running.row("adhoc").pid == adhoc.pid
            assert running.row("waits").state == "backing off"
            assert running.row("ended").state == "ended"
            print("two", file=going, flush=True)
            running.wait(lambda: running.log("talks") == b"one\ntwo\n")
        # It has ended now, and comes back, under the next program and the one after.
        running.wait(lambda: running.row("talks").pid not in {None, pid})
        assert running.row("talks").restarts == 1
        replace_daemon(running)
        assert running.row("talks").restarts == 1
        running.client.stop_child("adhoc")
        assert "adhoc" not in {row.name for row in running.client.ps()}
        assert_clean(running)
        assert running.end() == 0
    assert not left_in(tmp_path)
    assert not (tmp_path / "run" / "control").exists()


def has_said(running: Daemon, name: str, lines: set[bytes]) -> bool:
    """Whether lines are in a child's log."""
    return lines <= set(running.log(name).splitlines())


def test_both_streams_of_a_child_are_handed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "going")
    script = "while read -r line; do echo out $line; echo err $line >&2; done <going"
    config = (
        f'[policy.p]\nsandbox = "none"\n[child.both]\npolicy = "p"\ncwd = "{tmp_path}"\n'
        f'command = ["/bin/sh", "-c", "exec 3>&-; {script}"]\n'
    )
    with daemon(tmp_path, config) as running:
        with (tmp_path / "going").open("w") as going:
            for number in range(3):
                print(number, file=going, flush=True)
                last = {b"out %d" % number, b"err %d" % number}
                running.wait(partial(has_said, running, "both", last))
                replace_daemon(running)
        env = {"SANDHOST_CONTROL": running.client.path}
        lines = sandhost("logs", "-t", "both", env=env).out.splitlines()
        told = {line.split(b" ", 1)[1] for line in lines[1:]}
        streams = {
            b"%b | %b %d" % (s, s, n) for s in (b"out", b"err") for n in range(3)
        }
        assert told == streams
        assert_clean(running)
        assert running.end() == 0


def test_a_child_that_has_closed_its_output_is_handed_over(tmp_path: Path) -> None:
    quiet = '["/bin/sh", "-c", "exec sleep 1000 >&- 2>&-"]'
    config = f'[policy.p]\nsandbox = "none"\n[child.quiet]\ncommand = {quiet}\npolicy = "p"\n'
    with daemon(tmp_path, config) as running:
        running.wait(lambda: running.row("quiet").state == "running")
        pid = running.row("quiet").pid
        assert pid is not None
        running.wait(lambda: "pipe:" not in links_of(pid))
        for _ in range(2):
            replace_daemon(running)
            assert running.row("quiet").pid == pid
        assert_clean(running)
        os.kill(pid, signal.SIGKILL)
        running.wait(lambda: running.row("quiet").state != "running")
        assert running.end() == 0
    assert "ERROR" not in running.said()


def links_of(pid: int) -> str:
    """Return what the standard output and error of a process are."""
    fds = (Path(f"/proc/{pid}/fd/{number}") for number in (1, 2))
    return " ".join(str(fd.readlink()) for fd in fds if fd.is_symlink())


def test_what_the_configuration_says_by_then_is_made_so(tmp_path: Path) -> None:
    config = "".join(
        f'[child.{name}]\ncommand = ["sleep", "1000"]\n' for name in ("same", "changed")
    )
    with daemon(tmp_path, config) as running:
        before = {row.name: row.pid for row in running.client.ps()}
        file = tmp_path / "c.toml"
        text = file.read_text().replace("[child.changed]", "[child.fresh]")
        file.write_text(text)
        replace_daemon(running)
        running.wait(
            lambda: {row.name for row in running.client.ps()} == {"same", "fresh"}
        )
        assert running.row("same").pid == before["same"]
        # A configuration with a fault is none: the program stays.
        file.write_text(text + "[nonsense]\n")
        outcome = sandhost(
            "reload", "--exec", env={"SANDHOST_CONTROL": running.client.path}
        )
        assert outcome.status != 0
        assert b"its configuration has faults" in outcome.err
        assert b"nonsense" in outcome.err
        assert running.client.stats()["generation"] == 1
        assert running.row("same").pid == before["same"]
        with pytest.raises(ControlError, match="takes no arguments"):
            call(running.client.path, "replace", {"now": True})
        assert running.end() == 0


def test_a_daemon_without_a_configuration_is_replaced(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        outcome = sandhost(
            "reload", "--exec", "--json", env={"SANDHOST_CONTROL": running.client.path}
        )
        told = {"generation": 1, "connections_reset": 0}
        assert json.loads(outcome.out) == told
        # Both of its directories are still its own.
        text = (tmp_path / "c.toml").read_text()
        for name, other in (("run", "state"), ("state", "run")):
            own = text.replace(f"{tmp_path}/{other}", f"{tmp_path}/own")
            (tmp_path / "own.toml").write_text(own)
            outcome = sandhost("serve", "--config", "own.toml", cwd=tmp_path)
            assert outcome.status == 1
            assert outcome.said(f"'{tmp_path}/{name}': a living host (pid ")
        assert running.end() == 0
    # They are free, and the next host finds no process to look for.
    assert (tmp_path / "run/lock").read_bytes() == b""
    assert (tmp_path / "state/state.lock").read_bytes() == b""


CHATS = f"""
{SANDHOST} llm chat -p one 2>&1; echo "status $?"
{SANDHOST} llm chat -p two 2>&1; echo "status $?"
{SANDHOST} llm quota; exec sleep 1000
"""
KEY = "sk-canary-handed-over-0123456789"


def received(line: socket.socket) -> bytes:
    """Receive one request with a body."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += line.recv(65_536)
    head, _, body = data.partition(b"\r\n\r\n")
    (size,) = re.findall(rb"(?i)content-length: (\d+)", head)
    while len(body) < int(size):
        body += line.recv(65_536)
    return head


# spec L10, I7, I10: the call under way is answered with one error and paid for, what was
# spent stays spent, and the key is there for the next one, in no environment.
def test_a_chat_under_way_gets_one_error_and_the_next_an_answer(
    tmp_path: Path,
) -> None:
    completion = {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "an answer"},
            }
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }
    body = json.dumps(completion).encode()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        config = (
            f'[llm]\nbase_url = "http://127.0.0.1:{server.getsockname()[1]}/v1"\n'
            "max_tokens = 10\n[llm.quota]\nmax_tokens = 100000\n"
            '[policy.p]\nsandbox = "none"\n'
            f"[child.a]\ncommand = {json.dumps(['/bin/sh', '-c', CHATS])}\n"
            'policy = "p"\n'
        )
        with daemon(tmp_path, config, env={"OPENAI_API_KEY": KEY}) as running:
            first, _ = server.accept()
            with first:
                assert KEY.encode() in received(first)
                replace_daemon(running)
                second, _ = server.accept()
            with second:
                assert KEY.encode() in received(second)
                head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                second.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
                running.wait(lambda: b"weighted" in running.log("a"))
            said = running.log("a").decode()
            assert said.count("interrupted") == 1, said
            assert "an answer\n" in said
            # 10 + 4 * 5 for the second; the first, by the estimate, for it was sent.
            (spent,) = re.findall(r"([\d.]+)/100000 weighted", said)
            assert float(spent) > 30.0
            environ = Path(f"/proc/{running.process.pid}/environ").read_bytes()
            assert KEY.encode() not in environ
            assert_clean(running)
            assert running.end(signal.SIGTERM) in {0, 1}


# Its places are told; what it would make of its own configuration has to be possible as well.
def test_the_check_refuses_places_that_lie_nowhere(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[host]\nstate_dir = 'state'\nruntime_dir = 'run'\n")
    gone = tmp_path / "gone"
    gone.mkdir()
    told = Places("/run/r", "/var/lib/s", "/run/r/control", "/var/lib/s/scratch")
    env = {**ENVIRONMENT, VARIABLE: text_of(told)}
    words = (SANDHOST, "handover-check", "0.0", "serve", "--config", str(config))
    script = 'rmdir "$PWD"; exec "$@"'
    command = ["sh", "-c", script, "sh", *words]
    checked = subprocess.run(
        command, check=False, cwd=gone, env=env, capture_output=True
    )
    why = "its configuration cannot be used: the working directory is gone"
    assert checked.returncode == 2
    assert checked.stdout.startswith(f"sandhost: {why}".encode())


def test_the_check_says_what_is_taken_over() -> None:
    wanted = f"sandhost handover {versions()}\n".encode()
    assert sandhost("handover-check", "0.0").out == wanted
