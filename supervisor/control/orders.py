"""The orders of a daemon over its control socket: spawn, kill, stop, reload.

Checks arguments, calls ``children`` and makes the answer.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from hostlib.threads import in_thread
from hostlib.user_values import OptionError, parse_duration
from supervisor.config.child import (
    ChildSection,
    check_new_child,
    signal_number,
)
from supervisor.config.daemon_checks import faults_here
from supervisor.config.loader import ConfigError, load_config, warnings
from supervisor.control.networks import NetworkOrders
from supervisor.control.server import OrderError, Orders
from supervisor.control.workspaces import WorkspaceOrders
from supervisor.fleet.fence import FencedError
from supervisor.kept_children.input_pipe import ClosedInputError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.children.child import Child
    from supervisor.config.directories import Places
    from supervisor.config.document import Config
    from supervisor.fleet.fence import FleetLife
    from supervisor.host import Host
    from supervisor.kept_children.kept_child import KeptChild
    from supervisor.kept_children.roster import Children, RosterChanges


_CHANGED = ("started", "stopped", "restarted")


class SpawnArgs(msgspec.Struct, forbid_unknown_fields=True):
    """``spawn``: a command, or the name of a configured child."""

    name: str | None = None
    command: list[str] | None = None
    policy: str | None = None
    restart: str = "no"
    env: dict[str, str] = {}
    cwd: str | None = None
    dialect: int = 2
    transport: str = "socketpair"
    stop_signal: str = "TERM"


class LifeArgs(msgspec.Struct, forbid_unknown_fields=True):
    """The child that an order is for, and of a fleet's child which of its lives.

    Attributes:
        child: its id in its fleet; None for whatever it is, as is the next one.
        incarnation: of the child.
    """

    name: str
    child: str | None = None
    incarnation: int | None = None


class KillArgs(LifeArgs, forbid_unknown_fields=True):
    """``kill``."""

    signal: str = "TERM"
    tree: bool = False


class StopChildArgs(msgspec.Struct, forbid_unknown_fields=True):
    """``stop-child``."""

    name: str
    grace: Annotated[float, msgspec.Meta(ge=0)] | None = None


class InputArgs(LifeArgs, forbid_unknown_fields=True):
    """``input``: a piece of what a child reads on its standard input.

    Attributes:
        data: in base64.
        at: its offset in all input; None for a piece behind whatever is there.
        end: the input ends with it.
    """

    data: str = ""
    at: Annotated[int, msgspec.Meta(ge=0)] | None = None
    end: bool = False


class NoArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of orders that take none."""


class DaemonOrders:
    """The orders of one daemon.

    Args:
        host: has the children.
        children: the kept ones.
        places: the directories of the daemon, as they were at its start.
        config_path: read anew by ``reload``; None if it was started without one.
        on_reload: called with True before a reload and False after it.
    """

    def __init__(
        self,
        host: Host,
        children: Children,
        places: Places,
        config_path: str | None,
        on_reload: Callable[[bool], None] = lambda _begins: None,
    ) -> None:
        self._host = host
        self._children = children
        self._places = places
        self._config_path = config_path
        self._on_reload = on_reload

    def add_to(self, orders: Orders) -> None:
        """Register the orders."""
        orders.orders.update(
            {
                "spawn": self._spawn,
                "kill": self._kill,
                "stop-child": self._stop_child,
                "input": self._input,
                "reload": self._reload,
            }
        )
        # The input is the child's own, and there are many pieces: none is told.
        orders.reading["input"] = lambda _words: True
        orders.stats.append(self._stats)
        WorkspaceOrders(self._host, self._places.state_dir).add_to(orders)
        NetworkOrders(self._host).add_to(orders)

    def _stats(self) -> dict[str, object]:
        """Return what `stats` tells of a daemon beside its figures."""
        section = self._children.config.fleet
        fleet = None
        if section is not None:
            fleet = {
                "address": section.address,
                "node": section.node,
                "labels": section.labels,
                "lease_s": parse_duration(section.lease),
                "store": section.store,
                "max_tokens": section.quota.max_tokens,
                "window": section.quota.window,
            }
        return {
            "state_dir": self._places.state_dir,
            "max_children": self._host.settings.max_children,
            "fleet": fleet,
        }

    async def _spawn(self, words: dict[str, Any]) -> dict[str, object]:
        args = msgspec.convert(words, SpawnArgs)
        kept = await self._begin(args)
        await kept.begun.wait()
        child = kept.child
        if child is None or child.failure is not None:
            if child is not None:
                await child.gone.wait()
            if child is None and kept.has_lived:
                # It was started and has ended since: the start did not fail.
                return {"name": kept.name, "id": None, "pid": None, "client_id": None}
            why = f"cannot spawn {kept.name}"
            if child is None or child.failure is None:
                raise OrderError(f"{why}: {kept.reason}")
            under = kept.section.policy_phrase()
            raise OrderError(f"{why}{under}: {child.failure.text}")
        return _describe_spawned(kept, child)

    async def _begin(self, args: SpawnArgs) -> KeptChild:
        if args.command is None:
            return await self._begin_configured(args.name)
        section = self._section(args, args.command)
        if len(self._host.children) >= self._host.settings.max_children:
            raise OrderError(
                f"cannot spawn: there are {len(self._host.children)} children already,"
                " as many as host.max_children allows"
            )
        try:
            return self._children.spawn(args.name, section)
        except ValueError as why:
            raise OrderError(f"cannot spawn: {why}") from None

    async def _begin_configured(self, name: str | None) -> KeptChild:
        kept = None if name is None else self._children.find(name)
        if kept is None:
            raise OrderError(
                f"cannot spawn {name!r}: it is not configured; give a command"
            )
        if kept.child is not None:
            raise OrderError(f"cannot spawn {name}: it runs already")
        # Cleaning up after its last process comes first.
        await kept.ended.wait()
        if self._children.is_changing(kept.name):
            raise OrderError(
                f"cannot spawn {kept.name}: its configuration is being reloaded; try again"
            )
        self._children.start(kept)
        return kept

    def _section(self, args: SpawnArgs, command: list[str]) -> ChildSection:
        """Return a child's section made of arguments; refuse arguments that fit no child."""
        section = ChildSection(
            command=command,
            policy=args.policy,
            restart=args.restart,
            env=args.env,
            cwd=args.cwd,
            dialect=args.dialect,
            transport=args.transport,
            stop_signal=args.stop_signal,
        )
        try:
            check_new_child(args.name, section, self._children.config.policy)
        except ValueError as why:
            raise OrderError(f"cannot spawn{why}") from None
        return section

    async def _kill(self, words: dict[str, Any]) -> dict[str, object]:
        args = msgspec.convert(words, KillArgs)
        child = self._running(args.name)
        _check_life(f"cannot signal {args.name!r}", child.spec.fleet, args)
        number = _signal(args.signal)
        if child.process is None:
            raise OrderError(f"cannot kill {args.name}: it is being started; try again")
        pid = child.process.pid
        if args.tree:
            await child.signal_tree(number)
        else:
            child.send_signal(number)
        return {"id": child.id, "pid": pid, "signal": number}

    def _running(self, name: str) -> Child:
        kept = self._children.find(name)
        child = self._host.children.get(name) if kept is None else kept.child
        if child is None:
            why = "there is no such child" if kept is None else "it does not run"
            raise OrderError(f"cannot signal {name!r}: {why}; see sandhost ps")
        return child

    async def _stop_child(self, words: dict[str, Any]) -> dict[str, object]:
        args = msgspec.convert(words, StopChildArgs)
        kept = self._children.find(args.name)
        if kept is None:
            raise OrderError(
                f"cannot stop {args.name!r}: there is no such child; see sandhost ps"
            )
        kept.stop(args.grace)
        await kept.settled.wait()
        return {"name": kept.name, "status": kept.status}

    async def _input(self, words: dict[str, Any]) -> dict[str, object]:
        """Take a piece of a child's input, if there is room; tell where its log ends.

        A child that reads no more has closed it, as has one that is not there any more.
        """
        args = msgspec.convert(words, InputArgs)
        what = f"cannot send input to {args.name!r}"
        kept = self._children.find(args.name)
        log_end = 0 if kept is None else kept.log.segments.end
        closed: dict[str, object] = {
            "is_taken": False,
            "is_closed": True,
            "log_end": log_end,
        }
        if kept is None or kept.child is None:
            return closed
        _check_life(what, kept.child.spec.fleet, args)
        if kept.input is None:
            text = "its standard input is empty; start it by `sandhost fleet run`"
            raise OrderError(f"{what}: {text}")
        try:
            self._host.fence.check(kept.child.id)
            data = base64.b64decode(args.data, validate=True)
            is_taken = kept.input.take(data, args.at, is_last=args.end)
        except ClosedInputError:
            return closed
        except (FencedError, InputError, ValueError) as why:
            raise OrderError(f"{what}: {why}") from None
        return {"is_taken": is_taken, "is_closed": False, "log_end": log_end}

    async def _reload(self, words: dict[str, Any]) -> dict[str, object]:
        msgspec.convert(words, NoArgs)
        # Shielded: a client that leaves would else cut the reload after its stops.
        return await self._children.finish(self.reload)

    async def reload(self) -> dict[str, object]:
        """Read the configuration again and apply it.

        Raises:
            OrderError: it has faults; nothing was changed.
        """
        if self._config_path is None:
            text = (
                "cannot reload the configuration: the host was started without --config;"
                " restart it with one"
            )
            self._host.log.write("ERROR", text)
            raise OrderError(text)
        self._on_reload(True)
        try:
            config = await self._read(self._config_path)
        except ConfigError as why:
            self._host.log.write("ERROR", f"Not reloaded: {why}", reason=str(why))
            raise OrderError(f"cannot reload the configuration: {why}") from None
        else:
            await self._tell_warnings(config)
            changes = await self._children.reload(config)
            self._host.journal.write("host.reloaded", **changes.row())
            self._tell_reloaded(changes)
            if changes.needs_restart:
                self._host.log.write(
                    "WARNING",
                    f"Changes of {changes.needs_restart} need a restart of the host",
                )
            return changes.row()
        finally:
            self._on_reload(False)

    def _tell_reloaded(self, changes: RosterChanges) -> None:
        names = {key: getattr(changes, key) for key in _CHANGED}
        counts = ", ".join(f"{len(among)} {key}" for key, among in names.items())
        self._host.log.write("INFO", f"Reloaded: {counts}", **names)

    async def _tell_warnings(self, config: Config) -> None:
        """Log the warnings about the configuration that are new."""
        known, found = await in_thread(_warnings, self._children.config, config)
        for key, text in found:
            if (key, text) not in known:
                self._host.log.write("WARNING", f"{key}: {text}")

    async def _read(self, path: str) -> Config:
        """Read the configuration, and check it as a daemon does.

        Raises:
            ConfigError: it has faults.
        """
        config = await in_thread(load_config, path)
        host = self._host
        faults = await faults_here(
            host.launcher, host.machine, host.log, self._places, config
        )
        if faults:
            raise ConfigError(path, faults)
        return config


def _warnings(*configs: Config) -> list[list[tuple[str, str]]]:
    return [list(warnings(config)) for config in configs]


def _check_life(what: str, life: FleetLife | None, args: LifeArgs) -> None:
    """Refuse an order for another life of a child than the one that runs.

    Raises:
        OrderError: it is for another one.
    """
    found = (None, None) if life is None else (life.child, life.incarnation)
    if args.child is not None and found != (args.child, args.incarnation):
        raise OrderError(
            f"{what}: incarnation {args.incarnation} of it does not run here"
        )


def _describe_spawned(kept: KeptChild, child: Child) -> dict[str, object]:
    process, session = child.process, child.session
    return {
        "name": kept.name,
        "id": child.id,
        "pid": None if process is None else process.pid,
        "client_id": None if session is None else session.client.id,
    }


def _signal(name: str) -> int:
    try:
        return signal_number(name)
    except OptionError as why:
        raise OrderError(str(why)) from None
