"""A small host in memory, for tests of the child's side: no sandbox, no policy.

It speaks through ``protocol.HostConnection``, so requests are cut as the real host cuts
them, and answers plainly.  One thread a connection: it can be used from blocking tests,
from Trio tests and from child processes alike.  Each failure that a test wants is a
switch of ``FakeHost``.
"""

import contextlib
import os
import socket
import threading
from typing import Self

from protocol import limits
from protocol import messages as m
from tests.vfs.fakeline import Gate, Line, Peer, Pipe


class FakeHost:
    """Files in memory behind any number of connections.

    Args:
        unknown: commands that this host does not know; like an old one it takes their
            payload for request lines.
        max_write: cap of a WRITE in bytes.
        dialect: the one that children speak.

    Attributes:
        files: content by name.
        directories: names of directories.
        peers: every connection there was.
        gates: a request class -> what its replies wait for.
        fails: a request class -> the error that it is answered with.
        raw_replies: bytes to send in place of the next replies, but for those of CAPS;
            empty: hang up.
        last_words: bytes to send in place of the next reply, before hanging up.
        chat: the body and status of LLM_CHAT; None where there is no model.
    """

    def __init__(
        self,
        *,
        unknown: frozenset[bytes] = frozenset(),
        max_write: int = limits.MAX_WRITE_BYTES,
        dialect: int = 2,
    ) -> None:
        self.unknown = unknown
        self.max_write = max_write
        self.dialect = dialect
        self.files: dict[bytes, bytearray] = {}
        self.directories: set[bytes] = {b"."}
        self.peers: list[Peer] = []
        self.gates: dict[type[m.Request], Gate] = {}
        self.fails: dict[type[m.Request], bytes] = {}
        self.raw_replies: list[bytes] = []
        self.last_words = b""
        self.chat: tuple[bytes, bytes] | None = None
        self.chatted: list[bytes] = []
        self._next_fileno = limits.FIRST_FILENO
        self.lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ends: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for gate in self.gates.values():
            gate.opened.set()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in tuple(self._threads):
            thread.join()

    def connect(self, parent: Peer | None = None) -> socket.socket:
        """Return the child's end of a new connection."""
        near, far = socket.socketpair()
        self._start(near, near, None, parent)
        return far

    def connect_pipes(self) -> tuple[int, int, socket.socket]:
        """Return the child's ends of two pipes and of the socket for descriptors."""
        child_reads, host_writes = os.pipe()
        host_reads, child_writes = os.pipe()
        near, far = socket.socketpair()
        reader = Pipe(host_reads)
        self._start(reader, Pipe(host_writes), near, None)
        return child_reads, child_writes, far

    def _start(
        self,
        reader: "socket.socket | Pipe",
        writer: "socket.socket | Pipe",
        passing: socket.socket | None,
        parent: Peer | None,
    ) -> Peer:
        with self.lock:
            peer = Peer(len(self.peers) + 1, parent)
            self.peers.append(peer)
            line = Line(self, peer, reader, writer, passing)
            thread = threading.Thread(target=line.serve, daemon=True)
            self._threads.append(thread)
            if isinstance(reader, socket.socket):
                self._ends.append(reader)
        thread.start()
        return peer

    def attach(self, peer: Peer) -> tuple[int, socket.socket]:
        """Return the id and the child's end of a connection beneath another one."""
        near, far = socket.socketpair()
        return self._start(near, near, None, peer).id, far

    def new_fileno(self) -> int:
        """Return the next number; none comes twice."""
        with self.lock:
            self._next_fileno += 1
            return self._next_fileno - 1

    def open_files(self) -> list[int]:
        """Return the filenos that are open, of all peers."""
        return sorted(n for peer in self.peers for n in peer.files)
