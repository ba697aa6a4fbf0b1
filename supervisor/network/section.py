"""The keys of a policy that say what its children reach, as they are written."""

from __future__ import annotations

from typing import Literal

import msgspec

Mode = Literal["none", "host", "learn", "rules"]
Pool = Literal["own", "outer"]


class NetworkSection(msgspec.Struct, forbid_unknown_fields=True):
    """The keys; `pool` says whose addresses the host's own resolver gives out."""

    network: Literal["none", "host", "learn"] | list[str] = "none"
    within: list[str] = []
    publish: list[str] = []
    upstream: str | None = None
    proxy_env: bool = False
    pool: Pool = "own"

    @property
    def mode(self) -> Mode:
        """The word for what `network` sets."""
        return "rules" if isinstance(self.network, list) else self.network
