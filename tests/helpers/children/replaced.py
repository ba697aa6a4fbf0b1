"""A host that can be replaced, in a process of its own: SIGUSR2 replaces it.

argv: a JSON file that says what it is to be: `where` (a directory; the root is `root` in
it), `children` (a list of what differs from the defaults of `ChildSpec`, the command
first of all), `settings`. It says on stdout, in lines:

    up GENERATION PID...      children run, requests are served
    refused REASON            it was not replaced
    ended NAME STATUS         a child is gone
    over                      all of them are; so is the host

If there is a file `next` in `where`, its lines are the arguments of the program that is
to be next; else it is this one again. The control socket is `control` in `where`.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import trio

from hostlib.handover import HandoverError
from hostlib.journal import open_journal
from hostlib.log import Log
from supervisor.control.server import serve_control
from supervisor.handover.exchange import CHECK, answer_check, replace
from supervisor.handover.host_state import restore_host
from supervisor.handover.next_program import (
    SIGNALS,
    Program,
    hear_signals,
    own_program,
    state_of,
    take_inherited,
)
from supervisor.host import Host, open_host
from supervisor.parts import Settings
from supervisor.sandbox.plan import PROFILES
from supervisor.spawn.launchpad.start import LaunchpadProcess, start_launchpad
from supervisor.spec import ChildSpec, minimal_env
from supervisor.workspace.use import WorkspaceUse


def say(text: str) -> None:
    """Say one line."""
    os.write(1, text.encode() + b"\n")


def program(where: Path) -> Program:
    """Return what is to be next."""
    path = where / "next"
    if not path.exists():
        return own_program()
    first, *words = path.read_text().splitlines()
    return Program(first, (first,), tuple(words))


async def on_signals(host: Host, where: Path) -> None:
    """Be replaced whenever somebody asks for it; die of SIGTERM as any host."""
    with trio.open_signal_receiver(*SIGNALS) as signals:
        hear_signals()
        async with trio.open_nursery() as nursery:
            async for number in signals:
                if number == signal.SIGUSR2:
                    nursery.start_soon(try_to_replace, host, where)
                elif number != signal.SIGHUP:
                    host.request_stop(0.0)


async def try_to_replace(host: Host, where: Path) -> None:
    """Be replaced, or say why not."""
    try:
        await replace(host, program(where))
    except HandoverError as why:
        say(f"refused {why}")


async def spawn(host: Host, where: Path, changes: dict[str, Any]) -> None:
    """Start one child."""
    # Both may be a FIFO, which is opened without waiting for its other end.
    name = changes.pop("name")
    given = os.open(changes.pop("stdin", os.devnull), os.O_RDWR | os.O_CLOEXEC)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    out = os.open(where / f"said-{name}", flags)
    known: dict[str, Any] = {
        "cwd": str(where),
        "root": f"{where}/root",
        "env": minimal_env(str(where)),
        "name": name,
        "stdio": (given, out, 2),
    }
    command = tuple(changes.pop("command"))
    if "sandbox" in changes:
        changes["sandbox"] = PROFILES[changes["sandbox"]]
    if "workspaces" in changes:
        kind = tuple[WorkspaceUse, ...]
        changes["workspaces"] = msgspec.convert(changes["workspaces"], kind)
    try:
        child = await host.spawn(ChildSpec(command, **{**known, **changes}))
    finally:
        os.close(out)
        os.close(given)
    assert child.failure is None, child.failure


async def serve(order: dict[str, Any], launchpad: LaunchpadProcess) -> None:
    """Be a host until its children have ended."""
    where = Path(order["where"])
    journal = open_journal(str(where / "journal"), say)
    settings = Settings(**order.get("settings", {}))
    state = state_of(launchpad)
    async with open_host(
        launchpad, settings, journal=journal, log=Log("ERROR"), left=state
    ) as host:
        if state is not None:
            kept = await restore_host(host, state)
        else:
            for changes in order["children"]:
                await spawn(host, where, changes)
            kept = list(host.children.values())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(on_signals, host, where)
            await nursery.start(serve_control, host, str(where / "control"))
            processes = [child.process for child in kept]
            pids = [str(process.pid) for process in processes if process is not None]
            say(f"up {host.generation} {' '.join(pids)}")
            async with trio.open_nursery() as children:
                for child in kept:

                    async def tell(name: str | None, wait: Any) -> None:
                        say(f"ended {name} {await wait()}")

                    children.start_soon(tell, child.spec.name, child.wait_gone)
            nursery.cancel_scope.cancel()
    journal.close()


def main() -> None:
    """Answer the check, or be a host: a fresh one, or the next one."""
    if sys.argv[1] == CHECK:
        os._exit(answer_check())
    launchpad = take_inherited() or start_launchpad()
    order = json.loads(Path(sys.argv[1]).read_text())
    trio.run(serve, order, launchpad)
    say("over")
    os._exit(0)


main()
