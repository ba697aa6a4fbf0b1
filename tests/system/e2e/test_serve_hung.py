"""A daemon that hangs: its clients say so and end; their orders are not done."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.helpers.command import (
    ENVIRONMENT,
    SANDHOST,
    TIMEOUT_S,
    finished,
    heard,
    read_until,
    running,
)
from tests.helpers.daemon import Daemon, daemon

pytestmark = pytest.mark.slow

CONFIG = """
[child.x]
command = ["sh", "-c", "echo ready; exec sleep 1000"]
"""

STREAMS = (("logs", "x"), ("logs", "-f", "x"), ("events",), ("trace", "-f", "child-1"))
QUESTIONS = (
    ("ps",),
    ("clients",),
    ("files",),
    ("quota",),
    ("stats",),
    ("top", "--once"),
)
ORDERS = (
    ("stop",),
    ("stop", "x"),
    ("kill", "x"),
    ("reload",),
    ("reload", "--exec"),
    ("spawn", "--name", "late", "--", "sleep", "1000"),
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with one child that has said its word."""
    with daemon(tmp_path, CONFIG) as it:
        it.wait(lambda: b"ready" in it.log("x"), "its word")
        yield it
        it.send(signal.SIGCONT)
        assert it.end() == 0, it.said()


def hang(served: Daemon) -> None:
    """Stop the daemon, as whoever debugs it does."""
    served.send(signal.SIGSTOP)
    status = Path(f"/proc/{served.process.pid}/stat")
    served.wait(lambda: ") T " in status.read_text(), "the stop")


def environment(served: Daemon) -> dict[str, str]:
    return {**ENVIRONMENT, "SANDHOST_CONTROL": served.client.path}


def journal(served: Daemon) -> list[dict[str, object]]:
    """Return all events that are written down."""
    files = sorted((served.where / "state" / "journal").glob("*.log"))
    lines = (line for file in files for line in file.read_text().splitlines())
    return [json.loads(line) for line in lines]


def dropped(served: Daemon) -> list[dict[str, object]]:
    """Return the orders that were not done."""
    return [row for row in journal(served) if row["event"] == "host.order_dropped"]


# spec S5: who asks a host that hangs is not held up by it for ever; nor is who was
# answered before it hung. All wait for the same patience.
def test_every_command_ends_while_the_daemon_hangs(served: Daemon) -> None:
    before = served.row("x").pid
    env = environment(served)
    with ExitStack() as stack:
        logs = stack.enter_context(running("logs", "-f", "x", env=env))
        events = stack.enter_context(running("events", "--lines", "1", env=env))
        heard(logs, b"ready")
        heard(events, b"\n")
        hang(served)
        commands = {
            words: stack.enter_context(running(*words, env=env))
            for words in (*STREAMS, *QUESTIONS, *ORDERS)
        }
        for process in (logs, events):
            assert finished(process).said("the host is stopped or very busy")
        for words, process in commands.items():
            outcome = finished(process)
            assert outcome.status == 2, words
            assert outcome.said("within 10 s: the host is stopped or very busy"), words
    served.send(signal.SIGCONT)
    # An order that was given up is not done, and that is logged; `reload --exec` asks first.
    wanted = ["kill", "reload", "spawn", "stop", "stop-child"]
    served.wait(lambda: len(dropped(served)) == len(wanted), "the orders")
    assert sorted(str(row["order"]) for row in dropped(served)) == wanted
    (row,) = served.client.ps()
    assert (row.name, row.pid, row.restarts) == ("x", before, 0)
    assert served.client.stats()["generation"] == 0


# The one that was interrupted is as gone as the one that gave up.
def test_an_order_whose_client_was_interrupted_is_not_done(served: Daemon) -> None:
    hang(served)
    with running("stop", env=environment(served)) as process:
        waits_in = Path(f"/proc/{process.pid}/syscall")
        numbers = ("45 ", "207 ", "7 ", "73 ")  # recvfrom, poll, ppoll
        served.wait(lambda: waits_in.read_text().startswith(numbers), "its question")
        process.send_signal(signal.SIGINT)
        process.wait(TIMEOUT_S)
    served.send(signal.SIGCONT)
    served.wait(lambda: dropped(served), "the order")
    (row,) = dropped(served)
    assert (row["order"], row["uid"], row["pid"]) == ("stop", os.geteuid(), process.pid)
    served.wait(lambda: "its client is gone: order stop" in served.said(), "its line")
    assert served.row("x").state == "running"


# An order that takes longer than the patience with a host is waited for: it and a stream
# that is quiet show signs of life meanwhile.
def test_a_quiet_stream_and_a_long_order_show_signs_of_life(served: Daemon) -> None:
    stubborn = ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"]
    names = ("one", "other")
    for name in names:
        served.client.spawn(stubborn, name=name)
    served.wait(lambda: all(map(served.log, names)), "their word")
    with ExitStack() as stack:
        lines = []
        for line in (
            b'{"v":1,"do":"logs","args":{"name":"x","follow":true,"lines":0}}\n',
            b'{"v":1,"do":"stop-child","args":{"name":"one","grace":12}}\n',
        ):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(TIMEOUT_S)
            sock.connect(served.client.path)
            sock.sendall(line)
            lines.append(sock)
        assert served.client.stop_child("other", 12.0) == 137
        # White space of JSON: who reads lines and knows nothing of it is not disturbed.
        assert [sock.recv(1) for sock in lines] == [b" ", b" "]


# An order that has begun is completed: a child that was to be replaced is.
def test_a_reload_whose_client_goes_is_done_to_its_end(served: Daemon) -> None:
    file = served.where / "c.toml"
    stubborn = "trap '' TERM; echo {}; while :; do sleep 1; done"
    section = "[child.y]\ncommand = ['sh', '-c', \"{}\"]\n"
    before = file.read_text()
    file.write_text(before + section.format(stubborn.format("first")))
    served.client.reload()
    served.wait(lambda: b"first" in served.log("y"), "its word")
    file.write_text(before + section.format(stubborn.format("second")))
    with running("reload", env=environment(served)) as process:
        served.wait(lambda: served.row("y").state == "stopping", "its end")
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT_S)
    served.wait(lambda: b"second" in served.log("y"), "the next one")
    served.client.stop_child("y", 0.0)


def test_the_journal_and_the_log_say_who_ordered(served: Daemon) -> None:
    with running("kill", "-s", "USR1", "x", env=environment(served)) as process:
        assert finished(process).status == 0
    (row,) = (row for row in journal(served) if row["event"] == "host.ordered")
    told = {key: row[key] for key in ("order", "name", "uid", "pid")}
    assert told == {
        "order": "kill",
        "name": "x",
        "uid": os.geteuid(),
        "pid": process.pid,
    }
    text = f"Order kill x of uid {os.geteuid()}, pid {process.pid}"
    lines = map(json.loads, served.said().splitlines())
    (line,) = (line for line in lines if line["message"] == text)
    by = [line[key] for key in ("order", "child", "by_uid", "by_pid")]
    assert by == ["kill", "x", os.geteuid(), process.pid]


# Between a key and what it does stands no answer of a host.
def test_top_hears_q_while_the_daemon_hangs(served: Daemon) -> None:
    screen, terminal = pty.openpty()
    env = {**environment(served), "TERM": "xterm"}
    with subprocess.Popen(
        [SANDHOST, "top", "--interval", "0.1s"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=env,
    ) as process:
        try:
            os.close(terminal)
            read_until(screen, b"running")
            hang(served)
            while select.select([screen], [], [], 0.5)[0]:
                os.read(screen, 65_536)  # it asks, and draws nothing
            os.write(screen, b"q")
            # Less than the patience with a host, and what a busy machine takes of it.
            assert process.wait(9) == 0
        finally:
            process.kill()
            os.close(screen)
