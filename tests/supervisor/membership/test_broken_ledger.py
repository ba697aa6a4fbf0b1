"""A member's ledger and launchpad, where the machine or a file is broken."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, cast

import pytest

from hostlib.linux import processes
from supervisor.cluster.peers import stream_by
from supervisor.config.fleet import FleetSection
from supervisor.fleet.messages import Session
from supervisor.fleet.store import FILE, FleetStore
from supervisor.membership.base_keeper import BaseKeeper
from supervisor.membership.bases import Bases
from supervisor.membership.member import Member
from supervisor.membership.session_launchpad import SessionLaunchpad

if TYPE_CHECKING:
    from pathlib import Path

    from supervisor.host import Host
    from supervisor.kept_children.roster import Children


# spec FL2: a ledger that no node has written is told, with what to do.
async def test_a_ledger_that_is_none_is_told(tmp_path: Path) -> None:
    FleetStore(str(tmp_path)).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as base, base:
        base.execute("INSERT INTO rows VALUES ('ledger', '', x'c1')")
    host, children = cast("Host", None), cast("Children", None)
    bases = BaseKeeper(Bases(str(tmp_path), 1, 1), stream_by(""))
    member = Member(host, children, FleetSection(), str(tmp_path), bases)
    with pytest.raises(OSError, match=r"cannot read the ledger.*move it away"):
        await member.run()


# spec FL6: a launchpad that cannot be named in the ledger is ended, and nothing is left.
def test_a_launchpad_without_a_row_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def fail(pid: int) -> None:
        pids.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(processes, "read_parent_and_start", fail)
    with pytest.raises(OSError, match="open files"):
        SessionLaunchpad(cast("Host", None), Session("L", 1))
    assert set(os.listdir("/proc/self/fd")) == before
    (pid,) = pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
