"""``sandhost run`` and ``sandhost pipeline``: words in, a ``RunOptions`` out.

Joins options, configuration and a policy's defaults; the command line takes precedence.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import click

from hostlib.messages import CommandError, UsageFault, remedy
from hostlib.paths import absolute
from hostlib.user_values import (
    Limits,
    OptionError,
    limit_origin,
    network_limit_faults,
    parse_duration,
    parse_env,
    parse_limits,
    parse_names,
)
from supervisor.cli.help import Command
from supervisor.cli.network_options import FAULTY_NETWORK, NetworkFault, network_of
from supervisor.cli.options import (
    COMMAND_LINE,
    agents,
    directories,
    files,
    log_format,
    log_level,
    one_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from supervisor.cli.network_options import NetworkOptions
    from supervisor.config.document import Config
    from supervisor.llm.recipe import Recipe
    from supervisor.sandbox.plan import Profile
    from supervisor.spawn.launchpad.start import LaunchpadProcess


T = TypeVar("T")
Ts = TypeVarTuple("Ts")


_OPTIONS = (
    click.option(
        "--config",
        metavar="F",
        shell_complete=files,
        help="TOML file; [policy.run] gives defaults.",
    ),
    click.option(
        "--top-level", is_flag=True, help="May ask for files as the host sees them."
    ),
    click.option(
        "--root",
        metavar="DIR",
        shell_complete=directories,
        help="FD 3's root; default the workspace, else a fresh one.",
    ),
    click.option("--keep", is_flag=True, help="Keep the fresh root."),
    click.option(
        "--read",
        metavar="P",
        multiple=True,
        shell_complete=files,
        help="Grant to read, by FD 3 and system calls; repeatable.",
    ),
    click.option(
        "--write",
        metavar="P",
        multiple=True,
        shell_complete=files,
        help="Grant to write, by FD 3 alone; repeatable.",
    ),
    click.option(
        "--expose",
        metavar="P",
        multiple=True,
        shell_complete=files,
        help="Show P to read and execute, by system calls; repeatable.",
    ),
    click.option(
        "--dialect",
        metavar="1|2",
        type=click.Choice(("1", "2")),
        default="2",
        help="Version of the wire's OPEN; default 2.",
    ),
    click.option(
        "--transport",
        metavar="socketpair|pipes",
        default="socketpair",
        shell_complete=one_of("socketpair", "pipes"),
        help="What FD 3 is; default socketpair.",
    ),
    click.option(
        "--sandbox",
        metavar="none|auto|required|PROFILE",
        shell_complete=one_of("none", "auto", "required"),
        help="Isolation; default auto: all that this machine gives.",
    ),
    click.option(
        "--env", metavar="K=V", multiple=True, help="Set a variable; repeatable."
    ),
    click.option(
        "--pass-env", metavar="K", multiple=True, help="Pass a variable on; repeatable."
    ),
    click.option(
        "--cwd", metavar="DIR", shell_complete=directories, help="Working directory."
    ),
    click.option(
        "--home",
        metavar="DIR",
        shell_complete=directories,
        help="HOME, kept; default a fresh one. --env HOME= wins.",
    ),
    click.option("--timeout", metavar="S", help="End it after S, 0 never; exit 124."),
    click.option(
        "--limit",
        metavar="NAME=N,...",
        multiple=True,
        help="memory, cpu, processes, open_files, bytes, files, file_size, cpus, time,"
        " connections, net_bytes.",
    ),
    log_level("warning"),
    log_format,
    click.option(
        "--journal",
        metavar="F",
        shell_complete=files,
        help="Append events to a file, JSON lines.",
    ),
    click.option(
        "--control",
        metavar="PATH",
        shell_complete=files,
        help="Serve ps, clients, files on a socket.",
    ),
    click.option(
        "--network",
        metavar="none|host|learn|RULE",
        multiple=True,
        shell_complete=one_of("none", "host", "learn"),
        help="Names it may reach, as example.com:443; repeatable; default none.",
    ),
    click.option(
        "--within",
        metavar="RULE",
        multiple=True,
        help="What '--network learn' may allow and note; repeatable.",
    ),
    click.option(
        "--publish",
        metavar="[H:]C",
        multiple=True,
        help="Reach its port C at port H, or any, of 127.0.0.1; repeatable.",
    ),
    click.option(
        "--proxy-env", is_flag=True, help="Name the proxy of --network to it."
    ),
    click.option(
        "--upstream",
        metavar="URL",
        help="Make its connections through this http:// proxy.",
    ),
    click.option(
        "--credential",
        metavar="NAME",
        multiple=True,
        help="A [credential] that the host adds to its requests; repeatable.",
    ),
    click.option(
        "--recipe",
        metavar="AGENT",
        shell_complete=agents,
        help="Set what an agent needs; see 'sandhost recipe'.",
    ),
)
"""The options of both, in the order of their help."""


def _add_options(function: Callable[..., int]) -> Callable[..., int]:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


@click.command(
    cls=Command,
    context_settings=COMMAND_LINE,
    epilog="Example: sandhost run --root work -- sh -c 'sandhost fs cat note.txt'",
)
@click.argument(
    "command",
    metavar="-- COMMAND [ARG]...",
    nargs=-1,
    required=True,
    shell_complete=files,
)
@_add_options
@click.option(
    "--workspace",
    metavar="DIR[:MODE]",
    multiple=True,
    shell_complete=directories,
    help="Work in DIR: review (default), direct, read-only; repeatable.",
)
@click.option("--workspace-name", metavar="NAME", help="Name it, or go on with it.")
@click.option(
    "--commit",
    metavar="ask|never|on-success",
    shell_complete=one_of("ask", "never", "on-success"),
    help="What becomes of changes; default ask on a terminal, else never.",
)
@click.option(
    "--hide", metavar="PATTERN", multiple=True, help="Not seen by it; repeatable."
)
@click.option(
    "--guard",
    metavar="PATTERN",
    multiple=True,
    help="Committed only if it is named; repeatable.",
)
@click.option(
    "--audit", is_flag=True, help="Add to --journal what it opens and changes there."
)
@click.option(
    "--state-dir",
    metavar="DIR",
    shell_complete=directories,
    help="Where workspaces are kept.",
)
@click.pass_obj
def run(launchpad: LaunchpadProcess, /, command: tuple[str, ...], **given: Any) -> int:
    """Run one child behind one door.

    Exit status: the child's; 124 its time was up, 125 the host failed or refused.
    """
    return run_commands("run", launchpad, (command,), given)


def _workspaces(given: dict[str, Any], config: Config | None) -> dict[str, Any]:
    """Return the settings of ``--workspace`` and the configuration for ``RunOptions``."""
    policy = None if config is None else config.policy.get("run")
    is_named = given.get("workspace_name") and config is not None and config.workspace
    if not (given.get("workspace") or is_named or (policy and policy.workspace)):
        names = ("workspace_name", "commit", "hide", "guard", "audit", "state_dir")
        for name in names:
            if given.get(name):
                option = name.replace("_", "-")
                raise OptionError(f"--{option}: there is no --workspace; name one")
        return {}
    from supervisor.cli.workspace_options import read_uses  # noqa: PLC0415 - with one

    commit = _commit(given.get("commit"))  # before a workspace is made
    words, state_dir = given.get("workspace", ()), given.get("state_dir")
    more = {word: given.get(word, ()) for word in ("hide", "guard")}
    uses = read_uses(words, state_dir, given.get("workspace_name"), config, **more)
    found: dict[str, Any] = {"workspaces": uses, "commit": commit}
    if given["cwd"] is None:
        found["cwd"] = uses[0].base
    return found


def _audit(given: dict[str, Any], default: bool) -> bool:
    """Return whether the journal gets events for files in workspaces."""
    is_asked = bool(given.get("audit"))
    if (is_asked or default) and given["journal"] is None:
        key = "--audit" if is_asked else "policy.run.audit"
        raise OptionError(f"{key}: there is no --journal to write to; name one")
    return is_asked or default


def _commit(asked: str | None) -> str:
    if asked is None:
        return "ask" if os.isatty(0) and os.isatty(2) else "never"
    if asked not in {"ask", "never", "on-success"}:
        raise OptionError(f"--commit: {asked!r} is none of ask, never, on-success")
    return asked


@click.command(
    cls=Command,
    context_settings=COMMAND_LINE,
    epilog="Example: sandhost pipeline -- cat README.md ::: wc -w",
)
@click.argument(
    "command",
    metavar="-- A [ARG]... ::: B [ARG]...",
    nargs=-1,
    required=True,
    shell_complete=files,
)
@_add_options
@click.pass_obj
def pipeline(
    launchpad: LaunchpadProcess, /, command: tuple[str, ...], **given: Any
) -> int:
    """Run children joined stdout to stdin, each with its own door.

    Exit status: that of the last one that failed.
    """
    parts: list[list[str]] = [[]]
    for word in command:
        if word == ":::":
            parts.append([])
        else:
            parts[-1].append(word)
    if not all(parts):
        raise UsageFault("a part of the pipeline is empty")
    return run_commands("pipeline", launchpad, parts, given)


def run_commands(
    name: str,
    launchpad: LaunchpadProcess,
    commands: Sequence[Sequence[str]],
    given: dict[str, Any],
) -> int:
    """Run children side by side, each one's output the next one's input.

    Args:
        name: of the command, for messages.
        launchpad: starts the children.
        commands: one for each child.
        given: the options by name, as click gives them.

    Raises:
        UsageFault: an option cannot be used.
        CommandError: the configuration cannot.
    """
    from supervisor.children.specs import policy_options  # noqa: PLC0415
    from supervisor.host import settings_of  # noqa: PLC0415 - needs Trio
    from supervisor.run import RunOptions, run_children  # noqa: PLC0415

    if given["transport"] not in ("socketpair", "pipes"):
        why = f"not a transport: {given['transport']!r}; write socketpair or pipes"
        raise UsageFault(f"--transport: {why}")
    configured = _configure(given["config"])
    places: dict[str, Any] = {}
    policy = configured.policy.get("run") if configured is not None else None
    try:
        sandboxes = configured.sandbox if configured is not None else None
        base = policy_options(policy, sandboxes)
        timeout = "0" if given["timeout"] is None else given["timeout"]
        asked = _read_option("limit", parse_limits, given["limit"]).bounds()
        limits = base.limits._replace(**asked)
        network = network_of(given, policy, configured)
        walls = _walls(configured, policy, given["sandbox"], network)
        _check_kept(
            limits, asked, walls["sandbox"], has_names=network.section is not None
        )
        cwd = _read_option("cwd", _existing, given["cwd"])
        places = {"cwd": cwd, **_workspaces(given, configured)}
        root = _root(given["root"], base.root, configured)
        if given["keep"] and root is None:
            _check_fresh(places)
        env = _read_option("env", parse_env, given["env"])
        passed = _read_option("pass-env", parse_names, given["pass_env"])
        recipe = None
        if given["recipe"] is not None:
            recipe = _read_option("recipe", apply_recipe, given["recipe"], configured)
            has_home = bool(walls["sandbox"].layers or given["home"] or base.home)
            _read_option("recipe", _check_home, recipe, env, passed, has_home)
        options = RunOptions(
            commands=tuple(tuple(words) for words in commands),
            limits=limits,
            limited=frozenset(asked),
            settings=settings_of(configured),
            top_level=given["top_level"] or base.top_level,
            root=root,
            keep=given["keep"],
            read=(*base.read, *given["read"]),
            write=(*base.write, *given["write"]),
            dialect=int(given["dialect"]),
            transport=given["transport"],
            publish=base.publish,
            durability=base.durability,
            tools=base.tools,
            env=env,
            pass_env=passed,
            # 0 is no limit, as in the configuration and in timeout(1).
            timeout_s=_read_option("timeout", parse_duration, timeout) or None,
            log_level=given["log_level"],
            log_json=_log_json(given["log_format"], configured),
            journal=given["journal"],
            audit=_audit(given, base.audit),
            control=given["control"],
            config=configured,
            **walls,
            **places,
            model=base.model,
            quota=base.quota,
            image_tokens=base.image_tokens,
            home=given["home"] or base.home,
            home_files=base.home_files,
            expose=(
                *base.expose,
                *(() if recipe is None else recipe.expose),
                *_read_option("expose", _check_exposed, given["expose"]),
            ),
            template_env=base.template_env if recipe is None else recipe.env,
            template_files=base.template_files if recipe is None else recipe.home_files,
            policy=None if policy is None else "run",
        )
    except OptionError as why:
        _drop_unused(places)
        status = FAULTY_NETWORK if isinstance(why, NetworkFault) else None
        raise UsageFault(str(why), status) from None
    return run_children(name, launchpad, options)


def _drop_unused(places: dict[str, Any]) -> None:
    """Remove workspaces that were made for a refused run."""
    if uses := places.get("workspaces", ()):
        from supervisor.workspace.outcome import drop_unused  # noqa: PLC0415 - with one

        for use in uses:
            drop_unused(use)


def _read_option(option: str, read: Callable[[*Ts], T], *values: *Ts) -> T:
    """Read an option's value; a fault gets the option's name."""
    try:
        return read(*values)
    except OptionError as why:
        raise OptionError(f"--{option}: {why}") from None


def _walls(
    config: Config | None, policy: Any, sandbox: str | None, network: NetworkOptions
) -> dict[str, Any]:
    """Return the profile and the network of the children."""
    from supervisor.config.sandbox import (  # noqa: PLC0415 - with the configuration
        RULES,
        check_network,
        check_use,
        profile_named,
    )

    known = config.sandbox if config is not None else {}
    name = sandbox
    if name is None:
        name = policy.sandbox if policy is not None else "auto"
    named = {"sandbox": "--sandbox", "network": network.key}
    for key, why in check_use(name, network.word, known):
        raise OptionError(f"{named[key]}: {why}")
    profile = profile_named(name, known)
    if profile is None:
        raise RuntimeError(f"no profile {name!r}, though it was found before")
    for key, why in check_network(profile, network.word):
        raise OptionError(f"{named[key]}: {why}")
    if network.section is not None and network.word in {None, "none"}:
        # For published ports, or for credentials.
        for _, why in (*check_use(name, RULES, None), *check_network(profile, RULES)):
            raise OptionError(f"{network.key}: {why}")
    return {
        "sandbox": profile,
        "network": network.word or "none",
        "network_keys": network.section,
    }


def _check_fresh(places: dict[str, Any]) -> None:
    """Refuse to keep a fresh root that is not made."""
    if places.get("workspaces"):
        why = "FD 3's root is the workspace, and none is made; leave it out"
        raise OptionError(f"--keep: {why}")


def _check_kept(
    limits: Limits, asked: Container[str], profile: Profile, *, has_names: bool
) -> None:
    """Refuse a limit that is not kept.

    Args:
        limits: all of them.
        asked: those of --limit.
        profile: keeps some of them.
        has_names: whether children have a network by name, which keeps others.
    """
    from supervisor.config.sandbox import check_kept  # noqa: PLC0415 - as above

    bounds = limits.bounds()
    of_network = () if has_names else network_limit_faults(bounds)
    for name, why in (*check_kept(profile, bounds), *of_network):
        raise OptionError(f"{limit_origin(name, asked)}: {why}")


def _configure(path: str | None) -> Config | None:
    if path is None:
        return None
    from supervisor.config.loader import ConfigError, load_config  # noqa: PLC0415 - optional

    try:
        return load_config(path, once=True, for_daemon=False)
    except ConfigError as why:
        raise CommandError(str(why)) from None


def _existing(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - a str, and no pathlib yet
    except FileNotFoundError:
        raise OptionError(
            f"cannot use {path!r}: no such directory; make it first"
        ) from None
    except OSError as why:
        raise OptionError(f"cannot use {path!r}: {why.strerror}{remedy(why)}") from None
    if not stat.S_ISDIR(mode):
        raise OptionError(f"cannot use {path!r}: not a directory")
    if not os.access(path, os.X_OK):
        denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        raise OptionError(f"cannot use {path!r}: {denied.strerror}{remedy(denied)}")
    try:
        return absolute(path)
    except OSError as why:
        raise OptionError(f"cannot use {path!r}: {why.strerror}") from None


def _check_exposed(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths that a child sees by its system calls."""
    if not paths:
        return paths
    from supervisor.sandbox.exposed_paths import fault_of  # noqa: PLC0415 - with one

    for path in paths:
        if why := fault_of(path):
            raise OptionError(why)
    return paths


def apply_recipe(agent: str, config: Config | None) -> Recipe:
    """Return a recipe; set the keys of ``[llm]`` that it needs and that have defaults.

    Raises:
        OptionError: there is none, or no way to run that agent.
    """
    from supervisor.llm.recipe import RecipeError, usable_recipe  # noqa: PLC0415 - with one

    try:
        recipe = usable_recipe(agent)
    except RecipeError as why:
        raise OptionError(str(why)) from None
    section = None if config is None else config.llm
    if section is not None:
        usual = type(section)()
        for key, value in recipe.llm.items():
            if getattr(section, key) == getattr(usual, key):
                setattr(section, key, value)
    return recipe


def _check_home(
    recipe: Recipe, env: Container[str], passed: Container[str], has_home: bool
) -> None:
    """Refuse to write a recipe's files where the agent would not find them."""
    if not recipe.files:
        return
    if "HOME" in env or "HOME" in passed:
        raise OptionError(f"{recipe.agent} has files in HOME; name that by --home DIR")
    if not has_home:
        why = "in a HOME of its own; name one by --home, or leave out --sandbox none"
        raise OptionError(f"{recipe.agent} has files {why}")


def _root(given: str | None, default: str | None, config: Config | None) -> str | None:
    # Not `given or default`: an empty word (an unset variable) is an error.
    if given is None:
        return _existing(default)
    root = _read_option("root", _existing, given)
    if config is not None and root is not None:
        _read_option("root", _check_root, root, config)
    return root


def _check_root(root: str, config: Config) -> None:
    """Refuse a root in or around another policy's; ``run``'s own is ignored."""
    from supervisor.config.places import check_nesting  # noqa: PLC0415

    try:
        for why in check_nesting(config, "run", root):
            raise OptionError(why)
    except OSError as why:
        raise OptionError(f"cannot use {root!r}: {why.strerror}") from None


def _log_json(name: str | None, config: Config | None) -> bool | None:
    if name is None and config is not None:
        name = config.host.log_format
    return None if name is None else name == "json"
