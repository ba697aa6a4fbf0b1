"""LLM_CHAT with files of a file system that may not answer (spec S5, L14).

The files of the test are taken for those of NFS; whoever closes one in the Trio thread,
or looks into it there, is caught. The use of such files by FD 3 is in
`tests/supervisor/fsproxy/test_distant.py`.
"""

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from tests.helpers.mount_kinds import set_kind
from tests.helpers.stage import Stage, open_model_stage
from vfs.backends.host_file import HostHandle, StagedHandle
from vfs.places import PUBLISH_ON_CLOSE

CLOSED = ("close", "drop", "pread_wait", "append")


@pytest.fixture
async def distant(
    tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stage]:
    """Return a host with a model whose files are distant."""
    del no_leaks
    set_kind(monkeypatch, tmp_path, "nfs4")
    here = threading.current_thread()
    caught = []

    def watch(kind: type[HostHandle], name: str) -> None:
        call = getattr(kind, name)

        def watched(handle: HostHandle, *args: object, **more: object) -> object:
            if threading.current_thread() is here:
                caught.append(name)
            return call(handle, *args, **more)

        monkeypatch.setattr(kind, name, watched)

    for name in CLOSED:
        watch(HostHandle, name)
    watch(StagedHandle, "publish")
    async with open_model_stage(tmp_path) as opened:
        yield opened
    assert not caught


# spec L14, S5
@pytest.mark.parametrize("publish", ["direct", PUBLISH_ON_CLOSE])
async def test_files_of_a_call_are_closed_in_threads(
    distant: Stage, publish: str
) -> None:
    root = distant.root
    (root / "in").write_text("text")
    (root / "old").write_text("old")
    line = distant.connect(distant.hall.policy(publish=publish))
    reply = await line.chat(b"a", inputs=b"in", outputs=b"old\nnew")
    assert reply.line.startswith(b"OK ")
    for name in ("old", "new"):
        assert (root / name).read_text() == reply.text
    # A failed call leaves them as they were; what was made for the check goes.
    reply = await line.chat(b"!broken", inputs=b"in", outputs=b"old\nnewer")
    assert reply.line.startswith(b"ERROR ")
    assert not (root / "newer").exists()
    assert (await line.chat(b"a", inputs=b"in\nno")).line == (
        b"ERROR failed to read input files data"
    )
    assert not line.session.files


# A host whose user has all the threads it may have: the call is refused, the client stays.
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"inputs": b"in"}, b"ERROR failed to read input files data"),
        (
            {"outputs": b"in"},
            b"ERROR failed to open file 'in': Resource temporarily unavailable",
        ),
    ],
)
async def test_without_a_thread_a_call_is_refused(
    distant: Stage,
    files: dict[str, bytes],
    expected: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    (distant.root / "in").write_text("text")
    line = distant.connect()
    with monkeypatch.context() as patched:
        patched.setattr(trio.to_thread, "run_sync", none)
        assert (await line.chat(b"a", **files)).line == expected
    assert (await line.chat(b"a")).line.startswith(b"OK ")
