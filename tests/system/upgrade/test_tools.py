"""Tools that run while the host is replaced.

They and their clients notice nothing.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from supervisor.control.client import ControlError
from tests.helpers.stage import CHILDREN
from tests.helpers.toolruns import program
from tests.helpers.toolupgrade import TELL, Tools, opened_tools, rest, until

pytestmark = pytest.mark.slow

WAITS = "echo begun; : >{0}; read -r line <{0}.going; echo $line; exit 7"


# Executions go on; a stream, a whole reply and a request that has half come are answered.
@pytest.mark.parametrize("listen", ['["unix"]', '["tcp://127.0.0.1:0"]'])
def test_tools_and_their_clients_notice_nothing(listen: str) -> None:
    with opened_tools(listen) as tools:
        for name in ("stream", "whole", "left"):
            os.mkfifo(tools.where / f"{name}.going")
        stream = tools.begin(WAITS.format("stream"), 2, "X-Aifo-Exec-Id: followed")
        whole = tools.begin(WAITS.format("whole"), 1)
        left = tools.begin(
            WAITS.format("left"), 2, "X-Aifo-Exec-Id: left", "X-Aifo-Detach: 1"
        )
        for name in ("stream", "whole", "left"):
            tools.hear(name)
        got = until(stream, b"begun\n")
        left.close()
        half = tools.connect()
        request = tools.request("echo late")
        half.sendall(request[:60])
        idle = tools.connect()
        tools.replace()
        half.sendall(request[60:])
        assert rest(half).body == b"late\n"
        idle.sendall(tools.request("echo idle"))
        assert rest(idle).body == b"idle\n"
        replayed = tools.replay("left")
        assert until(replayed, b"begun\n")
        tools.replace()
        for name in ("stream", "whole", "left"):
            (tools.where / f"{name}.going").write_text("on\n")
        for sock, before in ((stream, got), (whole, b""), (tools.replay("left"), b"")):
            reply = rest(sock, before)
            assert (reply.body, reply.code) == (b"begun\non\n", 7)
        replayed.close()
        # Finished output is kept, and new tools run as before.
        tools.replace()
        assert rest(tools.replay("followed", 6)).body == b"on\n"
        assert tools.run("echo new").body == b"new\n"


ASKS = """
until [ -p asked ]; do sleep 0.05; done
while :; do
  read -r line <asked && curl -sS -H "X-Aifo-Proto: 1" -d "$line" \\
    -H "Authorization: Bearer $AIFO_TOOLEEXEC_TOKEN" "$AIFO_TOOLEEXEC_URL"
done
"""


# ADR 22: a port in a child's net namespace changes hands as its socket does.
@pytest.mark.parametrize("listen", ['["unix"]', '["tcp://127.0.0.1:0"]'])
def test_a_child_that_listens_itself_goes_on(listen: str) -> None:
    layers = ["no_new_privs", "seccomp", "userns", "netns"]
    command = json.dumps(["/bin/sh", "-c", ASKS])
    more = (
        f"[sandbox.x]\nlayers = {layers}\nunix_sockets = false\n"
        f"[policy.x]\nsandbox = 'x'\n[child.two]\ncommand = {command}\npolicy = 'x'\n"
    )
    with opened_tools(listen, more=more) as tools:
        os.mkfifo(tools.where / "asked")
        os.mkfifo(tools.where / "first.going")

        def ask(script: str) -> None:
            coded = "".join(f"%{byte:02x}" for byte in script.encode())
            (tools.where / "asked").write_text(f"tool=sh&arg=-c&arg={coded}\n")

        ask(WAITS.format("first"))
        tools.hear("first")  # its client waits for it over the exchange
        tools.replace()
        (tools.where / "first.going").write_text("on\n")
        tools.running.wait(lambda: b"begun\non\n" in tools.running.log("two"))
        tools.replace()
        ask("echo new")
        tools.running.wait(lambda: b"begun\non\nnew\n" in tools.running.log("two"))


# spec HM5, HM8: a tool sees what its child is shown, and has its child's bounds
def test_a_tool_sees_afterwards_what_its_child_is_shown(tmp_path: Path) -> None:
    for name in ("granted", "exposed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "note").write_text(f"{name}\n")
        (tmp_path / name / "note").chmod(0o600)
    more = (
        f"[policy.x]\nread = ['{tmp_path}/granted']\nexpose = ['{tmp_path}/exposed']\n"
        "limits = { memory = '512M' }\n"
        f"[child.two]\ncommand = {json.dumps(['/bin/sh', '-c', TELL])}\npolicy = 'x'\n"
    )
    script = f"cat {tmp_path}/granted/note {tmp_path}/exposed/note; ulimit -v"
    with opened_tools(more=more) as tools:
        walled = Tools(tools.running, tools.where, "two")
        before = walled.run(script).body
        assert before.startswith(b"granted\nexposed\n")
        walled.replace()
        assert walled.run(script).body == before


# spec S7: what a tool made before is growth afterwards, whoever looks.
def test_what_a_tool_made_before_counts_afterwards() -> None:
    limits = 'root = "{where}/root"\nlimits = {{ bytes = "100K" }}'
    with opened_tools(policy=limits) as tools:
        os.mkfifo(tools.where / "some.going")
        (tools.where / "root" / "old").write_bytes(b"o" * 500_000)
        more = "head -c 60000 /dev/zero >>root/made"
        waits = f"{more}; : >some; read -r line <some.going; {more}; exec sleep 1000"
        some = tools.begin(waits)
        tools.hear("some")
        tools.replace()
        (tools.where / "some.going").write_text("on\n")
        reply = rest(some)
        assert reply.code == 128 + 9
        assert b"limit of its child is passed: bytes" in reply.body


def pattern(lines: int) -> bytes:
    """The output of ``seq``."""
    return b"".join(b"%d\n" % n for n in range(1, lines + 1))


# No byte is dropped: a pump that waits for room, a chunk of which half is sent, a ring.
def test_output_that_is_not_taken_is_handed_over() -> None:
    lines = 3_000_000
    with opened_tools(log_limit="1M") as tools:
        printing = f"seq {lines}; : >printed"
        slow = tools.begin(printing, 2, "X-Aifo-Exec-Id: slow")
        got = until(slow, b"\n1\n")
        for _ in range(2):
            tools.replace()
            got += slow.recv(500_000)
        assert not (tools.where / "printed").exists()  # the reader holds it back
        reply = rest(slow, got)
        assert (reply.body, reply.code) == (pattern(lines), 0)
        tools.hear("printed")
        gone = tools.replay("slow", 5)
        assert until(gone, b"\r\n\r\n").startswith(b"HTTP/1.1 416")
        gone.close()


def test_a_whole_output_is_sent_on() -> None:
    with opened_tools() as tools:
        whole = tools.begin("seq 200000; : >printed", 1)
        tools.hear("printed")
        first = until(whole, b"\r\n\r\n")
        quick = tools.begin("echo quick", 1)
        tools.replace()
        assert rest(whole, first).body == pattern(200_000)
        assert rest(quick).body == b"quick\n"
        other = tools.begin("seq 200000; : >printed", 2)  # as a stream, to its end
        tools.hear("printed")
        tools.replace()
        assert rest(other).body == pattern(200_000)


# A time limit and a ladder go on; a signal reaches a tool of the program before.
def test_what_ends_a_tool_goes_on() -> None:
    trapped = "trap '' TERM; trap 'echo int{1}' INT; : >{0}; "
    loops = "while :; do sleep 0.05; done"
    with opened_tools(sidecar='timeout = "4s"') as tools:
        limited = tools.begin(trapped.format("limited", "; exit 3") + loops, 2)
        script = f"trap 'echo told; exit 5' USR1; : >told; {loops}"
        told = tools.begin(script, 1, "X-Aifo-Exec-Id: told")
        gone = tools.begin(trapped.format("gone", "") + f"echo $$ >pid; {loops}", 2)
        for name in ("limited", "told", "gone"):
            tools.hear(name)
        gone.close()  # its ladder has begun, and ends under the next program
        tools.replace()
        with tools.connect() as sock:
            body = b"exec_id=told&signal=USR1"
            sock.sendall(tools.head("POST /signal HTTP/1.1", len(body), 2) + body)
            assert b" 204 " in sock.recv(65_536)
        reply = rest(told)
        assert (reply.body[-5:], reply.code) == (b"told\n", 5)
        pid = int((tools.where / "pid").read_text())
        tools.running.wait(lambda: not os.path.exists(f"/proc/{pid}"), "its end")
        reply = rest(limited)
        assert b"int\n" in reply.body
        assert reply.body.endswith(b"\naifo-coder proxy timeout\n")
        assert reply.code == 124


# A tool in a container is told of signals by a line, which the next program has.
def test_a_tool_in_a_container_is_still_told_of_signals(tmp_path: Path) -> None:
    script = f"export HOME={tmp_path}; exec {sys.executable} -I -S {CHILDREN}/engine.py"
    cli = program(tmp_path, "docker", f'{script} "$@"') + "/docker"
    sidecar = f'backend = "docker"\nimage = "toolchain:1"\ncli = "{cli}"'
    told = "trap 'echo told; exit 5' USR1; : >told; while :; do sleep 0.05; done"
    with opened_tools(sidecar=sidecar) as tools:
        reply = tools.begin(told, 2, "X-Aifo-Exec-Id: told")
        ended = tools.begin("trap 'exit 6' INT; : >ended; sleep 1000 & wait", 1)
        for name in ("told", "ended"):
            tools.hear(name)
        tools.replace()
        ended.close()
        with tools.connect() as sock:
            body = b"exec_id=told&signal=USR1"
            sock.sendall(tools.head("POST /signal HTTP/1.1", len(body), 2) + body)
            assert b" 204 " in sock.recv(65_536)
        found = rest(reply)
        assert (found.body[-5:], found.code) == (b"told\n", 5)
        assert tools.run("exit 3").code == 3


def test_a_tool_that_ends_between_two_programs_is_answered() -> None:
    with opened_tools(more="max_executions = 2") as tools:
        for _ in range(3):
            socks = [
                tools.begin(f": >up{n}; sleep 0.{n}3; echo {n}; exit {n}", 2)
                for n in (1, 4)
            ]
            for n in (1, 4):
                tools.hear(f"up{n}")
            tools.replace()
            for n, sock in zip((1, 4), socks, strict=True):
                reply = rest(sock)
                assert (reply.body, reply.code) == (b"%d\n" % n, n)
        # Their slots are free again.
        assert [tools.run("exit 3").code for _ in range(3)] == [3, 3, 3]


# A refused client may send on for a while: that gets no answer, and holds up nothing.
# spec E8
def test_whoever_is_refused_holds_up_no_exchange() -> None:
    with opened_tools() as tools:
        refused = [tools.connect()]
        stop = threading.Event()

        def ask() -> None:  # one is always there
            while not stop.wait(0.2):
                refused.append(tools.connect())
                refused[-1].sendall(b"no request\r\n\r\n")

        refused[0].sendall(b"no request\r\n\r\n")
        assert b" 400 " in until(refused[0], b"\r\n\r\n")
        thread = threading.Thread(target=ask)
        thread.start()
        try:
            tools.replace()
        finally:
            stop.set()
            thread.join()
        late = refused[-1]
        with contextlib.suppress(BrokenPipeError):  # its while is over
            late.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert rest(late).status == 400
        for sock in refused:
            sock.close()


def _words(file: Path) -> list[str]:
    """Return what a file has by now."""
    return file.read_text().split() if file.exists() else []


# A sidecar's process stays; what is configured otherwise by then is started anew.
def test_a_sidecar_goes_on() -> None:
    # Without walls: in a pid namespace it has another number.
    start = 'start = ["/bin/sh", "-c", "echo $$ >>started; exec sleep 2000"]'
    with opened_tools(sidecar=f'sandbox = "none"\n{start}') as tools:
        started = tools.where / "started"
        (pid,) = tools.running.wait(lambda: _words(started))
        tools.replace()
        tools.replace()
        assert started.read_text().split() == [pid]
        os.kill(int(pid), signal.SIGKILL)
        second = tools.running.wait(lambda: started.read_text().split()[1:])[0]
        tools.running.wait(lambda: tools.run("exit 4").status == 200)
        file = tools.where / "c.toml"
        file.write_text(file.read_text().replace("sleep 2000", "sleep 2001"))
        tools.replace()
        tools.running.wait(lambda: len(started.read_text().split()) == 3)
        tools.running.wait(lambda: not os.path.exists(f"/proc/{second}"))
        assert tools.run("exit 4").code == 4


# spec N4: a tool that speaks on FD 3 is a client, and stays the one that it is.
def test_a_tool_keeps_its_door() -> None:
    with opened_tools(sidecar="fd3 = true") as tools:
        script = (
            "exec 2>&1; ask() { echo PING >&3; read -r answer <&3; echo $answer; }\n"
            "ask; : >asked; read -r line <going; ask"
        )
        os.mkfifo(tools.where / "going")
        sock = tools.begin(script)
        tools.hear("asked")
        rows = tools.running.client.clients()
        tools.replace()
        assert len(rows) == len(tools.running.client.clients()) == 2
        (tools.where / "going").write_text("on\n")
        reply = rest(sock)
        assert (reply.body, reply.code) == (b"OK\nOK\n", 0)
        tools.running.wait(lambda: len(tools.running.client.clients()) == 1)


# A service that is no longer configured is gone: its tools are ended, nothing is held.
def test_tools_that_are_not_configured_any_more_are_ended() -> None:
    with opened_tools() as tools:
        sock = tools.begin("echo $$ >pid; : >up; exec sleep 1000")
        tools.hear("up")
        pid = int((tools.where / "pid").read_text())
        child = tools.running.row("one").pid
        file = tools.where / "c.toml"
        text = file.read_text()
        begin, end = text.index("[toolexec]"), text.index("[policy.p]")
        file.write_text(text[:begin] + text[end:])
        tools.replace()
        tools.running.wait(lambda: not os.path.exists(f"/proc/{pid}"), "its end")
        until(sock, b"Trailer")  # sent before
        assert not sock.recv(65_536).endswith(b"\r\n\r\n0\r\n")
        sock.close()
        assert tools.running.row("one").pid == child
        assert "No section for toolexec any more" in tools.running.said()


# A handle in place of a large output: asked for before, answered by the next program.
def test_a_handle_is_made_by_the_next_program() -> None:
    fds = "[tools]\nenabled = ['read_fd']\n[file_descriptor]\nenabled = true"
    with opened_tools(more=fds) as tools:
        os.mkfifo(tools.where / "going")
        script = "seq 20000; : >printed; read -r line <going; exit 2"
        for version in (1, 2):
            sock = tools.begin(script, version, "X-Sandhost-Fd: 1")
            tools.hear("printed")
            tools.replace()
            (tools.where / "going").write_text("on\n")
            reply = rest(sock)
            assert reply.body.startswith(b'<fd_result fd="fd:%d"' % version), reply
            assert reply.code == 2


# A fault that would end the next program is found before it begins.
def test_a_workspace_that_is_gone_is_found_before_the_exchange() -> None:
    with opened_tools(errors=2) as tools:  # one for each refusal
        file = tools.where / "c.toml"
        text = file.read_text()
        file.write_text(text.replace("workspace =", 'workspace = "/no/such" #'))
        with pytest.raises(ControlError, match="there is no '/no/such'; make it first"):
            tools.running.client.replace()
        key = tools.where / "key"
        file.write_text(f'{text}\n[llm]\napi_key_file = "{key}"\n')
        with pytest.raises(ControlError, match=r"cannot use key file .*No such file"):
            tools.running.client.replace()
        assert tools.running.client.stats()["generation"] == 0
        assert tools.run("echo still").body == b"still\n"
        file.write_text(text)
