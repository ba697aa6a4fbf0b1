"""The environment of a child of `sandhost run`.

Variables, directories, descriptors.
"""

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from tests.helpers.command import (
    ENVIRONMENT,
    SANDHOST,
    finished,
    heard,
    running,
    sandhost,
    shell,
)

pytestmark = pytest.mark.slow

LOOK = (
    "import json, os, signal, stat, sys\n"
    "t = os.environ.get('TMPDIR', '/nonexistent')\n"
    "print(json.dumps({'env': dict(os.environ), 'cwd': os.getcwd(),"
    " 'fds': [n for n in range(64) if os.path.exists(f'/proc/self/fd/{n}')],"
    " 'tmp_mode': stat.S_IMODE(os.stat(t).st_mode), 'tmp': os.listdir(t),"
    " 'leads': [os.getpid() == os.getsid(0), os.getpid() == os.getpgrp()],"
    " 'ignored': [n for n in range(1, 32) if signal.getsignal(n) == signal.SIG_IGN],"
    " 'blocked': sorted(signal.pthread_sigmask(0, []))}))\n"
    "open(os.path.join(t, 'mine'), 'w').close()"
)


def looked(*options: str | Path, **changes: object) -> dict[str, object]:
    """The signals of a Python child. Python itself ignores SIGPIPE and SIGXFSZ."""
    words = ("run", *options, "--", sys.executable, "-I", "-S", "-c", LOOK)
    outcome = sandhost(*words, **changes)
    assert (outcome.status, outcome.err) == (0, b"")
    found = json.loads(outcome.out)
    assert isinstance(found, dict)
    return found


def test_the_environment_is_minimal_and_exact() -> None:
    env = {
        **ENVIRONMENT,
        "TERM": "dumb",
        "SECRET": "x",
        "LD_PRELOAD": "",
        "PYTHONX": "1",
    }
    found = looked(env=env)["env"]
    assert isinstance(found, dict)
    tmp, home, door = (found.pop(n) for n in ("TMPDIR", "HOME", "FSPROXY_SOCKET"))
    assert found == {
        "PATH": ENVIRONMENT["PATH"],
        "LANG": ENVIRONMENT["LANG"],
        "TERM": "dumb",
        "FSPROXY_FD": "3",
        "FSPROXY_VERSION": "2",
        "FSPROXY_TOP_LEVEL": "false",
    }
    assert os.path.dirname(home) == os.path.dirname(tmp)
    assert os.path.dirname(os.path.dirname(door)) == os.path.dirname(tmp)
    assert not os.path.exists(tmp)


def test_variables_are_set_and_passed_on_as_asked() -> None:
    options = ("--env", "A=1", "--env", "B=two words=x", "--env", "HOME=/h")
    passed = ("--pass-env", "KEPT", "--pass-env", "NOT_THERE")
    env = {**ENVIRONMENT, "KEPT": "kept", "LOST": "lost"}
    found = looked(*options, *passed, env=env)["env"]
    assert isinstance(found, dict)
    assert (found["A"], found["B"], found["HOME"]) == ("1", "two words=x", "/h")
    assert found["KEPT"] == "kept"
    assert not {"LOST", "NOT_THERE"} & set(found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--top-level",), {"FSPROXY_TOP_LEVEL": "true"}),
        (("--transport", "pipes"), {"FSPROXY_FD": "3,4,5"}),
        (("--env", "FSPROXY_TOP_LEVEL=true"), {"FSPROXY_TOP_LEVEL": "false"}),
        (("--env", "FSPROXY_FD=7"), {"FSPROXY_FD": "3"}),
    ],
)
def test_the_variables_of_the_door_tell_the_truth(
    options: tuple[str, ...], expected: dict[str, str]
) -> None:
    found = looked(*options)["env"]
    assert isinstance(found, dict)
    assert expected.items() <= found.items()


def test_a_child_of_dialect_one_is_told_so() -> None:
    found = looked("--dialect", "1")["env"]
    assert isinstance(found, dict)
    assert found["FSPROXY_VERSION"] == "1"


# spec T1, attack 6: exactly these descriptors, whatever the shell had open.
@pytest.mark.parametrize(
    ("options", "numbers"),
    [((), [0, 1, 2, 3]), (("--transport", "pipes"), [0, 1, 2, 3, 4, 5])],
)
def test_fifty_junk_descriptors_of_the_shell_stay_outside(
    options: tuple[str, ...], numbers: list[int]
) -> None:
    junk = [os.open(os.devnull, os.O_RDWR) for _ in range(50)]
    try:
        for fd in junk:
            os.set_inheritable(fd, True)
        found = looked(*options, close_fds=False)
    finally:
        for fd in junk:
            os.close(fd)
    assert found["fds"] == numbers


def test_a_child_leads_a_session_with_default_signals() -> None:
    outcome = shell(
        "trap '' HUP INT TERM USR1 CHLD PIPE; exec $S run -- "
        "grep -E '^Sig(Ign|Blk)' /proc/self/status"
    )
    assert outcome.out.split() == [b"SigBlk:", b"0" * 16, b"SigIgn:", b"0" * 16]
    assert looked()["leads"] == [True, True]


def test_the_working_directory_is_the_shells_or_the_one_asked_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "sub").mkdir()
    assert looked(cwd=tmp_path)["cwd"] == str(tmp_path)
    assert looked("--cwd", "sub", cwd=tmp_path)["cwd"] == str(tmp_path / "sub")


def test_tmpdir_is_private_empty_and_gone_afterwards(tmp_path: Path) -> None:
    found = looked(env={**ENVIRONMENT, "TMPDIR": str(tmp_path)})
    env = found["env"]
    assert isinstance(env, dict)
    assert env["TMPDIR"].startswith(f"{tmp_path}/")
    assert (found["tmp_mode"], found["tmp"]) == (0o700, [])
    assert list(tmp_path.iterdir()) == []


def test_what_a_child_leaves_in_tmpdir_is_removed_however_it_looks(
    tmp_path: Path,
) -> None:
    script = (
        "mkdir -p $TMPDIR/a/b && touch $TMPDIR/a/b/c && ln -s / $TMPDIR/root &&"
        "chmod 000 $TMPDIR/a/b && chmod 500 $TMPDIR/a && mkfifo $TMPDIR/fifo"
    )
    env = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    outcome = sandhost("run", "--", "sh", "-c", script, env=env)
    assert (outcome.status, outcome.err) == (0, b"")
    assert list(tmp_path.iterdir()) == []
    assert Path("/etc").is_dir()


# spec S4: a fresh root is there for the child alone, and gone with it.
def test_a_fresh_root_is_private_and_removed(tmp_path: Path) -> None:
    env = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    script = "$0 fs put a </etc/hostname; echo ready; read x"
    words = ("run", "--", "sh", "-c", script, SANDHOST)
    with running(*words, stdin=-1, env=env) as process:
        heard(process, b"ready\n")
        (kept,) = tmp_path.rglob("a")
        top = kept.parent.parent
        assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
        # A child with a user of its own passes through, with that user's group.
        way, user = top.stat(), (top / "tmp").stat().st_uid
        passes = stat.S_IXGRP if user != os.geteuid() else 0
        assert stat.S_IMODE(way.st_mode) == 0o700 | passes
        assert way.st_gid == (user if passes else os.getegid())
        assert finished(process).status == 1  # `read` met the end of the file
    assert list(tmp_path.iterdir()) == []


def test_a_fresh_root_is_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    env = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    words = ("run", "--keep", "--", "sh", "-c", "echo kept | $0 fs put a", SANDHOST)
    outcome = sandhost(*words, env=env)
    assert outcome.status == 0
    (kept,) = tmp_path.rglob("a")
    assert kept.read_text() == "kept\n"
    # It is said where.
    assert outcome.said(str(kept.parent))


def test_a_named_root_is_kept_without_asking(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "in").write_text("from outside")
    script = "$0 fs cp in out && $0 fs ls"
    outcome = sandhost("run", "--root", root, "--", "sh", "-c", script, SANDHOST)
    assert (outcome.status, outcome.out, outcome.err) == (0, b"in\nout\n", b"")
    assert (root / "out").read_text() == "from outside"
