"""The daemon's commands: ``serve``, and those that order something of it.

What it is: options and words.  What they do stands in ``serve`` and ``client``, imported
when a command is called.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from supervisor.cli.options import (  # noqa: TC001 - typer reads them at run time
    ControlOf,
    Json,
)
from supervisor.here import absolute
from supervisor.options import OptionError, parse_duration, parse_env
from supervisor.say import CommandError, UsageFault, print_bytes, print_text, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.client import HostClient

_COMMAND_LINE: Any = {"allow_interspersed_args": False}
_Child = Annotated[str, typer.Argument(metavar="CHILD", help="A name, or an id of ps.")]
_Lines = Annotated[
    int | None,
    typer.Option("--lines", "-n", metavar="N", min=0, help="Only the last N lines."),
]
_Grace = Annotated[
    str | None,
    typer.Option("--grace", metavar="S", help="Until SIGKILL; else host.grace."),
]


def serve(
    ctx: typer.Context,
    config: Annotated[
        str | None, typer.Option("--config", metavar="F", help="TOML file.")
    ] = None,
    control: Annotated[
        str | None,
        typer.Option("--control", metavar="PATH", help="Control socket's place."),
    ] = None,
    log_level: Annotated[
        str,
        typer.Option("--log-level", metavar="L", help="debug, info, warning, error."),
    ] = "info",
    log_format: Annotated[
        str | None, typer.Option("--log-format", metavar="text|json")
    ] = None,
) -> int:
    """Be the daemon: keep the configured children, serve the control socket.

    SIGTERM and SIGINT stop it, SIGHUP reloads. Exit status: 0 all went well, else 1.
    """
    from supervisor.config.document import Config, ConfigError, load_config  # noqa: PLC0415
    from supervisor.logs import LEVELS  # noqa: PLC0415
    from supervisor.serve import FAILED, ServeOptions, run_daemon  # noqa: PLC0415

    if log_level.upper() not in LEVELS:
        raise UsageFault(
            f"not a log level: {log_level!r}; write debug, info, warning, error"
        )
    if log_format not in (None, "text", "json"):
        raise UsageFault(f"not a log format: {log_format!r}; write text or json")
    try:
        configured = Config() if config is None else load_config(config)
    except ConfigError as why:
        for fault in why.faults:
            say("sandhost serve", f"cannot use {config}: {fault}")
        return FAILED
    wanted = log_format or configured.host.log_format
    options = ServeOptions(
        config=configured,
        config_path=None if config is None else absolute(config),
        control=control,
        log_level=log_level.upper(),
        log_json=None if wanted is None else wanted == "json",
    )
    return run_daemon(ctx.obj, options)


def spawn(  # noqa: PLR0913, PLR0917
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND [ARG]...]")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="What the child is called."),
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", metavar="P", help="[policy.P].")
    ] = None,
    restart: Annotated[
        str, typer.Option("--restart", metavar="no|on-failure|always")
    ] = "no",
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="K=V", help="Repeatable.")
    ] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", metavar="DIR")] = None,
    control: ControlOf = None,
    as_json: Json = False,
) -> int:
    """Start a child in the daemon: a command, or --name of a configured one."""
    if not command and name is None:
        raise UsageFault("give a command after --, or --name of a configured child")
    try:
        cwd = None if cwd is None else absolute(cwd)
        variables = parse_env(env or [])
    except OptionError as why:
        raise UsageFault(str(why)) from None
    except FileNotFoundError as why:
        raise CommandError(f"--cwd: cannot use {cwd!r}: {why.strerror}") from None
    more = {"restart": restart, "env": variables, "cwd": cwd} if command else {}
    with _asking(control) as host:
        child = host.spawn(command or None, name=name, policy=policy, **more)
    row = {
        "name": child.name,
        "id": child.id,
        "pid": child.pid,
        "client_id": child.client_id,
    }
    print_text(json.dumps(row) + "\n" if as_json else f"{child.name}\n")
    return 0


def kill(
    child: _Child,
    signal: Annotated[
        str, typer.Option("--signal", "-s", metavar="S", help="TERM, KILL, 9 ...")
    ] = "TERM",
    tree: Annotated[
        bool, typer.Option("--tree", help="All processes beneath.")
    ] = False,
    control: ControlOf = None,
) -> int:
    """Signal a child; its restart policy decides what follows."""
    with _asking(control) as host:
        host.kill(child, signal, tree=tree)
    return 0


def stop(
    children: Annotated[list[str] | None, typer.Argument(metavar="[CHILD]...")] = None,
    grace: _Grace = None,
    control: ControlOf = None,
) -> int:
    """Stop children for good; without a name: the daemon, and wait for its end.

    Who keeps it waiting is told on stderr.
    """
    grace_s = _seconds(grace)
    with _asking(control) as host:
        for name in children or ():
            host.stop_child(name, grace_s)
        if not children:
            _stop_daemon(host, grace_s)
    return 0


def _stop_daemon(host: HostClient, grace_s: float | None) -> None:
    from supervisor.blockers import sentence  # noqa: PLC0415 - rarely needed

    said: set[object] = set()
    for number, blocking in enumerate(host.stop(grace_s)):
        for row in blocking if number >= 2 else ():  # a second is no news
            if row["id"] not in said:
                said.add(row["id"])
                say("sandhost stop", f"waiting: {sentence(row)}")


def reload(
    control: ControlOf = None,
    as_json: Json = False,
    execute: Annotated[
        bool,
        typer.Option("--exec", help="Replace the host's program; children go on."),
    ] = False,
) -> int:
    """Have the daemon read its configuration anew; only changed children restart."""
    if execute:
        with _asking(control) as host:
            generation = host.replace()
        text = json.dumps({"generation": generation}) if as_json else "replaced"
        print_text(f"{text}\n")
        return 0
    with _asking(control) as host:
        changes = host.reload()
    rows = {key: getattr(changes, key) for key in changes.__struct_fields__}
    if as_json:
        print_text(json.dumps(rows, indent=2) + "\n")
        return 0
    for what, names in rows.items():
        if names and what != "unchanged":
            print_text(f"{what.replace('_', ' ')}: {', '.join(names)}\n")
    print_text(f"unchanged: {len(changes.unchanged)}\n")
    return 0


def logs(
    child: _Child,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more.")
    ] = False,
    lines: _Lines = None,
    control: ControlOf = None,
    as_json: Json = False,
) -> int:
    """Print what a child said: stdout and stderr, in the order in which it said it."""
    with _asking(control) as host:
        for entry in host.logs(child, follow=follow, lines=lines):
            if entry.missed:
                text = f"{entry.missed} bytes are missing: rotation removed them"
                say("sandhost logs", text)
            if as_json:
                text = entry.data.decode(errors="replace")
                row = {"offset": entry.offset, "missed": entry.missed, "text": text}
                print_text(json.dumps(row) + "\n")
            else:
                print_bytes(entry.data)
    return 0


def events(
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", "-f", help="Wait for more.")
    ] = True,
    lines: _Lines = None,
    control: ControlOf = None,
) -> int:
    """Print the journal as it is written, JSON lines; --no-follow: what is there."""
    if lines is None and follow:
        lines = 0
    with _asking(control) as host:
        for entry in host.events(follow=follow, lines=lines):
            if entry.missed:
                text = f"{entry.missed} bytes are missing: rotation removed them"
                say("sandhost events", text)
            if entry.event is not None:
                print_text(json.dumps(entry.event) + "\n")
    return 0


def stats(control: ControlOf = None, as_json: Json = False) -> int:
    """Print figures of the daemon itself."""
    with _asking(control) as host:
        figures = host.stats()
    if as_json:
        print_text(json.dumps(figures, indent=2) + "\n")
    else:
        usage = figures.pop("usage", None) or {}
        for key, value in {**figures, **usage}.items():
            print_text(f"{key:24} {'-' if value is None else value}\n")
    return 0


class _asking:  # noqa: N801 - reads as a word in `with`
    """The host to ask; what it refuses becomes the command's failure."""

    def __init__(self, control: str | None) -> None:
        self._control = control

    def __enter__(self) -> HostClient:
        from supervisor.client import ControlError, HostClient  # noqa: PLC0415

        try:
            return HostClient(self._control)
        except ControlError as why:
            raise CommandError(str(why)) from None

    def __exit__(self, kind: object, why: BaseException | None, _: object) -> None:
        from supervisor.control.client import ControlError  # noqa: PLC0415

        if isinstance(why, ControlError):
            raise CommandError(str(why)) from None


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else parse_duration(text)
    except OptionError as why:
        raise UsageFault(str(why)) from None


_EXAMPLES: tuple[tuple[Callable[..., int], str, Any], ...] = (
    (serve, "sandhost serve --config sandhost.toml", None),
    (spawn, "sandhost spawn --policy worker -- /usr/bin/worker --once", _COMMAND_LINE),
    (kill, "sandhost kill --signal HUP web", None),
    (stop, "sandhost stop web", None),
    (reload, "sandhost reload", None),
    (logs, "sandhost logs -f web", None),
    (events, "sandhost events --lines 20", None),
    (stats, "sandhost stats --json", None),
)


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for function, example, settings in _EXAMPLES:
        app.command(epilog=f"Example: {example}", context_settings=settings)(function)
