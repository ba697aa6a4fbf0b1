"""``[sidecar.NAME]``: toolchains that run tools for children."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from hostlib.user_values import (
    Limits,
    OptionError,
    check_value,
    join_key,
    limit_faults,
    parse_duration,
)
from supervisor.sandbox.plan import PROFILES
from supervisor.toolexec.kinds import KINDS, is_tool_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BACKENDS = ("local", "docker", "podman")
"""The backends of a sidecar; all but the first use the command of that name."""

# Also the name of a container, which allows no more.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", re.ASCII)
_KERNEL_LIMITS = ("memory", "cpu", "processes")


class SidecarSection(msgspec.Struct, forbid_unknown_fields=True):
    """``[sidecar.NAME]``; ``image`` and ``cli`` are for containers only."""

    kind: str
    backend: str = "local"
    workspace: str | None = None
    path: list[str] = []
    env: dict[str, str] = {}
    allow: list[str] | None = None
    start: list[str] | None = None
    timeout: str = "0s"
    tty: bool = False
    fd3: bool = False
    sandbox: str = "auto"
    limits: dict[str, int | str] = {}
    image: str | None = None
    cli: str | None = None


def check_sidecars(
    section: Mapping[str, SidecarSection],
) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value that a sidecar cannot have."""
    for name, sidecar in section.items():
        if _NAME.fullmatch(name) is None:
            reason = "a name is letters, digits, '_', '.', '-', at most 63"
            yield join_key(name), reason
        for key, reason in _faults(sidecar):
            yield f"{join_key(name)}.{key}", reason


def limit_texts(section: SidecarSection) -> list[str]:
    """Return a sidecar's limits in the form of ``--limit``."""
    return [f"{name}={value}" for name, value in section.limits.items()]


def _faults(section: SidecarSection) -> Iterator[tuple[str, str]]:
    if section.kind not in KINDS:
        yield "kind", f"{section.kind!r} is none of {', '.join(KINDS)}"
    if section.backend not in BACKENDS:
        yield "backend", f"{section.backend!r} is none of {', '.join(BACKENDS)}"
    yield from _faults_of_names(section)
    yield from _faults_of_paths(section)
    yield from _faults_of_limits(section)
    if section.sandbox not in PROFILES:
        known = ", ".join(PROFILES)
        yield "sandbox", f"{section.sandbox!r} is none of {known}"
    if section.backend == "local":
        for key in ("image", "cli"):
            if getattr(section, key) is not None:
                yield key, "a local sidecar has none; set backend to docker or podman"
    elif section.backend in BACKENDS:
        yield from _faults_of_container(section)


def _faults_of_container(section: SidecarSection) -> Iterator[tuple[str, str]]:
    if not section.image:
        yield "image", f"a {section.backend} sidecar needs one"
    if section.workspace is None:
        reason = "what a container sees is fixed before any child is there"
        yield "workspace", f"a {section.backend} sidecar needs one: {reason}"
    elif ":" in section.workspace:
        yield "workspace", "an engine cannot mount a name with ':'"
    if section.sandbox != "auto":
        yield "sandbox", "a container has walls of its own"
    if section.fd3:
        yield "fd3", "no descriptor can be passed into a container"
    if section.tty:
        reason = "its tools are told of signals by the command's input, a pipe"
        yield "tty", f"an engine gives no terminal: {reason}"
    if section.limits:
        yield "limits", "not available for containers yet"


def _faults_of_names(section: SidecarSection) -> Iterator[tuple[str, str]]:
    for tool in section.allow or ():
        if not is_tool_name(tool):
            yield "allow", f"{tool!r} is no name of a tool: no path, blank or option"
    for name, value in section.env.items():
        if not name or "=" in name or "\0" in name + value:
            yield "env", f"{name!r} cannot be set"
        elif name == "PATH":
            yield "env", "PATH is made of 'path' and the system's; use 'path'"
    if section.start is not None and not (section.start and section.start[0]):
        yield "start", "no command; leave it out if there is nothing to start"


def _faults_of_paths(section: SidecarSection) -> Iterator[tuple[str, str]]:
    for entry in section.path:
        if not entry.startswith("/") or ":" in entry or "\0" in entry:
            yield "path", f"{entry!r} is not an absolute directory without ':'"
    for key in ("workspace", "cli"):
        path = getattr(section, key)
        if path is not None and (not path.startswith("/") or "\0" in path):
            yield key, f"{path!r} is not absolute"


def _faults_of_limits(section: SidecarSection) -> Iterator[tuple[str, str]]:
    yield from check_value("timeout", parse_duration, section.timeout, OptionError)
    for name, reason in limit_faults(section.limits):
        yield f"limits.{join_key(name)}", reason
    for name in Limits._fields:
        if name in section.limits and name not in _KERNEL_LIMITS:
            known = ", ".join(_KERNEL_LIMITS)
            reason = f"a tool has {known}; its time is `timeout`, files are its child's"
            yield f"limits.{name}", reason
