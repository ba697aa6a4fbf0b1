"""Pages and lines of any text at any page size: nothing is lost, nothing is twice."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.llmfd import index as index_module
from supervisor.llmfd.index import BLOCK_BYTES, paginate, scan
from tests.helpers.contents import ask, failed, holding, text_of

LINES = st.lists(
    st.text(st.sampled_from("ab é€😀\r\t<&"), max_size=30), max_size=30
).map("\n".join)
TEXTS = LINES | st.text(
    st.characters(
        codec="utf-8",
        exclude_characters="".join(map(chr, [*range(9), 11, 12, *range(14, 32)]))
        + "\ufffe\uffff",
    )
)


def cut(text: str, page_size: int) -> list[tuple[int, int]]:
    """Cut a text into pages as the definition has it, character by character."""
    pages = []
    start = 0
    while True:
        end = min(start + page_size, len(text))
        if end < len(text):
            newline = text.rfind("\n", start, end)
            end = newline + 1 if newline >= 0 else end
        pages.append((start, end))
        if end >= len(text):
            return pages
        start = end


@given(TEXTS, st.integers(1, 40))
def test_pages_are_cut_as_the_definition_says(text: str, page_size: int) -> None:
    data = text.encode()
    table = paginate(data, scan(data), page_size)
    found = [data[slice(*table.span(n))].decode() for n in range(1, len(table) + 1)]
    assert found == [text[start:end] for start, end in cut(text, page_size)]


@given(TEXTS, st.integers(1, 40))
def test_the_pages_joined_are_the_content(text: str, page_size: int) -> None:
    process = holding(text, page_size)
    first = ask(process, "read_fd", fd="fd:1")
    pages = [
        ask(process, "read_fd", fd="fd:1", page=number)
        for number in range(1, int(first.get("pages", "")) + 1)
    ]
    assert "".join(map(text_of, pages)) == text
    assert all(len(text_of(page)) <= page_size for page in pages)
    for page, following in itertools.pairwise(pages):
        assert page.get("truncated") == following.get("continued")
    assert pages[0].get("continued") == pages[-1].get("truncated") == "false"


@pytest.mark.slow
@given(TEXTS, st.integers(1, 40))
def test_lines_are_counted_as_the_definition_says(text: str, page_size: int) -> None:
    process = holding(text, page_size)
    total = text.count("\n") + (1 if text and not text.endswith("\n") else 0)
    for number, (start, end) in enumerate(cut(text, page_size), 1):
        page = ask(process, "read_fd", fd="fd:1", page=number)
        first = 1 + text[:start].count("\n")
        last = first + text[start:end].count("\n") - text[start:end].endswith("\n")
        assert page.get("lines") == (f"{first}-{last}" if text else "0-0")
        assert page.get("total_lines") == str(total)


@given(TEXTS, st.integers(1, 30), st.integers(1, 30))
def test_a_range_of_lines_is_these_lines(text: str, first: int, last: int) -> None:
    process = holding(text, 7)
    answer = ask(process, "read_fd", fd="fd:1", start_line=first, end_line=last)
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    if first > len(lines) or last < first:
        assert failed(answer)[:2] == ("invalid_range", "fd:1")
        return
    kept = "\n".join(lines[first - 1 : last])
    ends = last < len(lines) or text.endswith("\n")
    assert text_of(answer) == kept + ("\n" if ends else "")
    assert answer.get("lines") == f"{first}-{min(last, len(lines))}"


@pytest.mark.slow
@given(TEXTS.filter(bool), st.data())
def test_a_range_of_characters_is_these(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    count = data.draw(st.integers(1, len(text) + 1))
    answer = ask(
        holding(text), "read_fd", fd="fd:1", mode="char", start=start, count=count
    )
    assert text_of(answer) == text[start : start + count]


@pytest.mark.parametrize(
    ("text", "lines"), [("", 0), ("a", 1), ("a\n", 1), ("a\nb", 2), ("\n\n", 2)]
)
def test_what_a_line_is(text: str, lines: int) -> None:
    answer = ask(holding(text), "read_fd", fd="fd:1")
    assert answer.get("total_lines") == str(lines)
    assert answer.get("pages") == "1"


@pytest.mark.slow
@given(
    st.lists(
        st.sampled_from(["x" * 50 + "\n", "é" * 31, "\n", "😀", "a" * 4000, "€\n"]),
        min_size=20,
        max_size=200,
    ),
    st.data(),
)
def test_questions_across_blocks_are_answered_as_within_one(
    parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    raw = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "BLOCK_BYTES", 64)
        index = scan(raw)
        assert index.chars == len(text)
        starts = [0, *(n + 1 for n, c in enumerate(raw) if c == 10)]
        for line in (1, index.lines, data.draw(st.integers(1, max(index.lines, 1)))):
            assert index.line_start(raw, line) == starts[line - 1]
        char = data.draw(st.integers(0, len(text)))
        offset = len(text[:char].encode())
        assert index.char_offset(raw, char) == offset
        assert index.chars_before(raw, offset) == char
        assert index.newlines_before(raw, offset) == text[:char].count("\n")
        assert len(paginate(raw, index, 100)) == len(cut(text, 100))


@pytest.mark.parametrize("around", [-3, -2, -1, 0, 1])
def test_a_character_may_lie_across_two_blocks(around: int) -> None:
    text = "a" * (BLOCK_BYTES + around) + "😀" + "b" * 100
    process = holding(text, BLOCK_BYTES + around)
    pages = [ask(process, "read_fd", fd="fd:1", page=n) for n in (1, 2)]
    assert text_of(pages[1]) == "😀" + "b" * 100
    answer = ask(
        process,
        "read_fd",
        fd="fd:1",
        mode="char",
        start=BLOCK_BYTES + around,
        count=1,
    )
    assert text_of(answer) == "😀"


def test_an_emoji_at_the_edge_of_a_page_stays_whole() -> None:
    process = holding("ab😀cd", 3)
    pages = [text_of(ask(process, "read_fd", fd="fd:1", page=n)) for n in (1, 2)]
    assert pages == ["ab😀", "cd"]


def test_a_hundred_thousand_empty_lines() -> None:
    process = holding("\n" * 100_000, 4000)
    answer = ask(process, "read_fd", fd="fd:1", page=25)
    assert answer.get("lines") == "96001-100000"
    assert text_of(answer) == "\n" * 4000
    answer = ask(process, "read_fd", fd="fd:1", start_line=77_777, end_line=77_777)
    assert text_of(answer) == "\n"


def test_crlf_is_kept_to_the_byte() -> None:
    text = "a\r\nb\rc\n"
    answer = ask(holding(text), "read_fd", fd="fd:1", read_all=True)
    assert (text_of(answer), answer.get("total_lines")) == (text, "2")
    assert answer.get("page") == "all"


@pytest.mark.parametrize("mode", ["page", "line", "char"])
@pytest.mark.parametrize("count", [0, -1])
def test_a_count_of_none_is_told_as_that(mode: str, count: int) -> None:
    made = holding("a\n" * 10)
    answer = ask(made, "read_fd", fd="fd:1", mode=mode, start=1, count=count)
    assert failed(answer) == (
        *("invalid_range", "fd:1"),
        f"Invalid count {count}: at least 1 {mode} is to be read",
    )
