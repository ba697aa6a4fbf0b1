"""Children in stock: forked and prepared before their order comes.

1. The *shape* of an order is the part that can be applied early: namespaces, no_new_privs,
   the bounding set, and Landlock rules that were equal in all orders of the shape.
2. A shape that was ordered twice is kept, with one child, for the last `SHAPES`.
3. A child in groups of processes gets only orders for exactly these groups, which the
   host makes ahead (SPARE): no process is moved.
4. A child that fails in stock is dropped, and its shape has to be ordered twice again; the
   next order is done by a new fork.
5. A waiting process holds no descriptor, environment or directory of any child.
"""

from __future__ import annotations

from supervisor.spawn.launchpad import wire
from supervisor.spawn.launchpad.child import SHAPING
from supervisor.spawn.launchpad.order import Order
from supervisor.spawn.launchpad.words import JOINED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from supervisor.spawn.launchpad.family import Child
    from supervisor.spawn.launchpad.order import Rules

    Shape = tuple[tuple[str, Any], ...]
    Groups = tuple[tuple[bytes, bytes], ...]

# `run` needs none; a daemon's policies and the tools of their children are few kinds.
SHAPES = 4
# Asked for as often, it will be asked for again.
_ENOUGH = 2
# Paths that are others after the fresh root has been made, or may be.
_OF_A_NAMESPACE = (b"/", b"/proc", b"/dev/shm", b"/dev/pts", b"/etc")


class Kind:
    """Orders of one shape.

    Attributes:
        asked: how often one came since something went wrong.
        child: who waits for the next one.
        groups: what it is in.
        layers: what the orders say that is put on before.
        no_tcp: whether the last one restricted TCP.
        rules: those of Landlock that all had; None before the first.
    """

    __slots__ = ("asked", "child", "groups", "layers", "no_tcp", "rules")

    def __init__(self) -> None:
        self.asked = 0
        self.layers: dict[str, Any] = {}
        self.rules: Rules | None = None
        self.no_tcp = False
        self.child: Child | None = None
        self.groups: Groups = ()


class Stock:
    """The waiting child of each kind of order."""

    def __init__(self) -> None:
        self._kinds: dict[Shape, Kind] = {}  # the last one asked for stands last
        self._spare: Groups = ()
        self._surplus: list[Child] = []

    def take(self, layers: dict[str, Any]) -> Child | None:
        """Record an order; return who is to have it, None if nobody waits."""
        if layers.get("userns") == JOINED:  # no child can wait in another's namespace
            return None
        shape = _shape_of(layers)
        kind = self._kinds.pop(shape, None) or Kind()
        self._kinds[shape] = kind
        kind.asked += 1
        kind.layers = {name: layers[name] for name, _ in shape}
        _share(kind, layers.get("landlock"))
        groups = layers.get("cgroup", ())
        for other in self._kinds.values():
            # A waiting child in the groups of another kind is in its way.
            if groups and other is not kind and other.groups == groups:
                self._give_up(other)
        child = kind.child
        if child is None or kind.groups != groups:
            return None
        kind.child = None
        return child

    def spare(self, groups: Groups) -> None:
        """Record groups that nobody is in; the host takes no others."""
        self._spare = groups
        for kind in self._kinds.values():
            if kind.groups:
                self._give_up(kind)

    def surplus(self) -> list[Child]:
        """Return who is to wait no more: displaced by others, or in the wrong groups."""
        for shape in tuple(self._kinds)[:-SHAPES]:
            self._give_up(self._kinds.pop(shape))
        surplus, self._surplus = self._surplus, []
        return surplus

    def _give_up(self, kind: Kind) -> None:
        if kind.child is not None:
            self._surplus.append(kind.child)
            kind.child = None

    def wanted(self) -> Kind | None:
        """Return a kind of which there should be one more."""
        for kind in reversed(self._kinds.values()):
            has_groups = "cgroup" not in kind.layers or bool(self._spare)
            if kind.asked >= _ENOUGH and kind.child is None and has_groups:
                return kind
        return None

    def order_for(self, kind: Kind) -> Order:
        """Return what a child of that kind can do before its order comes."""
        layers = dict(kind.layers)
        kind.groups = ()
        if "cgroup" in layers:
            kind.groups, self._spare = self._spare, ()
            layers["cgroup"] = kind.groups
        order = Order(layers)
        if kind.rules:
            order.common = kind.rules, kind.no_tcp
        return order

    def groups(self) -> tuple[bytes, ...]:
        """Return the directories of groups that nobody is in."""
        return tuple(directory for directory, _ in self._spare)

    def discard(self, child: Child) -> None:
        """Record that a child came to nothing while it waited."""
        for kind in self._kinds.values():
            if kind.child is child:
                kind.child = None
                kind.asked = 0


def _shape_of(layers: dict[str, Any]) -> Shape:
    # Not which groups: those are another child's each time.
    return tuple(
        (name, None if name == "cgroup" else layers[name])
        for name in SHAPING
        if name in layers
    )


def _share(kind: Kind, landlock: tuple[Rules, bool] | None) -> None:
    """Keep of the rules those that this order has as well."""
    if landlock is None:
        kind.rules = ()
        return
    rules, kind.no_tcp = landlock
    if kind.rules is None:
        kind.rules = tuple(rule for rule in rules if rule[0] not in _OF_A_NAMESPACE)
        return
    now = set(rules)
    kind.rules = tuple(rule for rule in kind.rules if rule in now)


def hand_over(child: Child, body: tuple[Any, ...], fds: list[int], owners: int) -> bool:
    """Send an order to a waiting child; return whether it could take it.

    Raises:
        OSError: no memory for it.
    """
    if child.line is None:
        return False
    message = (body, owners >= 0)
    carried = fds if owners < 0 else (*fds, owners)
    try:
        wire.send_message(child.line, message, carried)
    except (BrokenPipeError, ConnectionResetError):  # killed, by somebody else
        return False
    finally:
        child.hang_up()
    return True
