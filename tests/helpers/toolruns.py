"""Tools run through real sidecars of a real host, without the HTTP of ToolExec.

    async with sidecars_of(stage, {"n": {"kind": "node", "path": [bin]}}) as sidecars:
        child = await waiting_child(stage)
        ran = await run_tool(stage, sidecars, child, "node", b"-e", b"1")

The seam `routes.Routes` used as the server uses it: route, resolve, plan, spawn.
"""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import trio

from protocol.toolexec.token import ALL
from supervisor.children.child import Child
from supervisor.spawn.request import SpawnRequest
from supervisor.toolexec.routes import ToolRefusedError
from supervisor.toolexec.sidecar_section import SidecarSection, check_sidecars
from supervisor.toolexec.sidecars import Sidecars, open_sidecars
from tests.helpers.stage import Stage

WAIT = ("/bin/sleep", "1000")
"""A child that is only there to have tools run for it."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of one tool.

    Attributes:
        sidecar: which one ran it.
        code: its exit code, 128+n by signal.
        out: its stdout and stderr.
    """

    sidecar: str
    code: int
    out: bytes


def sections(**named: Mapping[str, Any]) -> dict[str, SidecarSection]:
    """Make sections of a configuration, checked as the configuration is."""
    found = msgspec.convert(named, type=dict[str, SidecarSection])
    assert not list(check_sidecars(found))
    return found


@asynccontextmanager
async def sidecars_of(
    stage: Stage, **named: Mapping[str, Any]
) -> AsyncIterator[Sidecars]:
    """Open sidecars on a host."""
    async with open_sidecars(stage.host, sections(**named)) as opened:
        yield opened


async def waiting_child(stage: Stage, name: str = "one", **changes: Any) -> Child:
    """Start a child with a root and a run directory of its own."""
    root, run_dir = stage.where / name / "root", stage.where / name / "run"
    for path in (root, run_dir):
        path.mkdir(parents=True)
    return await stage.spawn(*WAIT, root=str(root), run_dir=str(run_dir), **changes)


async def run_tool(
    stage: Stage, sidecars: Sidecars, child: Child, tool: str, *args: bytes, **more: Any
) -> Ran:
    """Run a tool as the server does; raises what the sidecars refuse."""
    cwd = more.get("cwd", b".")
    if not sidecars.is_permitted(child, tool, ALL):
        raise ToolRefusedError(403, b"")
    target = await sidecars.route(child, tool, cwd, ALL)
    cwd_fd = await target.open_cwd(cwd, child)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    null, line = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), -1
    try:
        plan = await target.command(child, tool, args, cwd_fd)
        if plan.reads_signals:
            os.close(null)
            null, line = os.pipe2(os.O_CLOEXEC)
        request = SpawnRequest(
            executable=plan.executable,
            argv=plan.argv,
            env=plan.env,
            cwd_fd=cwd_fd,
            fds=((null, 0), (writer, 1), (writer, 2)),
            rlimits=plan.rlimits,
        )
        process = await stage.host.launcher.spawn(request)
    finally:
        for fd in (cwd_fd, writer, null):
            os.close(fd)
    os.set_blocking(reader, False)
    out = b""
    while True:
        await trio.lowlevel.wait_readable(reader)
        more_out = os.read(reader, 65_536)
        if not more_out:
            break
        out += more_out
    os.close(reader)
    status = await process.wait_exit()
    if line >= 0:
        os.close(line)
    await process.wait_swept()
    process.close()
    code = 128 + status.signal if status.signal is not None else status.code
    assert code is not None
    return Ran(target.name, code, out)


def program(where: Path, name: str, script: str) -> str:
    """Make a shell script; return the directory it lies in."""
    path = where / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path.parent)
