"""POST /exec as clients see it.

V1, v2, statuses in their order, curl as a stranger.
"""

import os
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from supervisor.toolexec import slots
from supervisor.toolexec.routes import SpawnPlan
from supervisor.toolexec.wire import Wire
from tests.helpers.toolscene import (
    Reply,
    Scene,
    opened_scene,
    parse,
    receive_all,
    receive_until,
    send,
)

pytestmark = pytest.mark.slow

TYPE = b"text/plain; charset=utf-8"


# spec toolexec 5: v2 is chunked, the exit code a trailer; with curl, both ways.
@pytest.mark.parametrize("proto", [1, 2])
async def test_curl_runs_a_tool(scene: Scene, proto: int) -> None:
    script = "echo out; echo err >&2; printf done; exit 7"
    reply = await scene.curl("tool=sh", "arg=-c", f"arg={script}", proto=proto)
    assert (reply.status, reply.body, reply.code) == (200, b"out\nerr\ndone", 7)
    assert reply.headers[b"content-type"] == TYPE
    assert reply.headers[b"connection"] == b"close"
    assert re.fullmatch(rb"[0-9a-f]{32}", reply.headers[b"x-exec-id"])
    if proto == 1:
        assert reply.headers[b"content-length"] == b"12"
        assert reply.headers[b"x-exit-code"] == b"7"
    else:
        assert reply.headers[b"transfer-encoding"] == b"chunked"
        assert reply.headers[b"trailer"] == b"X-Exit-Code"
        assert b"x-exit-code" not in reply.headers


async def replies(scene: Scene, target: str, **more: Any) -> tuple[bytes, bytes]:
    """Return all that is answered to GET and to HEAD of a target."""
    found = []
    for method in ("GET", "HEAD"):
        with await scene.connect() as sock:
            await send(sock, scene.head(line=f"{method} {target} HTTP/1.1", **more))
            found.append(await receive_all(sock))
    return found[0], found[1]


# RFC 9110, 9.3.2: HEAD is GET without a body, through all checks (spec toolexec 2).
async def test_head_is_answered_as_get_without_a_body(scene: Scene) -> None:
    ran = await scene.curl(
        "tool=printf", "arg=abc", options=["-H", "X-Aifo-Exec-Id: one"]
    )
    assert ran.status == 200
    for target, more, status in (
        ("/healthz", {}, 200),
        ("/healthz", {"token": None}, 200),
        ("/exec/one?from=1", {}, 200),
        ("/exec/one?from=1", {"token": None}, 401),
        ("/exec/one?from=x", {}, 400),
        ("/exec/none", {}, 404),
        ("/nowhere", {}, 404),
    ):
        whole, head = await replies(scene, target, **more)
        assert head.startswith(b"HTTP/1.1 %d " % status), target
        assert head == whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n", target
    for path in ("/exec", "/signal", "/notify"):
        _, head = await replies(scene, path)
        assert head.startswith(b"HTTP/1.1 405 ")
        assert b"\r\nAllow: POST\r\n" in head
        assert head.endswith(b"\r\n\r\n")
    refused = await scene.run("", line="PUT /healthz HTTP/1.1")
    assert refused.headers[b"allow"] == b"GET, HEAD"


# spec E12
async def test_curl_reaches_every_path(scene: Scene) -> None:
    health = await scene.curl(path="/healthz")
    assert (health.status, health.body, health.code) == (200, b"ok\n", 0)
    ran = await scene.curl(
        "tool=printf", "arg=abc", options=["-H", "X-Aifo-Exec-Id: one"]
    )
    assert ran.headers[b"x-exec-id"] == b"one"
    again = await scene.curl(path="/exec/one?from=1")
    assert (again.status, again.body, again.code) == (200, b"bc", 0)
    for path in ("/exec/", "/exec/?from=0"):  # spec toolexec 1: paths are exact
        assert (await scene.curl("tool=printf", path=path)).status == 404
        assert (await scene.curl(path=path)).status == 404
    gone = await scene.curl("exec_id=one", path="/signal")
    assert (gone.status, gone.body) == (404, b"not found\n")


# spec toolexec 5: 204 once a signal is delivered, with or without SIG, in any case.
# spec E36
async def test_curl_signals_what_runs(scene: Scene) -> None:
    os.mkfifo(scene.workspace / "up")
    reader = os.open(scene.workspace / "up", os.O_RDWR | os.O_NONBLOCK)
    script = "trap 'echo got; exit 5' INT; echo >up; while :; do sleep 0.05; done"
    ran: list[Reply] = []

    async def run() -> None:
        name = ["-H", "X-Aifo-Exec-Id: loop"]
        ran.append(await scene.curl("tool=sh", "arg=-c", f"arg={script}", options=name))

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.lowlevel.wait_readable(reader)
            words = ("exec_id=loop", "signal=sigint")
            told = await scene.curl(*words, path="/signal")
            assert (told.status, told.body) == (204, b"")
            assert told.headers[b"connection"] == b"close"
            assert b"content-length" not in told.headers
    finally:
        os.close(reader)
    (reply,) = ran
    assert (reply.body, reply.code) == (b"got\n", 5)


async def test_curl_uploads_in_chunks_and_waits_to_be_told(scene: Scene) -> None:
    for header in ("Transfer-Encoding: chunked", "Expect: 100-continue"):
        reply = await scene.curl("tool=printf", "arg=x", options=["-H", header])
        assert (reply.status, reply.body, reply.code) == (200, b"x", 0)


async def test_tcp_serves_the_same(scene: Scene) -> None:
    assert scene.tool.shared_url is not None
    assert scene.tool.shared_url.startswith("http://127.0.0.1:")
    scene.child.url = scene.tool.shared_url
    reply = await scene.curl("tool=printf", "arg=hello")
    assert (reply.status, reply.body, reply.code) == (200, b"hello", 0)
    raw = await scene.run("tool=printf", "arg=hello")
    assert (raw.body, raw.code) == (b"hello", 0)


# spec E22
async def test_output_comes_when_it_is_printed(scene: Scene) -> None:
    (scene.workspace / "go").unlink(missing_ok=True)
    os.mkfifo(scene.workspace / "go")
    with await scene.connect() as sock:
        form = "tool=sh&arg=-c&arg=echo first; cat go; echo last"
        await send(sock, scene.request(form.encode()))
        head = await receive_until(sock, b"first\n\r\n")
        (scene.workspace / "go").write_bytes(b"middle\n")
        reply = parse(head + await receive_all(sock))
    assert reply.body == b"first\nmiddle\nlast\n"
    assert reply.chunks[0] == b"first\n"


# attack 36: nothing is a shell's; arguments arrive byte by byte.
@pytest.mark.parametrize("proto", ["1", "2"])
async def test_arguments_are_bytes(scene: Scene, proto: str) -> None:
    pairs = (
        "tool=printf", "arg=%25s|", "arg=$(id)", "arg=%C3%A9", "arg=%FF%0A", "arg=",
        "arg=a+b'\"", "arg=;ls", "arg=%zz",
    )  # fmt: skip
    reply = await scene.run(*pairs, proto=proto)
    assert reply.body == b"$(id)|\xc3\xa9|\xff\n||a b'\"|;ls|%zz|"


# spec E20
async def test_a_tool_has_the_sidecars_environment_and_no_descriptor(
    scene: Scene,
) -> None:
    reply = await scene.run("tool=env")
    assert sorted(reply.body.splitlines()) == [
        b"LANG=C",
        b"PATH=" + scene.routes.env["PATH"].encode(),
    ]
    code = "import os; print(sorted(os.listdir('/proc/self/fd')), os.read(0, 9))"
    reply = await scene.run("tool=python3", "arg=-IS", "arg=-c", f"arg={code}")
    assert reply.body == b"['0', '1', '2', '3'] b''\n"  # 3 lists the directory
    code = "import os; print(os.getsid(0) == os.getpgid(0) == os.getpid())"
    reply = await scene.run("tool=python3", "arg=-IS", "arg=-c", f"arg={code}")
    assert reply.body == b"True\n"
    assert (await scene.run("tool=tty")).body == b"not a tty\n"


async def test_a_tool_has_a_terminal_if_the_sidecar_says_so(scene: Scene) -> None:
    scene.routes.tty = True
    reply = await scene.run("tool=sh", "arg=-c", "arg=test -t 1 -a -t 2; echo $?")
    assert (reply.body, reply.code) == (b"0\r\n", 0)


async def test_a_working_directory_is_used(scene: Scene) -> None:
    (scene.workspace / "sub").mkdir()
    for cwd, found in (("", b"workspace"), ("&cwd=/workspace/sub", b"sub")):
        reply = await scene.run("tool=pwd" + cwd)
        assert reply.body.rstrip().endswith(b"/" + found)
    reply = await scene.run("tool=pwd", "cwd=/workspace/nowhere")
    assert (reply.status, reply.code) == (400, 86)


@pytest.mark.parametrize(("tool", "code"), [("missing", 127), ("notexec", 126)])
@pytest.mark.parametrize("proto", ["1", "2"])
# spec E23
async def test_what_exec_refuses_is_126_or_127(
    scene: Scene, tool: str, code: int, proto: str
) -> None:
    reply = await scene.run(f"tool={tool}", proto=proto)
    assert (reply.status, reply.code) == (200, code)
    assert reply.body.startswith(b"cannot start '")
    assert not scene.tool.slots.used


@pytest.mark.parametrize("proto", ["1", "2"])
async def test_a_fault_of_the_host_is_500_and_never_chunked(
    scene: Scene, proto: str
) -> None:
    reply = await scene.run("tool=faulty", proto=proto)
    assert (reply.status, reply.code) == (500, 86)
    assert reply.body == b"aifo-coder proxy error: the sidecar is broken\n"
    assert b"content-length" in reply.headers
    assert not scene.tool.slots.used


# A fault of ours, wherever in a request it is met.
@pytest.mark.parametrize(
    "where",
    ["protocol.toolexec.requests.decide_by_head", "protocol.toolexec.body.Head.values"],
)
async def test_a_fault_ends_its_connection_and_no_other(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(
        scene.tool.context,
        "log",
        SimpleNamespace(write=lambda *line: said.append(line)),
    )
    request = scene.request(b"tool=true")
    with monkeypatch.context() as patch:
        patch.setattr(where, lambda *_: 1 // 0)
        for data in (request, request[:-1]):  # with its head, and behind it
            with await scene.connect() as sock:
                await send(sock, data)
                assert await receive_all(sock) == b""
    assert (await scene.say(request)).status == 200
    assert len(said) == 2
    for level, text in said:
        assert (level, "ZeroDivisionError" in text) == ("ERROR", True)


# Likewise while somebody is refused, be it for what was sent or for want of room.
@pytest.mark.parametrize("places", [slots.MAX_CONNECTIONS, 0])
async def test_a_fault_while_refusing_ends_its_connection_and_no_other(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(
        scene.tool.context,
        "log",
        SimpleNamespace(write=lambda *line: said.append(line)),
    )
    with monkeypatch.context() as patch:
        patch.setattr(slots, "MAX_CONNECTIONS", places)
        patch.setattr(Wire, "reply", lambda *_: 1 // 0)
        with await scene.connect() as sock:
            await send(sock, b"no request\r\n\r\n")
            assert await receive_all(sock) == b""
    assert (await scene.run("tool=true")).status == 200
    ((level, text),) = said
    assert (level, "ZeroDivisionError" in text) == ("ERROR", True)


# spec E23
async def test_death_by_a_signal_is_128_and_its_number(scene: Scene) -> None:
    reply = await scene.run("tool=sh", "arg=-c", "arg=kill -SEGV $$")
    assert reply.code == 128 + 11


# The order: each fault hides those behind it.
CASES: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (404, "", {"line": "GET /nothing HTTP/1.1", "token": None, "proto": None}),
    (405, "", {"line": "GET /exec HTTP/1.1", "token": None, "proto": None}),
    (401, "", {"token": None, "proto": None}),
    (401, "", {"token": "x" * 32, "proto": "9"}),
    (426, "", {"proto": None}),
    (400, "", {}),
    (400, "tool=rm&cwd=", {}),
    (403, "tool=rm&cwd=/nowhere", {}),
    (409, "tool=elsewhere&cwd=/nowhere", {}),
    (400, "tool=missing&cwd=/nowhere", {}),
    (200, "tool=true", {}),
)


@pytest.mark.parametrize(("status", "form", "changes"), CASES)
# spec E13
async def test_faults_are_told_in_order(
    scene: Scene, status: int, form: str, changes: dict[str, Any]
) -> None:
    reply = await scene.run(form, **changes)
    assert reply.status == status
    assert reply.headers[b"content-type"] == TYPE
    if status != 200:
        assert reply.code == 86
        assert reply.body.endswith(b"\n")
    if status in {401, 404, 405, 426}:
        # Nothing about tools is told to whoever may not ask.
        assert not [asked for asked in scene.routes.asked if "permitted" in asked]


# spec E6, E14
async def test_refusals_have_their_headers(scene: Scene) -> None:
    assert (await scene.run("", line="PUT /exec HTTP/1.1")).headers[b"allow"] == b"POST"
    upgrade = (await scene.run("tool=true", proto="3")).headers[b"upgrade"]
    assert upgrade == b"aifo-toolexec/2, aifo-toolexec/1"
    reply = await scene.run("tool=rm")
    assert reply.body.startswith(b"forbidden: tool 'rm' is not permitted ")


# spec E11
async def test_http_1_0_is_served_whole_but_not_streamed(scene: Scene) -> None:
    line = "POST /exec HTTP/1.0"
    assert (await scene.run("tool=true", line=line)).status == 426
    reply = await scene.run("tool=printf", "arg=x", line=line, proto="1")
    assert (reply.status, reply.body, reply.code) == (200, b"x", 0)
    assert b"transfer-encoding" not in reply.headers


# spec E21
async def test_a_verbose_server_puts_lines_around_a_whole_output(
    tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    async with opened_scene(tmp_path, verbose=True) as scene:
        for printed, body in (
            ("x", b"\nx\n"),
            ("%0Ax%0D", b"\nx\r"),
            ("%0Dx%0A", b"\rx\n"),
            ("", b"\n"),
        ):
            reply = await scene.run("tool=printf", f"arg={printed}", proto="1")
            assert reply.body == body
        assert (await scene.run("tool=printf", "arg=x")).body == b"x"
        await scene.run("tool=printf", "arg=x", "arg=--token", "arg=s3cret")
    said = capfd.readouterr().err
    assert "printf x --token ***" in said
    assert "s3cret" not in said
    assert scene.child.token not in said


# attack 35: what a tool prints is output, whatever it looks like.
async def test_output_that_looks_like_a_trailer_is_output(scene: Scene) -> None:
    fake = "0%0D%0AX-Exit-Code: 0%0D%0A%0D%0AHTTP/1.1 200 OK"
    reply = await scene.curl("tool=sh", "arg=-c", "arg=cat; exit 3")
    assert reply.code == 3
    raw = await scene.run("tool=printf", "arg=%25s", f"arg={fake}")
    assert raw.body.startswith(b"0\r\nX-Exit-Code: 0\r\n\r\nHTTP")
    assert raw.code == 0


async def test_requests_at_once_are_served_at_once(scene: Scene) -> None:
    replies: list[bytes] = []

    async def one(number: int) -> None:
        reply = await scene.run("tool=printf", f"arg={number}")
        replies.append(reply.body)

    async with trio.open_nursery() as nursery:
        for number in range(64):
            nursery.start_soon(one, number)
    assert sorted(map(int, replies)) == list(range(64))


async def test_the_journal_tells_of_executions(scene: Scene) -> None:
    await scene.run("tool=sh", "arg=-c", "arg=echo; exit 5")
    (started,) = scene.stage.events("exec.started")
    (ended,) = scene.stage.events("exec.ended")
    assert (started["tool"], started["sidecar"]) == ("sh", "directory")
    assert started["exec_id"] == ended["exec_id"]
    assert (ended["code"], ended["output_bytes"]) == (5, 1)
    assert "echo" not in scene.stage.journal.read_text()


# FD 3 is not passed into tools unless the sidecar says so, then as a nested client.
async def test_a_tool_has_a_door_if_the_sidecar_says_so(scene: Scene) -> None:
    script = (
        "printf 'PING%25s' '\n' >%263; read x <%263; echo $x; env | grep FSPROXY_FD"
    )
    without = await scene.run("tool=sh", "arg=-c", f"arg={script}")
    assert b"OK" not in without.body
    scene.routes.fd3 = True
    for proto in ("1", "2"):
        reply = await scene.run("tool=sh", "arg=-c", f"arg={script}", proto=proto)
        assert reply.body == b"OK\nFSPROXY_FD=3\n"
    assert len(scene.stage.host.fs.tables.clients) == 1
    assert (await scene.run("tool=missing")).code == 127
    assert len(scene.stage.host.fs.tables.clients) == 1


# Of a tool that works elsewhere, what runs here is started in no directory of the child's.
async def test_what_works_elsewhere_is_started_in_the_root_directory(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await scene.run("tool=sh&arg=-c&arg=pwd -P")).body != b"/\n"
    command = scene.routes.command

    async def elsewhere(*args: Any) -> SpawnPlan:
        return replace(await command(*args), is_elsewhere=True)

    monkeypatch.setattr(scene.routes, "command", elsewhere)
    assert (await scene.run("tool=sh&arg=-c&arg=pwd -P")).body == b"/\n"
