"""Each call as the design words it: arguments, answers, errors."""

import ast
import base64
import json

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from supervisor.llmfd import Process, UnknownCallError
from tests.helpers.contents import (
    answer_of,
    ask,
    asking,
    failed,
    holding,
    process,
    text_of,
)

LINES = "".join(f"line {n}\n" for n in range(1, 211))


def said(text: str, asked: Process) -> bytes:
    """Do a call that is written as the design writes it: `read_fd(fd="fd:1")`."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    args = [ast.literal_eval(arg) for arg in call.args]
    kwargs = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    return answer_of(asked, call.func.id, *args, **kwargs)


def of_the_design() -> Process:
    """Return a process with fd:12345, 5 pages of 210 lines, a part of them a program."""
    made = process(400)
    made.table.next_number = 12345
    text = LINES.replace("line 50\n", "ERROR 50\n").replace("line 60\n", "\n\n\n")
    made.add(made.shared.store.put(text.encode()), "tool:github_search")
    made.table.next_number = 12350
    return made


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ('read_fd(fd="fd:12345", page=2)', '<fd_content fd="fd:12345" page="2" pages='),
        (
            'read_fd(fd="fd:12345", read_all=True)',
            (
                '<fd_content fd="fd:12345" page="all" pages="5" continued="false"'
                ' truncated="false" lines="1-212" total_lines="212">'
            ),
        ),
        (
            'read_fd(fd="fd:12345", start_line=45, end_line=90)',
            (
                '<fd_content fd="fd:12345" page="lines" pages="5" continued="false"'
                ' truncated="false" lines="45-90" total_lines="212">\nline 45\n'
            ),
        ),
        (
            'read_fd(fd="fd:nonexistent")',
            (
                '<fd_error type="not_found" fd="fd:nonexistent">\n'
                "  <message>File descriptor fd:nonexistent not found</message>\n</fd_error>"
            ),
        ),
        (
            'read_fd(fd="fd:12345", page=100)',
            (
                '<fd_error type="invalid_page" fd="fd:12345">\n'
                "  <message>Invalid page number. Valid range: 1-5</message>\n</fd_error>"
            ),
        ),
        (
            'search_fd(fd="fd-12345", query="ERROR", case_sensitive=False)',
            (
                '<fd_search fd="fd:12345" query="ERROR" matches="1" returned="1"'
                ' truncated="false" total_lines="212">\n'
                '  <match line="50" col="1" lines="48-52">\nline 48\nline 49\nERROR 50\n'
            ),
        ),
        (
            'read_fd(fd="fd-12345", unit="paragraph", index=2)',
            (
                '<fd_content fd="fd:12345" page="paragraph" pages="5" continued="false"'
                ' truncated="false" lines="63-212" total_lines="212" unit="paragraph"'
                ' index="2" units="2">\nline 61\n'
            ),
        ),
        (
            'rename_fd(fd="fd-12345", name="error_logs")',
            '<fd_rename fd="fd:12345" name="error_logs" previous=""/>',
        ),
        (
            (
                'mark_fd_section(fd="fd-12345", start_line=45, end_line=52,'
                ' ref_id="bug_details")'
            ),
            (
                '<fd_section fd="fd:12345" ref_id="bug_details" start_line="45"'
                ' end_line="52" replaced="false"/>'
            ),
        ),
        (
            'list_fd_sections(fd="fd-12345")',
            '<fd_sections fd="fd:12345" count="0"/>',
        ),
        (
            'create_temp_file("This is shared content for multiple children")',
            '<temp_file id="temp:1" version="1" bytes="44"/>',
        ),
    ],
)
def test_the_calls_of_the_design_work_as_written(text: str, begins: str) -> None:
    assert said(text, of_the_design()).decode().startswith(begins)


def test_calls_of_the_design_that_follow_another() -> None:
    made = of_the_design()
    said('rename_fd(fd="fd-12345", name="error_logs")', made)
    assert b'page="2"' in said('read_fd(name="error_logs", page=2)', made)
    said(
        'mark_fd_section(fd="fd-12345", start_line=45, end_line=52, ref_id="bug")', made
    )
    got = said('get_fd_section(fd="fd-12345", ref_id="bug")', made)
    assert got.startswith(
        b'<fd_content fd="fd:12345" page="section" pages="5" continued="false"'
        b' truncated="false" lines="45-52" total_lines="212" ref_id="bug">\nline 45\n'
    )
    gone = said('delete_fd_section(fd="fd-12345", ref_id="bug")', made)
    assert gone == b'<fd_section_deleted fd="fd:12345" ref_id="bug"/>'
    said('create_temp_file("shared")', made)
    assert said('read_temp_file("temp:1")', made) == (
        b'<temp_content id="temp:1" version="1">\nshared\n</temp_content>'
    )
    assert said('delete_temp_file("temp:1")', made) == b'<temp_deleted id="temp:1"/>'
    assert b'type="not_found"' in said('read_temp_file("temp:1")', made)


def test_there_is_no_close() -> None:
    with pytest.raises(UnknownCallError):
        answer_of(process(), "close_fd", fd="fd:1")


# Thresholds


@pytest.mark.parametrize(("extra", "wrapped"), [(-1, False), (0, False), (1, True)])
@pytest.mark.parametrize("letter", ["a", "é", "😀"])
def test_longer_than_the_limit_means_more_characters(
    extra: int, letter: str, wrapped: bool
) -> None:
    text = letter * (8000 + extra)
    for name in ("wrap_output", "wrap_input"):
        answer = answer_of(process(), name, text=text)
        assert answer.startswith(b"<fd_result ") is wrapped
        if not wrapped:
            assert answer.decode() == text


def test_a_result_says_what_was_exceeded_and_shows_page_1() -> None:
    made = process(4000)
    result = ask(made, "wrap_output", text=LINES * 10, source="tool:web_search")
    assert result.findtext("message") == (
        "Output exceeds 8000 characters. Use read_fd to read more pages."
    )
    page = ask(made, "read_fd", fd="fd:1", page=1)
    assert text_of(result.find("preview")) == text_of(page)
    for word in ("fd", "pages", "truncated", "lines", "total_lines"):
        assert result.get(word) == page.get(word)
    assert ask(made, "fd_info", fd="fd:1").get("source") == "tool:web_search"


def test_a_long_input_says_so_in_its_own_words() -> None:
    result = ask(process(), "wrap_input", text=LINES * 10)
    assert result.findtext("message") == (
        "Large user input has been stored in a file descriptor."
    )


def test_user_input_is_not_stored_if_that_is_turned_off() -> None:
    made = process(page_input=False)
    assert answer_of(made, "wrap_input", text=LINES * 10).decode() == LINES * 10
    assert not made.table.fds


def test_errors_and_answers_of_the_tools_themselves_go_on_as_they_are() -> None:
    made = process()
    text = "x" * 9000
    assert answer_of(made, "wrap_output", text=text, is_error=True).decode() == text
    assert (
        answer_of(made, "wrap_output", text=text, source="tool:read_fd").decode()
        == text
    )
    assert not made.table.fds


def test_blocks_are_wrapped_one_by_one() -> None:
    blocks = [
        {"type": "text", "text": "short"},
        {"type": "text", "text": "x" * 9000},
        {"type": "image", "data": "y" * 9000},
        {"type": "text", "text": "z" * 9000, "more": 1},
    ]
    answer = json.loads(answer_of(process(), "wrap_output", blocks=blocks))
    assert answer[0] == blocks[0]
    assert answer[2] == blocks[2]
    assert answer[1]["text"].startswith('<fd_result fd="fd:1" pages="3"')
    assert answer[3]["text"].startswith('<fd_result fd="fd:2" pages="3"')
    assert answer[3]["more"] == 1
    assert json.loads(answer_of(process(), "wrap_output", blocks=[])) == []


# Binary


@pytest.mark.parametrize(
    "data", [b"\xff\xfe", b"a\x00b", b"\x1b[0m", "\ufffe".encode(), b"\xe2\x82"]
)
def test_what_is_no_text_is_served_as_base64(data: bytes) -> None:
    made = holding(data * 3)
    answer = ask(made, "read_fd", fd="fd:1")
    assert answer.get("encoding") == "base64"
    assert base64.b64decode(text_of(answer)) == data * 3
    assert (answer.get("lines"), answer.get("total_lines")) == ("1-1", "1")
    assert ask(made, "fd_info", fd="fd:1").get("type") == "binary"
    search = ask(made, "search_fd", fd="fd:1", query="a")
    assert failed(search)[0] == "invalid_parameter"


@given(st.binary(min_size=1, max_size=200), st.integers(1, 50))
def test_any_bytes_come_back(data: bytes, page_size: int) -> None:
    made = holding(data, page_size)
    first = ask(made, "read_fd", fd="fd:1")
    text = "".join(
        text_of(ask(made, "read_fd", fd="fd:1", page=number))
        for number in range(1, int(first.get("pages", "")) + 1)
    )
    binary = first.get("encoding") == "base64"
    assert (base64.b64decode(text) if binary else text.encode()) == data


def test_text_that_came_as_base64_is_text() -> None:
    made = process()
    encoded = base64.b64encode(("é" * 9000).encode()).decode()
    assert ask(made, "wrap_output", base64=encoded).get("encoding") is None
    assert answer_of(made, "wrap_output", base64="aGk=") == b"hi"
    bad = ask(made, "wrap_output", base64="a\n")
    assert failed(bad)[0] == "invalid_parameter"


def test_a_lone_surrogate_is_refused() -> None:
    for name in ("wrap_output", "wrap_input"):
        answer = ask(process(), name, text="a\ud800" * 9000)
        assert failed(answer)[0] == "invalid_parameter"


# Selectors


@pytest.mark.parametrize(
    "arguments",
    [
        {"page": 1, "read_all": True},
        {"page": 1, "start_line": 1},
        {"read_all": True, "end_line": 1},
        {"start_line": 1, "unit": "paragraph"},
        {"mode": "page", "page": 1},
        {"mode": "words"},
        {"start": 1},
        {"index": 1},
        {"unit": "paragraph", "index": 1, "name": "a"},
        {"unit": "chapter"},
    ],
)
def test_selectors_exclude_each_other(arguments: dict[str, object]) -> None:
    answer = ask(holding(LINES), "read_fd", fd="fd:1", **arguments)
    assert failed(answer)[:2] == ("invalid_parameter", "fd:1")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"page": 0}, "invalid_page"),
        ({"page": -1}, "invalid_page"),
        ({"page": 10**30}, "invalid_page"),
        ({"start_line": 0}, "invalid_range"),
        ({"end_line": 0}, "invalid_range"),
        ({"start_line": 211}, "invalid_range"),
        ({"start_line": 5, "end_line": 4}, "invalid_range"),
        ({"mode": "page", "start": 99}, "invalid_page"),
        ({"mode": "line", "start": 1, "count": 0}, "invalid_range"),
        ({"mode": "char", "start": -1}, "invalid_range"),
        ({"mode": "char", "start": 10**20}, "invalid_range"),
        ({"unit": "paragraph", "index": 9}, "invalid_range"),
        ({"unit": "section", "name": "none"}, "not_found"),
    ],
)
def test_what_is_not_there_is_told(arguments: dict[str, object], kind: str) -> None:
    answer = ask(holding(LINES), "read_fd", fd="fd:1", **arguments)
    assert failed(answer)[:2] == (kind, "fd:1")


def test_an_end_beyond_the_end_is_clipped_and_told() -> None:
    answer = ask(holding(LINES), "read_fd", fd="fd:1", start_line=205, end_line=999)
    assert answer.get("lines") == "205-210"
    answer = ask(holding(LINES), "read_fd", fd="fd:1", end_line=2)
    assert text_of(answer) == "line 1\nline 2\n"


def test_null_is_the_same_as_absent() -> None:
    answer = ask(holding(LINES), "read_fd", fd="fd:1", page=None, read_all=False)
    assert answer.get("page") == "1"


def test_with_unit_the_name_is_the_units() -> None:
    made = holding("# One\n\ntext\n\n# Two\n")
    ask(made, "rename_fd", fd="fd:1", name="One")
    answer = ask(made, "read_fd", unit="section", name="One")
    assert failed(answer) == (
        "invalid_parameter",
        "",
        "Missing parameter: fd (with unit, name is the name of the unit)",
    )
    answer = ask(made, "read_fd", fd="fd:1", unit="section", name="One")
    assert text_of(answer) == "# One\n\ntext\n\n"


def test_a_part_may_become_a_content_of_its_own() -> None:
    made = holding(LINES, 400)
    answer = ask(
        made,
        "read_fd",
        fd="fd:1",
        mode="line",
        start=3,
        count=2,
        extract_to_new_fd=True,
    )
    assert answer.attrib == {
        "source_fd": "fd:1",
        "new_fd": "fd:2",
        "mode": "line",
        "content_size": "14",
    }
    assert text_of(ask(made, "read_fd", fd="fd:2")) == "line 3\nline 4\n"
    assert ask(made, "fd_info", fd="fd:2").get("source") == "extract:fd:1"


# Names and sections


@pytest.mark.parametrize(
    "name", ["", "fd:1", "FD-2", "fd:x", "7", "temp:1", " a", "a\nb", "x" * 201]
)
def test_a_name_that_is_none_is_refused(name: str) -> None:
    answer = ask(holding(LINES), "rename_fd", fd="fd:1", name=name)
    assert failed(answer)[:2] == ("invalid_parameter", "fd:1")


def test_a_name_is_one_descriptors() -> None:
    made = holding(LINES)
    made.add_text("other", "test")
    ask(made, "rename_fd", fd="fd:1", name="logs")
    again = ask(made, "rename_fd", fd="fd:1", name="logs")
    assert again.get("previous") == "logs"
    taken = ask(made, "rename_fd", fd="fd:2", name="logs")
    assert failed(taken)[2] == "Name logs is taken by fd:1"
    assert failed(ask(made, "read_fd", name="nobody"))[0] == "not_found"
    ask(made, "rename_fd", fd="fd:1", name="old")
    assert ask(made, "rename_fd", fd="fd:2", name="logs").get("previous") == ""
    assert failed(ask(made, "read_fd"))[0] == "invalid_parameter"


def test_ten_thousand_sections() -> None:
    made = holding(LINES)

    async def mark() -> None:
        for number in range(10_000):
            line = 1 + number % 210
            await made.call("mark_fd_section", "fd:1", line, None, f"s{number}")

    trio.run(mark)
    assert ask(made, "list_fd_sections", fd="fd:1").get("count") == "10000"
    marked = ask(made, "mark_fd_section", "fd:1", 3, 999, "s5")
    assert (marked.get("replaced"), marked.get("end_line")) == ("true", "210")
    for arguments in ({"start_line": 211}, {"start_line": 3, "end_line": 2}):
        answer = ask(made, "mark_fd_section", fd="fd:1", ref_id="x", **arguments)
        assert failed(answer)[0] == "invalid_range"
    for name in ("get_fd_section", "delete_fd_section"):
        assert failed(ask(made, name, fd="fd:1", ref_id="x"))[0] == "not_found"


def test_a_descriptor_tells_what_it_is() -> None:
    made = process(400)
    made.add(made.shared.store.put(b"def f():\n    return 1\n"), "file:a.py")
    made.add(made.shared.store.put(b'{"a": 1}'), "tool:x")
    made.add(made.shared.store.put(b"just words"), "tool:x")
    rows = list(ask(made, "list_fds"))
    assert [row.get("type") for row in rows] == ["python", "json", "text"]
    info = ask(made, "fd_info", fd="fd:1")
    assert list(info.attrib) == [
        *("fd", "source", "creation_time", "type", "page_size", "pages"),
        *("total_lines", "name"),
    ]
    assert (info.get("creation_time") or "").endswith("Z")
    assert info.attrib == rows[0].attrib


# Temporary files


def test_a_temporary_file_is_shared_and_has_versions() -> None:
    one = process()
    other = one.fork()
    ask(one, "create_temp_file", content="first")
    wrote = ask(other, "write_temp_file", "temp:1", "second", 1)
    assert wrote.attrib == {"id": "temp:1", "version": "2", "bytes": "6"}
    lost = ask(one, "write_temp_file", "temp:1", "third", 1)
    assert failed(lost)[0] == "conflict"
    assert lost.findtext("details") == "Expected version: 1, current: 2"
    assert text_of(ask(one, "read_temp_file", "temp:1")) == "second"
    ask(one, "write_temp_file", "temp:1", "fourth")
    assert ask(other, "read_temp_file", "temp:1").get("version") == "3"
    ask(one, "delete_temp_file", "temp:1")
    assert ask(one, "create_temp_file", "again").get("id") == "temp:2"
    one.shared.temps.close()
    assert not one.shared.store.blobs


# Processes


def test_a_fork_goes_its_own_way() -> None:
    parent = holding(LINES)
    parent.messages.append({"role": "user", "content": "hi"})
    child = parent.fork()
    parent.add_text("parent's", "test")
    child.add_text("child's", "test")
    ask(child, "rename_fd", fd="fd:1", name="mine")
    ask(child, "mark_fd_section", fd="fd:1", ref_id="mine", start_line=1)
    assert text_of(ask(parent, "read_fd", fd="fd:2")) == "parent's"
    assert text_of(ask(child, "read_fd", fd="fd:2")) == "child's"
    assert ask(parent, "fd_info", fd="fd:1").get("name") == ""
    assert ask(parent, "list_fd_sections", fd="fd:1").get("count") == "0"
    assert child.messages == parent.messages
    assert len(parent.shared.store.blobs) == 3
    parent.close()
    assert text_of(ask(child, "read_fd", fd="fd:1", read_all=True)) == LINES
    child.close()
    assert not child.shared.store.blobs


def test_a_process_may_give_descriptors_up() -> None:
    made = holding("one")
    made.add_text("two", "test")
    ask(made, "rename_fd", fd="fd:2", name="two")
    assert ask(made, "keep_fds", fds=["fd:1"]).get("count") == "1"
    assert failed(ask(made, "read_fd", name="two"))[0] == "not_found"
    assert failed(ask(made, "keep_fds", fds=["fd:2"]))[0] == "not_found"
    made.add_text("three", "test")
    assert list(made.table.fds) == [1, 3]


def test_a_process_may_keep_lines_of_a_descriptor() -> None:
    made = holding("1\n2\n3\n")
    made.add_text("two", "test")
    part = {"fd": "fd-1", "start_line": 2, "end_line": None}
    assert ask(made, "keep_fds", fds=[part, "fd:2"]).get("count") == "2"
    assert list(made.table.fds) == [2, 3]
    assert text_of(ask(made, "read_fd", fd="fd:3")) == "2\n3\n"
    assert ask(made, "fd_info", fd="fd:3").get("source") == "fd:1 lines 2-3"
    # All or nothing: what is wrong with one leaves everything as it is.
    for wrong in ({"fd": "fd:3", "end_line": 0}, {"fd": "fd:1", "end_line": 1}):
        answer = ask(made, "keep_fds", fds=[{"fd": "fd:3", "start_line": 1}, wrong])
        assert failed(answer)[0] in {"invalid_range", "not_found"}
        assert list(made.table.fds) == [2, 3]
    made.close()
    assert not made.shared.store.blobs


async def test_a_long_content_is_worked_on_in_a_thread() -> None:
    made = holding(LINES * 2000)
    answer = await asking(made, "search_fd", fd="fd:1", query="line 210")
    assert answer.get("matches") == "2000"


def test_a_process_without_a_file_system_writes_no_file() -> None:
    answer = ask(holding(LINES), "fd_to_file", fd="fd:1", file_path="a")
    assert failed(answer)[0] == "file_operation"


@pytest.mark.parametrize("wrong", ["\ud800", "x" * 9000 + "\ud800"])
def test_blocks_are_stored_all_or_none(wrong: str) -> None:
    made = holding("text")
    texts = ("long\n" * 2000, wrong)
    blocks = [{"type": "text", "text": text} for text in texts]
    kind, _, message = failed(ask(made, "wrap_output", blocks=blocks))
    assert kind == "invalid_parameter"
    assert message.endswith(" a lone surrogate, which is no character")
    assert list(made.table.fds) == [1]
    assert len(made.shared.store.blobs) == 1


def test_blocks_that_are_nested_too_deep_to_be_written_are_an_error() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    blocks = [{"type": "image", "data": nested}]
    answer = ask(holding("text"), "wrap_output", blocks=blocks)
    assert failed(answer)[::2] == (
        "invalid_parameter",
        "The blocks are nested too deep",
    )
