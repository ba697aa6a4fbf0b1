"""LLM fds and files of a dead file system: no other client waits (spec S5).

The files of the test are taken for those of NFS; whoever asks it for one in the Trio
thread, but for an OPEN whose name has just been answered for, is caught. FD 3 with such
files is in `tests/supervisor/fsproxy/test_distant.py`.
"""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostlib.linux import resolve
from supervisor.llmfd import Process, Store
from supervisor.llmfd.preloads import Preloads
from supervisor.llmfd.service import FdService
from tests.helpers.contents import asking, failed
from tests.helpers.mount_kinds import set_kind
from tests.helpers.sessions import Hall, hall
from vfs.backends import host
from vfs.backends.host_file import HostHandle, StagedHandle

__all__ = ["hall"]

WAIT = ("close", "drop", "size", "pread_wait", "append", "truncate")


@pytest.fixture
def caught(
    tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """Let the files of the test be distant ones; return what waited in this thread."""
    del no_leaks
    set_kind(monkeypatch, tmp_path, "nfs4")
    here = threading.current_thread()
    caught: list[str] = []
    answered: set[bytes] = set()
    open_beneath = resolve.open_beneath

    def opened(dir_fd: int, name: bytes, flags: int) -> int:
        if threading.current_thread() is not here:
            answered.add(name)
        elif name not in answered and name != b".":
            caught.append(f"open {name!r}")
        return open_beneath(dir_fd, name, flags)

    def watch(kind: type[HostHandle], name: str) -> None:
        call = getattr(kind, name)

        def watched(handle: HostHandle, *args: object, **more: object) -> object:
            if threading.current_thread() is here:
                caught.append(name)
            return call(handle, *args, **more)

        monkeypatch.setattr(kind, name, watched)

    for name in WAIT:
        watch(HostHandle, name)
    watch(StagedHandle, "publish")
    monkeypatch.setattr(host, "open_beneath", opened)
    yield caught
    assert not caught


def process_at(hall: Hall) -> Process:
    """Return the process of a client, with one content."""
    line = hall.connect()
    process = FdService(hall.fs, Store()).process_of(line.client)
    process.add_text("new\n", "test")
    return process


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("write", "new\n"), ("append", "old\nnew\n"), ("insert", "new\nold\n")],
)
async def test_an_export_asks_in_threads(
    hall: Hall, caught: list[str], mode: str, expected: str
) -> None:
    (hall.root / "out").write_text("old\n")
    more = {"insert_at_line": 1} if mode == "insert" else {"create": False}
    await asking(
        process_at(hall), "fd_to_file", fd="fd:1", file_path="out", mode=mode, **more
    )
    assert (hall.root / "out").read_text() == expected
    assert not caught


@pytest.mark.parametrize("mode", ["write", "append"])
async def test_an_export_that_fails_gives_up_in_threads(
    hall: Hall, caught: list[str], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hall.root / "out").write_text("old\n")
    process = process_at(hall)

    def refused(_: HostHandle, *__: object) -> int:
        raise OSError(28, os.strerror(28))

    for name in ("append", "pwrite"):
        monkeypatch.setattr(HostHandle, name, refused)
    answer = await asking(process, "fd_to_file", fd="fd:1", file_path="out", mode=mode)
    assert failed(answer)[0] == "file_operation"
    assert (hall.root / "out").read_text() == "old\n"
    assert not process.caller.files  # type: ignore[attr-defined]
    assert not caught


async def test_a_preload_is_read_in_threads(hall: Hall, caught: list[str]) -> None:
    (hall.root / "in").write_text("a file\n")
    process = process_at(hall)
    preloads = Preloads(process, process.spawn())
    await preloads.add_files(["in"])
    assert "a file" in preloads.shown[0]
    assert not caught
