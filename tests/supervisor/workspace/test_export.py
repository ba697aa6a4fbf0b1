"""A layer for container tools, applied by rules of the OCI's."""

import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given

from supervisor.workspace.directory import WorkspaceError
from supervisor.workspace.export import write_whole
from tests.supervisor.workspace.scene import Scene, tree_of, write
from tests.supervisor.workspace.test_any_branches import EXAMPLES, start, work
from tests.supervisor.workspace.test_any_changes import seeds

pytestmark = pytest.mark.slow


def apply_layer(layer: Path, top: Path) -> None:
    """Do to a tree what a layer says: whiteouts, then what tar extracts."""
    with tarfile.open(layer, errors="surrogateescape") as tar:
        for member in tar:
            directory, name = os.path.split(os.path.join(top, member.name))
            gone = os.path.join(directory, name.removeprefix(".wh."))
            is_whiteout = name.startswith(".wh.")
            if os.path.isdir(gone) and not os.path.islink(gone):
                if is_whiteout or not member.isdir():
                    shutil.rmtree(gone)
            elif os.path.lexists(gone) and (is_whiteout or member.isdir()):
                os.unlink(gone)
    subprocess.run(
        ["tar", "xpf", layer, "-C", top, "--exclude=.wh.*", "--exclude=*/.wh.*"],
        check=True,
    )


# spec WS14
@EXAMPLES
@given(seed=seeds)
def test_a_layer_makes_the_base_what_was_seen(scene: Scene, seed: int) -> None:
    rng = start(scene, seed)
    work(scene, rng)
    with scene.open() as workspace:
        workspace.snapshot()
    seen = work(scene, random.Random(seed))
    layer = scene.top / "layer.tar"
    with scene.open() as workspace:
        workspace.export(str(layer), replaces=True)
    other = scene.copy("other", scene.base)
    apply_layer(layer, other)
    assert tree_of(other) == seen


# spec WS14
def test_a_layer_has_owners_long_names_attributes_and_links(scene: Scene) -> None:
    scene.make()
    long = "n" * 120 + "/" + "m" * 200
    with scene.run() as top:
        write(top / long)
        os.chown(top / long, 1234, 4321)
        os.setxattr(top / long, "user.note", b"\xff\x00")
        os.link(top / long, top / "linked")
    layer = scene.top / "layer.tar"
    with scene.open() as workspace:
        workspace.export(str(layer))
    other = scene.top / "other"
    other.mkdir()
    options = ("--xattrs", "--xattrs-include=user.*")
    command = ["tar", "xpf", str(layer), "-C", str(other), *options]
    subprocess.run(command, check=True)
    status = (other / long).stat()
    assert (status.st_uid, status.st_gid, status.st_nlink) == (1234, 4321, 2)
    assert os.getxattr(other / "linked", "user.note") == b"\xff\x00"


# spec WS14
def test_a_name_that_would_mean_a_removal_is_refused_and_leaves_no_file(
    scene: Scene,
) -> None:
    scene.make()
    with scene.run() as top:
        write(top / ".wh.a")
    with scene.open() as workspace, pytest.raises(WorkspaceError, match="a removal"):
        workspace.export(str(scene.top / "layer.tar"))
    assert sorted(os.listdir(scene.top)) == ["base", "state"]


# spec WS14
def test_a_file_that_came_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.patch"

    def export() -> None:
        with write_whole(str(path), replaces=False) as file:
            path.write_text("somebody's")
            file.write(b"ours")

    with pytest.raises(WorkspaceError, match="there already"):
        export()
    assert path.read_text() == "somebody's"
    assert os.listdir(tmp_path) == ["x.patch"]
