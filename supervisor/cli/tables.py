"""``ps``, ``clients``, ``files``, ``quota``: tables of a host, by its socket."""

from __future__ import annotations

import click

from hostlib.messages import print_text
from supervisor.cli.help import Command
from supervisor.cli.options import as_json as json_option
from supervisor.cli.options import control as control_option


@click.command(cls=Command, epilog="Example: sandhost ps --control run.sock")
@control_option
@json_option
def ps(control: str | None, *, as_json: bool) -> int:
    """List the children of a host."""
    return _table("ps", control, as_json=as_json)


@click.command(cls=Command, epilog="Example: sandhost clients --json")
@control_option
@json_option
def clients(control: str | None, *, as_json: bool) -> int:
    """List the clients of a host, nested ones included."""
    return _table("clients", control, as_json=as_json)


@click.command(cls=Command, epilog="Example: sandhost files --json")
@control_option
@json_option
def files(control: str | None, *, as_json: bool) -> int:
    """List the files that clients have open."""
    return _table("files", control, as_json=as_json)


@click.command(cls=Command, epilog="Example: sandhost quota --json")
@control_option
@json_option
def quota(control: str | None, *, as_json: bool) -> int:
    """List what clients have spent on the model.

    In weighted tokens.
    """
    return _table("quota", control, as_json=as_json)


def _table(kind: str, control: str | None, *, as_json: bool) -> int:
    from supervisor.control.client import call, find_control  # noqa: PLC0415
    from supervisor.observe import tables  # noqa: PLC0415 - only these commands need it

    rows = call(find_control(control), kind)
    if as_json:
        print_text(tables.to_json(rows))
        return 0
    print_text(tables.render_for_stdout(tables.TABLES[kind], rows))
    return 0
