"""Narrowed tokens of ToolExec: made from another token, without the host.

    narrow_token("0123...", "9f...", tools=["make"], root=False)
        -> "ID~id:9f...~tools:make~noroot~MAC"

1. A narrowed token names the child's token by a digest, lists the rights that are given
   up (caveats), and ends in a MAC over them, whose key is the token before.  It can be
   narrowed again; its holder cannot remove a caveat or find the key (spec A5, I8).
2. Every narrowing has an id of its own: its holder sees only its own executions.
3. A token with an unknown caveat is invalid.
4. An invalid token is found at small cost: its bytes and caveats are limited.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

MAX_TOKEN_BYTES = 8192
"""Longest narrowed token: several times the names of all tools."""

MAX_CAVEATS = 64
"""Most caveats of a narrowed token: twenty narrowings, each of the one before.  Each
caveat costs a MAC before the token is known to be valid."""

ID_DIGITS = 16
_MAC_DIGITS = 64


class TokenRights:
    """The rights that a token gives.

    Attributes:
        tools: the tools that it may run; None for all of its child.
        root: its tools may work in the child's root.
        scope: the narrowing whose executions it sees; empty for the child's own token.
    """

    __slots__ = ("root", "scope", "tools")

    def __init__(
        self,
        tools: frozenset[str] | None = None,
        *,
        root: bool = True,
        scope: str = "",
    ) -> None:
        self.tools = tools
        self.root = root
        self.scope = scope

    @property
    def is_narrowed(self) -> bool:
        """Whether the token gives less than its child has."""
        return bool(self.scope)

    @classmethod
    def of(cls, caveats: Iterable[str]) -> Self | None:
        """Return the rights that caveats leave; None if one is unknown."""
        rights = cls()
        for caveat in caveats:
            kind, _, value = caveat.partition(":")
            if kind == "tools":
                tools = frozenset(value.split("/")) - {""}
                rights.tools = tools if rights.tools is None else rights.tools & tools
            elif caveat == "noroot":
                rights.root = False
            elif kind == "id":
                rights.scope += f"{value}/"
            else:
                return None
        return rights


ALL = TokenRights()
"""The rights of a child's own token."""


def narrow_token(
    token: str, name: str, *, tools: Iterable[str] | None = None, root: bool = True
) -> str:
    """Return a token with the rights of another one, or fewer.

    Args:
        token: a child's token, or a narrowed one.
        name: a random id of letters and digits; it marks the executions of this token.
        tools: the only tools that it may run; None leaves all.
        root: its tools may work in the child's root; else in workspaces of sidecars only.
    """
    caveats = [f"id:{name}"]
    if tools is not None:
        caveats.append("tools:" + "/".join(sorted(tools)))
    if not root:
        caveats.append("noroot")
    parsed = parse_narrowed(token.encode("utf-8", "surrogateescape"))
    if parsed is not None:
        root_name, before, token = parsed
        return "~".join((root_name, *before, *caveats, mac(token, caveats)))
    return "~".join((identity(token), *caveats, mac(token, caveats)))


def identity(token: str) -> str:
    """Return the digest that names a child's token in the tokens made from it."""
    return mac(token, ("identity",))[:ID_DIGITS]


def mac(key: str, caveats: Iterable[str]) -> str:
    """Return the MAC of caveats, one after the other."""
    import hashlib  # noqa: PLC0415 - for those who narrow
    import hmac  # noqa: PLC0415

    found = key.encode("utf-8", "surrogateescape")
    for caveat in caveats:
        text = caveat.encode("utf-8", "surrogateescape")
        found = hmac.new(found, text, hashlib.sha256).hexdigest().encode()
    return found.decode()


def parse_narrowed(token: bytes) -> tuple[str, tuple[str, ...], str] | None:
    """Return (identity, caveats, MAC) of a narrowed token; None for another text."""
    if len(token) > MAX_TOKEN_BYTES or not token.isascii():
        return None
    if not 1 < token.count(b"~") <= MAX_CAVEATS + 1:
        return None
    name, *caveats, last = token.decode("ascii").split("~")
    if len(name) != ID_DIGITS or len(last) != _MAC_DIGITS:
        return None
    return name, tuple(caveats), last
