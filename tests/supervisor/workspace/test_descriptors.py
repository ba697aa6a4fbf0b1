"""Descriptors of a child's workspace are counted, and given back."""

from pathlib import Path

from supervisor.sandbox.plan import PROFILES
from supervisor.workspace.run import prepare_use
from tests.helpers.stage import Stage, stage
from vfs.filesystem import OWN_DESCRIPTORS

__all__ = ["stage"]


# attack 18
async def test_descriptors_of_a_workspace_are_set_aside(
    stage: Stage, tmp_path: Path
) -> None:
    base = tmp_path / "repo"
    base.mkdir()
    use = prepare_use(str(base), "review", str(tmp_path / "workspaces"), "w")
    before = stage.host.fs.spare
    child = await stage.sh(
        "exec sleep 600",
        cwd=str(base),
        root=str(base),
        sandbox=PROFILES["auto"],
        workspaces=(use,),
        has_workspace_root=True,
    )
    words = [word for _, word in child.descriptors() if word.startswith("workspace")]
    assert len(words) >= 2
    taken = before - stage.host.fs.spare
    assert taken >= OWN_DESCRIPTORS + len(words)
    child.stop(0)
    await child.wait_gone()
    assert stage.host.fs.spare == before
    stage.assert_nothing_left()
