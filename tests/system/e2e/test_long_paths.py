"""A state directory with a path that no address of a unix socket has room for."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostlib.paths import LEDGER
from tests.helpers import daemon as helper
from tests.helpers.command import ENVIRONMENT, sandhost
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


# Directories of other children are closed to a child, wherever it lies.
@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("root = '{scratch}'", "holds what [host] state_dir is for"),
        ("read = ['{scratch}']", "holds what [host] state_dir is for"),
        ("write = ['{tmp}/link']", "holds what [host] state_dir is for"),
        ("root = '{scratch}/one'", "lies in what [host] state_dir is for"),
        ("read = ['{scratch}/one/file']", "lies in what [host] state_dir is for"),
        ("write = ['{tmp}/link/new']", "lies in what [host] state_dir is for"),
        ("root = '{tmp}'", "holds what [host] state_dir is for"),
        ("root = '{tmp}/other'", ""),
        ("write = ['{scratch}er']", ""),
        # No child has files there then, and no socket would have an address.
        ("root = '{deep}/state/scratch'", ""),
        ("root = '{deep}/state/mine'", ""),
        ("root = '{deep}/state/logs'", "holds what [host] state_dir is for"),
    ],
)
def test_what_is_borrowed_is_no_root_and_no_grant(
    deep: Path, tmp: Path, monkeypatch: pytest.MonkeyPatch, policy: str, said: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp))
    scratch = helper.scratch_of(deep)
    assert scratch.parent == tmp
    (scratch / "one").mkdir(parents=True)
    (scratch / "one" / "file").touch()
    Path(f"{scratch}er").mkdir()
    (tmp / "link").symlink_to(scratch)
    (tmp / "other").mkdir()
    for name in ("scratch", "mine", "logs"):
        (deep / "state" / name).mkdir(parents=True)
    text = policy.format(scratch=scratch, tmp=tmp, deep=deep)
    head = helper.HEAD.format(where=deep, grace="5s")
    (deep / "c.toml").write_text(f"{head}[policy.p]\n{text}\n")
    env = {**ENVIRONMENT, "TMPDIR": str(tmp)}
    outcome = sandhost("check-config", "c.toml", cwd=deep, env=env)
    if not said:
        assert (outcome.status, outcome.err) == (0, b"")
        return
    assert outcome.status == 2
    path = scratch if "/logs" not in policy else deep / "state" / "logs"
    key = f"policy.p.{policy.split(maxsplit=1)[0]}: "
    assert outcome.said(f"c.toml: {key}")
    assert outcome.said(f" {said} ('{path}'): ")
    refused = sandhost("serve", "--config", "c.toml", cwd=deep, env=env)
    assert (refused.status, refused.said(key)) == (78, True)


# Of the run-time directory alone a grant to read is none of anybody's; of this part it is.
@pytest.mark.parametrize(
    ("policy", "is_refused"),
    [("read = ['scratch/one']", True), ("read = ['other']", False)],
)
def test_what_lies_in_the_run_time_directory_is_no_grant_to_read(
    deep: Path, tmp: Path, policy: str, *, is_refused: bool
) -> None:
    for name in ("scratch/one", "other"):
        (tmp / name).mkdir(parents=True)
    text = policy.replace("['", f"['{tmp}/")
    head = f"[host]\nruntime_dir = '{tmp}'\nstate_dir = '{deep}/state'\n"
    (deep / "c.toml").write_text(f"{head}[policy.p]\n{text}\n")
    outcome = sandhost("check-config", "c.toml", cwd=deep)
    assert outcome.status == (2 if is_refused else 0)
    if is_refused:
        assert outcome.said(f"lies in what [host] state_dir is for ('{tmp}/scratch')")


OWN = ("logs", "journal", "scratch", "checkpoints")


# A daemon's directories beneath its own are these; what else lies there is whoever's
# it was made for.
@pytest.mark.parametrize("key", ["root", "read", "write"])
@pytest.mark.parametrize(
    "name", [*OWN, "logs-of-mine", "roots", "roots/logs", "roots/checkpoints"]
)
def test_a_state_directory_has_room_for_roots(tmp: Path, key: str, name: str) -> None:
    place = tmp / "state" / name / "one"
    place.mkdir(parents=True)
    value = f"'{place}'" if key == "root" else f"['{place}']"
    (tmp / "c.toml").write_text(
        f"{helper.HEAD.format(where=tmp, grace='5s')}[policy.p]\n{key} = {value}\n"
    )
    outcome = sandhost("check-config", "c.toml", cwd=tmp)
    if name in OWN:
        assert outcome.status == 2
        assert outcome.said("lies in what [host] state_dir is for")
        return
    assert (outcome.status, outcome.err) == (0, b"")
    if key == "root":  # and a daemon that has it begins, and leaves it alone
        (place / "file").write_text("mine")
        with daemon(tmp, f"[policy.p]\nroot = '{place}'\n") as running:
            assert running.end() == 0
        assert (place / "file").read_text() == "mine"


# A child cannot change the rest of a quota that bounds it.
@pytest.mark.parametrize("key", ["read", "write"])
def test_the_ledger_of_a_quota_is_no_grant(tmp: Path, key: str) -> None:
    ledger = tmp / "state" / LEDGER
    ledger.parent.mkdir()
    for name, status in ((ledger, 2), (ledger.with_suffix(".mine"), 0)):
        name.touch()
        head = helper.HEAD.format(where=tmp, grace="5s")
        (tmp / "c.toml").write_text(f"{head}[policy.p]\n{key} = ['{name}']\n")
        outcome = sandhost("check-config", "c.toml", cwd=tmp)
        assert outcome.status == status
        assert not status or outcome.said("change what is left of the quota")
