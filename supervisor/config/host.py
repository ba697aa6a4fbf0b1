"""``[host]`` and ``[limits]``: the bounds of the whole host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hostlib.linux.descriptors import open_files_warnings
from hostlib.user_values import (
    OptionError,
    check_value,
    parse_duration,
    parse_period,
    parse_size,
)
from vfs.payload import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_CHILDREN = 100_000
"""Most children: each takes three of a million descriptors."""


class HostSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[host]``."""

    runtime_dir: str | None = None
    state_dir: str | None = None
    control: str | None = None
    log_format: str | None = None
    grace: str = "5s"
    max_children: int = 1000


class LimitsSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[limits]``."""

    write: str = "16M"
    line: str = "64K"
    payload_budget: str = "64M"
    open_files_per_client: int = 256
    clients_per_child: int = 64
    deadline: str = "30s"


def check_host(section: HostSection) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value that ``[host]`` cannot have."""
    yield from check_value("grace", parse_duration, section.grace, OptionError)
    if not 1 <= section.max_children <= MAX_CHILDREN:
        yield "max_children", f"at least 1, at most {MAX_CHILDREN}"
    if section.log_format not in (None, "text", "json"):
        yield "log_format", f"text or json, not {section.log_format!r}"
    for key in ("runtime_dir", "state_dir", "control"):
        path = getattr(section, key)
        if path is not None and ("\0" in path or not path):
            yield key, f"not a path: {path!r}"


def odd_limits(section: LimitsSection) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of probable mistakes in ``[limits]``."""
    for text in open_files_warnings(section.open_files_per_client):
        yield "open_files_per_client", text
    try:
        part_bytes = parse_size(section.payload_budget) // PARTS
        is_small = part_bytes < parse_size(section.write)
    except OptionError:
        return  # reported as a fault
    if is_small:
        text = (
            f"half of {section.payload_budget}, the part of one child, is less than"
            f" write ({section.write}): what is longer goes through a file, each time"
        )
        yield "payload_budget", text


def check_limits(section: LimitsSection) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value that ``[limits]`` cannot have."""
    for key in ("write", "payload_budget"):
        yield from check_value(key, parse_size, getattr(section, key), OptionError)
    yield from check_value("line", _line, section.line, OptionError)
    yield from check_value("deadline", parse_period, section.deadline, OptionError)
    for key in ("open_files_per_client", "clients_per_child"):
        if getattr(section, key) < 1:
            yield key, "at least 1"


def _line(text: str) -> None:
    if parse_size(text) != 65_536:
        raise OptionError("only 64K, the wire's own limit")
