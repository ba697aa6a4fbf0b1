"""The sealed layers of a state directory, and what is kept beside them.

Each is a directory ``layers/ID`` that is never written to again. Workspaces share them. So
they share the directories of the texts that their files began from, which are written to.

Rules:
 1. A layer lives as long as the state of a workspace names it. Nothing is counted: a sweep
    reads the states, so a crash leaves at most a layer that the next sweep removes.
 2. A command that makes a layer, or a state that names one, holds the store until that
    state is on the disk. A sweep goes only where no command does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from hostlib.linux.files import DIRECTORY, closing_fd
from supervisor.sandbox.scratch import remove_tree
from supervisor.workspace.directory import WorkspaceError, read_states

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def new_layer_id() -> str:
    """Return a name for a layer that no other has."""
    return secrets.token_hex(8)


class LayerStore:
    """The layers of a state directory."""

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir
        self.path = os.path.join(state_dir, "layers")

    @contextlib.contextmanager
    def hold(self) -> Iterator[int]:
        """Keep sweeps away; gives a descriptor of the store's directory."""
        os.makedirs(self.path, 0o700, exist_ok=True)
        with closing_fd(os.open(self.path, DIRECTORY)) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH)
            yield fd

    def paths(self, layers: Sequence[str]) -> list[str]:
        """Return where layers are, without links."""
        with self.hold() as fd:
            top = os.readlink(f"/proc/self/fd/{fd}")
        return [os.path.join(top, layer) for layer in layers]

    @contextlib.contextmanager
    def open_layers(self, layers: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Hold layers; gives a descriptor of each.

        Raises:
            WorkspaceError: one is not there.
        """
        with contextlib.ExitStack() as stack:
            fds = []
            for layer in layers:
                try:
                    fds.append(os.open(os.path.join(self.path, layer), DIRECTORY))
                except FileNotFoundError:
                    text = f"cannot read the sealed layer {layer}: it is gone"
                    raise WorkspaceError(f"{text}; restore an older snapshot") from None
                stack.callback(os.close, fds[-1])
            yield tuple(fds)

    def sweep(self) -> None:
        """Remove the layers that no workspace stands on.

        While a command makes one, or a state cannot be read, nothing is removed.

        Raises:
            OSError: one cannot be removed.
        """
        try:
            fd = os.open(self.path, DIRECTORY)
        except FileNotFoundError:
            return
        with closing_fd(fd), contextlib.suppress(BlockingIOError, WorkspaceError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            used: set[str] = set()
            for state in read_states(self._state_dir):
                used |= state.layers_named()
            for layer in sorted(set(os.listdir(fd)) - used):
                why = remove_tree(Path(layer), fd)
                if why is not None:
                    raise why
