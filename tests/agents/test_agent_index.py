"""An unmodified agent installs a package from a granted index alone."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from supervisor.llm.recipe import read_recipe
from tests.agents import index_trial
from tests.agents.installing import connection_failure, install
from tests.agents.table import AGENTS
from tests.agents.test_smallest_agents import INSTALL_S, cache
from tests.helpers import recipestock, recipeworld
from tests.helpers.command import SANDHOST
from tests.helpers.rounds import LONG_ALONE
from tests.system.e2e.test_network_recipes import page_rules

pytestmark = [*LONG_ALONE, pytest.mark.timeout(600)]

AGENT = "qwen"
"""The smallest of those that run a command of a shell."""

TIMEOUT_S = 300.0
ALLOWED_BY = "the rule 'other.example.com:443' would allow it"


# spec NET5: other names do not exist. spec NET11: the reason is told, and what allows it.
def test_an_agent_installs_from_its_index_and_is_refused_the_rest() -> None:
    if os.geteuid() or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("a world of its own needs root, unshare(1) and ip(8)")
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    (agent,) = (one for one in AGENTS if one.name == AGENT)
    recipe = read_recipe(AGENT)
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        top.chmod(0o755)
        for part in ("world", "work", "home"):
            (top / part).mkdir()
        try:
            program, _ = install(
                agent, recipe, cache(top / "cache"), version=recipe.version_tried,
                timeout_s=INSTALL_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired as why:
            pytest.skip(f"cannot install {AGENT}: {why}")
        except subprocess.SubprocessError as why:
            if not (failure := connection_failure(str(why))):
                raise
            pytest.skip(f"cannot install {AGENT}: {failure}")
        recipestock.fill(top / "world")
        found = run(top, str(program), page_rules()["a Python index and its files"])
    assert (found.status, found.left) == (0, 0), found.said
    assert recipestock.SAID in found.asked
    assert "Could not resolve host: other.example.com" in found.asked
    assert "203.0.113.5" in found.asked
    # By its name, which has no address, and by the proxy of its namespace.
    for host in ("other.example.com", "other.example.com:443"):
        assert f"{host}: no-rule; {ALLOWED_BY}" in found.trace
        assert f"{host}  refused" in found.network
    assert f"no-rule; {ALLOWED_BY}" in found.network


def run(top: Path, program: str, rules: list[str]) -> index_trial.Found:
    """Run the agent in the world; return what came of it."""
    outer = ("unshare", "--net", "--mount", sys.executable, recipeworld.__file__)
    trial = (sys.executable, index_trial.__file__, AGENT, program, str(top))
    path = os.pathsep.join((str(Path(SANDHOST).parent), os.environ["PATH"]))
    env = {"PATH": path, "HOME": str(top), "TMPDIR": tempfile.gettempdir()}
    done = subprocess.run(
        [*outer, str(top / "world"), *trial, str(top / "world"), *rules],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        timeout=TIMEOUT_S, env=env, cwd=top,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=index_trial.Found)
