"""`sandhost relay` as a user types it, inside a child of a real host."""

import os
import signal
from pathlib import Path

import pytest

from hostlib.linux import processes
from protocol.toolexec.token import identity, parse_narrowed
from supervisor.spawn.launchpad.layers import landlock
from tests.helpers.command import SANDHOST, finished, running, sandhost
from tests.helpers.hanging import hanging
from tests.system.e2e.older import without

pytestmark = pytest.mark.slow


def run_child(
    root: Path, script: str, *options: str | Path
) -> tuple[int, bytes, bytes]:
    """Run a shell child in which `$0` is the command."""
    words = ("--log-level", "error", "--root", root, *options)
    outcome = sandhost("run", *words, "--", "sh", "-c", script, SANDHOST)
    return outcome.status, outcome.out, outcome.err


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(f"in {name}")
    return tmp_path


def has_landlock() -> bool:
    try:
        return landlock.version() > 0
    except OSError:
        return False


def is_starting(relay: int) -> bool:
    """Return whether the launchpad of a relay has forked a nested child."""
    launchpads = processes.children_of(relay)
    return any(processes.children_of(launchpad) for launchpad in launchpads)


def test_a_nested_child_shares_the_root_and_its_status_comes_back(root: Path) -> None:
    # spec N1, A5
    script = "$0 relay -- sh -c '$0 fs cat open/file; exit 7' $0"
    assert run_child(root, script) == (7, b"in open", b"")


def test_eight_levels_reach_the_root(root: Path) -> None:
    # spec N1
    script = "$0 relay -- " * 8 + "$0 fs cat open/file"
    assert run_child(root, script) == (0, b"in open", b"")


def test_a_narrowed_nested_child_reads_what_it_was_left_and_nothing_else(
    root: Path,
) -> None:
    # spec A5
    script = (
        "$0 relay --read open -- sh -c '$0 fs cat open/file;"
        " $0 fs cat closed/file; echo x | $0 fs put open/new' $0"
    )
    status, out, err = run_child(root, script)
    assert (status, out) == (1, b"in open")
    assert err.count(b"access denied") == 2
    assert not (root / "open" / "new").exists()


def test_rights_that_were_given_up_do_not_come_back_below(root: Path) -> None:
    # spec A5, attack 38
    script = "$0 relay --read open -- $0 relay --read closed -- $0 fs cat closed/file"
    status, out, err = run_child(root, script)
    assert (status, out) == (125, b"")
    assert b"not within this client's rights" in err


def test_a_nested_child_of_a_top_level_one_is_restricted(root: Path) -> None:
    # spec N3
    script = "$0 relay -- $0 fs cat --top-level /etc/hostname"
    status, out, err = run_child(root, script, "--top-level")
    assert (status, out) == (1, b"")
    assert b"access denied" in err


# spec A5, attack 38: what keeps a nested child from its parent's memory is Landlock alone.
def test_a_nested_child_that_nothing_keeps_from_its_parent_is_told_of() -> None:
    script = "$0 relay -- sh -c ': >> /proc/'$$/mem"
    words = ("run", "--", "sh", "-c", script, SANDHOST)
    if has_landlock():
        outcome = sandhost(*words)
        assert outcome.status != 0
        assert b"landlock" not in outcome.err
    outcome = sandhost(*words, wrapper=without(444, 38))
    assert outcome.status == 0  # so that it is true
    assert outcome.said("The nested child goes without the layer 'landlock': ")
    assert outcome.said("from the memory, and so from the rights, of the child")


def test_what_a_killed_nested_child_had_staged_never_appears(
    root: Path, tmp_path: Path
) -> None:
    # spec A3b, N2
    config = tmp_path / "config.toml"
    config.write_text('[policy.run]\npublish = "on-close"\n')
    script = (
        "$0 relay -- sh -c '"
        'printf "OPEN open/file w false\\n" >&3; read _ n <&3;'
        ' printf "WRITE $n 3\\nnew" >&3; read x <&3; kill -9 $$\''
    )
    status, _, err = run_child(root, script, "--config", config)
    assert status == 137
    assert b"Sent close request for fileno 1000 (downstream EOF)" in err
    assert (root / "open" / "file").read_text() == "in open"


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("no-such-program", 127, b"No such file or directory"),
        ("/etc/passwd", 126, b"Permission denied"),
    ],
)
def test_a_nested_child_that_cannot_start_says_why(
    root: Path, command: str, status: int, said: bytes
) -> None:
    code, out, err = run_child(root, f"$0 relay -- {command}")
    assert (code, out) == (status, b"")
    assert said in err
    assert err.count(b"\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_nested_child_whose_start_hangs_is_stopped(
    tmp_path: Path, number: signal.Signals
) -> None:
    with hanging(tmp_path) as program:
        script = f"echo $$; exec {SANDHOST} relay -- {program}"
        words = ("run", "--sandbox", "none", "--", "sh", "-c", script)
        with running(*words) as host:
            assert host.stdout is not None
            pid = int(host.stdout.readline())
            while not is_starting(pid):
                assert host.poll() is None
            os.kill(pid, number)
            assert finished(host).status == 128 + number


@pytest.mark.parametrize("option", ["--model x", "--quota 5"])
def test_the_model_cannot_be_narrowed_where_there_is_none(
    root: Path, option: str
) -> None:
    status, out, err = run_child(root, f"$0 relay {option} -- true")
    assert (status, out) == (125, b"")
    assert b"this host has no model, and so no quota" in err


@pytest.mark.parametrize("quota", ["nan", "inf", "1e400", "-1"])
def test_a_quota_that_is_no_number_of_tokens_is_refused(quota: str) -> None:
    script = f"{SANDHOST} relay --quota={quota} -- true"
    outcome = sandhost("run", "--", "sh", "-c", script)
    assert outcome.status == 125
    assert outcome.err.startswith(b"sandhost relay: --quota: not a number of tokens: ")
    assert outcome.said("; write 0 or more; see 'sandhost relay --help'")


# spec S7: the connections of a child and of all in it are bounded.
def test_a_child_without_a_connection_left_is_told_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[limits]\nclients_per_child = 1\n")
    words = ("run", "--config", "c.toml", "--", SANDHOST, "relay", "--", "true")
    outcome = sandhost(*words, cwd=tmp_path)
    assert outcome.status == 125
    assert outcome.said("; close connections, or raise [limits] clients_per_child")


def test_outside_a_child_it_says_so() -> None:
    outcome = sandhost("relay", "--", "true")
    assert outcome.status == 125
    assert outcome.err.count(b"\n") == 1
    assert b"not inside a child" in outcome.err


def test_a_nested_child_has_a_token_that_stands_for_less(root: Path) -> None:
    # attack 38: this process's token stands for the rights that were just given up.
    # attack 48: and, if none were, for this process's executions and its siblings'.
    script = (
        "export AIFO_TOOLEEXEC_TOKEN=mine;"
        " $0 relay --read open -- sh -c 'echo $AIFO_TOOLEEXEC_TOKEN';"
        " $0 relay -- sh -c 'echo $AIFO_TOOLEEXEC_TOKEN'"
    )
    status, out, _ = run_child(root, script)
    assert status == 0
    assert "mine" not in out.decode()
    narrowed, own = map(parse_narrowed, out.split())
    assert narrowed is not None
    assert own is not None
    assert narrowed[0] == own[0] == identity("mine")
    assert narrowed[1][-1] == "noroot"
    (caveat,) = own[1]
    assert caveat.startswith("id:")
    assert caveat not in narrowed[1]
