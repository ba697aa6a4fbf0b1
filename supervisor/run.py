"""``sandhost run`` and ``sandhost pipeline``: children in an embedded host.

Rules of this file.

1. The exit status is the child's (128+n by signal); 124 its time was up, 125 the host
   failed or refused, 126 not executable, 127 not found; 128+n a signal stopped ``run``.
2. Whatever fails says so in one line on stderr; there is no traceback for a user.
3. Everything the run made is gone when it returns, but for what it was told to keep.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVarTuple

import trio

from hostlib.handover import HandoverError
from hostlib.journal import open_journal
from hostlib.linux.descriptors import open_files_warnings
from hostlib.log import Log, put_line
from hostlib.messages import print_stderr, remedy, set_json_log, shown_path, stderr_line
from hostlib.paths import absolute
from hostlib.user_values import limit_origin
from supervisor.app import open_metrics, open_services
from supervisor.children.lifecycle import START_PATIENCE_S
from supervisor.children.specs import ChildOptions, make_spec
from supervisor.host import Host, open_host
from supervisor.sandbox import groups
from supervisor.sandbox.scratch import Scratch
from supervisor.spawn.process import LaunchpadLost
from supervisor.spawn.request import SpawnError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from supervisor.children.child import Child
    from supervisor.config.document import Config
    from supervisor.config.policy import PolicySection
    from supervisor.parts import Settings
    from supervisor.spawn.launchpad.start import LaunchpadProcess

Ts = TypeVarTuple("Ts")

TIMED_OUT = 124
HOST_FAILED = 125

STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(ChildOptions):
    """The options of the command line; see ``sandhost run --help``.

    Attributes:
        limited: the names of what --limit bounds; the policy bounds the rest.
        commit: the fate of changes at the end: ``ask``, ``never``, ``on-success``.
    """

    commands: tuple[tuple[str, ...], ...]
    settings: Settings
    limited: frozenset[str] = frozenset()
    commit: str = "never"
    keep: bool = False
    log_level: str = "WARNING"
    log_json: bool | None = None
    journal: str | None = None
    control: str | None = None
    config: Config | None = None


def complain(command: str, text: str) -> None:
    """Write a line about a command to stderr; drop it if that fails."""
    with contextlib.suppress(OSError):
        put_line(stderr_line(f"sandhost {command}", text))


def run_children(command: str, launchpad: LaunchpadProcess, options: RunOptions) -> int:
    """Run the children of one command line to their end.

    Args:
        command: ``run`` or ``pipeline``, for what is said on stderr.
        launchpad: started before this module was imported.
        options: the commands, and how they run.

    Returns:
        The exit status.
    """
    if options.log_json:  # by the operator's word; else its own lines are for people
        set_json_log(as_json=True)
    status = run_program(command, _run, command, launchpad, options)
    if options.workspaces:
        from supervisor.workspace.outcome import end_run  # noqa: PLC0415 - with one

        write_event = partial(_write_event, command, options.journal)
        for use in options.workspaces:
            tell = partial(print_stderr, "sandhost")
            end_run(use, status, options.commit, tell, write_event)
    return status


def _write_event(command: str, path: str | None, event: str, **fields: object) -> None:
    """Write an event that comes after the host's end to the journal of a run."""
    tell = partial(complain, command)
    try:
        with contextlib.closing(open_journal(path, tell)) as journal:
            journal.write(event, **fields)
    except OSError as why:
        tell(describe_failure(why))


def run_program(
    command: str, program: Callable[[*Ts], Awaitable[int]], *arguments: *Ts
) -> int:
    """Return the status of a Trio program; print its failure in one line.

    Returns:
        Its result; or the status of its failure.
    """
    status = HOST_FAILED
    try:
        status = trio.run(program, *arguments)
    except* HandoverError as group:
        complain(command, f"{innermost(group)}; start again")
    except* LaunchpadLost as group:
        complain(command, f"{innermost(group)}; start again")
    except* SpawnError as group:
        why = innermost(group)
        complain(command, str(why))
        if isinstance(why, SpawnError):
            status = why.exit_status
    except* OSError as group:
        complain(command, describe_failure(innermost(group)))
    return status


def innermost(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of a group that is none itself."""
    why: BaseException = group
    while isinstance(why, BaseExceptionGroup):
        why = why.exceptions[0]
    return why


def describe_failure(why: BaseException) -> str:
    """Word an error of the system with what it was about."""
    if not isinstance(why, OSError) or not why.strerror:
        return str(why)
    path = shown_path(why)
    if not path:
        if why.strerror != os.strerror(why.errno or 0):
            return why.strerror  # a whole sentence
        return f"cannot go on: {why.strerror}{remedy(why)}"
    return f"cannot use {path}: {why.strerror}{remedy(why)}"


def heeded_signals(
    signals: tuple[signal.Signals, ...] = STOPPING_SIGNALS,
) -> tuple[signal.Signals, ...]:
    """Return the signals that a host heeds: not what it was started to ignore.

    nohup(1) has it ignore SIGHUP, and the `&` of a script SIGINT.
    """
    return tuple(
        number
        for number in signals
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN
    )


async def _run(command: str, launchpad: LaunchpadProcess, options: RunOptions) -> int:
    log = Log(options.log_level, as_json=options.log_json)
    with trio.open_signal_receiver(*heeded_signals()) as signals:
        journal = open_journal(options.journal, lambda text: log.write("WARNING", text))
        groups.settle(launchpad.pid)
        try:
            async with open_host(
                launchpad, options.settings, journal=journal, log=log
            ) as host:
                _tell_odd_options(log, options)
                async with open_services(
                    host,
                    options.config,
                    warned_policy="run",
                    has_network=options.network_keys is not None,
                ):
                    return await _run_in(host, command, options, signals)
        finally:
            journal.close()


def _beside(
    policy: PolicySection | None, options: RunOptions
) -> dict[str, Sequence[str]]:
    """Return the paths of the options that are none of the policy's, by option."""
    given: dict[str, Sequence[str]] = {}
    if options.root and (policy is None or options.root != _root_of(policy)):
        given["root"] = [options.root]
    if options.home and (policy is None or options.home != policy.home):
        given["home"] = [options.home]
    for key in ("read", "write", "expose"):
        written = () if policy is None else getattr(policy, key)
        given[key] = getattr(options, key)[len(written) :]
    return given


def _root_of(policy: PolicySection) -> str | None:
    return absolute(policy.root) if policy.root else None


def _tell_odd_options(log: Log, options: RunOptions) -> None:
    """Warn of options that look like a mistake, also beside what is configured."""
    policy = None if options.config is None else options.config.policy.get("run")
    for text in open_files_warnings(options.limits.open_files):
        name = limit_origin("open_files", options.limited)
        log.write("WARNING", f"{name}: {text}")
    if options.config is None:
        return  # no profile of its own, nor another policy
    from supervisor.config.places import reaching_own, reaching_roots  # noqa: PLC0415 - with that
    from supervisor.config.walls import odd_walls  # noqa: PLC0415

    # The policy's own paths are checked with the configuration.
    given = _beside(policy, options)
    for option, paths in given.items():
        if not paths:  # and nothing is looked for
            continue
        texts = list(reaching_own(options.config, option, paths))
        if option not in {"read", "expose"}:
            texts += reaching_roots(options.config, "run", paths)
        for text in texts:
            log.write("WARNING", f"--{option}: {text}")
    name = options.sandbox.name
    is_given = policy is None or policy.sandbox != name
    # A network none that was written is refused where nothing keeps it.
    network = None if options.network == "none" else options.network
    # A child that has tools and no way to them is refused when it starts.
    for key, text in odd_walls(
        options.config, options.sandbox, network, has_tools=False
    ):
        where = f"--sandbox {name}" if is_given else f"policy.run.{key}"
        log.write("WARNING", f"{where}: {text}")


async def _run_in(
    host: Host, command: str, options: RunOptions, signals: AsyncIterator[int]
) -> int:
    stopped_by: list[int] = []
    starting = trio.CancelScope()

    async def stop_on_signal() -> None:
        async for number in signals:
            stopped_by.append(number)
            # The first signal asks, the second kills.
            is_first = len(stopped_by) == 1
            host.request_stop(None if is_first else 0.0)
            # A child before its exec cannot be asked, and its exec can hang.
            patience_s = START_PATIENCE_S if is_first else 0.0
            until_s = trio.current_time() + patience_s
            starting.deadline = min(starting.deadline, until_s)

    for use in options.workspaces:  # layers of this one and of others lie there
        host.apart.add(use.state_dir)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop_on_signal)
        if options.control is not None:
            from supervisor.control.networks import NetworkOrders  # noqa: PLC0415 - rarely used
            from supervisor.control.server import Orders, serve_control  # noqa: PLC0415 - as above

            orders = Orders()
            NetworkOrders(host).add_to(orders)
            await nursery.start(serve_control, host, options.control, orders)
        section = options.config.metrics if options.config is not None else None
        if section is not None:
            metrics = await open_metrics(host, section, nursery)
            nursery.start_soon(metrics.watch_lag)
        statuses = await _run_all(host, command, options, starting)
        nursery.cancel_scope.cancel()
    if stopped_by:
        return 128 + stopped_by[0]
    failed = [status for status in statuses if status]
    return failed[-1] if failed else 0


async def _run_all(
    host: Host, command: str, options: RunOptions, starting: trio.CancelScope
) -> list[int]:
    """Start every child, joined stdout to stdin, and wait for all of them.

    No child is started any more once ``starting`` has a deadline.
    """
    async with AsyncExitStack() as stack:
        children: list[Child] = []
        with starting:
            await _start_all(host, command, options, stack, starting, children)
        statuses = []
        for child in children:
            status = await child.wait_gone()
            statuses.append(TIMED_OUT if child.timed_out else status)
        return statuses


async def _start_all(
    host: Host,
    command: str,
    options: RunOptions,
    stack: AsyncExitStack,
    starting: trio.CancelScope,
    children: list[Child],
) -> None:
    """Start one child after the other; those that were are in the list."""
    most_files = options.settings.open_files_per_client
    last = len(options.commands) - 1
    stdin = 0
    try:
        for index, words in enumerate(options.commands):
            if starting.deadline < math.inf:  # the others were asked to end
                return
            has_user = "uid" in options.sandbox.layers
            scratch = Scratch(options.root, keep=options.keep, has_user=has_user)
            stack.push_async_callback(_remove_scratch, host, command, scratch)
            host.holders.add(scratch.descriptors)
            if options.keep and options.root is None:
                complain(command, f"keeping the root {scratch.root}")
            reader, writer = (-1, 1) if index == last else os.pipe2(os.O_CLOEXEC)
            spec = make_spec(options, words, scratch, (stdin, writer, 2), most_files)
            try:
                child = await host.spawn(spec)
            finally:
                for fd in (stdin, writer):
                    if fd > 2:
                        os.close(fd)
                stdin = reader
            children.append(child)
            if child.failure is not None:
                complain(command, child.failure.text)
    finally:
        if stdin > 2:
            os.close(stdin)


async def _remove_scratch(host: Host, command: str, scratch: Scratch) -> None:
    failure = await scratch.remove()
    host.holders.discard(scratch.descriptors)
    if failure is not None:
        complain(command, failure)
