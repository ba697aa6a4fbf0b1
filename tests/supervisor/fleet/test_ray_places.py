"""Where Ray listens: told at a join, known to all nodes, and kept from children."""

from ipaddress import ip_address
from typing import Any

import pytest
from msgspec.structs import replace

from supervisor.fleet.directory import Directory
from supervisor.fleet.fence import Fence, FleetLife
from supervisor.fleet.held_slices import HeldSlices, LedgerRow
from supervisor.fleet.messages import RayPlace, Renewed
from supervisor.fleet.node import Node
from supervisor.fleet.ray_places import RayPlaces
from supervisor.fleet.step import Moment

OWN = frozenset(map(ip_address, ("127.0.0.1", "::1", "10.0.0.1", "fd00::1")))
HERE = RayPlace(("10.0.0.1",), ((6379, 6379), (10_002, 10_009)))
LOOPBACK = RayPlace(("127.0.0.2",), ((7000, 7000),))
THERE = RayPlace(("10.0.0.2", "172.17.0.2"), ((6380, 6380),))


# spec FL9: a port that is open on every address is reached by each of them.
@pytest.mark.parametrize(
    ("address", "port", "is_ray"),
    [
        ("10.0.0.1", 6379, True),
        ("127.0.0.1", 6379, True),
        ("127.9.9.9", 6379, True),
        ("0.0.0.0", 6379, True),  # noqa: S104 - connect(2) takes it as this machine
        ("::1", 10_002, True),
        ("fd00::1", 10_009, True),
        ("10.0.0.1", 10_010, False),
        ("10.0.0.1", 6380, False),
        ("10.0.0.2", 6379, False),
        ("10.0.0.2", 6380, True),
        ("172.17.0.2", 6380, True),
        ("127.0.0.1", 6380, False),
        ("10.0.0.1", 7000, True),
        ("127.0.0.2", 7000, True),
        ("10.0.0.2", 7000, False),
    ],
)
def test_ray_of_nodes_is_found_at_all_addresses(
    address: str, port: int, *, is_ray: bool
) -> None:
    places = RayPlaces((HERE, LOOPBACK, THERE))
    assert places.have(ip_address(address), port, OWN) is is_ray


# spec FL9
def test_a_child_of_no_fleet_is_kept_from_nothing() -> None:
    fence = Fence()
    fence.ray = RayPlaces((HERE,))
    fence.add("in", FleetLife("a", "c1", 1))
    there = ip_address("10.0.0.1"), 6379, OWN
    assert fence.keeps_from("in", *there)
    assert not fence.keeps_from("out", *there)


class Scene:
    """A directory, and nodes whose messages arrive at once."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.directory = Directory(1, (), self.now)
        self.nodes: dict[str, Node] = {}

    @property
    def now(self) -> Moment:
        """The time."""
        return Moment(self.now_s, 1e9 + self.now_s)

    def join(self, name: str, place: RayPlace) -> None:
        """Let a node join."""
        node = Node(name, (), 4, HeldSlices(name, LedgerRow(f"L{name}")))
        node.own_ray = place
        self.nodes[name] = node
        for send in node.join(self.now).sends:
            self.pass_on(send.message)

    def beat(self, name: str) -> list[object]:
        """Let a node beat; return the answers."""
        step = self.nodes[name].daemon_answered(9, 0)
        return [one for send in step.sends for one in self.pass_on(send.message)]

    def pass_on(self, message: Any) -> list[object]:
        """Give a message to the directory, and its answers to the nodes."""
        answers: list[Any] = []
        for send in self.directory.receive(message, self.now).sends:
            answers.append(send.message)
            self.nodes[send.node].receive(answers[-1], self.now)
        return answers

    def known(self, name: str) -> tuple[RayPlace, ...]:
        """Return what a node knows."""
        return self.nodes[name].ray.places


# spec FL9: it is live.
def test_nodes_learn_where_ray_of_later_ones_listens() -> None:
    scene = Scene()
    scene.join("a", HERE)
    assert scene.known("a") == (HERE,)
    scene.join("b", THERE)
    assert scene.known("b") == (HERE, THERE)
    (answer,) = scene.beat("a")
    assert isinstance(answer, Renewed)
    assert answer.ray == (HERE, THERE)
    assert scene.known("a") == (HERE, THERE)
    (answer,) = scene.beat("a")
    assert isinstance(answer, Renewed)
    assert answer.ray is None
    node = scene.nodes["b"]
    for step in (node.leave(scene.now), node.all_gone(scene.now)):
        for send in step.sends:
            scene.pass_on(send.message)
    scene.beat("a")
    # Its Ray may be the user's, who has not ended it.
    assert scene.known("a") == (HERE, THERE)


# spec FL9: a name would be looked up by each node in its own way.
def test_a_node_whose_ray_has_no_ip_address_does_not_join() -> None:
    scene = Scene()
    scene.join("a", HERE)
    scene.join("b", RayPlace(("localhost",), ((6379, 6379),)))
    scene.beat("a")
    assert scene.known("a") == (HERE,)
    assert [node.name for node in scene.directory.ps().nodes] == ["a"]


# spec FL9: Ray of a node can be started anew within its session.
def test_a_member_tells_where_its_ray_listens_now() -> None:
    scene = Scene()
    scene.join("a", HERE)
    scene.join("b", THERE)
    node, moved = scene.nodes["b"], replace(THERE, ports=((9000, 9001),))
    for send in node.relink(("gpu",), moved, scene.now).sends:
        scene.pass_on(send.message)
    assert scene.known("b") == (HERE, moved)
    scene.beat("a")
    assert scene.known("a") == (HERE, moved)
    assert [one.labels for one in scene.directory.ps().nodes] == [(), ("gpu",)]
