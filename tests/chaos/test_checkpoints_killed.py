"""A host that is killed at any system call of a checkpoint leaves whole checkpoints.

strace sends SIGKILL at the N-th call of each kind, for N = 1, 2, ... until a run comes
through. After each the checkpoints are opened anew: what was there before is there, what
was told to be kept is there, and all that is there gives back every byte.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.helpers.command import read_until
from tests.helpers.contents import asking, text_of
from vfs.content import TOOLS, Checkpoints, Process, Shared, Store

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(180)]

CALLS = (
    *("openat", "write", "pwrite64", "fsync", "fdatasync", "unlink", "unlinkat"),
    *("renameat", "rename", "renameat2", "ftruncate", "mkdir", "close", "chmod"),
)
"""Where state may change, or a descriptor with it."""

EXPECTED = {"openat", "write", "pwrite64", "fsync", "close"}
"""What must have killed at least once, or the test has missed it."""

MOST_CALLS = 60

PROGRAM = Path(__file__).parents[1] / "helpers" / "children" / "checkpointer.py"


class Keeper:
    """A program that makes checkpoints, one traced process each."""

    def __init__(self, strace: str, where: Path) -> None:
        self._strace = strace
        self._where = where
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

    def run(self, inject: str) -> str:
        """Make a checkpoint under an injected fault; its id, or "" if it was killed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        os.write(stdin.fileno(), f"{self._where}\n".encode())
        pid = self._line()
        calls = ",".join(CALLS)
        words = ("-p", pid, "-e", f"trace={calls}", "-e", f"inject={inject}")
        log = str(self._where) + ".log"
        with subprocess.Popen(
            [self._strace, *words, "-o", log], stderr=subprocess.PIPE
        ) as tracer:
            assert tracer.stderr is not None
            said = read_until(tracer.stderr.fileno(), b"\n")
            if b"attached" not in said:
                os.write(stdin.fileno(), b"x")
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
    process = Process(Shared(Store(), TOOLS, checkpoints=checkpoints, owner="owner"))
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
    return found


@pytest.mark.parametrize("call", CALLS)
async def test_a_kill_at_any_call_leaves_whole_checkpoints(
    tmp_path: Path, call: str
) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is missing")
    where = tmp_path / "state"
    keeper = Keeper(strace, where)
    try:
        known: set[str] = set()
        for number in range(1, MOST_CALLS):
            kept = keeper.run(f"{call}:signal=SIGKILL:when={number}")
            now = set(await seen(where))
            assert known <= now, "what was there is gone"
            assert not kept or kept in now, "what was told to be kept is not there"
            known = now
            if kept:
                assert number > 1 or call not in EXPECTED
                break
        else:
            pytest.fail(f"more than {MOST_CALLS} calls of {call}")
    finally:
        keeper.close()
