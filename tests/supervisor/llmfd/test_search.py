"""Search: lines that match, with context, resumable, in linear time."""

import random
import time
from unittest import mock

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from supervisor.llmfd import Process, search
from tests.helpers.contents import ask, failed, holding, text_of

TEXT = st.lists(st.text(st.sampled_from("aAb é."), max_size=8), max_size=20).map(
    "\n".join
)


@pytest.mark.slow
@given(TEXT, st.text(st.sampled_from("aAbé."), min_size=1, max_size=3), st.booleans())
def test_every_line_with_the_query_is_counted(
    text: str, query: str, sensitive: bool
) -> None:
    answer = ask(
        holding(text),
        "search_fd",
        fd="fd:1",
        query=query,
        case_sensitive=sensitive,
        context=0,
        max_results=1000,
    )
    fold = str if sensitive else str.lower
    lines = text.split("\n")
    expected = [
        (number, fold(line).index(fold(query)) + 1, line)
        for number, line in enumerate(lines, 1)
        if fold(query) in fold(line)
    ]
    found = [
        (int(m.get("line", "")), int(m.get("col", "")), text_of(m).removesuffix("\n"))
        for m in answer
    ]
    assert found == expected
    assert answer.get("matches") == str(len(expected))


def test_contexts_that_overlap_are_one_answer() -> None:
    lines = [f"l{n}" for n in range(1, 31)]
    for number in (5, 8, 20):
        lines[number - 1] = "HIT"
    answer = ask(
        holding("\n".join(lines)), "search_fd", fd="fd:1", query="HIT", context=2
    )
    assert [m.get("lines") for m in answer] == ["3-10", "18-22"]
    assert [m.get("line") for m in answer] == ["5", "20"]
    assert (answer.get("matches"), answer.get("returned")) == ("3", "2")


def test_a_search_goes_on_where_it_stopped() -> None:
    made = holding("x\n" * 50)
    found: list[str] = []
    start = "1"
    while start:
        answer = ask(
            made,
            "search_fd",
            fd="fd:1",
            query="x",
            context=0,
            max_results=20,
            start_line=int(start),
        )
        found += [m.get("line", "") for m in answer]
        start = answer.get("next_line", "")
        assert answer.get("truncated") == ("true" if start else "false")
    assert found == [str(n) for n in range(1, 51)]


@pytest.mark.parametrize(
    ("pattern", "lines"),
    [
        ("^b", ["2", "3"]),
        ("o$", ["1"]),
        ("(?i)ERROR.*timeout", ["4"]),
        ("o[^x]b", []),
        ("a\\s+b", []),
        ("é|ü", ["3"]),
        ("^", ["1", "2", "3", "4"]),
    ],
)
def test_an_expression_stays_within_a_line(pattern: str, lines: list[str]) -> None:
    made = holding("foo\nbar a\nb é\nerror: a Timeout\n")
    answer = ask(made, "search_fd", fd="fd:1", query=pattern, regex=True, context=0)
    assert [m.get("line") for m in answer] == lines


@pytest.mark.parametrize(
    ("query", "regex"),
    [
        ("", False),
        ("a\nb", False),
        ("(", True),
        ("a)(b", True),
        ("(?=x)", True),
        ("x" * 10001, False),
        (chr(0xD800), False),
        (r"(a)\1", True),
        (r"a\Cb", True),
        (r"\\\C", True),
        (r"\Q\C\E\C", True),
        (r"(?i)(?:\pL{30}){9}", True),
    ],
)
def test_a_bad_query_is_told_and_the_search_not_begun(query: str, regex: bool) -> None:
    answer = ask(holding("text"), "search_fd", fd="fd:1", query=query, regex=regex)
    assert failed(answer)[:2] == ("invalid_parameter", "fd:1")


@pytest.mark.parametrize(
    "arguments", [{"context": -1}, {"max_results": 0}, {"start_line": 0}]
)
def test_bounds_are_kept(arguments: dict[str, object]) -> None:
    answer = ask(holding("text"), "search_fd", fd="fd:1", query="t", **arguments)
    assert failed(answer)[0] in ("invalid_parameter", "invalid_range")


def test_an_evil_expression_takes_linear_time() -> None:
    made = holding("a" * 10_000_000 + "b")
    begin = time.thread_time()
    answer = ask(made, "search_fd", fd="fd:1", query="(a+)+$", regex=True, context=0)
    # A backtracking engine would take longer than the universe has had.
    assert time.thread_time() - begin < 10
    assert answer.get("matches") == "0"


def test_nothing_is_found_in_nothing() -> None:
    answer = ask(holding(""), "search_fd", fd="fd:1", query="^", regex=True)
    assert answer.get("matches") == "0"


@pytest.mark.slow
@given(
    st.lists(st.text(st.sampled_from("abAB é"), max_size=12), max_size=60),
    st.sampled_from(["a", "b", "ab", "AB", "é", "\N{KELVIN SIGN}"]),
    st.booleans(),
)
def test_lines_that_are_only_counted_are_counted_alike(
    lines: list[str], query: str, sensitive: bool
) -> None:
    text = "\n".join(lines * 9)
    with mock.patch.multiple(search, PROBED_LINES=2, DENSE_BYTES=40, CUT_BYTES=50):
        answer = ask(
            holding(text),
            "search_fd",
            fd="fd:1",
            query=query,
            case_sensitive=sensitive,
            max_results=1,
        )
    fold = str if sensitive else str.lower
    expected = sum(fold(query) in fold(line) for line in lines * 9)
    assert answer.get("matches") == str(expected)


@pytest.mark.parametrize("query", ["x", "needle", "NEEDLE"])
def test_lines_longer_than_a_cut_are_counted(query: str) -> None:
    long = "x" * 3000
    text = "\n".join([f"{long}needle{long}", long, "x needle", long] * 200)
    with mock.patch.multiple(
        search, PROBED_LINES=2, DENSE_BYTES=1 << 20, CUT_BYTES=1000, LOOK_BYTES=700
    ):
        answer = ask(
            holding(text),
            "search_fd",
            fd="fd:1",
            query=query,
            case_sensitive=query.islower(),
            max_results=1,
            context=0,
        )
    assert answer.get("matches") == str(800 if query == "x" else 400)


def test_a_quotation_in_an_expression_may_be_open() -> None:
    answer = ask(
        holding("a.b\na-b\n"), "search_fd", fd="fd:1", query=r"\Qa.b", regex=True
    )
    assert answer.get("matches") == "1"


def test_a_byte_that_may_end_a_line_is_refused_with_what_to_use() -> None:
    made = holding("a\nb\nab\n")
    answer = ask(made, "search_fd", fd="fd:1", query=r"a\Cb", regex=True)
    assert failed(answer) == (
        *("invalid_parameter", "fd:1"),
        r"\C in the pattern is a byte, the end of a line too; use . for a character",
    )


@pytest.mark.parametrize(
    "query", [r"a\\C", r"\Qa\C\E", r"\Qa\C", r"\x61\\\x43", r"a\pPC"]
)
def test_what_only_looks_like_any_byte_is_searched(query: str) -> None:
    made = holding("b\na\\C\n")
    answer = ask(made, "search_fd", fd="fd:1", query=query, regex=True, context=0)
    assert [m.get("line") for m in answer] == ["2"]


@pytest.mark.slow
@given(
    st.lists(st.text(st.sampled_from("ab é"), max_size=9), max_size=30).map("\n".join),
    st.sampled_from(["a+b", "^", "$", "^$", r"b\b", "^a|b$", r"\z", r"a\z", r"\Ab"]),
    st.integers(1, 12),
)
def test_expressions_are_looked_for_in_windows(
    text: str, query: str, window: int
) -> None:
    made = holding(text)
    found = [
        ask(made, "search_fd", "fd:1", query=query, regex=True, context=0).attrib
        if size is None
        else _in_windows(made, query, size)
        for size in (None, window)
    ]
    assert found[0] == found[1]


def _in_windows(made: Process, query: str, size: int) -> dict[str, str]:
    with mock.patch.multiple(search, WINDOW_BYTES=size):
        return ask(made, "search_fd", "fd:1", query=query, regex=True, context=0).attrib


def test_matches_whose_contexts_are_too_long_together_are_paged() -> None:
    lines = 200
    made = holding("".join(f"{n:3} {'x' * 95}\n" for n in range(1, lines + 1)))
    ranges: list[str] = []
    start = 1
    with mock.patch.multiple(search, MOST_SHOWN_BYTES=1550):
        while start:
            answer = ask(
                *(made, "search_fd", "fd:1"),
                query="x",
                max_results=10_000,
                start_line=start,
            )
            assert answer.get("matches") == str(lines - start + 1)
            (match,) = answer
            assert match.get("line") == str(start)
            first, last = map(int, match.get("lines", "").split("-"))
            assert first == max(1, start - 2)
            assert len(text_of(match)) == 100 * (last - first + 1) <= 1550
            ranges.append(f"{first}-{last}")
            start = int(answer.get("next_line", "0"))
            assert answer.get("truncated") == ("true" if start else "false")
            assert last == (start - 1 + 2 if start else lines), "two more are context"
    assert ranges[:2] == ["1-15", "12-26"]


def test_a_context_that_is_too_long_is_told_from_such_a_line() -> None:
    made = holding("short\n" * 50 + "needle\n" + "x" * 300 + "needle\n")
    with mock.patch.multiple(search, MOST_SHOWN_BYTES=250):
        long = ask(made, "search_fd", "fd:1", query="^needle", regex=True, context=50)
        line = ask(made, "search_fd", "fd:1", query="xneedle", context=50)
    message = "Line 51 is too long for one answer with its context: show less of it"
    assert failed(long)[2] == message
    message = "Line 52 is too long for one answer: use read_fd with mode=char"
    assert failed(line)[2] == message


@pytest.mark.slow
async def test_a_search_that_is_cancelled_ends() -> None:
    source = random.Random(1)
    line = "".join(source.choice("ab") for _ in range(1000))
    made = holding(f"{line}\n" * 4000)
    begin = time.process_time()
    with trio.move_on_after(0.1) as scope:
        # An expression of so many states that 64 KiB take a second: a minute in all.
        query = "(?:a?[ab]{99}b?){9}Z"
        await made.call("search_fd", "fd:1", query=query, regex=True)
    assert scope.cancelled_caught
    assert time.process_time() - begin < 10
