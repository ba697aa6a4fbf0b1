"""The words of an order that are no layer, and the kinds of what a layer is given."""

HELD = "held"
"""The kind of a tree of "mountns" that the host has made: a mount by its position."""

OVERLAY = "overlay"
"""The kind of one that the child makes over what is there: by the directory of its layer."""

LOCKS = "locks"
"""A word of an order, and no layer: how many descriptors the launchpad keeps for it."""

JOINED = "joined"
"""The kind of a mount of another child's; the words of "userns" and "netns" for its own."""

JOINS = "joins"
"""A word of an order, and no layer: which namespaces of another child come with it."""

USERS, VIEW, NET = "users", "view", "net"
"""Names of the kinds: of users, of mounts, of the network."""

SENT = "sent"
"""A word of an order, and no layer: the child sends the host its overlays, and its user
and mount namespaces."""

NO_LAYERS = frozenset({LOCKS, JOINS, SENT})
"""The words of an order that no step puts on."""
