"""Roots, grants and options beside each other, and beside a daemon's own."""

import json
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT, sandhost
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.replacing import replace_daemon
from tests.system.e2e.test_check_config import check, faults

pytestmark = pytest.mark.slow


# spec face: a root is a directory that is there; a child with another one would find
# every name "not available".
def test_a_root_is_a_directory_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "file").touch()
    text = "".join(
        f"[policy.{name}]\nroot = '{name}'\n" for name in ("root", "file", "gone")
    )
    assert faults(check(tmp_path, text, "--json")) == [
        ("policy.file.root", "'file' is not a directory"),
        ("policy.gone.root", "there is no 'gone'; make it first"),
    ]
    outcome = sandhost("serve", "--config", "c.toml", cwd=tmp_path)
    assert outcome.status == 78
    assert b"cannot use c.toml: policy.file.root: 'file' is not" in outcome.err


# spec face: no root lies in another policy's, by whatever name; what only reads so does not.
@pytest.mark.parametrize(
    ("one", "other", "refused"),
    [
        ("in", "in/sub", True),
        ("in/sub", "in", True),
        ("in", "link/sub", True),
        ("link", "in/sub", True),
        ("in", "out/../in/sub", True),
        ("deep/sub", "in", True),
        ("in", "in/../out", False),
        ("in", "link", False),  # one root for two policies
        ("in", "in-evil", False),
        ("in", "in/away", False),  # a link within that leads out
    ],
)
def test_no_root_lies_in_another_one_whatever_it_is_called(
    tmp_path: Path, one: str, other: str, *, refused: bool
) -> None:
    for name in ("in/sub", "out", "in-evil"):
        (tmp_path / name).mkdir(parents=True)
    for link, target in (("link", "in"), ("deep", "link"), ("in/away", "../out")):
        (tmp_path / link).symlink_to(target)
    text = f"[policy.a]\nroot = '{one}'\n[policy.b]\nroot = '{other}'\n"
    outcome = check(tmp_path, text, "--json")
    if not refused:
        assert outcome.status == 0
        return
    ((key, reason),) = faults(outcome)
    assert key == "policy.b.root"
    assert (
        f"'{tmp_path}/{other}' and the root '{tmp_path}/{one}' of policy 'a'" in reason
    )


@pytest.mark.parametrize(
    ("host", "policy", "said"),
    [
        (
            "state_dir = 'A/state'",
            "root = 'A'",
            "holds [host] state_dir ('{}/A/state')",
        ),
        ("state_dir = 'A/state'", "root = 'link'", "holds [host] state_dir"),
        ("state_dir = 'A/new/state'", "write = ['A']", "holds [host] state_dir"),
        ("state_dir = 'A/new/state'", "write = ['A/new']", "holds [host] state_dir"),
        ("state_dir = 'A/state'", "read = ['A/state']", "holds [host] state_dir"),
        ("state_dir = 'A'", "root = 'A/logs'", "holds what [host] state_dir is for"),
        (
            "state_dir = 'A'",
            "write = ['A/logs/new']",
            "lies in what [host] state_dir",
        ),
        (
            "state_dir = 'A'",
            "read = ['A/journal/file']",
            "lies in what [host] state_dir",
        ),
        (
            "state_dir = 'A'",
            "write = ['A/state.lock']",
            "holds what [host] state_dir is for",
        ),
        ("state_dir = 'A'", "root = 'A/state'", ""),
        ("state_dir = 'A'", "write = ['A/state/..']", "holds [host] state_dir"),
        ("runtime_dir = 'A/run'", "root = 'A'", "holds [host] runtime_dir"),
        ("runtime_dir = 'A/run'", "read = ['A']", ""),
        ("control = 'A/socket'", "write = ['A']", "holds the daemon's control socket"),
        ("control = 'A/socket'", "read = ['A']", ""),
        ("state_dir = 'A/state'", "root = 'B'", ""),
        ("state_dir = 'A/new'", "write = ['A/state', 'A/newer']", ""),
    ],
)
def test_what_is_a_daemons_own_is_no_root_and_no_grant(
    tmp_path: Path, host: str, policy: str, said: str
) -> None:
    for name in ("A/state", "B"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "A/file").touch()
    (tmp_path / "link").symlink_to("A")
    for name in ("logs", "scratch", "journal"):
        (tmp_path / "A" / name).mkdir()
    (tmp_path / "A/journal/file").touch()
    outcome = check(tmp_path, f"[host]\n{host}\n[policy.a]\n{policy}\n", "--json")
    if not said:
        assert outcome.status == 0
        return
    ((key, reason),) = faults(outcome)
    assert key == f"policy.a.{policy.split(maxsplit=1)[0]}"
    assert said.format(tmp_path) in reason
    for words, status in ((("serve",), 78), (("run", "--", "true"), 125)):
        command = (words[0], "--config", "c.toml", *words[1:])
        refused = sandhost(*command, cwd=tmp_path)
        assert refused.status == status
        assert refused.said(f"{key}: {reason}")


# Where nothing is written they are the usual ones of whoever starts the daemon.
def test_the_usual_places_of_a_daemon_are_no_grant_either(tmp_path: Path) -> None:
    places = {"STATE_DIRECTORY": f"{tmp_path}/lib/s", "RUNTIME_DIRECTORY": "/run/x"}
    text = f"[policy.run]\nread = ['{tmp_path}']\n"
    env = {**ENVIRONMENT, **places}
    (tmp_path / "c.toml").write_text(f"{text}[child.a]\ncommand = ['true']\n")
    outcome = sandhost("check-config", "--json", "c.toml", cwd=tmp_path, env=env)
    ((key, reason),) = faults(outcome)
    assert key == "policy.run.read"
    assert f"'{tmp_path}' holds [host] state_dir ('{tmp_path}/lib/s')" in reason
    # There is no daemon that would have them.
    words = ("run", "--config", "c.toml", "--", "true")
    assert sandhost(*words, cwd=tmp_path, env=env).status == 0
    (tmp_path / "c.toml").write_text(text)  # nothing says that it is a daemon's
    outcome = sandhost("check-config", "c.toml", cwd=tmp_path, env=env)
    assert (outcome.status, outcome.err) == (0, b"")
    assert sandhost("serve", "--config", "c.toml", cwd=tmp_path, env=env).status == 78


# A ring of links is a fault of the file, and none of this program's.
def test_a_ring_of_links_is_told(tmp_path: Path) -> None:
    (tmp_path / "ring").symlink_to("ring")
    for policy in ("root = 'ring'", "read = ['ring']", "write = ['ring']"):
        outcome = check(tmp_path, f"[policy.a]\n{policy}\n")
        assert outcome.status == 2
        assert outcome.said(f"policy.a.{policy.split()[0]}: ")


# Two policies may work on one thing, and that is easily more than was meant.
@pytest.mark.parametrize(
    ("policies", "key", "said"),
    [
        ("a.root = 'A'\nb.root = 'link'", "b.root", "'{}/link' is the root '{}/A' of"),
        ("a.root = 'A'\nb.write = ['A/sub']", "b.write", "'{}/A/sub' lies in the root"),
        (
            "a.root = 'A'\nb.write = ['A/file']",
            "b.write",
            "'{}/A/file' lies in the root",
        ),
        ("b.write = ['A']\na.root = 'A/sub'", "b.write", "'{}/A' holds the root"),
        ("a.root = 'A'\nb.write = ['A']", "b.write", "'{}/A' is the root"),
        ("a.root = 'A'\nb.read = ['A/sub']", "", ""),
        ("a.root = 'A'\na.write = ['A/sub']", "", ""),
        ("a.root = 'A'\nb.write = ['B']\nb.root = 'B'", "", ""),
    ],
)
def test_a_policy_that_can_change_what_is_anothers_is_told(
    tmp_path: Path, policies: str, key: str, said: str
) -> None:
    for name in ("A/sub", "B"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("A")
    (tmp_path / "A/file").touch()
    outcome = check(tmp_path, f"[policy]\n{policies}\n")
    assert (outcome.status, outcome.out) == (0, b"c.toml: no faults\n")
    if not key:
        assert outcome.err == b""
        return
    text = said.format(tmp_path, tmp_path)
    assert outcome.said(f"c.toml: policy.{key}: warning: {text}")
    assert outcome.said(": its children can change what policy a's children have;")
    with daemon(tmp_path, f"[policy]\n{policies}\n") as running:
        assert f"policy.{key}: {text}" in running.said()
        assert running.end() == 0


# attack 24: a key is no thing to keep where somebody works.
@pytest.mark.parametrize(
    ("more", "is_told"),
    [
        ("[policy.p]\nroot = 'A'", True),
        ("[policy.p]\nwrite = ['link']", True),
        ("[child.c]\ncommand = ['true']\ncwd = '{}/A/sub'", True),
        ("[toolexec]\n[sidecar.s]\nkind = 'node'\nworkspace = '{}/A'", True),
        ("[policy.p]\nread = ['A']", False),  # FD 3 opens it for nobody
        ("[policy.p]\nroot = 'B'", False),
    ],
)
def test_a_key_that_lies_where_children_work_is_told(
    tmp_path: Path, more: str, *, is_told: bool
) -> None:
    for name in ("A/sub", "B"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("A")
    key = tmp_path / "A/sub/key"
    key.write_text("sk-0123456789abcdef")
    key.chmod(0o600)
    text = f"[llm.models.m]\nbase_url = 'http://h/v1'\napi_key_file = '{key}'\n"
    outcome = check(tmp_path, text + more.format(tmp_path) + "\n")
    assert outcome.status == 0
    said = f"c.toml: llm.models.m.api_key_file: warning: '{key}' lies in '"
    assert outcome.said(said) if is_told else not outcome.err


@pytest.mark.parametrize(
    ("option", "status", "said"),
    [
        (
            ("--root", "A/sub"),
            125,
            "--root: '{0}/A/sub' and the root '{0}/A' of policy",
        ),
        (("--root", "."), 125, "--root: '{0}' and the root '{0}/A' of policy 'a' lie"),
        (("--root", "A"), 0, "--root: '{0}/A' is the root '{0}/A' of policy 'a': its"),
        (("--write", "A/sub"), 0, "--write: '{0}/A/sub' lies in the root '{0}/A' of"),
        (("--root", "R/sub"), 0, ""),  # its own gives way
        (("--root", "B"), 0, ""),
        (("--read", "A/sub"), 0, ""),
    ],
)
def test_an_option_of_run_is_looked_at_beside_the_other_policies(
    tmp_path: Path, option: tuple[str, ...], status: int, said: str
) -> None:
    for name in ("A/sub", "R/sub", "B"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "c.toml").write_text("[policy]\na.root = 'A'\nrun.root = 'R'\n")
    words = ("run", "--config", "c.toml", *option, "--", "true")
    outcome = sandhost(*words, cwd=tmp_path)
    assert outcome.status == status
    if said:
        assert outcome.said(said.format(tmp_path))
    else:
        assert outcome.err == b""


# A link's parent is what the kernel says, for whoever looks and for who uses it.
def test_what_follows_a_link_is_looked_for_where_it_leads(tmp_path: Path) -> None:
    for name in ("a/deep/sub", "b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "b/link").symlink_to("../a/deep/sub")
    (tmp_path / "a/deep/there").touch()
    (tmp_path / "b/wrong").touch()
    words = ("sandhost", "fs", "ls")
    outcome = sandhost("run", "--root", "b/link/..", "--", *words, cwd=tmp_path)
    assert (outcome.status, outcome.err) == (0, b"")
    assert {*outcome.out.split()} == {b"sub/", b"there"}
    # Other names of a refused directory are refused.
    (tmp_path / "c.toml").write_text("[policy]\na.root = 'a'\n")
    command = ("run", "--config", "c.toml", "--root", "b/link/..", "--", "true")
    outcome = sandhost(*command, cwd=tmp_path)
    assert outcome.status == 125
    assert outcome.said(f"and the root '{tmp_path}/a' of policy 'a' lie in one another")
    (tmp_path / "c.toml").write_text(
        "[host]\nstate_dir = 'b/link/..'\nruntime_dir = 'run'\n[policy.p]\nroot = 'a'\n"
    )
    outcome = sandhost("serve", "--config", "c.toml", cwd=tmp_path)
    assert outcome.status == 78
    assert outcome.said(f"holds [host] state_dir ('{tmp_path}/a/deep')")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            ("--root", "."),
            "--root: '{0}' holds [host] state_dir ('{0}/state'): by FD 3",
        ),
        (("--write", "state"), "--write: '{0}/state' holds [host] state_dir"),
        (("--read", "state/logs"), "--read: '{0}/state/logs' holds what [host] state_"),
        (("--read", "other"), ""),
    ],
)
def test_an_option_of_run_that_reaches_a_daemons_own_is_told(
    tmp_path: Path, option: tuple[str, str], said: str
) -> None:
    for name in ("state/logs", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "c.toml").write_text("[host]\nstate_dir = 'state'\n")
    words = ("run", "--config", "c.toml", *option, "--", "true")
    outcome = sandhost(*words, cwd=tmp_path)
    assert outcome.status == 0
    if said:
        assert outcome.said(said.format(tmp_path))
    else:
        assert outcome.err == b""


# Its own places

OTHERS = ("{}/run", "{}/other/run"), ("{}/state", "{}/other/state")
"""The directories in `[host]` at the beginning, and later."""


def rewrite(running: Daemon, policy: str, *, moved: bool) -> None:
    """Write a daemon's configuration anew, with other places perhaps."""
    path = running.where / "c.toml"
    text = path.read_text().partition("[policy")[0]
    for old, new in OTHERS if moved else ():
        text = text.replace(old.format(running.where), new.format(running.where))
    path.write_text(f"{text}[policy.p]\n{policy}\n")


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A directory with what a daemon may have as roots."""
    for name in ("fine", "apart", "state/logs", "state/journal"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "state").chmod(0o700)
    return tmp_path


# A daemon's directories are its own until it ends, wherever the next one will have it.
@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("root = '{}/state/logs'", "holds what [host] state_dir is for"),
        ("read = ['{}/state/journal']", "holds what [host] state_dir is for"),
        ("write = ['{}/run']", "holds [host] runtime_dir ('{}/run')"),
        ("root = '{}/apart'", "holds the daemon's control socket ('{}/apart/c')"),
    ],
)
def test_a_living_daemons_places_are_no_grant_whatever_is_written(
    where: Path, policy: str, said: str
) -> None:
    fine = f"[policy.p]\nroot = '{where}/fine'\n"
    control = where / "apart/c"
    with daemon(where, fine, "--control", str(control)) as running:
        running.client = type(running.client)(str(control))
        pid, policy = running.process.pid, policy.format(where)
        key = f"policy.p.{policy.split(maxsplit=1)[0]}: "
        rewrite(running, policy, moved=True)
        assert sandhost("check-config", "c.toml", cwd=where).status == 0
        for option in ((), ("--exec",)):
            words = ("reload", *option, "--control", control)
            outcome = sandhost(*words, env=ENVIRONMENT)
            assert outcome.status == 2, option
            assert outcome.said(key)
            assert outcome.said(said.format(where))
        assert running.client.stats()["generation"] == 0
        assert running.process.pid == pid
        assert running.end() == 0


def test_an_option_is_looked_at_before_a_daemon_begins(where: Path) -> None:
    text = f"[host]\nstate_dir = 's'\nruntime_dir = 'r'\n[policy.p]\nroot = '{where}/fine'\n"
    (where / "c.toml").write_text(text)
    words = ("serve", "--config", "c.toml", "--control", "fine/c")
    outcome = sandhost(*words, cwd=where)
    assert outcome.status == 78
    assert outcome.said("policy.p.root: ")
    assert outcome.said(f"holds the daemon's control socket ('{where}/fine/c')")


# Its locks, its journal and its children's directories are where they were.
def test_the_next_program_of_a_daemon_has_its_places(where: Path) -> None:
    policy = f"root = '{where}/fine'\n[child.a]\ncommand = ['sleep', '1000']"
    with daemon(where, f"[policy.p]\n{policy}\n") as running:
        pid = running.row("a").pid
        rewrite(running, policy, moved=True)
        for _ in range(2):
            replace_daemon(running)
            assert running.row("a").pid == pid
            assert not (where / "other").exists()
        said = running.said()
        assert said.count("host: other places of a daemon's own need a restart") == 2
        journal = b"".join(p.read_bytes() for p in (where / "state/journal").iterdir())
        assert journal.count(b'"host.replaced"') == 2
        outcome = sandhost("reload", "--control", where / "run/control", "--json")
        assert json.loads(outcome.out)["needs_restart"] == ["host"]
        assert running.end() == 0
    assert not (where / "other").exists()
