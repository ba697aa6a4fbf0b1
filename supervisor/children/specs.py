"""Requests for a child, from every source, made into its ``ChildSpec``.

Used by ``run`` (command line over ``[policy.run]``), by the children of a configuration
(``[child.NAME]`` over its policy) and by ``spawn``: each setting of a policy is read
here and nowhere else.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hostlib.paths import absolute, working_directory
from hostlib.user_values import Limits, OptionError, parse_limits
from supervisor.network.section import NetworkSection  # noqa: TC001 - as below
from supervisor.sandbox.home import make_home
from supervisor.sandbox.plan import PROFILES, Profile
from supervisor.spec import ChildSpec, minimal_env
from supervisor.workspace.use import WorkspaceUse  # noqa: TC001 - a hand-over reads it

if TYPE_CHECKING:
    from collections.abc import Mapping

    from supervisor.config.policy import PolicySection
    from supervisor.config.sandbox import SandboxSection
    from supervisor.sandbox.scratch import Scratch

DEFAULT_OPEN_FILES = 256
"""Files that a child may have open at once where no setting says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildOptions:
    """The options of one child as asked for; see ``sandhost run --help``."""

    limits: Limits = field(default_factory=Limits)
    top_level: bool = False
    root: str | None = None
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    dialect: int = 2
    transport: str = "socketpair"
    publish: str = "direct"
    durability: str = "none"
    env: dict[str, str] = field(default_factory=dict)
    pass_env: tuple[str, ...] = ()
    cwd: str | None = None
    timeout_s: float | None = None
    stop_signal: int = signal.SIGTERM
    sandbox: Profile = PROFILES["auto"]
    network: str = "none"
    network_keys: NetworkSection | None = None
    tools: frozenset[str] | None = None
    model: str | None = None
    quota: float | None = None
    image_tokens: int | None = None
    policy: str | None = None
    workspaces: tuple[WorkspaceUse, ...] = ()
    home: str | None = None
    home_files: dict[str, str] = field(default_factory=dict)
    template_env: dict[str, str] = field(default_factory=dict)
    template_files: dict[str, str] = field(default_factory=dict)
    expose: tuple[str, ...] = ()
    audit: bool = False


def policy_options(
    policy: PolicySection | None,
    sandboxes: Mapping[str, SandboxSection] | None = None,
    workspaces: tuple[WorkspaceUse, ...] = (),
) -> ChildOptions:
    """Return the options that a policy asks for; the defaults without a policy.

    Args:
        policy: of a checked configuration.
        sandboxes: that configuration's profiles.
        workspaces: those that the policy names.

    Raises:
        OptionError: its limits or its sandbox are wrong; a checked policy has neither.
    """
    if policy is None:
        return ChildOptions()
    from supervisor.config.policy import (  # noqa: PLC0415 - with a policy
        limit_texts,
        network_keys_of,
        network_word,
        publish_word,
    )
    from supervisor.config.sandbox import profile_named  # noqa: PLC0415 - as above

    recipe = None
    if policy.recipe is not None:
        from supervisor.llm.recipe import usable_recipe  # noqa: PLC0415 - with one

        recipe = usable_recipe(policy.recipe)
    profile = profile_named(policy.sandbox, sandboxes or {})
    if profile is None:
        raise OptionError(f"no sandbox profile {policy.sandbox!r}")
    return ChildOptions(
        limits=parse_limits(limit_texts(policy)),
        top_level=policy.top_level,
        root=policy.root,
        read=tuple(policy.read),
        write=tuple(policy.write),
        publish=publish_word(policy),
        durability=policy.durability,
        sandbox=profile,
        network=network_word(policy) or "none",
        network_keys=network_keys_of(policy),
        tools=None if policy.tools is None else frozenset(policy.tools),
        model=policy.model,
        quota=policy.quota,
        image_tokens=policy.image_tokens,
        home=policy.home,
        home_files=dict(policy.home_files),
        workspaces=workspaces,
        expose=(*policy.expose, *(() if recipe is None else recipe.expose)),
        template_env={} if recipe is None else recipe.env,
        template_files={} if recipe is None else recipe.home_files,
        audit=policy.audit,
    )


def make_spec(
    options: ChildOptions,
    words: tuple[str, ...],
    scratch: Scratch,
    stdio: tuple[int, int, int],
    open_files: int = DEFAULT_OPEN_FILES,
) -> ChildSpec:
    """Return the description of a child.

    Args:
        options: the options that were asked for.
        words: its command.
        scratch: its directories.
        stdio: the host's descriptors that become 0, 1 and 2.
        open_files: its limit where the options name none (``[limits]``).

    Raises:
        FileNotFoundError: the host's directory is gone, and the child would start
            there or in a directory named relative to it.
    """
    env = minimal_env(scratch.tmp)
    is_walled = bool(options.sandbox.layers)
    kept_home = absolute(options.home) if options.home else None
    if is_walled or kept_home is not None:
        env["HOME"] = kept_home or scratch.home
        make_home(env["HOME"])
    env.update({k: os.environ[k] for k in options.pass_env if k in os.environ})
    if options.workspaces:
        env["SANDHOST_WORKSPACE"] = options.workspaces[0].name
    env.update(options.env)
    limits = options.limits
    has_workspace_root = options.root is None and bool(options.workspaces)
    return ChildSpec(
        command=words,
        cwd=absolute(options.cwd) if options.cwd else working_directory(),
        root=options.workspaces[0].base if has_workspace_root else scratch.root,
        has_workspace_root=has_workspace_root,
        run_dir=scratch.run,
        made_in=scratch.fd,
        env=env,
        own_env=frozenset(options.env),
        home_files=options.home_files,
        template_env=_template_env(options),
        template_files=options.template_files,
        top_level=options.top_level,
        read=options.read,
        write=options.write,
        dialect=options.dialect,
        transport=options.transport,
        publish=options.publish,
        durability=options.durability,
        timeout_s=_least(options.timeout_s, limits.time),
        max_open_files=open_files if limits.open_files is None else limits.open_files,
        max_bytes=limits.bytes,
        max_files=limits.files,
        max_file_bytes=limits.file_size,
        rlimits=limits.rlimits(),
        stdio=stdio,
        stop_signal=options.stop_signal,
        sandbox=options.sandbox,
        network=options.network,
        network_keys=options.network_keys,
        tmp_dir=scratch.tmp,
        home_dir=scratch.home if is_walled and kept_home is None else None,
        kept_home=kept_home,
        expose=tuple(map(absolute, options.expose)),
        group_limits=limits,
        tools=options.tools,
        model=options.model,
        quota=options.quota,
        image_tokens=options.image_tokens,
        workspaces=options.workspaces,
        audit=options.audit,
        policy=options.policy,
    )


def _template_env(options: ChildOptions) -> dict[str, str]:
    """Return a recipe's variables except those that the operator sets or passes on."""
    own = {*options.env, *(name for name in options.pass_env if name in os.environ)}
    named = options.template_env.items()
    return {name: text for name, text in named if name not in own}


def _least(*times_s: float | None) -> float | None:
    """Return the shortest of some times; None is no time."""
    return min((time_s for time_s in times_s if time_s is not None), default=None)
