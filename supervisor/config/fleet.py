"""``[fleet]``: the name and the bounds of a daemon that is a node of a fleet."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec

from hostlib.user_values import OptionError, check_value, parse_duration, parse_size
from supervisor.fleet.lease import LEAST_LEASE_S
from supervisor.fleet.slices import DAY, NEVER
from supervisor.fleet.store_address import fault_of, is_postgres, secret_files

if TYPE_CHECKING:
    from collections.abc import Iterator

WINDOWS = (DAY, NEVER)

LONGEST_LEASE_S = 3600.0
"""A lost node is told after its lease: more than an hour is a mistake of units."""

MOST_BASES = 1000
"""Kept ones that no workspace uses."""

MOST_WORDS = 64
"""Most labels."""

WORD_RULE = "letters, digits, '.', '_' and '-', 64 at most"
"""Characters of nodes' names and of labels; the first is a letter or a digit."""

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ADDRESS = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[^\s:\[\]]+):[0-9]{1,5}")


class FleetQuotaSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[fleet.quota]``; read where the directory runs.

    The cost of a token is set in each node's own ``[llm.quota]``.
    """

    max_tokens: int | float | None = None
    window: str = DAY


class FleetSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[fleet]``; without the section the daemon is in no fleet."""

    address: str | None = None
    node: str | None = None
    labels: list[str] = []
    store: str | None = None
    lease: str = "5s"
    unfenced: bool = False
    base_size: int | str = "1G"
    bases_kept: int = 8
    quota: FleetQuotaSection = msgspec.field(default_factory=FleetQuotaSection)

    def key_files(self) -> Iterator[tuple[str, str]]:
        """Yield (key, path) of the files of secrets that the store's address names."""
        for path in secret_files(self.store):
            yield "store", path


def is_fleet_word(text: str) -> bool:
    """Return whether a text can name a node or be a label."""
    return _WORD.fullmatch(text) is not None


def check_fleet(section: FleetSection) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value that ``[fleet]`` cannot have."""
    if section.address is not None and not is_address(section.address):
        yield "address", f"write IP:PORT as in 10.0.0.1:6379, not {section.address!r}"
    yield from _check_store(section.store)
    yield from _check_words(section)
    yield from check_value("lease", _lease, section.lease, OptionError)
    yield from check_value("base_size", parse_size, str(section.base_size), OptionError)
    if not 0 <= section.bases_kept <= MOST_BASES:
        yield "bases_kept", f"at least 0, at most {MOST_BASES}"
    yield from _check_quota(section.quota)


def _check_store(store: str | None) -> Iterator[tuple[str, str]]:
    if store is None or _is_path(store):
        return
    if not is_postgres(store):
        # It is not shown: an address in another form may have a password.
        yield "store", "the absolute path of a directory of the head, or postgresql://"
    elif (reason := fault_of(store)) is not None:
        yield "store", reason
    else:
        from hostlib.keys import KeyFileError, identify_key_file  # noqa: PLC0415 - ctypes

        for path in secret_files(store):
            try:
                identify_key_file(path)
            except KeyFileError as why:
                yield "store", str(why)


def _check_words(section: FleetSection) -> Iterator[tuple[str, str]]:
    if section.node is not None and not is_fleet_word(section.node):
        yield "node", f"{WORD_RULE}, not {section.node!r}"
    for label in section.labels:
        if not is_fleet_word(label):
            yield "labels", f"{WORD_RULE}, not {label!r}"
    if len(section.labels) > MOST_WORDS:
        yield "labels", f"at most {MOST_WORDS}"


def _check_quota(quota: FleetQuotaSection) -> Iterator[tuple[str, str]]:
    limit = quota.max_tokens
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        yield "quota.max_tokens", "more than 0; leave it out for no limit"
    if quota.window not in WINDOWS:
        yield "quota.window", "day or never"


def _lease(text: str) -> None:
    if not LEAST_LEASE_S <= parse_duration(text) <= LONGEST_LEASE_S:
        least = f"{LEAST_LEASE_S:g}s, which is a beat and three attempts"
        raise OptionError(f"from {least}, to an hour")


def is_address(text: str) -> bool:
    """Return whether a text has the form IP:PORT, or NAME:PORT."""
    is_formed = _ADDRESS.fullmatch(text) is not None
    return is_formed and 0 < int(text.rpartition(":")[2]) < 65_536


def _is_path(text: str) -> bool:
    return text.startswith("/") and "\0" not in text
