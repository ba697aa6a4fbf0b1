"""The blocking client against a host in memory: requests, errors, and who may be next.

Nested ends, the Trio twin and the commands have files of their own.
"""

import csv
import errno
import gc
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import PurePosixPath

import pytest

from protocol import messages as m
from tests.helpers.fakehost import FakeHost, Gate
from vfs import client as door
from vfs.client import Client
from vfs.client_errors import from_reply


@pytest.fixture
def host() -> Iterator[FakeHost]:
    with FakeHost() as host:
        yield host


@pytest.fixture
def line(host: FakeHost) -> Iterator[socket.socket]:
    with host.connect() as line:
        yield line


@pytest.fixture
def client(line: socket.socket) -> Client:
    return Client((line.fileno(),))


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


# Files


def test_what_is_written_is_read_again(client: Client, host: FakeHost) -> None:
    fileno = client.open("a", "w+")
    assert client.write(fileno, b"one\ntwo\n") == 8
    assert client.seek(fileno, 4) == 4
    assert client.read(fileno, 100) == b"two\n"
    assert client.read(fileno, 100) == b""
    client.truncate(fileno, 3)
    client.sync(fileno)
    client.close(fileno)
    assert host.files == {b"a": b"one"}
    assert host.open_files() == []


def test_one_read_asks_once(client: Client, host: FakeHost) -> None:
    host.files[b"a"] = bytearray(b"x" * 10)
    fileno = client.open("a")
    assert client.read(fileno, 4) == b"xxxx"
    assert host.peers[0].seen[1:] == [m.Read(b"1000", 4)]


def test_a_large_body_is_received_straight_into_memory(
    client: Client, host: FakeHost
) -> None:
    content = os.urandom(3_000_000)
    host.files[b"a"] = bytearray(content)
    into = bytearray(len(content) + 5)
    assert client.readinto(client.open("a"), into) == len(content)
    assert into == content + bytes(5)


def test_read_all_goes_on_beyond_the_cap_of_one_read(
    client: Client, host: FakeHost
) -> None:
    # spec R1
    content = bytes(range(256)) * 65_537
    host.files[b"a"] = bytearray(content)
    assert client.read_all(client.open("a")) == content
    reads = [request for request in host.peers[0].seen if isinstance(request, m.Read)]
    assert len(reads) == 3


def test_data_above_the_hosts_cap_goes_in_pieces() -> None:
    # spec W3
    with FakeHost(max_write=1000) as host, host.connect() as line:
        client = Client((line.fileno(),))
        fileno = client.open("a", "w")
        assert client.write(fileno, b"x" * 2500) == 2500
        sizes = [r.size for r in host.peers[0].seen if isinstance(r, m.Write)]
        # The first was refused whole and told the cap.
        assert sizes == [2500, 1000, 1000, 500]
        assert host.files[b"a"] == b"x" * 2500


def test_nothing_can_be_written(client: Client, host: FakeHost) -> None:
    # spec W1
    fileno = client.open("a", "w")
    assert client.write(fileno, b"") == 0
    assert host.peers[0].seen[-1] == m.Write(b"1000", 0)


def test_any_buffer_can_be_written(client: Client, host: FakeHost) -> None:
    fileno = client.open("a", "w")
    assert client.write(fileno, memoryview(b"abcd").cast("I")) == 4
    assert host.files[b"a"] == b"abcd"


def test_a_non_blocking_descriptor_is_waited_for(
    client: Client, host: FakeHost, line: socket.socket
) -> None:
    # Whoever shares the descriptor may have changed it for all.
    line.setblocking(False)
    content = os.urandom(5_000_000)
    fileno = client.open("a", "w+")
    client.write(fileno, content)
    client.seek(fileno, 0)
    assert client.read(fileno, len(content)) == content
    client.attach().disconnect()


def test_signals_do_not_tear_a_request(client: Client) -> None:
    main = threading.get_ident()
    over = threading.Event()

    def pester() -> None:
        while not over.wait(0.0005):
            signal.pthread_kill(main, signal.SIGUSR1)

    count = []
    before = signal.signal(signal.SIGUSR1, lambda *_: count.append(1))
    thread = threading.Thread(target=pester)
    thread.start()
    try:
        content = os.urandom(8_000_000)
        fileno = client.open("a", "w+")
        while len(count) < 20:
            client.seek(fileno, 0)
            client.write(fileno, content)
            client.seek(fileno, 0)
            assert client.read(fileno, len(content)) == content
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


# Names


def test_names_are_str_bytes_or_paths(client: Client, host: FakeHost) -> None:
    # spec O8
    for name in ("two words", b"\xff\xfe", PurePosixPath("d/e")):
        client.close(client.open(name, "w"))
    assert set(host.files) == {b"two words", b"\xff\xfe", b"d/e"}
    assert client.listdir() == [
        ("d/e", "file"),
        ("two words", "file"),
        ("\udcff\udcfe", "file"),
    ]


@pytest.mark.parametrize("name", ["", "a\nb", " a", "a ", "\ta"])
def test_a_name_that_a_line_cannot_carry_is_refused_before_it_is_sent(
    client: Client, host: FakeHost, name: str
) -> None:
    # spec F1, O1
    with pytest.raises(door.UnsendableError) as caught:
        client.open(name)
    assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, name)
    assert host.peers[0].seen == []
    client.ping()


@pytest.mark.parametrize("number", [-1, 10**18])
def test_a_number_that_the_wire_does_not_have_is_refused_before_it_is_sent(
    client: Client, host: FakeHost, number: int
) -> None:
    # spec F5
    with pytest.raises(door.UnsendableError, match="18 digits"):
        client.read(1000, number)
    with pytest.raises(ValueError, match="18 digits"):
        client.close(number)
    assert host.peers[0].seen == []


def test_a_mode_that_the_wire_does_not_have_is_refused_before_it_is_sent(
    client: Client, host: FakeHost
) -> None:
    # spec O3
    with pytest.raises(door.UnsendableError, match=r"'x' is no mode; there are r, w"):
        client.open("a", "x")
    assert host.peers[0].seen == []


def test_a_renamed_file_may_have_any_name(client: Client, host: FakeHost) -> None:
    # spec X1
    host.files[b"a"] = bytearray(b"x")
    client.rename("a", " b\n")
    assert host.files == {b" b\n": b"x"}


def test_directories_are_made_told_and_removed(client: Client, host: FakeHost) -> None:
    client.mkdir("d")
    assert client.stat("d").kind == "directory"
    host.files[b"a"] = bytearray(b"12345")
    status = client.stat("a")
    assert repr(status) == "Status(5, 1, 'file')"
    client.remove("a")
    assert client.listdir(".") == [("d", "directory")]


def test_the_claim_comes_from_the_environment_or_the_call(
    host: FakeHost, line: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spec A1
    monkeypatch.setenv("FSPROXY_TOP_LEVEL", "true")
    client = Client((line.fileno(),))
    client.open("a", "w")
    client.open("a", "w", top_level=False)
    monkeypatch.setenv("FSPROXY_TOP_LEVEL", "false")
    Client((line.fileno(),)).open("a", "w")
    seen = [r.flag for r in host.peers[0].seen if isinstance(r, m.Open)]
    assert seen == [True, False, False]


def test_a_host_of_the_first_dialect_is_spoken_to_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # spec O5
    monkeypatch.setenv("FSPROXY_VERSION", "1")
    with FakeHost(dialect=1) as host, host.connect() as line:
        client = Client((line.fileno(),))
        client.open("a b", "w", top_level=True)
        assert host.peers[0].seen == [m.Open(b"a b", b"w", True)]


# Errors


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        (b"failed to open file 'F': No such file or directory", "NotFoundError", 2),
        (b"failed to open file 'a': b': Is a directory", "IsDirectoryError", 21),
        (b"failed to make 'F': File exists", "ExistsError", 17),
        (b"failed to list 'F': Not a directory", "NotDirectoryError", 20),
        (b"failed to open file 'F': Permission denied", "AccessDeniedError", 13),
        (b"VFS access denied: 'F'", "AccessDeniedError", 13),
        (b"failed to write: No space left on device", "FsProxyError", errno.ENOSPC),
        (b"failed to write: Disk quota exceeded", "FsProxyError", errno.EDQUOT),
        (b"failed to open file 'F': Too many open files", "FsProxyError", errno.EMFILE),
        (b"invalid fileno: 7", "FsProxyError", errno.EBADF),
        (b"file not open for reading: 1000", "FsProxyError", errno.EBADF),
        (b"file not open for writing: 1000", "FsProxyError", errno.EBADF),
        (b"VFS not available", "FsProxyError", errno.ESTALE),
        (b"invalid mode: x", "FsProxyError", errno.EINVAL),
        (b"request line too long", "FsProxyError", errno.ENAMETOOLONG),
        (b"invalid size: 9 exceeds limit 5", "TooLargeError", errno.EMSGSIZE),
        (b"unknown command: SEEK", "UnknownCommandError", errno.ENOSYS),
        (b"LLM not available", "FsProxyError", errno.EOPNOTSUPP),
        (b"OpenAI API call failed: no", "FsProxyError", None),
        (b"", "FsProxyError", None),
    ],
)
def test_a_reason_becomes_an_errno(text: bytes, kind: str, number: int | None) -> None:
    error = from_reply(text, "F")
    assert (type(error).__name__, error.errno) == (kind, number)
    assert isinstance(error, OSError)


def test_a_missing_file_is_pythons_error_and_ours(client: Client) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        client.open("no such")
    assert isinstance(caught.value, door.NotFoundError)
    assert caught.value.filename == "no such"
    assert str(caught.value) == "[Errno 2] No such file or directory: 'no such'"


def test_an_error_names_both_names_of_a_rename(client: Client) -> None:
    with pytest.raises(door.NotFoundError) as caught:
        client.rename("a", "b")
    assert (caught.value.filename, caught.value.filename2) == ("a", "b")


def test_an_old_host_is_named_as_such() -> None:
    # spec X1
    with FakeHost(unknown=frozenset({b"SEEK"})) as host, host.connect() as line:
        client = Client((line.fileno(),))
        with pytest.raises(door.UnknownCommandError, match="does not know SEEK"):
            client.seek(client.open("a", "w"), 0)
        client.ping()


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"", "closed the connection"),
        (b"HELLO\n", "not a reply"),
        (b"OK 1000\nOK\n", "more than a reply"),
        (b"OK many\n", "lacks a number"),
        (b"O" * 70_000, "too long"),
    ],
)
def test_after_garbage_the_connection_is_given_up(
    client: Client, host: FakeHost, reply: bytes, why: str
) -> None:
    host.raw_replies.append(reply)
    with pytest.raises(door.ConnectionLostError, match=why):
        client.open("a", "w")
    with pytest.raises(ConnectionError, match=why):
        client.ping()


def test_a_body_longer_than_what_was_asked_for_is_garbage(
    client: Client, host: FakeHost
) -> None:
    # spec R1
    fileno = client.open("a", "w+")
    host.raw_replies.append(b"OK 6\n123456")
    with pytest.raises(door.ConnectionLostError, match="at most 5"):
        client.read(fileno, 5)


def test_a_host_that_dies_inside_a_body_is_noticed(
    client: Client, host: FakeHost
) -> None:
    fileno = client.open("a", "w+")
    host.last_words = b"OK 100000\n" + bytes(70_000)
    with pytest.raises(door.ConnectionLostError, match="inside a reply"):
        client.read(fileno, 100_000)


@pytest.mark.parametrize("value", ["", "x", "3,", "3,4,5,6", "-1", "99999", "٣"])
def test_what_is_no_connection_is_named(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    # spec T1
    monkeypatch.setenv("FSPROXY_FD", value)
    with pytest.raises(door.NotAChildError, match="not the child of a host") as caught:
        Client()
    assert caught.value.errno == errno.EBADF


def test_a_file_is_no_connection(tmp_path: PurePosixPath) -> None:
    with open(os.path.join(tmp_path, "a"), "wb") as file:
        with pytest.raises(door.NotAChildError, match="no connection"):
            Client((file.fileno(),))


def test_a_module_attribute_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchError"):
        _ = door.NoSuchError  # type: ignore[attr-defined]


# Pipes, and one more connection


@pytest.mark.usefixtures("no_leaks")
def test_pipes_serve_as_a_socketpair_does(host: FakeHost) -> None:
    # spec T1
    reads, writes, side = host.connect_pipes()
    with side:
        client = Client((reads, writes, side.fileno()))
        fileno = client.open("a", "w+")
        client.write(fileno, b"x" * 200_000)
        client.seek(fileno, 0)
        assert client.read_all(fileno) == b"x" * 200_000
        # spec N4
        with client.attach() as attached:
            attached.ping()
            with pytest.raises(door.FsProxyError, match="invalid fileno"):
                attached.read(fileno, 1)
    os.close(reads)
    os.close(writes)
    host.peers[1].gone.wait()


def test_pipes_without_a_third_descriptor_cannot_attach(host: FakeHost) -> None:
    reads, writes, side = host.connect_pipes()
    client = Client((reads, writes))
    with pytest.raises(door.UnknownCommandError, match="third number"):
        client.attach()
    client.ping()
    for fd in (reads, writes):
        os.close(fd)
    side.close()


def test_an_attached_connection_ends_with_its_files(
    client: Client, host: FakeHost
) -> None:
    # spec N4
    with client.attach() as attached:
        attached.open("a", "w")
        assert host.peers[1].parent is host.peers[0]
        assert host.open_files() == [1000]
    host.peers[1].gone.wait()
    assert host.open_files() == []
    with pytest.raises(door.ConnectionLostError, match="disconnect"):
        attached.ping()
    client.ping()


def test_a_descriptor_that_was_passed_is_closed_on_exec(client: Client) -> None:
    # spec T2
    with client.attach() as attached:
        assert not os.get_inheritable(attached._read_fd)


@pytest.mark.usefixtures("no_leaks")
def test_an_attach_that_brings_nothing_loses_the_connection(host: FakeHost) -> None:
    with host.connect() as line:
        client = Client((line.fileno(),))
        host.raw_replies.append(b"OK 5\n")
        with pytest.raises(door.ConnectionLostError, match="attached nothing"):
            client.attach()
    host.peers[0].gone.wait()


def test_a_host_without_attach_says_so() -> None:
    # spec N4
    with FakeHost(unknown=frozenset({b"ATTACH"})) as host, host.connect() as line:
        with pytest.raises(door.UnknownCommandError, match="ATTACH"):
            Client((line.fileno(),)).attach()


def test_the_own_connection_stays_open(client: Client, line: socket.socket) -> None:
    with client:
        pass
    client.ping()
    os.fstat(line.fileno())


def test_rights_are_given_up(client: Client, host: FakeHost) -> None:
    # spec A5
    client.narrow({"read": ["in", "\udcff"], "write": []})
    assert host.peers[0].rights == {"read": ["in", "\udcff"], "write": []}
    with pytest.raises(PermissionError):
        client.open("out", "w")


def test_caps_are_told(client: Client) -> None:
    commands = client.caps()["commands"]
    assert isinstance(commands, list)
    assert "ATTACH" in commands


# The model


def test_a_chat_sends_exact_counts(client: Client, host: FakeHost) -> None:
    # spec L1
    host.chat = (json.dumps({"choices": []}).encode(), b"1.0/5 weighted tokens")
    answer = client.llm_chat(
        "Grüße", preset="general", input_files=["a", b"\xff"], output_files=["-"]
    )
    assert answer == {"choices": []}
    assert host.peers[0].seen == [m.Chat(False, 3, 1, 7, 7)]
    assert host.chatted == [b"a\n\xff" + b"-" + "Grüße".encode() + b"general"]


def test_a_chat_without_a_model_is_refused(client: Client) -> None:
    # spec L12
    with pytest.raises(door.FsProxyError, match="LLM not available"):
        client.llm_chat("hello")


def test_a_preset_cannot_make_the_host_wait_for_more(client: Client) -> None:
    # spec L1: three LFs at the right places would announce three bytes more
    with pytest.raises(door.UnsendableError):
        client.llm_chat("\n\n", preset="ab\n")
    with pytest.raises(door.UnsendableError):
        client.llm_chat("x", input_files=["a\nb"])


def test_quota_and_configuration_are_told(client: Client) -> None:
    # spec L9, L13
    assert client.llm_quota() == "110.0 weighted tokens (no limit)"
    assert client.llm_config() == {"default_model": "m"}


@pytest.mark.parametrize("body", [b"nonsense", b"[]", b'{"size": "x"}'])
def test_an_answer_that_is_not_what_it_should_be_is_an_error(
    client: Client, host: FakeHost, body: bytes
) -> None:
    host.raw_replies.append(b"OK %d\n" % len(body) + body)
    with pytest.raises(door.FsProxyError, match="cannot read the answer"):
        client.stat("a")
    client.ping()


@pytest.mark.parametrize("body", [b"{}", b"[1]", b'[{"name": 1, "kind": "file"}]'])
def test_a_listing_that_is_none_is_an_error(
    client: Client, host: FakeHost, body: bytes
) -> None:
    host.raw_replies.append(b"OK %d\n" % len(body) + body)
    with pytest.raises(door.FsProxyError, match="cannot read the answer to LIST"):
        client.listdir()


# File objects


def test_csv_and_json_work_on_a_file(client: Client) -> None:
    rows = [["a", "b"], ["1", "zwei\nZeilen"]]
    with io.TextIOWrapper(
        io.BufferedWriter(client.open_file("t.csv", "wb")), newline=""
    ) as text:
        csv.writer(text).writerows(rows)
    raw = client.open_file("t.csv", "rb")
    with io.TextIOWrapper(io.BufferedReader(raw), newline="") as text:
        assert list(csv.reader(text)) == rows
    with client.open_file("t.json", "w") as raw:
        raw.write(json.dumps(rows).encode())
    with client.open_file("t.json") as raw:
        assert json.load(raw) == rows


def test_a_zip_file_is_written_and_read(client: Client) -> None:
    with zipfile.ZipFile(client.open_file("z", "w+"), "w") as archive:
        archive.writestr("a.txt", "alpha" * 100)
    with client.open_file("z") as raw, zipfile.ZipFile(raw) as archive:
        assert archive.read("a.txt") == b"alpha" * 100


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 300_001])
def test_the_end_is_found_on_the_handle_itself(
    client: Client, host: FakeHost, size: int
) -> None:
    host.files[b"a"] = bytearray(size)
    with client.open_file("a") as file:
        host.files.pop(b"a")  # the name stands for nothing any more
        assert file.seek(0, os.SEEK_END) == size
        assert file.read() == b""
        assert file.seek(-size, os.SEEK_CUR) == 0
        assert len(file.read()) == size


def test_tell_counts_what_was_read_and_written(client: Client) -> None:
    # spec P1
    with client.open_file("a", "w+") as file:
        file.write(b"0123456789")
        assert file.tell() == 10
        file.seek(4)
        assert file.read(2) == b"45"
        assert file.tell() == 6
        assert file.truncate() == 6
        assert file.tell() == 6
        file.seek(0)
        assert file.readall() == b"012345"


def test_an_appending_file_tells_where_the_end_is(
    client: Client, host: FakeHost
) -> None:
    # spec P1
    host.files[b"a"] = bytearray(b"123")
    with client.open_file("a", "a") as file:
        assert file.tell() == 3
        file.write(b"45")
        host.files[b"a"] += b"6"
        assert file.tell() == 6
    with client.open_file("a", "a+") as file:
        assert file.tell() == 0
        assert file.read(2) == b"12"
        file.write(b"7")
        assert file.tell() == 7
        assert file.read() == b""


def test_what_a_mode_cannot_do_is_unsupported(client: Client) -> None:
    with client.open_file("a", "w") as writes:
        assert (writes.readable(), writes.writable(), writes.seekable()) == (
            False,
            True,
            True,
        )
        for call in (writes.read, writes.fileno, lambda: writes.seek(0, os.SEEK_END)):
            with pytest.raises(io.UnsupportedOperation):
                call()
        for offset, whence in ((-1, 0), (0, 9)):
            with pytest.raises(ValueError, match=r"seek|whence"):
                writes.seek(offset, whence)
    with client.open_file("a") as reads:
        with pytest.raises(io.UnsupportedOperation):
            reads.write(b"x")
    with pytest.raises(ValueError, match="closed"):
        reads.read(1)


def test_a_failed_write_leaves_the_offset_unknown(
    client: Client, host: FakeHost
) -> None:
    with client.open_file("a", "w") as file:
        host.raw_replies.append(b"ERROR failed to write: No space left on device\n")
        with pytest.raises(OSError, match="No space") as caught:
            file.write(b"x")
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(io.UnsupportedOperation, match="unknown"):
            file.tell()


def test_a_file_is_closed_once(client: Client, host: FakeHost) -> None:
    # spec C1
    file = client.open_file("a", "w")
    file.close()
    file.close()
    assert [type(r) for r in host.peers[0].seen] == [m.Open, m.Close]


def test_a_dropped_file_is_closed_by_the_next_request(
    client: Client, host: FakeHost
) -> None:
    # A finalizer may run in the middle of a request, so it sends nothing itself.
    file: object = client.open_file("a", "w")
    cycle: list[object] = [file]
    cycle.append(cycle)
    del file, cycle
    gc.collect()
    assert host.open_files() == [1000]
    client.ping()
    assert host.open_files() == []


# Whose turn it is


def test_two_processes_share_one_connection(
    host: FakeHost, line: socket.socket
) -> None:
    # spec T5: 200 requests each way, every reply to the one who asked
    program = """
import sys
from vfs.client import Client
client, name = Client(), sys.argv[1]
fileno = client.open(name, "w+")
print(flush=True)
sys.stdin.readline()
for i in range(67):
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
    assert len(owners) == 2 * 4 * 67
    changes = sum(a != b for a, b in pairwise(owners))
    assert changes > 1, "they ran one after the other: nothing was shown"


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

    def handle(*_: object) -> None:
        try:
            client.caps()
        except door.FsProxyError as why:
            caught.append(why.errno)
        gate.opened.set()

    def interrupt() -> None:
        gate.reached.wait()
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

    def handle(*_: object) -> None:
        raise InterruptedHereError

    def interrupt() -> None:
        gate.reached.wait()
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
