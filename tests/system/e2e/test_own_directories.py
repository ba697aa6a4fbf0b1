"""A child's own directories, and its host's, that lie in its working directory."""

import json
import os
import stat
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from supervisor.sandbox.ownership import KEEPER
from tests.helpers.command import (
    ENVIRONMENT,
    TIMEOUT_S,
    Outcome,
    heard,
    running,
    sandhost,
)

pytestmark = pytest.mark.slow

needs_users = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root gives children users"
)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A directory that only its owner may enter, with a file that only he may read."""
    tmp_path.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir(mode=0o700)
    (work / "note").write_text("mine\n")
    (work / "note").chmod(0o600)
    return work


def in_tmp(tmp: Path) -> dict[str, str]:
    """Return the environment of a host that makes its directories there."""
    return {**ENVIRONMENT, "TMPDIR": str(tmp)}


def run(work: Path, tmp: Path, script: str, *options: str | Path) -> Outcome:
    """Run a shell in a directory, its own directories in another one."""
    words = ("run", *options, "--", "sh", "-c", script)
    return sandhost(*words, cwd=work, env=in_tmp(tmp))


# spec face: COMMAND, its installation and --cwd can always be read.
@pytest.mark.nobody
@pytest.mark.parametrize("where", [".", "tmp", "a/b", "link"])
def test_a_working_directory_around_tmpdir_is_readable(work: Path, where: str) -> None:
    (work / "tmp").mkdir(mode=0o700)
    (work / "a" / "b").mkdir(parents=True)
    (work / "link").symlink_to("a")
    script = (
        "ls; cat note; echo own >$TMPDIR/file && cat $TMPDIR/file; ls -A $TMPDIR/.."
    )
    outcome = run(work, work / where, script)
    names = outcome.out.decode().splitlines()
    assert (outcome.status, outcome.err) == (0, b"")
    assert {"a", "link", "note", "tmp"} < {*names}
    assert names[-4:] == ["own", "home", "run", "tmp"]
    assert not list(work.rglob("sandhost-*")), "and nothing is left"


@pytest.mark.nobody
def test_its_private_root_is_not_to_be_seen_there(work: Path) -> None:
    script = (
        "echo s3cret | sandhost fs put secret && sandhost fs cat secret;"
        " cat $TMPDIR/../root/secret; touch $TMPDIR/../made; find . -name secret"
    )
    outcome = run(work, work, script)
    assert outcome.out == b"s3cret\n"
    said = outcome.err.decode().splitlines()
    assert ["No such file" in said[0], "Read-only" in said[1]] == [True, True]
    assert len(said) == 2


@pytest.mark.parametrize("by_link", [False, True])
def test_a_program_may_lie_beside_its_own_directories(
    work: Path, by_link: bool
) -> None:
    (work / "tmp").mkdir(mode=0o700)
    tool = work / "tmp" / "tool"
    tool.write_text("#!/bin/sh\ncat note; echo own >$TMPDIR/file && cat $TMPDIR/file\n")
    tool.chmod(0o700)
    if by_link:
        (work / "run").symlink_to("tmp/tool")
        tool = work / "run"
    outcome = sandhost("run", "--", tool, cwd=work, env=in_tmp(work / "tmp"))
    assert (outcome.status, outcome.out, outcome.err) == (0, b"mine\nown\n", b"")


# A state directory that nobody's daemon has at the moment is hidden too; what a host is
# to run in it is not.
@pytest.mark.nobody
@pytest.mark.parametrize("by_link", [False, True])
def test_what_is_run_in_a_hidden_directory_is_there(work: Path, by_link: bool) -> None:
    state = work / "state"
    state.mkdir(mode=0o700)
    (state / "ledger").write_text("s3cret")
    tool = state / "tool"
    if by_link:
        tool.symlink_to("/bin/sh")
    else:
        tool.write_text('#!/bin/sh\nexec sh "$@"\n')
        tool.chmod(0o700)
    config = work / "c.toml"
    config.write_text(f"[host]\nstate_dir = '{state}'\n")
    words = ("--config", config, "--", tool, "-c", "ls state; cat state/ledger")
    outcome = sandhost("run", *words, cwd=work, env=in_tmp(work))
    assert outcome.out == b"tool\n"
    assert b"No such file" in outcome.err


HAS = "echo s3cret | sandhost fs put secret; echo own >$TMPDIR/own; echo up; read go"
LOOKS = "exec 2>&1; echo up; read go; ls -AR; cat sandhost-*/root/* sandhost-*/tmp/own"


# attack 25: what is root's is shown as the child's, but another child's is nobody's.
@needs_users
@pytest.mark.parametrize("order", [(HAS, LOOKS), (LOOKS, HAS)], ids=["before", "after"])
def test_what_another_host_makes_there_is_closed(
    work: Path, order: tuple[str, str]
) -> None:
    changes: dict[str, Any] = {
        "cwd": work,
        "env": in_tmp(work),
        "stdin": subprocess.PIPE,
    }
    said = {}
    with ExitStack() as stack:
        begun = {}
        for script in order:
            words = ("run", "--", "sh", "-c", script)
            begun[script] = stack.enter_context(running(*words, **changes))
            heard(begun[script], b"up\n")
        for script in (LOOKS, HAS):
            said[script], _ = begun[script].communicate(b"go\n", TIMEOUT_S)
            assert begun[script].returncode == (1 if script == LOOKS else 0)
    lines = said[LOOKS].decode().splitlines()
    names = [line for line in lines if line.startswith("sandhost-")]
    assert len(names) == 2
    assert sum(line.startswith("ls: ") for line in lines) == 1
    (entered,) = {line for line in lines if line.count("/") == 1 and line[-1] == ":"}
    assert entered[2:-1] in names
    assert "s3cret" not in lines
    assert "secret" not in lines


@needs_users
def test_who_stays_root_has_a_way_to_its_own(work: Path) -> None:
    config = work / "c.toml"
    # By its own way, for nothing is mounted, and without any capability.
    config.write_text("[sandbox.root]\nlayers = ['seccomp']\n")
    script = "id -u; cat note; echo own >$TMPDIR/file && cat $TMPDIR/file"
    for options in (("--sandbox", "none"), ("--config", config, "--sandbox", "root")):
        outcome = run(work, work, script, *options)
        assert (outcome.status, outcome.out) == (0, b"0\nmine\nown\n"), outcome


# Everybody has files in a directory like /tmp; what is root's there stays its own.
@needs_users
@pytest.mark.parametrize("tmp", [".", "../elsewhere"])
def test_a_directory_of_everybodys_is_as_it_is(work: Path, tmp: str) -> None:
    (work.parent / "elsewhere").mkdir()
    work.chmod(0o1777)
    script = "cat note; ls; echo own >$TMPDIR/file && cat $TMPDIR/file"
    outcome = run(work, work / tmp, script)
    assert outcome.err == b"cat: note: Permission denied\n"
    assert outcome.out.endswith(b"own\n")
    work.chmod(0o777)
    assert run(work, work / tmp, script).err == b""


@needs_users
def test_a_closed_directory_in_one_of_everybodys_is_told(work: Path) -> None:
    (work / "closed").mkdir(mode=0o700)
    work.chmod(0o1777)
    journal = work.parent / "journal"
    script = "echo lost >$TMPDIR/file"
    outcome = run(work, work / "closed", script, "--journal", journal)
    assert any(line.startswith(b"sh: ") for line in outcome.err.splitlines())
    assert f"own directories: {work}/closed/".encode() in outcome.err
    assert f" lies beneath {work}/closed, which only".encode() in outcome.err
    events = map(json.loads, journal.read_text().splitlines())
    (spawned,) = [line for line in events if line["event"] == "child.spawned"]
    assert "may enter" in spawned["isolation"]["missing"]["own directories"]
    (work / "closed").chmod(0o711)
    outcome = run(work, work / "closed", "echo own >$TMPDIR/file")
    assert (outcome.status, outcome.err) == (0, b"")


@needs_users
def test_its_own_directories_are_nobodys_until_they_are_given(work: Path) -> None:
    script = "echo up; read go"
    with running(
        "run",
        "--",
        "sh",
        "-c",
        script,
        cwd=work,
        env=in_tmp(work),
        stdin=subprocess.PIPE,
    ) as process:
        heard(process, b"up\n")
        (made,) = work.glob("sandhost-*")
        found = made.stat()
        assert found.st_uid == KEEPER
        assert stat.S_IMODE(found.st_mode) == 0o710
        assert found.st_gid == (made / "tmp").stat().st_uid > KEEPER
        assert (made / "root").stat().st_uid == 0
        process.communicate(b"go\n", TIMEOUT_S)
    assert process.returncode == 0
    assert not made.exists()


# A checkpoint of one child's is none of another's to read.
@pytest.mark.nobody
def test_what_a_host_keeps_for_the_time_being_is_hidden(work: Path) -> None:
    config = work / "c.toml"
    config.write_text('[tools]\nenabled = ["read_fd"]\n')
    script = "exec 2>&1; ls -d sandhost-fds-*; ls -A sandhost-fds-*; echo up; read go"
    words = ("run", "--config", config, "--", "sh", "-c", script)
    changes: dict[str, Any] = {"cwd": work, "env": in_tmp(work)}
    with running(*words, **changes, stdin=subprocess.PIPE) as process:
        said = heard(process, b"up\n").decode().splitlines()
        (made,) = work.glob("sandhost-fds-*")
        assert said == [made.name, "up"]
        assert list(made.iterdir())
        assert made.stat().st_uid == (KEEPER if os.geteuid() == 0 else os.geteuid())
        process.communicate(b"go\n", TIMEOUT_S)


def test_a_nested_child_has_them_too(work: Path) -> None:
    script = "cat note; echo own >$TMPDIR/file && cat $TMPDIR/file; ls -A $TMPDIR/../.."
    words = ("sandhost", "relay", "--", "sh", "-c", script)
    changes: dict[str, Any] = {"cwd": work, "env": in_tmp(work)}
    outcome = sandhost("run", "--", *words, **changes)
    assert (outcome.status, outcome.err) == (0, b"")
    assert outcome.out == b"mine\nown\nhome\nrun\ntmp\n"
