"""Descriptors of a child's workspace are counted, and given back."""

from pathlib import Path

from supervisor.sandbox.plan import PROFILES
from supervisor.workspace.run import prepare_use
from tests.helpers.stage import Stage, stage
from vfs.filesystem import OWN_DESCRIPTORS

__all__ = ["stage"]


# attack 18
async def test_descriptors_of_a_workspace_are_charged(
    stage: Stage, tmp_path: Path
) -> None:
    base = tmp_path / "repo"
    base.mkdir()
    use = prepare_use(str(base), "review", str(tmp_path / "workspaces"), "w")
    account = stage.host.fs.descriptor_account
    before = account.used
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
    taken = account.used - before
    assert taken >= OWN_DESCRIPTORS + len(words)
    child.stop(0)
    await child.wait_gone()
    assert account.used == before
    stage.assert_nothing_left()
