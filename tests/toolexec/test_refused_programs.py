"""Programs that execve(2) refuses: 126 and 127 are the tool's, all else is the host's."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from supervisor.toolexec.routes import SpawnPlan
from tests.helpers.toolscene import PATH, Reply, Scene

pytestmark = pytest.mark.slow

KIB = 1024


async def run_program(
    scene: Scene, path: Path, env: Mapping[str, str] | None = None, proto: str = "2"
) -> Reply:
    """Ask for a tool that is a program of this path."""

    async def command(*_: Any) -> SpawnPlan:
        return SpawnPlan(str(path), ("sh", "s3cret"), {"PATH": PATH, **(env or {})})

    scene.routes.command = command  # type: ignore[method-assign]
    return await scene.run("tool=sh&arg=s3cret", proto=proto)


def script(where: Path, first_line: str) -> Path:
    """Make an executable file that begins so."""
    path = where / "program"
    path.write_text(f"{first_line}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("proto", ["1", "2"])
@pytest.mark.parametrize(
    ("first_line", "code", "reason"),
    [
        ("#!/missing/x", 127, "it is there, but /missing/x is not: No such file or"),
        ("#!/no\x1b[2J\x07", 127, "it is there, but /no?[2J? is not: No such file"),
        ("#!/etc/passwd/x", 127, "Not a directory"),
        ("#!/usr", 126, "Permission denied"),
        ("no first line", 126, "Exec format error"),
    ],
)
# spec E23
async def test_the_journal_tells_of_a_tool_that_could_not_be_executed(
    scene: Scene, first_line: str, code: int, reason: str, proto: str
) -> None:
    path = script(scene.workspace, first_line)
    reply = await run_program(scene, path, proto=proto)
    assert (reply.status, reply.code) == (200, code)
    (failed,) = scene.stage.events("exec.failed")
    assert failed.pop("reason").startswith(reason)
    assert failed.pop("time")
    assert failed == {
        "event": "exec.failed",
        "child_id": scene.child.puppet.child.id,
        "exec_id": reply.headers[b"x-exec-id"].decode(),
        "tool": "sh",
        "sidecar": "directory",
        "code": code,
    }
    written = scene.stage.journal.read_text()
    assert "s3cret" not in written
    assert not scene.stage.events("exec.started")
    assert not scene.stage.events("exec.ended")


# What another start could do better, or the machine lacks, is no tool's exit code.
@pytest.mark.parametrize("proto", ["1", "2"])
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("itself", b"Too many levels of symbolic links"),
        ("written", b"Text file busy"),
        ("long", b"Argument list too long"),
    ],
)
# spec E23
async def test_another_refusal_is_500(
    scene: Scene, kind: str, why: bytes, proto: str
) -> None:
    path = scene.workspace / "program"
    if kind == "itself":
        script(scene.workspace, f"#!{path}")
    else:
        shutil.copy("/bin/true", path)
    env = {"LONG": "x" * 200 * KIB} if kind == "long" else None
    with path.open("r" if kind != "written" else "r+"):
        reply = await run_program(scene, path, env, proto)
    assert (reply.status, reply.code) == (500, 86)
    assert reply.body.endswith(why + b"\n")
    assert not scene.tool._slots.used
    assert not scene.stage.events("exec.failed")
