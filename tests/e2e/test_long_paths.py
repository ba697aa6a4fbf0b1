"""A state directory with a path that no address of a unix socket has room for."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import daemon as helper
from tests.helpers.daemon import Daemon, daemon

pytestmark = pytest.mark.slow

ASK = 'curl -s --unix-socket "${AIFO_TOOLEEXEC_URL#unix://}" http://x/healthz'
TOOLS = f"""
[toolexec]
[child.a]
command = ["sh", "-c", '''{ASK} && echo "$AIFO_TOOLEEXEC_URL" && echo x > "$TMPDIR/x"''']
[child.b]
command = ["sleep", "1000"]
"""


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A directory with a path of more than 107 bytes."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    return deep


@pytest.fixture
def tmp() -> Iterator[Path]:
    """A temporary directory with a short one."""
    with tempfile.TemporaryDirectory(prefix="sd-", dir="/tmp") as name:
        yield Path(name)


def ended(running: Daemon) -> bool:
    """Tell whether child `a` has said all that it says."""
    return running.row("a").state == "ended"


# spec E1: "each child has its own socket directory ... and every sandbox profile admits it".
def test_a_childs_socket_has_an_address_all_the_same(deep: Path, tmp: Path) -> None:
    with daemon(deep, TOOLS, env={"TMPDIR": str(tmp)}) as running:
        running.wait(lambda: ended(running), "the end of a")
        assert running.row("a").status == 0, running.log("a")
        said = running.log("a").decode()
        assert said.startswith("ok")
        assert f"unix://{tmp}/.sandhost-" in said
        (made,) = os.listdir(tmp)
        assert (tmp / made).stat().st_mode & 0o777 == 0o700
        assert running.end() == 0
    assert os.listdir(tmp) == []


def test_the_run_time_directory_is_nearer(
    deep: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = tmp / "run"
    head = f'[host]\nruntime_dir = "{near}"\nstate_dir = "{{where}}/state"\n'
    monkeypatch.setattr(helper, "HEAD", head)
    with helper.daemon(deep, TOOLS, env={"TMPDIR": str(tmp)}) as running:
        running.client.path = str(near / "control")
        running.wait(lambda: ended(running), "the end of a")
        assert f"unix://{near}/scratch/sandhost-" in running.log("a").decode()
        assert running.end() == 0
    assert os.listdir(tmp) == ["run"]


# A host that is killed leaves them; the next one finds them by the same name.
def test_what_a_killed_daemon_left_there_is_swept(deep: Path, tmp: Path) -> None:
    env = {"TMPDIR": str(tmp)}
    with daemon(deep, TOOLS, env=env) as running:
        running.wait(lambda: ended(running), "the end of a")
        running.send(signal.SIGKILL)
        running.process.wait()
    (name,) = os.listdir(tmp)
    (left,) = os.listdir(tmp / name)  # of child b
    with daemon(deep, TOOLS, env=env) as running:
        assert f"a scratch directory: {tmp}/{name}/{left} (removed)" in running.said()
        running.wait(lambda: ended(running), "the end of a")
        assert running.end() == 0
    assert os.listdir(tmp) == []


@pytest.mark.parametrize("kind", ["link", "open"])
def test_what_somebody_has_prepared_is_refused(
    deep: Path, tmp: Path, kind: str
) -> None:
    env = {"TMPDIR": str(tmp)}
    with daemon(deep, TOOLS, env=env) as running:
        (name,) = os.listdir(tmp)
        assert running.end() == 0
    elsewhere = tmp / "elsewhere"
    elsewhere.mkdir(0o700)
    if kind == "link":
        (tmp / name).symlink_to(elsewhere)
    else:
        (tmp / name).mkdir()
        (tmp / name).chmod(0o755)
    with daemon(deep, TOOLS, env=env, ready=False) as running:
        assert running.process.wait(30) == 1
        assert f"{tmp}/{name}" in running.said()
        assert "a link, or open to others; remove it" in running.said()
    assert os.listdir(elsewhere) == []


def test_a_short_one_has_its_children_in_it(tmp: Path) -> None:
    with daemon(tmp, TOOLS) as running:
        running.wait(lambda: ended(running), "the end of a")
        assert f"unix://{tmp}/state/scratch/sandhost-" in running.log("a").decode()
        assert running.end() == 0
