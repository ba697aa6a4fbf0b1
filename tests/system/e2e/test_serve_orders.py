"""Orders and streams of a daemon.

Spawn, kill, logs, events; clients that misbehave.
"""

import base64
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostlib.unix_names import short_name
from supervisor.client import ControlError
from supervisor.control.server import MAX_WAITING
from tests.helpers.command import SANDHOST, heard, running, sandhost, small_disk
from tests.helpers.daemon import Daemon, daemon

pytestmark = pytest.mark.slow


OPEN = "[policy.open]\nsandbox = 'none'\n"
"""For children that talk to a test through files of its own."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with two policies and no children."""
    config = "[policy.p]\ntop_level = true\n" + OPEN
    with daemon(tmp_path, config) as it:
        yield it
        assert it.end() == 0, it.said()


def connect(sock: socket.socket, path: str) -> None:
    """Connect to a control socket, however long its path is."""
    with short_name(path) as name:
        sock.connect(name)


def ask(path: str, *lines: bytes) -> list[bytes]:
    """Say lines on one connection, and hear all until the host closes it."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(15)
        connect(sock, path)
        for line in lines:
            sock.sendall(line)
        sock.shutdown(socket.SHUT_WR)
        with sock.makefile("rb") as replies:
            return list(replies)


def test_a_spawned_child_has_a_row_a_log_and_its_policy(served: Daemon) -> None:
    script = "echo $FSPROXY_TOP_LEVEL $A; pwd; exec sleep 1000"
    child = served.client.spawn(
        ["sh", "-c", script], policy="p", env={"A": "b"}, cwd="/"
    )
    row = served.row(child.name)
    assert (row.pid, row.client_id, row.restart) == (child.pid, child.client_id, "no")
    said = served.wait(lambda: served.log(child.name).count(b"\n") == 2)
    assert said
    assert served.log(child.name) == b"true b\n/\n"
    assert served.client.stop_child(child.name) == 143
    # Without a name in the configuration its row goes, its log stays.
    assert not served.client.ps()
    assert served.log(child.name) == b"true b\n/\n"


def test_what_cannot_be_spawned_is_refused_in_one_line(served: Daemon) -> None:
    spawn = served.client.spawn
    for words, said in (
        ({"command": ["/nonexistent"]}, "No such file"),
        ({"command": ["true"], "policy": "q"}, "there is no policy 'q'"),
        ({"command": ["true"], "restart": "maybe"}, "restart: one of no"),
        ({"command": ["true"], "name": "../x"}, "a child's name"),
        ({"command": []}, "names no program"),
        ({"name": "ghost"}, "not configured"),
        ({"command": ["true"], "cwd": "/nonexistent"}, "cwd: there is no"),
    ):
        with pytest.raises(ControlError, match=said):
            spawn(**words)
    spawn(["sleep", "1000"], name="x")
    with pytest.raises(ControlError, match="there is a child 'x' already"):
        spawn(["true"], name="x")
    with pytest.raises(ControlError, match="no such child"):
        served.client.kill("ghost")
    with pytest.raises(ControlError, match="not a signal: 'WISH'"):
        served.client.kill("x", "WISH")


def test_no_more_children_than_allowed(tmp_path: Path) -> None:
    with daemon(tmp_path, "max_children = 2\n") as it:
        for _ in range(2):
            it.client.spawn(["sleep", "1000"])
        with pytest.raises(ControlError, match=r"2 children already.*max_children"):
            it.client.spawn(["true"])


def test_the_commands_do_what_the_client_does(served: Daemon) -> None:
    env = {"SANDHOST_CONTROL": served.client.path, "PATH": os.environ["PATH"]}
    script = "echo out; echo err >&2; exec sleep 1000"
    spawned = sandhost("spawn", "--name", "x", "--", "sh", "-c", script, env=env)
    assert (spawned.status, spawned.out) == (0, b"x\n")
    served.wait(lambda: b"err" in served.log("x"))
    assert sandhost("logs", "x", env=env).out == b"out\nerr\n"
    assert sandhost("logs", "x", "--lines", "1", env=env).out == b"err\n"
    (row,) = json.loads(sandhost("ps", "--json", env=env).out)
    assert row["name"] == "x"
    assert sandhost("kill", "-s", "KILL", "x", env=env).status == 0
    served.wait(lambda: not served.client.ps())
    assert json.loads(sandhost("stats", "--json", env=env).out)["children"] == 0
    events = sandhost("events", "--no-follow", env=env).out.splitlines()
    assert json.loads(events[0])["event"] == "host.started"
    assert sandhost("logs", "ghost", env=env).said("there is no such child")
    assert sandhost("spawn", env=env).status == 2


# spec face: --json wherever there is output to read
def test_orders_tell_programs_what_they_did(tmp_path: Path) -> None:
    with daemon(tmp_path, OPEN) as it:
        control = ("--control", it.client.path, "--json")
        started = it.client.spawn(["sleep", "1000"], name="one", policy="open")
        killed = sandhost("kill", *control, "-s", "CONT", "one")
        row = {"name": "one", "id": started.id, "pid": started.pid, "signal": 18}
        assert json.loads(killed.out) == row
        assert sandhost("kill", *control, "--tree", "-s", "WINCH", "one").status == 0
        stubborn = "trap '' TERM; echo on; while :; do sleep 1000; done"
        it.client.spawn(["sh", "-c", stubborn], name="two", policy="open")
        it.wait(lambda: it.log("two"), "a word of two")
        stopped = sandhost("stop", *control, "one")
        assert json.loads(stopped.out) == [{"name": "one", "status": 143}]
        events = sandhost("events", *control, "--no-follow").out.splitlines()
        rows = [json.loads(line) for line in events]
        assert [row["event"] for row in rows].count("child.spawned") == 2
        signals = [row["signal"] for row in rows if row["event"] == "child.signalled"]
        assert signals == [signal.SIGCONT, signal.SIGWINCH, signal.SIGTERM]
        ended = sandhost("stop", *control, "--grace", "0.1s")
        result = json.loads(ended.out)
        assert result["overdue"] == 1
        assert [row["name"] for row in result["blocking"]] == ["two"]
        assert it.process.wait(60) == 1


def test_a_follower_gets_all_that_is_said_across_rotation(tmp_path: Path) -> None:
    config = """
[child.a]
command = ["sh", "-c", "i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done; exec sleep 1000"]
log = { max_size = "4K", keep = 20 }
"""
    wanted = b"".join(b"line %d\n" % i for i in range(3000))
    with daemon(tmp_path, config) as it:
        got = b""
        for entry in it.client.logs("a", follow=True):
            assert entry.missed == 0
            got += entry.data
            if len(got) >= len(wanted):
                break
        assert got == wanted
        assert len(list((tmp_path / "state/logs/a").iterdir())) > 5


# spec S5: a reader that stalls blocks nobody.
@pytest.mark.parametrize("words", ["logs -f loud", "events -n 1", "trace -f loud"])
def test_a_command_that_follows_ends_when_its_reader_has_gone(
    tmp_path: Path, words: str
) -> None:
    loud = "while :; do echo on; printf 'OPEN n w false\\n' >&3; read -r x f <&3;"
    loud += " printf 'CLOSE %s\\n' $f >&3; read -r x <&3; done"
    name, *rest = words.split()
    with daemon(tmp_path, OPEN) as it:
        it.client.spawn(["sh", "-c", loud], name="loud", policy="open")
        with running(name, "--control", it.client.path, *rest) as command:
            assert command.stdout is not None
            assert command.stdout.readline()
            command.stdout.close()
            assert command.wait(60) == 0
            assert command.stderr is not None
            assert command.stderr.read() == b""


# Nothing comes any more that could not be written.
@pytest.mark.parametrize("words", ["logs -f quiet", "events -n 1", "trace -f quiet"])
def test_it_ends_then_though_there_is_nothing_to_print(
    tmp_path: Path, words: str
) -> None:
    name, *rest = words.split()
    with daemon(tmp_path, OPEN) as it:
        quiet = "echo on; exec sleep 1000"
        it.client.spawn(["sh", "-c", quiet], name="quiet", policy="open")
        with running(name, "--control", it.client.path, *rest) as command:
            assert command.stdout is not None
            assert command.stdout.readline()
            command.stdout.close()
            assert command.wait(60) == 0


def test_a_follower_that_stalls_blocks_nobody_and_is_told_what_it_missed(
    tmp_path: Path,
) -> None:
    config = """
[child.a]
command = ["sh", "-c", "head -c 3000000 /dev/zero | tr '\\\\0' x; echo; echo done; exec sleep 1000"]
log = { max_size = "64K", keep = 1 }
"""
    with daemon(tmp_path, config) as it:
        question = b'{"v":1,"do":"logs","args":{"name":"a","follow":true}}\n'
        with socket.socket(socket.AF_UNIX) as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connect(stalled, it.client.path)
            stalled.sendall(question)
            # It does not read; the child gets on, and others are answered.
            it.wait(lambda: b"done" in it.log("a"), "the child's end")
            offset, missed = 0, 0
            with stalled.makefile("rb") as replies:
                for reply in replies:
                    item = json.loads(reply)["item"]
                    missed += item["missed"]
                    assert item["offset"] >= offset
                    offset = item["offset"]
                    if base64.b64decode(item["data"]).endswith(b"done\n"):
                        break
            assert missed > 0


def test_events_come_as_they_happen(served: Daemon) -> None:
    seen: list[str] = []
    come = threading.Event()

    def follow() -> None:
        for entry in served.client.events(lines=1):
            assert entry.event is not None
            seen.append(entry.event["event"])
            if len(seen) == 1:
                come.set()
            if seen[-1] == "child.gone":
                return

    reader = threading.Thread(target=follow)
    reader.start()
    assert come.wait(60)
    served.client.spawn(["true"])
    reader.join(15)
    assert seen[-1] == "child.gone"
    assert "child.spawned" in seen


def test_a_follower_that_leaves_in_the_middle_harms_nobody(served: Daemon) -> None:
    served.client.spawn(["sh", "-c", "yes; exec sleep 1000"], name="x")
    for _ in range(5):
        entries = served.client.logs("x", follow=True)
        assert next(entries).data
        entries.close()  # type: ignore[attr-defined]
    served.client.kill("x", "KILL", tree=True)
    served.wait(lambda: not served.client.ps())
    assert served.client.stats()["children"] == 0


def test_followers_who_go_leave_nothing(served: Daemon) -> None:
    served.client.spawn(["sleep", "1000"], name="x")
    before = len(os.listdir(f"/proc/{served.process.pid}/fd"))
    for _ in range(5):
        with running(
            "logs", "-f", "x", env={"SANDHOST_CONTROL": served.client.path}
        ) as follower:
            follower.kill()
    served.wait(lambda: len(os.listdir(f"/proc/{served.process.pid}/fd")) <= before + 1)
    follower_env = {"SANDHOST_CONTROL": served.client.path, "PATH": os.defpath}
    with running("events", "--lines", "1", env=follower_env) as process:
        heard(process, b"child.spawned")


@pytest.mark.parametrize(
    "line",
    [
        b'{"v":1,"do":"spawn","args":{"command":"ls"}}\n',
        b'{"v":1,"do":"spawn","args":{"wish":1}}\n',
        b'{"v":1,"do":"kill","args":{}}\n',
        b'{"v":1,"do":"logs","args":{"name":"../../etc"}}\n',
        b'{"v":1,"do":"logs","args":{"name":3}}\n',
        b'{"v":1,"do":"reload","args":{"x":1}}\n',
        b'{"v":1,"do":"events","args":[]}\n',
        b'{"v":1,"do":"stop","args":{"grace":"now"}}\n',
        b'{"v":1,"do":"stop","args":{"grace":-100}}\n',
        b'{"v":1,"do":"stop-child","args":{"name":"x","grace":-1}}\n',
        b'{"v":1,"do":"events","args":{"follow":false,"offset":-1}}\n',
        b'{"v":1,"do":"logs","args":{"name":"x","lines":-1}}\n',
        b"\x00\xff{{{{\n",
    ],
)
def test_orders_that_make_no_sense_are_refused(served: Daemon, line: bytes) -> None:
    *_, last = ask(served.client.path, line)
    answer = json.loads(last)
    assert answer["ok"] is False
    assert answer["error"]
    assert served.client.ps() == []


def test_a_flood_of_streams_leaves_room_for_orders(served: Daemon) -> None:
    socks = []
    try:
        answers = []
        for _ in range(MAX_WAITING + 2):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(15)
            socks.append(sock)
            connect(sock, served.client.path)
            sock.sendall(b'{"v":1,"do":"events","args":{"lines":1}}\n')
            answers.append(sock.recv(4096))
        assert all(b"item" in answer for answer in answers[:MAX_WAITING])
        said = f"{MAX_WAITING} streams and waiting orders".encode()
        assert all(said in answer for answer in answers[MAX_WAITING:])
        assert served.client.ps() == []
        served.client.spawn(["true"], name="x", policy="open")
    finally:
        for sock in socks:
            sock.close()


def test_a_log_directory_that_vanishes_stops_no_child(served: Daemon) -> None:
    loop = "exec 4<>go; while read -r x <&4; do echo said $x; done"
    go = served.where / "go"
    os.mkfifo(go)
    served.client.spawn(
        ["sh", "-c", loop], name="x", policy="open", cwd=str(served.where)
    )
    go.write_text("1\n")
    served.wait(lambda: served.log("x") == b"said 1\n")
    shutil.rmtree(served.where / "state" / "logs")
    go.write_text("2\n")
    served.wait(lambda: served.log("x") == b"said 2\n")
    text = "The files of the log of x vanished: begun anew"
    served.wait(lambda: text in served.said(), "the warning")


def test_a_journal_that_vanishes_is_made_again_with_a_warning(served: Daemon) -> None:
    where = served.where / "state" / "journal"
    shutil.rmtree(where)
    served.client.spawn(["true"], name="x")
    served.wait(lambda: "child.gone" in journal_of(where), "its end")
    assert journal_of(where).startswith("{")
    text = f"The journal's files vanished: begun anew in {where}"
    assert served.said().count(text) == 1


def journal_of(where: Path) -> str:
    """Return what is written in a journal's directory; empty before it is there."""
    return "".join(path.read_text() for path in sorted(where.glob("*.log")))


def test_a_full_disk_stops_no_child_and_is_said(tmp_path: Path) -> None:
    with small_disk(tmp_path, "256k") as point:
        (tmp_path / "state").symlink_to(point)
        script = "head -c 1000000 /dev/zero; echo done > ../done; exec sleep 1000"
        with daemon(
            tmp_path, OPEN + "[child.a]\ncommand = ['sh', '-c', 'sleep 1000']\n"
        ) as it:
            command = ["sh", "-c", script]
            it.client.spawn(command, name="x", policy="open", cwd=str(point))
            it.wait((tmp_path / "done").exists, "the child's end")
            it.wait(lambda: "Cannot keep the log of x" in it.said(), "the warning")
            assert it.row("x").log_dropped_bytes > 0
            assert it.row("x").state == "running"
            assert it.end() == 0


def test_help_has_an_example_each() -> None:
    for name in ("serve", "spawn", "kill", "stop", "reload", "logs", "events", "stats"):
        outcome = sandhost(name, "--help")
        assert outcome.status == 0
        assert f"Example: {Path(SANDHOST).name} {name}".encode() in outcome.out
