"""``sandhost fleet``: children on many machines, asked of any node of the fleet."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import select
import signal as signals
import sys
from functools import partial
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, Any

import click

from hostlib.messages import (
    CommandError,
    ReaderGone,
    UsageFault,
    out_fd,
    print_stderr,
    print_text,
    stream_bytes,
    stream_text,
)
from supervisor.cli.daemon import log_writer, tell_missed
from supervisor.cli.help import Command, Group
from supervisor.cli.log_lines import parts_of
from supervisor.cli.observe import show_top, top_options
from supervisor.cli.options import COMMAND_LINE, files
from supervisor.cli.options import as_json as json_option
from supervisor.cli.options import control as control_option
from supervisor.cli.workspace import commit_options, commit_words
from supervisor.cluster.names import LEAST_PORTS, LOOPBACK, PORT
from supervisor.spawn.restart_policies import RESTARTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.client import LogEntry
    from supervisor.cluster.admission import AdmittedNode, Options
    from supervisor.cluster.client import FleetClient
    from supervisor.cluster.commands import Patience


NOT_RUN = 125
"""Exit status of `run` where its child was not run to its end."""

PIECE_BYTES = 32_768
"""Most bytes of input of `run` in one request."""

FULL_S = 0.05
"""Until input that its child has no room for is offered again; twice as long each time."""

LONGEST_FULL_S = 1.0
"""The same at most."""


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


def _address(_ctx: click.Context, _param: click.Parameter, text: str) -> str:
    """Read an address of one machine; Ray is told no names."""
    try:
        address = IPv4Address(text)
    except ValueError:
        address = IPv4Address(0)
    if address.is_unspecified:
        raise UsageFault(
            f"--bind: no IPv4 address of a machine: {text!r:.80}; write one of this"
            " machine, such as 10.0.0.1"
        )
    return str(address)


_node = click.option("--node", metavar="N", help="Its name; else this machine's.")
_bind = click.option(
    "--bind",
    metavar="IP",
    default=LOOPBACK,
    show_default=True,
    callback=_address,
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
@click.option(
    "--address", metavar="A", help="As `up` has printed it; else [fleet] address."
)
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
    import stat  # noqa: PLC0415 - for this alone

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


def _enter(control: str | None, options: Options) -> AdmittedNode:
    from supervisor.cluster.admission import enter, find_place  # noqa: PLC0415
    from supervisor.cluster.ray_processes import RayError  # noqa: PLC0415
    from supervisor.cluster.signals import exit_at_signals  # noqa: PLC0415
    from supervisor.control.client import ControlError  # noqa: PLC0415

    exit_at_signals()
    try:
        entered = enter(find_place(control), options)
    except (ControlError, RayError) as why:
        raise FleetRefusal(str(why)) from None
    if entered.note:
        print_stderr("sandhost fleet", entered.note)
    if entered.open_ports:
        ports = ", ".join(map(str, entered.open_ports))
        print_stderr(
            "sandhost fleet",
            f"these ports are open on every address of this machine: {ports}; let only"
            " the fleet's machines reach them: a program with the token can run programs"
            " by them",
        )
    return entered


def _leave(control: str | None, do: str, *, as_json: bool) -> int:
    from supervisor.cluster.admission import (  # noqa: PLC0415
        HEAD_STAYS,
        find_left_place,
        leave,
    )
    from supervisor.cluster.ray_processes import RayError  # noqa: PLC0415
    from supervisor.control.client import ControlError  # noqa: PLC0415

    failed: dict[str, str] = {}

    def ask(client: FleetClient) -> None:
        if do == "leave" and client.ask("here").get("is_head"):
            raise FleetRefusal(HEAD_STAYS)
        _end_nodes(client, do, failed)

    try:
        said = leave(find_left_place(control), ask, may_end_fleet=do == "down")
    except (ControlError, RayError) as why:
        raise FleetRefusal(str(why)) from None
    for name, reason in failed.items():
        print_stderr("sandhost fleet down", f"node {name!r} was not ended: {reason}")
    if said is not None:
        print_stderr(f"sandhost fleet {do}", said)
    if as_json:
        print_text(json.dumps({"failed": failed}) + "\n")
    return 1 if failed else 0


def _end_nodes(client: FleetClient, do: str, failed: dict[str, str]) -> None:
    """Have nodes leave; tell which are waited for, and add others that did not."""
    for item in client.leave(do):
        failed.update(item.get("failed", {}))
        for name in item.get("waiting", ()):
            print_stderr(f"sandhost fleet {do}", f"waiting: node {name!r} leaves")


@fleet.command(cls=Command, epilog="Example: sandhost fleet leave")
@control_option
@json_option
def leave(control: str | None, *, as_json: bool) -> int:
    """Take this node out of the fleet: its children end, and Ray here.

    Children that restart are placed on other nodes. The node where the fleet was begun
    is refused: it has the directory.
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


def _directory(
    _ctx: click.Context, _param: click.Parameter, text: str | None
) -> str | None:
    """Refuse an empty name: it would stand for the working directory."""
    if text is not None and not text:
        raise UsageFault("--workspace: it names no directory: ''; name one")
    return text


_needs = click.option(
    "--needs",
    metavar="L",
    multiple=True,
    help="A label that its node has to have; repeatable.",
)
_on_node = click.option("--node", metavar="N", help="The only node that will do.")
_policy = click.option("--policy", metavar="P", help="[policy.P] of its node.")
_workspace = click.option(
    "--workspace",
    metavar="DIR",
    callback=_directory,
    help="A directory of this node; the child works in it, on any node.",
)
_name = click.argument("name", metavar="NAME")
_command = click.argument("command", metavar="-- COMMAND [ARG]...", nargs=-1)


@fleet.command(
    cls=Command,
    context_settings=COMMAND_LINE,
    epilog="Example: sandhost fleet spawn -n 8 --name job --needs gpu -- /usr/bin/job",
)
@_command
@click.option("--name", metavar="NAME", help="What the child is called.")
@click.option(
    "-n",
    "count",
    metavar="K",
    type=click.IntRange(1, 100_000),
    help="Start K children, NAME-0 and so on: all or none.",
)
@_policy
@click.option(
    "--restart",
    metavar="|".join(RESTARTS),
    type=click.Choice(RESTARTS),
    default="no",
    help="What follows when it has ended, or its node is lost; default no.",
)
@_needs
@_on_node
@_workspace
@click.option("--spread/--pack", default=True, help="Onto the node with most room.")
@click.option("--wait", is_flag=True, help="Wait for a place where there is none.")
@control_option
@json_option
def spawn(control: str | None, *, as_json: bool, **given: Any) -> int:
    """Start children on nodes with room; return when they are started."""
    name = given.pop("name")
    if name is None:
        name = f"child-{os.urandom(4).hex()}"
    request = _request(name, **given)

    def use(client: FleetClient) -> Any:
        return _spawn(client, request, given["workspace"])

    rows = _with_client(control, use)
    if as_json:
        print_text(json.dumps(rows) + "\n")
    else:
        print_text("".join(f"{row['name']}\n" for row in rows))
    return 0


def _spawn(
    client: FleetClient, request: dict[str, Any], workspace: str | None
) -> list[dict[str, Any]]:
    """Start children that work in a directory of this node, if one is given."""
    from hostlib.paths import absolute  # noqa: PLC0415 - for this alone

    if workspace is not None:
        request["program"]["base"] = client.pack(absolute(workspace))
    return list(client.spawn(request))


def _request(name: str, command: tuple[str, ...], **given: Any) -> dict[str, Any]:
    """Return the arguments of `spawn`, as the directory has them."""
    if not command:
        raise UsageFault("give a command after --")
    return {
        "name": name,
        "program": {
            "command": command,
            "policy": given.get("policy"),
            "restart": given.get("restart", "no"),
            "takes_input": given.get("takes_input", False),
        },
        "needs": {
            "labels": given["needs"],
            "node": given["node"],
            "strategy": "spread" if given.get("spread", True) else "pack",
        },
        "count": given.get("count"),
        "wait": given.get("wait", False),
    }


@fleet.command(
    cls=Command,
    context_settings=COMMAND_LINE,
    epilog="Example: sandhost fleet run --needs gpu -- nvidia-smi",
)
@_command
@_policy
@_needs
@_on_node
@_workspace
@control_option
def run(control: str | None, **given: Any) -> int:
    """Run one child somewhere, and exit as it does.

    It reads this command's standard input. If its node is lost the exit status is 125.
    """
    from supervisor.cluster.signals import exit_at_signals  # noqa: PLC0415 - its own

    exit_at_signals()
    if sys.stdin is None:  # 0 is free, and would be the next socket's
        os.open(os.devnull, os.O_RDONLY)
    name = f"run-{os.urandom(4).hex()}"
    request = _request(name, takes_input=True, **given)

    def use(client: FleetClient) -> int:
        try:
            return _run_child(client, request, given["workspace"])
        except BaseException:
            _end(client, name)
            raise

    try:
        return int(_with_client(control, use, _tell_silence))
    except ReaderGone:
        return 128 + signals.SIGPIPE
    except CommandError as why:
        why.status = NOT_RUN
        raise


def _tell_silence(text: str) -> None:
    print_stderr("sandhost fleet run", f"{text}; asked again")


def _run_child(
    client: FleetClient, request: dict[str, Any], workspace: str | None
) -> int:
    """Start a child and pass its input and output; return the exit status of `run`."""
    from supervisor.cluster.commands import wait_placed  # noqa: PLC0415 - of `run` alone
    from supervisor.control.client import (  # noqa: PLC0415 - as above
        ControlError,
        RefusedError,
    )

    name, is_told = request["name"], False
    try:
        (child,) = _spawn(client, request, workspace)
    except ControlError as why:
        print_stderr("sandhost fleet run", str(why))
        is_told = isinstance(why, RefusedError)
        try:
            # An order that was not answered may be done, or under way.
            child = wait_placed(client, _find(client, name))
        except ControlError:
            _end(client, name)
            return NOT_RUN
    if child["state"] == "ended" and child["pid"] is None:
        if not is_told:
            print_stderr("sandhost fleet run", f"cannot run {name}: {child['reason']}")
        return int(child["status"] or NOT_RUN)
    try:
        status = _follow(client, name)
    except ControlError as why:
        print_stderr("sandhost fleet run", str(why))
        _end(client, name)
        return NOT_RUN
    if workspace is not None:
        _tell_changes(client, name)
    return status


def _find(client: FleetClient, name: str) -> Any:
    """Return a child, also where the node actor here is being started again."""
    from supervisor.cluster.commands import ask_again  # noqa: PLC0415 - of `run` alone

    return ask_again(client, "find", {"name": name})


def _end(client: FleetClient, name: str) -> None:
    """End a child for good, also one whose order is still under way."""
    from supervisor.cluster.commands import ask_again  # noqa: PLC0415 - of `run` alone
    from supervisor.cluster.signals import ignore_signals  # noqa: PLC0415 - as above
    from supervisor.control.client import (  # noqa: PLC0415 - as above
        ControlError,
        RefusedError,
    )

    ignore_signals()
    try:
        ask_again(client, "kill", {"name": name, "signal": "KILL"})
    except RefusedError:  # it is over, or was never begun
        return
    except ControlError:
        text = f"{name} may still run; end it by `sandhost fleet kill {name}`"
        print_stderr("sandhost fleet run", text)


def _tell_changes(client: FleetClient, name: str) -> None:
    """Say how many paths a child has changed, if any: its workspace is kept then."""
    from supervisor.control.client import ControlError  # noqa: PLC0415

    with contextlib.suppress(ControlError):  # it is gone, for nothing was changed
        changed = len(client.do_verb(*client.workspace(name), "diff", {}))
        if changed:
            print_stderr(
                "sandhost", f"{name}: {changed} changed; 'sandhost fleet diff {name}'"
            )


def _follow(client: FleetClient, name: str) -> int:
    """Pass stdin on and print a child's log until it is over; return its exit status."""
    from supervisor.cluster.commands import pause  # noqa: PLC0415 - of `run` alone

    output = _Output(client, name)
    while (child := _find(client, name))["state"] != "lost":
        if output.read(child):
            break
        pause()
    if child["state"] not in {"ended", "lost"}:
        child = _wait_over(client, child)
    if child["status"] is None:
        raise FleetRefusal(f"{name} on node {child['node']}: {child['reason']}")
    return int(child["status"])


def _wait_over(client: FleetClient, child: dict[str, Any]) -> Any:
    """Return a child once it is over, also where the fleet lists it no more."""
    from supervisor.cluster.commands import ask_again  # noqa: PLC0415 - of `run` alone
    from supervisor.control.client import RefusedError  # noqa: PLC0415 - as above

    try:
        return ask_again(client, "wait", {"name": child["name"], "child": child["id"]})
    except RefusedError:
        status = _find_status(client, child)
        if status is None:
            raise
        return {**child, "status": status}


def _find_status(client: FleetClient, child: dict[str, Any]) -> int | None:
    """Return a child's exit status by its daemon's journal; None if it is not there."""
    from supervisor.cli.trace import last_timeline  # noqa: PLC0415 - of `run` alone

    words = {"follow": False, "lines": None}
    args = {"node": child["node"], "do": "events", "args": words}
    events = (item["event"] for item in client.items(args) if item["event"])
    for entry in last_timeline(child["name"], events):
        if entry.event["event"] == "child.gone":
            status: int | None = entry.event["status"]
            return status
    return None


class _Output:
    """A child's log, on its way to this command's output, and its input the other way.

    Args:
        client: asks the fleet.
        name: of the child.
    """

    def __init__(self, client: FleetClient, name: str) -> None:
        self._client = client
        self._name = name
        self._given = _Stdin(client)
        self._offset = 0
        self._patience = _patience()

    def read(self, child: dict[str, Any]) -> bool:
        """Print what there is; return False where it was cut, and may be read again.

        Raises:
            FleetRefusal: the log of a child that has ended cannot be read.
        """
        from supervisor.control.client import (  # noqa: PLC0415 - of `run` alone
            NO_LOG,
            ControlError,
            RefusedError,
        )

        words = {"follow": True, "offset": self._offset}
        beside = partial(self._given.pass_on, child)
        try:
            entries = self._client.logs(self._name, words, beside=beside)
            for entry in entries:
                tell_missed("sandhost fleet run", entry.offset - self._offset)
                _print_entry(entry)
                self._offset = entry.offset + len(entry.data)
                self._patience.renew()
        except ControlError as why:
            if child["state"] != "ended":
                return False  # one that runs is not ended because its log is away
            has_no_log = isinstance(why, RefusedError) and NO_LOG in str(why)
            if has_no_log or self._patience.is_over(str(why)):
                raise FleetRefusal(
                    f"{why}; {self._name} has ended with status {child['status']}, and"
                    " its last output is missing"
                ) from None
            return False
        return True


def _print_entry(entry: LogEntry) -> None:
    """Print a piece of a child's log on the streams that it came from."""
    for mark, data in parts_of(entry):
        if mark is not None and mark.stream == "err":
            _write_stderr(data)
        else:
            stream_bytes(data)


def _write_stderr(data: bytes) -> None:
    """Write to stderr, or to nobody where that cannot be written."""
    while data:
        try:
            data = data[os.write(2, data) :]
        except BlockingIOError:
            select.select((), (2,), ())
        except OSError:
            return


def _patience() -> Patience:
    from supervisor.cluster.commands import Patience  # noqa: PLC0415 - of `run` alone

    return Patience()


class _Stdin:
    """This command's standard input, on its way to a child.

    Args:
        client: asks the fleet.
    """

    def __init__(self, client: FleetClient) -> None:
        self._client = client
        self._at = 0
        self._piece: bytes | None = None  # read, and not taken yet
        self._full_s = FULL_S
        self._patience = _patience()  # with refusals
        self._is_over = False

    def pass_on(self, child: dict[str, Any]) -> tuple[int, float]:
        """Send what has come; return the descriptor to wait for, and how long at most.

        The directory is not asked: its silence would delay the child's output.
        """
        if not self._is_over:
            if self._piece is None:
                if not select.select((0,), (), (), 0)[0]:
                    return 0, math.inf
                self._piece = _read_stdin()
            if self._piece is not None:
                return -1, self._offer(child, self._piece)
        return -1, math.inf

    def _offer(self, child: dict[str, Any], piece: bytes) -> float:
        """Offer a piece to the child; return how long to wait before the next offer.

        Raises:
            FleetRefusal: it has been refused for too long.
        """
        from supervisor.cluster.commands import PAUSE_S  # noqa: PLC0415 - of `run` alone
        from supervisor.control.client import (  # noqa: PLC0415 - as above
            ControlError,
            RefusedError,
        )

        data = base64.b64encode(piece).decode()
        args = {
            "name": child["name"],
            "child": child["id"],
            "incarnation": child["incarnation"],
            "data": data,
            "at": self._at,
            "end": not piece,
        }
        asked = {"node": child["node"], "do": "input", "args": args}
        try:
            answer = self._client.ask("on", asked)
        except RefusedError as why:  # it may just have ended: then so does its log
            if self._patience.is_over(str(why)):
                raise FleetRefusal(str(why)) from None
            return PAUSE_S
        except ControlError:
            return PAUSE_S
        self._patience.renew()
        self._is_over = answer["is_closed"]
        if answer["is_taken"]:
            self._at += len(piece)
            self._piece, self._is_over = None, not piece
        if answer["is_taken"] or self._is_over:
            self._full_s = FULL_S
            return 0.0
        wait_s = self._full_s
        self._full_s = min(2 * wait_s, LONGEST_FULL_S)
        return wait_s


def _read_stdin() -> bytes | None:
    """Return what has come; None for nothing yet, b"" at the end or without input."""
    try:
        return os.read(0, PIECE_BYTES)
    except BlockingIOError:  # another process reads it, too
        return None
    except OSError:
        return b""


@fleet.command(cls=Command, epilog="Example: sandhost fleet logs -f job-3")
@_name
@click.option("--follow", "-f", is_flag=True, help="Wait for more.")
@control_option
@json_option
def logs(name: str, control: str | None, *, follow: bool, as_json: bool) -> int:
    """Print what a child said, on whatever node it is."""
    show = log_writer(timestamps=False, raw=False, as_json=as_json)

    def use(client: FleetClient) -> None:
        for entry in client.logs(name, {"follow": follow}, out_fd()):
            tell_missed("sandhost fleet logs", entry.missed)
            show(entry)
        show(None)

    _with_client(control, use)
    return 0


@fleet.command(cls=Command, epilog="Example: sandhost fleet kill job-3")
@_name
@click.option(
    "--signal",
    "-s",
    metavar="S",
    default="TERM",
    help="TERM, KILL, 9 ...; default TERM.",
)
@control_option
@json_option
def kill(name: str, control: str | None, *, signal: str, as_json: bool) -> int:
    """End a child for good by TERM or KILL; its node is asked until it answers.

    Any other signal is sent once, and ends nothing by itself.
    """
    from hostlib.user_values import OptionError  # noqa: PLC0415 - for this alone
    from supervisor.config.child import signal_number  # noqa: PLC0415 - as above

    try:
        signal_number(signal)
    except OptionError as why:
        raise UsageFault(f"--signal: {why}") from None
    _ask(control, "kill", {"name": name, "signal": signal})
    if as_json:
        print_text(json.dumps({"name": name}) + "\n")
    return 0


@fleet.command(cls=Command, epilog="Example: sandhost fleet trace job-3")
@_name
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens.")
@click.option("--json", "as_json", is_flag=True, help="Print the events, JSON lines.")
@control_option
def trace(name: str, control: str | None, *, follow: bool, as_json: bool) -> int:
    """Print what a child did on its node, in order."""
    from supervisor.cli import trace as tracing  # noqa: PLC0415 - this command's

    def show(entry: tracing.Entry) -> None:
        line = json.dumps(entry.event) if as_json else tracing.line(entry)
        stream_text(line + "\n")

    def use(client: FleetClient) -> None:
        child = client.ask("find", {"name": name})
        _check_traced(child)
        words = {"follow": follow, "lines": 0 if follow else None}
        args = {"node": child["node"], "do": "events", "args": words}
        items = client.items(args, out_fd())
        events = (item["event"] for item in items if item["event"])
        if follow:
            timeline = tracing.Timeline(name)
            found = (timeline.take(event) for event in events)
            for entry in found:
                if entry is not None:
                    show(entry)
            return
        for one in tracing.last_timeline(name, events):
            show(one)

    _with_client(control, use)
    return 0


def _check_traced(child: dict[str, Any]) -> None:
    """Refuse a child that did nothing anywhere.

    Raises:
        FleetRefusal: it is on no node, or was never started.
    """
    name = child["name"]
    if child["node"] is None:
        raise FleetRefusal(
            f"cannot trace {name!r}: it is {child['state']} on no node; see `sandhost"
            " fleet ps`"
        )
    if child["state"] == "ended" and child["pid"] is None:
        raise FleetRefusal(
            f"cannot trace {name!r}: it was never started: {child['reason']}"
        )


@fleet.command(cls=Command, epilog="Example: sandhost fleet top --once --sort rss")
@control_option
@top_options
def top(control: str | None, **how: Any) -> int:
    """Show what each child does now, on all nodes that can be reached.

    Without a terminal, once. Keys: as of `sandhost top`.
    """

    def rows_of(answer: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
        left_out = [f"node {node!r}: {why}" for node, why in answer["missing"].items()]
        return answer["rows"], f"left out: {'; '.join(left_out)}" if left_out else ""

    def use(client: FleetClient) -> int:
        return show_top(client.door, "top", rows_of, how, client.fault)

    return int(_with_client(control, use))


# Workspaces


@fleet.command(cls=Command, epilog="Example: sandhost fleet diff job-3 --stat")
@_name
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@click.option("--stat", is_flag=True, help="A line for each path.")
@click.option("--name-only", is_flag=True, help="The paths alone.")
@control_option
@json_option
def diff(name: str, patterns: tuple[str, ...], control: str | None, **how: Any) -> int:
    """Print what a child changed in its workspace, as a patch.

    Exit status: 0 nothing, 1 something, 2 a fault.
    """
    from supervisor.cli.workspace import print_diff  # noqa: PLC0415 - its printing

    def use(client: FleetClient) -> int:
        words = {"patterns": list(patterns)}
        node, found = client.workspace(name)
        rows = client.do_verb(node, found, "diff", words)
        patch = client.patch(node, found, words)
        return print_diff(rows, patch, {**how, "is_nul": False})

    try:
        return int(_with_client(control, use))
    except FleetRefusal as why:
        why.status = 2
        raise


@fleet.command(cls=Command, epilog="Example: sandhost fleet commit job-3 src/")
@_name
@commit_options
@control_option
@json_option
def commit(name: str, control: str | None, *, as_json: bool, **how: Any) -> int:
    """Bring a child's changes to their base: all that is chosen, or nothing.

    Changes of a running child need --freeze.

    Exit status: 0 applied; 1 refused, for conflicts or guarded paths; 2 a fault.
    """
    from supervisor.cli.workspace import print_commit  # noqa: PLC0415 - its printing

    def use(client: FleetClient) -> Any:
        return client.commit(name, commit_words(how))

    try:
        result = _with_client(control, use)
    except FleetRefusal as why:
        why.status = 2
        raise
    return print_commit(result, as_json=as_json)


@fleet.command(cls=Command, epilog="Example: sandhost fleet quota --json")
@control_option
@json_option
def quota(control: str | None, *, as_json: bool) -> int:
    """List the fleet's accounts, and what nodes hold of them."""
    rows = _ask(control, "quota")
    if as_json:
        print_text(json.dumps(rows) + "\n")
        return 0
    from supervisor.observe.fleet_tables import render_quota  # noqa: PLC0415 - its own

    print_text(render_quota(rows["accounts"]))
    return 0


def _ask(control: str | None, do: str, args: dict[str, Any] | None = None) -> Any:
    return _with_client(control, lambda client: client.ask(do, args))


def _with_client(
    control: str | None,
    use: Callable[[FleetClient], Any],
    tell: Callable[[str], None] = lambda _text: None,
) -> Any:
    from supervisor.cluster.client import FleetClient  # noqa: PLC0415
    from supervisor.control.client import ControlError  # noqa: PLC0415

    try:
        return use(FleetClient(control, tell))
    except ControlError as why:
        raise FleetRefusal(str(why)) from None
