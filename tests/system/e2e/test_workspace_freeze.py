"""``--freeze``: a child stops while a command looks, and goes on in any case."""

import contextlib
import errno
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from hostlib.linux.files import DIRECTORY, closing_fd
from hostlib.linux.processes import children_of, stat_fields
from supervisor.spawn.launchpad.start import start_program
from supervisor.workspace import freeze_guard
from supervisor.workspace.freeze import FreezeError, guarded_stop
from supervisor.workspace.workspace import Workspace
from tests.helpers.command import ENVIRONMENT, SANDHOST, Outcome, sandhost
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.leaks import no_descriptor_left
from tests.helpers.rounds import LONG
from tests.system.e2e.test_workspace import Place

pytestmark = pytest.mark.slow

COUNT = "i=0; while :; do i=$((i+1)); echo $i > one; echo $i > two; done"
"""A program that never stops writing: both files have one content, but between two writes."""


WRITERS = """
import ctypes, os, sys, threading
libc = ctypes.CDLL(None, use_errno=True)

def file(name):
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def write(fd):
    while True:
        os.write(fd, b"x")

def fork_on():  # each one lives for less than a look at /proc takes
    fd = file("chain")
    while True:
        os.write(fd, b"x")
        if os.fork():
            os._exit(0)

def end_first_thread():  # its own mount table and its root are not told then
    threading.Thread(target=write, args=(file("thread"),)).start()
    libc.syscall(NUMBERS["exit"], 0)

def wait_in_vfork():
    fd = file("vfork")
    os.mkfifo("fifo")
    if os.fork():
        write(fd)
    os.posix_spawn("/bin/true", ["true"], {},
                   file_actions=[(os.POSIX_SPAWN_OPEN, 9, "fifo", os.O_RDONLY, 0)])

def rename():
    names = ["one", "two"]
    file(names[0])
    fd = file("renamed")
    while True:
        os.rename(*names)
        names.reverse()
        os.write(fd, b"x")

def hide_mounts():  # unshare(2), pivot_root(2): what stays is a file held open
    fd = file("hidden")
    os.mkdir("root")
    for what, *words in (("unshare", 0x10020000), ("mount", b"none", b"root", b"tmpfs", 0, None)):
        if getattr(libc, what)(*words):
            print(what, os.strerror(ctypes.get_errno()), file=sys.stderr)
            os._exit(1)
    os.chdir("root")
    if libc.syscall(NUMBERS["pivot_root"], b".", b".") or libc.umount2(b".", 2):
        os._exit(1)
    write(fd)

def leave_and_hide():  # nothing but the file leads to it
    if os.fork() == 0:
        hide_mounts()
    os._exit(0)

NUMBERS = {"exit": 60, "pivot_root": 155} if os.uname().machine == "x86_64" else {
    "exit": 93, "pivot_root": 41}
for name in sys.argv[1:]:
    if os.fork() == 0:
        globals()[name]()
print("ready", flush=True)
threading.Event().wait()
"""
"""Programs that write for ever; each has its way not to be found or not to be stopped."""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@contextmanager
def at_work(
    place: Place, script: str, *options: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a script in the workspace ``w`` until the block ends."""
    words = ("--state-dir", str(place.state), "--workspace", str(place.base), *options)
    process = subprocess.Popen(
        [SANDHOST, "run", *words, "--workspace-name", "w", "--", "sh", "-c", script],
        env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    lock = place.state / "workspaces/w/lock"
    until_s = time.monotonic() + 30
    while lock.read_bytes().count(b"\n") < 3:  # its exec is told of after it
        assert time.monotonic() < until_s
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


def counted(place: Place) -> int:
    """Return how far the child has counted; -1 while it writes that."""
    file = place.state / "workspaces/w/upper/one"
    return int(file.read_bytes() or b"-1") if file.exists() else -1


def wait_until_counted(place: Place, more_than: int) -> None:
    """Wait until the child has counted on."""
    until_s = time.monotonic() + 30
    while counted(place) <= more_than:
        assert time.monotonic() < until_s


@contextmanager
def stopped(place: Place) -> Iterator[None]:
    """Stop the child as a command does, until the block ends."""
    with Workspace(str(place.state), "w") as workspace, workspace.stopped():
        yield


# spec WS8
@pytest.mark.nobody
def test_nothing_is_written_while_a_child_is_stopped_and_it_goes_on(
    place: Place,
) -> None:
    # One that has left its parent, and what forks again and again.
    script = f"echo ready; (sh -c '{COUNT}' &); while :; do true; (true); done"
    with at_work(place, script):
        wait_until_counted(place, 0)
        with stopped(place):
            first = counted(place)
            for _ in range(1000):
                assert counted(place) == first
        wait_until_counted(place, first)
        done = place.ask("diff", "w", "--freeze", "--name-only")
        assert (done.status, done.out, done.err) == (1, b"one\ntwo\n", b"")
        wait_until_counted(place, counted(place))
        done = place.ask("diff", "w", "--name-only")
        assert (
            b"child child-1 is at work, so this may be torn; see --freeze" in done.err
        )


def sizes(place: Place) -> dict[str, int]:
    """Return how much each file of the layer has."""
    upper = place.state / "workspaces/w/upper"
    return {name: (upper / name).lstat().st_size for name in os.listdir(upper)}


def wait_until_more(place: Place, files: Collection[str]) -> None:
    """Wait until each of some files has grown."""
    before: dict[str, int] = {}
    until_s = time.monotonic() + 60
    left = set(files)
    while left:
        assert time.monotonic() < until_s, left
        with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
            now = sizes(place)
            before = {name: before.get(name, now.get(name, 0)) for name in files}
            left = {name for name in left if now.get(name, 0) <= before[name]}


def check_stops(place: Place, files: Collection[str]) -> None:
    """Stop what writes to some files: nothing changes, and then all go on."""
    wait_until_more(place, files)
    with stopped(place):
        first = sizes(place)
        for _ in range(500):
            assert sizes(place) == first
    wait_until_more(place, files)


# spec WS8, attack 55
@pytest.mark.chaos
@pytest.mark.nobody
def test_what_is_not_found_or_not_stopped_easily_stands_still_as_well(
    place: Place,
) -> None:
    ways = ("fork_on", "end_first_thread", "wait_in_vfork", "rename")
    script = f"exec python3 -S -c {shlex.quote(WRITERS)} {' '.join(ways)}"
    files = ("chain", "thread", "vfork", "renamed")
    with at_work(place, script):
        for _ in range(10 if LONG else 2):
            check_stops(place, files)
        # The same while a look and a commit are made.
        assert place.ask("diff", "w", "--freeze", "--stat").status == 1
        wait_until_more(place, files)
        assert place.ask("commit", "w", "--freeze", "--except", "fifo").status == 0
        wait_until_more(place, files)
        assert (place.base / "chain").read_bytes().strip(b"x") == b""


# spec WS8, attack 55
@pytest.mark.nobody
def test_a_mount_that_a_process_has_hidden_from_itself_is_not_written_through(
    place: Place, tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    more = [] if os.geteuid() == 0 else ["userns"]
    layers = [*more, "mountns", "pidns"]
    config.write_text(f"[sandbox.plain]\nlayers = {layers}\n")
    script = f"exec python3 -S -c {shlex.quote(WRITERS)} hide_mounts"
    with at_work(place, script, "--config", str(config), "--sandbox", "plain"):
        check_stops(place, ["hidden"])


# spec WS8
@pytest.mark.nobody
def test_a_child_whose_processes_could_hide_is_not_said_to_be_stopped(
    place: Place, tmp_path: Path
) -> None:
    config = tmp_path / "c.toml"
    layers = ["mountns"] if os.geteuid() == 0 else ["userns", "mountns"]
    config.write_text(f"[sandbox.plain]\nlayers = {layers}\n")
    script = f"exec python3 -S -c {shlex.quote(WRITERS)} leave_and_hide"
    with at_work(place, script, "--config", str(config), "--sandbox", "plain"):
        wait_until_more(place, ["hidden"])
        for verb in ("diff", "commit"):
            done = place.ask(verb, "w", "--freeze")
            assert (done.status, done.out) == (2, b"")
            assert b"has neither 'pidns' nor 'cgroup'; give it one, or wait" in done.err
        wait_until_more(place, ["hidden"])


HOLD = """
import sys
from supervisor.workspace import freeze
from supervisor.workspace.workspace import Workspace
freeze.STOP_TIMEOUT_S = 1e9
with Workspace(*sys.argv[1:]) as workspace:
    print("locked", flush=True)
    with workspace.stopped():
        print("stopped", flush=True)
        sys.stdin.read()
"""


# spec WS8
@pytest.mark.nobody
def test_a_killed_command_leaves_no_child_stopped(place: Place) -> None:
    with at_work(place, f"echo ready; {COUNT}"):
        wait_until_counted(place, 0)
        command = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(place.state), "w"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert command.stdout is not None
        assert command.stdout.readline() == b"locked\n"
        assert command.stdout.readline() == b"stopped\n"
        first = counted(place)
        command.send_signal(signal.SIGKILL)
        command.communicate()
        wait_until_counted(place, first)


# spec WS18
@pytest.mark.nobody
@pytest.mark.parametrize("moment", ["stopping", "stopped"])
def test_a_killed_command_leaves_no_lock(
    place: Place, tmp_path: Path, moment: str
) -> None:
    config = tmp_path / "c.toml"
    more = [] if os.geteuid() == 0 else ["userns"]
    layers = [*more, "mountns", "pidns"]  # no cgroup: its processes get SIGSTOP
    config.write_text(f"[sandbox.plain]\nlayers = {layers}\n")
    script = f"echo ready; {COUNT}"
    options = ("--config", str(config), "--sandbox", "plain")
    with contextlib.ExitStack() as stack:
        stack.enter_context(at_work(place, script, *options))
        wait_until_counted(place, 0)
        if moment == "stopping":  # it is never done: a process goes on again and again
            with Workspace(str(place.state), "w") as workspace:
                ((pid, _),) = workspace.directory.processes()
            restless = ["sh", "-c", f"while kill -CONT {pid}; do :; done"]
            go_on = subprocess.Popen(restless, stderr=subprocess.DEVNULL)
            stack.callback(go_on.wait)
            stack.callback(go_on.kill)
        command = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(place.state), "w"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert command.stdout is not None
        assert command.stdout.readline() == b"locked\n"
        if moment == "stopped":
            assert command.stdout.readline() == b"stopped\n"
        guards = Path(f"/proc/{command.pid}/task/{command.pid}/children")
        until_s = time.monotonic() + 30
        while not guards.read_text():
            assert time.monotonic() < until_s
        command.send_signal(signal.SIGKILL)
        command.communicate()
        with Workspace(str(place.state), "w", patience_s=30):
            wait_until_counted(place, counted(place))


# spec WS10
def test_a_commit_of_a_running_child_is_frozen_or_refused(place: Place) -> None:
    (place.base / "gone").mkdir()
    (place.base / "gone/x").write_text("x\n")
    script = (
        "echo more >> a.txt; mkdir -p d/e; echo 1 > d/one; echo 2 > d/e/one; rm -r gone; echo ready; read go;"
        " cat a.txt d/one; ls; rm d/one d/e/one; echo two > d/two; echo again >> a.txt"
    )
    with at_work(place, script) as process:
        done = place.ask("commit", "w")
        assert done.status == 2
        assert b"diff and commit have --freeze" in done.err
        done = place.ask("commit", "w", "--freeze", "--mine", "a.txt")
        assert (done.status, b"cannot drop 'a.txt'" in done.err) == (2, True)
        done = place.ask("commit", "w", "--freeze")
        assert (done.status, done.err) == (0, b"")
        assert (place.base / "a.txt").read_text() == "hello\nmore\n"
        assert (place.base / "d/one").read_text() == "1\n"
        assert not (place.base / "gone").exists()
        assert place.ask("diff", "w", "--name-only").out == b""
        out, _ = process.communicate(b"go\n")
        assert out == b"hello\nmore\n1\na.txt\nd\n"
    # Its later change is a change of the committed file, and no conflict.
    done = place.ask("diff", "w", "--name-only")
    assert done.out == b"a.txt\nd/e/one\nd/one\nd/two\n"
    assert place.ask("commit", "w", "a.txt", "d/*").status == 0
    assert not (place.state / "workspaces/w/committed-in-use").exists()
    assert (place.base / "a.txt").read_text() == "hello\nmore\nagain\n"
    assert sorted(os.listdir(place.base / "d")) == ["e", "two"]
    assert os.listdir(place.base / "d/e") == []


# spec WS10
def test_a_commit_of_a_child_above_a_snapshot_is_refused_and_its_fork_is_committed(
    place: Place,
) -> None:
    place.named("echo one > one")
    assert place.ask("snapshot", "w", "first").status == 0
    with at_work(place, "rm a.txt; echo two > two; echo ready; read go"):
        done = place.ask("commit", "w", "--freeze")
        assert (done.status, done.out) == (2, b"")
        assert done.said("a child has it, above a snapshot")
        assert done.said("or commit a fork ('sandhost workspace fork w')")
        assert os.listdir(place.base) == ["a.txt"]
        done = place.ask("commit", "w", "--freeze", "--dry-run")
        assert (done.status, done.err) == (0, b"")
        assert place.ask("fork", "w").out == b"w-1\n"
        assert place.ask("commit", "w-1").status == 0
        assert sorted(os.listdir(place.base)) == ["one", "two"]


def test_a_process_that_was_stopped_before_stays_so(place: Place) -> None:
    script = "echo ready; sh -c 'kill -STOP $$'; echo on > on; sleep 1000"
    with at_work(place, script):
        until_s = time.monotonic() + 30
        while not (asleep := stopped_processes(place)):
            assert time.monotonic() < until_s
        with stopped(place):
            pass
        assert stopped_processes(place) == asleep


def stopped_processes(place: Place) -> list[int]:
    """Return which processes of the child are stopped by a signal."""
    with Workspace(str(place.state), "w") as workspace:
        ((pid, _),) = workspace.directory.processes()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    states = {int(child): stat_fields(int(child)) for child in children}
    return [pid for pid, found in states.items() if found and found[0] == b"T"]


def test_processes_that_cannot_be_seen_are_told_of() -> None:
    nothing = b"9999:9999"
    with (
        open(os.devnull, "rb") as lock,
        pytest.raises(FreezeError, match="are not to be seen from here"),
        guarded_stop(nothing, [(os.getpid(), 1)], lock.fileno()),
    ):
        pass


# spec WS8
def test_a_guard_that_its_host_has_reaped_leaves_no_child_stopped(place: Place) -> None:
    with at_work(place, f"echo ready; {COUNT}"):
        wait_until_counted(place, 0)
        before = {*children_of(os.getpid())}
        with stopped(place):
            first = counted(place)
            [guard] = {*children_of(os.getpid())} - before
            os.kill(guard, signal.SIGKILL)
            os.waitid(os.P_PID, guard, os.WEXITED)
            assert counted(place) == first
        wait_until_counted(place, first)


def stop_nothing(lock: int) -> None:
    """Stop the processes of a mount that is not there."""
    with guarded_stop(b"9999:9999", [(os.getpid(), 1)], lock):
        pass


# I1: the leak check of these tests looks.
def test_a_stop_that_gets_too_few_descriptors_holds_none() -> None:
    with open(os.devnull, "rb") as lock:
        for left in range(1, 4):  # it needs two pipes
            with (
                pytest.raises(OSError, match="Too many open files"),
                no_descriptor_left(left),
            ):
                stop_nothing(lock.fileno())


# I1
def test_a_guard_for_which_no_descriptor_is_left_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with (
        open(os.devnull, "rb") as lock,
        pytest.raises(OSError, match="Too many open files"),
    ):
        stop_nothing(lock.fileno())


# spec WS8: a terminal sends its signals to a group.
def test_a_guard_is_in_a_group_of_its_own_from_the_beginning() -> None:
    files = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    words = ["9999:9999", "1", f"{os.getpid()}:1"]
    guard = start_program(freeze_guard.__name__, words, files)
    assert os.getpgid(guard) == guard
    os.waitid(os.P_PID, guard, os.WEXITED)


AGENT = """
[workspace.w]
base = "{base}"
[policy.agent]
workspace = ["w"]
[child.agent]
command = ["sh", "-c", "echo more >> a.txt; {script}"]
policy = "agent"
"""


@contextmanager
def held_look(place: Place, host: Daemon) -> Iterator[tuple[int, Future[Outcome]]]:
    """Have a daemon look at the stopped child, and hold it there until the block ends.

    Gives the guard's pid, and the look, which cannot keep the text that was changed.
    """
    layers = place.state / "layers"
    layers.mkdir(exist_ok=True)
    before = {*children_of(host.process.pid)}
    with ThreadPoolExecutor() as threads, closing_fd(os.open(layers, DIRECTORY)) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        words = (
            "--freeze",
            "--name-only",
            "--control",
            str(host.where / "run/control"),
        )
        look = threads.submit(sandhost, "workspace", "diff", "w", *words)
        waiter = f":{os.fstat(fd).st_ino} "
        host.wait(lambda: any(
            "->" in line and waiter in line
            for line in Path("/proc/locks").read_text().splitlines()
        ), "a look that waits")  # fmt: skip
        [guard] = {*children_of(host.process.pid)} - before
        yield guard, look


# spec WS8
def test_the_guard_of_a_daemon_s_look_has_nothing_of_the_daemon_and_may_be_killed(
    place: Place, tmp_path: Path
) -> None:
    config = AGENT.format(base=place.base, script=COUNT)
    with daemon(tmp_path, config) as host:
        wait_until_counted(place, 0)
        with held_look(place, host) as (guard, look):
            first = counted(place)
            files = [os.readlink(one) for one in Path(f"/proc/{guard}/fd").iterdir()]
            pipes = [one for one in files if one.startswith("pipe:")]
            own = str(place.state / "workspaces/w")
            assert sorted(files) == sorted([*pipes, own, os.devnull])
            assert len({*pipes}) == 2
            # Else the end of a fleet session, or a terminal's signal, would end it.
            assert os.getsid(guard) == os.getsid(host.process.pid)
            assert os.getpgid(guard) == guard
            os.kill(guard, signal.SIGKILL)
            assert counted(place) == first
        assert look.result().out == b"a.txt\none\ntwo\n"
        wait_until_counted(place, first)
        assert host.end() == 0


# spec WS8, WS18
def test_a_killed_daemon_leaves_no_child_of_another_host_stopped(
    place: Place, tmp_path: Path
) -> None:
    script = f"echo more >> a.txt; echo ready; {COUNT}"
    with at_work(place, script), daemon(tmp_path) as host:
        wait_until_counted(place, 0)
        with held_look(place, host):
            first = counted(place)
            host.end(signal.SIGKILL)
            wait_until_counted(place, first)
