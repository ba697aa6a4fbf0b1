"""The secrets of a host, read from their files (spec NET15).

A secret is in no text that this makes of itself: neither in an error nor in a `repr`.
"""

from __future__ import annotations

import base64
import binascii
import errno
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hostlib.keys import KeyFileError, read_key
from hostlib.redact import MIN_SECRET_CHARS, Redactor
from supervisor.network.credential import Terms, parse_terms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hostlib.keys import FileIdentity
    from supervisor.network.section import CredentialSection


@dataclass(frozen=True, slots=True)
class Credential:
    """A secret, and what it takes to use it.

    Attributes:
        terms: where it goes.
        value: of the header, with the secret.
        redactor: blots it out of answers.
        tls: checks the server's certificate.
        identity: of its file.
    """

    terms: Terms
    value: bytes = field(repr=False)
    redactor: Redactor = field(repr=False)
    tls: ssl.SSLContext = field(repr=False)
    identity: FileIdentity


def open_credentials(
    sections: Mapping[str, CredentialSection],
) -> dict[str, Credential]:
    """Return the credentials of a checked configuration, by name; blocks.

    Raises:
        OSError: a file cannot be used; `strerror` says why.
    """
    found = {}
    for name, section in sections.items():
        terms = parse_terms(name, section)
        try:
            secret, identity = read_key(section.file)
            context = open_tls(section.ca_file)
        except (KeyFileError, CertificateError) as why:
            raise OSError(errno.EINVAL, str(why)) from None
        value = f"{terms.before}{secret}{terms.after}".encode("ascii")
        redactor = Redactor({secret, *_decoded(terms, secret)})
        found[name] = Credential(terms, value, redactor, context, identity)
    return found


class CertificateError(Exception):
    """A file of certificates cannot be used; the text says why and what to do."""


def open_tls(ca_file: str | None) -> ssl.SSLContext:
    """Return what checks servers.

    Args:
        ca_file: certificates that sign theirs; None for those of the system.

    Raises:
        CertificateError: the file cannot be read, or holds none.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        why = "it holds no certificate in PEM form; write one into it"
        raise CertificateError(f"cannot use {ca_file!r}: {why}") from None
    except OSError as why:
        text = f"cannot use {ca_file!r}: {why.strerror}; name a file of certificates"
        raise CertificateError(text) from None
    context.set_alpn_protocols(["http/1.1"])
    return context


def _decoded(terms: Terms, secret: str) -> Iterator[str]:
    """Yield what a server reads out of a secret for Basic authentication (RFC 7617)."""
    if terms.before.strip().lower() != "basic":
        return
    try:
        text = base64.b64decode(secret, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return
    for part in (text, text.partition(":")[2]):
        if len(part) >= MIN_SECRET_CHARS:
            yield part
