"""Which services a host has: those that its configuration has a section for.

A package is imported only here, and only when it is asked for.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from supervisor import config_fds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.config import Config
    from supervisor.host import Host


@contextmanager
def offered(host: Host, config: Config | None) -> Iterator[None]:
    """Offer the children of a host what a configuration asks for.

    Raises:
        OSError: a service cannot be had.
    """
    with ExitStack() as stack:
        if config is not None and _has_fds(host, config):
            from supervisor.fds.service import open_fds  # noqa: PLC0415 - optional

            stack.enter_context(open_fds(host, config))
        yield


def _has_fds(host: Host, config: Config) -> bool:
    """Tell whether there are LLM fds, and say what looks like a mistake."""
    sections = (config.tools, config.file_descriptor)
    for key, text in config_fds.warnings(*sections):
        host.log.write("WARNING", f"{key}: {text}")
    return config_fds.is_enabled(*sections)
