"""The `sandhost fs` commands: run as a child runs them, in processes of their own."""

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol import limits
from protocol import messages as m
from tests.vfs.fakehost import FakeHost
from tests.vfs.fakeline import Gate

pytestmark = pytest.mark.slow

PYTHON = sys.executable
PROGRAM = (
    "import sys; from vfs.client.shell.fs import main; sys.exit(main(sys.argv[1:]))"
)
FS = f"{shlex.quote(PYTHON)} -I -c {shlex.quote(PROGRAM)}"


@pytest.fixture(params=["attach", "shared"])
def host(request: pytest.FixtureRequest) -> Iterator[FakeHost]:
    """A host with ATTACH, and one without: the commands do the same with both."""
    unknown = frozenset({b"ATTACH"} if request.param == "shared" else set())
    with FakeHost(unknown=unknown) as host:
        yield host


@pytest.fixture
def line(host: FakeHost) -> Iterator[socket.socket]:
    with host.connect() as line:
        yield line


def environment(line: socket.socket) -> dict[str, str]:
    return {"FSPROXY_FD": str(line.fileno()), "PATH": os.environ["PATH"]}


def fs(
    line: socket.socket, *arguments: str | bytes, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Run one command; its standard streams are pipes."""
    return subprocess.run(
        [PYTHON, "-I", "-c", PROGRAM, *arguments],
        input=stdin,
        capture_output=True,
        pass_fds=[line.fileno()],
        env=environment(line),
        check=False,
    )


def shell(line: socket.socket, script: str) -> subprocess.CompletedProcess[bytes]:
    """Run a shell script in which `fs` is the command."""
    return subprocess.run(
        ["/bin/sh", "-c", f'fs() {{ {FS} "$@"; }}\n{script}'],
        capture_output=True,
        pass_fds=[line.fileno()],
        env=environment(line),
        check=False,
    )


def said(done: subprocess.CompletedProcess[bytes]) -> tuple[int, bytes, str]:
    return done.returncode, done.stdout, done.stderr.decode()


# The effect of each command


def test_cat_writes_files_one_after_the_other(
    host: FakeHost, line: socket.socket
) -> None:
    big = os.urandom(2_500_000)
    host.files |= {b"a": bytearray(big), b"b": bytearray(b"end")}
    assert said(fs(line, "cat", "a", "b")) == (0, big + b"end", "")
    assert host.open_files() == []


def test_cat_goes_on_after_a_file_that_fails(
    host: FakeHost, line: socket.socket
) -> None:
    host.files[b"b"] = bytearray(b"end")
    why = "sandhost fs: cannot open 'a': No such file or directory\n"
    assert said(fs(line, "cat", "a", "b")) == (1, b"end", why)


def test_put_stores_what_comes(host: FakeHost, line: socket.socket) -> None:
    big = os.urandom(2_500_000)
    assert said(fs(line, "put", "a", stdin=big)) == (0, b"", "")
    assert host.files[b"a"] == big
    assert said(fs(line, "put", "--append", "a", stdin=b"more")) == (0, b"", "")
    assert host.files[b"a"] == big + b"more"
    assert said(fs(line, "put", "a")) == (0, b"", "")
    assert host.files[b"a"] == b""
    assert host.open_files() == []


def test_a_pipeline_shares_the_line(host: FakeHost, line: socket.socket) -> None:
    # spec T5
    content = os.urandom(5_000_000)
    host.files[b"a"] = bytearray(content)
    done = shell(line, "fs cat a | fs put b; fs cat b | wc -c")
    assert said(done) == (0, b"5000000\n", "")
    assert host.files[b"b"] == content


def test_many_commands_at_once_share_the_line(
    host: FakeHost, line: socket.socket
) -> None:
    # spec T5
    for i in range(8):
        host.files[b"in%d" % i] = bytearray(b"%d" % i * 100_000)
    script = "\n".join(f"fs cat in{i} | fs put out{i} &" for i in range(8))
    assert said(shell(line, f"{script}\nwait")) == (0, b"", "")
    assert all(host.files[b"out%d" % i] == b"%d" % i * 100_000 for i in range(8))


def test_cp_copies(host: FakeHost, line: socket.socket) -> None:
    host.files[b"a b"] = bytearray(os.urandom(2_200_000))
    assert said(fs(line, "cp", "a b", "c")) == (0, b"", "")
    assert host.files[b"c"] == host.files[b"a b"]
    assert host.open_files() == []


def test_cp_leaves_the_target_if_there_is_nothing_to_copy(
    host: FakeHost, line: socket.socket
) -> None:
    host.files[b"b"] = bytearray(b"old")
    code, _, why = said(fs(line, "cp", "a", "b"))
    assert (code, why) == (
        1,
        "sandhost fs: cannot open 'a': No such file or directory\n",
    )
    assert host.files[b"b"] == b"old"


def test_cp_does_not_empty_a_file_by_copying_it_to_itself(
    host: FakeHost, line: socket.socket
) -> None:
    host.files[b"a"] = bytearray(b"old")
    code, _, why = said(fs(line, "cp", "a", "./a"))
    assert (code, why) == (1, "sandhost fs: 'a' and './a' are the same file\n")
    assert host.files[b"a"] == b"old"


# A hard link, a symbolic one, a directory's other name: the host's STAT names no inode.
@pytest.mark.parametrize("size", [3_000_000, 17_000_000])
def test_cp_loses_nothing_of_a_file_that_it_copies_to_its_other_name(
    host: FakeHost, line: socket.socket, size: int
) -> None:
    host.files[b"a"] = host.files[b"b"] = bytearray(os.urandom(size))
    before = bytes(host.files[b"a"])
    code, _, why = said(fs(line, "cp", "a", "b"))
    if size > limits.MAX_READ_BYTES:
        assert code == 1
        assert why.startswith("sandhost fs: 'a' and 'b' look like the same file: ")
    else:
        assert (code, why) == (0, "")
    assert host.files[b"a"] == before
    assert host.open_files() == []


# Where the target may be one that is only written, STAT is not asked: what is lost is told.
def test_cp_tells_that_a_long_file_was_cut_off(
    host: FakeHost, line: socket.socket
) -> None:
    host.files[b"a"] = host.files[b"/b"] = bytearray(17_000_000)
    code, _, why = said(fs(line, "cp", "--restricted", "a", "/b"))
    assert code == 1
    cut = 17_000_000 - limits.MAX_READ_BYTES
    assert why.startswith(f"sandhost fs: 'a' became {cut} bytes shorter while ")


def test_ls_lists_names_as_they_are(host: FakeHost, line: socket.socket) -> None:
    # spec O8
    host.files |= {b"b": bytearray(), b"a": bytearray(), b"\xff": bytearray()}
    host.directories.add(b"d")
    assert said(fs(line, "ls")) == (0, b"a\nb\nd/\n\xff\n", "")
    code, out, _ = said(fs(line, "ls", "--json", "."))
    assert code == 0
    assert {"name": "a", "kind": "file"} in json.loads(out)


def test_stat_tells_kind_size_and_time(host: FakeHost, line: socket.socket) -> None:
    host.files[b"a"] = bytearray(b"12345")
    out = b"a: file, 5 bytes, changed 1970-01-01T00:00:00Z\n"
    assert said(fs(line, "stat", "a")) == (0, out, "")
    code, out, _ = said(fs(line, "stat", "--json", "a"))
    assert (code, json.loads(out)) == (0, {"size": 5, "mtime_ns": 1, "kind": "file"})


def test_mkdir_rm_and_mv(host: FakeHost, line: socket.socket) -> None:
    host.files |= {b"a": bytearray(b"1"), b"b": bytearray(b"2")}
    assert said(fs(line, "mkdir", "d", "e")) == (0, b"", "")
    assert host.directories >= {b"d", b"e"}
    assert said(fs(line, "mv", "a", "c\nd")) == (0, b"", "")
    code, _, why = said(fs(line, "rm", "x", "b"))
    assert (code, why) == (
        1,
        "sandhost fs: cannot remove 'x': No such file or directory\n",
    )
    assert host.files == {b"c\nd": b"1"}


def test_the_view_is_what_the_option_or_the_environment_says(
    host: FakeHost, line: socket.socket
) -> None:
    # spec A1
    shell(
        line,
        "fs cat a; fs cat --top-level a; export FSPROXY_TOP_LEVEL=true; fs cat a;"
        " fs cat --restricted a",
    )
    flags = [r.flag for peer in host.peers for r in peer.seen if isinstance(r, m.Open)]
    assert flags == [False, True, True, False]


# Names and arguments


@pytest.mark.parametrize("name", [b"-x", b"--json", b"\xff\xfe", b"a  b", b"--"])
def test_any_name_can_be_given(
    host: FakeHost, line: socket.socket, name: bytes
) -> None:
    # spec O8
    assert said(fs(line, "put", "--", name, stdin=b"x")) == (0, b"", "")
    assert host.files == {name: b"x"}


def test_control_bytes_do_not_reach_the_terminal(
    host: FakeHost, line: socket.socket
) -> None:
    # attack 13
    code, _, why = said(fs(line, "cat", "a\x1b[2Jb"))
    assert (code, why) == (
        1,
        "sandhost fs: cannot open 'a?[2Jb': No such file or directory\n",
    )
    code, _, why = said(fs(line, "cat", "a\nb"))
    assert (code, why.count("\n")) == (1, 1)
    assert "cannot be sent" in why
    assert host.open_files() == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "no command"),
        (["nonsense"], "unknown command 'nonsense'"),
        (["cat"], "cat takes NAME..., got 0 names"),
        (["cp", "a"], "cp takes FROM TO, got 1 names"),
        (["stat", "a", "b"], "stat takes NAME, got 2 names"),
        (["cat", "--append", "a"], "unknown option '--append' for cat"),
        (["ls", "-l"], "unknown option '-l' for ls"),
        (["rm", "-\x1b"], "unknown option '-?' for rm"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(arguments: list[str], why: str) -> None:
    done = subprocess.run(
        [PYTHON, "-I", "-c", PROGRAM, *arguments], capture_output=True, check=False
    )
    expected = f"sandhost fs: {why}; see: sandhost fs --help\n"
    assert said(done) == (2, b"", expected)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["help"], ["cat", "--help"], ["put", "x", "-h"]]
)
def test_help_needs_no_host_and_has_an_example(arguments: list[str]) -> None:
    done = subprocess.run(
        [PYTHON, "-I", "-c", PROGRAM, *arguments], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"usage: sandhost fs ")
    assert b"\nexample: " in done.stdout


@pytest.mark.parametrize("value", ["3", "900", "x"])
def test_outside_a_child_it_says_what_to_do(value: str) -> None:
    # spec T1
    done = subprocess.run(
        [PYTHON, "-I", "-c", PROGRAM, "ls"],
        capture_output=True,
        env={"FSPROXY_FD": value},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"sandhost fs: ")
    assert done.stderr.endswith(b"start it with `sandhost run -- COMMAND`\n")
    assert done.stderr.count(b"\n") == 1


# Faults


def test_a_reader_that_has_enough_ends_it_quietly(
    host: FakeHost, line: socket.socket
) -> None:
    host.files[b"a"] = bytearray(5_000_000)
    done = shell(line, "{ fs cat a; echo $? >&2; } | head -c 1 >/dev/null")
    assert said(done) == (0, b"", "141\n")
    with_next = shell(line, "fs stat a")
    assert with_next.returncode == 0


def test_a_full_disk_behind_standard_output_is_told(
    host: FakeHost, line: socket.socket
) -> None:
    host.files[b"a"] = bytearray(10)
    done = shell(line, "fs cat a >/dev/full")
    why = "sandhost fs: cannot write to standard output: No space left on device\n"
    assert said(done) == (1, b"", why)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("fs cat a >&-", "cannot write to standard output: Bad file descriptor"),
        ("fs put a <&-", "cannot read standard input: Bad file descriptor"),
    ],
)
def test_closed_streams_are_told(
    host: FakeHost, line: socket.socket, script: str, why: str
) -> None:
    host.files[b"a"] = bytearray(10)
    assert said(shell(line, script)) == (1, b"", f"sandhost fs: {why}\n")
    # The next one finds the line in order.
    assert shell(line, "fs stat a").returncode == 0


def test_a_write_that_fails_is_told_and_the_file_is_let_go(
    host: FakeHost, line: socket.socket
) -> None:
    # spec W5
    host.fails[m.Write] = b"ERROR failed to write: No space left on device\n"
    code, _, why = said(fs(line, "put", "a", stdin=b"x"))
    assert (code, why) == (
        1,
        "sandhost fs: cannot write 'a': No space left on device\n",
    )
    for peer in host.peers[1:]:
        peer.gone.wait()
    assert host.open_files() == []


def test_a_close_that_fails_is_told(host: FakeHost, line: socket.socket) -> None:
    # spec C1: the file was not published, and the one who stored it must know
    host.fails[m.Close] = b"ERROR failed to close: Disk quota exceeded\n"
    code, _, why = said(fs(line, "put", "a", stdin=b"x"))
    assert (code, why) == (1, "sandhost fs: cannot close 'a': Disk quota exceeded\n")


def test_what_was_not_stored_whole_is_not_closed_but_dropped() -> None:
    # spec A3b: CLOSE would publish it
    with FakeHost() as host, host.connect() as line:
        host.fails[m.Write] = b"ERROR failed to write: No space left on device\n"
        assert fs(line, "put", "a", stdin=b"x").returncode == 1
        host.peers[1].gone.wait()
        assert not any(isinstance(r, m.Close) for r in host.peers[1].seen)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_killed_inside_a_request_it_leaves_the_line_in_order(number: int) -> None:
    # spec T5: with ATTACH the torn request is on a connection of its own
    with FakeHost() as host, host.connect() as line:
        gate = host.gates[m.Read] = Gate()
        host.files[b"a"] = bytearray(b"x")
        with subprocess.Popen(
            [PYTHON, "-I", "-c", PROGRAM, "cat", "a"],
            pass_fds=[line.fileno()],
            env=environment(line),
        ) as process:
            gate.reached.wait()
            process.send_signal(number)
        assert process.returncode == (130 if number == signal.SIGINT else -number)
        gate.opened.set()
        host.peers[1].gone.wait()
        assert host.open_files() == []
        assert shell(line, "fs cat a").stdout == b"x"


STAT = (PYTHON, "-I", "-c", PROGRAM, "stat", "a")


@contextmanager
def asking(
    host: FakeHost,
    line: socket.socket,
    *argv: str,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], Gate]]:
    """Run a command whose STAT the host has, and does not answer until the gate opens."""
    host.files[b"a"] = bytearray(b"x")
    gate = host.gates[m.Stat] = Gate()
    with subprocess.Popen(
        argv,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=[line.fileno()],
        env=environment(line),
    ) as process:
        gate.reached.wait()
        yield process, gate


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_inside_a_shared_request_waits_for_the_reply(
    host: FakeHost, line: socket.socket, number: int
) -> None:
    # spec T5: FD 3 is the whole child's
    pipe = subprocess.PIPE
    with asking(host, line, *STAT, stdout=pipe, stderr=pipe) as (process, gate):
        process.send_signal(number)
        # It says so when it has waited for a while: the signal has been taken then.
        assert process.stderr is not None
        assert b"waits for the reply" in process.stderr.readline()
        gate.opened.set()
        out, _ = process.communicate()
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert out == b""
    assert fs(line, "stat", "a").returncode == 0


# Sent to another thread: as one that comes when this one is about to wait, and knows of none.
UNHEARD = """
import signal, sys, threading
from vfs.client.shell.fs import main
def send():
    sys.stdin.readline()
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=send, daemon=True).start()
sys.exit(main(sys.argv[1:]))
"""


def test_a_signal_that_breaks_off_no_wait_is_heard_all_the_same(
    host: FakeHost, line: socket.socket
) -> None:
    argv = (PYTHON, "-I", "-c", UNHEARD, "stat", "a")
    pipe = subprocess.PIPE
    with asking(host, line, *argv, stdin=pipe, stderr=pipe) as (process, gate):
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        heard, _, _ = select.select([process.stderr], [], [], 60)
        gate.opened.set()
        assert heard
        assert b"waits for the reply" in process.stderr.read()
    assert process.returncode == -signal.SIGTERM


def test_no_alarm_is_left_to_what_comes_after_a_command(
    host: FakeHost, line: socket.socket
) -> None:
    host.files[b"a"] = bytearray(b"x")
    code = "import signal, vfs.client.shell.fs; vfs.client.shell.fs.main(['stat', 'a']); print(signal.getitimer(0))"
    done = subprocess.run(
        [PYTHON, "-I", "-c", code],
        capture_output=True,
        pass_fds=[line.fileno()],
        env=environment(line),
        check=True,
    )
    assert done.stdout.splitlines()[-1] == b"(0.0, 0.0)"


def test_a_second_signal_does_not_wait(host: FakeHost, line: socket.socket) -> None:
    with asking(host, line, *STAT, stderr=subprocess.PIPE) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert "in the middle of a request" in said(fs(line, "stat", "a"))[2]


def test_a_signal_that_was_switched_off_stays_off(
    host: FakeHost, line: socket.socket
) -> None:
    argv = ("/bin/sh", "-c", f"trap '' INT; exec {FS} stat a")
    null = subprocess.DEVNULL
    with asking(host, line, *argv, stdout=null) as (process, gate):
        process.send_signal(signal.SIGINT)
        gate.opened.set()
    assert process.returncode == 0


def test_a_host_that_is_gone_is_one_line(host: FakeHost, line: socket.socket) -> None:
    host.raw_replies.append(b"")
    code, _, why = said(fs(line, "stat", "a"))
    assert code == 1
    assert why == (
        "sandhost fs: cannot stat 'a': the host is gone: it closed the connection\n"
    )


def test_a_non_blocking_standard_input_is_waited_for(
    host: FakeHost, line: socket.socket
) -> None:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    with subprocess.Popen(
        [PYTHON, "-I", "-c", PROGRAM, "put", "a"],
        stdin=ours,
        pass_fds=[line.fileno()],
        env=environment(line),
    ) as process:
        os.close(ours)
        gate = host.gates[m.Open] = Gate()
        gate.reached.wait()
        gate.opened.set()
        os.write(theirs, b"late")
        os.close(theirs)
    assert process.returncode == 0
    assert host.files[b"a"] == b"late"


def test_it_loads_nothing_that_it_does_not_need(
    host: FakeHost, line: socket.socket
) -> None:
    host.files[b"a"] = bytearray(b"x")
    program = (
        "import sys; from vfs.client.shell.fs import main; main(['cat', 'a']);"
        " print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [PYTHON, "-I", "-S", "-c", f"import sys; sys.path.insert(0, '.'); {program}"],
        capture_output=True,
        pass_fds=[line.fileno()],
        env=environment(line),
        cwd=Path(__file__).resolve().parents[3],
        check=True,
    )
    heavy = {"re", "json", "socket", "typing", "enum", "collections", "argparse"}
    assert not heavy & set(done.stderr.decode().split())


# spec X1: the payload of a command that is not known would be read as requests.
@pytest.mark.parametrize("more", [frozenset[bytes](), frozenset({b"CAPS", b"ATTACH"})])
def test_mv_asks_nobody_who_does_not_know_it(more: frozenset[bytes]) -> None:
    with FakeHost(unknown=more | {b"RENAME"}) as host, host.connect() as line:
        host.files[b"a"] = bytearray(b"x")
        done = fs(line, "mv", "a", "REMOVE true a\n")
        assert (done.returncode, done.stdout) == (1, b"")
        text = "the host does not know RENAME: it speaks an older FS Proxy protocol"
        assert f"'REMOVE true a?': {text}; use cp and rm\n" in done.stderr.decode()
        assert fs(line, "stat", "a").returncode == 0
        assert b"a" in host.files


@pytest.mark.parametrize(
    ("words", "fails", "text"),
    [
        (
            ("mkdir", ".."),
            (m.MakeDir, b"failed to make '..': Invalid argument"),
            "make directory '..': '.' and '..' name no entry of a directory; write its",
        ),
        (
            ("rm", "a/./"),
            (m.Remove, b"failed to remove 'a/./': Invalid argument"),
            "remove 'a/./': '.' and '..' name no entry of a directory",
        ),
        (
            ("mv", "a", "b/.."),
            (m.Rename, b"failed to rename 'a': Invalid argument"),
            "rename 'a' to 'b/..': '.' and '..' name no entry of a directory",
        ),
        (
            ("rm", "a"),
            (m.Remove, b"failed to remove 'a': Invalid argument"),
            "remove 'a': Invalid argument\n",
        ),
        (
            ("ls", "d"),
            (m.ListDir, b"failed to list 'd': Value too large for defined data type"),
            "list 'd': the directory has more entries than one answer may tell (100,000)",
        ),
    ],
)
def test_what_the_system_says_badly_is_said_well(
    words: tuple[str, ...], fails: tuple[type[m.Request], bytes], text: str
) -> None:
    request, reply = fails
    with FakeHost() as host, host.connect() as line:
        host.fails[request] = b"ERROR " + reply + b"\n"
        done = fs(line, *words)
    assert done.returncode == 1
    assert f"sandhost fs: cannot {text}" in done.stderr.decode()
