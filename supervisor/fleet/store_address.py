"""The address of a PostgreSQL that a fleet's store is in; without I/O.

An address is libpq's URI, without a password: a configuration is shown and passed on, and
its password stands in a file that libpq reads (`passfile`, PGPASSFILE, a service).
"""

from __future__ import annotations

import re
from urllib.parse import SplitResult, unquote, urlsplit

_BEGIN = ("postgresql://", "postgres://")
_HOST = re.compile(r"(\[[0-9A-Za-z:.%]+\]|[^\s:\[\]@/]*)(:[0-9]{1,5})?")
_SECRETS = frozenset({"password", "sslpassword", "oauth_client_secret"})


def is_postgres(store: str | None) -> bool:
    """Return whether a store is meant to be in a PostgreSQL."""
    return store is not None and store.startswith(_BEGIN)


def fault_of(address: str) -> str | None:
    """Return why an address cannot be used; it never quotes the address."""
    if not address.isprintable() or set(" #") & set(address):
        return "no spaces and no '#': write them as %20 and %23"
    try:
        parts = urlsplit(address)
        words = _words(parts)
    except ValueError:
        return "write postgresql://USER@HOST/DATABASE?passfile=/FILE"
    user, _, hosts = parts.netloc.rpartition("@")
    if ":" in user or _SECRETS & words.keys():
        return (
            "it has a password, and a configuration is no place for one: write it into"
            " a file, and name that by ?passfile=/FILE"
        )
    if not all(map(_HOST.fullmatch, hosts.split(","))):
        return "write a host as HOST, HOST:PORT or [IPv6]:PORT, with commas between"
    if not words.get("passfile", "/").startswith("/"):
        return "passfile: write an absolute path"
    return None


def name_of(address: str) -> str:
    """Return the database and the host of an address, for a text."""
    parts = urlsplit(address)
    words = _words(parts)
    hosts = parts.netloc.rpartition("@")[2] or words.get("host") or "the usual server"
    base = parts.path.lstrip("/") or words.get("dbname")
    if base is None and "service" in words:
        return f"service {words['service']!r}"
    what = "the usual database" if base is None else f"database {unquote(base)!r}"
    return f"{what} at {unquote(hosts)}"


def password_file(address: str | None) -> str | None:
    """Return the file that an address names for its password; None if it names none."""
    if address is None or not is_postgres(address):
        return None
    return _words(urlsplit(address)).get("passfile")


def _words(parts: SplitResult) -> dict[str, str]:
    """Return the parameters of an address; a '+' in them is one, as libpq has it.

    Raises:
        ValueError: one of them has no value.
    """
    words = {}
    for pair in filter(None, parts.query.split("&")):
        key, is_valued, value = pair.partition("=")
        if not is_valued:
            raise ValueError("a parameter without a value")
        words[unquote(key)] = unquote(value)
    return words
