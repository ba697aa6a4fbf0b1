"""Children in stock: forked and prepared before their order comes.

1. The *shape* of an order is the part that can be applied early: namespaces, no_new_privs,
   the bounding set; and those Landlock rules and mounts for reading that were equal in
   all orders of the shape.
2. A shape that was ordered twice is kept, with one child, for the last `SHAPES`.
3. A child in groups of processes gets only orders for exactly these groups, which the
   host makes ahead (SPARE): no process is moved.
4. A child that fails in stock is dropped, and its shape has to be ordered twice again; the
   next order is done by a new fork.
5. A waiting process holds no descriptor, environment or directory of any child.
6. A mount namespace is as old as its process: when the machine mounts or unmounts, those
   that wait in one are given up, and so keep nothing that was unmounted.
"""

from __future__ import annotations

from supervisor.spawn.launchpad import wire
from supervisor.spawn.launchpad.child import SHAPING
from supervisor.spawn.launchpad.layers.common_root import parents
from supervisor.spawn.launchpad.order import Order
from supervisor.spawn.launchpad.words import JOINED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from supervisor.spawn.launchpad.family import Child
    from supervisor.spawn.launchpad.layers.fresh_root import Tree
    from supervisor.spawn.launchpad.order import Links, Rules, Trees

    Shape = tuple[tuple[str, Any], ...]
    Groups = tuple[tuple[bytes, bytes], ...]

# `run` needs none; a daemon's policies and the tools of their children are few kinds.
SHAPES = 4
# A shape that was ordered so often will be ordered again.
_ORDERS_BEFORE_STOCK = 2
# Of these layers, the words are another child's each time.
_NAMED_ONLY = frozenset({"cgroup", "mountns"})
# Paths that mean another directory once the fresh root is made.
_OF_A_NAMESPACE = (b"/", b"/proc", b"/dev/shm", b"/dev/pts", b"/etc", b"/tmp")


class OrderKind:
    """Orders of one shape.

    Attributes:
        asked: how many orders came since a child of the kind failed in stock.
        child: the one that waits for the next order.
        groups: the groups of processes that this child is in.
        layers: the part of the orders that can be applied early.
        no_tcp: whether the last order restricted TCP.
        links: the symbolic links that all orders had in their fresh root.
        rules: the Landlock rules that all orders had; None before the first.
        trees: the trees that all orders had to read; None before the first.
    """

    __slots__ = (
        "asked",
        "child",
        "groups",
        "layers",
        "links",
        "no_tcp",
        "rules",
        "trees",
    )

    def __init__(self) -> None:
        self.asked = 0
        self.layers: dict[str, Any] = {}
        self.rules: Rules | None = None
        self.trees: Trees | None = None
        self.links: Links = ()
        self.no_tcp = False
        self.child: Child | None = None
        self.groups: Groups = ()


class Stock:
    """The waiting child of each kind of order.

    Args:
        sees_mounts: `drop_roots` is called whenever the machine's mounts change.
    """

    def __init__(self, *, sees_mounts: bool = False) -> None:
        self._sees_mounts = sees_mounts
        self._kinds: dict[Shape, OrderKind] = {}  # the last one asked for stands last
        self._spare: Groups = ()
        self._surplus: list[Child] = []

    def take(self, layers: dict[str, Any]) -> Child | None:
        """Record an order; return the child that is to have it, None for none."""
        if layers.get("userns") == JOINED:  # no child can wait in another's namespace
            return None
        shape = _shape_of(layers)
        kind = self._kinds.pop(shape, None) or OrderKind()
        self._kinds[shape] = kind
        kind.asked += 1
        kind.layers = {name: layers[name] for name, _ in shape if name != "mountns"}
        _keep_common_rules(kind, layers)
        if self._sees_mounts and "mountns" in layers:
            _keep_common_root(kind, layers["mountns"])
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

    def set_spare(self, groups: Groups) -> None:
        """Record empty groups for the next child; they replace those before."""
        self._spare = groups
        for kind in self._kinds.values():
            if kind.groups:
                self._give_up(kind)

    def drop_roots(self) -> None:
        """Give up children in a mount namespace: one of the machine's has changed.

        Others are made after the next order: a machine may mount all the time.
        """
        for kind in self._kinds.values():
            if kind.trees is not None and kind.child is not None:
                self._give_up(kind)
                kind.asked = _ORDERS_BEFORE_STOCK - 1

    def take_surplus(self) -> list[Child]:
        """Return children that shall wait no more: displaced, or in wrong groups."""
        for shape in tuple(self._kinds)[:-SHAPES]:
            self._give_up(self._kinds.pop(shape))
        surplus, self._surplus = self._surplus, []
        return surplus

    def _give_up(self, kind: OrderKind) -> None:
        if kind.child is not None:
            self._surplus.append(kind.child)
            kind.child = None

    def find_missing(self) -> OrderKind | None:
        """Return a kind that is ordered often and has no child; None for none."""
        for kind in reversed(self._kinds.values()):
            has_groups = "cgroup" not in kind.layers or bool(self._spare)
            if kind.asked >= _ORDERS_BEFORE_STOCK and kind.child is None and has_groups:
                return kind
        return None

    def order_for(self, kind: OrderKind) -> Order:
        """Return the order by which a child of a kind prepares itself."""
        layers = dict(kind.layers)
        kind.groups = ()
        if "cgroup" in layers:
            kind.groups, self._spare = self._spare, ()
            layers["cgroup"] = kind.groups
        order = Order(layers)
        if kind.rules:
            order.likely_rules = kind.rules, kind.no_tcp
        if kind.trees is not None:
            order.likely_root = kind.trees, kind.links
        return order

    def groups(self) -> tuple[bytes, ...]:
        """Return the directories of the empty groups."""
        return tuple(directory for directory, _ in self._spare)

    def discard(self, child: Child) -> None:
        """Record that a child failed while it waited."""
        for kind in self._kinds.values():
            if kind.child is child:
                kind.child = None
                kind.asked = 0


def _shape_of(layers: dict[str, Any]) -> Shape:
    return tuple(
        (name, None if name in _NAMED_ONLY else layers[name])
        for name in SHAPING
        if name in layers
    )


def _keep_common_rules(kind: OrderKind, layers: dict[str, Any]) -> None:
    """Keep of a kind's Landlock rules those that an order has as well."""
    if "landlock" not in layers:
        kind.rules = ()
        return
    rules, kind.no_tcp = layers["landlock"]
    if "mountns" in layers:
        # A directory that is only listed is the fresh root's own.
        rules = tuple(
            rule
            for rule in rules
            if rule[1] != "list" and rule[0] not in _OF_A_NAMESPACE
        )
    if kind.rules is None:
        kind.rules = rules
        return
    now = set(rules)
    kind.rules = tuple(rule for rule in kind.rules if rule in now)


def _keep_common_root(kind: OrderKind, words: tuple[Any, ...]) -> None:
    """Keep of a kind's trees and links those that an order has as well.

    A tree with an entry of the order's own is not kept: the root would not fit.
    """
    links, trees, _, files, *_ = words
    if kind.trees is None:
        kind.trees = tuple(tree for tree in trees if _is_to_read(tree))
        kind.links = links
    if kind.links != links:
        kind.links = tuple(link for link in kind.links if link in links)
    entries = [path for path, _ in (*files, *set(links).difference(kind.links))]
    tops = {top for path in entries for top in (path, *parents(path))}
    now = set(trees)
    kept = [tree for tree in kind.trees if tree in now and tree[0] not in tops]
    own = tuple(path + b"/" for path, *_ in now.difference(kept))
    kind.trees = tuple(tree for tree in kept if not tree[0].startswith(own))


def _is_to_read(tree: Tree) -> bool:
    """Tell whether a tree is a copy that is the same for every user."""
    _, kind, what = tree
    return kind in {"execute", "read", "device"} and what is False


def send_order(
    child: Child, body: tuple[Any, ...], fds: list[int], owners: int
) -> bool:
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
        child.close_line()
    return True
