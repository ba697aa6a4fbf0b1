"""The start of a child.

Descriptors, signals, session, limits; how its start can fail.

Real processes throughout. Ends of trees are in `test_launcher_ends.py`, the launchpad
itself in `test_launchpad.py`.
"""

import errno
import os
import re
import resource
import signal
import subprocess
from ast import literal_eval
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from supervisor.spawn.launchpad import wire
from supervisor.spawn.request import SpawnError
from tests.helpers.spawning import (
    PYTHON,
    ROOT,
    WAYS,
    LauncherStage,
    host_command,
    staged,
    started,
)

pytestmark = pytest.mark.slow

# Says which of the first 1024 descriptors are open, and what they are.
OPEN_DESCRIPTORS = """
import os
found = []
for number in range(1024):
    try:
        found.append((number, os.fstat(number).st_ino))
    except OSError:
        pass
os.write(1, repr(found).encode() + b"\\n")
"""
OPEN_3 = OPEN_DESCRIPTORS.replace("os.write(1,", "os.write(3,")

# Python ignores two signals itself, `sh` and `cat` none.
STATUS = ("/bin/cat", "/proc/self/status")

SAY = 'echo "$NAME" "$LONG"'

KIB = 1024


@pytest.fixture(params=WAYS)
async def stage(
    tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[LauncherStage]:
    """A launcher whose children start in one of the two ways."""
    async with started(request.param, tmp_path) as stage:
        yield stage


def descriptors(written: bytes) -> dict[int, int]:
    """Number -> inode, as `OPEN_DESCRIPTORS` says it."""
    return dict(literal_eval(written.decode()))


def line_of(file: Path, start: bytes) -> bytes:
    """The one line that starts so, of what a host and its child said."""
    (line,) = [ln for ln in file.read_bytes().splitlines() if ln.startswith(start)]
    return line


def create_time(pid: int) -> int:
    """Field 22 of /proc/PID/stat."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])


def status_fields(text: str) -> dict[str, str]:
    """The fields of /proc/PID/status."""
    return dict(re.findall(r"^(\w+):\t(.*)$", text, re.MULTILINE))


# ---------------------------------------------------------------- descriptors


# spec T2
async def test_a_child_has_the_named_descriptors_and_no_others(
    stage: LauncherStage,
) -> None:
    argv = (*PYTHON, OPEN_DESCRIPTORS)
    written, _ = await stage.output(argv, ((stage.cwd_fd, 3),))
    found = descriptors(written)
    assert set(found) == {0, 1, 2, 3}
    assert found[3] == os.fstat(stage.cwd_fd).st_ino


# spec T2
async def test_a_second_child_has_nothing_of_the_first(stage: LauncherStage) -> None:
    ours, theirs = os.pipe()
    first = await stage.launcher.spawn(stage.request(("/bin/cat",), ((ours, 0),)))
    written, _ = await stage.output((*PYTHON, OPEN_DESCRIPTORS))
    assert set(descriptors(written)) == {0, 1, 2}
    os.close(ours)
    os.close(theirs)  # the one writer: `cat` reads its end
    assert (await first.wait_exit()).code == 0
    first.close()


async def test_numbers_between_the_named_ones_stay_closed(stage: LauncherStage) -> None:
    fds = ((stage.cwd_fd, 4), (stage.cwd_fd, 9))
    written, _ = await stage.output((*PYTHON, OPEN_DESCRIPTORS), fds)
    assert set(descriptors(written)) == {0, 1, 2, 4, 9}


async def test_sources_that_overlap_the_targets_arrive_unmixed(
    stage: LauncherStage,
) -> None:
    # The launchpad receives them as its lowest free numbers, from 7 or so upwards:
    # put backwards onto the same numbers, each is in the way of another.
    memories = [os.memfd_create(f"m{number}") for number in range(12)]
    fds = tuple(zip(memories, reversed(range(4, 16)), strict=True))
    written, _ = await stage.output((*PYTHON, OPEN_DESCRIPTORS), fds)
    found = descriptors(written)
    assert set(found) == {0, 1, 2, *range(4, 16)}
    assert [found[target] for _, target in fds] == [
        os.fstat(m).st_ino for m in memories
    ]
    for memory in memories:
        os.close(memory)


# attack 6: the number of a descriptor that is to follow is another's target.
async def test_a_descriptor_in_the_way_of_another_is_moved(
    stage: LauncherStage,
) -> None:
    fds = tuple((stage.null, number) for number in range(3, 40))
    written, _ = await stage.output((*PYTHON, OPEN_DESCRIPTORS), fds)
    assert set(descriptors(written)) == set(range(40))


# attack 6, spec T2
def test_nothing_leaks_from_a_host_that_inherited_50_descriptors(
    tmp_path: Path,
) -> None:
    junk = [os.open(tmp_path, os.O_RDONLY) for _ in range(50)]
    said = tmp_path / "said"
    command = host_command(said, 1, (*PYTHON, OPEN_3))
    subprocess.run(command, cwd=ROOT, check=True, timeout=60, pass_fds=junk)
    for number in junk:
        os.close(number)
    assert set(descriptors(line_of(said, b"["))) == {0, 1, 2, 3}


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_host_with_closed_standard_descriptors_spawns(
    tmp_path: Path, closed: str
) -> None:
    said = tmp_path / "said"
    command = host_command(said, 1, (*PYTHON, OPEN_3))
    shell = ("sh", "-c", f'exec "$@" {closed}', "sh")
    subprocess.run((*shell, *command), cwd=ROOT, check=True, timeout=60)
    assert set(descriptors(line_of(said, b"["))) == {0, 1, 2, 3}


# ---------------------------------------------------------------- what else it finds


async def test_no_signal_is_ignored_caught_or_blocked(stage: LauncherStage) -> None:
    written, _ = await stage.output(STATUS)
    status = status_fields(written.decode())
    assert [int(status[f"Sig{what}"], 16) for what in ("Ign", "Cgt", "Blk")] == [
        0,
        0,
        0,
    ]


def test_signals_are_default_whatever_the_host_inherited(tmp_path: Path) -> None:
    said = tmp_path / "said"
    command = host_command(said, 1, ("/bin/cp", "/proc/self/status", "/dev/fd/3"))
    shell = ("sh", "-c", "trap '' HUP INT USR1 PIPE CHLD TERM; exec \"$@\"", "sh")
    subprocess.run((*shell, *command), cwd=ROOT, check=True, timeout=60)
    status = status_fields(said.read_text())
    assert [int(status[f"Sig{what}"], 16) for what in ("Ign", "Blk")] == [0, 0]


async def test_a_child_leads_its_own_session_and_has_no_terminal(
    stage: LauncherStage,
) -> None:
    program = "import os; print(os.getpid(), os.getsid(0), os.getpgid(0), flush=True)"
    written, _ = await stage.output((*PYTHON, f"{program}; os.open('/dev/tty', 2)"))
    pid, session, group = map(int, written.split())
    assert pid == session == group


async def test_a_child_starts_in_the_named_directory(
    stage: LauncherStage, tmp_path: Path
) -> None:
    written, _ = await stage.output(("/bin/pwd",))
    assert written.decode() == f"{tmp_path}\n"


async def test_the_environment_is_exactly_the_given_one(stage: LauncherStage) -> None:
    env = {"FSPROXY_FD": "3", "EMPTY": "", "BYTES": "\udcff", "EQUAL": "a=b"}
    written, _ = await stage.output(("/usr/bin/env", "-0"), env=env)
    expected = {b"FSPROXY_FD=3", b"EMPTY=", b"BYTES=\xff", b"EQUAL=a=b"}
    assert set(written.split(b"\0")[:-1]) == expected


async def test_a_child_gets_its_name_and_arguments_as_they_are(
    stage: LauncherStage,
) -> None:
    program = "/bin/cat /proc/$$/cmdline; :"
    argv = ("a name", "-c", program, "", " b ", "\n", "\udcfe", "--")
    written, _ = await stage.output(argv, executable="/bin/sh")
    assert written == b"".join(os.fsencode(word) + b"\0" for word in argv)


async def test_limits_hold_for_the_child_and_come_after_its_descriptors(
    stage: LauncherStage,
) -> None:
    # Five descriptors at most: the steps that prepare the child have more.
    limits = ((resource.RLIMIT_NOFILE, 5, 5), (resource.RLIMIT_CORE, 0, 0))
    argv = ("/bin/sh", "-c", "ulimit -n; ulimit -Hn; ulimit -c")
    written, _ = await stage.output(argv, ((stage.cwd_fd, 3),), rlimits=limits)
    assert written == b"5\n5\n0\n"


@pytest.mark.parametrize("mask", [0o077, 0o000])
async def test_the_umask_is_the_given_one(stage: LauncherStage, mask: int) -> None:
    written, _ = await stage.output(("/bin/sh", "-c", "umask"), umask=mask)
    assert int(written, 8) == mask


async def test_the_umask_is_the_hosts_if_none_is_given(stage: LauncherStage) -> None:
    mask = os.umask(0)
    os.umask(mask)
    written, _ = await stage.output(("/bin/sh", "-c", "umask"))
    assert int(written, 8) == mask


async def test_a_megabyte_of_arguments_and_environment_arrives(
    stage: LauncherStage,
) -> None:
    # One string is 128 KiB at most (MAX_ARG_STRLEN), so nine.
    words = tuple(chr(ord("a") + n) * 120 * KIB for n in range(9))
    env = {f"V{n}": "x" * 100 * KIB for n in range(3)}
    program = (
        "import os, sys; print([len(w) for w in sys.argv[1:]], len(os.environ['V2']))"
    )
    written, _ = await stage.output((*PYTHON, program, *words), env=env)
    assert written.decode() == f"{[120 * KIB] * 9} {100 * KIB}\n"


# ---------------------------------------------------------------- how it ends


@pytest.mark.parametrize("code", [0, 1, 126, 127, 255])
async def test_an_exit_code_is_told(stage: LauncherStage, code: int) -> None:
    _, status = await stage.output(("/bin/sh", "-c", f"exit {code}"))
    assert (status.code, status.signal) == (code, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGRTMAX])
async def test_a_death_by_signal_is_told(stage: LauncherStage, number: int) -> None:
    process = await stage.launcher.spawn(stage.request(("/bin/sleep", "1000")))
    process.send_signal(number)
    status = await process.wait_exit()
    assert (status.code, status.signal) == (None, number)
    process.send_signal(number)  # to the dead: no error, and nobody else
    process.close()


async def test_the_time_used_is_told(stage: LauncherStage) -> None:
    program = "import os\nwhile os.times().user < 0.2: pass"
    _, status = await stage.output((*PYTHON, program))
    assert 0.19 <= status.utime_s < 5
    assert status.stime_s < 5
    assert status.maxrss_kib > 1000


async def test_a_process_is_named_by_pid_and_create_time(stage: LauncherStage) -> None:
    process = await stage.launcher.spawn(stage.request(("/bin/sleep", "1000")))
    assert process.create_time == create_time(process.pid)
    await process.end_tree()
    assert (await process.wait_exit()).signal == signal.SIGKILL
    process.close()


# ---------------------------------------------------------------- how it fails


async def refused(stage: LauncherStage, *argv: str, **changes: Any) -> SpawnError:
    """The error of a spawn that cannot succeed."""
    with pytest.raises(SpawnError) as caught:
        await stage.launcher.spawn(stage.request(argv, **changes))
    assert stage.launcher.statistics()["children"] == 0
    return caught.value


@pytest.mark.parametrize(
    ("content", "mode", "number", "exit_status"),
    [
        (None, 0, errno.ENOENT, 127),
        ("#!/missing/interpreter -x\n", 0o755, errno.ENOENT, 127),
        ("text without a first line\n", 0o755, errno.ENOEXEC, 126),
        ("#!/bin/sh\n", 0o644, errno.EACCES, 126),
    ],
)
async def test_what_cannot_be_executed_is_told(
    stage: LauncherStage,
    tmp_path: Path,
    content: str | None,
    mode: int,
    number: int,
    exit_status: int,
) -> None:
    path = tmp_path / "program"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    error = await refused(stage, str(path))
    assert (error.errno, error.stage) == (number, "exec")
    assert error.exit_status == exit_status
    assert str(path) in error.text
    assert "\n" not in error.text


async def test_a_directory_is_not_executable(
    stage: LauncherStage, tmp_path: Path
) -> None:
    error = await refused(stage, str(tmp_path))
    assert (error.stage, error.exit_status) == ("exec", 126)


async def test_a_path_through_a_file_is_not_found(stage: LauncherStage) -> None:
    error = await refused(stage, "/bin/sh/x")
    assert (error.errno, error.exit_status) == (errno.ENOTDIR, 127)


async def test_a_missing_interpreter_is_named(
    stage: LauncherStage, tmp_path: Path
) -> None:
    path = tmp_path / "script"
    path.write_text("#!/missing/interpreter -x\n")
    path.chmod(0o755)
    error = await refused(stage, str(path))
    assert "/missing/interpreter" in error.text


async def test_arguments_beyond_the_kernels_limit_are_an_error(
    stage: LauncherStage,
) -> None:
    error = await refused(stage, "/bin/true", "x" * 200 * KIB)
    assert (error.errno, error.stage) == (errno.E2BIG, "exec")
    error = await refused(stage, "/bin/true", *["x" * 100 * KIB] * 100)
    assert (error.errno, error.stage) == (errno.E2BIG, "request")


async def test_a_limit_that_cannot_be_set_is_the_hosts_failure(
    stage: LauncherStage,
) -> None:
    limits = ((resource.RLIMIT_NOFILE, 20, 10),)
    error = await refused(stage, "/bin/true", rlimits=limits)
    assert (error.errno, error.stage) == (errno.EINVAL, "rlimit")
    assert error.exit_status == 125


async def test_a_working_directory_that_is_none_is_the_hosts_failure(
    stage: LauncherStage,
) -> None:
    error = await refused(stage, "/bin/true", cwd_fd=stage.null)
    assert (error.errno, error.stage) == (errno.ENOTDIR, "cwd")
    assert error.exit_status == 125


# attack 18
async def test_a_host_without_descriptors_left_keeps_no_child(
    stage: LauncherStage,
) -> None:
    ours, theirs = os.pipe()
    request = stage.request(("/bin/sleep", "1000"), ((theirs, 3),))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(spare := os.dup(0))  # the lowest free number is the first that is refused
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
    try:
        with pytest.raises(SpawnError) as caught:
            await stage.launcher.spawn(request)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (caught.value.errno, caught.value.stage) == (errno.EMFILE, "pidfd")
    os.close(theirs)
    async with trio.lowlevel.FdStream(ours) as stream:
        assert await stream.receive_some() == b""  # it is dead
    written, _ = await stage.output(("/bin/echo", "here"))
    assert written == b"here\n"


# attack 18: what an order of 100 kB lies in is a descriptor more, and who asked is told.
async def test_a_launchpad_without_descriptors_left_refuses_a_long_order(
    tmp_path: Path,
) -> None:
    async with staged(tmp_path) as stage:
        await stage.output(("/bin/true",))  # it serves
        words, pid = ("/bin/echo", "x" * 100 * KIB), stage.launchpad
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        opened = sorted(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
        free = next(n for n, fd in enumerate((*opened, -1)) if n != fd)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            with pytest.raises(SpawnError) as caught:
                await stage.launcher.spawn(stage.request(words))
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert (caught.value.errno, caught.value.stage) == (errno.EMFILE, "fork")
        for word in ("here", words[1]):
            written, _ = await stage.output(("/bin/echo", word))
            assert written.decode() == f"{word}\n"


async def test_many_at_once_are_given_what_is_theirs(stage: LauncherStage) -> None:
    said: dict[int, bytes] = {}

    async def one(number: int) -> None:
        env = {"NAME": str(number), "LONG": str(number % 10) * (number * 300)}
        said[number], status = await stage.output(("/bin/sh", "-c", SAY), env=env)
        assert status.code == 0

    async with trio.open_nursery() as nursery:
        for number in range(1, 65):
            nursery.start_soon(one, number)
    for number, words in said.items():
        name, long = words.decode().split()
        assert (name, long) == (str(number), str(number % 10) * (number * 300))


async def test_after_a_failed_spawn_the_next_one_succeeds(stage: LauncherStage) -> None:
    await refused(stage, "/missing")
    written, _ = await stage.output(("/bin/echo", "here"))
    assert written == b"here\n"


# attack 18: a query that was cancelled is answered all the same.
async def test_descriptors_of_an_answer_that_no_task_waits_for_are_closed(
    stage: LauncherStage,
) -> None:
    reader, writer = os.pipe()
    os.close(writer)
    stage.launcher.take_message((wire.OWNED, -1), [reader])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)
