"""The blocking client against a host in memory: requests and connections.

Errors, file objects, sharing, the Trio twin and the commands have files of their own.
"""

import base64
import errno
import json
import os
import signal
import socket
import threading
from pathlib import PurePosixPath

import pytest

from protocol import messages as m
from tests.vfs.fakehost import FakeHost
from vfs import client as door
from vfs.client import Client

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
    # Another user of the descriptor may have changed it for all.
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
    before = set(os.listdir("/proc/self/fd"))
    with client.attach():
        passed = [int(one) for one in set(os.listdir("/proc/self/fd")) - before]
        opened = [fd for fd in passed if os.path.exists(f"/proc/self/fd/{fd}")]
        assert opened
        assert not any(map(os.get_inheritable, opened))


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
    coded = {"name_b64": base64.b64encode(b"\xff").decode()}  # spec X1
    assert host.peers[0].rights == {"read": ["in", coded], "write": []}
    with pytest.raises(PermissionError):
        client.open("out", "w")


def test_caps_are_told(client: Client) -> None:
    commands = client.caps()["commands"]
    assert isinstance(commands, list)
    assert "ATTACH" in commands


# The model


def test_a_chat_sends_exact_counts(client: Client, host: FakeHost) -> None:
    # spec L1
    choice = {"index": 0, "message": {"role": "assistant", "content": "hi"}}
    host.chat = (json.dumps({"choices": [choice]}).encode(), b"1.0/5 weighted tokens")
    answer = client.llm_chat(
        "Grüße", preset="general", input_files=["a", b"\xff"], output_files=["-"]
    )
    assert (answer.text, answer.quota) == ("hi", "1.0/5 weighted tokens")
    assert (answer.raw, answer.usage) == (host.chat[0], None)
    assert host.peers[0].seen == [m.Chat(False, 3, 1, 7, 7)]
    assert host.chatted == [b"a\n\xff" + b"-" + "Grüße".encode() + b"general"]


def test_a_chat_without_a_model_is_refused(client: Client) -> None:
    # spec L12
    with pytest.raises(door.NoModelError, match="LLM not available"):
        client.llm_chat("hello")


def test_errors_of_the_model_have_classes(client: Client, host: FakeHost) -> None:
    # spec L10, L11
    host.fails[m.Chat] = b"ERROR quota exceeded: cannot make LLM call\n"
    with pytest.raises(door.QuotaExceededError) as quota:
        client.llm_chat("hello")
    assert quota.value.errno == errno.EDQUOT
    host.fails[m.Chat] = b"ERROR OpenAI API call failed: 500 it broke\n"
    with pytest.raises(door.ModelCallError, match="500 it broke"):
        client.llm_chat("hello")


def test_an_answer_that_is_no_completion_is_told(
    client: Client, host: FakeHost
) -> None:
    # spec L7
    host.chat = (b'{"choices": 5}', b"1.0/5 weighted tokens")
    with pytest.raises(door.FsProxyError, match="cannot read the answer to LLM_CHAT"):
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
