"""`make demo` and `make fleet-demo` check themselves: they are run to their end."""

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT
from tests.helpers.rounds import LONG_ALONE
from tests.system.attacks.test_unprivileged import nobodys_command

pytestmark = pytest.mark.slow

DEMOS = Path(__file__).parents[3] / "demo"

# A demo looks for what is left on this machine: other tests run beside it.
ALONE = ("unshare", "-pf", "--mount-proc")


def run_demo(
    before: list[str], env: dict[str, str], where: Path, name: str = "demo.sh"
) -> str:
    """Run a demo; return what it printed."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("it takes root and unshare (util-linux) to be alone")
    done = subprocess.run(
        [*ALONE, *before, "sh", str(DEMOS / name)],
        cwd=where, env={**env, "TMPDIR": str(where)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.endswith("   done\n")
    assert os.listdir(where) == []
    return done.stdout


def test_the_demo_shows_an_agent_a_conflict_and_that_nothing_is_left(
    tmp_path: Path,
) -> None:
    said = run_demo([], ENVIRONMENT, tmp_path)
    assert "conflict   CHANGES.md: it was changed in the base" in said
    assert "committed  basket.py" in said


# spec FL5, FL7 and FL8
@pytest.mark.parametrize("children", [pytest.param("8", marks=LONG_ALONE)])
def test_the_demo_of_a_fleet_loses_a_node_and_no_token(
    tmp_path: Path, children: str
) -> None:
    pytest.importorskip("ray")
    env = {**ENVIRONMENT, "CHILDREN": children}
    said = run_demo([], env, tmp_path, "fleet.sh")
    assert "11 calls of 6 tokens; none is missing, and none counts twice" in said


def test_the_demo_is_the_same_for_an_ordinary_user() -> None:
    with tempfile.TemporaryDirectory(prefix="sandhost-tests-") as name:
        (*become, python), env = nobodys_command(Path(name))
        own = Path(name) / "demo"
        own.mkdir()
        os.chown(own, Path(name).stat().st_uid, Path(name).stat().st_gid)
        env["PATH"] = f"{Path(python).parent}:{os.defpath}"
        install_packages(Path(python))
        said = run_demo(become, env, own)
    assert "committed  basket.py" in said


def install_packages(python: Path) -> None:
    """Give an interpreter the packages of this one: a child sees no others."""
    here = Path(sysconfig.get_path("purelib"))
    there = python.parents[1] / "lib" / here.parent.name / here.name
    shutil.copytree(here, there, copy_function=link, dirs_exist_ok=True)


def link(source: str, target: str) -> None:
    """Make a hard link, or a copy where there can be none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
