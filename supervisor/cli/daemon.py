"""The daemon's commands: those that order something of it, or read what it wrote.

Their work is done in ``client``, which is imported when a command is called.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from hostlib.messages import (
    CommandError,
    UsageFault,
    out_fd,
    print_stderr,
    print_text,
    stream_bytes,
    stream_text,
)
from hostlib.paths import absolute
from hostlib.user_values import OptionError, parse_duration, parse_env
from supervisor.cli.help import Command
from supervisor.cli.options import (
    COMMAND_LINE,
    children,
    directories,
    files,
    one_of,
)
from supervisor.cli.options import as_json as json_option
from supervisor.cli.options import control as control_option
from supervisor.spawn.restart_policies import RESTARTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.client import HostClient, LogEntry


def _whole_number(
    _ctx: click.Context, param: click.Parameter, text: str | None
) -> int | None:
    """Read a number of lines; click words it as a range of integers."""
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise UsageFault(f"{param.opts[0]}: not a number: {text!r}; write 0 or more")
    return int(text)


_lines = click.option(
    "--lines",
    "-n",
    metavar="N",
    callback=_whole_number,
    help="Only the last N lines.",
)
_child = click.argument(
    "child", metavar="CHILD", shell_complete=children, help="A name, or an id of ps."
)


def _refuse_recipe(
    context: click.Context, option: click.Parameter, agent: str | None
) -> None:
    """Refuse a recipe: the policy decides what a child of a daemon may have."""
    del context, option
    if agent is not None:
        how = f"set recipe = {agent!r} in [policy.NAME], and name that by --policy"
        raise UsageFault(f"--recipe: a child of a daemon has its policy's; {how}")


@click.command(
    cls=Command,
    context_settings=COMMAND_LINE,
    epilog="Example: sandhost spawn --policy worker -- /usr/bin/worker --once",
)
@click.argument(
    "command", metavar="[-- COMMAND [ARG]...]", nargs=-1, shell_complete=files
)
@click.option("--name", metavar="NAME", help="What the child is called.")
@click.option("--policy", metavar="P", help="[policy.P].")
@click.option(
    "--restart",
    metavar="|".join(RESTARTS),
    default="no",
    shell_complete=one_of(*RESTARTS),
    help="What follows when it has ended; default no.",
)
@click.option("--env", metavar="K=V", multiple=True, help="Set a variable; repeatable.")
@click.option(
    "--cwd", metavar="DIR", shell_complete=directories, help="Working directory."
)
@click.option("--recipe", metavar="AGENT", hidden=True, callback=_refuse_recipe)
@control_option
@json_option
def spawn(  # noqa: PLR0913 - one option each
    command: tuple[str, ...],
    *,
    name: str | None,
    policy: str | None,
    restart: str,
    env: tuple[str, ...],
    cwd: str | None,
    recipe: None,
    control: str | None,
    as_json: bool,
) -> int:
    """Start a child in the daemon.

    It is a command, or --name of a configured child.
    """
    del recipe  # refused before
    if not command and name is None:
        raise UsageFault("give a command after --, or --name of a configured child")
    try:
        cwd = None if cwd is None else absolute(cwd)
        variables = parse_env(env)
    except OptionError as why:
        raise UsageFault(f"--env: {why}") from None
    except FileNotFoundError as why:
        raise CommandError(f"--cwd: cannot use {cwd!r}: {why.strerror}") from None
    more = {"restart": restart, "env": variables, "cwd": cwd} if command else {}
    asked = list(command) or None
    child = _host(control).spawn(asked, name=name, policy=policy, **more)
    row = {
        "name": child.name,
        "id": child.id,
        "pid": child.pid,
        "client_id": child.client_id,
    }
    print_text(json.dumps(row) + "\n" if as_json else f"{child.name}\n")
    return 0


@click.command(cls=Command, epilog="Example: sandhost kill --signal HUP web")
@_child
@click.option(
    "--signal",
    "-s",
    metavar="S",
    default="TERM",
    shell_complete=one_of("TERM", "KILL", "HUP", "INT", "USR1", "USR2", "STOP", "CONT"),
    help="TERM, KILL, 9 ...; default TERM.",
)
@click.option("--tree", is_flag=True, help="All processes beneath.")
@control_option
@json_option
def kill(
    child: str, *, signal: str, tree: bool, control: str | None, as_json: bool
) -> int:
    """Signal a child; its restart policy decides the rest."""
    done = _host(control).kill(child, signal, tree=tree)
    if as_json:
        row = {"name": child, "id": done.id, "pid": done.pid, "signal": done.signal}
        print_text(json.dumps(row) + "\n")
    return 0


@click.command(cls=Command, epilog="Example: sandhost stop web")
@click.argument("names", metavar="[CHILD]...", nargs=-1, shell_complete=children)
@click.option("--grace", metavar="S", help="Until SIGKILL; else host.grace.")
@control_option
@json_option
def stop(
    names: tuple[str, ...], *, grace: str | None, control: str | None, as_json: bool
) -> int:
    """Stop children for good, or the daemon.

    Without a name it is the daemon, and its end is waited for. Children that keep it
    waiting are told on stderr.
    """
    grace_s = _seconds("--grace", grace)
    host = _host(control)
    if names:
        statuses = [(name, host.stop_child(name, grace_s)) for name in names]
        result: object = [{"name": name, "status": s} for name, s in statuses]
    else:
        result = _stop_daemon(host, grace_s)
    if as_json:
        print_text(json.dumps(result) + "\n")
    return 0


def _stop_daemon(host: HostClient, grace_s: float | None) -> dict[str, object]:
    from supervisor.control.blockers import MAX_NAMED, sentence  # noqa: PLC0415 - rarely needed

    blocking: dict[object, dict[str, Any]] = {}
    overdue = 0
    for report in host.stop(grace_s):
        overdue = max(overdue, report.overdue)
        for row in report.blocking:
            if row["id"] not in blocking and len(blocking) < MAX_NAMED:
                blocking[row["id"]] = row
                print_stderr("sandhost stop", f"waiting: {sentence(row)}")
    if overdue > len(blocking):
        more = overdue - len(blocking)
        print_stderr(
            "sandhost stop", f"waiting: {more} more; the daemon's log names them"
        )
    return {"overdue": overdue, "blocking": list(blocking.values())}


@click.command(cls=Command, epilog="Example: sandhost reload")
@click.option(
    "--exec",
    "execute",
    is_flag=True,
    help="Replace the host's program; children go on.",
)
@control_option
@json_option
def reload(*, execute: bool, control: str | None, as_json: bool) -> int:
    """Have the daemon read its configuration anew.

    Only changed children restart.
    """
    if execute:
        host = _host(control)
        generation = host.replace()
        count = host.stats()["connections_reset"]
        fields = {"generation": generation, "connections_reset": count}
        text = "replaced"
        if count:
            text += f"; connections of children that were reset: {count}"
        print_text(f"{json.dumps(fields) if as_json else text}\n")
        return 0
    changes = _host(control).reload()
    rows = {key: getattr(changes, key) for key in changes.__struct_fields__}
    if as_json:
        print_text(json.dumps(rows, indent=2) + "\n")
        return 0
    for what, names in rows.items():
        if names and what != "unchanged":
            print_text(f"{what.replace('_', ' ')}: {', '.join(names)}\n")
    print_text(f"unchanged: {len(changes.unchanged)}\n")
    return 0


@click.command(cls=Command, epilog="Example: sandhost logs -f web")
@_child
@click.option("--follow", "-f", is_flag=True, help="Wait for more.")
@_lines
@click.option(
    "--timestamps", "-t", is_flag=True, help="Each line with its time and stream."
)
@click.option(
    "--since", metavar="T", help="What came in the last 10m, 1h, or since a time."
)
@click.option("--raw", is_flag=True, help="Bytes as they are, also on a terminal.")
@control_option
@json_option
def logs(  # noqa: PLR0913 - one option each
    child: str,
    *,
    follow: bool,
    lines: int | None,
    timestamps: bool,
    since: str | None,
    raw: bool,
    control: str | None,
    as_json: bool,
) -> int:
    """Print what a child said.

    On a terminal, and with -t, each line tells its stream, starts are told, and escapes
    are made visible; elsewhere it is the child's bytes.
    """
    since_s = None if since is None else _moment(since)
    show = log_writer(timestamps=timestamps, raw=raw, as_json=as_json)
    host = _host(control)
    for entry in host.logs(child, follow=follow, lines=lines, since_s=since_s):
        tell_missed("sandhost logs", entry.missed)
        show(entry)
    show(None)
    return 0


def tell_missed(title: str, missed: int) -> None:
    """Say on stderr how many bytes of an output are in no file any more."""
    if missed:
        why = "they were removed, or lost by a full disk"
        print_stderr(title, f"{missed} bytes are missing: {why}")


def log_writer(
    *, timestamps: bool, raw: bool, as_json: bool
) -> Callable[[LogEntry | None], None]:
    """Return the printer of a log's pieces; None is the end of the log."""
    from supervisor.cli.log_lines import LogLines  # noqa: PLC0415 - this command's

    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    view = LogLines(timestamps=timestamps, raw=raw)

    def show_json(entry: LogEntry | None) -> None:
        if entry is not None:
            row = {
                "offset": entry.offset,
                "missed": entry.missed,
                "text": entry.data.decode(errors="replace"),
                "marks": [
                    {name: getattr(mark, name) for name in mark.__struct_fields__}
                    for mark in entry.marks
                ],
            }
            stream_text(json.dumps(row) + "\n")

    def show_bytes(entry: LogEntry | None) -> None:
        if entry is not None:
            stream_bytes(entry.data)

    def show_lines(entry: LogEntry | None) -> None:
        stream_bytes(b"".join(view.rest() if entry is None else view.take(entry)))

    if as_json:
        return show_json
    return show_lines if timestamps or (is_terminal and not raw) else show_bytes


def _moment(text: str) -> float:
    """Return a time as seconds since the epoch: a duration ago, or RFC 3339."""
    try:
        return time.time() - parse_duration(text)
    except OptionError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise UsageFault(
            f"--since: not a time: {text!r}; write 10m, 1h, or 2026-01-31T08:00:00Z"
        ) from None


@click.command(cls=Command, epilog="Example: sandhost events --lines 20")
@click.option(
    "--follow/--no-follow", "-f", default=True, help="Wait for more, the default."
)
@_lines
@control_option
@click.option("--json", "as_json", is_flag=True, help="Gaps are JSON lines, too.")
def events(
    *, follow: bool, lines: int | None, control: str | None, as_json: bool
) -> int:
    """Print the journal as it is written, JSON lines.

    With --no-follow: what is there.
    """
    if lines is None and follow:
        lines = 0
    host = _host(control)
    for entry in host.events(follow=follow, lines=lines):
        if entry.missed and as_json:
            stream_text(json.dumps({"missed": entry.missed}) + "\n")
        else:
            tell_missed("sandhost events", entry.missed)
        if entry.event is not None:
            stream_text(json.dumps(entry.event) + "\n")
    return 0


@click.command(cls=Command, epilog="Example: sandhost stats --json")
@control_option
@json_option
def stats(control: str | None, *, as_json: bool) -> int:
    """Print figures of the daemon itself."""
    figures = _host(control).stats()
    if as_json:
        print_text(json.dumps(figures, indent=2) + "\n")
    else:
        usage = figures.pop("usage", None) or {}
        for key, value in {**figures, **usage}.items():
            print_text(f"{key:24} {'-' if value is None else value}\n")
    return 0


def _host(control: str | None) -> HostClient:
    from supervisor.client import HostClient  # noqa: PLC0415 - when a command is called

    return HostClient(control, reader=out_fd())


def _seconds(option: str, text: str | None) -> float | None:
    try:
        return None if text is None else parse_duration(text)
    except OptionError as why:
        raise UsageFault(f"{option}: {why}") from None
