"""Which services a host has: those that its configuration has a section for.

The package of a service is imported when it is asked for: a host without the section does
not carry its weight.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from hostlib.extras import check_packages
from supervisor.config import fds as config_fds
from supervisor.observe.registry import attach_metrics

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Mapping, Sequence

    import trio

    from supervisor.config.document import Config
    from supervisor.config.metrics import MetricsSection
    from supervisor.host import Host
    from supervisor.llm.service import LlmService
    from supervisor.observe.registry import Metrics
    from supervisor.toolexec.service import ToolExec


NOTHING: Mapping[str, object] = MappingProxyType({})
"""The state of services of a host without a program before it."""


@asynccontextmanager
async def open_services(
    host: Host,
    config: Config | None,
    toolexec_sockets: Sequence[socket.socket] = (),
    left: Mapping[str, object] = NOTHING,
    *,
    warned_policy: str | None = None,
    has_network: bool = False,
) -> AsyncIterator[None]:
    """Open the services that a configuration asks for, for the length of the block.

    Children that are left when the block ends are stopped before their services are.

    Args:
        host: open.
        config: checked; None for none.
        toolexec_sockets: opened by the service manager, for tools; owned.
        left: states of the services of the program before, by their names.
        warned_policy: a policy of which the caller warns, in part (``loader.warnings``).
        has_network: whether children may have a network by name.

    Raises:
        OSError: a service cannot be opened.
    """
    async with AsyncExitStack() as stack:
        credentials = {} if config is None else config.credential
        if has_network or credentials:
            from supervisor.network.service import open_network  # noqa: PLC0415 - seldom

            await stack.enter_async_context(open_network(host, credentials))
        if config is not None:
            _tell_warnings(host, config, warned_policy)
            llm: LlmService | None = None
            if config.llm is not None:
                check_packages("offer the model of [llm]", "llm")
                from supervisor.llm.opening import open_llm  # noqa: PLC0415 - heavy

                state_dir = config.host.state_dir
                llm = await stack.enter_async_context(
                    open_llm(host, config.llm, state_dir, left.get("llm"))
                )
            toolexec = await _open_toolexec(
                host, config, stack, toolexec_sockets, left.get("toolexec")
            )
            if config_fds.is_enabled(config.tools, config.file_descriptor):
                check_packages("offer the LLM fds of [tools]", "fds")
                from supervisor.llmfd.opening import open_fds  # noqa: PLC0415 - optional

                options = config_fds.fd_options(config.tools, config.file_descriptor)
                state_dir = config.host.state_dir
                fds = stack.enter_context(
                    open_fds(host, options, state_dir, left.get("fds"))
                )
                if llm is not None:
                    from supervisor.llmfd.gateway import connect  # noqa: PLC0415

                    connect(fds, llm)
                if toolexec is not None:
                    from supervisor.toolexec.handles import make_handle  # noqa: PLC0415

                    offer = partial(make_handle, fds, host.log.write)
                    toolexec.context.large_output = offer
        try:
            yield
        finally:
            if host.children:
                await host.stop()


async def open_metrics(
    host: Host,
    section: MetricsSection | None,
    nursery: trio.Nursery,
) -> Metrics:
    """Begin to count; and tell the figures, if a configuration says where.

    Args:
        host: its children have not begun.
        section: ``[metrics]``, checked; None if there is none.
        nursery: the listener lives in it.

    Raises:
        OSError: the address cannot be listened on.
    """
    metrics = attach_metrics(host)
    if section is not None:
        from supervisor.observe.listener import serve_metrics  # noqa: PLC0415 - h11

        await nursery.start(serve_metrics, host, section)
    return metrics


async def _open_toolexec(
    host: Host,
    config: Config,
    stack: AsyncExitStack,
    activated: Sequence[socket.socket],
    left: object,
) -> ToolExec | None:
    if config.toolexec is None:
        if config.sidecar:
            text = "sidecar: nobody can reach it without a section [toolexec]"
            host.log.write("WARNING", text)
        return None
    from supervisor.toolexec.service import open_toolexec  # noqa: PLC0415
    from supervisor.toolexec.settings import toolexec_settings  # noqa: PLC0415
    from supervisor.toolexec.sidecars import open_sidecars  # noqa: PLC0415

    settings = toolexec_settings(config.toolexec, os.environ, config.host.state_dir)
    before = left.get("sidecars") if isinstance(left, dict) else None
    routes = await stack.enter_async_context(
        open_sidecars(host, config.sidecar, before)
    )
    return await stack.enter_async_context(
        open_toolexec(host, settings, routes, activated, left)
    )


def _tell_warnings(host: Host, config: Config, warned_policy: str | None) -> None:
    from supervisor.config.loader import warnings  # noqa: PLC0415 - it read this

    for key, text in warnings(config, but=warned_policy):
        host.log.write("WARNING", f"{key}: {text}")
