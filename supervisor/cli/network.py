"""``network``: what a running child has reached and was refused, and its rules."""

from __future__ import annotations

import json
from typing import Any

import click

from hostlib.messages import UsageFault, print_stderr, print_text
from supervisor.cli.help import Command
from supervisor.cli.options import as_json as json_option
from supervisor.cli.options import children
from supervisor.cli.options import control as control_option
from supervisor.network.reasons import describe_rule

REFUSED = 1
"""The exit status for an unknown child, and for a rule that cannot be had."""

_BY_UPSTREAM = "looks names up: their addresses are not judged here"


@click.command(
    cls=Command, epilog="Example: sandhost network web --allow a.example.com"
)
@click.argument(
    "child", metavar="CHILD", shell_complete=children, help="A name, or an id of ps."
)
@click.option(
    "--allow", metavar="RULE", multiple=True, help="Allow from now on; repeatable."
)
@click.option(
    "--deny", metavar="RULE", multiple=True, help="Refuse from now on; repeatable."
)
@click.option("--cut", is_flag=True, help="Reset what is open and not allowed.")
@click.option("--rules", is_flag=True, help="Print the rules that would have sufficed.")
@control_option
@json_option
def network(  # noqa: PLR0913 - one option each
    child: str,
    *,
    allow: tuple[str, ...],
    deny: tuple[str, ...],
    cut: bool,
    rules: bool,
    control: str | None,
    as_json: bool,
) -> int:
    """Tell what a child has reached; change its rules."""
    from supervisor.control.client import (  # noqa: PLC0415 - only this command needs it
        RefusedError,
        UnavailableError,
        call,
        find_control,
    )

    args = {"name": child, "allow": list(allow), "deny": list(deny), "cut": cut}
    try:
        answer = call(find_control(control), "network", args)
    except (RefusedError, UnavailableError) as why:
        print_stderr("sandhost network", str(why))
        return REFUSED
    if rules:
        if answer["learned"] is None:
            raise UsageFault(f"--rules: {child} does not learn; use --network learn")
        if left_out := answer["network"].get("not_learned"):
            text = f"{left_out} more uses of {child} were not noted"
            print_stderr("sandhost network", text)
        shown = answer["learned"]
        text = json.dumps(shown) + "\n" if as_json else "".join(f"{r}\n" for r in shown)
    elif as_json:
        text = json.dumps(answer["network"]) + "\n"
    elif allow or deny or cut:
        text = ""
    else:
        text = _table(answer["network"])
    print_text(text)
    return 0


def _table(figures: dict[str, Any]) -> str:
    """Return the figures as lines for people."""
    lines = [f"network {figures['mode']}: {', '.join(figures['rules']) or 'no rules'}"]
    if figures.get("upstream"):
        lines.append(f"  {figures['upstream']} {_BY_UPSTREAM}")
    lines += [
        f"  {row['address']} is port {row['port']}" for row in figures["published"]
    ]
    lines += [
        f"  {_host(row)}  {row['connections']} connections, {row['open']} open,"
        f" {row['bytes_in']} bytes in, {row['bytes_out']} out"
        for row in figures["names"]
    ]
    lines += [
        f"  {_host(row)}  refused {row['count']} times: {row['reason']}"
        f"{describe_rule(row['reason'], row['rule'])}"
        for row in figures["refused"]
    ]
    return "".join(f"{line}\n" for line in lines)


def _host(row: dict[str, Any]) -> str:
    return row["name"] if row["port"] is None else f"{row['name']}:{row['port']}"
