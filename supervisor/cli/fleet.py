"""``sandhost fleet``: children on many machines, asked of any node of the fleet."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from hostlib.messages import CommandError, UsageFault, print_text, say
from supervisor.cli.help import Command, Group
from supervisor.cli.options import as_json as json_option
from supervisor.cli.options import control as control_option
from supervisor.cli.options import files
from supervisor.cluster.names import LEAST_PORTS, LOOPBACK, PORT

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.cluster.admission import Entered, Options
    from supervisor.cluster.client import FleetClient


class FleetRefusal(CommandError):  # noqa: N818 - as the others
    """The fleet, or a node of it, refuses."""

    status: int | None = 1


@click.group(
    cls=Group,
    no_args_is_help=False,  # an error is one line
    epilog="Example: sandhost fleet spawn -n 100 --name job -- /usr/bin/worker",
)
def fleet() -> None:
    """Run children on many machines."""


# Membership


def _ports(
    _ctx: click.Context, _param: click.Parameter, text: str | None
) -> tuple[int, int] | None:
    """Read ``--ports A-B``."""
    if text is None:
        return None
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal()):
        raise UsageFault(f"--ports: not a range: {text!r}; write 20000-20100")
    begin, end = int(first), int(last)
    if not (0 < begin <= end < 65_536) or end - begin + 1 < LEAST_PORTS:
        raise UsageFault(
            f"--ports: {text!r} has too few ports; write at least {LEAST_PORTS}, within"
            " 1 to 65535"
        )
    return begin, end


def _words(
    _ctx: click.Context, _param: click.Parameter, text: str | None
) -> tuple[str, ...]:
    """Read words between commas."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


_node = click.option("--node", metavar="N", help="Its name; else this machine's.")
_bind = click.option(
    "--bind",
    metavar="IP",
    default=LOOPBACK,
    show_default=True,
    help="Address of Ray here. Another than the loopback opens ports on every address.",
)
_labels = click.option(
    "--labels", metavar="A,B", callback=_words, help="What children may need."
)
_port_range = click.option(
    "--ports", metavar="A-B", callback=_ports, help="Ports of Ray here; else any."
)


@fleet.command(cls=Command, epilog="Example: sandhost fleet up --labels gpu")
@_node
@_bind
@click.option(
    "--port",
    metavar="P",
    type=click.IntRange(1, 65_535),
    default=PORT,
    show_default=True,
    help="Port of the fleet's head.",
)
@_labels
@_port_range
@control_option
@json_option
def up(control: str | None, *, as_json: bool, **given: Any) -> int:
    """Begin a fleet on this machine, whose daemon is its first node."""
    from supervisor.cluster.admission import Options  # noqa: PLC0415 - no other command

    entered = _enter(control, Options(**given))
    row = {"address": entered.address, "token_file": entered.token_file}
    if as_json:
        print_text(json.dumps(row) + "\n")
    else:
        print_text(
            f"the fleet is up; join it elsewhere by `sandhost fleet join --address"
            f" {entered.address} --token-file F`, F being a copy of"
            f" {entered.token_file}\n"
        )
    return 0


@fleet.command(
    cls=Command,
    epilog="Example: sandhost fleet join --address 10.0.0.1:6379 --token-file token"
    " --bind 10.0.0.2",
)
@click.option("--address", metavar="A", required=True, help="As `up` has printed it.")
@click.option(
    "--token-file",
    metavar="F",
    required=True,
    shell_complete=files,
    help="A copy of the file that `up` has named; mode 0600.",
)
@_node
@_bind
@_labels
@_port_range
@control_option
@json_option
def join(control: str | None, *, as_json: bool, token_file: str, **given: Any) -> int:
    """Join the daemon of this machine to a fleet, as a node; return when it is up."""
    from supervisor.cluster.admission import Options  # noqa: PLC0415 - as above

    token = _token(token_file)
    entered = _enter(control, Options(port=PORT, token_file=token, **given))
    if as_json:
        print_text(json.dumps({"address": entered.address}) + "\n")
    return 0


def _token(path: str) -> str:
    """Return the absolute path of a token's file that others cannot read."""
    import os  # noqa: PLC0415 - for this alone
    import stat  # noqa: PLC0415 - as above

    from hostlib.paths import absolute  # noqa: PLC0415 - as above

    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - a str is wanted
    except OSError as why:
        raise FleetRefusal(
            f"cannot read the token in {path!r}: {why.strerror}; copy the file that"
            " `sandhost fleet up` has named"
        ) from None
    if stat.S_IMODE(mode) & 0o077:
        raise FleetRefusal(
            f"cannot use the token in {path!r}: others may read it; chmod 600 {path}"
        )
    return absolute(path)


def _enter(control: str | None, options: Options) -> Entered:
    from supervisor.cluster.admission import enter, find_place  # noqa: PLC0415
    from supervisor.cluster.ray_processes import RayError  # noqa: PLC0415
    from supervisor.control.client import ControlError  # noqa: PLC0415

    try:
        entered = enter(find_place(control), options)
    except (ControlError, RayError) as why:
        raise FleetRefusal(str(why)) from None
    if entered.open_ports:
        ports = ", ".join(map(str, entered.open_ports))
        say(
            "sandhost fleet",
            f"these ports are open on every address of this machine: {ports}; who has"
            " the token can run programs by them: let the fleet's machines alone reach"
            " them",
        )
    return entered


def _leave(control: str | None, do: str, *, as_json: bool) -> int:
    from supervisor.cluster.admission import find_place, leave  # noqa: PLC0415
    from supervisor.cluster.ray_processes import RayError  # noqa: PLC0415
    from supervisor.control.client import ControlError  # noqa: PLC0415

    failed: dict[str, str] = {}

    def ask(client: FleetClient) -> None:
        failed.update(client.ask(do) or {} if do == "down" else {})
        if do != "down":
            client.ask(do)

    try:
        said = leave(find_place(control), control, ask)
    except (ControlError, RayError) as why:
        raise FleetRefusal(str(why)) from None
    for name, reason in failed.items():
        say("sandhost fleet down", f"node {name!r} was not ended: {reason}")
    if said is not None:
        say(
            f"sandhost fleet {do}",
            f"{said}; Ray here is ended, children here end with their lease",
        )
    if as_json:
        print_text(json.dumps({"failed": failed}) + "\n")
    return 1 if failed else 0


@fleet.command(cls=Command, epilog="Example: sandhost fleet leave")
@control_option
@json_option
def leave(control: str | None, *, as_json: bool) -> int:
    """Take this node out of the fleet: its children end, and Ray here.

    Children that restart are placed on other nodes.
    """
    return _leave(control, "leave", as_json=as_json)


@fleet.command(cls=Command, epilog="Example: sandhost fleet down")
@control_option
@json_option
def down(control: str | None, *, as_json: bool) -> int:
    """End the fleet: all nodes leave; the daemons go on."""
    return _leave(control, "down", as_json=as_json)


@fleet.command(cls=Command, epilog="Example: sandhost fleet forget worker-3")
@click.argument("node", metavar="NODE")
@control_option
@json_option
def forget(node: str, control: str | None, *, as_json: bool) -> int:
    """Give a lost node up: what it held of quotas counts as spent."""
    _ask(control, "forget", {"node": node})
    if as_json:
        print_text("{}\n")
    return 0


# Children


@fleet.command("ps", cls=Command, epilog="Example: sandhost fleet ps --json")
@control_option
@json_option
def list_fleet(control: str | None, *, as_json: bool) -> int:
    """List the nodes and the children of the fleet."""
    rows = _ask(control, "ps")
    if as_json:
        print_text(json.dumps(rows) + "\n")
        return 0
    from supervisor.observe.fleet_tables import render  # noqa: PLC0415 - its own

    print_text(render(rows["nodes"], rows["children"]))
    return 0


def _ask(control: str | None, do: str, args: dict[str, Any] | None = None) -> Any:
    return _with_client(control, lambda client: client.ask(do, args))


def _with_client(control: str | None, use: Callable[[FleetClient], Any]) -> Any:
    from supervisor.cluster.client import FleetClient  # noqa: PLC0415
    from supervisor.control.client import ControlError  # noqa: PLC0415

    try:
        return use(FleetClient(control))
    except ControlError as why:
        raise FleetRefusal(str(why)) from None
