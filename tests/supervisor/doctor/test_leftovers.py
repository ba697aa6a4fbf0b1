"""Leftovers of dead hosts are found, and holdings of living ones are not.

Other hosts may live and die on this machine meanwhile, so tests look for their own.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from hostlib.linux import holdings
from supervisor.cli import doctor
from supervisor.cli.doctor import find_leaks, leaks_text
from supervisor.doctor.leftovers import find_leftovers
from supervisor.sandbox import ownership
from supervisor.sandbox.scratch import Scratch
from tests.helpers.spawning import ROOT, all_ended_within, host_command, watching
from tests.helpers.stage import Stage, stage

pytestmark = pytest.mark.slow

__all__ = ["stage"]


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No host of the machine's is found by the environment."""
    monkeypatch.delenv("SANDHOST_CONTROL", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def refusing(code: int) -> Any:
    """Something to call that always fails."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


# ---------------------------------------------------------------- scratch directories


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where scratch directories are made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def scratch_found(tmp: Path) -> list[str]:
    """The scratch directories that are found in one place."""
    report: dict[str, Any] = find_leftovers(str(tmp))
    return [row["path"] for row in report["scratch"]]


# attack 39
async def test_a_dead_hosts_scratch_directory_is_found(tmp: Path) -> None:
    living, kept, dead = Scratch(None), Scratch(None, keep=True), Scratch(None)
    os.close(os.open(f"{dead.root}/.sandhost-0123", os.O_CREAT))
    dead.unlock()
    kept.unlock()
    report: dict[str, Any] = find_leftovers(str(tmp))
    base = os.path.dirname(dead.root)
    assert [row["path"] for row in report["scratch"]] == [base]
    assert report["staged"] == [{"directory": dead.root, "name": ".sandhost-0123"}]
    assert not report["clean"]
    assert report["counts"]["scratch"] == report["counts"]["staged"] == 1
    for scratch in (living, kept, dead):
        assert await scratch.remove() is None


def test_what_only_has_such_a_name_is_not_found(tmp: Path) -> None:
    (tmp / "sandhost-file").touch()
    (tmp / "sandhost-link").symlink_to(tmp)
    (tmp / "other").mkdir()
    assert scratch_found(tmp) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_directory_is_not_found(tmp: Path) -> None:
    (tmp / "sandhost-mine").mkdir()
    (tmp / "sandhost-theirs").mkdir()
    os.chown(tmp / "sandhost-theirs", 65_534, 65_534)
    assert scratch_found(tmp) == [str(tmp / "sandhost-mine")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_directory_that_was_made_for_a_child_of_root_is_found(tmp: Path) -> None:
    (tmp / "sandhost-kep1").mkdir(0o710)
    os.chown(tmp / "sandhost-kep1", ownership.KEEPER, 1_500_000_001)
    assert scratch_found(tmp) == [str(tmp / "sandhost-kep1")]
    scratch = Scratch(None, where=str(tmp))
    assert Path(scratch.tmp).parent.stat().st_uid == ownership.KEEPER
    assert scratch_found(tmp) == [str(tmp / "sandhost-kep1")]
    trio.run(scratch.remove)
    assert list(tmp.glob("sandhost-*")) == [tmp / "sandhost-kep1"]


def test_a_directory_that_is_locked_meanwhile_is_not_found(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp / "sandhost-new").mkdir()
    locks = []

    def meanwhile(*_: object) -> None:
        lock = os.open(tmp / "sandhost-new", os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        locks.append(lock)

    monkeypatch.setattr("select.select", meanwhile)
    assert scratch_found(tmp) == []
    os.close(locks[0])


def test_what_may_not_be_looked_at_is_unknown_and_not_clean(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp / "sandhost-secret").mkdir()
    monkeypatch.setattr(
        "supervisor.doctor.leftovers.is_abandoned", refusing(errno.EACCES)
    )
    report: dict[str, Any] = find_leftovers(str(tmp))
    (line,) = [text for text in report["unknown"] if "sandhost-secret" in text]
    assert "Permission denied" in line
    assert "unknown: scratch directory" in leaks_text("test", report)


# ---------------------------------------------------------------- processes


def launchpads(tmp: Path) -> dict[int, dict[str, Any]]:
    """The launchpads without a host that are found, by pid."""
    report: dict[str, Any] = find_leftovers(str(tmp))
    return {row["pid"]: row for row in report["launchpads"]}


@contextlib.contextmanager
def dead_host(tmp: Path) -> Iterator[tuple[int, list[int]]]:
    """A host that was killed while its launchpad was stopped, so that it stays.

    Gives the launchpad's pid and those of what is beneath it.
    """
    said = tmp / "said"
    command = host_command(
        said, 1, ("/bin/sh", "-c", "sleep 1000 & echo $$ $! >&3; wait")
    )
    host = subprocess.Popen(command, cwd=ROOT)
    while not said.exists() or said.read_text().count("\n") < 2:
        assert host.poll() is None
    words = said.read_text().split()
    pad = int(words[words.index("launchpad") + 1])
    beneath = [int(word) for word in words if word.isdigit() and int(word) != pad]
    with watching([pad, *beneath]) as watched:
        signal.pidfd_send_signal(watched[0].pidfd, signal.SIGSTOP)
        host.kill()
        host.wait()
        try:
            yield pad, beneath
        finally:
            signal.pidfd_send_signal(watched[0].pidfd, signal.SIGCONT)
            assert all_ended_within(watched, 5)


# attack 39
def test_a_launchpad_without_its_host_is_found_until_it_has_ended(
    tmp_path: Path,
) -> None:
    with dead_host(tmp_path) as (pad, beneath):
        row = launchpads(tmp_path)[pad]
        assert row["beneath"] == len(beneath) == 2
        assert row["name"] == "sandhost-pad"
        _, status = find_leaks(None, tmp=str(tmp_path))
        assert status == doctor.FOUND
    assert pad not in launchpads(tmp_path)


async def test_a_living_hosts_launchpad_is_not_found(stage: Stage) -> None:
    await stage.puppet()
    assert stage.launchpad not in launchpads(stage.where)


def test_a_process_that_only_calls_itself_so_is_not_found(tmp_path: Path) -> None:
    shutil.copy("/bin/sleep", tmp_path / "sandhost-pad")
    with subprocess.Popen([tmp_path / "sandhost-pad", "1000"]) as impostor:
        try:
            assert impostor.pid not in launchpads(tmp_path)
        finally:
            impostor.kill()


def test_a_parent_that_may_not_be_looked_at_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = holdings.read_file
    parents = set()

    def closed(path: str) -> bytes | None:
        return None if path in parents else read(path)

    with dead_host(tmp_path) as (pad, _):
        facts = holdings.process_facts(pad)
        assert facts is not None
        parents.add(f"/proc/{facts.parent}/status")
        monkeypatch.setattr(holdings, "read_file", closed)
        report: dict[str, Any] = find_leftovers(str(tmp_path))
        monkeypatch.undo()
        assert pad not in [row["pid"] for row in report["launchpads"]]
        assert [text for text in report["unknown"] if f"launchpad {pad}:" in text]


def orphans(tmp: Path) -> list[int]:
    """The pids of orphans that are found."""
    report: dict[str, Any] = find_leftovers(str(tmp))
    return [row["pid"] for row in report["orphans"]]


# attack 39
def test_a_process_that_had_a_door_and_no_launchpad_is_found(tmp_path: Path) -> None:
    command = ["/bin/sleep", "1000"]
    with (
        subprocess.Popen(command, env={"FSPROXY_FD": "3"}) as orphan,
        subprocess.Popen(command, env={"NOT_FSPROXY_FD": "3"}) as stranger,
    ):
        try:
            pids = orphans(tmp_path)
        finally:
            orphan.kill()
            stranger.kill()
    assert orphan.pid in pids
    assert stranger.pid not in pids


async def test_a_living_hosts_child_is_no_orphan(stage: Stage) -> None:
    puppet = await stage.puppet()
    daemon = await puppet.do("daemon()")
    assert not {puppet.pid, daemon} & set(orphans(stage.where))
