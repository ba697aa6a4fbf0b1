"""References in replies: any nesting, in linear time."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.llmfd.table import Ref, extract


def test_parts_are_found_and_broken_tags_mean_nothing() -> None:
    assert extract("none") == ()
    assert extract('<ref id="a">x</ref>') == (Ref("a", "x"),)
    assert extract('</ref><ref id="a">x<ref id="b">y</ref>z</ref></ref>') == (
        Ref("b", "y"),
        Ref("a", "xyz"),
    )
    assert extract('<ref id="a">never closed') == ()
    assert extract("<ref id=\"\">x</ref><ref id='a'>x</ref>") == ()


@given(st.lists(st.sampled_from(['<ref id="a">', "</ref>", "x", "\n"]), max_size=40))
def test_every_part_is_of_the_reply_without_tags(parts: list[str]) -> None:
    reply = "".join(parts)
    bare = "".join(part for part in parts if part in ("x", "\n"))
    assert all(ref.text in bare for ref in extract(reply))


@pytest.mark.slow
def test_deep_and_many_references_take_linear_time() -> None:
    begin = time.thread_time()
    for reply in (
        '<ref id="a">' * 200_000 + "x" * 100_000 + "</ref>" * 200_000,
        '<ref id="a">x</ref>' * 200_000,
        '<ref id="a">' * 200_000,
        "</ref>" * 500_000,
        '<ref id="' * 300_000,
    ):
        assert len(extract(reply)) <= 1000
    assert time.thread_time() - begin < 15
