"""Reads and checks the configuration file; each fault has its key.

A new section has its module ``config/SECTION.py`` with the Struct and a check that
yields (key, reason), one field of ``Config`` and one line of ``_CHECKS``. A check of
two sections is a function of ``crosschecks`` and one line of ``_CROSS_CHECKS``.
"""

from __future__ import annotations

import tomllib
from itertools import chain
from typing import TYPE_CHECKING, Any

from hostlib.messages import remedy
from hostlib.user_values import join_key
from supervisor.config.child import check_children, odd_restarts
from supervisor.config.credential import check_credentials
from supervisor.config.crosschecks import (
    check_after,
    check_credential_uses,
    check_fd_tools,
    check_policy_names,
    check_preset_tools,
    check_uses,
    missing_credentials,
    missing_packages,
    odd_child_doors,
    odd_fd_sections,
    odd_policy,
    odd_tool_doors,
    odd_upstreams,
)
from supervisor.config.document import Config
from supervisor.config.fds import check_file_descriptor
from supervisor.config.fleet import check_fleet
from supervisor.config.host import check_host, check_limits, odd_limits
from supervisor.config.metrics import check_metrics
from supervisor.config.places import (
    check_bases,
    check_exposed,
    check_grants,
    check_own,
    check_roots,
    check_workspaces,
    odd_keys,
    odd_places,
    odd_places_of_daemon,
    odd_programs,
)
from supervisor.config.policy import check_policies, network_word, odd_policy_limits
from supervisor.config.read import DocumentReader, Fault
from supervisor.config.sandbox import check_sandboxes, profile_named
from supervisor.config.source import read_source
from supervisor.config.walls import (
    check_walls,
    check_walls_of_sidecars,
    check_ways,
    odd_sidecars,
    odd_walls,
)
from supervisor.llm.section import check as check_llm
from supervisor.toolexec.section import check_toolexec
from supervisor.toolexec.sidecar_section import check_sidecars
from supervisor.workspace.section import check_sections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


_CHECKS: Mapping[str, Callable[[Any], Iterator[tuple[str, str]]]] = {
    "host": check_host,
    "limits": check_limits,
    "credential": check_credentials,
    "policy": check_policies,
    "child": check_children,
    "sandbox": check_sandboxes,
    "toolexec": check_toolexec,
    "sidecar": check_sidecars,
    "file_descriptor": check_file_descriptor,
    "llm": check_llm,
    "metrics": check_metrics,
    "workspace": check_sections,
    "fleet": check_fleet,
}
"""Section -> check of its values; called if the section is there."""

_NAME_CHECKS: tuple[
    Callable[[Config, Mapping[str, Any]], Iterator[tuple[str, str]]], ...
] = (check_policy_names, check_after, check_walls, check_uses)
"""Checks of two sections that need the document, too: the names in it."""

_CROSS_CHECKS: tuple[Callable[[Config], Iterator[tuple[str, str]]], ...] = (
    check_walls_of_sidecars,
    check_ways,
    check_fd_tools,
    check_preset_tools,
    check_grants,
    check_exposed,
    check_roots,
    check_workspaces,
    check_credential_uses,
    check_bases,
)
"""Checks of two sections, or of what is on the disk."""


class ConfigError(Exception):
    """A configuration that cannot be used: file, key, reason of all faults.

    Attributes:
        path: the file.
        faults: in the order of the file; at least one.
        config: the readable parts, with defaults for the others; None if the file is no
            TOML, or cannot be read.
    """

    config: Config | None = None

    def __init__(self, path: str, faults: Sequence[Fault], verb: str = "use") -> None:
        text = f"cannot {verb} {path!r}: {faults[0]}"
        if len(faults) > 1:
            text += f" (and {len(faults) - 1} more: sandhost check-config tells)"
        super().__init__(text)
        self.path = path
        self.faults = tuple(faults)


def warnings(config: Config, *, but: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of probable mistakes.

    Args:
        config: as it was read; a fault gives no warning.
        but: a policy below options, which change it: its warnings come with theirs.
    """
    for key, text in odd_limits(config.limits):
        yield f"limits.{key}", text
    yield from odd_fd_sections(config)
    yield from odd_places(config)
    yield from odd_keys(config)
    yield from odd_sidecars(config)
    yield from odd_tool_doors(config)
    yield from odd_restarts(config.child)
    for name, policy in config.policy.items():
        odd = odd_policy(policy, config)
        profile = profile_named(policy.sandbox, config.sandbox)
        if name != but and profile is not None:
            has_tools = policy.tools != []
            walls = odd_walls(
                config, profile, network_word(policy), has_tools=has_tools
            )
            odd = chain(odd, odd_policy_limits(policy), walls)
        for key, text in odd:
            yield f"policy.{join_key(name)}.{key}", text


def machine_warnings(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of warnings that depend on where and when a host runs.

    For use before there is a host: a running host knows, and reports them itself.

    Args:
        config: as it was read; a fault gives no doubt.
    """
    yield from odd_places_of_daemon(config.host)
    yield from missing_credentials(config)
    yield from odd_child_doors(config)
    yield from odd_programs(config)
    yield from odd_upstreams(config)


def load_config(
    path: str,
    *,
    once: bool = False,
    for_daemon: bool | None = True,
    is_used: bool = True,
) -> Config:
    """Read and check a configuration.

    Args:
        path: see ``source.read_source``.
        once: it is not read again later, so that it may be a pipe.
        for_daemon: it is a daemon's, which has its usual places where none are written;
            None if that is to be told by whether it has children, or places of its own.
        is_used: a host runs with it, in the unit that it is for, if it is for one.

    Raises:
        ConfigError: it cannot be read, is no TOML, or holds what is not known, not
            possible.
    """
    document = _read(path, once=once)
    reader = DocumentReader()
    config: Config = reader.read(Config, document)
    found: list[tuple[str, str]] = []
    for section, check in _CHECKS.items():
        value = getattr(config, section)
        if value is not None:
            found += ((f"{section}.{key}", why) for key, why in check(value))
    for name_check in _NAME_CHECKS:
        found += name_check(config, document)
    for cross_check in _CROSS_CHECKS:
        found += cross_check(config)
    if for_daemon is None:
        host = config.host
        for_daemon = bool(config.child or host.state_dir or host.runtime_dir)
    found += check_own(config, with_usual=for_daemon)
    if is_used:
        found += missing_credentials(config)
        found += missing_packages(config)
    faults = [*reader.faults]
    faults += (Fault(key, why) for key, why in found if not reader.has_told(key))
    if faults:
        error = ConfigError(path, list(dict.fromkeys(faults)))
        error.config = config
        raise error
    return config


def _read(path: str, *, once: bool) -> dict[str, Any]:
    try:
        return tomllib.loads(read_source(path, once=once).decode())
    except OSError as why:
        raise ConfigError(
            path, [Fault("", f"{why.strerror}{remedy(why)}")], "read"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as why:
        raise ConfigError(path, [Fault("", f"not TOML: {why}")]) from None
