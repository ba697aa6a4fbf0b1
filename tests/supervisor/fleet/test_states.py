"""The tables of nodes and children: the ways into a state and out of it."""

from supervisor.fleet.states import (
    CHILDREN,
    NODES,
    ChildEvent,
    ChildState,
    NodeEvent,
    NodeState,
)


# spec FL4: nothing but an answer or a loss takes a child from its node
def test_a_child_that_is_placing_leaves_by_an_answer_or_a_loss_alone() -> None:
    leaving = {
        event
        for event in ChildEvent
        if (found := CHILDREN.entries[ChildState.PLACING, event]) is not None
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
        if (found := NODES.entries[NodeState.LOST, event]) is not None
        and found[0] in (NodeState.UP, NodeState.UNKNOWN)
    }
    assert joining == {NodeEvent.JOIN}
