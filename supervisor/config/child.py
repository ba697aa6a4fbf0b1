"""``[child.NAME]``: the children that ``serve`` keeps, and their restarts."""

from __future__ import annotations

import re
import signal
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from hostlib.user_values import (
    OptionError,
    check_value,
    join_key,
    parse_duration,
    parse_period,
    parse_size,
)
from supervisor.config.read import directory_fault
from supervisor.spawn.restart_policies import RESTARTS, may_come_back
from supervisor.spawn.restarts import RestartPolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

MIN_LOG_BYTES = 4096
"""Smallest log file: a smaller one would hold less than one burst of a pipe."""

MAX_LOGS_KEPT = 1000
"""Most rotated files of a log."""

MOST_RINGS_TOLD = 100
"""Most reported rings: each takes a look at all children."""

# signal(7): their default is to stop or continue a program, or nothing. SIGWINCH is left
# out: servers end gracefully by it.
_NOT_TO_END = frozenset(
    {
        signal.SIGCHLD,
        signal.SIGCONT,
        signal.SIGSTOP,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
        signal.SIGURG,
    }
)

_TO_END = "TERM, INT, QUIT, HUP or USR1"

# The directory of its log has the name.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)


_WORDS: dict[str, tuple[object, ...]] = {
    "restart": RESTARTS,
    "dialect": (1, 2),
    "transport": ("socketpair", "pipes"),
}

NAME_RULE = (
    "a child's name has at most 64 letters, digits, '_', '.' and '-', and begins with"
    " none of the last two"
)
"""The reason for a refused name."""


class LogSection(msgspec.Struct, forbid_unknown_fields=True):
    """``log`` of a child: how much of its output is kept."""

    max_size: str = "10M"
    keep: int = 5


class ChildSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[child.NAME]``."""

    command: list[str]
    policy: str | None = None
    restart: str = "no"
    backoff: str = "1s"
    max_restarts: int = 5
    within: str = "5m"
    after: list[str] = []
    stop_signal: str = "TERM"
    env: dict[str, str] = {}
    cwd: str | None = None
    dialect: int = 2
    transport: str = "socketpair"
    log: LogSection = msgspec.field(default_factory=LogSection)

    def policy_phrase(self) -> str:
        """Return its policy as a text for messages; "" if it has none."""
        return "" if self.policy is None else f" (policy {self.policy!r})"


def restart_policy(section: ChildSection) -> RestartPolicy:
    """Return when and how often a section wants restarts."""
    return RestartPolicy(
        restart=section.restart,
        backoff_s=parse_duration(section.backoff),
        max_restarts=section.max_restarts,
        within_s=parse_duration(section.within),
    )


def odd_restarts(children: Mapping[str, ChildSection]) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of children whose restarts would never end."""
    for name, child in children.items():
        try:
            comes_back = may_come_back(child.restart)
            is_endless = comes_back and restart_policy(child).is_endless()
        except OptionError:
            continue  # reported as a fault
        if is_endless:
            text = (
                f"a child that always fails is never given up: {child.max_restarts} waits"
                f" from {child.backoff} on take longer than {child.within}; write more"
            )
            yield f"child.{join_key(name)}.within", text


def check_children(section: Mapping[str, ChildSection]) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value that a child cannot have."""
    for name, child in section.items():
        if not is_child_name(name):
            yield join_key(name), NAME_RULE
        for key, reason in (*_check_command(child), *_check(child)):
            yield f"{join_key(name)}.{key}", reason
    after = {name: child.after for name, child in section.items()}
    for name, ring in islice(_rings(after), MOST_RINGS_TOLD):
        yield f"{join_key(name)}.after", f"they wait for each other: {ring}"


def _rings(after: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Yield (name, ring) until removing words from ``after`` breaks every ring."""
    left = {name: list(others) for name, others in after.items()}
    while True:
        try:
            start_order(left)
        except CycleError as why:
            ring = why.args[1]  # each waits for the next; the first is also the last
            waiting, waited_for = ring[0], ring[-2]
            left[waiting] = [name for name in left[waiting] if name != waited_for]
            yield waiting, " after ".join(reversed(ring))
        else:
            return


def is_child_name(name: str) -> bool:
    """Return whether a child may have this name."""
    return _NAME.fullmatch(name) is not None


def check_new_child(
    name: str | None, section: ChildSection, policies: Collection[str]
) -> None:
    """Refuse a child that no configuration names and that cannot be.

    Args:
        name: its own; None for one that gets a name.
        section: its description.
        policies: those that there are.

    Raises:
        ValueError: the text goes behind "cannot spawn".
    """
    if name is not None and not is_child_name(name):
        raise ValueError(f" {name!r}: {NAME_RULE}")
    for key, reason in check_children({"new": section}):
        raise ValueError(f": {key.partition('.')[2]}: {reason}")
    if section.policy is not None and section.policy not in policies:
        known = ", ".join(policies) or "none"
        raise ValueError(f": there is no policy {section.policy!r}; there are: {known}")


def start_order(after: Mapping[str, list[str]]) -> list[str]:
    """Return names so that each comes after those that it names; otherwise in order.

    Raises:
        CycleError: some of them wait for each other.
    """
    known = {name: [o for o in others if o in after] for name, others in after.items()}
    return list(TopologicalSorter(known).static_order())


def longest_chain(after: Mapping[str, list[str]]) -> int:
    """Return the length of the longest chain of names, each after another one."""
    depth: dict[str, int] = {}
    for name in start_order(after):
        depth[name] = 1 + max((depth.get(o, 0) for o in after[name]), default=0)
    return max(depth.values(), default=0)


def stop_signal(name: str) -> int:
    """Return the number of a signal that asks a program to end, from its name.

    Raises:
        OptionError: there is no such signal, or it does not end a program.
    """
    number = _signal_named(name)
    if number in _NOT_TO_END:
        raise OptionError(f"does not end a program: {name!r}; write {_TO_END}")
    return number


def signal_number(text: str) -> int:
    """Return a signal's number from ``9``, ``KILL`` or ``SIGKILL``.

    Raises:
        OptionError: there is no such signal.
    """
    if text.isascii() and text.isdigit() and 0 < int(text) < signal.NSIG:
        return int(text)
    return _signal_named(text)


def _signal_named(name: str) -> int:
    """Return a signal's number from ``TERM`` or ``SIGTERM``."""
    number = getattr(signal, "SIG" + name.removeprefix("SIG"), None)
    if not isinstance(number, signal.Signals):
        raise OptionError(f"not a signal: {name!r}; write {_TO_END}")
    return int(number)


def _check_command(child: ChildSection) -> Iterator[tuple[str, str]]:
    if not child.command or not child.command[0]:
        yield "command", 'names no program; write ["PROGRAM", "ARGUMENT", ...]'
    if any("\0" in word for word in child.command):
        yield "command", "a word holds a NUL byte"
    for variable, value in child.env.items():
        if not variable or "=" in variable or "\0" in variable + value:
            yield f"env.{join_key(variable)}", "not a possible variable"
    if child.cwd is not None and (why := directory_fault(child.cwd)):
        yield "cwd", why


def _check(child: ChildSection) -> Iterator[tuple[str, str]]:
    for key, allowed in _WORDS.items():
        value = getattr(child, key)
        if value not in allowed:
            yield key, f"one of {', '.join(map(str, allowed))}, not {value!r}"
    yield from check_value("backoff", parse_duration, child.backoff, OptionError)
    if child.max_restarts < 0:
        yield "max_restarts", "at least 0"
    yield from check_value("within", parse_period, child.within, OptionError)
    yield from check_value("stop_signal", stop_signal, child.stop_signal, OptionError)
    yield from check_value("log.max_size", _log_size, child.log.max_size, OptionError)
    if not 0 <= child.log.keep <= MAX_LOGS_KEPT:
        yield "log.keep", f"at least 0, at most {MAX_LOGS_KEPT}"


def _log_size(text: str) -> None:
    if parse_size(text) < MIN_LOG_BYTES:
        raise OptionError(f"at least {MIN_LOG_BYTES} bytes")
