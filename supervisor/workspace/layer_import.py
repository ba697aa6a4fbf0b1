"""Changes that were made on another machine, committed to their base here.

A workspace for this one commit has them as its layer, so all rules of a commit hold. The
record of the base is of the moment at which it was packed: later changes in the base are
in conflict.
"""

from __future__ import annotations

import os
import secrets
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from hostlib.linux.files import DIRECTORY, closing_fd
from supervisor.workspace.archive import unpack_layer
from supervisor.workspace.attributes import own_marks
from supervisor.workspace.directory import WorkspaceError, make_workspace, path_of
from supervisor.workspace.linux import has_entry
from supervisor.workspace.record import CHANGED, RecordFiles
from supervisor.workspace.run import find_base
from supervisor.workspace.verbs import Done, do_verb, word_errors
from supervisor.workspace.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class PackedBase(NamedTuple):
    """A directory as it was packed for another machine.

    Attributes:
        path: of the directory.
        packed_ns: when its packing began, by the clock of ctimes.
        paths: those that were packed.
    """

    path: str
    packed_ns: int
    paths: Collection[bytes]


def commit_layer(
    state_dir: str, base: PackedBase, layer: IO[bytes], words: Mapping[str, Any]
) -> Done:
    """Commit a tar in the form of an OCI layer to the base that it was made over.

    Args:
        state_dir: where workspaces live.
        base: as it was packed.
        layer: the tar.
        words: of the verb `commit`, without a name.

    Raises:
        VerbError: it cannot be done; the base is as it was, or the text says otherwise.
    """
    name = f"fleet-{secrets.token_hex(8)}"
    with word_errors():
        path = find_base(base.path, state_dir)
        make_workspace(state_dir, name, os.fsencode(path), own_marks())
    try:
        with word_errors():
            _fill(state_dir, name, base, layer)
        return do_verb(state_dir, "commit", {**words, "name": name})
    finally:
        if os.path.exists(path_of(state_dir, name)):  # else the commit took all
            with word_errors(), Workspace(state_dir, name) as left:
                # The end of a commit that was cut counts, not its cause.
                if text := left.discard():
                    raise WorkspaceError(text)


def _fill(state_dir: str, name: str, base: PackedBase, layer: IO[bytes]) -> None:
    with Workspace(state_dir, name) as workspace:
        own = workspace.directory
        with closing_fd(workspace.open_base()) as top:
            with closing_fd(os.open("upper", DIRECTORY, dir_fd=own.fd)) as upper:
                paths = unpack_layer(layer, upper, top)
            gone = {
                path: CHANGED
                for path in paths
                if path in base.paths and not has_entry(top, path)
            }
        if gone:
            RecordFiles(own).save(gone)
        workspace.state.started_ns = base.packed_ns
        own.write_state(workspace.state)
