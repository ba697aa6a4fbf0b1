"""Replaces the host's program in place, while its children go on.

    probe   can the next program take this state over?
    rest    no new requests; those under way end or wait
    leave   the snapshot is taken, then exec(2): same pid, descriptors and children

1. Until exec(2) succeeds nothing is lost: after a failure the host goes on and says
   why.
2. A request is answered once. One that ends by itself is awaited (``JOBS_S``), one that
   waits for its client is handed over, any other is interrupted and answered with an
   error.
3. A state without a form (a start, a clean-up, a disk call) is awaited for ``REST_S``.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import trio

from hostlib.handover import HandoverError
from hostlib.threads import calls_at_work
from supervisor.children.lifecycle import State
from supervisor.control.server import OrderError
from supervisor.fsproxy.ports import Portable
from supervisor.handover.host_state import snapshot_host
from supervisor.handover.next_program import become, own_program
from supervisor.handover.state import encode, versions
from supervisor.spawn.request import SpawnError, SpawnRequest
from supervisor.spec import minimal_env

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hostlib.systemd import Notifier
    from supervisor.children.child import Child
    from supervisor.control.server import Orders
    from supervisor.handover.daemon import DaemonSurroundings
    from supervisor.handover.next_program import Program
    from supervisor.handover.state import HostState
    from supervisor.host import Host

ORDER = "replace"

CHECK = "handover-check"
"""The command that a next program must have; its argument is the versions."""

ANSWER = "sandhost handover "
"""The prefix of its answer; the versions that it takes follow."""

REFUSAL = "sandhost: "
"""The prefix of a refusal; the reason follows."""

PROBE_S = 30.0
"""Longest start of the checked program: 0.3 s here, ten times that on a busy
machine."""

JOBS_S = 1.0
"""Longest wait for requests: a disk or a nested client takes milliseconds. A model or a
person takes longer and is interrupted."""

REST_S = 5.0
"""Longest wait for starts, clean-ups and a slow disk; clients wait meanwhile."""

LOOK_S = 0.002
"""Time between two looks: no event tells that all requests have ended."""

FREE_DESCRIPTORS = 16
"""Descriptors for loading a program beyond those that the old one closes: an
interpreter opens three files at most."""

SERVICES = ("network", "llm", "toolexec", "fds")
"""Names of their entries in ``Services``."""

_ANSWER_BYTES = 4096
_PIPE_BYTES = 65_536  # pipe(7): further output on stderr is lost
_COMPLAINT_CHARS = 200
_KEPT_VARIABLES = (
    *("CREDENTIALS_DIRECTORY", "LD_LIBRARY_PATH", "VIRTUAL_ENV"),
    # The variables of a daemon's directories.
    *("HOME", "RUNTIME_DIRECTORY", "STATE_DIRECTORY", "TMPDIR"),
    *("XDG_RUNTIME_DIR", "XDG_STATE_HOME"),
)


class Change:
    """The order to replace a daemon's program: SIGUSR2, or ``reload --exec``.

    A client of the control socket gets the reason of a refusal. After a success its
    connection ends with the old program, and the new one shows its ``generation``.

    Args:
        host: the host of the daemon.
        around: the daemon's parts around it.
        notifier: told before, and after a failure.

    Attributes:
        host: as above.
    """

    def __init__(
        self, host: Host, around: DaemonSurroundings, notifier: Notifier
    ) -> None:
        self.host = host
        self._around = around
        self._notifier = notifier

    def add_to(self, orders: Orders) -> None:
        """Register the order and its counter."""
        orders.orders[ORDER] = self._order
        orders.stats.append(self._row)

    def _row(self) -> dict[str, object]:
        network = self.host.services.network
        return {
            "generation": self.host.generation,
            "connections_reset": network.connections_reset if network else 0,
        }

    async def _order(self, words: dict[str, Any]) -> NoReturn:
        if words:
            raise OrderError(f"{ORDER} takes no arguments")
        try:
            await self._replace()
        except HandoverError as why:
            raise OrderError(f"cannot replace the program: {why}") from None

    async def try_replace(self) -> None:
        """Replace the program; log the reason of a failure."""
        with suppress(HandoverError):
            await self._replace()

    async def _replace(self) -> NoReturn:
        host = self.host
        self._notifier.reloading()
        host.log.write("INFO", "Replacing the program", generation=host.generation)
        try:
            await replace(host, own_program(), self._around)
        except HandoverError as why:
            host.log.write("ERROR", f"Not replaced: {why}", reason=str(why))
            raise
        finally:
            self._notifier.reloaded(f"{len(host.children)} children")


async def replace(
    host: Host, program: Program, around: DaemonSurroundings | None = None
) -> NoReturn:
    """Replace the host's program; returns only by a failure.

    Raises:
        HandoverError: it was not replaced; the host goes on.

    Cancellation: the host goes on.
    """
    try:
        await _probe(host, program, around)
        await _replace(host, program, around)
    except HandoverError as why:
        host.journal.write("host.not_replaced", reason=str(why))
        raise
    except OSError as why:
        text = f"it cannot be prepared: {why.strerror}"
        host.journal.write("host.not_replaced", reason=text)
        raise HandoverError(text) from why
    except Exception as why:
        # A fault here loses nothing: rule 1.
        text = f"internal error: {why!r}"
        host.journal.write("host.not_replaced", reason=text)
        raise HandoverError(text) from why


async def _replace(
    host: Host, program: Program, around: DaemonSurroundings | None
) -> NoReturn:
    if host.pump.is_paused:
        raise HandoverError("it is being replaced already; wait for the end of that")
    if host.fence.node is not None:
        raise HandoverError(
            f"it is node {host.fence.node!r} of a fleet, which stays here; let it leave,"
            " or restart the host instead"
        )
    for service in host.services:
        if not isinstance(service, Portable):
            raise HandoverError(
                f"cannot hand over {type(service).__name__}: it has no form for that;"
                " restart the host instead"
            )
    portable = [one for one in host.services if isinstance(one, Portable)]
    host.pump.pause()
    for service in portable:
        service.rest()
    try:
        await _rest(host, around)
        _exchange(host, program, around)
    finally:
        host.pump.unpause()
        for service in portable:
            service.resume()


# The next program


async def _probe(
    host: Host, program: Program, around: DaemonSurroundings | None
) -> None:
    """Ask the next program, in a process of its own, which versions it takes over."""
    variables = {} if around is None else around.variables
    said, complaint, status = await _ask(host, program, variables)
    wanted = versions()
    if status != 0 and said.startswith(REFUSAL):
        reason = said.removeprefix(REFUSAL).splitlines()[0]
        raise HandoverError(f"{program.path!r} refuses to take over: {reason}")
    if status != 0 or not said.startswith(ANSWER):
        text = f"{program.path!r} is no host that can take over (status {status})"
        raise HandoverError(f"{text}: {complaint}" if complaint else text)
    taken = said.removeprefix(ANSWER).split()
    if wanted not in taken:
        text = f"takes over versions {', '.join(taken)}, not {wanted}"
        raise HandoverError(f"{program.path!r} {text}; restart the host instead")


async def _ask(
    host: Host, program: Program, variables: Mapping[str, str]
) -> tuple[str, str, int | None]:
    """Return what it said, the last line of its stderr, and its exit status."""
    env = minimal_env("/tmp")  # noqa: S108 - nothing is made there
    env.update(
        (name, value)
        for name, value in os.environ.items()
        if name in _KEPT_VARIABLES or name.startswith("PYTHON")
    )
    env.update(variables)
    with ExitStack() as stack:

        def held(*fds: int) -> tuple[int, ...]:
            for fd in fds:
                stack.callback(os.close, fd)
            return fds

        (null,) = held(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        (cwd_fd,) = held(os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        reader, writer = held(*os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
        err_reader, err_writer = held(*os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
        request = SpawnRequest(
            executable=program.path,
            argv=(*program.head, CHECK, versions(), *program.words),
            env=env,
            cwd_fd=cwd_fd,
            fds=((null, 0), (writer, 1), (err_writer, 2)),
        )
        status = await _end_of(host, program, request)
        said = _read_pipe(reader, _ANSWER_BYTES)
        return said, _last_line(_read_pipe(err_reader, _PIPE_BYTES)), status


async def _end_of(host: Host, program: Program, request: SpawnRequest) -> int | None:
    """Run a program to its end; return its exit status."""
    try:
        with trio.move_on_after(PROBE_S):
            process = await host.launcher.spawn(request)
            try:
                status = await process.wait_exit()
                await process.wait_swept()
                return status.code
            finally:
                process.send_signal(9)
                process.close()
    except SpawnError as why:
        raise HandoverError(why.text) from None
    raise HandoverError(
        f"{program.path!r} gave no answer within {PROBE_S:g} s; try again"
    )


def _read_pipe(fd: int, size: int) -> str:
    """Return the content of a pipe; empty if there is none."""
    try:
        return os.read(fd, size).decode(errors="replace")
    except BlockingIOError:
        return ""


def _last_line(text: str) -> str:
    """Return the last line that is not empty, cut to the length of an error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_COMPLAINT_CHARS] if lines else ""


# Coming to rest


async def _rest(host: Host, around: DaemonSurroundings | None) -> None:
    """Wait until a snapshot of everything in the host can be taken.

    Raises:
        HandoverError: a part of the host does not come to rest.
    """
    begun = time.monotonic()
    while True:
        waited_s = time.monotonic() - begun
        if (why := next(busy(host, around, waited_s), None)) is None:
            return
        if waited_s > REST_S:
            raise HandoverError(f"{why} for longer than {REST_S:g} s; try again")
        if waited_s > JOBS_S:
            _interrupt(host)
        await trio.sleep(LOOK_S)


def _interrupt(host: Host) -> None:
    for child in host.children.values():
        for session in child.sessions():
            session.interrupt()
    for service in host.services:
        if isinstance(service, Portable):
            service.interrupt()


def busy(
    host: Host, around: DaemonSurroundings | None, waited_s: float
) -> Iterator[str]:
    """Yield the work under way in a host that has no form for a hand-over.

    Args:
        host: looked at.
        around: the parts around it.
        waited_s: the wait so far; jobs get ``JOBS_S``.
    """
    if calls_at_work():
        yield "a disk is at work"
    if not host.launcher.is_at_rest:
        yield "a process is being started"
    for child in host.children.values():
        yield from _busy_child(child, waited_s)
    for service in host.services:
        if isinstance(service, Portable) and (why := service.busy()) is not None:
            yield why
    if around is not None and (why := around.busy()) is not None:
        yield why


def _busy_child(child: Child, waited_s: float) -> Iterator[str]:
    process = child.process
    if child.state not in {State.RUNNING, State.STOPPING} or process is None:
        yield f"{child.id} is {child.state.value}"
    elif child.exit is not None or process.has_exited:
        yield f"{child.id} is ending"
    for session in child.sessions():
        if session.is_closing:
            yield f"client {session.client.id} is being closed"
        elif waited_s < 2 * JOBS_S and session.is_at_work:
            yield f"client {session.client.id} waits for an answer"


# The exchange


def _exchange(
    host: Host, program: Program, around: DaemonSurroundings | None
) -> NoReturn:
    """Take the snapshot and become the next program, without a checkpoint."""
    check_room()
    state = snapshot_host(host)
    fds = set(state.fds)
    env = dict(os.environ)
    with ExitStack() as stack:
        _leave_services(host, state, fds, stack)
        if around is not None:
            state.more, more_fds = around.snapshot()
            fds.update(more_fds)
            env.update(around.variables)
        state.fds = sorted(fds)
        data = encode(state)
        host.report_omitted()
        host.journal.write("host.replacing", generation=state.generation)
        become(program, data, state.fds, env)
    raise RuntimeError("exec(2) came back")


def check_room() -> None:
    """Check that the next program can be loaded: a failure there has no way back.

    Raises:
        HandoverError: children and their tools hold the descriptors that it needs.
    """
    with ExitStack() as stack:
        try:
            for _ in range(FREE_DESCRIPTORS):
                fd = os.open("/", os.O_PATH | os.O_CLOEXEC)
                stack.callback(os.close, fd)
        except OSError as why:
            text = f"fewer than {FREE_DESCRIPTORS} descriptors are free"
            raise HandoverError(f"{text}: {why.strerror}; try again") from None


def _leave_services(
    host: Host, state: HostState, fds: set[int], stack: ExitStack
) -> None:
    for name in SERVICES:
        service = getattr(host.services, name)
        if isinstance(service, Portable):
            state.services[name], its_fds = service.snapshot(stack)
            state.service_fds[name] = sorted(its_fds)
            fds.update(its_fds)


def answer_check() -> int:
    """Print which versions this program takes over: the command ``handover-check``."""
    os.write(1, f"{ANSWER}{versions()}\n".encode())
    return 0
