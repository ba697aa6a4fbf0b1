"""Commands for looking: ``top`` and ``trace``, their options and words."""

from __future__ import annotations

import json
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hostlib.messages import (
    CommandError,
    UsageFault,
    out_fd,
    print_stderr,
    print_text,
    remedy,
    stream_text,
)
from hostlib.user_values import OptionError, parse_duration
from supervisor.cli.help import Command
from supervisor.cli.options import as_json as json_option
from supervisor.cli.options import control as control_option
from supervisor.cli.options import files, one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from supervisor.control.client import ControlError


LONGEST_PAUSE_S = 0.5
"""Time between the two looks of ``--once``, which shows rates."""


def _interval(_ctx: click.Context, _param: click.Parameter, text: str) -> float:
    """Read ``--interval S``."""
    try:
        interval_s = parse_duration(text)
    except OptionError as why:
        raise UsageFault(f"--interval: {why}") from None
    if interval_s < 0.1:
        raise UsageFault(f"--interval: at least 0.1s, not {text}")
    return interval_s


def _sort(_ctx: click.Context, _param: click.Parameter, text: str) -> str:
    """Read ``--sort WORD``."""
    from supervisor.cli.top import SORTS  # noqa: PLC0415 - only this command needs it

    if text not in SORTS:
        raise UsageFault(f"cannot sort by {text!r}; there are: {', '.join(SORTS)}")
    return text


_TOP_OPTIONS = (
    click.option("--once", is_flag=True, help="Print one table."),
    json_option,
    click.option(
        "--sort",
        metavar="WORD",
        default="cpu",
        callback=_sort,
        shell_complete=one_of(
            *("cpu", "rss", "requests", "files", "in", "out", "tokens", "errors"),
            "name",
        ),
        help="cpu, rss, requests, files, in, out, tokens, errors, name; default cpu.",
    ),
    click.option(
        "--filter", "wanted", metavar="TEXT", default="", help="Only rows that hold it."
    ),
    click.option(
        "--interval",
        "interval_s",
        metavar="S",
        default="2s",
        callback=_interval,
        help="Between two looks; default 2s.",
    ),
)


def top_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a command that shows the work of children."""
    for option in reversed(_TOP_OPTIONS):
        command = option(command)
    return command


@click.command(cls=Command, epilog="Example: sandhost top --once --sort requests")
@control_option
@top_options
def top(control: str | None, **how: Any) -> int:
    """Show what each child does now.

    Without a terminal, once. Keys: q quits, / filters, arrows choose, k and K kill,
    letters sort.
    """
    from supervisor.control.client import find_control  # noqa: PLC0415

    return show_top(find_control(control), "ps", lambda rows: (rows, ""), how)


def show_top(
    path: str,
    do: str,
    rows_of: Callable[[Any], tuple[list[dict[str, Any]], str]],
    how: dict[str, Any],
    fault_of: Callable[[ControlError], ControlError] = lambda why: why,
) -> int:
    """Show the work of children, as options say.

    Args:
        path: the socket that is asked.
        do: the question to the host.
        rows_of: returns the rows of an answer, and one line on what is missing.
        how: the options of `top_options`.
        fault_of: returns a fault in the words of what is asked.
    """
    from supervisor.cli.top import Screen, arrange, table  # noqa: PLC0415
    from supervisor.control.client import ControlError  # noqa: PLC0415 - as above
    from supervisor.observe import tables  # noqa: PLC0415 - only this command needs it

    if how["once"] or how["as_json"] or not _has_terminal():
        try:
            found = _sample_twice(path, do, rows_of, how["interval_s"])
        except ControlError as why:
            raise fault_of(why) from None
        rows = arrange(found, how["sort"], how["wanted"])
        if how["as_json"]:
            print_text(tables.to_json(rows))
        else:
            lines = table(rows, tables.terminal_width())
            print_text("".join(f"{line}\n" for line in lines))
        return 0
    from supervisor.cli.top_screen import HostQuestion, Source, run_screen  # noqa: PLC0415

    screen = Screen(how["sort"], how["wanted"])
    source = Source(path, HostQuestion(do), rows_of, fault_of)
    run_screen(source, screen, how["interval_s"])
    return 0


def _has_terminal() -> bool:
    streams = (sys.stdin, sys.stdout)
    return all(stream is not None and stream.isatty() for stream in streams)


def _sample_twice(
    path: str,
    do: str,
    rows_of: Callable[[Any], tuple[list[dict[str, Any]], str]],
    interval_s: float,
) -> list[dict[str, Any]]:
    """Return the rows of two looks: a rate needs both."""
    from supervisor.cli.top import HostLook, figures  # noqa: PLC0415
    from supervisor.control.client import call  # noqa: PLC0415

    rows, _ = rows_of(call(path, do))
    before = HostLook(time.monotonic(), rows)
    select.select([], [], [], min(interval_s, LONGEST_PAUSE_S))
    rows, missing = rows_of(call(path, do))
    if missing:
        print_stderr("sandhost top", missing)
    return figures(before, HostLook(time.monotonic(), rows))


@click.command(cls=Command, epilog="Example: sandhost trace c1 --journal run.jsonl")
@click.argument("client", metavar="CLIENT", help="Of clients or ps: c1, child-1, web.")
@click.option(
    "--journal", metavar="F", shell_complete=files, help="Read a journal's file."
)
@control_option
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens.")
@click.option("--json", "as_json", is_flag=True, help="Print the events, JSON lines.")
def trace(
    client: str,
    *,
    journal: str | None,
    control: str | None,
    follow: bool,
    as_json: bool,
) -> int:
    """Print what a client did, in order.

    Files, model calls, executions, signals. Clients nested in it are part of it. Ids
    begin anew with each host: it is the last host's that knew it. Reads a daemon's
    journal through its control socket.
    """
    from supervisor.cli import trace as tracing  # noqa: PLC0415 - only this command's

    def show(entry: tracing.Entry) -> None:
        line = json.dumps(entry.event) if as_json else tracing.line(entry)
        stream_text(line + "\n")

    if follow:
        if journal is not None:
            raise UsageFault("--follow asks a host; leave --journal out")
        timeline = tracing.Timeline(client)
        for event in _events_of_host(control, follow=True):
            entry = timeline.take(event)
            if entry is not None:
                show(entry)
        return 0
    events = (
        _events_of_host(control, follow=False)
        if journal is None
        else _events_of_file(journal)
    )
    entries = tracing.last_timeline(client, events)
    if not entries:
        raise CommandError(
            f"cannot trace {client!r}: the journal has no event of it; sandhost clients"
            " and ps tell ids"
        )
    for entry in entries:
        show(entry)
    return 0


def _events_of_file(path: str) -> Iterator[dict[str, Any]]:
    try:
        with Path(path).open("rb") as file:
            yield from _parse(file)
    except OSError as why:
        raise CommandError(
            f"cannot read {path!r}: {why.strerror}{remedy(why)}"
        ) from None


def _parse(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # a full disk has cut the line
        if isinstance(event, dict):
            yield event


def _events_of_host(control: str | None, *, follow: bool) -> Iterator[dict[str, Any]]:
    from supervisor.control.client import (  # noqa: PLC0415
        ControlError,
        find_control,
        stream,
    )

    path = find_control(control)
    try:
        args = {"follow": follow, "lines": None}
        for item in stream(path, "events", args, out_fd()):
            if item["missed"]:
                text = f"{item['missed']} bytes are missing: rotation removed them"
                print_stderr("sandhost trace", text)
            if isinstance(item["event"], dict):
                yield item["event"]
    except ControlError as why:
        if "does not know 'events'" not in str(why):
            raise
        raise CommandError(
            f"the host at {path!r} keeps no journal that can be asked for; give"
            " the file of its --journal with --journal F"
        ) from None
