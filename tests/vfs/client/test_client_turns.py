"""Turns on a connection: processes, threads, handlers, dead holders (spec T5)."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from itertools import pairwise

import pytest

from protocol import messages as m
from tests.vfs.fakehost import FakeHost
from tests.vfs.fakeline import Gate
from vfs import client as door
from vfs.client import Client


def run_child(
    program: str, *arguments: str, line: socket.socket
) -> subprocess.Popen[bytes]:
    """Start a program that has the line as its connection."""
    return subprocess.Popen(
        [sys.executable, "-I", "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[line.fileno()],
        env={"FSPROXY_FD": str(line.fileno()), "PATH": os.environ["PATH"]},
    )


@pytest.mark.slow
def test_two_processes_share_one_connection(
    host: FakeHost, line: socket.socket
) -> None:
    # spec T5: every reply to the one who asked; so many that they meet for certain
    program = """
import sys
from vfs.client import Client
client, name = Client(), sys.argv[1]
fileno = client.open(name, "w+")
print(flush=True)
sys.stdin.readline()
for i in range(250):
    text = b"%s %d;" % (name.encode(), i) * 200
    assert client.write(fileno, text) == len(text)
    assert client.seek(fileno, i * 3) == i * 3
    assert client.read(fileno, 50_000) == (text * 2)[: 50_000][i * 3 : len(text)]
    client.seek(fileno, 0)
"""
    with (
        run_child(program, "a", line=line) as first,
        run_child(program, "bb", line=line) as second,
    ):
        for child in (first, second):
            assert child.stdout is not None
            child.stdout.readline()
        for child in (first, second):
            assert child.stdin is not None
            child.stdin.write(b"go\n")
            child.stdin.flush()
    assert (first.returncode, second.returncode) == (0, 0)
    owners = [r.fileno for r in host.peers[0].seen if isinstance(r, m.FileRequest)]
    assert len(owners) == 2 * 4 * 250
    changes = sum(a != b for a, b in pairwise(owners))
    assert changes > 1, "they ran one after the other: nothing was shown"


@pytest.mark.slow
def test_a_forked_process_takes_turns_with_its_parent(
    host: FakeHost, line: socket.socket
) -> None:
    # spec T5
    program = """
import os, threading
from vfs.client import Client
client = Client()
busy = threading.Thread(target=lambda: [client.ping() for _ in range(300)])
busy.start()
pid = os.fork()
name = "parent" if pid else "child"
fileno = client.open(name, "w+")
for i in range(100):
    client.seek(fileno, 0)
    client.write(fileno, name.encode())
    client.seek(fileno, 0)
    assert client.read(fileno, 10) == name.encode()
if pid:
    busy.join()
    assert os.waitpid(pid, 0)[1] == 0
else:
    os._exit(0)
"""
    with run_child(program, line=line) as child:
        pass
    assert child.returncode == 0
    assert host.files == {b"parent": b"parent", b"child": b"child"}


def test_threads_share_one_client(client: Client) -> None:
    # spec T5
    wrong = []

    def work(name: str) -> None:
        fileno = client.open(name, "w+")
        for i in range(50):
            text = f"{name}{i}".encode() * 100
            client.seek(fileno, 0)
            client.write(fileno, text)
            client.seek(fileno, 0)
            if client.read(fileno, len(text)) != text:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_clients_of_one_process_share_its_door(
    host: FakeHost, line: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec T5: a record lock does not keep the threads of one process apart
    monkeypatch.setenv("FSPROXY_FD", str(line.fileno()))
    gate = host.gates[m.Sync] = Gate()
    first, second = Client(), Client()
    fileno = first.open("a", "w")
    threads = [
        threading.Thread(target=first.sync, args=(fileno,)),
        threading.Thread(target=second.ping),
    ]
    threads[0].start()
    gate.reached.wait()
    threads[1].start()
    assert not any(isinstance(r, m.Ping) for r in host.peers[0].seen)
    gate.opened.set()
    for thread in threads:
        thread.join()
    assert isinstance(host.peers[0].seen[-1], m.Ping)


@pytest.mark.slow
def test_a_process_that_died_inside_a_request_is_not_answered_for(
    client: Client, host: FakeHost, line: socket.socket
) -> None:
    # spec T5: its reply is still to come, and it would be taken for ours
    gate = host.gates[m.Read] = Gate()
    host.files[b"a"] = bytearray(b"secret")
    program = """
from vfs.client import Client
client = Client()
client.read(client.open("a"), 6)
"""
    with run_child(program, line=line) as child:
        gate.reached.wait()
        child.kill()
    with pytest.raises(door.ConnectionLostError, match="in the middle of a request"):
        client.ping()
    gate.opened.set()
    with pytest.raises(door.ConnectionLostError, match="in the middle of a request"):
        client.ping()


@pytest.mark.slow
def test_a_process_that_died_between_requests_leaves_nothing(
    client: Client, host: FakeHost, line: socket.socket
) -> None:
    # spec T5
    program = "import os\nfrom vfs.client import Client\nClient().ping()\nos.abort()"
    with run_child(program, line=line) as child:
        pass
    assert child.returncode == -signal.SIGABRT
    client.ping()


def test_a_signal_handler_cannot_come_between(client: Client, host: FakeHost) -> None:
    # A second request inside the first one would deadlock, or take its reply.
    gate = host.gates[m.Ping] = Gate()
    caught: list[int | None] = []
    came = threading.Event()

    def handle(*_: object) -> None:
        if came.is_set():
            return
        came.set()
        try:
            client.caps()
        except door.FsProxyError as why:
            caught.append(why.errno)
        gate.opened.set()

    def interrupt() -> None:
        gate.reached.wait()
        # One that comes just before recv(2) is handled after it.
        while not came.wait(0.05):
            signal.pthread_kill(main, signal.SIGUSR1)

    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        client.ping()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert caught == [errno.EDEADLK]
    client.ping()


def test_an_interrupted_request_gives_the_connection_up(
    client: Client, host: FakeHost, line: socket.socket
) -> None:
    # spec T5: for this process and for those that share it
    gate = host.gates[m.Ping] = Gate()

    class InterruptedHereError(Exception):
        pass

    came = threading.Event()

    def handle(*_: object) -> None:
        if not came.is_set():
            came.set()
            raise InterruptedHereError

    def interrupt() -> None:
        gate.reached.wait()
        # One that comes just before recv(2) is handled after it.
        while not came.wait(0.05):
            signal.pthread_kill(main, signal.SIGUSR1)

    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(InterruptedHereError):
            client.ping()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
        gate.opened.set()
    with pytest.raises(door.ConnectionLostError, match="interrupted"):
        client.caps()
    with pytest.raises(door.ConnectionLostError, match="in the middle of a request"):
        Client((line.fileno(),)).caps()
