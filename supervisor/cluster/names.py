"""Names that the parts of the fleet on one machine share; imports nothing."""

from __future__ import annotations

DOOR = "fleet"
"""Name of the door's socket, in the directory of the control socket."""

PORT = 6379
"""Default port of the fleet's head: Ray's own."""

LOOPBACK = "127.0.0.1"
"""The address that keeps Ray from listening on others."""

OWN_PORTS = (
    "--node-manager-port",
    "--object-manager-port",
    "--metrics-export-port",
    "--runtime-env-agent-port",
    "--dashboard-agent-grpc-port",
    "--dashboard-agent-listen-port",
)
"""Ray's options for its own ports of a node, one each."""

WORKER_PORTS = (10_002, 19_999)
"""First and last port of actors where `--ports` says nothing: Ray's own range."""

LEAST_PORTS = len(OWN_PORTS) + 8
"""Fewest ports in `--ports`: Ray's own, and those of actors and of their start."""
