"""Opens and closes a host's LLM fds: sizes, and the directory of checkpoints."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hostlib.paths import CHECKPOINTS
from hostlib.user_values import parse_duration, parse_size
from supervisor.config.fds import FileDescriptorSection
from supervisor.llmfd import Checkpoints, Retention, Settings, Store
from supervisor.llmfd.service import FdService, read_state
from supervisor.sandbox.scratch import make_kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.config.document import Config
    from supervisor.parts import Parts
    from vfs.filesystem import Filesystem


def make_service(fs: Filesystem, config: Config | None, checkpoints: str) -> FdService:
    """Return the LLM fds of a configuration.

    Args:
        fs: the host's file system.
        config: None for every tool and the usual sizes.
        checkpoints: their directory.

    Raises:
        OSError: the directory cannot be used.
    """
    section = config.file_descriptor if config is not None else None
    section = section or FileDescriptorSection()
    return FdService(
        fs,
        Store(parse_size(section.max_memory)),
        None if config is None else frozenset(config.tools.enabled),
        settings=Settings(
            page_size=section.default_page_size,
            max_output=section.max_direct_output_chars,
            max_input=section.max_input_chars,
            page_input=section.page_user_input,
            conversation_fds=section.conversation_fds,
            auto_summarize=section.auto_summarize,
            raw=section.escape == "raw",
        ),
        max_store=parse_size(section.max_store),
        checkpoints=Checkpoints(
            checkpoints,
            retention=Retention(
                section.keep_checkpoints,
                parse_duration(section.keep_checkpoints_for or "0"),
            ),
        ),
    )


@contextmanager
def open_fds(host: Parts, config: Config, left: object = None) -> Iterator[FdService]:
    """Offer the LLM fds of a configuration until the block ends.

    Args:
        host: offers them.
        config: checked.
        left: the state of the program before; None without one.

    Raises:
        HandoverError: the state is another program's.
        OSError: the directory of the checkpoints cannot be used.
    """
    state_dir = config.host.state_dir
    before = read_state(left)
    temporary = None if before is None else before.temporary
    if temporary is None and state_dir is None:
        # Without a state directory checkpoints live as long as the host.
        temporary = make_kept("sandhost-fds-")
    if temporary is None and state_dir is not None:
        # makedirs would make it open to all users.
        os.makedirs(state_dir, mode=0o700, exist_ok=True)
    directory = temporary or os.path.join(str(state_dir), CHECKPOINTS)
    try:
        if temporary is not None:
            host.apart.add(temporary)
        service = make_service(host.fs, config, directory)
        service.temporary = temporary
        service.journal = host.journal
        service.drop_numbered(host.log, before)
        host.fs.set_aside(service.store.spool.most_descriptors)
        host.services.fds = service
        host.holders.add(service.descriptors)
        try:
            yield service
        finally:
            host.services.fds = None
            host.holders.discard(service.descriptors)
            service.close()
    finally:
        if temporary is not None:
            host.apart.remove(temporary)
            shutil.rmtree(temporary, ignore_errors=True)
