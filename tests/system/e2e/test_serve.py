"""`sandhost serve`: ready, children kept, order, restarts, reload, exit statuses."""

import json
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from supervisor.client import ControlError
from tests.helpers.command import sandhost
from tests.helpers.daemon import daemon, left_in

pytestmark = pytest.mark.slow

SLEEPER = '["sleep", "1000"]'


def journal(where: Path, event: str) -> list[dict[str, Any]]:
    """Return the journal's events of one name."""
    lines = [
        json.loads(line)
        for file in sorted((where / "state" / "journal").iterdir())
        for line in file.read_bytes().splitlines()
    ]
    return [line for line in lines if line["event"] == event]


# spec S6: serve exits 0 if all went well.
def test_children_run_when_it_is_ready_and_are_gone_when_it_ended(
    tmp_path: Path,
) -> None:
    config = f"[child.a]\ncommand = {SLEEPER}\n[child.b]\ncommand = {SLEEPER}\n"
    with daemon(tmp_path, config) as running:
        rows = {row.name: row for row in running.client.ps()}
        assert set(rows) == {"a", "b"}
        pids = [row.pid for row in rows.values()]
        assert all(row.state == "running" for row in rows.values())
        assert running.end() == 0
    assert [row["children"] for row in journal(tmp_path, "host.stopping")] == [2]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert not left_in(tmp_path)
    assert not (tmp_path / "run" / "control").exists()


def test_children_start_in_order_and_stop_in_reverse(tmp_path: Path) -> None:
    config = "".join(
        f"[child.{name}]\ncommand = {SLEEPER}\nafter = {after}\n"
        for name, after in (("c", ["b"]), ("b", ["a"]), ("a", []))
    )
    with daemon(tmp_path, config) as running:
        assert running.end() == 0
    spawned = {e["child_id"]: e["name"] for e in journal(tmp_path, "child.spawned")}
    assert list(spawned.values()) == ["a", "b", "c"]
    gone = [spawned[e["child_id"]] for e in journal(tmp_path, "child.gone")]
    assert gone == ["c", "b", "a"]


def test_a_child_that_fails_too_often_is_given_up_with_the_reason(
    tmp_path: Path,
) -> None:
    config = (
        "[child.a]\ncommand = ['sh', '-c', 'exit 3']\nrestart = 'on-failure'\n"
        "backoff = '1ms'\nmax_restarts = 2\nwithin = '1h'\n"
    )
    with daemon(tmp_path, config) as running:
        running.wait(lambda: running.row("a").state == "given up", "giving up")
        row = running.row("a")
        assert (row.restarts, row.status, row.pid) == (2, 3, None)
        assert row.reason is not None
        assert "more than 2 restarts within 3600 s" in row.reason
        assert "exited with 3" in row.reason
        assert len(journal(tmp_path, "child.spawned")) == 3
        assert running.end() == 0


def test_a_child_that_is_killed_comes_back_if_it_always_should(tmp_path: Path) -> None:
    config = (
        f"[child.a]\ncommand = {SLEEPER}\nrestart = 'always'\nbackoff = '1ms'\n"
        f"[child.b]\ncommand = {SLEEPER}\n"
    )
    with daemon(tmp_path, config) as running:
        first = running.row("a").pid
        running.client.kill("a", "KILL")
        running.client.kill("b", "9")
        again = running.wait(
            lambda: [r for r in running.client.ps() if r.name == "a" and r.restarts]
        )
        assert again[0].reason == "was killed by SIGKILL"
        running.wait(lambda: running.row("a").pid not in (None, first), "its return")
        running.wait(lambda: running.row("b").state == "ended", "the end of b")
        assert running.row("b").reason == "was killed by SIGKILL"
        # Stopped on request, it does not come back; and can be started again.
        running.client.stop_child("a")
        assert running.row("a").state == "stopped"
        assert running.client.spawn(name="a").pid is not None
        assert running.row("a").state == "running"


# check-config takes such a name, and so does the child.
@pytest.mark.parametrize("name", ["my work", "./my work/"])
def test_a_relative_working_directory_begins_at_the_hosts(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "my work").mkdir()
    config = f"[child.a]\ncommand = ['pwd']\ncwd = '{name}'\n"
    with daemon(tmp_path, config) as running:
        running.wait(lambda: running.row("a").state == "ended", "the end of a")
        assert running.row("a").status == 0, running.row("a").reason
        assert running.log("a").decode() == f"{tmp_path}/my work\n"


def test_a_child_that_cannot_start_is_told_and_the_others_run(tmp_path: Path) -> None:
    config = (
        "[child.a]\ncommand = ['/nonexistent']\n"
        f"[child.b]\ncommand = {SLEEPER}\nafter = ['a']\n"
    )
    with daemon(tmp_path, config) as running:
        running.wait(lambda: running.row("a").state == "ended", "the end of a")
        assert "No such file" in str(running.row("a").reason)
        assert running.row("b").state == "running"


def test_a_reload_touches_what_changed_and_nothing_else(tmp_path: Path) -> None:
    base = "[policy.p]\ntop_level = {p}\n" + "".join(
        f"[child.{n}]\ncommand = {SLEEPER}\n" for n in ("same", "gone", "changed")
    )
    more = f"[child.other]\ncommand = {SLEEPER}\npolicy = 'p'\n"
    with daemon(tmp_path, base.format(p="false") + more) as running:
        before = {row.name: row.pid for row in running.client.ps()}
        file = tmp_path / "c.toml"
        text = file.read_text().replace("[child.gone]", "[child.fresh]")
        text = text.replace("[child.changed]", "[child.changed]\nenv = { A = 'b' }")
        file.write_text(text.replace("top_level = false", "top_level = true"))
        running.send(signal.SIGHUP)
        assert "MONOTONIC_USEC" in running.hear("RELOADING=1")
        running.hear("READY=1")
        after = {row.name: row.pid for row in running.client.ps()}
        assert set(after) == {"same", "fresh", "changed", "other"}
        assert after["same"] == before["same"]
        assert after["changed"] != before["changed"]
        # Its policy changed.
        assert after["other"] != before["other"]
        # A wrong configuration changes nothing.
        file.write_text(text + "\n[child.same]\n[nonsense]\n")
        with pytest.raises(ControlError, match="cannot reload the configuration"):
            running.client.reload()
        assert {row.name: row.pid for row in running.client.ps()} == after
        file.write_text(text.replace('grace = "5s"', 'grace = "1s"'))
        assert running.client.reload().needs_restart == ["host"]


def test_a_reload_takes_the_name_of_a_child_that_was_not_configured(
    tmp_path: Path,
) -> None:
    slow = "command = ['sh', '-c', 'trap \"\" TERM; while :; do sleep 1; done']"
    with daemon(tmp_path, f"[child.slow]\n{slow}\n", grace="3s") as running:
        child = running.client.spawn(["sleep", "1000"], name="web")
        file = tmp_path / "c.toml"
        text = file.read_text().replace("[child.slow]", "[child.fresh]")
        file.write_text(f"{text}\n[child.web]\ncommand = {SLEEPER}\n")
        running.send(signal.SIGHUP)
        running.wait(lambda: running.row("slow").state == "stopping", "slow's end")
        # A child that the reload is about to start is not started beside it.
        with pytest.raises(ControlError, match="is being reloaded; try again"):
            running.client.spawn(["sleep", "1000"], name="fresh")
        running.hear("READY=1")
        assert {row.name for row in running.client.ps()} == {"fresh", "web"}
        assert running.row("web").pid != child.pid
        assert running.client.reload().unchanged == ["fresh", "web"]


@pytest.mark.parametrize("alone", ["", "run", "state"])
def test_two_daemons_cannot_have_the_same_directories(
    tmp_path: Path, alone: str
) -> None:
    with daemon(tmp_path) as running:
        text = (tmp_path / "c.toml").read_text()
        own = text.replace(f"{tmp_path}/{alone}", f"{tmp_path}/own") if alone else text
        (tmp_path / "own.toml").write_text(own)
        shared = "state" if alone == "run" else "run"
        for _ in range(2):  # the one that was refused has changed nothing
            outcome = sandhost("serve", "--config", "own.toml", cwd=tmp_path)
            assert outcome.status == 1
            pid = running.process.pid
            assert outcome.said(
                f"'{tmp_path}/{shared}': a living host (pid {pid}) has it"
            )
        assert running.client.ps() == []


# attack 49
@pytest.mark.parametrize("lock", ["run/lock", "state/state.lock"])
def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path: Path, lock: str) -> None:
    (tmp_path / lock).parent.mkdir(mode=0o700)
    (tmp_path / lock).symlink_to("../victim")
    (tmp_path / "victim").write_text("kept\n")
    text = f"[host]\nruntime_dir = '{tmp_path}/run'\nstate_dir = '{tmp_path}/state'\n"
    (tmp_path / "c.toml").write_text(text)
    outcome = sandhost("serve", "--config", "c.toml", cwd=tmp_path)
    assert outcome.status == 1
    assert outcome.said(f"'{tmp_path}/{lock}'")
    assert (tmp_path / "victim").read_text() == "kept\n"


def test_faults_of_the_configuration_are_all_told(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[host]\ngrace = 1\n[child.a]\nrestart = 'x'\n")
    outcome = sandhost("serve", "--config", "c.toml", cwd=tmp_path)
    assert outcome.status == 78
    lines = outcome.err.decode().splitlines()
    keys = ("host.grace", "child.a.command", "child.a.restart")
    assert len(lines) == len(keys)
    for key in keys:
        assert any(key in line for line in lines)


def test_an_activated_control_socket_is_taken_and_its_number_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "activated")
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("activated")  # sun_path is short, tmp_path may be long
        sock.listen()
        # As a service manager does: descriptor 3, and the pid of who is to take it.
        script = (
            'exec 3<&"$1"; shift; export LISTEN_PID=$$ LISTEN_FDS=1'
            ' LISTEN_FDNAMES=control; exec "$@"'
        )
        (tmp_path / "c.toml").write_text(
            f'[host]\nruntime_dir = "{tmp_path}/run"\nstate_dir = "{tmp_path}/state"\n'
            "[child.a]\ncommand = ['sh', '-c', 'ls -l /proc/self/fd; sleep 1000']\n"
        )
        with daemon_by(script, sock.fileno(), tmp_path) as running:
            running.client.path = path
            said = running.wait(lambda: running.log("a"))
            assert b"activated" not in said
            assert f"fd/3 -> {path}".encode() not in said
            own = f"/proc/{running.process.pid}/fd"
            held = {}
            for name in os.listdir(own):
                with suppress(
                    FileNotFoundError
                ):  # one of a child that is being started
                    held[int(name)] = os.readlink(f"{own}/{name}")
            listening = os.readlink(f"/proc/self/fd/{sock.fileno()}")
            numbers = {n for n, what in held.items() if what == listening}
            assert 3 not in numbers
            # Beside the one of the shell that played the manager.
            assert max(numbers) >= 64
            assert running.end() == 0
    assert os.path.exists(path)  # it is the manager's


def daemon_by(script: str, fd: int, where: Path) -> Any:
    """Start a daemon through a shell script that is given a descriptor's number."""
    text = (where / "c.toml").read_text()
    config = text.partition("[child")[1] + text.partition("[child")[2]
    wrapper = ("bash", "-c", script, "sh", str(fd))
    return daemon(where, config, wrapper=wrapper, pass_fds=(fd,))


# The configuration was right when it was read; what it names may be gone since.
@pytest.mark.parametrize(
    ("becomes", "why"),
    [("nothing", "there is no such root"), ("file", "the root is no directory")],
)
def test_no_child_starts_in_a_root_that_is_none_any_more(
    tmp_path: Path, becomes: str, why: str
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with daemon(tmp_path, f'[policy.p]\nroot = "{root}"\n') as running:
        root.rmdir()
        if becomes == "file":
            root.touch()
        with pytest.raises(ControlError, match=why):
            running.client.spawn(["sleep", "1000"], policy="p")
        assert running.end() == 0
