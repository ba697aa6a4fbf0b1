"""Names of answers and of their parts, where a provider gave none."""

from __future__ import annotations

import secrets


def make_id(kind: str) -> str:
    """Return a new name such as ``msg_5f0c...``."""
    return f"{kind}_{secrets.token_hex(16)}"
