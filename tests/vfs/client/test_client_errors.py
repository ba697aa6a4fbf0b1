"""Errors that a child sees: of a name, the host, or its descriptors."""

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.vfs.fakehost import FakeHost
from vfs import client as door
from vfs.client import Client
from vfs.client.errors import from_reply

if TYPE_CHECKING:
    from collections.abc import Callable


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
        (b"LLM not available", "NoModelError", errno.EOPNOTSUPP),
        (b"quota exceeded: cannot", "QuotaExceededError", errno.EDQUOT),
        (b"OpenAI API call failed: no", "ModelCallError", errno.EREMOTEIO),
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


# spec X1: the payload of a command that is not known would be read as requests.
@pytest.mark.parametrize("more", [frozenset[bytes](), frozenset({b"CAPS", b"ATTACH"})])
def test_an_old_host_gets_no_payload_that_it_does_not_know(
    more: frozenset[bytes],
) -> None:
    words = frozenset({b"RENAME", b"NARROW", b"FD_CALL", b"FD_PUT"})
    with FakeHost(unknown=words | more) as host, host.connect() as line:
        host.files[b"a"] = bytearray(b"x")
        client = Client((line.fileno(),))
        requests: list[tuple[str, Callable[[], object]]] = [
            ("RENAME", lambda: client.rename("a", "\nREMOVE true a\n")),
            ("NARROW", lambda: client.narrow({})),
            ("FD_CALL", lambda: client.fd_call("list_fds")),
            ("FD_PUT", lambda: client.fd_put(b"\nREMOVE true a\n")),
        ]
        for word, request in requests:
            with pytest.raises(door.UnknownCommandError, match=f"know {word}: it"):
                request()
            client.ping()
        assert b"a" in host.files


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


@pytest.mark.parametrize(
    "value", ["", "x", "3,", "3,4,5,6", "-1", "99999", "9" * 20, "٣"]
)
def test_what_is_no_connection_is_named(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    # spec T1
    monkeypatch.setenv("FSPROXY_FD", value)
    with pytest.raises(door.NotAChildError, match="not the child of a host") as caught:
        Client()
    assert caught.value.errno == errno.EBADF


def test_a_file_is_no_connection(tmp_path: Path) -> None:
    with open(os.path.join(tmp_path, "a"), "wb") as file:
        with pytest.raises(door.NotAChildError, match="no connection"):
            Client((file.fileno(),))


# One way is not enough: a pipe is half a connection.
def test_one_pipe_is_no_connection() -> None:
    reader, writer = os.pipe()
    try:
        for end in (reader, writer):
            with pytest.raises(door.NotAChildError, match="no connection"):
                Client((end,))
    finally:
        os.close(reader)
        os.close(writer)


def test_a_module_attribute_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchError"):
        _ = door.NoSuchError  # type: ignore[attr-defined]
