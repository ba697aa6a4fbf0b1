"""Every system call of the write path fails once, or is the host's last one.

strace injects the N-th call's failure, or a SIGKILL at it, for N = 1, 2, ... until a run
comes through without, in the host's main thread and in its worker: an error must reach the child as one true line, and the file must
hold whole WRITEs that were acknowledged, or the old content; never a mixture.
"""

import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.children.scripted import PIECES
from tests.helpers.command import TIMEOUT_S, read_until
from tests.helpers.hostprocess import HostProcess, Hosts
from tests.helpers.hosts import CHILDREN

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(120)]

OLD = b"the old content\n"
NEW = b"".join(PIECES)

FALLIBLE = "pwrite64,openat2,openat,linkat,renameat,renameat2,ftruncate,fsync,fdatasync"
"""What may fail for a reason that is the disk's."""

WRITE_PATH = f"{FALLIBLE},write,close,unlinkat"
"""Where the host is killed: replies and the give-back of descriptors too."""

MODES = [("direct", "none"), ("on-close", "none"), ("on-close", "close")]

EXPECTED = {
    ("main", MODES[0]): {"openat2", "ftruncate", "pwrite64"},
    ("main", MODES[1]): {"openat2", "openat", "pwrite64"},
    ("main", MODES[2]): {"openat2", "openat", "pwrite64"},
    ("worker", MODES[0]): {"pwrite64"},
    ("worker", MODES[1]): {"pwrite64", "linkat", "renameat"},
    ("worker", MODES[2]): {"pwrite64", "linkat", "renameat", "fsync", "openat"},
}
"""What must have failed at least once, or the test has missed it."""

MOST_CALLS = 60
"""Far more than the write path has: a loop that gets there never ends."""

WRITER = (sys.executable, "-I", "-S", str(CHILDREN / "scripted.py"))


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run left.

    Attributes:
        replies: the reply lines that the child saw.
        data: the file's content.
        strange: other names in the root.
        calls: the calls at which something was injected, as strace words them.
        last: the last call of the host before it was killed.
    """

    replies: tuple[bytes, ...]
    data: bytes
    strange: tuple[str, ...]
    calls: tuple[str, ...]
    last: str

    @property
    def acknowledged(self) -> bytes:
        """What the child was told to be written."""
        told = self.replies[1 : 1 + len(PIECES)]
        pairs = zip(PIECES, told, strict=False)
        return b"".join(piece for piece, reply in pairs if reply.startswith(b"OK"))

    @property
    def is_closed(self) -> bool:
        """Whether the child was told that its file is closed."""
        return self.replies[-1:] == (b"OK",)


@contextmanager
def traced(tid: int, inject: str, log: Path) -> Iterator[None]:
    """Trace one thread of a host from outside."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is missing")
    calls = inject.partition(":")[0]
    words = ["-p", str(tid), "-e", f"trace={calls}", "-e", f"inject={inject}"]
    with subprocess.Popen(
        [strace, *words, "-o", str(log)], stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stderr is not None
            said = read_until(process.stderr.fileno(), b"\n")
            if b"attached" not in said:
                pytest.skip(f"cannot trace: {said.decode().strip()}")
            yield
        finally:
            process.terminate()
            process.stderr.read()


def thread_of(host: HostProcess, which: str) -> int:
    """The main thread of a host, or its one worker."""
    if which == "main":
        return host.pid
    (worker,) = {int(tid) for tid in os.listdir(f"/proc/{host.pid}/task")} - {host.pid}
    return worker


def play(
    hosts: Hosts, where: Path, mode: tuple[str, str], which: str, inject: str
) -> Seen:
    """Run the scripted child in a host with one fault in one of its threads."""
    root, log, begin = where / "root", where / "strace", where / "begin"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    (root / "a").write_bytes(OLD)
    begin.unlink(missing_ok=True)
    os.mkfifo(begin)
    publish, durability = mode
    command = (*WRITER, str(begin), "a")
    with hosts.open(where, command, publish=publish, durability=durability) as host:
        hosts.hear("up")
        with traced(thread_of(host, which), inject, log):
            os.close(os.open(begin, os.O_WRONLY))
            ended = select.select([host.pidfd], [], [], TIMEOUT_S)[0]
            assert ended, "the host hangs"
        assert select.select([host.launchpad], [], [], 1.0)[0], "the launchpad is alive"
    calls = tuple(
        re.findall(r"^(.*\(INJECTED\))$", log.read_text("latin-1"), re.MULTILINE)
    )
    lines = log.read_text("latin-1").splitlines()
    made = [line for line in lines if "+++" not in line and "---" not in line]
    names = set(os.listdir(root)) - {"a"}
    return Seen(
        tuple((where / "out").read_bytes().splitlines()),
        (root / "a").read_bytes(),
        tuple(sorted(names)),
        calls,
        made[-1] if made else "",
    )


# spec W5, C1, O6; I6
@pytest.mark.parametrize("which", ["main", "worker"])
@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize(
    ("name", "reason"),
    [("ENOSPC", b"No space left on device"), ("EIO", b"Input/output error")],
)
def test_every_call_that_fails_is_told_and_tears_nothing(
    tmp_path: Path,
    host_processes: Hosts,
    mode: tuple[str, str],
    which: str,
    name: str,
    reason: bytes,
) -> None:
    failed = set()
    for number in range(1, MOST_CALLS):
        inject = f"{FALLIBLE}:error={name}:when={number}"
        seen = play(host_processes, tmp_path, mode, which, inject)
        assert seen.replies, "the child said nothing"
        assert b"gone" not in seen.replies, f"the connection was lost: {seen}"
        errors = [reply for reply in seen.replies if not reply.startswith(b"OK")]
        if not seen.calls:
            assert errors == []
            break
        failed.update(call.partition("(")[0] for call in seen.calls)
        for error in errors:
            assert re.fullmatch(
                rb"ERROR failed to (open file 'a'|write|close): " + reason, error
            )
        assert seen.strange == (), f"a staged name remains after {seen.calls}"
        check_content(seen, mode[0], errors)
    else:
        pytest.fail("the write path has no end")
    print(f"{'-'.join(mode)} {which} {name}: {number - 1} calls: {sorted(failed)}")
    assert EXPECTED[which, mode] <= failed


def check_content(seen: Seen, publish: str, errors: list[bytes]) -> None:
    """The file holds what was acknowledged, or the old content where that stands."""
    if publish == "on-close":
        assert seen.data == (seen.acknowledged if seen.is_closed else OLD), errors
    elif seen.replies[0].startswith(b"OK"):
        assert seen.data == seen.acknowledged, errors
    else:
        # spec O7: an OPEN that fails has not harmed the file.
        assert seen.data == OLD, errors


# attack 39, spec S3, I6
@pytest.mark.parametrize("which", ["main", "worker"])
@pytest.mark.parametrize("mode", MODES, ids="-".join)
def test_a_host_that_dies_at_any_call_leaves_whole_files(
    tmp_path: Path, host_processes: Hosts, mode: tuple[str, str], which: str
) -> None:
    staged = []
    for number in range(1, MOST_CALLS):
        inject = f"{WRITE_PATH}:signal=SIGKILL:when={number}"
        seen = play(host_processes, tmp_path, mode, which, inject)
        if seen.is_closed:
            assert seen.data == seen.acknowledged == NEW, "acknowledged data is lost"
        if mode[0] == "on-close":
            assert seen.data in (OLD, NEW), f"a mixture after {seen.last}"
        else:
            wholes = [OLD, *(NEW[: sum(map(len, PIECES[:n]))] for n in range(4))]
            assert seen.data in wholes, f"a torn WRITE after {seen.last}"
            assert seen.data.startswith(seen.acknowledged)
        if seen.strange:
            staged.append(seen)
        if "SIGKILL" not in (tmp_path / "strace").read_text("latin-1"):
            assert seen.is_closed
            break
    else:
        pytest.fail("the write path has no end")
    where = sorted({seen.last.partition("(")[0] for seen in staged})
    deaths = f"{'-'.join(mode)} {which}: {number - 1} deaths"
    print(f"{deaths}; staged names remain after: {where}")
    # Between link and rename a staged file has a name, its content is whole by then.
    assert all(len(seen.strange) == 1 for seen in staged)
    assert all(seen.strange[0].startswith(".sandhost-") for seen in staged)
