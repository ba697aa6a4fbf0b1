"""ToolExec as a service.

Sockets, tokens, configuration, the command, what it holds.
"""

import os
import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio.testing

from protocol.toolexec.token import ALL
from supervisor.spec import ChildSpec
from supervisor.toolexec.listeners import LISTEN, tcp_listener, unix_listener
from supervisor.toolexec.section import (
    NotifySection,
    ToolexecSection,
    check_toolexec,
)
from supervisor.toolexec.service import open_toolexec
from supervisor.toolexec.settings import ToolExecSettings, toolexec_settings
from supervisor.toolexec.tokens import Tokens
from tests.helpers.command import sandhost
from tests.helpers.stage import open_stage
from tests.helpers.toolscene import Scene, opened_scene, parse, receive_all, send

pytestmark = pytest.mark.slow


# spec E1, E3
async def test_each_child_has_its_own_socket_and_token(scene: Scene) -> None:
    other = await scene.tenant()
    assert other.token != scene.child.token
    assert len(other.token) == 32
    for tenant in (scene.child, other):
        status = os.stat(tenant.path)
        assert stat.S_ISSOCK(status.st_mode)
        assert stat.S_IMODE(status.st_mode) == 0o600
        directory = os.stat(os.path.dirname(tenant.path))
        assert stat.S_IMODE(directory.st_mode) == 0o700
        assert os.path.basename(tenant.path) == "toolexec.sock"
    path = other.path
    await other.puppet.leave()
    with pytest.raises(FileNotFoundError):
        os.stat(path)


# attack 39: the socket file that is there already, stale or alive.
# spec E3
async def test_a_stale_socket_is_replaced_a_living_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "toolexec.sock"
    spec = ChildSpec(("true",), "/", "/", run_dir=str(tmp_path))
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with unix_listener(spec) as (where, listener):
        assert where == str(path)
        with pytest.raises(OSError, match="living host"):
            async with unix_listener(spec):
                pass
        await listener.aclose()
    assert "toolexec.sock" not in os.listdir(tmp_path)
    with pytest.raises(
        OSError, match=r"shorter \[host\] state_dir for serve, a shorter TMPDIR"
    ):
        async with unix_listener(replace(spec, run_dir=f"/{'x' * 120}")):
            pass


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    url, listener = await tcp_listener("127.0.0.1", 0)
    port = int(url.removesuffix("/exec").rpartition(":")[2])
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: "):
        await tcp_listener("127.0.0.1", port)
    await listener.aclose()


@pytest.mark.parametrize(
    ("host", "start"),
    [
        ("0.0.0.0", "http://127.0.0.1:"),  # noqa: S104 - what is asked for
        ("localhost", "http://"),
        ("::1", "http://[::1]:"),
    ],
)
async def test_a_client_is_told_an_address_it_can_use(host: str, start: str) -> None:
    try:
        url, listener = await tcp_listener(host, 0)
    except OSError:
        assert host == "::1"
        pytest.skip("this machine has no IPv6")
    assert url.startswith(start)
    assert url.endswith("/exec")
    await listener.aclose()


@pytest.mark.parametrize("chosen_by", [LISTEN, "AIFO_TOOLEEXEC_BIND_HOST"])
async def test_what_chose_a_bad_address_is_said(chosen_by: str) -> None:
    with pytest.raises(OSError, match=f"; choose another {chosen_by}$"):
        await tcp_listener("203.0.113.1", 0, chosen_by)


async def test_a_child_without_a_directory_is_told_the_port(tmp_path: Path) -> None:
    async with opened_scene(tmp_path, unix=False) as scene:
        assert scene.child.url.startswith("http://127.0.0.1:")
        assert (await scene.run("tool=true")).code == 0


async def test_what_it_holds_is_known_to_the_host(scene: Scene) -> None:
    held = dict(scene.tool.descriptors())
    assert "null device for tools" in held.values()
    with await scene.connect() as sock:
        await trio.testing.wait_all_tasks_blocked()
        assert "toolexec connection" in dict(scene.tool.descriptors()).values()
        del sock


def test_tokens_are_found_by_value_and_forgotten() -> None:
    tokens: Tokens[str] = Tokens()
    mine, other = tokens.issue("mine"), tokens.issue("other")
    assert tokens.find([b"", b"x", mine.encode()]) == ("mine", ALL)
    assert tokens.find([other.encode()]) == ("other", ALL)
    assert tokens.find([]) is None
    assert tokens.find([mine.encode()[:-1], b"x" * 32]) is None
    tokens.revoke(mine)
    tokens.revoke(mine)
    assert tokens.find([mine.encode()]) is None


# Configuration


def test_a_section_becomes_settings() -> None:
    settings = toolexec_settings(ToolexecSection(), {})
    assert (settings.unix, settings.tcp) == (True, ("127.0.0.1", 0, LISTEN))
    assert (settings.max_executions, settings.timeout_s) == (64, 0.0)
    assert settings.log_limit_bytes == 256 * 1024 * 1024
    notify = NotifySection(command=["/usr/bin/say", "{args}"])
    section = ToolexecSection(listen=["tcp://[::1]:80"], notify=notify, timeout="5s")
    settings = toolexec_settings(section, {}, "/var/lib")
    assert (settings.unix, settings.tcp) == (False, ("::1", 80, LISTEN))
    assert settings.notify == (("/usr/bin/say", "{args}"), 30.0, 8)
    assert (settings.timeout_s, settings.log_dir) == (5.0, "/var/lib")


# spec toolexec 1: environment variables win over the configuration file.
# spec E2
def test_the_environment_wins() -> None:
    environ = {
        "AIFO_TOOLEEXEC_BIND_HOST": "::",
        "AIFO_TOOLEEXEC_TIMEOUT_SECS": "7",
    }
    for listen in (["unix"], ["tcp://127.0.0.1:0"]):
        section = ToolexecSection(listen=listen, timeout="5s")
        settings = toolexec_settings(section, environ)
        assert settings.tcp == ("::", 0, "AIFO_TOOLEEXEC_BIND_HOST")
        assert (settings.timeout_s, settings.is_timeout_forced) == (7.0, True)
    assert not toolexec_settings(ToolexecSection(), {}).is_timeout_forced
    with pytest.raises(OSError, match="cannot use AIFO_TOOLEEXEC_TIMEOUT_SECS"):
        toolexec_settings(ToolexecSection(), {"AIFO_TOOLEEXEC_TIMEOUT_SECS": "soon"})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"listen": []}, "listen"),
        ({"listen": ["udp://a:1"]}, "listen"),
        ({"listen": ["tcp://a:99999"]}, "listen"),
        ({"listen": ["tcp://a:1", "tcp://b:2"]}, "listen"),
        ({"max_executions": 0}, "max_executions"),
        ({"timeout": "soon"}, "timeout"),
        ({"log_limit": "64K"}, "log_limit"),
        ({"log_limit": "x"}, "log_limit"),
        ({"notify": NotifySection(command=[])}, "notify.command"),
        ({"notify": NotifySection(command=["say"])}, "notify.command"),
        (
            {"notify": NotifySection(command=["/a", "{args}", "{args}"])},
            "notify.command",
        ),
        ({"notify": NotifySection(command=["/a"], max_args=-1)}, "notify.max_args"),
        ({"notify": NotifySection(command=["/a"], timeout="x")}, "notify.timeout"),
    ],
)
def test_a_bad_value_is_named(changes: dict[str, Any], key: str) -> None:
    assert [found for found, _ in check_toolexec(ToolexecSection(**changes))] == [key]
    assert not list(check_toolexec(ToolexecSection()))


SCRIPT = (
    'curl -sS --unix-socket "${AIFO_TOOLEEXEC_URL#unix://}" http://localhost/healthz;'
    ' curl -sS -o - -w "%{http_code}\\n" --unix-socket "${AIFO_TOOLEEXEC_URL#unix://}"'
    ' -H "Authorization: Bearer $AIFO_TOOLEEXEC_TOKEN" -H "X-Aifo-Proto: 2"'
    " -d tool=nothing http://localhost/exec"
)


# spec E1
def test_run_offers_tools_to_its_child(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[toolexec]\n")
    words = ("run", "--config", "c.toml", "--", "sh", "-c", SCRIPT)
    outcome = sandhost(*words, cwd=tmp_path)
    assert outcome.status == 0, outcome.err
    assert outcome.out.splitlines()[0] == b"ok"
    assert outcome.out.splitlines()[1].startswith(b"forbidden: tool 'nothing'")
    assert outcome.out.splitlines()[2] == b"403"
    without = sandhost("run", "--", "sh", "-c", "env", cwd=tmp_path)
    assert b"AIFO_" not in without.out


def test_a_port_that_cannot_be_had_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[toolexec]\nlisten = ['tcp://192.0.2.1:80']\n")
    outcome = sandhost("run", "--config", "c.toml", "--", "true", cwd=tmp_path)
    assert outcome.status == 125
    assert outcome.said("cannot listen on 192.0.2.1:80")


# A request that comes before all is restored waits for it: a token may not be
# known yet, nor what it asks for.
# spec E5
async def test_requests_wait_until_all_that_was_handed_over_is_there(
    tmp_path: Path,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    left = {"shared": [listener.detach()], "children": [], "connections": []}
    settings = ToolExecSettings(unix=False)
    async with (
        open_stage(tmp_path) as stage,
        open_toolexec(stage.host, settings, left=left) as tool,
    ):
        with socket.create_connection(address) as sock:
            sock.setblocking(False)
            await send(sock, b"POST /exec HTTP/1.1\r\nHost: x\r\n\r\n")
            await trio.testing.wait_all_tasks_blocked(0.05)
            with pytest.raises(BlockingIOError):
                sock.recv(1)
            await tool.restore_rest()
            assert parse(await receive_all(sock)).status == 401
