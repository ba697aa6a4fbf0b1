"""A kill or a full disk at each system call of a checkpoint or an export.

strace sends SIGKILL at the N-th call of each kind, for N = 1, 2, ... until a run comes
through. After each the checkpoints are opened anew: what was there before is there, what
was told to be kept is there, and all that is there gives back every byte.  In the same
way each call that can fails once for want of room: what was there before is untouched, to
the byte, and the failure is told.
"""

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from supervisor.llmfd import TOOLS, Checkpoints, Process, ProcessParts, Store
from tests.helpers.children.checkpointer import EXPORTED
from tests.helpers.command import read_until
from tests.helpers.contents import asking, text_of
from tests.helpers.rounds import LONG

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(400)]

CALLS = (
    *("openat", "write", "pwrite64", "fsync", "fdatasync", "unlink", "unlinkat"),
    *("renameat", "rename", "renameat2", "ftruncate", "mkdir", "close", "chmod"),
)
"""Where state may change, or a descriptor with it."""

EXPECTED = {"openat", "write", "pwrite64", "fsync", "close"}
"""Calls that must have killed at least once, or the test has missed them."""

GOING = ("pwrite64", "fdatasync", "unlinkat")
"""Where a deletion changes what is there; each of them kills at least once."""

FALLIBLE = (
    *("openat", "openat2", "write", "pwrite64", "fsync", "fdatasync", "ftruncate"),
    *("mkdir", "linkat", "renameat", "rename", "renameat2"),
)
"""Calls that may fail for want of room."""

EXPECTED_FAILURES = {
    "keep": {"openat", "write", "pwrite64"},
    "write": {"pwrite64", "openat"},
    "append": {"write", "openat"},
    "insert": {"pwrite64", "openat"},
}

MOST_CALLS = 60

PROGRAM = Path(__file__).parents[2] / "helpers" / "children" / "checkpointer.py"


class Keeper:
    """A program that makes checkpoints, one traced process each.

    Attributes:
        where: the directory of the test that has it now.
    """

    where: Path

    def __init__(self, strace: str) -> None:
        self._strace = strace
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            cwd=PROGRAM.parents[3],
            env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[3])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _line(self) -> str:
        assert self._process.stdout is not None
        return read_until(self._process.stdout.fileno(), b"\n").decode().strip()

    def run(self, inject: str, kind: str = "keep") -> str:
        """Do something under an injected fault; what it told, "" if it was killed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        os.write(stdin.fileno(), f"{kind} {self.where}\n".encode())
        pid = self._line()
        calls = ",".join({*CALLS, inject.partition(":")[0]})
        words = ("-f", "-p", pid, "-e", f"trace={calls}", "-e", f"inject={inject}")
        log = str(self.where) + ".log"
        with subprocess.Popen(
            [self._strace, *words, "-o", log], stderr=subprocess.PIPE
        ) as tracer:
            assert tracer.stderr is not None
            said = read_until(tracer.stderr.fileno(), b"\n")
            if b"attached" not in said:
                os.write(stdin.fileno(), b"x")
                read_until(stdout.fileno(), b"over\n")
                pytest.skip(f"cannot trace: {said.decode().strip()}")
            os.write(stdin.fileno(), b"x")
            out = read_until(stdout.fileno(), b"over\n").decode()
            tracer.wait()
        return out.removesuffix("over\n").strip()

    def close(self) -> None:
        """End the program."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


async def seen(where: Path) -> dict[str, str]:
    """Open the checkpoints anew and restore each; return label by id."""
    checkpoints = Checkpoints(str(where))
    process = Process(
        ProcessParts(Store(), TOOLS, checkpoints=checkpoints, owner="owner")
    )
    found = {}
    listed = await asking(process, "list_checkpoints")
    for row in listed:
        label, checkpoint_id = row.get("label", ""), row.get("id", "")
        answer = await asking(process, "restore_process", checkpoint_id)
        assert answer.tag == "restore", ET.tostring(answer)
        first = await asking(process, "read_fd", fd="fd:1", read_all=True)
        assert text_of(first) == f"{label}\n" * 1000
        raw = process.table.fds[3].content.original.data[:]
        assert raw == b"\xff" + label.encode() * 500
        assert process.messages == [{"role": "user", "content": label}]
        found[checkpoint_id] = label
    process.close()
    checkpoints.close()
    with closing(sqlite3.connect(where / "checkpoints.sqlite")) as database:
        held = {key for (key,) in database.execute("SELECT key FROM held")}
    assert set(os.listdir(where / "blobs")) == held, "contents that nobody holds"
    return found


@pytest.fixture(scope="module")
def program() -> Iterator[Keeper]:
    """Return what makes checkpoints and exports for all tests, each in its directory."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is missing")
    made = Keeper(strace)
    yield made
    made.close()


@pytest.fixture
def keeper(program: Keeper, tmp_path: Path) -> Keeper:
    """Return what makes checkpoints and exports in `tmp_path / "state"`."""
    program.where = tmp_path / "state"
    return program


@pytest.mark.parametrize("call", CALLS)
async def test_a_kill_at_any_call_leaves_whole_checkpoints(
    keeper: Keeper, call: str
) -> None:
    known: set[str] = set()
    for number in range(1, MOST_CALLS):
        kept = keeper.run(f"{call}:signal=SIGKILL:when={number}")
        now = set(await seen(keeper.where))
        assert known <= now, "what was there is gone"
        assert not kept or kept in now, "what was told to be kept is not there"
        known = now
        if kept:
            assert number > 1 or call not in EXPECTED
            return
    pytest.fail(f"more than {MOST_CALLS} calls of {call}")


@pytest.mark.parametrize("kind", ["forget", "rotate"])
@pytest.mark.parametrize("call", GOING)
async def test_a_kill_at_any_call_of_a_deletion_takes_one_or_none(
    keeper: Keeper, call: str, kind: str
) -> None:
    known = list(await seen(keeper.where))
    for number in range(1, MOST_CALLS):
        while len(known) < 2:
            known.append(keeper.run("mkdir:error=ENOSPC:when=99"))
        told = keeper.run(f"{call}:signal=SIGKILL:when={number}", kind)
        now = list(await seen(keeper.where))
        if kind == "forget":
            assert now in (known, known[1:])
            assert not told or (told, now) == (known[0], known[1:])
        else:
            assert now == known or (now[:-1], len(now)) == (known[1:], len(known))
            assert not told or now[-1] == told
        known = now
        if told:
            assert number > 1
            return
    pytest.fail(f"more than {MOST_CALLS} calls of {call}")


def until_it_works(keeper: Keeper, kind: str, call: str) -> Iterator[str]:
    """Let the N-th call fail, N = 1, 2, ... until nothing does; yield what was told."""
    for number in range(1, MOST_CALLS):
        told = keeper.run(f"{call}:error=ENOSPC:when={number}", kind)
        assert told, "it died of a full disk"
        yield told
        log = Path(f"{keeper.where}.log").read_text()
        if "(INJECTED)" not in log:
            assert number > 1 or call not in EXPECTED_FAILURES[kind]
            return
    pytest.fail(f"more than {MOST_CALLS} calls of {call}")


@pytest.mark.parametrize("call", FALLIBLE)
async def test_a_full_disk_at_any_call_leaves_the_checkpoints_there_were(
    keeper: Keeper, call: str
) -> None:
    known = {keeper.run("mkdir:error=ENOSPC:when=99")}
    for told in until_it_works(keeper, "keep", call):
        now = set(await seen(keeper.where))
        if told.startswith("failed: "):
            # A commit whose last flush failed may be there all the same, and whole.
            assert known <= now, told
            assert len(now - known) <= (call == "fdatasync")
            assert now == known or "may be there all the same" in told
        else:
            assert now == known | {told}
        known = now


def is_named(keeper: Keeper) -> bool:
    """Tell whether the failure came behind the call that made the new file visible."""
    before = Path(f"{keeper.where}.log").read_text().partition("(INJECTED)")[0]
    lines = before.splitlines()[:-1]
    return any("renameat" in line and ', "out"' in line for line in lines)


EXPORTS = [
    pytest.param(call, mode, id=f"{call}-{mode}")
    for one, call in enumerate(FALLIBLE)
    for two, mode in enumerate(("write", "append", "insert"))
    if LONG or call in EXPECTED_FAILURES[mode] or (one + two) % 3 == 0
]
"""In the short form some calls fail in one mode, the next one in turn; in the long in all."""


@pytest.mark.parametrize(("call", "mode"), EXPORTS)
def test_a_full_disk_at_any_call_of_an_export_leaves_the_old_file(
    keeper: Keeper, call: str, mode: str
) -> None:
    old = "the old content\n" * 1000
    new = {"write": EXPORTED, "append": old + EXPORTED, "insert": EXPORTED + old}[mode]
    root = keeper.where / "root"
    root.mkdir(parents=True)
    out = root / "out"
    out.write_text(old)
    for told in until_it_works(keeper, mode, call):
        if 'success="true"' in told:
            assert out.read_text() == new
        else:
            assert "No space left on device" in told, told
            # The flush of the directory comes after the file has its name.
            assert out.read_text() == (new if is_named(keeper) else old)
            assert ("new content stands there, whole" in told) == is_named(keeper)
        out.write_text(old)
        assert os.listdir(root) == ["out"]
