"""Host names and addresses as text: one form for each of them, or an error.

1. A name is compared in lower case, IDNA-encoded, without a trailing dot (spec NET1).
2. A text that some resolver would read as a number is no name: `2130706433` and `0x7f.1` are
   127.0.0.1 to inet_aton(3). An address has one spelling: dotted decimal, or v6.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address

Address = IPv4Address | IPv6Address

MAX_NAME_LENGTH = 253
"""Bytes of a name as text: 255 on the wire, less a length and the root (RFC 1035)."""

CREDENTIAL_SUFFIX = ".sandhost"
"""The suffix of a credential's host in the name by which a child reaches it."""

# `_` is in no host name by RFC 952, and in many that are used (`_acme.a`, buckets).
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
# The rule by which browsers decide that a host is a v4 address, and not a name.
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")

_PORT = re.compile(r"[1-9][0-9]{0,4}")


class HostError(ValueError):
    """A text that is no name and no address; its text is reason and remedy."""


def parse_name(text: str) -> str:
    """Return the form in which a name is compared.

    Raises:
        HostError: it is no name.
    """
    name = (text if text.isascii() else _encode(text)).lower().removesuffix(".")
    if not name:
        raise HostError("a name is missing; write one, or *")
    if _ENDS_IN_NUMBER.fullmatch(name):
        raise HostError("these numbers are no address; write dotted decimal")
    if len(name) > MAX_NAME_LENGTH:
        raise HostError(f"it is longer than {MAX_NAME_LENGTH}; shorten it")
    for label in name.split("."):
        if not _LABEL.fullmatch(label):
            raise HostError(
                "a label has 1 to 63 letters, digits, - and _; write a.example.com"
            )
    return name


def _encode(text: str) -> str:
    import idna  # noqa: PLC0415 - its tables cost 5 ms, and few names need them

    try:
        return idna.encode(text, uts46=True, std3_rules=True).decode("ascii")
    except idna.IDNAError:
        raise HostError("IDNA does not encode it; write its xn-- form") from None


def is_credential_name(name: str) -> bool:
    """Tell whether a name, or a pattern of names, lies below `sandhost` (spec NET15)."""
    return f".{name}".endswith(CREDENTIAL_SUFFIX)


def parse_v4(text: str) -> IPv4Address:
    """Return a v4 address from dotted decimal.

    Raises:
        HostError: it is another text.
    """
    try:
        return IPv4Address(text)
    except ValueError:
        raise HostError("these numbers are no address; write dotted decimal") from None


def parse_v6(text: str) -> IPv6Address:
    """Return a v6 address from its text without brackets.

    Raises:
        HostError: it is another text, has a zone, or is a v4 address in v6 form.
    """
    if "%" in text:
        raise HostError("an address with a zone is not routed; leave the zone out")
    try:
        address = IPv6Address(text)
    except ValueError:
        raise HostError("it is no v6 address; write [2001:db8::1]") from None
    if address.ipv4_mapped is not None:
        raise HostError("a v4 address in v6 form; write it in dotted decimal")
    return address


def parse_port(text: str) -> int | None:
    """Return a port from plain decimal; None for another text."""
    port = int(text) if _PORT.fullmatch(text) else 0
    return port if 0 < port < 65_536 else None


def parse_host(text: str) -> str | Address:
    """Return the name or the address of a host as URLs write it.

    Raises:
        HostError: it is neither.
    """
    if text.startswith("["):
        if not text.endswith("]"):
            raise HostError("a bracket is missing; write [2001:db8::1]")
        return parse_v6(text[1:-1])
    if text and text.strip("0123456789.") == "":
        return parse_v4(text)
    return parse_name(text)


def parse_proxied_host(text: str) -> str | Address:
    """Return the host that a proxy is asked for.

    Raises:
        HostError: it is none, or a credential's, whose requests the host has to read.
    """
    host = parse_host(text)
    if isinstance(host, str) and is_credential_name(host):
        raise HostError("it is reached without the proxy; set no_proxy=.sandhost")
    return host


def format_host(host: str | Address) -> str:
    """Return a host as `parse_host` reads it."""
    return f"[{host}]" if isinstance(host, IPv6Address) else str(host)


def shorten(text: str, most: int = 48) -> str:
    """Return a text of a user or a peer in a form that is fit for one line."""
    plain = "".join(char if char.isprintable() else "?" for char in text[: most + 1])
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."
