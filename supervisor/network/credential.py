"""The section `[credential.NAME]`: the server and header of a secret (NET15).

The secret itself is no part of them: `credential_file` reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from supervisor.network.hosts import (
    CREDENTIAL_SUFFIX,
    MAX_NAME_LENGTH,
    is_credential_name,
    shorten,
)
from supervisor.network.rule import Rule, RuleError, parse_rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from supervisor.network.section import CredentialSection

PORT = 80
"""Port at which a child speaks plain HTTP to the host of a credential."""
PLACE = "{file}"
"""The text in a header that the secret replaces."""

_FIELD = re.compile(
    r"(?P<name>[!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(?P<value>.*)", re.DOTALL
)
_RESERVED = frozenset(
    {
        *("accept-encoding", "connection", "content-encoding", "content-length"),
        *("expect", "host", "keep-alive", "range", "te", "trailer"),
        *("transfer-encoding", "upgrade"),
    }
)
"""Headers that the host writes itself, or that say how a request is read."""


class CredentialError(ValueError):
    """A value that a key of a credential cannot have; its text does not name the key."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The configuration of a credential.

    Attributes:
        name: in the configuration.
        rule: for its server, one name and one port.
        header: the name of the header.
        before: the text in its value before the secret.
        after: the text after the secret.
    """

    name: str
    rule: Rule
    header: str
    before: str
    after: str

    @property
    def server(self) -> str:
        """The name of the server."""
        return str(self.rule.target)

    @property
    def port(self) -> int:
        """The port of the server."""
        return self.rule.ports[0]

    @property
    def inner_name(self) -> str:
        """The name by which a child reaches the server."""
        return f"{self.server}{CREDENTIAL_SUFFIX}"

    @property
    def inner_rule(self) -> Rule:
        """The rule of a child that may use it."""
        return Rule(self.inner_name, (PORT,))


def parse_terms(name: str, section: CredentialSection) -> Terms:
    """Return what a section without faults says."""
    header, before, after = parse_header(section.header)
    return Terms(name, parse_server(section.host), header, before, after)


def faults(section: CredentialSection) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each word of a section that cannot be."""
    for key, parse in (("host", parse_server), ("header", parse_header)):
        try:
            parse(getattr(section, key))
        except CredentialError as why:
            yield key, str(why)


def parse_server(text: str) -> Rule:
    """Return the rule for the server of a credential.

    Raises:
        CredentialError: it is for something else than one name and one port.
    """
    try:
        rule = parse_rule(text)
    except RuleError as why:
        raise CredentialError(str(why)) from None
    fault = next((text for is_so, text in _server_faults(rule) if is_so), None)
    if fault is not None:
        raise CredentialError(f"cannot send a secret to '{shorten(text)}': {fault}")
    return rule


def parse_header(text: str) -> tuple[str, str, str]:
    """Return a header's name, and its value before and behind the secret.

    Raises:
        CredentialError: it is no header, or one that the host writes itself.
    """
    match = _FIELD.fullmatch(text)
    problem = f"cannot use the header '{shorten(text)}'"
    if match is None:
        fault = "it is no name and value; write 'Authorization: Bearer {file}'"
        raise CredentialError(f"{problem}: {fault}")
    name, value = match["name"], match["value"].rstrip(" \t")
    for fault in _header_faults(name, value):
        raise CredentialError(f"{problem}: {fault}")
    before, _, after = value.partition(PLACE)
    return name, before, after


def uses_faults(
    names: Iterable[str], known: Mapping[str, CredentialSection]
) -> Iterator[str]:
    """Yield why a child cannot have all of some credentials together."""
    servers: dict[str, str] = {}
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield f"'{shorten(name)}' is named twice; leave one out"
            continue
        seen.add(name)
        section = known.get(name)
        if section is None:
            shown = ", ".join(known) or "none"
            yield f"there is no credential '{shorten(name)}'; there are: {shown}"
            continue
        try:
            server = str(parse_server(section.host).target)
        except CredentialError:
            continue  # told with the credential
        other = servers.setdefault(server, name)
        if other != name:
            yield f"'{other}' and '{name}' are both for {server}; leave one out"


def _header_faults(name: str, value: str) -> Iterator[str]:
    if not value.isascii() or not value.isprintable():
        yield "its value has control characters or others than ASCII; leave them out"
    if value.count(PLACE) != 1 or PLACE in name:
        yield f"the secret has one place in its value; write {PLACE} once"
    if name.lower() in _RESERVED:
        yield "the host writes that header itself; name another one"


def _server_faults(rule: Rule) -> Iterator[tuple[bool, str]]:
    """Yield whether a rule has a fault, and which; the first that it has is told."""
    name = rule.target if isinstance(rule.target, str) else ""
    yield rule.is_refusal, "it begins with !; leave that out"
    yield not name, "it is an address, and its certificate is for a name; write that"
    yield "*" in name, "it stands for many names; write one"
    yield len(rule.ports) > 1, "it has several ports; write one"
    yield bool(rule.tls), "the host speaks TLS itself; leave the option tls out"
    is_inner = is_credential_name(name) or name == "localhost"
    yield is_inner, "no server outside has that name; write another one"
    is_long = len(name) + len(CREDENTIAL_SUFFIX) > MAX_NAME_LENGTH
    yield is_long, f"it is too long to have {CREDENTIAL_SUFFIX} behind it; shorten it"
