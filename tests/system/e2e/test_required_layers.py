"""Required layers are tried by `check-config`, and before a daemon begins."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest

from supervisor.config.loader import ConfigError, load_config
from supervisor.config.walls import find_required_profiles
from supervisor.control.client import ControlError
from supervisor.sandbox.groups import PREFIX, hierarchies
from supervisor.sandbox.plan import LAYERS
from tests.helpers.command import ENVIRONMENT, Outcome, sandhost
from tests.helpers.daemon import daemon
from tests.helpers.replacing import assert_clean
from tests.system.e2e import older
from tests.system.e2e.layers import layers as table_of_layers
from tests.system.e2e.layers import present

pytestmark = pytest.mark.slow

of_root = pytest.mark.skipif(os.geteuid() != 0, reason="another layer goes first")
of_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="its numbers")

MOUNT_SETATTR, UNSHARE, RULESET, RESTRICT_SELF, PRCTL = 442, 272, 444, 446, 157
SET_NO_NEW_PRIVS = 38


def profile(layer: str, more: str = "") -> str:
    """Return a configuration with a policy that requires a layer."""
    return f"[sandbox.s]\n{more}required = ['{layer}']\n[policy.p]\nsandbox = 's'\n"


def checked(where: Path, text: str, wrapper: tuple[str, ...] = ()) -> Outcome:
    """Check a configuration, on an older kernel perhaps."""
    (where / "c.toml").write_text(text)
    words = ("check-config", "--json", "c.toml")
    return sandhost(*words, cwd=where, wrapper=wrapper)


# None of these calls is asked for by a look at the kernel: it takes who makes them.
@of_x86
@pytest.mark.parametrize(
    ("layer", "call", "why"),
    [
        pytest.param("netns", (UNSHARE, errno.EPERM), "not permitted", marks=of_root),
        pytest.param("ipcns", (UNSHARE, errno.EPERM), "not permitted", marks=of_root),
        pytest.param(
            "mountns",
            (MOUNT_SETATTR, errno.ENOSYS),
            "Function not implemented",
            marks=of_root,
        ),
        pytest.param(
            "pidns",
            (MOUNT_SETATTR, errno.ENOSYS),
            "needs the layer mountns",
            marks=of_root,
        ),
        ("landlock", (RESTRICT_SELF, errno.EPERM), "not permitted"),
        ("no_new_privs", (PRCTL, errno.EINVAL, SET_NO_NEW_PRIVS), "Invalid argument"),
    ],
    ids=["netns", "ipcns", "mountns", "pidns", "landlock", "no_new_privs"],
)
def test_a_required_layer_that_fails_when_it_is_tried_is_told(
    tmp_path: Path, layer: str, call: tuple[int, ...], why: str
) -> None:
    if layer == "no_new_privs" and os.geteuid() != 0:
        pytest.skip("without it nobody else may have the filter that plays this")
    kernel = older.without(*call)
    # Whose children would be root is refused for that.
    all_but_uid = f"layers = {sorted(LAYERS.keys() - {'uid'})}\n"
    (fault,) = json.loads(checked(tmp_path, profile(layer, all_but_uid), kernel).out)
    assert fault["key"] == "policy.p.sandbox"
    said = f"{layer!r}, which is required, is missing: "
    assert fault["reason"].startswith(said)
    assert why in fault["reason"]
    assert "; it takes " in fault["reason"]
    # A missing layer that no profile requires is no fault.
    text = profile(layer).replace("required", "layers")
    assert checked(tmp_path, text, kernel).status == 0
    host = f"[host]\nruntime_dir = '{tmp_path}/r'\nstate_dir = '{tmp_path}/s'\n"
    (tmp_path / "c.toml").write_text(host + profile(layer, all_but_uid))
    outcome = sandhost("serve", "--config", "c.toml", cwd=tmp_path, wrapper=kernel)
    assert outcome.status == 78
    assert outcome.said(f"cannot use {tmp_path}/c.toml: policy.p.sandbox: {said}")


@of_root
def test_what_root_has_no_use_for_is_not_required_of_it(tmp_path: Path) -> None:
    outcome = checked(tmp_path, profile("userns"))
    (fault,) = json.loads(outcome.out)
    assert fault["key"] == "policy.p.sandbox"
    said = "'userns', which is required, is not made here: the host is root"
    assert fault["reason"].startswith(said)
    for words in (("run", "--", "true"), ("serve",)):
        command = (words[0], "--config", "c.toml", *words[1:])
        assert sandhost(*command, cwd=tmp_path).said(said)


# The starting user is known without a start, and all that follows from it.
@pytest.mark.parametrize(
    ("layer", "layers", "why"),
    [
        ("uid", "", "the host is not root"),
        ("netns", "layers = ['netns']\n", "neither root nor a user namespace"),
        ("mountns", "layers = ['mountns']\n", "neither root nor a user namespace"),
    ],
)
def test_what_takes_root_is_not_required_of_anybody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layer: str, layers: str, why: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "c.toml"
    path.write_text(profile(layer, layers))
    said = f"{layer!r}, which is required, is missing: {why}; it takes a host that is"
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(str(path))
    assert [fault.key for fault in caught.value.faults] == ["policy.p.sandbox"]


def test_what_this_machine_gives_is_no_fault_however_much_is_required(
    tmp_path: Path,
) -> None:
    table = table_of_layers()
    given = sorted(present(table))
    text = f"[sandbox.s]\nrequired = {given}\n[policy.p]\nsandbox = 's'\n"
    assert checked(tmp_path, text).status == 0
    for row in table.values():
        if row["state"] == "missing":
            assert checked(tmp_path, profile(row["layer"])).status == 2, row


# A sidecar's own process has walls as well.
@of_x86
@pytest.mark.parametrize(
    ("call", "layer", "why"),
    [
        ((RESTRICT_SELF, errno.EPERM), "landlock", "Operation not permitted"),
        ((RULESET, errno.ENOSYS), "landlock", "Function not implemented"),
    ],
    ids=["tried", "asked"],
)
def test_what_a_sidecar_requires_is_tried(
    tmp_path: Path, call: tuple[int, int], layer: str, why: str
) -> None:
    text = "[toolexec]\n[sidecar.s]\nkind = 'node'\nsandbox = 'required'\n"
    assert checked(tmp_path, text).status == 0
    outcome = checked(tmp_path, text, older.without(*call))
    assert outcome.status == 2
    ((key, reason),) = ((row["key"], row["reason"]) for row in json.loads(outcome.out))
    assert key == "sidecar.s.sandbox"
    assert reason.startswith(
        f"{layer!r}, which is required, is missing: {why}; it takes"
    )


# It starts nothing, which would take longer and more rights.
def test_nothing_is_started_where_nothing_is_required(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[sandbox.s]\nlayers = ['netns']\n[policy.p]\nsandbox = 's'\n")
    assert not list(find_required_profiles(load_config(str(path))))


# A refusal by a momentary limit may be gone in the next moment.
@of_x86
@of_root
def test_what_could_not_be_tried_is_told_and_refuses_nothing(tmp_path: Path) -> None:
    kernel = older.without(UNSHARE, errno.ENOSPC)  # too many of them
    text = profile("netns", "layers = ['landlock', 'netns', 'seccomp']\n")
    (tmp_path / "c.toml").write_text(text)
    words = ("check-config", "c.toml")
    outcome = sandhost(*words, cwd=tmp_path, wrapper=kernel)
    assert (outcome.status, outcome.out) == (0, b"c.toml: no faults\n")
    said = "policy.p.sandbox: warning: what it requires could not be tried: netns: there are"
    assert outcome.said(said)
    assert outcome.said(
        "as many net namespaces as sysctl user.max_net_namespaces allows"
    )


# So does a daemon, which goes on, and each time it reads its configuration anew.
@of_x86
@of_root
def test_a_daemon_tells_what_could_not_be_tried_and_begins(tmp_path: Path) -> None:
    kernel = older.without(UNSHARE, errno.ENOSPC)
    text = profile("netns", "layers = ['netns']\n")
    said = "policy.p.sandbox: what it requires could not be tried: netns: there are"
    with daemon(tmp_path, text, wrapper=kernel) as running:
        (line,) = (line for line in running.said().splitlines() if said in line)
        assert "WARNING" in line
        running.send(signal.SIGHUP)
        running.hear("RELOADING=1")
        running.hear("READY=1")
        assert running.said().count(said) == 2
        assert "Not reloaded" not in running.said()
        assert running.end() == 0


# It is the trial that finds this out, and nothing changes.
@of_x86
def test_a_reload_is_refused_for_what_fails_when_it_is_tried(tmp_path: Path) -> None:
    kernel = older.without(RESTRICT_SELF, errno.EPERM)
    with daemon(tmp_path, profile("no_new_privs"), wrapper=kernel) as running:
        config = tmp_path / "c.toml"
        config.write_text(config.read_text().replace("no_new_privs", "landlock"))
        said = "policy.p.sandbox: 'landlock', which is required, is missing: "
        with pytest.raises(
            ControlError, match=f"cannot reload the configuration: .*{said}"
        ):
            running.client.reload()
        assert said in running.said()
        assert running.end() == 0


SLEEPER = "[child.{0}]\ncommand = ['/bin/sleep', '1000']\npolicy = 'p'\n"


def groups_of(pid: int) -> set[str]:
    """Return the names of the groups that a host has."""
    found = set()
    for hierarchy in hierarchies():
        found |= {path.name for path in Path(hierarchy.group).glob(f"{PREFIX}{pid}-*")}
    return found


# A daemon is told to reload for as long as it lives: a trial leaves nothing in it, gone
# well or not.
def test_trials_of_reloads_leave_nothing(tmp_path: Path) -> None:
    given = sorted(present(table_of_layers()))
    missing = "userns" if os.geteuid() == 0 else "uid"
    text = f"[sandbox.s]\nrequired = {given}\n[policy.p]\nsandbox = 's'\n"
    with daemon(tmp_path, text + SLEEPER.format("a")) as running:
        running.wait(lambda: running.row("a").state == "running")
        pid, config = running.process.pid, tmp_path / "c.toml"
        groups = groups_of(pid)
        assert not any("-trial-" in name for name in groups)
        good = config.read_text()
        for number in range(6):
            bad = good + profile(missing).replace(".s]", ".t]").replace("'s'", "'t'")
            config.write_text(bad.replace("y.p]", "y.q]") if number % 2 else good)
            running.send(signal.SIGHUP)
            running.hear("RELOADING=1")
            running.hear("READY=1")
        running.wait(lambda: running.said().count("Reloaded: ") == 3)
        assert running.said().count("Not reloaded: ") == 3
        assert groups_of(pid) == groups
        assert_clean(running)
        # The next user is the next one: none has been taken meanwhile.
        config.write_text(good + SLEEPER.format("b"))
        running.client.reload()
        running.wait(lambda: running.row("b").state == "running")
        one, other = (os.stat(f"/proc/{running.row(n).pid}").st_uid for n in "ab")
        assert other - one == ("uid" in given)
        assert running.end() == 0


def test_a_reload_tries_what_is_required_now(tmp_path: Path) -> None:
    missing = "userns" if os.geteuid() == 0 else "uid"
    with daemon(tmp_path, profile("no_new_privs")) as running:
        config = tmp_path / "c.toml"
        config.write_text(config.read_text().replace("no_new_privs", missing))
        words = ("reload", "--control", tmp_path / "run" / "control")
        outcome = sandhost(*words, env=ENVIRONMENT)
        assert outcome.status != 0
        assert outcome.said(f"policy.p.sandbox: {missing!r}, which is required, is")
        assert running.end() == 0
