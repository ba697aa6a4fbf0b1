"""A tool's working directory: beneath the workspace, or refused."""

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.toolexec import workspace
from supervisor.toolexec.routes import ToolRefusedError

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def held(tmp_path: Path, no_leaks: None) -> Iterator[int]:
    """A workspace `w` with a directory, beside a twin and with links."""
    del no_leaks
    top = tmp_path / "w"
    (top / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "w-evil").mkdir()
    (top / "file").touch()
    (top / "out").symlink_to(tmp_path / "w-evil")
    (top / "up").symlink_to("..")
    (top / "near").symlink_to("sub/deep")
    (tmp_path / "alias").symlink_to(top)
    (top / "wörk\n").mkdir()
    fd = os.open(top, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


async def opened(fd: int, cwd: bytes) -> str:
    """Open a working directory; return where it is."""
    found = await workspace.open_cwd(fd, cwd)
    try:
        return workspace.path_of(found)
    finally:
        os.close(found)


# ToolExec 4: what a working directory may be.
@pytest.mark.parametrize(
    ("cwd", "where"),
    [
        (b".", ""),
        (b"/workspace", ""),
        (b"/workspace/", ""),
        (b"/workspace//sub", "/sub"),
        (b"/workspace/sub/deep", "/sub/deep"),
        (b"/workspace/sub/../sub/.", "/sub"),
        (b"/workspace/near", "/sub/deep"),
        ("/workspace/wörk\n".encode(), "/wörk\n"),
    ],
)
async def test_names_beneath_the_workspace(
    held: int, tmp_path: Path, cwd: bytes, where: str
) -> None:
    assert await opened(held, cwd) == f"{tmp_path}/w{where}"


@pytest.mark.parametrize("tail", ["w", "w/", "w/sub", "alias/sub", "w-evil/../w/sub"])
async def test_a_host_path_that_leads_beneath_the_workspace(
    held: int, tmp_path: Path, tail: str
) -> None:
    found = await opened(held, os.fsencode(tmp_path / "x")[:-1] + tail.encode())
    assert found == f"{tmp_path}/w" + ("/sub" if "sub" in tail else "")


# ToolExec 4; attacks 2, 3, 11, 12: and what it may not be.
@pytest.mark.parametrize(
    "cwd",
    [
        b"",
        b"sub",
        b"./sub",
        b"..",
        b"/",
        b"/etc",
        b"/workspacex",
        b"/workspace/..",
        b"/workspace/../w",
        b"/workspace/sub/../../w",
        b"/workspace/out",
        b"/workspace/up",
        b"/workspace/up/w",
        b"/workspace/file",
        b"/workspace/none",
        b"/workspace/sub\0",
        b"/workspace/" + b"a/" * 3000,
        b"/proc/self/root",
        b"/proc/self/cwd",
    ],
)
async def test_everything_else_gets_one_answer(held: int, cwd: bytes) -> None:
    with pytest.raises(ToolRefusedError) as refused:
        await opened(held, cwd)
    assert refused.value.status == 400
    text = b"bad request: cwd is not a directory beneath /workspace\n"
    assert refused.value.body == text


@pytest.mark.parametrize("tail", ["w-evil", "w/out", "w/up", "w/..", "w/file", "none"])
async def test_a_host_path_that_leads_elsewhere(
    held: int, tmp_path: Path, tail: str
) -> None:
    with pytest.raises(ToolRefusedError):
        await opened(held, os.fsencode(tmp_path) + b"/" + tail.encode())


async def test_the_whole_file_system_may_be_a_workspace(tmp_path: Path) -> None:
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        assert await opened(fd, os.fsencode(tmp_path)) == str(tmp_path)
        assert await opened(fd, b".") == "/"
    finally:
        os.close(fd)


@pytest.mark.parametrize("cwd", [b".", b"/workspace/sub", b"PATH"])
async def test_a_host_without_descriptors_does_not_say_that_nothing_is_there(
    held: int, cwd: bytes
) -> None:
    # attack 18
    cwd = cwd.replace(b"PATH", os.fsencode(workspace.path_of(held)))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    await opened(held, cwd)  # resources beside descriptors are there from now on
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError) as refused:  # noqa: PT011 - the number counts
            await workspace.open_cwd(held, cwd)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert refused.value.errno == errno.EMFILE
