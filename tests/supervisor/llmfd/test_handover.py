"""The handed-over state, restored where there is less room."""

import os
from pathlib import Path

import pytest
from blake3 import blake3

from supervisor.llmfd import TOOLS, Allowance, Process, Shared, Store
from supervisor.llmfd.handover import Entering, Leaving

LINE = b"0123456789abcde\n"


def left(
    where: Path, size: int, max_memory: int
) -> tuple[Process, Leaving, Entering, Process]:
    """Return a process with a content just begun, and the one that it becomes.

    The second program has no directory for files, as if the disk were full.
    """
    store = Store(max_memory, str(where))
    process = Process(Shared(store, TOOLS, allowance=Allowance(1 << 30)))
    process.begun.put(None, LINE * (size // 16))
    leaving = Leaving(store)
    contents = leaving.contents()
    state = leaving.process(process)
    # exec(2) leaves descriptors: those of the first program stay its own here.
    for slots in contents.slots:
        slots.fd = os.dup(slots.fd)
    for writer in state.writers:
        writer.fd = os.dup(writer.fd) if writer.fd >= 0 else -1
    following = Store(max_memory, str(where / "missing"))
    shared = Shared(following, TOOLS, allowance=Allowance(1 << 30))
    entering = Entering(following, contents, leaving.shared, lambda _: shared)
    return process, leaving, entering, entering.process(state)


@pytest.mark.parametrize(
    ("size", "max_memory"), [(320_000, 1 << 28), (320_000, 65_536), (1 << 25, 1 << 28)]
)
def test_what_is_begun_needs_no_room_again(
    tmp_path: Path, no_leaks: None, size: int, max_memory: int
) -> None:
    del no_leaks
    process, _, entering, after = left(tmp_path, size, max_memory)
    allowance = after.shared.allowance
    assert allowance is not None
    assert allowance.used == size
    after.begun.put("t1", b"and completed")
    content = after.begun.take("t1")
    assert content.text.data[:] == LINE * (size // 16) + b"and completed"
    assert content.text.key == blake3(content.text.data[:]).digest()
    assert content.text.index.lines == size // 16 + 1
    assert allowance.used == 0
    after.shared.store.drop(content)
    after.close()
    entering.close()
    assert not after.shared.store.blobs
    assert after.shared.store.memory_bytes == 0
    process.close()


def test_what_is_begun_and_has_no_room_any_more_is_not_there(
    tmp_path: Path, no_leaks: None
) -> None:
    del no_leaks
    store = Store(1 << 28, str(tmp_path))
    process = Process(Shared(store, TOOLS))
    for text in (b"short", LINE * 20_000):
        process.begun.put(None, text)
    leaving = Leaving(store)
    contents, state = leaving.contents(), leaving.process(process)
    following = Store(65_536, str(tmp_path / "missing"))  # as it is configured by now
    shared = Shared(following, TOOLS, allowance=Allowance(1 << 30))
    entering = Entering(following, contents, leaving.shared, lambda _: shared)
    after = entering.process(state)
    assert [token for token, _ in after.begun] == ["t1"]
    assert shared.allowance is not None
    assert shared.allowance.used == 5
    assert after.begun.put(None, b"x") == "t3"
    after.close()
    entering.close()
    assert (following.blobs, following.memory_bytes, shared.allowance.used) == (
        {},
        0,
        0,
    )
    process.close()
