"""The keys of a policy that say what its children reach, as they are written."""

from __future__ import annotations

from typing import Literal

import msgspec

Mode = Literal["none", "host", "learn", "rules"]
Pool = Literal["own", "outer"]


class CredentialSection(msgspec.Struct, forbid_unknown_fields=True):
    """`[credential.NAME]`: a secret that the host adds to requests (spec NET15).

    Attributes:
        host: a rule for one name and one port.
        header: a header field with `{file}` in the place of the secret.
        file: holds the secret.
        ca_file: certificates that sign the server's; None for those of the system.
    """

    host: str
    header: str
    file: str
    ca_file: str | None = None


class NetworkSection(msgspec.Struct, forbid_unknown_fields=True):
    """The keys; `pool` says whose addresses the host's own resolver gives out.

    `credentials` are names of `[credential.NAME]`.
    """

    network: Literal["none", "host", "learn"] | list[str] = "none"
    within: list[str] = []
    publish: list[str] = []
    upstream: str | None = None
    proxy_env: bool = False
    pool: Pool = "own"
    credentials: list[str] = []

    @property
    def mode(self) -> Mode:
        """The word for what `network` sets."""
        return "rules" if isinstance(self.network, list) else self.network
