"""``ps``, ``clients``, ``files``, ``quota``: tables of a host, asked over its socket."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from supervisor.cli.options import (  # noqa: TC001 - typer reads them at run time
    ControlOf,
    Json,
)
from supervisor.say import CommandError, print_text

if TYPE_CHECKING:
    import typer


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command(epilog="Example: sandhost ps --control run.sock")(ps)
    app.command(epilog="Example: sandhost clients --json")(clients)
    app.command(epilog="Example: sandhost files --json")(files)
    app.command(epilog="Example: sandhost quota --json")(quota)


def ps(control: ControlOf = None, as_json: Json = False) -> int:
    """List the children of a host."""
    return _table("ps", control, as_json=as_json)


def clients(control: ControlOf = None, as_json: Json = False) -> int:
    """List the clients of a host, nested ones included."""
    return _table("clients", control, as_json=as_json)


def files(control: ControlOf = None, as_json: Json = False) -> int:
    """List the files that clients of a host have open."""
    return _table("files", control, as_json=as_json)


def quota(control: ControlOf = None, as_json: Json = False) -> int:
    """List what clients of a host have spent on the model, in weighted tokens."""
    return _table("quota", control, as_json=as_json)


def _table(kind: str, control: str | None, *, as_json: bool) -> int:
    from supervisor import tables  # noqa: PLC0415 - only these commands need it
    from supervisor.control.client import (  # noqa: PLC0415
        ControlError,
        call,
        control_path,
    )

    path = control_path(control)
    if path is None:
        raise CommandError(
            "cannot find a host: give --control PATH or set SANDHOST_CONTROL"
        )
    try:
        rows = call(path, kind)
    except ControlError as why:
        raise CommandError(str(why)) from None
    if as_json:
        print_text(tables.as_json(rows))
        return 0
    terminal = sys.stdout is not None and sys.stdout.isatty()
    width = os.get_terminal_size().columns if terminal else tables.WIDTH
    print_text(tables.render(kind, rows, terminal=terminal, width=width))
    return 0
