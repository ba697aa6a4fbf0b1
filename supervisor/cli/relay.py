"""``sandhost relay``: a nested child inside a child."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from hostlib.messages import UsageFault
from supervisor.cli.help import Command
from supervisor.cli.network_options import FAULTY_NETWORK
from supervisor.cli.options import COMMAND_LINE, files

if TYPE_CHECKING:
    from supervisor.network.settings import NetworkSettings
    from supervisor.spawn.launchpad.start import LaunchpadProcess


@click.command(
    cls=Command,
    context_settings=COMMAND_LINE,
    epilog="Example, inside a child: sandhost relay --read data -- sh worker.sh",
)
@click.argument(
    "command",
    metavar="-- COMMAND [ARG]...",
    nargs=-1,
    required=True,
    shell_complete=files,
)
@click.option(
    "--read", metavar="P", multiple=True, help="May read only this; repeatable."
)
@click.option(
    "--write", metavar="P", multiple=True, help="May write only this; repeatable."
)
@click.option(
    "--expose",
    metavar="P",
    multiple=True,
    shell_complete=files,
    help="Show P of what this child sees, to read and execute; repeatable.",
)
@click.option(
    "--network",
    metavar="RULE",
    multiple=True,
    help="A name that it may reach, of those of this child; repeatable; default none.",
)
@click.option("--model", metavar="M", help="May ask only this one.")
@click.option(
    "--quota", metavar="N", type=float, help="May use so many weighted tokens."
)
@click.option(
    "--fd",
    metavar="FD[:LINES]",
    multiple=True,
    help="Has only this LLM fd, or lines of it; repeatable.",
)
@click.option("--no-fds", is_flag=True, help="Has none of the LLM fds.")
@click.pass_obj
def relay(  # noqa: PLR0913 - a command line
    launchpad: LaunchpadProcess,
    command: tuple[str, ...],
    *,
    read: tuple[str, ...],
    write: tuple[str, ...],
    expose: tuple[str, ...],
    network: tuple[str, ...],
    model: str | None,
    quota: float | None,
    fd: tuple[str, ...],
    no_fds: bool,
) -> int:
    """Run a nested child with at most these rights.

    Inside a child: the nested one is behind a proxy on this child's FD 3.
    """
    from supervisor.relay import ShownPaths, run_nested  # noqa: PLC0415 - needs Trio

    rights: dict[str, object] = {}
    if read or write:
        rights = {"read": list(read), "write": list(write)}
    if model is not None:
        rights["model"] = model
    if quota is not None:
        if not 0 <= quota < math.inf:
            raise UsageFault(
                f"--quota: not a number of tokens: {quota}; write 0 or more"
            )
        rights["quota"] = quota
    fds = fd if fd or no_fds else None
    readable = tuple(path for path in read if path.startswith("/"))
    shown = ShownPaths(_check_exposed(expose), readable, _read_rules(network))
    return run_nested(launchpad, command, rights or None, fds, shown)


def _read_rules(rules: tuple[str, ...]) -> NetworkSettings | None:
    """Return the network of a nested child with rules; None if it has none.

    Raises:
        UsageFault: this child has no such network, or the rule cannot be read.
    """
    if not rules:
        return None
    from supervisor.network.rule import RuleError  # noqa: PLC0415 - as above
    from supervisor.network.settings import nested_settings  # noqa: PLC0415 - with one

    try:
        return nested_settings(rules, _own_network())
    except RuleError as why:
        raise UsageFault(f"--network: {why}", FAULTY_NETWORK) from None


def _own_network() -> str:
    """Return the network of this child, as `nested_settings` takes it.

    The host tells the rules of this moment. The environment has those of the start: for
    a child that has another network than rules, and one that is nested itself.
    """
    from vfs.client import Client, FsProxyError  # noqa: PLC0415 - with rules only

    rights: object = None
    with suppress(FsProxyError):  # told by what needs the host more
        rights = Client().caps().get("rights")
    rules = rights.get("network") if isinstance(rights, dict) else None
    if isinstance(rules, list):
        return " ".join(map(str, rules))
    return os.environ.get("FSPROXY_NETWORK", "")


def _check_exposed(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return exposed paths, absolute.

    Raises:
        UsageFault: a path cannot be shown to a child.
    """
    if not paths:
        return paths
    from hostlib.paths import absolute  # noqa: PLC0415 - with one
    from supervisor.sandbox.exposed_paths import fault_of  # noqa: PLC0415 - with one

    for path in paths:
        if why := fault_of(path):
            raise UsageFault(f"--expose: {why}")
    return tuple(map(absolute, paths))
