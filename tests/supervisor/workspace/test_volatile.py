"""The end of a run whose mount synced nothing.

Its layer is synced, then its mark goes.
"""

import errno
from pathlib import Path

import pytest

from supervisor.spawn.launchpad.layers.overlay import VOLATILE_FILE
from supervisor.workspace import workspace as module
from tests.supervisor.workspace.scene import Scene, write


def leave_mark(scene: Scene) -> Path:
    """Leave what a run on such a mount does; return the mark."""
    scene.make()
    mark = scene.upper.parent / "work/work/incompat/volatile"
    mark.mkdir(parents=True)
    for path in (mark / "dirty", scene.upper.parent / VOLATILE_FILE):
        path.touch()
    for path in (mark, mark.parent, mark.parent.parent):
        path.chmod(0)
    write(scene.upper / "new")
    return mark


# spec WS2, WS18
def test_the_layer_is_synced_before_its_mark_goes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = leave_mark(scene)
    seen = []
    monkeypatch.setattr(
        module, "sync_file_system", lambda _: seen.append(mark.exists())
    )
    scene.end_run()
    assert (seen, mark.exists()) == ([True], False)
    scene.end_run()  # there is nothing to sync any more
    assert seen == [True]
    assert scene.rows() == [("new", "added")]


# spec WS2, WS18
def test_a_layer_that_cannot_be_synced_keeps_its_mark(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, "the disk")

    mark = leave_mark(scene)
    with monkeypatch.context() as patch:
        patch.setattr(module, "sync_file_system", fail)
        with pytest.raises(OSError, match="the disk"):
            scene.end_run()
    assert mark.exists()
