"""How a program tells FD 3, the door to its host, from another socket in that place."""

from __future__ import annotations

DOOR_NAME = b"\0sandhost-door-"
"""How the name of a host's end begins (unix(7), abstract). Nothing listens under it."""
