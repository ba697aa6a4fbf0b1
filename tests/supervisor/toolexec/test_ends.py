"""How executions end: exit, signal, time limit, client gone, child gone, daemons."""

import errno
import os
import signal
import socket
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from protocol.toolexec.token import narrow_token
from supervisor.spawn.launcher import Launcher
from supervisor.toolexec import ending
from tests.helpers.stage import eventually
from tests.helpers.toolscene import (
    Scene,
    opened_scene,
    parse,
    receive_all,
    receive_until,
    send,
)

pytestmark = pytest.mark.slow

STUBBORN = "trap '' INT TERM HUP; echo pid $$ on; while :; do sleep 0.05; done"
FAMILY = (
    "import os, signal, sys, time\n"
    "for n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\n"
    "def say(): os.write(1, b'%d\\n' % os.getpid())\n"
    "say()\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork(): os._exit(0)\n"
    "    say(); time.sleep(1000)\n"
    "time.sleep(0.1); os.write(1, b'ready\\n')\n"
)


def quoted(text: str) -> str:
    """Return a text as a value of a form."""
    return "".join(c if c.isalnum() else f"%{ord(c):02x}" for c in text)


def shell(script: str) -> bytes:
    """Return the form that runs a script."""
    return f"tool=sh&arg=-c&arg={quoted(script)}".encode()


def python(script: str) -> bytes:
    """Return the form that runs a program."""
    return f"tool=python3&arg=-IS&arg=-c&arg={quoted(script)}".encode()


def is_dead(pid: int) -> bool:
    """Whether no such process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


# attack 37: the client goes while the tool is silent. spec toolexec 5: INT, TERM, KILL
# to the whole tree, within 3 s nothing of it lives.
@pytest.mark.parametrize("proto", ["1", "2"])
@pytest.mark.parametrize("half_close", [True, False])
# spec E10, E25
async def test_a_tool_whose_client_is_gone_is_ended(
    scene: Scene, proto: str, half_close: bool
) -> None:
    pids = scene.workspace / "pids"
    script = f"trap '' INT TERM; sleep 1000 & echo $$ $! >{pids}; wait; sleep 1000"
    with await scene.connect() as sock:
        await send(sock, scene.request(shell(script), proto=proto))
        await eventually(lambda: pids.exists() and pids.read_text().endswith("\n"))
        await eventually(lambda: scene.stage.events("exec.started"))
        if half_close:
            sock.shutdown(1)
            await eventually(lambda: not scene.tool.slots.used)
    for pid in map(int, pids.read_text().split()):
        await eventually(partial(is_dead, pid))
    await eventually(lambda: not scene.tool.slots.used)
    (ended,) = scene.stage.events("exec.ended")
    assert ended["code"] == 137


async def test_the_first_step_is_int(scene: Scene) -> None:
    told = scene.workspace / "told"
    script = f"trap 'echo int >{told}; exit' INT; echo on; while :; do sleep 0.01; done"
    with await scene.connect() as sock:
        await send(sock, scene.request(shell(script)))
        await receive_until(sock, b"on\n")
    await eventually(lambda: told.exists() and told.read_text() == "int\n")
    await eventually(lambda: not scene.tool.slots.used)


class SlowBirth:
    """Holds each start back when the program runs already."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.release = trio.Event()
        real = Launcher.await_start

        async def birth(launcher: Launcher, request: Any, record: Any) -> Any:
            born = await real(launcher, request, record)
            await self.release.wait()
            return born

        monkeypatch.setattr(Launcher, "await_start", birth)


# A client that goes during the start is found gone when it has been: the tool gets
# INT first, like any other.
# spec E25
@pytest.mark.parametrize("proto", ["1", "2"])
async def test_who_goes_during_the_start_ends_the_tool_gently(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, proto: str
) -> None:
    up, told = scene.workspace / "up", scene.workspace / "told"
    script = f"trap 'echo int >{told}; exit' INT; echo >{up}; "
    script += "while :; do sleep 0.01; done"
    slow = SlowBirth(monkeypatch)
    with await scene.connect() as sock:
        await send(sock, scene.request(shell(script), proto=proto))
        await eventually(up.exists)
    slow.release.set()
    await eventually(lambda: told.exists() and told.read_text() == "int\n")
    await eventually(lambda: not scene.tool.slots.used)


# spec E5
async def test_a_child_that_ends_during_a_start_leaves_no_tool(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await scene.tenant()
    assert scene.tool.shared_url is not None
    other.url = scene.tool.shared_url  # its connection is not the child's
    up = scene.workspace / "up"
    SlowBirth(monkeypatch)
    with await scene.connect(other) as sock:
        script = f"trap '' INT TERM; echo $$ >{up}; sleep 1000 & wait; sleep 1000"
        await send(sock, scene.request(shell(script), token=other.token))
        await eventually(lambda: up.exists() and up.read_text().endswith("\n"))
        await other.puppet.kill()
        assert parse(await receive_all(sock)).status == 503
    await eventually(partial(is_dead, int(up.read_text())))
    assert not scene.tool.slots.used
    assert not scene.stage.events("exec.ended")  # its start was not reported


async def test_a_client_that_is_gone_already_has_nothing_started(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = trio.Event()
    gone = trio.Event()
    real = scene.routes.route

    async def route(*args: Any) -> Any:
        asked.set()
        await gone.wait()
        return await real(*args)

    monkeypatch.setattr(scene.routes, "route", route)
    with await scene.connect() as sock:
        await send(sock, scene.request(shell("touch ran")))
        await asked.wait()
    gone.set()
    monkeypatch.undo()
    assert (await scene.run("tool=true")).code == 0
    assert len(scene.stage.events("exec.started")) == 1


# spec E25
def test_the_ladders_are_those_of_the_protocol() -> None:
    assert ending.CLIENT_GONE == ((0.0, 2), (0.25, 15), (1.0, 9))
    assert ending.TIME_IS_UP == ((0.0, 2), (5.0, 15), (10.0, 9))


# spec E18
async def test_a_detached_tool_outlives_its_client(scene: Scene) -> None:
    with await scene.connect() as sock:
        extra = ("X-Aifo-Detach: 1", "X-Aifo-Exec-Id: d")
        data = shell("echo on; read x <go; echo off; exit 4")
        os.mkfifo(scene.workspace / "go")
        await send(sock, scene.request(data, *extra))
        await receive_until(sock, b"on\n")
        (server,) = (one for one in scene.tool.servers if one.connections)
    # Not before the host knows that nobody is there: else it could not end the tool yet.
    await eventually(lambda: not server.connections)
    (execution,) = await _live(scene)
    assert not execution.climbs
    (scene.workspace / "go").write_bytes(b"\n")
    reply = await scene.say(scene.head(0, line="GET /exec/d?from=1 HTTP/1.1"))
    assert (reply.body, reply.code) == (b"n\noff\n", 4)


# spec E18: whoever asked may be gone before the host has read that.
@pytest.mark.parametrize("way", ["half-closed", "closed", "reset"])
async def test_a_detached_tool_is_run_for_who_does_not_wait(
    scene: Scene, way: str
) -> None:
    tenant = await scene.tenant()
    assert scene.tool.shared_url is not None
    tenant.url = scene.tool.shared_url
    with await scene.connect(tenant) as sock:
        extra = ("X-Aifo-Detach: 1", "X-Aifo-Exec-Id: gone")
        form = shell("echo on; exit 4")
        await send(sock, scene.request(form, *extra, token=tenant.token))
        if way == "half-closed":
            sock.shutdown(socket.SHUT_WR)
        else:
            linger = struct.pack("ii", way == "reset", 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            sock.close()
        executions = scene.tool.children[tenant.puppet.child.id]
        await eventually(lambda: "gone" in executions.kept)
    head = scene.head(0, line="GET /exec/gone HTTP/1.1", token=tenant.token)
    reply = await scene.say(head, tenant=tenant)
    assert (reply.body, reply.code) == (b"on\n", 4)


# attack 28: what a tool leaves behind is ended with it; its output is not waited for.
# spec E24
async def test_daemons_of_a_tool_are_ended(scene: Scene) -> None:
    reply = await scene.say(scene.request(python(FAMILY)))
    *pids, ready = reply.body.split()
    assert (ready, reply.code, len(pids)) == (b"ready", 0, 2)
    for pid in map(int, pids):
        await eventually(partial(is_dead, pid))


# spec toolexec 5: v1 504 and 124, the output discarded; v2 the note last, trailer 124.
# spec E25
async def test_a_time_limit_ends_a_tool(tmp_path: Path) -> None:
    async with opened_scene(tmp_path, timeout_s=0.2) as scene:
        form = shell("printf out; exec sleep 1000")
        reply = await scene.say(scene.request(form, proto="1"))
        assert (reply.status, reply.body, reply.code) == (504, b"timeout\n", 124)
        scene.routes.timeout_s = 2.0  # it has to have begun
        reply = await scene.say(scene.request(form, "X-Aifo-Exec-Id: late"))
        assert (reply.status, reply.code) == (200, 124)
        assert reply.body == b"outaifo-coder proxy timeout\n"
        assert reply.chunks[-1] == b"aifo-coder proxy timeout\n"
        # Also to whoever is sent it with what the tool printed.
        again = await scene.say(scene.head(0, line="GET /exec/late HTTP/1.1"))
        assert (again.chunks, again.code) == (reply.chunks, 124)
        scene.routes.timeout_s = 100.0  # the sidecar's own wins
        reply = await scene.say(scene.request(shell("sleep 0.4")))
        assert reply.code == 0


# spec toolexec 1: environment variables win over the configuration file, sidecars included.
# spec E2, E25
async def test_the_time_limit_of_the_environment_wins_over_a_sidecars(
    tmp_path: Path,
) -> None:
    async with opened_scene(tmp_path, timeout_s=0.2, is_timeout_forced=True) as scene:
        scene.routes.timeout_s = 100.0
        reply = await scene.run("tool=sleep&arg=1000", proto="1")
        assert (reply.status, reply.body, reply.code) == (504, b"timeout\n", 124)
        reply = await scene.run("tool=sleep&arg=1000")
        assert (reply.body, reply.code) == (b"aifo-coder proxy timeout\n", 124)


# spec E25: a client that vanished with its machine says nothing; TCP asks whether it is there.
async def test_a_machine_that_vanishes_is_noticed(tmp_path: Path) -> None:
    async with opened_scene(tmp_path, unix=False) as scene:
        (common,) = scene.tool.shared
        with await scene.connect() as sock:
            await send(sock, scene.request(b"tool=sleep&arg=1000"))
            await eventually(lambda: scene.tool.slots.used == 1)
            (connection,) = common.connections.values()
            ours = connection.wire.sock
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle_s, between_s, tries = (
                ours.getsockopt(socket.IPPROTO_TCP, option)
                for option in (
                    socket.TCP_KEEPIDLE,
                    socket.TCP_KEEPINTVL,
                    socket.TCP_KEEPCNT,
                )
            )
            assert idle_s + between_s * tries <= 30
            # spec E22: no piece waits until the one before is acknowledged.
            assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# A tool that has become another user, where the host is no root and the child has no walls.
async def test_a_signal_that_is_not_permitted_is_said_to_be(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with await scene.connect() as sock:
        form = b"tool=sh&arg=-c&arg=echo on;exec sleep 1000"
        await send(sock, scene.request(form, "X-Aifo-Exec-Id: s"))
        await receive_until(sock, b"on\n")
        with monkeypatch.context() as patch:
            patch.setattr(signal, "pidfd_send_signal", not_permitted)
            line = "POST /signal HTTP/1.1"
            told = await scene.say(scene.request(b"exec_id=s", line=line))
        text = b"aifo-coder proxy error: Operation not permitted\n"
        assert (told.status, told.body, told.code) == (500, text, 86)


def not_permitted(*_args: object) -> None:
    """Answer as pidfd_send_signal(2) does where the target is another user's."""
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("name", ["INT", "term", "SIGHUP", "QUIT", "USR1", "sigusr2"])
# spec E36
async def test_a_signal_reaches_the_group(scene: Scene, name: str) -> None:
    word = name.upper().removeprefix("SIG")
    inner = f"import os, signal; signal.signal(signal.SIG{word}, lambda *_: os._exit(9)); print('on', flush=True); signal.pause()"
    script = f"trap 'wait; echo sh; exit 7' {word}; python3 -ISc \"{inner}\" & wait"
    with await scene.connect() as sock:
        await send(sock, scene.request(shell(script), "X-Aifo-Exec-Id: s"))
        data = await receive_until(sock, b"on\n")
        form = f"exec_id=s&signal={name}".encode()
        told = await scene.say(scene.request(form, line="POST /signal HTTP/1.1"))
        assert (told.status, told.body, b"content-type" in told.headers) == (
            204,
            b"",
            False,
        )
        assert b"x-exit-code" not in told.headers
        reply = parse(data + await receive_all(sock))
    assert (reply.body, reply.code) == (b"on\nsh\n", 7)


async def test_kill_and_the_default_end_a_tool(scene: Scene) -> None:
    for form, code in ((b"exec_id=k&signal=KILL", 137), (b"exec_id=k", 143)):
        with await scene.connect() as sock:
            data = scene.request(shell("echo on; exec sleep 1000"), "X-Aifo-Exec-Id: k")
            await send(sock, data)
            seen = await receive_until(sock, b"on\n")
            line = "POST /signal HTTP/1.1"
            assert (await scene.say(scene.request(form, line=line))).status == 204
            assert parse(seen + await receive_all(sock)).code == code
        assert (await scene.say(scene.request(form, line=line))).status == 404


# spec toolexec 5: ids are per token; another child's is unknown. attack 19 likewise.
async def test_another_childs_execution_is_unknown(scene: Scene) -> None:
    other = await scene.tenant()
    with await scene.connect() as sock:
        data = scene.request(shell("echo on; exec sleep 1000"), "X-Aifo-Exec-Id: mine")
        await send(sock, data)
        await receive_until(sock, b"on\n")
        for line, body in (
            ("POST /signal HTTP/1.1", b"exec_id=mine&signal=KILL"),
            ("GET /exec/mine HTTP/1.1", b""),
        ):
            request = scene.request(body, line=line, token=other.token)
            assert (await scene.say(request, tenant=other)).status == 404
        same = scene.request(b"tool=true", "X-Aifo-Exec-Id: mine", token=other.token)
        assert (await scene.say(same, tenant=other)).code == 0
        duplicate = await scene.say(scene.request(b"tool=true", "X-Aifo-Exec-Id: mine"))
        assert (duplicate.status, duplicate.body) == (
            409,
            b"exec id 'mine' is in use\n",
        )


# spec A5: a narrowed token of the same child sees its own executions only.
# spec E37
async def test_a_narrowed_token_sees_its_own_executions_only(scene: Scene) -> None:
    less = narrow_token(scene.child.token, "less")
    with await scene.connect() as sock:
        data = scene.request(shell("echo on; exec sleep 1000"), "X-Aifo-Exec-Id: mine")
        await send(sock, data)
        await receive_until(sock, b"on\n")
        for line, body in (
            ("POST /signal HTTP/1.1", b"exec_id=mine&signal=KILL"),
            ("GET /exec/mine HTTP/1.1", b""),
        ):
            reply = await scene.say(scene.request(body, line=line, token=less))
            assert reply.status == 404
        same = scene.request(b"tool=true", "X-Aifo-Exec-Id: mine", token=less)
        assert (await scene.say(same)).code == 0
        head = scene.head(0, line="GET /exec/mine HTTP/1.1", token=less)
        again = await scene.say(head)
        assert (again.status, again.body, again.code) == (200, b"", 0)
    bad = scene.request(b"tool=true", token=less[:-1] + "x")
    assert (await scene.say(bad)).status == 401


# spec E26
async def test_an_id_is_free_when_the_exit_code_is_told(scene: Scene) -> None:
    for number in range(20):
        proto = "12"[number % 2]
        data = scene.request(b"tool=true", "X-Aifo-Exec-Id: again", proto=proto)
        assert (await scene.say(data)).status == 200


# spec toolexec 1: the token is revoked at the child's end, and its executions ended.
# spec E5
async def test_executions_end_with_their_child(scene: Scene) -> None:
    other = await scene.tenant()
    assert scene.tool.shared_url is not None
    path = other.path
    other.url = scene.tool.shared_url
    with await scene.connect(other) as sock:
        form = shell(STUBBORN)
        await send(sock, scene.request(form, "X-Aifo-Detach: 1", token=other.token))
        data = await receive_until(sock, b" on\n")
        pid = int(data.split()[-2])
        await other.puppet.kill()
        assert is_dead(pid)
        assert b"X-Exit-Code: 137" in await receive_all(sock)
    assert os.path.basename(path) not in os.listdir(os.path.dirname(path))
    request = scene.request(b"tool=true", token=other.token)
    assert (await scene.say(request, tenant=other)).status == 401
    assert (await scene.run("tool=true")).code == 0


# spec E24
async def test_a_pipe_that_somebody_holds_is_not_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launchpad ends what a tool leaves; here somebody else has the pipe."""
    monkeypatch.setattr("supervisor.toolexec.execution.HOLDERS_S", 0.1)
    os.mkfifo(scene.workspace / "go")
    with await scene.connect() as sock:
        await send(sock, scene.request(shell("echo on; read x <go; printf %s off")))
        (execution,) = await _live(scene)
        assert execution.process is not None
        holder = _open_stdout_of(execution.process.pid)
        (scene.workspace / "go").write_bytes(b"\n")
        reply = parse(await receive_all(sock))
        holder.close()
    assert (reply.body, reply.code) == (b"on\noff", 0)


# spec E25: of what ended by itself nobody says that its time was up.
async def test_time_that_is_up_after_the_end_ends_nothing(scene: Scene) -> None:
    os.mkfifo(scene.workspace / "go")
    with await scene.connect() as sock:
        await send(sock, scene.request(shell("echo on; read x <go; exit 3")))
        (execution,) = await _live(scene)
        holder = _open_stdout_of(execution.process.pid)
        (scene.workspace / "go").write_bytes(b"\n")
        await eventually(lambda: execution.process.has_exited)
        await execution.enforce_timeout(0.0)
        reply = parse(await receive_all(sock))
        holder.close()
    assert (reply.body, reply.code, execution.timed_out) == (b"on\n", 3, False)


async def _live(scene: Scene) -> Any:
    (owner, *_) = scene.tool.children.values()
    await eventually(lambda: [e for e in owner.live.values() if e.log.end])
    return owner.live.values()


def _open_stdout_of(pid: int) -> Any:
    return Path(f"/proc/{pid}/fd/1").open("wb", buffering=0)


# spec E20
async def test_signals_have_their_default_dispositions(scene: Scene) -> None:
    status = await scene.run("tool=cat", "arg=/proc/self/status")
    found = {
        line.split(b":")[0]: int(line.split()[1], 16)
        for line in status.body.splitlines()
        if line.startswith((b"SigBlk", b"SigIgn", b"SigCgt"))
    }
    assert found == {b"SigBlk": 0, b"SigIgn": 0, b"SigCgt": 0}
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN  # the host's differ
