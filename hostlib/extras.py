"""The optional packages, and the extra that installs each.

``pyproject.toml`` has the same table; a test compares the two.
"""

from __future__ import annotations

import errno
from importlib.util import find_spec

EXTRAS: dict[str, dict[str, str]] = {
    "llm": {"openai": "openai", "re2": "google-re2"},
    "fds": {"blake3": "blake3", "re2": "google-re2", "stringzilla": "stringzilla"},
    "mcp": {
        "mcp": "mcp",
        "blake3": "blake3",
        "re2": "google-re2",
        "stringzilla": "stringzilla",
    },
    "metrics": {"prometheus_client": "prometheus-client"},
    "postgres": {"psycopg": "psycopg"},
    "ray": {"ray": "ray"},
}
"""Extra -> module -> package; the code that uses ``units`` checks for it itself."""


def check_packages(what: str, extra: str) -> None:
    """Raise ``OSError`` if a package of an extra is missing; its text says what to do.

    Args:
        what: the action that needs it: a verb and its object.
        extra: a key of ``EXTRAS``.
    """
    if why := missing_package(extra):
        raise OSError(errno.ENOPKG, f"cannot {what}: {why}")


def missing_package(extra: str) -> str:
    """Return the package of an extra that is missing, and what to do; "" if none is.

    Args:
        extra: a key of ``EXTRAS``.
    """
    for module, package in EXTRAS[extra].items():
        if not _is_there(module):
            return f"the package {package} is not installed; install sandhost[{extra}]"
    return ""


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # its import is blocked
        return False
