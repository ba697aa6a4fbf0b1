"""Every system call of the write path fails once, or is the host's last one.

For every call, strace injects a failure of the N-th, or a SIGKILL at it, for N = 1, 2,
... until a run comes through without, in the host's main thread and in its worker: an
error must reach the child as one true line, and the file must hold whole WRITEs that
were acknowledged, or the old content; never a mixture.
"""

import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.children.scripted import PIECES
from tests.helpers.command import TIMEOUT_S, read_until
from tests.helpers.rounds import LONG
from tests.helpers.stage import CHILDREN
from tests.system.chaos.hostprocess import HostProcess, Hosts

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(300)]

OLD = b"the old content\n"
NEW = b"".join(PIECES)

FALLIBLE = (
    *("openat2", "openat", "ftruncate", "pwrite64", "linkat", "renameat", "renameat2"),
    *("fsync", "fdatasync"),
)
"""Calls that may fail because of the disk."""

WRITE_PATH = (*FALLIBLE, "write", "close", "unlinkat")
"""Where the host is killed: at its replies and where it gives descriptors back, too."""

DIRECT, STAGED, DURABLE = MODES = (
    ("direct", "none"),
    ("on-close", "none"),
    ("on-close", "close"),
)
EXPECTED = {
    ("main", DIRECT): {"openat2", "ftruncate", "pwrite64"},
    ("main", STAGED): {"openat2", "openat", "pwrite64"},
    ("main", DURABLE): {"openat2", "openat", "pwrite64"},
    ("worker", DIRECT): {"pwrite64"},
    ("worker", STAGED): {"pwrite64", "linkat", "renameat"},
    ("worker", DURABLE): {"pwrite64", "linkat", "renameat", "fsync", "openat"},
}
"""Calls that must have failed at least once, or the test has missed them."""

APPEND = ("append", "none")
DIRECT_SPEC = {"publish": "direct", "durability": "none"}

REASONS = {"ENOSPC": b"No space left on device", "EIO": b"Input/output error"}

FAULTS = [
    pytest.param(mode, which, name, id=f"{name}-{'-'.join(mode)}-{which}")
    for one, mode in enumerate(MODES)
    for two, which in enumerate(("main", "worker"))
    for three, name in enumerate(REASONS)
    if LONG or (one + two + three) % 2 == 0
]
"""In the short form any two of mode, thread and reason meet; in the long one all three."""

DEATHS = [
    pytest.param(mode, which, id=f"{'-'.join(mode)}-{which}")
    for mode in MODES
    for which in ("main", "worker")
    if LONG or (mode, which) != (STAGED, "main")
]
"""The short form leaves out what the durable mode does as well in the main thread."""

MOST_CALLS = 60
"""Far more than the write path has of any call: a loop that gets there never ends."""

WRITER = (sys.executable, "-I", "-S", str(CHILDREN / "scripted.py"))


@dataclass(frozen=True, slots=True)
class Seen:
    """The leftovers of one run.

    Attributes:
        replies: the reply lines that the child saw.
        data: the file's content.
        strange: other names in the root.
        calls: of the traced thread, as strace words them.
    """

    replies: tuple[bytes, ...]
    data: bytes
    strange: tuple[str, ...]
    calls: tuple[str, ...]

    @property
    def acknowledged(self) -> bytes:
        """The number of bytes that the child was told to be written."""
        told = self.replies[1 : 1 + len(PIECES)]
        pairs = zip(PIECES, told, strict=False)
        return b"".join(piece for piece, reply in pairs if reply.startswith(b"OK"))

    @property
    def is_closed(self) -> bool:
        """Whether the child was told that its file is closed."""
        return self.replies[-1:] == (b"OK",)

    @property
    def failed_at(self) -> int:
        """Which call failed; -1 for none."""
        found = [n for n, call in enumerate(self.calls) if call.endswith("(INJECTED)")]
        return found[0] if found else -1

    @property
    def is_published(self) -> bool:
        """Whether the call that failed came after the one that published the file."""
        before = self.calls[: max(self.failed_at, 0)]
        return any(call.startswith("renameat") for call in before)

    @property
    def was_killed(self) -> bool:
        """Whether the host died of it."""
        return any("killed by SIGKILL" in call for call in self.calls)


@contextmanager
def traced(tid: int, inject: str, log: Path, *more: str) -> Iterator[None]:
    """Trace one thread of a host from outside."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is missing")
    trace = f"trace={','.join(WRITE_PATH)}"
    words = ("-p", str(tid), "-e", trace, "-e", f"inject={inject}", "-o", str(log))
    with subprocess.Popen([strace, *words, *more], stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            said = read_until(process.stderr.fileno(), b"\n")
            if b"attached" not in said:
                pytest.skip(f"cannot trace: {said.decode().strip()}")
            yield
            # It ends behind its tracee; told to end before, it may not have seen how.
            process.wait(TIMEOUT_S)
        finally:
            process.terminate()
            process.communicate()


def thread_of(host: HostProcess, which: str) -> int:
    """The main thread of a host, or its one worker."""
    if which == "main":
        return host.pid
    (worker,) = {int(tid) for tid in os.listdir(f"/proc/{host.pid}/task")} - {host.pid}
    return worker


def play(
    hosts: Hosts, where: Path, mode: tuple[str, str], which: str, inject: str
) -> Seen:
    """Run the scripted child in a host with one fault in one of its threads.

    A fault of `write` in the append mode is one of the file, not of the connection.
    """
    root, log, begin = where / "root", where / "strace", where / "begin"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    (root / "a").write_bytes(OLD)
    begin.unlink(missing_ok=True)
    os.mkfifo(begin)
    spec = {"publish": mode[0], "durability": mode[1]}
    is_append = mode == APPEND
    command = (*WRITER, str(begin), "a", "a" if is_append else "w")
    only = ("-P", str(root / "a")) if is_append else ()
    with hosts.open(where, command, **(DIRECT_SPEC if is_append else spec)) as host:
        hosts.hear("up")
        with traced(thread_of(host, which), inject, log, *only):
            os.close(os.open(begin, os.O_WRONLY))
            ended = select.select([host.pidfd], [], [], TIMEOUT_S)[0]
            assert ended, "the host hangs"
        assert select.select([host.launchpad], [], [], TIMEOUT_S)[0], (
            "the launchpad is alive"
        )
    return Seen(
        tuple((where / "out").read_bytes().splitlines()),
        (root / "a").read_bytes(),
        tuple(sorted(set(os.listdir(root)) - {"a"})),
        tuple(log.read_text("latin-1").splitlines()),
    )


# spec W5, C1, O6; I6
@pytest.mark.parametrize(("mode", "which", "name"), FAULTS)
def test_every_call_that_fails_is_told_and_tears_nothing(
    tmp_path: Path,
    host_processes: Hosts,
    mode: tuple[str, str],
    which: str,
    name: str,
    tell: Callable[[str], None],
) -> None:
    failed = {}
    for call in FALLIBLE:
        for number in range(1, MOST_CALLS):
            inject = f"{call}:error={name}:when={number}"
            seen = play(host_processes, tmp_path, mode, which, inject)
            errors = [reply for reply in seen.replies if not reply.startswith(b"OK")]
            if seen.failed_at < 0:
                assert (seen.is_closed, errors) == (True, [])
                break
            failed[call] = number
            assert seen.replies, "the child was told nothing"
            for error in errors:
                told = rb"ERROR failed to (open file 'a'|write|close): " + REASONS[name]
                assert re.fullmatch(told, error)
            assert seen.strange == (), f"a staged name remains: {seen.calls}"
            check_content(seen, mode[0])
        else:
            pytest.fail(f"there is no end of {call}")
    tell(f"{'-'.join(mode)} {which} {name}, calls that failed: {failed}")
    assert EXPECTED[which, mode] <= set(failed)


def check_content(seen: Seen, publish: str) -> None:
    """The file holds what was acknowledged, or the old content where that stands."""
    if not seen.replies[0].startswith(b"OK"):
        wanted = OLD  # spec O7: an OPEN that fails has not harmed the file
    elif publish == "direct" or seen.is_closed:
        wanted = seen.acknowledged
    elif seen.is_published:
        # It shows, whole; what failed is the promise that it stays (fsync).
        wanted = seen.acknowledged
    else:
        wanted = OLD
    assert seen.data == wanted, f"after {seen.replies} at {seen.calls[seen.failed_at]}"


# attack 39, spec S3, I6
@pytest.mark.parametrize(("mode", "which"), DEATHS)
def test_a_host_that_dies_at_any_call_leaves_whole_files(
    tmp_path: Path,
    host_processes: Hosts,
    mode: tuple[str, str],
    which: str,
    tell: Callable[[str], None],
) -> None:
    deaths: dict[str, int] = {}
    staged = []
    for call in WRITE_PATH:
        for number in range(1, MOST_CALLS):
            inject = f"{call}:signal=SIGKILL:when={number}"
            seen = play(host_processes, tmp_path, mode, which, inject)
            if not seen.was_killed:
                assert seen.is_closed
                break
            deaths[call] = number
            check_death(seen, mode[0])
            if seen.strange:
                # Between link and rename a staged file has a name; it is whole then.
                (name,) = seen.strange
                assert name.startswith(".sandhost-")
                assert (tmp_path / "root" / name).read_bytes() == NEW
                staged.append(f"{call} {number}")
        else:
            pytest.fail(f"there is no end of {call}")
    tell(f"{'-'.join(mode)} {which}, deaths: {deaths}; staged names left at: {staged}")
    assert EXPECTED[which, mode] <= set(deaths)


def check_death(seen: Seen, publish: str) -> None:
    """The rest of the file after a killed host."""
    where = seen.calls[-2:]
    if seen.is_closed:
        assert seen.data == seen.acknowledged == NEW, f"lost at {where}"
    if publish == "on-close":
        assert seen.data in (OLD, NEW), f"a mixture at {where}"
        return
    wholes = [OLD, *(b"".join(PIECES[:count]) for count in range(len(PIECES) + 1))]
    assert seen.data in wholes, f"a torn WRITE at {where}"
    assert seen.data.startswith(seen.acknowledged) or seen.data == OLD, (
        f"lost at {where}"
    )


# spec W5, P1: appends that fail are cut off again, those before and behind stand.
@pytest.mark.parametrize("which", ["main", "worker"])
@pytest.mark.parametrize("fault", ["error=ENOSPC", "error=EIO", "signal=SIGKILL"])
def test_every_append_that_fails_is_whole_or_absent(
    tmp_path: Path, host_processes: Hosts, which: str, fault: str
) -> None:
    failed = 0
    for number in range(1, MOST_CALLS):
        inject = f"write:{fault}:when={number}"
        seen = play(host_processes, tmp_path, APPEND, which, inject)
        if seen.was_killed:
            wholes = [b"".join(PIECES[:count]) for count in range(len(PIECES) + 1)]
            assert seen.data in [OLD + whole for whole in wholes]
            assert seen.data.startswith(OLD + seen.acknowledged)
        else:
            assert seen.data == OLD + seen.acknowledged
        if seen.failed_at < 0 and not seen.was_killed:
            assert seen.is_closed
            break
        failed += 1
    else:
        pytest.fail("there is no end of write")
    # Three WRITEs, the longest by a worker; a machine that is busy elsewhere may take the
    # disk for slow, and then the worker has one more.
    assert failed in {1, 2}
