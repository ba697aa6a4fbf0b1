"""Every element of the answers, with attributes in order (llm-fd 3 and 7)."""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from supervisor.llmfd import (
    TOOLS,
    Checkpoints,
    ClientFiles,
    Process,
    ProcessParts,
    Store,
)
from tests.helpers.contents import failed
from tests.helpers.sessions import Hall, hall

__all__ = ["hall"]

TEXT = "# One\n\ntext\n\n# Two\n" + "line\n" * 2000
CONTENT = "fd page pages continued truncated lines total_lines"
FACTS = "fd source creation_time type page_size pages total_lines name"


@pytest.fixture
def process(hall: Hall, tmp_path: Path) -> Iterator[Process]:
    """Return a process with a text, fd:1, and bytes, fd:2."""
    checkpoints = Checkpoints(str(tmp_path / "checkpoints"))
    made = Process(
        ProcessParts(Store(), TOOLS, checkpoints=checkpoints, owner="child-1")
    )
    made.files = ClientFiles(hall.fs, hall.connect().client)
    made.add_text(TEXT, "test")
    made.add(made.shared.store.put(bytes(range(256)) * 20), "test")
    yield made
    made.close()
    made.shared.temps.close()
    checkpoints.close()
    assert not made.shared.store.blobs


def shape(element: ET.Element) -> str:
    """Return an element's tag and attributes."""
    return " ".join((element.tag, *element.attrib))


# The call, and the shapes of the answer and of its first part.
CALLS: list[tuple[str, dict[str, object], str, str]] = [
    ("wrap_output", {"text": TEXT}, "fd_result fd pages truncated lines total_lines", "message"),
    ("wrap_input", {"text": TEXT}, "fd_result fd pages truncated lines total_lines", "message"),
    ("read_fd", {"fd": "fd-1"}, f"fd_content {CONTENT}", ""),
    ("read_fd", {"fd": "fd:2", "page": 2}, f"fd_content {CONTENT} encoding", ""),
    ("read_fd", {"fd": "fd:1", "unit": "paragraph", "index": 2}, f"fd_content {CONTENT} unit index units", ""),
    ("read_fd", {"fd": "fd:1", "unit": "section", "name": "One"}, f"fd_content {CONTENT} unit name units", ""),
    ("read_fd", {"fd": "fd:1", "end_line": 1, "extract_to_new_fd": True}, "fd_extraction source_fd new_fd mode content_size", ""),
    ("fd_to_file", {"fd": "fd:1", "file_path": "a"}, "fd_write fd file_path success mode", "message"),
    ("fd_info", {"fd": "fd:1"}, f"fd_info {FACTS}", ""),
    ("list_fds", {}, "fd_list count", f"fd {FACTS}"),
    ("search_fd", {"fd": "fd:1", "query": "Two"}, "fd_search fd query matches returned truncated total_lines", "match line col lines"),
    ("search_fd", {"fd": "fd:1", "query": "line"}, "fd_search fd query matches returned truncated total_lines next_line", "match line col lines"),
    ("rename_fd", {"fd": "fd:1", "name": "x"}, "fd_rename fd name previous", ""),
    ("mark_fd_section", {"fd": "fd:1", "ref_id": "r", "start_line": 1}, "fd_section fd ref_id start_line end_line replaced", ""),
    ("get_fd_section", {"fd": "fd:1", "ref_id": "r"}, f"fd_content {CONTENT} ref_id", ""),
    ("list_fd_sections", {"fd": "fd:1"}, "fd_sections fd count", "section ref_id start_line end_line"),
    ("delete_fd_section", {"fd": "fd:1", "ref_id": "r"}, "fd_section_deleted fd ref_id", ""),
    ("checkpoint_process", {"label": "a"}, "checkpoint id created label fds bytes messages", ""),
    ("list_checkpoints", {}, "checkpoints count", "checkpoint id created label fds bytes messages"),
    ("create_temp_file", {"content": "x"}, "temp_file id version bytes", ""),
    ("write_temp_file", {"temp_file_id": "temp:1", "content": "y"}, "temp_file id version bytes", ""),
    ("read_temp_file", {"temp_file_id": "temp:1"}, "temp_content id version", ""),
    ("write_temp_file", {"temp_file_id": "temp:1", "content": "z", "version": 1}, "fd_error type fd", "message"),
    ("delete_temp_file", {"temp_file_id": "temp:1"}, "temp_deleted id", ""),
    ("read_fd", {"fd": "fd:99"}, "fd_error type fd", "message"),
]  # fmt: skip


async def test_every_element_has_its_attributes_in_order(process: Process) -> None:
    for name, arguments, whole, first in CALLS:
        answer = ET.fromstring(await process.call(name, **arguments))
        assert shape(answer) == whole, name
        assert (shape(answer[0]) if len(answer) else "") == first, name
    listed = ET.fromstring(await process.call("list_checkpoints"))
    made = listed[0].get("id")
    answer = ET.fromstring(await process.call("restore_process", checkpoint_id=made))
    assert shape(answer) == "restore checkpoint_id fds messages"
    called = {name for name, *_ in CALLS} | {"restore_process"}
    assert called == TOOLS.keys() - {"delete_checkpoint", "keep_fds", "tool_schemas"}


# Errors say the descriptor as answers print it, however it was written.
@pytest.mark.parametrize(
    ("fd", "printed"),
    [("fd:9", "fd:9"), ("fd-9", "fd:9"), ("fd:09", "fd:09"), ("fd:0", "fd:0"), ("9", "9")],
)  # fmt: skip
async def test_an_unknown_descriptor_is_named(
    process: Process, fd: str, printed: str
) -> None:
    answer = ET.fromstring(await process.call("read_fd", fd=fd))
    text = f"File descriptor {printed} not found"
    assert failed(answer) == ("not_found", printed, text)


async def test_a_conflict_says_both_versions(process: Process) -> None:
    await process.call("create_temp_file", "a")
    await process.call("write_temp_file", "temp:1", "b")
    call = {"temp_file_id": "temp:1", "content": "c", "version": 1}
    answer = ET.fromstring(await process.call("write_temp_file", **call))
    assert failed(answer) == ("conflict", "", "Temporary file temp:1 has changed")
    assert answer.findtext("details") == "Expected version: 1, current: 2"


# `create` and `exist_ok` mean the same in each mode.
@pytest.mark.parametrize("mode", ["write", "append", "insert"])
@pytest.mark.parametrize("there", [False, True])
async def test_what_may_not_be_made_or_changed_is_not(
    process: Process, hall: Hall, mode: str, there: bool
) -> None:
    if there:
        (hall.root / "a").write_text("old")
    call: dict[str, object] = {"fd": "fd:1", "file_path": "a", "mode": mode}
    call["exist_ok" if there else "create"] = False
    if mode == "insert":
        call["insert_at_line"] = 1
    answer = ET.fromstring(await process.call("fd_to_file", **call))
    reason = "File exists" if there else "No such file or directory"
    assert failed(answer) == (
        *("file_operation", "fd:1", f"Cannot write to file: {reason}"),
    )
    assert answer.findtext("details") == f"Operation: {mode}, Path: a"
    left = [(path.name, path.read_text()) for path in hall.root.iterdir()]
    assert left == ([("a", "old")] if there else [])
