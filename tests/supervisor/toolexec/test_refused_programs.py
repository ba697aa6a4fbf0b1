"""Programs that execve(2) refuses.

126 and 127 are the tool's, all else is the host's.
"""

import shutil
from typing import Any

import pytest

from supervisor.toolexec.routes import SpawnPlan
from tests.helpers.toolscene import PATH, Reply, Scene

pytestmark = pytest.mark.slow

KIB = 1024


class Program:
    """The program that every tool is."""

    def __init__(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = scene.workspace / "program"
        self.env = {"PATH": PATH}
        self._scene = scene
        monkeypatch.setattr(scene.routes, "command", self._command)

    async def _command(self, *_: Any) -> SpawnPlan:
        return SpawnPlan(str(self.path), ("sh", "s3cret"), self.env)

    def begin_with(self, line: str) -> None:
        """Be an executable file that begins so."""
        self.path.write_text(f"{line}\n")
        self.path.chmod(0o755)

    async def run(self, proto: str) -> Reply:
        """Ask for the tool."""
        return await self._scene.run("tool=sh&arg=s3cret", proto=proto)


@pytest.fixture
def program(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A program in the place of every tool."""
    return Program(scene, monkeypatch)


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
    scene: Scene, program: Program, first_line: str, code: int, reason: str, proto: str
) -> None:
    program.begin_with(first_line)
    reply = await program.run(proto)
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


# A failure that another start may not have, or a lack of the machine, is no tool's exit code.
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
    scene: Scene, program: Program, kind: str, why: bytes, proto: str
) -> None:
    if kind == "itself":
        program.begin_with(f"#!{program.path}")
    else:
        shutil.copy("/bin/true", program.path)
    if kind == "long":
        program.env["LONG"] = "x" * 200 * KIB
    with program.path.open("r" if kind != "written" else "r+"):
        reply = await program.run(proto)
    if kind == "written" and reply.code == 0:
        pytest.skip("Linux 6.11 executes what somebody writes")
    assert (reply.status, reply.code) == (500, 86)
    assert reply.body.endswith(why + b"\n")
    assert not scene.tool.slots.used
    assert not scene.stage.events("exec.failed")
