"""The `sandhost fd` commands, where a signal or a stream ends them.

Processes of their own, before a host whose replies the test holds.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from protocol import messages as m
from tests.vfs.fakehost import FakeHost
from tests.vfs.fakeline import Gate

pytestmark = pytest.mark.slow

PROGRAM = (
    "import sys; from vfs.client.shell.fd import main; sys.exit(main(sys.argv[1:]))"
)

PATIENCE_S = 30
"""Longer than anything here takes."""

STATUS = {
    signal.SIGINT: 130,
    signal.SIGTERM: -signal.SIGTERM,
    signal.SIGHUP: -signal.SIGHUP,
}
"""Signal -> how a command ends that it has ended."""


@pytest.fixture
def host() -> Iterator[FakeHost]:
    with FakeHost() as host:
        yield host


@contextmanager
def started(
    line: socket.socket, *words: str, parting_s: int = PATIENCE_S, stdin: int = -1
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command.

    Args:
        line: its FD 3.
        words: behind `fd`.
        parting_s: how long it may take to clean up.
        stdin: a descriptor; -1 for a pipe.
    """
    patched = f"import vfs.client.shell.frame; vfs.client.shell.frame.PARTING_S = {parting_s}; {PROGRAM}"
    with subprocess.Popen(
        [sys.executable, "-I", "-c", patched, *words],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[line.fileno()],
        env={"FSPROXY_FD": str(line.fileno()), "PATH": os.environ["PATH"]},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def feed(process: subprocess.Popen[bytes], *, pieces: int = 1) -> None:
    """Give it pieces of input that it takes one by one, and leave its input open.

    Content that was put before the last of them has its token then.
    """
    assert process.stdin is not None
    for _ in range(pieces):
        process.stdin.write(b"x")
        process.stdin.flush()
        while any(fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4))):
            assert process.poll() is None


def seen(host: FakeHost) -> list[type[m.Request]]:
    """Return what was asked for, but for what the host knows at all."""
    kinds = [type(request) for request in host.peers[0].seen]
    return [kind for kind in kinds if kind is not m.Caps]


@pytest.mark.parametrize("number", STATUS)
def test_a_signal_that_comes_with_the_token_leaves_no_content(
    host: FakeHost, number: signal.Signals
) -> None:
    host.raw_replies = [b"OK t1\n", b"OK 1\nx"]
    gate = host.gates[m.FdPut] = Gate()
    with host.connect() as line, started(line, "wrap") as process:
        feed(process)
        assert gate.reached.wait(PATIENCE_S)
        process.send_signal(number)
        # It says so when it has waited for a while: the signal has been taken then.
        assert process.stderr is not None
        assert b"waits for the reply" in process.stderr.readline()
        gate.opened.set()
        assert process.wait(PATIENCE_S) == STATUS[number]
    assert seen(host) == [m.FdPut, m.FdCall]


@pytest.mark.parametrize("number", STATUS)
def test_a_host_that_does_not_answer_keeps_nobody(
    host: FakeHost, number: signal.Signals
) -> None:
    host.raw_replies = [b"OK t1\n"] * 2
    gate = host.gates[m.FdCall] = Gate()
    with host.connect() as line, started(line, "wrap", parting_s=1) as process:
        feed(process, pieces=2)
        process.send_signal(number)
        assert gate.reached.wait(PATIENCE_S)
        assert process.wait(PATIENCE_S) == STATUS[number]


def test_a_second_signal_does_not_wait_for_what_the_first_has_dropped(
    host: FakeHost,
) -> None:
    host.raw_replies = [b"OK t1\n"] * 2
    gate = host.gates[m.FdCall] = Gate()
    with host.connect() as line, started(line, "wrap", parting_s=1000) as process:
        feed(process, pieces=2)
        process.send_signal(signal.SIGTERM)
        assert gate.reached.wait(PATIENCE_S)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == -signal.SIGTERM


def test_a_signal_that_was_switched_off_stays_off(host: FakeHost) -> None:
    host.raw_replies = [b"OK t1\n", b"OK t1\n", b"OK 1\nx"]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with host.connect() as line, started(line, "wrap") as process:
            feed(process, pieces=2)
            process.send_signal(signal.SIGHUP)
            out, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (process.returncode, out) == (0, b"x")  # the host's answer


def test_an_input_that_fails_is_told_and_leaves_no_content(host: FakeHost) -> None:
    host.raw_replies = [b"OK t1\n", b"OK 1\nx"]
    gate = host.gates[m.FdPut] = Gate()
    gate.opened.set()
    ours, theirs = socket.socketpair()
    with (
        theirs,
        host.connect() as line,
        started(line, "wrap", stdin=theirs.fileno()) as process,
    ):
        ours.sendall(b"x")
        assert gate.reached.wait(PATIENCE_S)
        theirs.sendall(b"unread")  # so that our end does not close in peace, unix(7)
        ours.close()
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert (
        said == b"sandhost fd: cannot read standard input: Connection reset by peer\n"
    )
    assert seen(host) == [m.FdPut, m.FdCall]


def test_a_token_that_cannot_be_printed_is_dropped(host: FakeHost) -> None:
    host.raw_replies = [b"OK t1\n", b"OK 0\n"]
    with host.connect() as line:
        done = _shell(line, "put </dev/null >/dev/full")
    assert done.stderr.endswith(b"output: No space left on device\n")
    assert seen(host) == [m.FdPut, m.FdCall]


def test_content_that_is_added_to_is_never_dropped(host: FakeHost) -> None:
    host.raw_replies = [b"OK t1\n"]
    with host.connect() as line:
        assert _shell(line, "put t1 </dev/null >/dev/full").returncode == 1
    assert seen(host) == [m.FdPut]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("wrap <&-", "cannot read standard input: Bad file descriptor"),
        ("list >&-", "cannot write to standard output: Bad file descriptor"),
        ("list >/dev/full", "cannot write to standard output: No space left on device"),
    ],
)
def test_a_stream_that_fails_is_named(host: FakeHost, words: str, said: str) -> None:
    host.raw_replies = [b"OK 1\nx"]
    with host.connect() as line:
        done = _shell(line, words)
    assert (done.returncode, done.stderr.decode()) == (1, f"sandhost fd: {said}\n")


def _shell(line: socket.socket, words: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command with the redirections of a shell."""
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -I -c "$1" {words}', sys.executable, PROGRAM],
        capture_output=True,
        pass_fds=[line.fileno()],
        env={"FSPROXY_FD": str(line.fileno()), "PATH": os.environ["PATH"]},
        check=False,
    )
