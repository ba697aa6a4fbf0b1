"""Working directories that lead out, asked of real sidecars over a real socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from supervisor.toolexec.service import open_toolexec
from supervisor.toolexec.settings import ToolExecSettings
from tests.helpers.stage import open_stage
from tests.helpers.toolruns import program, sidecars_of
from tests.helpers.toolscene import DirectoryRoutes, Scene, make_tenant

pytestmark = pytest.mark.slow

REFUSED = b"bad request: cwd is not a directory beneath /workspace\n"


def make_tree(top: Path) -> None:
    """Make a workspace: a directory, ways out of it, a file."""
    (top / "sub" / "deep").mkdir(parents=True)
    (top / "file").touch()
    outside = top.parent / f"{top.name}-evil"
    outside.mkdir()
    (top / "out").symlink_to(outside)
    (top / "up").symlink_to("..")
    (top / "etc").symlink_to("/etc")
    (top / "sub" / "near").symlink_to("deep")
    (top / "sub" / "proc").symlink_to("/proc/self/cwd")


@asynccontextmanager
async def with_sidecar(where: Path, *, own_workspace: bool) -> AsyncIterator[Scene]:
    """Open a host with one real sidecar; its tool says where it runs."""
    bin_dir = program(where / "bin", "go", "pwd -P")
    section = {"kind": "go", "path": [bin_dir]}
    top = where / ("shared" if own_workspace else "root")
    make_tree(top)
    if own_workspace:
        section["workspace"] = str(top)
    async with open_stage(where) as stage, sidecars_of(stage, g=section) as routes:
        settings = ToolExecSettings(log_dir=str(where), tcp=None)
        async with open_toolexec(stage.host, settings, routes) as tool:
            child = await make_tenant(stage, where / "root")
            yield Scene(stage, tool, DirectoryRoutes(top), child)
            await stage.host.stop(grace_s=0.0)


# ToolExec 4; attacks 2, 3, 11, 12: what leads out is 400, by `..` or by a link.
@pytest.mark.parametrize("own_workspace", [False, True], ids=["root", "own"])
# spec E35
async def test_no_working_directory_leads_out(
    tmp_path: Path, own_workspace: bool
) -> None:
    async with with_sidecar(tmp_path, own_workspace=own_workspace) as scene:
        top = scene.workspace
        ways_out = (
            "/workspace/..",
            "/workspace/../root-evil",
            "/workspace/sub/../..",
            "/workspace/sub/../../shared-evil",
            "/workspace/out",
            "/workspace/up",
            "/workspace/sub/../up/bin",
            "/workspace/etc",
            "/workspace/sub/proc",
            "/workspace/out/.",
            "/workspace/file",
            "/workspace/missing",
            "/workspacex",
            "/etc",
            "/",
            f"{top}/..",
            f"{top}/out",
            f"{top}-evil",
            f"{top}/sub/../../{top.name}-evil",
        )
        for cwd in ways_out:
            reply = await scene.run("tool=go", f"cwd={cwd}")
            assert (reply.status, reply.code) == (400, 86), cwd
            assert reply.body == REFUSED, cwd
        coded = await scene.run("tool=go", "cwd=%2fworkspace%2f%2e%2e")
        assert (coded.status, coded.body) == (400, REFUSED)
        # And what does not, is where the tool runs.
        within = {
            ".": top,
            "/workspace/sub": top / "sub",
            "/workspace/sub/near": top / "sub" / "deep",
            "/workspace/sub/../sub/deep": top / "sub" / "deep",
            f"{top}/sub": top / "sub",
        }
        for cwd, found in within.items():
            reply = await scene.curl("tool=go", f"cwd={cwd}")
            assert (reply.body, reply.code) == (f"{found}\n".encode(), 0), cwd
        assert not scene.tool.slots.used
