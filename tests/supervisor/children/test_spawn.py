"""Starting a child in a host: nobody is left of a start that nobody waits for."""

from pathlib import Path

import pytest
import trio

from supervisor.sandbox.plan import PROFILES
from tests.helpers.stage import Stage, eventually, stage

__all__ = ["stage"]

pytestmark = pytest.mark.slow


# I5; after so many turns of the loop, from before it is asked for to after it lives
@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("profile", ["none", "auto"])
async def test_a_start_that_is_cancelled_leaves_nothing(
    stage: Stage, profile: str, turns: int
) -> None:
    stage.sandbox = PROFILES[profile]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.sh, "sleep 1000")
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    for child in tuple(stage.host.children.values()):  # it lived before that
        child.stop(0)
        await child.wait_gone()
    assert not stage.host.children
    assert not stage.host.fs.tables.clients
    launcher = stage.host.launcher
    await eventually(lambda: launcher.statistics()["children"] == 0)  # all swept


async def test_a_start_that_fails_is_told_when_nothing_is_left_of_it(
    stage: Stage, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/nowhere/at/all\n")
    program.chmod(0o755)
    child = await stage.host.spawn(stage.spec((str(program),)))
    assert child.failure is not None
    assert "it is there, but /nowhere/at/all is not" in child.failure.text
    assert child.gone.is_set()
    assert not stage.host.children
