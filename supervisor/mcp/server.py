"""``sandhost mcp``: the LLM fd tools for any MCP client, on stdin and stdout.

Inside a child the descriptors are the host's, reached by FD 3. Elsewhere this program
has a store of its own, and files beneath ``--root`` if it is given. ``--files`` adds
tools on files and commands (``tools``).

The package ``mcp`` (an extra) speaks anyio, which runs on Trio: no second event loop.
Read next: ``supervisor.mcp.streams``, the streams and the end of a session.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from hostlib.paths import absolute, working_directory
from supervisor.config.fds import fd_options
from supervisor.config.loader import ConfigError, load_config
from supervisor.llmfd import UnknownCallError
from supervisor.llmfd.opening import make_service
from supervisor.run import complain, describe_failure, heeded_signals
from supervisor.sandbox.scratch import make_kept
from vfs.client import FsProxyError, NotAChildError
from vfs.client.aio import AsyncClient
from vfs.filesystem import Filesystem
from vfs.ledger import Ledger
from vfs.places import close_places, open_place
from vfs.policy import Policy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from mcp import types
    from mcp.server.lowlevel import Server

    from supervisor.config.document import Config
    from supervisor.llmfd import Process
    from supervisor.mcp.tools import AgentTools
    from supervisor.spawn.launchpad.start import LaunchpadProcess
    from vfs.places import Place

    Call = Callable[[str, dict[str, object]], Awaitable[str]]
    """Calls an LLM fd tool by name; the answer may be an ``fd_error``.

    Raises:
        UnknownCallError: there is no such tool.
        OSError: the host refused or is gone.
    """

OK, FAILED, USAGE, NO_READER = 0, 1, 2, 141
"""Exit statuses; the last one is 128 + the number of SIGPIPE, as with `sandhost fd`."""

PROGRAM_TOOLS = ("wrap_output", "wrap_input")
"""The tool beside a model's tools by which an MCP client puts content in."""


def own_call(process: Process) -> Call:
    """Return the calls of a process of this program."""

    async def call(name: str, arguments: dict[str, object]) -> str:
        return (await process.call(name, **arguments)).decode()

    return call


def _host_call(client: AsyncClient) -> Call:
    """Return the calls of the host of the child in which this program runs."""

    async def call(name: str, arguments: dict[str, object]) -> str:
        return await client.fd_call(name, **arguments)

    return call


def serve(
    config: str | None, root: str | None, launchpad: LaunchpadProcess | None = None
) -> int:
    """Serve until the client closes stdin and has its answers.

    Args:
        config: selects the tools, outside of a child.
        root: the directory where they may write.
        launchpad: starts the commands of ``--files``; None without that.

    Returns:
        The exit status: ``NO_READER`` if the client left before its answers, 128+n by
            signal.
    """
    if root is not None and not Path(root).is_dir():
        complain("mcp", f"cannot use {root!r}: no such directory; make it first")
        return USAGE
    if launchpad is not None and not is_child():
        text = "not inside a child: its tools would act in all of your own rights"
        complain("mcp", f"cannot serve --files: {text}; start it with sandhost run")
        return USAGE
    # A closed one would be the number of the next descriptor that is opened here.
    for stream, name in ((sys.stdin, "input"), (sys.stdout, "output")):
        if stream is None:
            complain("mcp", f"standard {name} is closed; a client speaks MCP there")
            return FAILED
    try:
        configured = (
            None
            if config is None
            else load_config(config, once=True, for_daemon=False, is_used=False)
        )
        root = None if root is None else absolute(root)
        return trio.run(_serve, configured, root, launchpad)
    except ConfigError as why:
        complain("mcp", str(why))
    except NotAChildError as why:
        complain("mcp", str(why.strerror))
        return USAGE
    except OSError as why:
        complain("mcp", describe_failure(why))
    return FAILED


async def _serve(
    config: Config | None, root: str | None, launchpad: LaunchpadProcess | None
) -> int:
    from supervisor.mcp.streams import Streams  # noqa: PLC0415 - needs the extra

    with trio.CancelScope() as scope, _stopping(scope) as came:
        streams = Streams(scope)
        async with _fd_calls(config, root) as call:
            if launchpad is None:
                await streams.serve(await make_server(call))
            else:
                async with _agent_tools(launchpad) as agent:
                    await streams.serve(await make_server(call, agent))
    if came:
        return 128 + came[0]
    if streams.fault:
        complain("mcp", streams.fault)
        return FAILED
    return NO_READER if streams.is_unread else OK


@asynccontextmanager
async def _agent_tools(launchpad: LaunchpadProcess) -> AsyncIterator[AgentTools]:
    """Provide commands for the time of a block; they end with it."""
    from supervisor.mcp.tools import AgentTools  # noqa: PLC0415 - with --files
    from supervisor.spawn.launcher import Launcher  # noqa: PLC0415 - of a command

    async with trio.open_nursery() as nursery:
        launcher = Launcher(launchpad)
        await nursery.start(launcher.run)
        yield AgentTools(launcher)
        nursery.cancel_scope.cancel()


@contextmanager
def _stopping(scope: trio.CancelScope) -> Iterator[list[int]]:
    """Cancel a scope on a signal, so that all is cleaned up; yield the received ones.

    A handler and no task: errors leave a nursery in groups. A second signal has its
    default effect.
    """
    token = trio.lowlevel.current_trio_token()
    came: list[int] = []

    def stop(number: int, _: object) -> None:
        came.append(number)
        signal.signal(number, signal.SIG_DFL)
        token.run_sync_soon(scope.cancel)

    before = {number: signal.signal(number, stop) for number in heeded_signals()}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def make_server(
    call: Call, agent: AgentTools | None = None
) -> Server[dict[str, object]]:
    """Return an MCP server with the available tools.

    Args:
        call: of LLM fds; a host without them is a fault only if there are no others.
        agent: on files and commands; None for none.
    """
    from mcp import types  # noqa: PLC0415 - an extra
    from mcp.server.lowlevel import Server  # noqa: PLC0415 - an extra

    listed = []
    if agent is not None:
        listed = [
            types.Tool(name=name, description=about, input_schema=schema)
            for name, about, schema in agent.describe()
        ]
    try:
        listed += await _fd_tools(call)
    except FsProxyError:
        if agent is None:
            raise

    async def list_tools(_: object, __: object) -> types.ListToolsResult:
        return types.ListToolsResult(tools=listed)

    async def call_tool(
        _: object, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        arguments = params.arguments or {}
        try:
            if agent is not None and agent.has(params.name):
                text, failed = await _agent_answer(agent, params.name, arguments)
            else:
                text = await call(params.name, arguments)
                failed = text.startswith("<fd_error ")
        except (UnknownCallError, OSError) as why:
            text, failed = f"invalid fd call: {why}", True
        content = types.TextContent(type="text", text=text)
        return types.CallToolResult(content=[content], is_error=failed)

    return Server(
        "sandhost",
        version=_version(),
        instructions=None if agent is None else _instructions(),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def _fd_tools(call: Call) -> list[types.Tool]:
    """Return the tools on LLM fds.

    Raises:
        FsProxyError: the host has none.
    """
    from mcp import types  # noqa: PLC0415 - an extra

    schemas = json.loads(await call("tool_schemas", {}))
    listed = [
        types.Tool(
            name=schema["function"]["name"],
            description=schema["function"]["description"],
            input_schema=schema["function"]["parameters"],
        )
        for schema in schemas
    ]
    return [*listed, *(_program_tool(name) for name in PROGRAM_TOOLS)]


async def _agent_answer(
    agent: AgentTools, name: str, arguments: dict[str, object]
) -> tuple[str, bool]:
    """Return the answer of a tool on files or commands, and whether it failed."""
    from supervisor.mcp.files import McpToolError  # noqa: PLC0415 - with --files

    try:
        return await agent.call(name, arguments), False
    except McpToolError as why:
        return str(why), True


def _instructions() -> str:
    from supervisor.mcp.tools import INSTRUCTIONS  # noqa: PLC0415 - with --files

    return INSTRUCTIONS.format(cwd=working_directory())


def _version() -> str:
    """Return the installed version; empty where this program is not installed."""
    from importlib import metadata  # noqa: PLC0415 - slow, and only shown by clients

    try:
        return metadata.version("sandhost")
    except metadata.PackageNotFoundError:
        return ""


def _program_tool(name: str) -> types.Tool:
    from mcp import types  # noqa: PLC0415 - an extra

    from supervisor.llmfd import TOOLS, parameters_schema  # noqa: PLC0415 - as above

    tool = TOOLS[name]
    return types.Tool(
        name=name, description=tool.about, input_schema=parameters_schema(tool)
    )


@asynccontextmanager
async def _fd_calls(config: Config | None, root: str | None) -> AsyncIterator[Call]:
    if is_child():
        async with AsyncClient() as client:
            yield _host_call(client)
        return
    with open_own_process(config, root) as process:
        yield own_call(process)


def is_child() -> bool:
    """Return whether this program was started by a host or by one of its children."""
    return "FSPROXY_FD" in os.environ


@contextmanager
def open_own_process(config: Config | None, root: str | None) -> Iterator[Process]:
    """Yield the process of LLM fds of a server without a child."""
    fs = Filesystem()
    with ExitStack() as stack:
        checkpoints = make_kept("sandhost-fds-")
        stack.callback(shutil.rmtree, checkpoints, ignore_errors=True)
        options = (
            fd_options(None, None)
            if config is None
            else fd_options(config.tools, config.file_descriptor)
        )
        service = make_service(fs, options, checkpoints)
        stack.callback(service.close)
        places: list[Place] = []
        if root is not None:
            places.append(open_place(root, read=True, write=True, relative=b""))
            stack.callback(close_places, places)
        client = fs.connect(Policy(tuple(places)), Ledger(), "mcp:stdio")
        process = service.process_of(client)
        if root is None:
            process.files = None
        yield process
