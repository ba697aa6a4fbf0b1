"""Placing: room, labels, spread, pack, a named node; all of a request or none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.fleet.placement import (
    PACK,
    SPREAD,
    Candidate,
    Needs,
    PlacementError,
    place,
)

A = Candidate("a", frozenset({"gpu"}), 2)
B = Candidate("b", frozenset(), 5)
C = Candidate("c", frozenset({"gpu", "ssd"}), 1)


# spec FL4
def test_spread_takes_the_node_with_the_most_room() -> None:
    assert place(Needs(), 4, (A, B, C)) == ["b", "b", "b", "a"]


# spec FL4
def test_pack_fills_the_node_with_the_least_room() -> None:
    assert place(Needs(strategy=PACK), 4, (A, B, C)) == ["c", "a", "a", "b"]


# spec FL4
def test_a_node_has_to_have_all_labels() -> None:
    assert place(Needs(labels=("gpu", "ssd")), 1, (A, B, C)) == ["c"]


# spec FL4
def test_a_named_node_is_the_only_one_tried() -> None:
    assert place(Needs(node="a"), 2, (A, B, C)) == ["a", "a"]
    with pytest.raises(PlacementError, match="3 children on 'a': there is room for 2"):
        place(Needs(node="a"), 3, (A, B, C))


# spec FL4
@pytest.mark.parametrize(
    ("needs", "text"),
    [
        (Needs(labels=("tpu",)), "needs tpu: no node has these labels"),
        (Needs(node="d"), "no such node"),
        (Needs(node="b", labels=("gpu",)), "'b' has not these labels"),
    ],
)
def test_what_is_lacking_is_told(needs: Needs, text: str) -> None:
    with pytest.raises(PlacementError, match=text):
        place(needs, 1, (A, B, C))


# spec FL4
def test_a_node_that_does_not_answer_takes_nothing_new() -> None:
    silent = Candidate("b", frozenset(), 5, is_up=False)
    assert place(Needs(), 1, (A, silent)) == ["a"]
    with pytest.raises(PlacementError, match="b cannot be reached"):
        place(Needs(), 1, (silent,))


# spec FL4
def test_all_are_placed_or_none() -> None:
    with pytest.raises(PlacementError, match="9 children: there is room for 8"):
        place(Needs(), 9, (A, B, C))


# spec FL4
@given(
    rooms=st.lists(st.integers(-2, 6), max_size=6),
    count=st.integers(1, 20),
    strategy=st.sampled_from([SPREAD, PACK]),
)
def test_no_node_is_given_more_than_its_room(
    rooms: list[int], count: int, strategy: str
) -> None:
    nodes = [Candidate(f"n{i}", frozenset(), room) for i, room in enumerate(rooms)]
    try:
        names = place(Needs(strategy=strategy), count, nodes)
    except PlacementError:
        assert sum(max(0, room) for room in rooms) < count
        return
    assert len(names) == count
    assert all(names.count(node.name) <= max(0, node.room) for node in nodes)
