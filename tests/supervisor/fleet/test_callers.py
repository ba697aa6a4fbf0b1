"""Many callers on many nodes, and room for one call: exactly one is admitted."""

from collections import deque
from random import Random
from typing import TYPE_CHECKING, cast

import pytest

from supervisor.fleet.directory import Directory
from supervisor.fleet.held_slices import HeldSlices, LedgerRow, ReserveResult
from supervisor.fleet.node import Arm, CallsDecided, Node, NodeStep
from supervisor.fleet.slices import NEVER
from supervisor.fleet.step import Moment, Step

if TYPE_CHECKING:
    from supervisor.fleet.messages import FromDirectory, FromNode

NODES, CALLERS, WORST = "abcd", 16, 10.0


class Fleet:
    """Nodes and a directory; messages of one way keep their order, others do not.

    Args:
        seed: from which way the next message comes.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_s = 10.0
        self.directory = Directory(1, (), self.now)
        self.directory.open_account("t", WORST, NEVER, self.now)
        self.to_node: dict[str, deque[FromDirectory]] = {n: deque() for n in NODES}
        self.to_directory: dict[str, deque[FromNode]] = {n: deque() for n in NODES}
        self.nodes = {
            name: Node(name, (), 4, HeldSlices(name, LedgerRow(f"L{name}")))
            for name in NODES
        }
        self.waiting = dict.fromkeys(NODES, CALLERS)
        self.admitted: list[str] = []
        self.refused = 0

    @property
    def now(self) -> Moment:
        """The time."""
        return Moment(self.now_s, self.now_s)

    def from_directory(self, step: Step) -> None:
        """Put what the directory sends on its way."""
        for node, message in step.sends:
            self.to_node[node].append(cast("FromDirectory", message))

    def from_node(self, name: str, step: NodeStep) -> None:
        """Put what a node sends on its way, and do what it says."""
        for _, message in step.sends:
            self.to_directory[name].append(cast("FromNode", message))
        for action in step.actions:
            if isinstance(action, Arm):
                self.nodes[name].armed(action.deadline_s)
            elif isinstance(action, CallsDecided):
                if action.refused_from is None:
                    self.call(name)
                else:
                    self.refused += self.waiting[name]
                    self.waiting[name] = 0

    def call(self, name: str) -> None:
        """Let each caller of a node that waits try to reserve."""
        for _ in range(self.waiting[name]):
            call = f"{name}{self.waiting[name]}"
            outcome, step = self.nodes[name].reserve("t", call, WORST, self.now)
            self.from_node(name, step)
            if outcome is ReserveResult.ASKED:
                return
            self.waiting[name] -= 1
            self.admitted.append(call)

    def deliver(self) -> None:
        """Deliver all messages."""
        while ways := [
            (name, queues)
            for queues in (self.to_node, self.to_directory)
            for name in NODES
            if queues[name]
        ]:
            name, queues = self.random.choice(ways)
            if queues is self.to_node:
                order = self.to_node[name].popleft()
                self.from_node(name, self.nodes[name].receive(order, self.now))
            else:
                message = self.to_directory[name].popleft()
                self.from_directory(self.directory.receive(message, self.now))

    def wait(self) -> None:
        """Let a second pass."""
        self.now_s += 1.0
        self.from_directory(self.directory.tick(self.now))
        for name, node in self.nodes.items():
            self.from_node(name, node.tick(self.now))


# spec FL7
@pytest.mark.parametrize("seed", range(20))
def test_at_one_calls_head_room_exactly_one_caller_is_admitted(seed: int) -> None:
    fleet = Fleet(seed)
    for name, node in fleet.nodes.items():
        fleet.from_node(name, node.join(fleet.now))
    fleet.deliver()
    for name in NODES:
        fleet.call(name)
    for _ in range(3):
        fleet.deliver()
        fleet.wait()
    assert len(fleet.admitted) == 1
    assert fleet.refused == len(NODES) * CALLERS - 1
