"""``[metrics]``: the address of figures, and the page for people."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import msgspec

from hostlib.user_values import OptionError, check_value

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLE = "tcp://127.0.0.1:9464"


class Address(NamedTuple):
    """An address to listen at; port 0 lets the kernel choose."""

    host: str
    port: int


class MetricsSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[metrics]``; without the section there is no listener."""

    listen: str = EXAMPLE
    page: bool = False


def parse_listen(text: str) -> Address:
    """Return the address in ``listen``.

    Raises:
        OptionError: it is no address, or not one of this machine's loopback.
    """
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = urlsplit("")
    if parts.scheme != "tcp" or not host or port is None or text != _plain(host, port):
        raise OptionError(f"write tcp://ADDRESS:PORT as in {EXAMPLE}, not {text!r}")
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise OptionError(
            f"{host!r} is a name and may lead elsewhere later; write an address in numbers"
        ) from None
    if not is_loopback:
        raise OptionError(
            f"{host!r} is not on loopback, and requests are not authenticated; listen at"
            " 127.0.0.1 or ::1 behind a proxy with authentication"
        )
    return Address(host, port)


def _plain(host: str, port: int) -> str:
    """Return an address as it is written, so that a text can have nothing else."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def check_metrics(section: MetricsSection) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value that ``[metrics]`` cannot have."""
    yield from check_value("listen", parse_listen, section.listen, OptionError)
