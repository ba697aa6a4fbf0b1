"""Tokens of ToolExec that stand for less: made from another one, without the host.

    narrowed("0123...", "9f...", tools=["make"], root=False)
        -> "ID~id:9f...~tools:make~noroot~MAC"

How such a token is made and taken apart.

Rules of this file.

1. A narrowed token names the child's token by a digest, says what is given up, and ends
   in a MAC over that, whose key is the token before.  It can be narrowed again; nobody
   can take a part off it, or get at the token it was made from (spec A5, I8).
2. Every narrowing has an id of its own: its holder sees its own executions, and nobody
   else's.
3. What is not understood stands for nothing: such a token is none.
4. To tell that a token is none costs little, however long it is: it has so many bytes
   and so many caveats.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

MAX_TOKEN_BYTES = 8192
"""Longest narrowed token: room for every tool of every kind, some times over."""

MAX_CAVEATS = 64
"""Most caveats of a narrowed token: twenty narrowings, one in the other.  Each costs a
MAC before it is known whether the token is one."""

_ID_DIGITS = 16
_MAC_DIGITS = 64


class Rights:
    """What a token stands for.

    Attributes:
        tools: that it may have run; None for those of its child.
        root: its tools may work in the child's root.
        scope: whose executions it sees; empty for the child's own token.
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
        """Whether it stands for less than its child has."""
        return bool(self.scope)

    @classmethod
    def of(cls, caveats: Iterable[str]) -> Self | None:
        """Return what is left after some caveats; None if one is not understood."""
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


ALL = Rights()
"""What a child's own token stands for."""


def narrowed(
    token: str, name: str, *, tools: Iterable[str] | None = None, root: bool = True
) -> str:
    """Return a token that stands for no more than one that is at hand.

    Args:
        token: a child's, or one that was narrowed before.
        name: of its own, random: letters and digits; its executions go by it.
        tools: the only ones that it may have run; None leaves all.
        root: its tools may work in the child's root; else in workspaces of sidecars only.
    """
    caveats = [f"id:{name}"]
    if tools is not None:
        caveats.append("tools:" + "/".join(sorted(tools)))
    if not root:
        caveats.append("noroot")
    taken = taken_apart(token.encode("utf-8", "surrogateescape"))
    if taken is not None:
        root_name, before, token = taken
        return "~".join((root_name, *before, *caveats, mac(token, caveats)))
    return "~".join((identity(token), *caveats, mac(token, caveats)))


def identity(token: str) -> str:
    """Return the digest that names a child's token in those made from it."""
    return mac(token, ("identity",))[:_ID_DIGITS]


def mac(key: str, caveats: Iterable[str]) -> str:
    """Return the MAC of caveats, one after the other."""
    import hashlib  # noqa: PLC0415 - for those who narrow
    import hmac  # noqa: PLC0415

    found = key.encode("utf-8", "surrogateescape")
    for caveat in caveats:
        text = caveat.encode("utf-8", "surrogateescape")
        found = hmac.new(found, text, hashlib.sha256).hexdigest().encode()
    return found.decode()


def taken_apart(token: bytes) -> tuple[str, tuple[str, ...], str] | None:
    """Return (identity, caveats, MAC) of a narrowed token; None if it is none."""
    if len(token) > MAX_TOKEN_BYTES or not token.isascii():
        return None
    if not 1 < token.count(b"~") <= MAX_CAVEATS + 1:
        return None
    name, *caveats, last = token.decode("ascii").split("~")
    if len(name) != _ID_DIGITS or len(last) != _MAC_DIGITS:
        return None
    return name, tuple(caveats), last
