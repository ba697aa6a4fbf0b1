"""The configuration file: TOML, typed, every unknown key refused with its path.

Sections of the plan that this version does not have are refused as "not available yet",
never ignored: a limit that nobody keeps is worse than none.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from supervisor import config_sandbox
from supervisor.options import OptionError, parse_duration, parse_limits, parse_size

_NOT_YET = {
    "llm": "the LLM gateway",
    "toolexec": "ToolExec",
    "tools": "tools",
    "sidecar": "sidecars",
    "file_descriptor": "LLM fds",
    "child": "children of a daemon",
    "metrics": "metrics",
}
_POLICY_NOT_YET = ("model", "quota", "tools")


class ConfigError(Exception):
    """A configuration that cannot be used: file, key, reason."""


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


class PolicySection(msgspec.Struct, forbid_unknown_fields=True):
    """``[policy.NAME]``; ``run`` takes its defaults from ``[policy.run]``."""

    top_level: bool = False
    root: str | None = None
    read: list[str] = []
    write: list[str] = []
    sandbox: str = "auto"
    publish: str = "direct"
    durability: str = "none"
    limits: dict[str, int | str] = {}
    network: str | None = None
    model: str | None = None
    quota: float | None = None
    tools: list[str] | None = None


class Config(msgspec.Struct, forbid_unknown_fields=True):
    """A whole file."""

    host: HostSection = msgspec.field(default_factory=HostSection)
    limits: LimitsSection = msgspec.field(default_factory=LimitsSection)
    policy: dict[str, PolicySection] = {}
    sandbox: dict[str, config_sandbox.SandboxSection] = {}


def load_config(path: str) -> Config:
    """Read and check a configuration.

    Raises:
        ConfigError: it cannot be read, is no TOML, or holds what is not known, not
            possible or not available yet.
    """
    try:
        with Path(path).open("rb") as file:
            document = tomllib.load(file)
    except OSError as why:
        raise ConfigError(f"cannot read {path!r}: {why.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as why:
        raise ConfigError(f"cannot use {path!r}: not TOML: {why}") from None
    for section, what in _NOT_YET.items():
        if section in document:
            raise ConfigError(
                f"cannot use {path!r}: [{section}]: {what}: not available yet"
            )
    try:
        config = msgspec.convert(document, type=Config)
    except msgspec.ValidationError as why:
        raise ConfigError(f"cannot use {path!r}: {why}") from None
    for check in (_check_values, _check_policies, _check_sandboxes):
        try:
            check(config)
        except OptionError as why:
            raise ConfigError(f"cannot use {path!r}: {why}") from None
    return config


def _check_values(config: Config) -> None:
    for name in ("write", "line", "payload_budget"):
        _named(f"limits.{name}", parse_size, getattr(config.limits, name))
    _named("limits.deadline", parse_duration, config.limits.deadline)
    _named("host.grace", parse_duration, config.host.grace)
    if parse_size(config.limits.line) != 65_536:
        raise OptionError("limits.line: only 64K, the wire's own limit")
    for name in ("open_files_per_client", "clients_per_child"):
        if getattr(config.limits, name) < 1:
            raise OptionError(f"limits.{name}: at least 1")
    if config.host.max_children < 1:
        raise OptionError("host.max_children: at least 1")
    if config.host.log_format not in (None, "text", "json"):
        raise OptionError("host.log_format: text or json")


def _check_policies(config: Config) -> None:
    for name, policy in config.policy.items():
        where = f"policy.{name}"
        for key in _POLICY_NOT_YET:
            if getattr(policy, key) is not None:
                raise OptionError(f"{where}.{key}: not available yet")
        if policy.publish not in ("direct", "on-close"):
            raise OptionError(f"{where}.publish: direct or on-close")
        if policy.durability not in ("none", "close", "write"):
            raise OptionError(f"{where}.durability: none, close or write")
        _named(f"{where}.limits", parse_limits, limit_texts(policy))


def _check_sandboxes(config: Config) -> None:
    for key, why in config_sandbox.check(config.sandbox):
        raise OptionError(f"{key}: {why}")
    for name, policy in config.policy.items():
        for key, why in config_sandbox.check_use(
            f"policy.{name}", policy.sandbox, policy.network, config.sandbox
        ):
            raise OptionError(f"{key}: {why}")


def limit_texts(policy: PolicySection) -> list[str]:
    """Return a policy's limits as ``--limit`` would have them."""
    return [f"{name}={value}" for name, value in policy.limits.items()]


def _named(key: str, parse: Any, value: object) -> None:
    try:
        parse(value)
    except OptionError as why:
        raise OptionError(f"{key}: {why}") from None
