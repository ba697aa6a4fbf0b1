"""The name of the door's socket, by which a program knows that FD 3 is the door."""

from __future__ import annotations

DOOR_NAME = b"\0sandhost-door-"
"""The beginning of the abstract name of a host's end (unix(7)); no socket listens there."""
