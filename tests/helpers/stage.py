r"""A host in a test: what the test asks for is opened, and closed in one place.

    async with open_stage(tmp_path, model={"endpoint": True}) as stage:
        child = await stage.puppet()
        assert await child.ask(b"PING\n") == b"OK"

`open_stage` opens a host in the test's own process, around a fresh launchpad or without
processes, with a model, LLM fds and tools where they are asked for. At its end it compares
descriptors, processes and tables. `Puppet` is a child that the test leads by the hand;
`Stage.connect` gives a client without a process. The fixture `stage` is the usual case.
"""

import ast
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from hostlib.journal import Journal, open_journal
from hostlib.linux import processes as process_table
from hostlib.linux.syscalls import PR_SET_CHILD_SUBREAPER, prctl
from hostlib.log import Log
from supervisor.children.child import Child
from supervisor.host import Host, open_host
from supervisor.parts import Settings
from supervisor.sandbox.plan import PROFILES
from supervisor.spawn.launchpad.start import start_launchpad
from supervisor.spec import ChildSpec, minimal_env
from tests.helpers import canary
from tests.helpers.canary import KEY
from tests.helpers.leaks import Holdings, holdings, left_over
from tests.helpers.provider import key_file
from tests.helpers.sessions import Hall, Line
from tests.helpers.stock import only_stock_beneath, strangers
from vfs.policy import Policy

if TYPE_CHECKING:
    from demo.provider import Provider
    from supervisor.config.document import Config
    from supervisor.llm.endpoint import Endpoint
    from supervisor.llm.section import LlmSection
    from supervisor.llm.service import LlmService
    from supervisor.toolexec.routes import Routes
    from supervisor.toolexec.service import ToolExec

CHILDREN = Path(__file__).parent / "children"
"""The programs that children run."""

PYTHON = (sys.executable, "-I", "-S")
"""An interpreter that starts quickly and knows the standard library only."""


class Stage:
    """An open host, and what tests do with it.

    Attributes:
        host: the host.
        where: for its files.
        root: the root of children that are given none.
        launchpad: the pid of its launchpad; 0 without processes.
        journal: the path of its journal.
        sandbox: the profile of children for which nothing else is said.
        wrapper: the words before a child's own for which nothing else is said.
        null: the null device.
        pipes: the test's ends of pipes to children.
        checks: of each service at the end, when no client is left.
        hall: clients of a stage without processes.
        provider: the stand-in for the model's provider, where there is a model.
        llm: the service of the model, where there is one.
        tools: the service of the tools, where there are some.
    """

    hall: Hall
    provider: "Provider"
    llm: "LlmService"
    tools: "ToolExec"

    def __init__(self, host: Host, where: Path) -> None:
        self.host = host
        self.where = where
        self.root = where / "root"
        self.launchpad = host.launcher.launchpad_pid
        self.journal = where / "journal"
        self.null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self.sandbox = PROFILES["none"]
        self.wrapper: tuple[str, ...] = ()
        self.pipes: list[int] = []
        self.checks: list[Callable[[], None]] = []
        host.holders.add(lambda: [(fd, "test") for fd in (self.null, *self.pipes)])
        self._before = self._held()

    @property
    def endpoint(self) -> "Endpoint":
        """The endpoint of the model."""
        assert self.llm.endpoint is not None
        return self.llm.endpoint

    def connect(self, policy: Policy | None = None, **options: Any) -> Line:
        """Connect a client of a stage without processes."""
        return self.hall.connect(policy, **options)

    def nested(self, parent: Line) -> Line:
        """Attach a client to another one, as ATTACH does."""
        return self.connect(parent.client.policy, parent=parent.client)

    def spec(
        self, command: tuple[str, ...], *, wrapper: tuple[str, ...] = (), **changes: Any
    ) -> ChildSpec:
        """Describe a child with the null device for stdio, restricted to `root`.

        Args:
            command: its program and arguments.
            wrapper: words before these; the stage's if there are none.
            changes: differences from the usual description.
        """
        command = (*(wrapper or self.wrapper), *command)
        known = {
            "cwd": str(self.where),
            "root": str(self.root),
            "env": minimal_env(str(self.where)),
            "stdio": (self.null, self.null, self.null),
            "sandbox": self.sandbox,
        }
        return ChildSpec(command, **{**known, **changes})

    async def spawn(self, *command: str, **changes: Any) -> Child:
        """Start a child."""
        child = await self.host.spawn(self.spec(command, **changes))
        assert child.failure is None, child.failure
        return child

    async def sh(self, script: str, **changes: Any) -> Child:
        """Start a shell."""
        return await self.spawn("/bin/sh", "-c", script, **changes)

    def script(self, name: str) -> str:
        """Return the path of a program of `CHILDREN` that a child may read."""
        script = CHILDREN / name
        if self.sandbox.layers:  # it may read its working directory, and not this one
            script = self.where / name
            if not script.exists():
                shutil.copy(CHILDREN / name, script)
        return str(script)

    async def puppet(self, **changes: Any) -> "Puppet":
        """Start a child that does what it is told."""
        command = (*PYTHON, self.script("puppet.py"))
        stdin, ours = os.pipe2(os.O_CLOEXEC)
        theirs, stdout = os.pipe2(os.O_CLOEXEC)
        try:
            child = await self.spawn(*command, stdio=(stdin, stdout, 2), **changes)
        finally:
            os.close(stdin)
            os.close(stdout)
            self.pipes += [ours, theirs]
        return Puppet(child, ours, theirs)

    def pid_of(self, child: "Puppet", said: int) -> int:
        """Return the pid, here, of a process beneath a child that it calls `said`."""
        for pid, _ in process_table.trees_beneath(self.launchpad, [child.pid]):
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
            (numbers,) = [t for t in status.splitlines() if t.startswith("NSpid:")]
            if int(numbers.split()[-1]) == said:
                return pid
        raise AssertionError(f"no process {said} beneath {child.pid}")

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        """Read the journal: all events, or those of one name."""
        lines = self.journal.read_bytes().splitlines()
        found = [json.loads(text) for text in lines]
        return [row for row in found if event is None or row["event"] == event]

    def assert_nothing_left(self) -> None:
        """Check that every child's descriptors, rows, memory and processes are gone."""
        host = self.host
        assert not host.children
        assert not host.fs.tables.clients
        assert not host.fs.tables.files
        assert not host.pump.sessions
        assert host.pump.statistics().deadlines == 0
        assert host.budget.payload_memory.used == 0
        if self.launchpad:
            assert only_stock_beneath(self.launchpad)
            left = left_over(self._before, self._held())
            assert not left, "left behind: " + "; ".join(left)

    async def end_clients(self) -> None:
        """Wait until all are gone, and check that no service holds anything for them."""
        if self.launchpad:
            # One that execve(2) refused is reaped a moment after it was told of.
            await eventually(lambda: not strangers(self.launchpad))
        else:
            await self.hall.leave()
        for check in self.checks:
            check()

    async def assert_closed(self) -> None:
        """Check, once the services are closed, that nothing is left."""
        assert self.host.services.llm is None
        if not self.launchpad:
            await self.hall.close()
        elif hasattr(self, "provider"):
            # The stand-in's ends are descriptors of this process too.
            await eventually(lambda: not self.provider.connections)
        self.assert_nothing_left()

    def _held(self) -> Holdings:
        """The descriptors of the host, without the test's pipes to children."""
        held = holdings()
        mine = {n: t for n, t in held.descriptors.items() if n not in self.pipes}
        return Holdings(mine, held.children)

    def close(self) -> None:
        """Give the test's own descriptors back."""
        for fd in (self.null, *self.pipes):
            os.close(fd)


class Puppet:
    """A child that evaluates expressions in the words of `children/puppet.py`."""

    def __init__(self, child: Child, tell_fd: int, hear_fd: int) -> None:
        self.child = child
        self._tell_fd = tell_fd
        self._hear_fd = hear_fd
        self._heard = b""
        self._is_told = False
        # Its first answer; `hear` takes it when it comes, for nobody waits for it.
        self.tell(f"around({canary.masked()!r})")

    @property
    def client_id(self) -> str:
        """The id of its connection."""
        assert self.child.session is not None
        return self.child.session.client.id

    @property
    def pid(self) -> int:
        """Its pid."""
        assert self.child.process is not None
        return self.child.process.pid

    def tell(self, expression: str) -> None:
        """Have it evaluate an expression; `hear` has the value."""
        data = expression.encode() + b"\n"
        assert os.write(self._tell_fd, data) == len(data), "more than a pipe holds"

    async def hear(self) -> Any:
        """Wait for the value of the oldest expression that it was told."""
        if not self._is_told:
            said = await self._line()
            canary.around_a_puppet(ast.literal_eval(said.decode()))
            self._is_told = True
        text = await self._line()
        canary.told("a puppet", text)
        return ast.literal_eval(text.decode())

    async def _line(self) -> bytes:
        while b"\n" not in self._heard:
            await trio.lowlevel.wait_readable(self._hear_fd)
            more = os.read(self._hear_fd, 65_536)
            if not more:
                raise EOFError(f"the puppet is gone: {await self.child.wait_gone()}")
            self._heard += more
        text, _, self._heard = self._heard.partition(b"\n")
        return text

    async def do(self, expression: str) -> Any:
        """Have it evaluate an expression, and return the value."""
        self.tell(expression)
        return await self.hear()

    async def ask(self, data: bytes) -> bytes:
        """Have it send a request; return the reply line without LF."""
        reply: bytes = await self.do(f"ask({data!r})")
        return reply

    async def open(
        self, name: bytes, mode: bytes = b"r", claim: bytes = b"false"
    ) -> int:
        """Have it open a file that it may open."""
        fileno = await self.do(f"opened({name!r}, {mode!r}, {claim!r})")
        assert isinstance(fileno, int), fileno
        return fileno

    async def write(self, fileno: int, data: bytes) -> bytes:
        """Have it WRITE; return the reply line."""
        return await self.ask(b"WRITE %d %d\n%b" % (fileno, len(data), data))

    async def read(self, fileno: int, size: int) -> bytes:
        """Have it READ; return the bytes, or the error line."""
        data: bytes = await self.do(f"read({fileno}, {size})")
        return data

    async def kill(self) -> int:
        """End it by SIGKILL, and wait until nothing of it is left."""
        assert self.child.process is not None
        self.child.process.send_signal(9)
        return await self.child.wait_gone()

    async def leave(self) -> int:
        """Have it exit with 0, and wait until nothing of it is left."""
        self.tell("os._exit(0)")
        return await self.child.wait_gone()


class _NoLauncher:
    """Takes the launcher's place in a host without processes."""

    launchpad_pid = 0


@asynccontextmanager
async def open_stage(
    where: Path,
    settings: Settings | None = None,
    *,
    log_level: str = "ERROR",
    processes: bool = True,
    model: Mapping[str, Any] | None = None,
    state_dir: str | None = None,
    fds: "Config | None" = None,
    tools: "Routes | None" = None,
    toolexec: Mapping[str, Any] | None = None,
) -> AsyncIterator[Stage]:
    """Open a host in this process, and check at the end that nothing of it is left.

    Args:
        where: for its files.
        settings: its bounds; None for those that `run` has.
        log_level: of its log.
        processes: whether it can start children; else its clients are the test's.
        model: of `[llm]`; the stand-in and its key are there. None: no model.
        state_dir: of the host, for the spending on the model.
        fds: a configuration of LLM fds; None: there are none.
        tools: finds the sidecar of a tool; None: no tools.
        toolexec: settings of ToolExec.
    """
    (where / "root").mkdir(exist_ok=True)
    with canary.held() if processes else nullcontext():
        before = holdings()
        async with AsyncExitStack() as parts:
            provider = None if model is None else await _open_provider(parts)
            open_host_or_hall = _open_host if processes else _open_hall
            stage = await open_host_or_hall(parts, where, settings, log_level)
            async with AsyncExitStack() as services:
                if provider is not None and model is not None:
                    stage.provider = provider
                    await _open_model(services, stage, model, state_dir)
                if fds is not None:
                    _open_fds(services, stage, fds)
                if tools is not None:
                    await _open_tools(services, stage, tools, toolexec or {})
                try:
                    yield stage
                finally:
                    await stage.host.stop(grace_s=0.0)
                await stage.end_clients()
            await stage.assert_closed()
            assert stage.host.fs.descriptor_account.used == 0
        if processes:
            left = left_over(before, holdings())
            assert not left, "left behind by the host: " + "; ".join(left)


def open_model_stage(
    where: Path,
    *,
    state_dir: str | None = None,
    fds: "Config | None" = None,
    **model: Any,
) -> AbstractAsyncContextManager[Stage]:
    """Open a host without processes that has a model; `model` is of `[llm]`."""
    return open_stage(where, processes=False, model=model, state_dir=state_dir, fds=fds)


async def _open_host(
    parts: AsyncExitStack, where: Path, settings: Settings | None, log_level: str
) -> Stage:
    launchpad = start_launchpad()
    # Objects of the collected tests stay frozen: a look at all of them takes 0.7 s.
    patch = parts.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(gc, "freeze", lambda: None)
    patch.setattr(gc, "unfreeze", lambda: None)
    parts.callback(prctl, PR_SET_CHILD_SUBREAPER, 0)
    opened = open_host(
        launchpad,
        settings,
        journal=_open_journal(parts, where),
        log=Log(log_level, as_json=True),
    )
    stage = Stage(await parts.enter_async_context(opened), where)
    parts.callback(stage.close)
    return stage


async def _open_hall(
    parts: AsyncExitStack, where: Path, settings: Settings | None, log_level: str
) -> Stage:
    launcher: Any = _NoLauncher()
    journal, log = _open_journal(parts, where), Log(log_level, as_json=True)
    host = Host(launcher, settings or Settings(), journal, log)
    parts.callback(host.apart.close)
    nursery = await parts.enter_async_context(trio.open_nursery())
    parts.callback(nursery.cancel_scope.cancel)
    nursery.start_soon(host.door_sockets.run, log)
    hall = Hall(where, nursery, host.fs, host.pump, host.budget, host.services)
    stage = Stage(host, where)
    stage.hall = hall
    parts.callback(stage.close)
    return stage


def _open_journal(parts: AsyncExitStack, where: Path) -> Journal:
    journal = open_journal(str(where / "journal"), pytest.fail)
    parts.callback(journal.close)
    return journal


# The product's services are imported by tests that ask for them, and by no others.


async def _open_provider(parts: AsyncExitStack) -> "Provider":
    from demo.provider import serving  # noqa: PLC0415

    return await parts.enter_async_context(serving(KEY))


def llm_section(**values: Any) -> "LlmSection":
    """Return a checked `[llm]`, as a configuration file has it."""
    from supervisor.llm.section import LlmSection, check  # noqa: PLC0415

    found = msgspec.convert(values, LlmSection)
    assert not list(check(found))
    return found


async def _open_model(
    services: AsyncExitStack,
    stage: Stage,
    values: Mapping[str, Any],
    state_dir: str | None,
) -> None:
    from supervisor.llm.opening import open_llm  # noqa: PLC0415

    known = {"base_url": stage.provider.url, "api_key_file": key_file(stage.where)}
    section = llm_section(**{**known, **values})
    opened = open_llm(stage.host, section, state_dir)
    stage.llm = await services.enter_async_context(opened)

    def check() -> None:
        root = stage.llm.models.accounts.root
        assert not root.calls.reservations
        assert not root.tokens.reserved

    stage.checks.append(check)


def _open_fds(services: AsyncExitStack, stage: Stage, fds: "Config") -> None:
    from supervisor.config.fds import fd_options  # noqa: PLC0415
    from supervisor.llmfd.gateway import connect  # noqa: PLC0415
    from supervisor.llmfd.opening import open_fds  # noqa: PLC0415

    options = fd_options(fds.tools, fds.file_descriptor)
    opened = services.enter_context(open_fds(stage.host, options, fds.host.state_dir))
    connect(opened, stage.llm)

    def check() -> None:
        assert not opened.store.blobs

    stage.checks.append(check)


async def _open_tools(
    services: AsyncExitStack,
    stage: Stage,
    routes: "Routes",
    settings: Mapping[str, Any],
) -> None:
    from supervisor.toolexec.service import open_toolexec  # noqa: PLC0415
    from supervisor.toolexec.settings import ToolExecSettings  # noqa: PLC0415

    chosen = ToolExecSettings(**{"log_dir": str(stage.where), **settings})
    opened = open_toolexec(stage.host, chosen, routes)
    stage.tools = await services.enter_async_context(opened)

    def check() -> None:
        # Those of a shared listener may still be told why they were refused.
        held = sum(len(server.descriptors()) for server in stage.tools.servers)
        assert stage.tools.slots.descriptors.held == held

    stage.checks.append(check)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """A host with the settings that `run` has."""
    async with open_stage(tmp_path) as opened:
        yield opened


def descriptors() -> set[int]:
    """The numbers of this process's, that is the host's, open descriptors."""
    return set(holdings().descriptors)


async def eventually(is_so: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait until something that no event tells is so; fail if it never is."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.002
    while not is_so():
        assert time.monotonic() < deadline, f"not so within {timeout_s} s"
        await trio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
