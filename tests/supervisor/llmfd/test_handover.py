"""The handed-over state, restored where there is less room."""

import os
from pathlib import Path

import pytest
from blake3 import blake3

from supervisor.llmfd import TOOLS, Allowance, Process, ProcessParts, Store
from supervisor.llmfd import blob_files as files_module
from supervisor.llmfd.memory_file import MemoryFile
from supervisor.llmfd.process import ProcessState

LINE = b"0123456789abcde\n"


def left(
    process: Process, where: Path, max_memory: int
) -> tuple[MemoryFile, ProcessState, Process]:
    """Return what a process leaves, and the process that it becomes."""
    memory = MemoryFile()
    contents = process.shared.store.snapshot(memory)
    state = process.snapshot(0, memory)
    following = Store(max_memory, str(where))
    following.restore(contents, memory)
    shared = ProcessParts(following, TOOLS, allowance=Allowance(1 << 30))
    return memory, state, Process.restore(state, shared, memory)


@pytest.mark.parametrize(
    ("size", "max_memory"), [(320_000, 1 << 28), (320_000, 65_536), (1 << 25, 1 << 28)]
)
def test_a_begun_content_needs_no_room_again(
    tmp_path: Path, no_leaks: None, size: int, max_memory: int
) -> None:
    del no_leaks
    store = Store(max_memory, str(tmp_path))
    process = Process(ProcessParts(store, TOOLS, allowance=Allowance(1 << 30)))
    process.begun.put(None, LINE * (size // 16))
    memory, _, after = left(process, tmp_path, max_memory)
    allowance, following = after.shared.allowance, after.shared.store
    assert allowance is not None
    assert allowance.used == size
    assert len(os.listdir(tmp_path)) == (following.memory_bytes == 0)
    after.begun.put("t1", b"and completed")
    content = after.begun.take("t1")
    assert content.text.data[:] == LINE * (size // 16) + b"and completed"
    assert content.text.key == blake3(content.text.data[:]).digest()
    assert content.text.index.lines == size // 16 + 1
    assert allowance.used == 0
    following.drop(content)
    after.close()
    memory.close()
    assert (following.blobs, following.memory_bytes) == ({}, 0)
    for one in (following, store):
        one.close()


@pytest.mark.parametrize("max_memory", [1 << 28, 10])
def test_contents_are_where_they_were(
    tmp_path: Path, no_leaks: None, max_memory: int
) -> None:
    del no_leaks
    store = Store(max_memory, str(tmp_path))
    process = Process(ProcessParts(store, TOOLS))
    data = ("\N{SNOWMAN}\n" * 30_000).encode()
    for content in (store.put(data), store.put(b"\xff" * 3000)):
        process.add(content, "test")
    files = os.listdir(tmp_path)
    memory, _, after = left(process, tmp_path, max_memory)
    following = after.shared.store
    assert os.listdir(tmp_path) == files
    assert following.memory_bytes == store.memory_bytes
    text, binary = (fd.content for fd in after.table.fds.values())
    assert (text.text.data[:], binary.original.data[:]) == (data, b"\xff" * 3000)
    assert (text.text.index.lines, text.text.index.chars) == (30_000, 60_000)
    assert len(text.text.pages(4000)) == 15
    memory.close()
    for one in (following, store):
        one.close()


@pytest.mark.parametrize("lost", ["memory", "file"])
def test_a_begun_content_that_cannot_be_continued_is_dropped(
    tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    del no_leaks
    store = Store(1 << 28 if lost == "memory" else 65_536, str(tmp_path))
    process = Process(ProcessParts(store, TOOLS))
    for text in (b"short", LINE * 20_000):
        process.begun.put(None, text)
    for file in tmp_path.iterdir():
        os.truncate(file, 100)

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        # There is less memory by now, and the disk is full.
        patch.setattr(files_module.BlobFiles, "append", full)
        memory, _, after = left(process, tmp_path, 65_536)
    shared = after.shared
    assert [token for token in ("t1", "t2") if token in after.begun] == ["t1"]
    assert shared.allowance is not None
    assert shared.allowance.used == 5
    assert after.begun.put(None, b"x") == "t3"
    after.close()
    memory.close()
    following = shared.store
    assert (following.blobs, following.memory_bytes, shared.allowance.used) == (
        {},
        0,
        0,
    )
    assert os.listdir(tmp_path) == []
    for one in (following, store):
        one.close()
