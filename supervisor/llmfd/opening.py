"""Opens and closes a host's LLM fds: sizes, and the directory of checkpoints."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hostlib.paths import CHECKPOINTS
from supervisor.llmfd import Checkpoints, ContentSettings, Retention, Store
from supervisor.llmfd.blob_files import MOST_DESCRIPTORS
from supervisor.llmfd.service import FdService, read_state
from supervisor.sandbox.scratch import make_kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.parts import Parts
    from vfs.filesystem import Filesystem


@dataclass(frozen=True, slots=True)
class FdOptions:
    """The configured sizes and tools of a host's LLM fds.

    Attributes:
        tools: the names of those that are offered; None for every one.
        settings: of each process.
        max_memory_bytes: of contents; more of them move to files.
        max_store_bytes: of contents, in memory and files.
        retention: of checkpoints.
    """

    tools: frozenset[str] | None
    settings: ContentSettings
    max_memory_bytes: int
    max_store_bytes: int
    retention: Retention


def make_service(fs: Filesystem, options: FdOptions, directory: str) -> FdService:
    """Return the LLM fds that are configured.

    Args:
        fs: the host's file system.
        options: of them.
        directory: of checkpoints, and of contents on the disk; of this host alone.

    Raises:
        OSError: the directory cannot be used.
    """
    checkpoints = Checkpoints(directory, retention=options.retention)
    try:
        store = Store(options.max_memory_bytes, os.path.join(directory, "contents"))
    except BaseException:
        checkpoints.close()
        raise
    return FdService(
        fs,
        store,
        options.tools,
        settings=options.settings,
        max_store=options.max_store_bytes,
        checkpoints=checkpoints,
    )


@contextmanager
def open_fds(
    host: Parts, options: FdOptions, state_dir: str | None, left: object = None
) -> Iterator[FdService]:
    """Offer the LLM fds that are configured until the block ends.

    Args:
        host: offers them.
        options: of them.
        state_dir: holds the checkpoints; None: they live as long as the host.
        left: the state of the program before; None without one.

    Raises:
        HandoverError: the state is another program's.
        OSError: the directory of the checkpoints cannot be used.
    """
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
        service = make_service(host.fs, options, directory)
        service.temporary = temporary
        service.journal = host.journal
        service.drop_numbered(host.log, before)
        if before is None and (count := service.store.files.remove_all_but(())):
            text = f"Removed {count} contents that a dead host has left"
            host.log.write("INFO", text, contents=count)
        host.services.fds = service
        host.holders.add(service.descriptors)
        try:
            with host.fs.descriptor_account.holding(MOST_DESCRIPTORS):
                yield service
        finally:
            host.services.fds = None
            host.holders.discard(service.descriptors)
            service.close()
    finally:
        if temporary is not None:
            host.apart.remove(temporary)
            shutil.rmtree(temporary, ignore_errors=True)
