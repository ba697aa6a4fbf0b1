"""The host's end of one connection of ``fakehost``: what each request does there."""

import base64
import json
import os
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol import COMMANDS, HostConnection, error, invalid, limits
from protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.vfs.fakehost import FakeHost

NOT_FOUND = b"No such file or directory"


@dataclass
class Gate:
    """The event that a reply waits for.

    Attributes:
        reached: a request has been done and its reply waits.
        opened: the reply may go.
    """

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)


@dataclass
class Handle:
    """An open file.

    Attributes:
        name: as opened.
        mode: one of the wire's modes.
        data: the file's content, shared with other handles.
        offset: in bytes.
    """

    name: bytes
    mode: str
    data: bytearray
    offset: int = 0


@dataclass
class Peer:
    """One connection, as the host knows it.

    Attributes:
        id: number, from 1.
        parent: the peer that attached it.
        files: its open files by fileno.
        rights: the rest after NARROW; None for everything.
        seen: every request, in order.
        gone: its connection ended.
        torn: the connection ended inside a message.
    """

    id: int
    parent: "Peer | None"
    files: dict[int, Handle] = field(default_factory=dict)
    rights: dict[str, list[str]] | None = None
    seen: list[m.Request] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)
    torn: bool = False


class Pipe:
    """The end of a pipe with the three methods of a socket that ``Line`` uses."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def recv(self, size: int) -> bytes:
        """Read."""
        return os.read(self._fd, size)

    def sendall(self, data: bytes) -> None:
        """Write everything."""
        while data:
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Close."""
        os.close(self._fd)


class Line:
    """The host's end of one connection."""

    def __init__(
        self,
        host: "FakeHost",
        peer: Peer,
        reader: socket.socket | Pipe,
        writer: socket.socket | Pipe,
        passing: socket.socket | None,
    ) -> None:
        self._host = host
        self._peer = peer
        self._reader = reader
        self._writer = writer
        self._passing = passing
        self._connection = HostConnection(host.dialect)
        self._handlers: dict[type[m.Request], Callable[..., bytes]] = {
            m.Open: self._open,
            m.Read: self._read,
            m.Write: self._write,
            m.Close: self._close,
            m.Seek: self._seek,
            m.Sync: self._sync,
            m.Truncate: self._truncate,
            m.Stat: self._stat,
            m.ListDir: self._list,
            m.MakeDir: self._make,
            m.Remove: self._remove,
            m.Rename: self._rename,
            m.Caps: self._caps,
            m.Narrow: self._narrow,
            m.Chat: self._chat,
        }

    def serve(self) -> None:
        """Answer until the connection ends."""
        try:
            while self._serve_one():
                pass
        except (OSError, EOFError):
            pass
        finally:
            self._peer.torn = self._connection.is_mid_message
            self._peer.files.clear()
            for end in {self._reader, self._writer, self._passing} - {None}:
                end.close()  # type: ignore[union-attr] # None was taken out
            self._peer.gone.set()

    def _serve_one(self) -> bool:
        message = self._connection.next_message()
        while message is None:
            data = self._reader.recv(65_536)
            if not data:
                return False
            message = self._connection.receive_data(data)
        word = _word(message)
        if word in self._host.unknown:
            self._connection.body_left = 0
            self._reply(message, error(b"unknown command: " + word))
            return True
        self._reply(message, self._answer(message, self._body(message)))
        return True

    def _body(self, message: m.Request) -> bytes:
        body = b""
        while self._connection.body_left:
            piece = self._connection.take_body()
            if not piece:
                data = self._reader.recv(65_536)
                if not data:
                    self._writer.sendall(error(b"failed to read data: unexpected EOF"))
                    raise EOFError
                self._connection.receive_data(data)
            body += piece
        if isinstance(message, m.Chat) and len(body) == message.body:
            i, o, p = message.inputs, message.outputs, message.prompt
            marks = (i, i + o + 1, i + o + p + 2)
            if message.preset >= 3 and all(body[at] == 10 for at in marks):
                self._connection.extend_body(3)
                body += self._body(m.Ping())
        return body

    def _answer(self, message: m.Request, body: bytes) -> bytes:
        self._peer.seen.append(message)
        if isinstance(message, m.Refusal):
            if message.token and int(message.token) not in self._peer.files:
                return invalid("fileno", message.token)
            return message.reply
        if isinstance(message, m.FileRequest):
            if isinstance(message, m.Write) and message.size > self._host.max_write:
                text = b"%d exceeds limit %d" % (message.size, self._host.max_write)
                return invalid("size", text)
            if message.fileno not in self._peer.files:
                return invalid("fileno", message.token)
        handler = self._handlers.get(type(message), self._plain)
        return self._host.fails.get(type(message)) or handler(message, body)

    def _reply(self, message: m.Request, reply: bytes) -> None:
        gate = self._host.gates.get(type(message))
        if gate is not None:
            gate.reached.set()
            gate.opened.wait()
        if self._host.last_words:
            self._writer.sendall(self._host.last_words)
            raise EOFError
        if self._host.raw_replies and not isinstance(message, m.Caps):
            reply = self._host.raw_replies.pop(0)
            if not reply:
                raise EOFError
        elif isinstance(message, m.Attach) and reply.startswith(b"OK"):
            self._attach()
            return
        self._writer.sendall(reply)

    def _attach(self) -> None:
        number, far = self._host.attach(self._peer)
        reply = b"OK %d\n" % number
        with far:
            if self._passing is not None:
                socket.send_fds(self._passing, [b"\n"], [far.fileno()])
            elif isinstance(self._writer, socket.socket):
                socket.send_fds(self._writer, [reply[:1]], [far.fileno()])
                reply = reply[1:]
        self._writer.sendall(reply)

    def _plain(self, message: m.Request, _: bytes) -> bytes:
        if isinstance(message, m.Quota):
            return b"OK 110.0 weighted tokens (no limit)\n"
        if isinstance(message, m.Config):
            return _counted(b'{"default_model": "m"}')
        return b"OK\n"

    def _may(self, name: bytes, mode: str) -> bool:
        rights = self._peer.rights
        if rights is None:
            return True
        wanted = {"r": ["read"], "w": ["write"], "a": ["write"]}
        return all(
            os.fsdecode(name) in rights.get(key, [])
            for key in wanted.get(mode, ["read", "write"])
        )

    def _open(self, message: m.Open, _: bytes) -> bytes:
        host, name, mode = self._host, message.name, message.mode.decode()
        if not self._may(name, mode):
            return error(b"VFS access denied: '" + name[:200] + b"'")
        with host.lock:
            if name not in host.files:
                if mode[0] == "r":
                    return _failed(b"open file", name)
                host.files[name] = bytearray()
            data = host.files[name]
        if mode[0] == "w":
            data.clear()
        number = host.new_fileno()
        self._peer.files[number] = Handle(name, mode, data)
        return b"OK %d\n" % number

    def _read(self, message: m.Read, _: bytes) -> bytes:
        handle = self._peer.files[message.fileno]
        if handle.mode in ("w", "a"):
            return error(b"file not open for reading: " + message.token)
        size = min(message.size, limits.MAX_READ_BYTES)
        piece = bytes(handle.data[handle.offset : handle.offset + size])
        handle.offset += len(piece)
        return _counted(piece)

    def _write(self, message: m.Write, body: bytes) -> bytes:
        handle = self._peer.files[message.fileno]
        if handle.mode == "r":
            return error(b"file not open for writing: " + message.token)
        if handle.mode[0] == "a":
            handle.offset = len(handle.data)
        missing = handle.offset - len(handle.data)
        handle.data.extend(bytes(max(missing, 0)))
        handle.data[handle.offset : handle.offset + len(body)] = body
        handle.offset += len(body)
        return b"OK %d\n" % len(body)

    def _close(self, message: m.Close, _: bytes) -> bytes:
        del self._peer.files[message.fileno]
        return b"OK\n"

    def _seek(self, message: m.Seek, _: bytes) -> bytes:
        self._peer.files[message.fileno].offset = message.size
        return b"OK %d\n" % message.size

    def _sync(self, _message: m.Sync, _: bytes) -> bytes:
        return b"OK\n"

    def _truncate(self, message: m.Truncate, _: bytes) -> bytes:
        data = self._peer.files[message.fileno].data
        missing = message.size - len(data)
        data.extend(bytes(max(missing, 0)))
        del data[message.size :]
        return b"OK\n"

    def _stat(self, message: m.Stat, _: bytes) -> bytes:
        host, name = self._host, message.name
        if name in host.directories:
            return _counted(b'{"size":0,"mtime_ns":1,"kind":"directory"}')
        if name not in host.files:
            return _failed(b"stat", name)
        told = {"size": len(host.files[name]), "mtime_ns": 1, "kind": "file"}
        return _counted(json.dumps(told).encode())

    def _list(self, message: m.ListDir, _: bytes) -> bytes:
        host = self._host
        if message.name not in host.directories:
            return _failed(b"list", message.name)
        rows = [_entry(name, "file") for name in sorted(host.files)]
        rows += [
            _entry(name, "directory") for name in sorted(host.directories - {b"."})
        ]
        return _counted(json.dumps(rows).encode())

    def _make(self, message: m.MakeDir, _: bytes) -> bytes:
        if message.name in self._host.directories:
            return _failed(b"make", message.name, b"File exists")
        self._host.directories.add(message.name)
        return b"OK\n"

    def _remove(self, message: m.Remove, _: bytes) -> bytes:
        if self._host.files.pop(message.name, None) is None:
            return _failed(b"remove", message.name)
        return b"OK\n"

    def _rename(self, message: m.Rename, body: bytes) -> bytes:
        old, new = body[: message.old_length], body[message.old_length :]
        if old not in self._host.files:
            return _failed(b"rename", old)
        self._host.files[new] = self._host.files.pop(old)
        return b"OK\n"

    def _caps(self, _message: m.Caps, _: bytes) -> bytes:
        words = [w.decode() for w in COMMANDS if w not in self._host.unknown]
        told = {"version": 2, "commands": words, "limits": {}, "rights": {}}
        return _counted(json.dumps(told).encode())

    def _narrow(self, _message: m.Narrow, body: bytes) -> bytes:
        self._peer.rights = json.loads(body)
        return b"OK\n"

    def _chat(self, _message: m.Chat, body: bytes) -> bytes:
        self._host.chatted.append(body)
        if self._host.chat is None:
            return error(b"LLM not available")
        answer, status = self._host.chat
        return b"OK %d %s\n" % (len(answer), status) + answer


def _word(message: m.Request) -> bytes:
    for word, row in COMMANDS.items():
        if row.message is type(message):
            return word
    return b""


def _counted(body: bytes) -> bytes:
    return b"OK %d\n" % len(body) + body


def _failed(what: bytes, name: bytes, why: bytes = NOT_FOUND) -> bytes:
    return error(b"failed to " + what + b" '" + name[:200] + b"': " + why)


def _entry(name: bytes, kind: str) -> dict[str, str]:
    try:
        return {"name": name.decode(), "kind": kind}
    except UnicodeDecodeError:
        return {"name_b64": base64.b64encode(name).decode(), "kind": kind}
