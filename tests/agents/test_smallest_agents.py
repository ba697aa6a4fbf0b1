"""The two smallest agents, unmodified: the short form of `make agents`."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from supervisor.llm.recipe import read_recipe
from tests.agents.installing import connection_failure, install
from tests.agents.table import AGENTS, smallest
from tests.agents.trial import Form, Trial, run_trial

INSTALL_S = 240.0
"""How long one installation may take: pip needs 8 s, npm 4 s, on two busy cores."""


def cache(otherwise: Path) -> Path:
    """Return the directory in which agents outlive a run, if there can be one."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    kept = Path(home) / "sandhost" / "agents"
    try:
        kept.mkdir(parents=True, exist_ok=True)
    except OSError:
        return otherwise
    return kept if os.access(kept, os.W_OK) else otherwise


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", smallest())
def test_a_real_agent_goes_through_its_steps(name: str, tmp_path: Path) -> None:
    """An agent passes every column of docs/reference/agents.md that it can pass."""
    if shutil.which("git") is None:
        pytest.skip("git is not on this machine, which the agent's project needs")
    (agent,) = (one for one in AGENTS if one.name == name)
    recipe = read_recipe(name)
    trial = Trial(agent, agent.passes)
    try:
        program, trial.version = install(
            agent,
            recipe,
            cache(tmp_path / "cache"),
            version=recipe.version_tried,
            timeout_s=INSTALL_S,
        )
    except subprocess.TimeoutExpired as why:
        pytest.skip(f"cannot install {name}: {why}")
    except subprocess.SubprocessError as why:
        if not (failure := connection_failure(str(why))):
            raise
        pytest.skip(f"cannot install {name}: {failure}")
    assert trial.version == recipe.version_tried
    run_trial(trial, recipe, program, tmp_path, Form())
    assert trial.is_whole, trial.row()
