"""`X-Sandhost-Fd: 1`: a large output answered as an LLM fd, over real sockets."""

import os
import xml.etree.ElementTree as ET
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from protocol.toolexec.token import narrow_token
from supervisor.llmfd import ContentSettings, Store
from supervisor.llmfd.service import FdService
from supervisor.toolexec.handles import make_handle
from tests.helpers.command import SANDHOST, sandhost
from tests.helpers.stage import eventually
from tests.helpers.toolruns import program
from tests.helpers.toolscene import Reply, Scene, opened_scene, send
from vfs.clients import Client

pytestmark = pytest.mark.slow

MIB = 1024 * 1024
HEADER = "X-Sandhost-Fd: 1"
LINES = "".join(f"line {n}\n" for n in range(1, 4001)).encode()
SCRIPT = "tool=sh&arg=-c&arg="
PRINT = SCRIPT + "seq+-f+'line+%25.0f'+1+4000"


@asynccontextmanager
async def with_fds(
    where: Path, *, max_store: int = 64 * MIB, most_shown: int = 8000, **settings: Any
) -> AsyncIterator[tuple[Scene, FdService]]:
    """Open a scene whose child has LLM fds."""
    async with opened_scene(where, **settings) as scene, AsyncExitStack() as stack:
        store = Store(8 * MIB, str(where / "contents"))
        shown = ContentSettings(max_output=most_shown)
        fds = FdService(scene.stage.host.fs, store, settings=shown, max_store=max_store)
        scene.stage.host.services.fds = fds
        stack.callback(fds.close)
        await fds.child_starting(scene.child.puppet.child, stack)
        offer = partial(make_handle, fds, scene.tool.context.log.write)
        scene.tool.context.large_output = offer
        yield scene, fds
        scene.stage.host.services.fds = None


async def ask(scene: Scene, form: str, *extra: str, proto: str = "2") -> Reply:
    """Run a tool and ask for a handle."""
    return await scene.say(scene.request(form.encode(), HEADER, *extra, proto=proto))


# spec toolexec 7: a large output is the <fd_result>, the exit code is the tool's.
@pytest.mark.parametrize("proto", ["1", "2"])
# spec E18, E27
async def test_a_large_output_is_a_handle(tmp_path: Path, proto: str) -> None:
    async with with_fds(tmp_path) as (scene, fds):
        reply = await ask(scene, f"{PRINT};+exit+7", proto=proto)
        assert (reply.status, reply.code) == (200, 7)
        result = ET.fromstring(reply.body)
        assert (result.tag, result.get("fd")) == ("fd_result", "fd:1")
        assert result.get("total_lines") == "4000"
        (process,) = fds.processes.values()
        text = process.table.fds[1].content.text
        assert text.data[:] == LINES
        assert process.table.fds[1].source == "tool:sh"
        # The output itself is kept beside it, and nobody who does not ask gets a handle.
        name = reply.headers[b"x-exec-id"].decode()
        line = f"GET /exec/{name}?from=0 HTTP/1.1"
        again = await scene.say(scene.head(line=line))
        assert (again.body, again.code) == (LINES, 7)
        plain = await scene.run(PRINT, proto=proto)
        assert plain.body == LINES


@pytest.mark.parametrize("proto", ["1", "2"])
# spec E27
async def test_a_short_output_goes_as_it_is(tmp_path: Path, proto: str) -> None:
    async with with_fds(tmp_path, most_shown=10) as (scene, fds):
        for text in ("0123456789", "ééééé", "é" * 10):
            reply = await ask(scene, f"tool=printf&arg={text}", proto=proto)
            assert reply.body == text.encode()
        assert not fds.processes[scene.child.puppet.client_id].table.fds
        reply = await ask(scene, "tool=printf&arg=01234567890", proto=proto)
        assert reply.body.startswith(b'<fd_result fd="fd:1"')


# An output of just so many bytes may go: what stands for it would be longer.
@pytest.mark.parametrize("proto", ["1", "2"])
# spec E27
async def test_bytes_that_are_no_text_go_as_they_are_up_to_the_limit(
    tmp_path: Path, proto: str
) -> None:
    async with with_fds(tmp_path, most_shown=10) as (scene, fds):
        table = fds.processes[scene.child.puppet.client_id].table
        form = "tool=head&arg=-c&arg=%d&arg=/dev/zero"
        reply = await ask(scene, form % 10, proto=proto)
        assert (reply.body, reply.code) == (bytes(10), 0)
        assert not table.fds
        reply = await ask(scene, form % 11, proto=proto)
        assert reply.body.startswith(b'<fd_result fd="fd:1"')


# spec E37: handles are the child's own connection's.
@pytest.mark.parametrize("proto", ["1", "2"])
async def test_a_narrowed_token_gets_the_output_and_no_handle(
    tmp_path: Path, proto: str
) -> None:
    async with with_fds(tmp_path) as (scene, fds):
        less = narrow_token(scene.child.token, "less")
        data = scene.request(PRINT.encode(), HEADER, proto=proto, token=less)
        reply = await scene.say(data)
        assert (reply.status, reply.body, reply.code) == (200, LINES, 0)
        assert not fds.processes[scene.child.puppet.client_id].table.fds


async def test_bytes_that_are_no_text_are_a_handle_too(tmp_path: Path) -> None:
    async with with_fds(tmp_path) as (scene, _):
        reply = await ask(scene, "tool=head&arg=-c&arg=20000&arg=/dev/zero")
        assert ET.fromstring(reply.body).get("encoding") == "base64"


# The output goes over in pieces, from the file of the log: see the host's memory.
async def test_an_output_beyond_memory_is_a_handle(tmp_path: Path) -> None:
    async with with_fds(tmp_path, max_store=128 * MIB) as (scene, fds):
        form = f"tool=head&arg=-c&arg={48 * MIB}&arg=/dev/zero"
        reply = await ask(scene, form)
        assert reply.body.startswith(b"<fd_result ")
        assert fds.store.memory_bytes == 0
        assert reply.code == 0


# Nothing is lost by asking: what there is no room for goes as it is.
@pytest.mark.parametrize("proto", ["1", "2"])
# spec E27
async def test_without_room_it_goes_as_it_is(tmp_path: Path, proto: str) -> None:
    async with with_fds(tmp_path, max_store=10_000) as (scene, fds):
        reply = await ask(scene, PRINT, proto=proto)
        assert (reply.body, reply.code) == (LINES, 0)
        (process,) = fds.processes.values()
        assert process.shared.allowance is not None
        assert process.shared.allowance.used == 0
        assert not fds.store.blobs


async def test_the_answers_of_fd_calls_are_left_whole(tmp_path: Path) -> None:
    async with with_fds(tmp_path) as (scene, fds):
        fds.tools["sh"] = fds.tools["read_fd"]
        assert (await ask(scene, PRINT)).body == LINES


async def test_a_timeout_is_said_beside_the_handle(tmp_path: Path) -> None:
    async with with_fds(tmp_path, timeout_s=3.0) as (scene, _):
        reply = await ask(scene, f"{PRINT};+exec+sleep+60")
        handle, note = reply.chunks
        assert ET.fromstring(handle).get("total_lines") == "4000"
        assert (note, reply.code) == (b"aifo-coder proxy timeout\n", 124)


# As with version 1: what must be kept whole and cannot be is a 500, never cut.
# spec E27
async def test_beyond_the_limit_it_is_a_500(tmp_path: Path) -> None:
    async with with_fds(tmp_path, log_limit_bytes=2 * MIB) as (scene, _):
        reply = await ask(scene, f"tool=head&arg=-c&arg={8 * MIB}&arg=/dev/zero")
        assert (reply.status, reply.code) == (500, 86)
        assert b"log_limit" in reply.body


async def test_who_leaves_while_it_waits_leaves_nothing(tmp_path: Path) -> None:
    async with with_fds(tmp_path) as (scene, fds):
        with await scene.connect() as sock:
            form = f"{PRINT};+touch+up;+exec+sleep+60".encode()
            await send(sock, scene.request(form, HEADER))
            await eventually((scene.workspace / "up").exists)
        await eventually(lambda: not scene.tool.slots.used)
        assert not fds.store.blobs


async def test_a_client_that_goes_meanwhile_gets_no_handle(tmp_path: Path) -> None:
    async with with_fds(tmp_path) as (scene, fds):
        assert scene.child.puppet.child.session is not None
        client = scene.child.puppet.child.session.client

        pieces = [LINES, LINES, b""]

        async def read() -> bytes:
            await trio.lowlevel.checkpoint()
            if len(pieces) == 2:
                fds.client_gone(client)
            return pieces.pop(0)

        assert await fds.wrap_pieces(client, read, "tool:x") is None
        assert not pieces
        assert await fds.wrap_pieces(client, read, "tool:x") is None
        assert (fds.store.blobs, fds.store.memory_bytes) == ({}, 0)


@pytest.mark.parametrize("at", ["first piece", "last piece", "result"])
async def test_a_child_that_is_killed_while_its_handle_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    killed: list[str] = []

    async def kill(scene: Scene, now: str) -> None:
        if now == at:
            killed.append(now)
            assert scene.child.puppet.child.process is not None
            scene.child.puppet.child.process.send_signal(9)
            await trio.sleep_forever()  # until the end of its child cancels this

    async with with_fds(tmp_path, most_shown=10) as (scene, fds):
        wrap_pieces = fds.wrap_pieces

        async def wrap(
            client: Client, read: Callable[[], Awaitable[bytes]], source: str
        ) -> bytes | None:
            pieces = 0

            async def slowly() -> bytes:
                nonlocal pieces
                piece = await read()
                await kill(scene, "first piece" if piece and not pieces else "")
                await kill(scene, "" if piece else "last piece")
                pieces += 1
                return piece

            answer = await wrap_pieces(client, slowly, source)
            await kill(scene, "result")
            return answer

        monkeypatch.setattr(fds, "wrap_pieces", wrap)
        with await scene.connect() as sock:
            form = b"tool=head&arg=-c&arg=20000000&arg=/dev/zero"
            await send(sock, scene.request(form, HEADER))
            await eventually(lambda: killed == [at])
            await eventually(lambda: not scene.tool.slots.used)
        await eventually(lambda: not os.listdir(fds.store.files.fd))
        await eventually(lambda: not fds.processes)
        assert (fds.store.blobs, fds.store.memory_bytes) == ({}, 0)


def test_a_child_reads_on_by_its_handle(tmp_path: Path) -> None:
    """All of it from outside: the configuration, curl, and the command for LLM fds."""
    (tmp_path / "c.toml").write_text(
        f"[toolexec]\n[sidecar.my]\nkind = 'go'\npath = ['{tmp_path}/bin']\n"
        "[tools]\nenabled = ['read_fd']\n"
    )
    program(tmp_path / "bin", "go", "seq -f 'line %.0f' 1 4000")
    script = (
        'curl -sS --unix-socket "${AIFO_TOOLEEXEC_URL#unix://}" -d tool=go'
        ' -H "Authorization: Bearer $AIFO_TOOLEEXEC_TOKEN" -H "X-Aifo-Proto: 2"'
        f' -H "{HEADER}" http://localhost/exec | sed -n 1p | cut -c1-23;'
        " $0 fd read fd:1 --lines 3999-4000 | grep line"
    )
    words = ("run", "--config", "c.toml", "--", "sh", "-c", script, SANDHOST)
    outcome = sandhost(*words, cwd=tmp_path)
    assert outcome.err == b""
    lines = outcome.out.decode().splitlines()
    assert lines[0] == '<fd_result fd="fd:1" pa'
    assert [line.strip() for line in lines[-2:]] == ["line 3999", "line 4000"]
