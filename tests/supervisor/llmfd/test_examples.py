"""Each call of the design's examples, as it stands there, by the letters.

Only a path is another one: ``/path/to/output.txt`` is no place where a child may write.
Those that need a model (fork, spawn) are in ``tests/supervisor/llmfd/test_conversations.py``.
"""

import ast
import re
from collections.abc import Iterator
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
from supervisor.llmfd.table import FdNumber
from tests.helpers.contents import failed, text_of
from tests.helpers.sessions import Hall, hall

__all__ = ["hall"]

PROTECTED = "/root" + "/protected.txt"
FUNCTION = '''\
def process_data(rows):
    """Add rows."""
    return sum(rows)
'''
LINES = [f"# {number:03} " + "what was said of it " * 4 for number in range(1, 211)]
LINES[9:12] = FUNCTION.splitlines()
LINES[19] = LINES[39] = LINES[59] = ""
LINES[100] = "# error: the lines 101 and 131 tell of an ERROR"
LINES[130] = "# ERROR"
TEXT = "\n".join(LINES) + "\n"


@pytest.fixture
def process(hall: Hall) -> Iterator[Process]:
    """Return a process whose content is ``fd:12345``: 210 lines, 5 pages."""
    checkpoints = Checkpoints(str(hall.where / "checkpoints"))
    shared = ProcessParts(Store(), TOOLS, checkpoints=checkpoints, owner="child-1")
    made = Process(shared)
    made.files = ClientFiles(hall.fs, hall.connect().client)
    made.table.next_number = FdNumber(12345)
    made.add_text(TEXT, "file:report.py")
    yield made
    made.close()
    made.shared.temps.close()
    checkpoints.close()
    assert not made.shared.store.blobs


async def said(process: Process, example: str) -> ET.Element:
    """Do a call as it is written in Python; return its answer, parsed."""
    call = ast.parse(example.replace("/path/to/output", "output"), mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    args = [ast.literal_eval(arg) for arg in call.args]
    kwargs = {str(key.arg): ast.literal_eval(key.value) for key in call.keywords}
    return ET.fromstring(await process.call(call.func.id, *args, **kwargs))


def lines(first: int, last: int) -> str:
    """Return lines of the text."""
    return "".join(line + "\n" for line in LINES[first - 1 : last])


async def test_reading(process: Process) -> None:
    second = await said(process, 'read_fd(fd="fd:12345", page=2)')
    assert (second.tag, second.get("page"), second.get("pages")) == (
        *("fd_content", "2", "5"),
    )
    assert second.get("total_lines") == "210"
    first, last = map(int, second.get("lines", "").split("-"))
    assert text_of(second) == lines(first, last)
    whole = await said(process, 'read_fd(fd="fd:12345", read_all=True)')
    assert text_of(whole) == TEXT
    part = await said(process, 'read_fd(fd="fd:12345", start_line=45, end_line=90)')
    assert (text_of(part), part.get("lines")) == (lines(45, 90), "45-90")


async def test_the_examples_of_the_system_prompt(process: Process, hall: Hall) -> None:
    example = 'fd_to_file(fd="fd:12345", file_path="output.txt")'
    assert (await said(process, example)).get("success") == "true"
    assert (hall.root / "output.txt").read_text() == TEXT


@pytest.mark.parametrize(
    ("example", "there", "written"),
    [
        ('mode="write"', TEXT, TEXT),
        ('start_line=45, end_line=90, mode="write"', lines(45, 90), lines(45, 90)),
        ('mode="append"', "old\n" * 120 + TEXT, TEXT),
        (
            'insert_at_line=100, mode="insert"',
            "old\n" * 99 + TEXT + "old\n" * 21,
            TEXT,
        ),
    ],
)
async def test_writing(
    process: Process, hall: Hall, example: str, there: str, written: str
) -> None:
    (hall.root / "output.txt").write_text("old\n" * 120)
    answer = await said(
        process,
        f'fd_to_file(fd="fd:12345", file_path="/path/to/output.txt", {example})',
    )
    assert (hall.root / "output.txt").read_text() == there
    assert (answer.tag, answer.get("success")) == ("fd_write", "true")
    assert answer.findtext("message") == (
        "Content from fd:12345 successfully written to output.txt"
    )
    assert answer.findtext("stats/bytes") == str(len(written.encode()))
    assert answer.findtext("stats/lines") == str(written.count("\n"))


async def test_writing_a_page(process: Process, hall: Hall) -> None:
    example = (
        'fd_to_file(fd="fd:12345", file_path="/path/to/output.txt", page=2,'
        ' mode="write")'
    )
    await said(process, example)
    page = text_of(await said(process, 'read_fd(fd="fd:12345", page=2)'))
    assert (hall.root / "output.txt").read_text() == page


@pytest.mark.parametrize(
    ("example", "error", "details"),
    [
        (
            'read_fd(fd="fd:nonexistent")',
            ("not_found", "fd:nonexistent", "File descriptor fd:nonexistent not found"),
            None,
        ),
        (
            'read_fd(fd="fd:12345", page=100)',
            ("invalid_page", "fd:12345", "Invalid page number. Valid range: 1-5"),
            None,
        ),
        (
            f'fd_to_file(fd="fd:12345", file_path="{PROTECTED}")',
            ("file_operation", "fd:12345", "Cannot write to file: Permission denied"),
            f"Operation: write, Path: {PROTECTED}",
        ),
    ],
)
async def test_errors(
    process: Process, example: str, error: tuple[str, str, str], details: str | None
) -> None:
    answer = await said(process, example)
    assert failed(answer) == error
    assert answer.findtext("details") == details


async def test_checkpoints(process: Process) -> None:
    made = (await said(process, "checkpoint_process()")).get("id", "")
    process.add_text("later", "test")
    listed = await said(process, "list_checkpoints()")
    assert [row.get("id") for row in listed] == [made]
    restored = await said(process, f"restore_process({made!r})")
    assert (restored.get("checkpoint_id"), restored.get("fds")) == (made, "1")
    assert list(process.table.fds) == [12345]
    assert text_of(await said(process, 'read_fd(fd="fd-12345", read_all=True)')) == TEXT


async def test_searching(process: Process) -> None:
    example = 'search_fd(fd="fd-12345", query="ERROR", case_sensitive=False)'
    answer = await said(process, example)
    assert (answer.get("fd"), answer.get("matches")) == ("fd:12345", "2")
    assert [row.get("line") for row in answer] == ["101", "131"]


async def test_units(process: Process) -> None:
    third = await said(process, 'read_fd(fd="fd-12345", unit="paragraph", index=3)')
    assert text_of(third).strip("\n") == lines(41, 59).strip("\n")
    example = 'read_fd(fd="fd-12345", unit="function", name="process_data")'
    found = await said(process, example)
    assert text_of(found).strip("\n") == FUNCTION.strip("\n")


async def test_names(process: Process) -> None:
    await said(process, 'rename_fd(fd="fd-12345", name="error_logs")')
    named = await said(process, 'read_fd(name="error_logs", page=2)')
    again = await said(process, 'read_fd(fd="fd-12345", page=2)')
    assert ET.tostring(named) == ET.tostring(again)


async def test_sections(process: Process) -> None:
    await said(
        process,
        'mark_fd_section(fd="fd-12345", start_line=45, end_line=52,'
        ' ref_id="bug_details")',
    )
    example = 'get_fd_section(fd="fd-12345", ref_id="bug_details")'
    assert text_of(await said(process, example)) == lines(45, 52)
    listed = await said(process, 'list_fd_sections(fd="fd-12345")')
    assert [row.get("ref_id") for row in listed] == ["bug_details"]
    await said(process, 'delete_fd_section(fd="fd-12345", ref_id="bug_details")')
    assert failed(await said(process, example))[0] == "not_found"


async def test_temporary_files(process: Process) -> None:
    example = 'create_temp_file("This is shared content for multiple children")'
    made = (await said(process, example)).get("id", "")
    assert re.fullmatch(r"temp:[0-9]+", made)
    found = await said(process, f"read_temp_file({made!r})")
    assert text_of(found) == "This is shared content for multiple children"
    await said(process, f"delete_temp_file({made!r})")
    assert failed(await said(process, f"read_temp_file({made!r})"))[0] == "not_found"
