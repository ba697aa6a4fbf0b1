"""The address of a PostgreSQL that a fleet's store is in; without I/O.

An address is libpq's URI, without a password: a configuration is shown and passed on, and
its password stands in a file that libpq reads (`passfile`, PGPASSFILE, a service).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

_BEGIN = ("postgresql://", "postgres://")
_HOST = re.compile(r"(\[[0-9A-Za-z:.%]+\]|[^\s:\[\]@/]*)(:[0-9]{1,5})?")
_SECRETS = frozenset(
    {
        "password", "sslpassword", "oauth_client_secret",
        "scram_client_key", "scram_server_key",
    }
)  # fmt: skip

_FILES = {
    "passfile": ("PGPASSFILE", ".pgpass"),
    "sslkey": ("PGSSLKEY", ".postgresql/postgresql.key"),
}
"""Parameters that name a file of secrets: (variable, file of HOME), their defaults."""


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
    for key in _FILES:
        file = words.get(key, "/")
        if not (file.startswith("/") or _is_of_engine(key, file)):
            return f"{key}: write an absolute path"
    return None


def _is_of_engine(key: str, value: str) -> bool:
    """Return whether a key is in hardware: ENGINE:ID, which is no file."""
    return key == "sslkey" and ":" in value


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


def secret_files(address: str | None) -> tuple[str, ...]:
    """Return the files of secrets that an address names: a password's, a key's."""
    if address is None or not is_postgres(address):
        return ()
    words = _words(urlsplit(address))
    named = ((key, words[key]) for key in _FILES if key in words)
    return tuple(file for key, file in named if not _is_of_engine(key, file))


def usual_secret_files(
    address: str | None, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the files in which libpq looks for secrets that an address does not name.

    Args:
        address: of the store.
        environment: of the process.
    """
    if address is None or not is_postgres(address):
        return ()
    words = _words(urlsplit(address))
    home = environment.get("HOME", "/")
    files = [
        environment.get(variable) or f"{home}/{usual}"
        for key, (variable, usual) in _FILES.items()
        if key not in words
    ]
    return tuple(file for file in files if file.startswith("/"))


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
