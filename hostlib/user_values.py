"""Parsers of values that users write: sizes, durations, limits, variables."""

from __future__ import annotations

import re
import resource
from typing import TYPE_CHECKING, Any, NamedTuple

from hostlib.messages import printable

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

_SIZE = re.compile(r"(\d{1,4000})([KMGT]?)i?B?", re.ASCII)
_SIZE_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(ms|s|m|h|d)?", re.ASCII)
_DURATION_FACTORS = {
    "": 1.0,
    "s": 1.0,
    "ms": 0.001,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}


class OptionError(ValueError):
    """A value cannot be used; the text says which, why and what to write."""


def parse_size(text: str) -> int:
    """Return bytes from ``512M``, ``64K``, ``1G`` or a plain number.

    Raises:
        OptionError: the text is none of these, or more than a kernel counts.
    """
    size = _whole_size(text)
    if size > MOST_BYTES:
        raise OptionError(f"not a size: {text!r}; at most {MOST_BYTES}")
    return size


def _whole_size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"not a size: {text!r}; write bytes, or 64K, 512M, 1G")
    return int(match[1]) * _SIZE_FACTORS[match[2]]


def parse_duration(text: str) -> float:
    """Return seconds from ``30s``, ``500ms``, ``5m``, ``1h`` or a plain number.

    Raises:
        OptionError: the text is none of these.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"not a time: {text!r}; write seconds, or 500ms, 30s, 5m")
    return float(match[1]) * _DURATION_FACTORS[match[2] or ""]


def parse_period(text: str) -> float:
    """Return seconds, as ``parse_duration``, above 0.

    Raises:
        OptionError: the text is no time, or 0.
    """
    period_s = parse_duration(text)
    if period_s <= 0:
        raise OptionError("more than 0s")
    return period_s


class Limits(NamedTuple):
    """The limits of ``--limit``; None sets no limit.

    Attributes:
        memory: address space of each process, bytes (RLIMIT_AS).
        cpu: CPU time of each process, seconds (RLIMIT_CPU).
        processes: processes of the user (RLIMIT_NPROC; root is not bound by it).
        open_files: files open at once behind the door.
        bytes: growth of its root and grants, bytes.
        files: files and directories that it makes.
        file_size: size of each file, bytes, behind the door and (RLIMIT_FSIZE) beside
            it.
        cpus: processors' time of all its processes together (cgroup).
        time: run time, seconds; then it is stopped, as by ``--timeout``.
        connections: open connections of the network by name.
        net_bytes: bytes that these carry in both directions together.
    """

    memory: int | None = None
    cpu: int | None = None
    processes: int | None = None
    open_files: int | None = None
    bytes: int | None = None
    files: int | None = None
    file_size: int | None = None
    cpus: float | None = None
    time: float | None = None
    connections: int | None = None
    net_bytes: int | None = None

    def bounds(self) -> dict[str, Any]:
        """Return the limits that are set, by name."""
        return {name: most for name, most in self._asdict().items() if most is not None}

    def rlimits(self) -> tuple[tuple[int, int, int], ...]:
        """Return the limits that the kernel keeps, as (resource, soft, hard)."""
        found = []
        if self.memory is not None:
            found.append((resource.RLIMIT_AS, self.memory, self.memory))
        if self.cpu is not None:
            # One second between SIGXCPU, which a program may handle, and SIGKILL.
            found.append((resource.RLIMIT_CPU, self.cpu, self.cpu + 1))
        if self.processes is not None:
            found.append((resource.RLIMIT_NPROC, self.processes, self.processes))
        if self.file_size is not None:
            found.append((resource.RLIMIT_FSIZE, self.file_size, self.file_size))
        return tuple(found)


def network_limit_faults(limits: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) for each network limit of a child without a network."""
    for name in NETWORK_LIMITS:
        if name in limits:
            why = "nothing keeps it: the child has no network by name"
            yield name, f"{why}; leave it out, or give it rules"


def limit_origin(name: str, asked: Container[str]) -> str:
    """Return where the user wrote a limit of ``run``; ``asked`` are those of --limit."""
    return f"--limit: {name}" if name in asked else f"policy.run.limits.{name}"


_WHOLE = re.compile(r"\d{1,4000}", re.ASCII)

_CPUS = re.compile(r"\d{1,4}(?:\.\d{1,3})?", re.ASCII)
FEWEST_CPUS = 0.01
"""Smallest number of cpus: the kernel takes no quota below 1 ms in each 100 ms."""

_SIZES = frozenset({"memory", "bytes", "file_size", "net_bytes"})

NETWORK_LIMITS = ("connections", "net_bytes")
"""Limits of the network by name; a child without it cannot have them."""

MOST_BYTES = 2**63 - 1
"""The kernel counts sizes of files and memory in 63 bits (loff_t, RLIM_INFINITY)."""

_LEAST = {"memory": 1 << 20, "cpu": 1, "processes": 1}
"""Smallest limits with which a program starts: with less it fails before its first
instruction.  A loaded program has 128 KiB of stack (execve(2)), and its C library.  The
other limits may be 0."""

_MOST = {"cpu": MOST_BYTES // 10**9 - 1, "processes": 1 << 22}
"""Largest limits: the kernel counts processors' time in nanoseconds, and a second is added
here; PID_MAX_LIMIT is the most processes, and the most that ``pids.max`` takes."""

_CAP_SYS_RESOURCE = 24


def parse_limits(texts: Sequence[str]) -> Limits:
    """Return limits from ``memory=512M,cpu=60`` lists.

    Raises:
        OptionError: unknown names, bad values, names given twice: all of them.
    """
    found: dict[str, Any] = {}
    faults = []
    for item in ",".join(texts).split(",") if texts else ():
        name, equals, value = item.partition("=")
        name = name.strip()
        if not equals or name not in Limits._fields:
            known = ", ".join(Limits._fields)
            faults.append(f"not a limit: {item!r}; write NAME=VALUE with {known}")
        elif name in found:
            faults.append(f"limit {name} is given twice")
        else:
            try:
                found[name] = _limit(name, value)
            except OptionError as why:
                faults.append(str(why))
                found[name] = 0
    if faults:
        raise OptionError("; ".join(faults))
    return Limits(**found)


def limit_faults(values: Mapping[str, float | str]) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) for each wrong limit of a configuration."""
    for name, value in values.items():
        if name not in Limits._fields:
            yield name, f"unknown limit; known are {', '.join(Limits._fields)}"
            continue
        try:
            _limit(name, str(value))
        except OptionError as why:
            yield name, str(why)


def _limit(name: str, value: str) -> int | float:
    if name == "cpus":
        if _CPUS.fullmatch(value) is None or float(value) < FEWEST_CPUS:
            why = f"write a number from {FEWEST_CPUS} to 9999.999, 0.5 say"
            raise OptionError(f"not a limit of cpus: {value!r}; {why}")
        return float(value)
    if name == "time":
        return _time_limit(value)
    least, most = _LEAST.get(name, 0), _MOST.get(name, MOST_BYTES)
    if name in _SIZES:
        number = _whole_size(value)
    elif _WHOLE.fullmatch(value):
        number = int(value)
    else:
        why = f"write a whole number from {least} on"
        raise OptionError(f"not a number for limit {name}: {value!r}; {why}")
    if number < least:
        what = "1M" if name == "memory" else str(least)
        raise OptionError(
            f"limit {name} is {value}: nothing starts with less than {what};"
            " leave it out for no limit"
        )
    if number > most:
        raise OptionError(
            f"limit {name} is {value}: at most {most}; leave it out for no limit"
        )
    _check_hard_limit(name, number, value)
    return number


def _time_limit(value: str) -> float:
    try:
        return parse_period(value)
    except OptionError as why:
        raise OptionError(f"not a limit of time: {value!r}; {why}") from None


def _check_hard_limit(name: str, number: int, value: str) -> None:
    """Check that this process may set a limit for a child.

    Raises:
        OptionError: the limit is above this process's own hard limit (getrlimit(2)).
    """
    limits: Any = {name: number}
    for which, _, hard in Limits(**limits).rlimits():
        _, most = resource.getrlimit(which)
        if most != resource.RLIM_INFINITY and hard > most and not _may_raise_limits():
            raise OptionError(
                f"limit {name} is {value}: the host's own hard limit is {most};"
                " write no more than that, or raise it where the host is started"
            )


def _may_raise_limits() -> bool:
    """Return whether this process has CAP_SYS_RESOURCE (proc_pid_status(5), CapEff)."""
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)
    return False


def parse_env(texts: Sequence[str]) -> dict[str, str]:
    """Return variables from ``K=V`` texts.

    Raises:
        OptionError: a text without ``=`` or with an empty name.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise OptionError(f"not a variable: {text!r}; write NAME=VALUE")
        found[name] = value
    return found


def parse_names(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the names of variables.

    Raises:
        OptionError: a text is empty or has ``=``, so it names no variable.
    """
    for text in texts:
        if not text or "=" in text:
            why = "write NAME, or --env NAME=VALUE"
            raise OptionError(f"not a name: {text!r}; {why}")
    return tuple(texts)


def join_key(*parts: str) -> str:
    """Return a key's path; parts that are no bare keys are quoted (TOML 1.0, keys)."""
    return ".".join(
        part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else f'"{printable(part)}"'
        for part in parts
    )


def check_value(
    key: str, parse: Any, value: object, fault: type[Exception]
) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) if a parser refuses a value with ``fault``."""
    try:
        parse(value)
    except fault as why:
        yield key, str(why)
