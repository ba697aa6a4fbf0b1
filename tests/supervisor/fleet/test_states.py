"""The tables of nodes, children and membership: every pair has an entry (I3)."""

from collections.abc import Mapping
from enum import Enum
from itertools import product

import pytest

from supervisor.fleet.states import (
    CHILDREN,
    NODES,
    PHASES,
    ChildEvent,
    ChildState,
    FaultError,
    NodeEvent,
    NodeState,
    Phase,
    PhaseEvent,
    step_of_child,
    step_of_node,
)


# I3
@pytest.mark.parametrize(
    ("table", "states", "events"),
    [
        (NODES, NodeState, NodeEvent),
        (CHILDREN, ChildState, ChildEvent),
        (PHASES, Phase, PhaseEvent),
    ],
)
def test_every_pair_has_an_entry(
    table: Mapping[object, object], states: type[Enum], events: type[Enum]
) -> None:
    assert set(table) == set(product(states, events))


# I3
def test_what_cannot_happen_is_a_fault() -> None:
    with pytest.raises(FaultError, match="a child that is running cannot have place"):
        step_of_child(ChildState.RUNNING, ChildEvent.PLACE)
    with pytest.raises(FaultError, match="a node that is lost cannot have silent"):
        step_of_node(NodeState.LOST, NodeEvent.SILENT)


# spec FL4: nothing but an answer or a loss takes a child from its node
def test_a_child_that_is_placing_leaves_by_an_answer_or_a_loss_alone() -> None:
    leaving = {
        event
        for event in ChildEvent
        if (found := CHILDREN[ChildState.PLACING, event]) is not None
        and found[0] in (ChildState.WAITING, ChildState.LOST, ChildState.ENDED)
    }
    assert leaving == {
        ChildEvent.REFUSED,
        ChildEvent.FAILED,
        ChildEvent.ENDED,
        ChildEvent.LOSE,
        ChildEvent.LOSE_AGAIN,
    }


# spec FL5: a renewal after the loss is refused
def test_only_a_join_makes_a_lost_node_a_member() -> None:
    joining = {
        event
        for event in NodeEvent
        if (found := NODES[NodeState.LOST, event]) is not None
        and found[0] in (NodeState.UP, NodeState.UNKNOWN)
    }
    assert joining == {NodeEvent.JOIN}
