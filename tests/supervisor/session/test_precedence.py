"""The host goes before others while many clients ask at once, and only then (ADR 63)."""

import errno
import os
import subprocess
import sys

import pytest

from supervisor.session.precedence import CROWD, TURNS, Precedence
from tests.helpers.spawning import ROOT

pytestmark = pytest.mark.slow

# More than once in a tenth of a second takes a right of its own (CAP_SYS_ADMIN).
ASKS = "for _ in range(2): open('/proc/self/autogroup', 'w').write('-10')"


def may_not() -> bool:
    """Whether this machine groups no processes by session, or lets nobody here ask."""
    tried = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ASKS],
        capture_output=True,
        check=False,
        start_new_session=True,
    )
    return tried.returncode != 0


only_where_it_may = pytest.mark.skipif(
    may_not(),
    reason="takes a kernel that groups processes by session, and the right to ask",
)

# What stands behind "nice" of its group, after each step; its session is its own.
ALONE = """
import re, sys
from supervisor.session.precedence import CROWD, TURNS, Precedence
def nice():
    return int(re.search(r"nice (-?\\d+)", open("/proc/self/autogroup").read())[1])
one = Precedence()
def turns(number, ready):
    for _ in range(number):
        one.turn(ready)
    print(nice(), one.is_ahead)
turns(TURNS - 1, CROWD)
turns(1, CROWD - 1)
turns(TURNS, CROWD)
turns(TURNS - 1, 1)
turns(1, CROWD)
turns(TURNS, 1)
turns(TURNS, CROWD)
one.rest()
print(nice(), one.is_ahead)
"""

# A host whose children ask without a pause until they are told to end, and then rests.
HOST = """
from supervisor.launchpad.start import start_launchpad
launchpad = start_launchpad()
import os, sys, trio
from supervisor.host import open_host
from supervisor.scratch import Scratch
from supervisor.spec import ChildSpec, minimal_env
FLOOD = "cat <&3 >/dev/null & exec yes PING >&3"
def nice():
    return open("/proc/self/autogroup").read().split()[-1]
async def until(wanted):
    with trio.fail_after(30):
        while nice() != wanted:
            await trio.sleep(0.01)
    print(wanted, flush=True)
async def main(count):
    async with open_host(launchpad) as host:
        children = []
        for _ in range(count):
            scratch = Scratch(None)
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            spec = ChildSpec(
                ("/bin/sh", "-c", FLOOD), cwd=scratch.tmp, root=scratch.root,
                env=minimal_env(scratch.tmp), stdio=(null,) * 3,
            )
            children.append((await host.spawn(spec), scratch))
        await until("-10")
        for child, scratch in children:
            child.stop(0)
            await child.wait_gone()
            await scratch.remove()
        await until("0")
trio.run(main, int(sys.argv[1]))
"""


def run(
    program: str, *words: str, leads: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a program in a new session, as the one that leads it or as one of it."""
    argv = [sys.executable, "-c", program, *words]
    if not leads:  # the shell does, and has something to do after it
        argv = ["/bin/sh", "-c", '"$@"; exit $?', "sh", *argv]
    return subprocess.run(
        argv,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
    )


@only_where_it_may
def test_a_crowd_is_as_many_turns_in_a_row_and_so_is_its_end() -> None:
    told = run(ALONE)
    assert told.stderr == ""
    before, ahead = "0 False", "-10 True"
    assert told.stdout.splitlines() == [
        before,
        before,
        ahead,
        ahead,
        ahead,
        before,
        ahead,
        before,
    ]


@only_where_it_may
def test_who_does_not_lead_its_session_leaves_its_group_alone() -> None:
    told = run(ALONE, leads=False)
    assert told.stderr == ""
    assert set(told.stdout.splitlines()) == {"0 False"}


# Who was started by the first process of a machine, and no session begun since, has no
# group of its own: it says so by an empty line, and takes no weight.
@pytest.mark.parametrize("fault", [errno.EINVAL, errno.EPERM])
def test_who_has_no_group_of_its_own_asks_once(
    monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    asked: list[bytes] = []

    def refuse(nice: bytes) -> None:
        asked.append(nice)
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr("supervisor.session.precedence._ask_for", refuse)
    monkeypatch.setattr(os, "getsid", lambda _pid: os.getpid())
    one = Precedence()
    for _ in range(3 * TURNS):
        one.turn(CROWD)
    assert not one.is_ahead
    assert asked == [b"-10"]


def test_turns_before_a_rest_make_no_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    monkeypatch.setattr("supervisor.session.precedence._ask_for", asked.append)
    monkeypatch.setattr(os, "getsid", lambda _pid: os.getpid())
    one = Precedence()
    for _ in range(3):
        for _ in range(TURNS - 1):
            one.turn(CROWD)
        one.rest()
    assert not asked


def test_who_may_not_ask_goes_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.session.precedence._GROUP", "/nowhere/autogroup")
    monkeypatch.setattr(os, "getsid", lambda _pid: os.getpid())
    one = Precedence()
    for _ in range(3 * TURNS):
        one.turn(CROWD)
    assert not one.is_ahead


# S5
@only_where_it_may
def test_a_host_is_ahead_of_a_flood_and_as_others_after_it() -> None:
    told = run(HOST, "6")
    assert told.stderr == ""
    assert told.stdout.split() == ["-10", "0"]
