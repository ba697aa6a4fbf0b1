"""POST /notify: the one configured command, and nothing else."""

import errno
import os
import signal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from supervisor.toolexec.settings import NotifyCommand
from tests.helpers.stage import eventually
from tests.helpers.toolscene import Reply, Scene, opened_scene, send

pytestmark = pytest.mark.slow

LINE = "POST /notify HTTP/1.1"


async def notified(
    tmp_path: Path, *command: str, form: str, timeout_s: float = 10.0, **changes: Any
) -> Reply:
    """Ask a host with this command for a notification."""
    notify = NotifyCommand(command, timeout_s, 2) if command else None
    async with opened_scene(tmp_path, notify=notify) as scene:
        reply = await scene.run(form, line=LINE, **changes)
        assert not scene.tool.slots.used
    return reply


# spec E33
async def test_arguments_take_the_place_of_args(tmp_path: Path) -> None:
    command = ("/usr/bin/printf", "%s|", "a", "{args}", "z")
    form = "cmd=printf&arg=1&arg=2&arg=3"
    reply = await notified(tmp_path, *command, form=form)
    assert (reply.status, reply.body, reply.code) == (200, b"a|1|2|z|", 0)
    assert reply.headers[b"content-length"] == b"8"


# attack 49: it runs outside of all walls, so a child gives it words and no options.
@pytest.mark.parametrize(
    ("fixed", "words", "printed"),
    [
        (("{args}", "z"), ("-x",), b"--|-x|z|"),
        (("a", "{args}"), ("b", "--c"), b"a|--|b|--c|"),
        (("{args}",), ("--", "-x"), b"--|--|-x|"),
        (("--", "{args}"), ("-x",), b"--|-x|"),  # the operator has said it
        (("--", "a", "{args}"), ("-x",), b"--|a|--|-x|"),
        (("{args}", "-z"), ("b", "c-d"), b"b|c-d|-z|"),
        (("{args}",), ("b", "c", "-d"), b"b|c|"),  # the first two alone are handed on
    ],
)
async def test_a_childs_words_are_no_options(
    tmp_path: Path, fixed: tuple[str, ...], words: tuple[str, ...], printed: bytes
) -> None:
    form = "&".join(("cmd=printf", *(f"arg={word}" for word in words)))
    reply = await notified(tmp_path, "/usr/bin/printf", "%s|", *fixed, form=form)
    assert (reply.status, reply.body, reply.code) == (200, printed, 0)


# attack 49: behind `--` options of the operator's own would be words.
async def test_before_options_a_childs_word_that_looks_like_one_is_403(
    tmp_path: Path,
) -> None:
    command = ("/usr/bin/printf", "%s|", "{args}", "-z")
    reply = await notified(tmp_path, *command, form="cmd=printf&arg=a&arg=-x")
    assert reply.status == 403
    assert reply.body == (
        b"forbidden: an argument begins with '-', and options of the command follow\n"
    )


# attack 49
async def test_an_option_of_a_program_is_a_name_to_it(tmp_path: Path) -> None:
    reply = await notified(tmp_path, "/bin/cat", "{args}", form="cmd=cat&arg=--version")
    assert b"--version: No such file" in reply.body
    assert reply.code == 1


# spec toolexec 5: 200 with its output and exit code; with curl.
# spec E33
async def test_curl_notifies(tmp_path: Path) -> None:
    notify = NotifyCommand(("/bin/sh", "-c", "echo hi; exit 3"), 10.0, 8)
    async with opened_scene(tmp_path, notify=notify) as scene:
        words = ("cmd=sh", "arg=-c", "arg=echo hi; exit 3")
        reply = await scene.curl(*words, path="/notify")
        assert (reply.status, reply.body, reply.code) == (200, b"hi\n", 3)
        assert reply.headers[b"content-type"] == b"text/plain; charset=utf-8"


# Its output goes to the child: of the host's environment it has what shows things to a user.
# spec E33
async def test_it_is_told_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    monkeypatch.setenv("DISPLAY", ":7")
    reply = await notified(tmp_path, "/usr/bin/env", form="cmd=env")
    lines = reply.body.splitlines()
    assert b"DISPLAY=:7" in lines
    assert {line.partition(b"=")[0] for line in lines} <= {
        *(b"PATH", b"HOME", b"LANG", b"DISPLAY", b"DBUS_SESSION_BUS_ADDRESS")
    }


# spec E33
async def test_without_args_they_must_be_the_configured_ones(tmp_path: Path) -> None:
    notify = NotifyCommand(("/bin/sh", "-c", "echo hi; exit 3"), 10.0, 8)
    async with opened_scene(tmp_path, notify=notify) as scene:
        form = "cmd=sh&arg=-c&arg=echo+hi%3b+exit+3"
        reply = await scene.run(form, line=LINE)
        assert (reply.body, reply.code) == (b"hi\n", 3)
        for other in ("cmd=sh", "cmd=sh&arg=-c&arg=id", form + "&arg="):
            reply = await scene.run(other, line=LINE)
            assert (reply.status, reply.code) == (403, 86)
            assert b"arguments" in reply.body


# spec toolexec 5: its fields are cmd and arg; others are ignored (spec toolexec 4).
# spec E33
@pytest.mark.parametrize("cwd", ["src", "/workspace/nowhere", ""])
async def test_a_directory_is_passed_over(tmp_path: Path, cwd: str) -> None:
    command = ("/usr/bin/printf", "%s", "{args}")
    reply = await notified(tmp_path, *command, form=f"cmd=printf&arg=1&cwd={cwd}")
    assert (reply.status, reply.body) == (200, b"1")


@pytest.mark.parametrize("name", ["/bin/sh", "bash", "..%2fsh", "SH"])
async def test_another_command_is_403(tmp_path: Path, name: str) -> None:
    reply = await notified(tmp_path, "/bin/sh", "{args}", form=f"cmd={name}")
    assert reply.status == 403
    assert reply.body.endswith(b"is not the configured command\n")


async def test_without_a_command_it_is_403(tmp_path: Path) -> None:
    reply = await notified(tmp_path, form="cmd=say")
    assert reply.status == 403
    assert b"no notification command" in reply.body


async def test_what_runs_too_long_is_408(tmp_path: Path) -> None:
    command = ("/bin/sleep", "1000")
    form = "cmd=sleep&arg=1000"
    reply = await notified(tmp_path, *command, form=form, timeout_s=0.1)
    assert (reply.status, reply.code) == (408, 124)


# A client that goes ends it, as it would a tool: nobody can ask for it again.
async def test_a_command_whose_client_is_gone_is_ended(tmp_path: Path) -> None:
    script = f"echo $$ >{tmp_path}/pid; exec sleep 1000"
    notify = NotifyCommand(("/bin/sh", "-c", script), 0.0, 8)
    pid = tmp_path / "pid"
    async with opened_scene(tmp_path, notify=notify) as scene:
        words = ("cmd=sh", "arg=-c", f"arg={quote(script)}")
        with await scene.connect() as sock:
            await send(sock, scene.request("&".join(words).encode(), line=LINE))
            await eventually(lambda: pid.exists() and pid.read_text().endswith("\n"))
            await eventually(lambda: scene.stage.events("exec.started"))
        await eventually(lambda: scene.stage.events("exec.ended"), 10.0)
        (ended,) = scene.stage.events("exec.ended")
        assert ended["code"] == 128 + signal.SIGINT
        assert not scene.tool.slots.used


async def test_a_command_that_is_not_there_is_500(tmp_path: Path) -> None:
    reply = await notified(tmp_path, "/nowhere/say", form="cmd=say")
    assert reply.status == 500


# attack 18: what the host lacks for it is given back, and so is its slot.
async def test_a_host_without_a_descriptor_for_it_keeps_no_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def lacking(path: str, flags: int, *args: int, **more: int) -> int:
        if path == "/":
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return opened(path, flags, *args, **more)

    notify = NotifyCommand(("/bin/true",), 10.0, 8)
    async with opened_scene(tmp_path, notify=notify) as scene:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", lacking)
            reply = await scene.run("cmd=true", line=LINE)
        assert (reply.status, reply.code) == (500, 86)
        assert not scene.tool.slots.used


async def test_it_has_its_own_refusals(scene: Scene) -> None:
    for proto in (None, "1"):
        reply = await scene.run("cmd=say", line=LINE, proto=proto)
        assert reply.status == 426
        assert reply.body == b"unsupported notify protocol; expected 2\n"
    assert (await scene.run("", line=LINE)).status == 400
    assert (await scene.run("cmd=say", line=LINE, token=None)).status == 401
