"""A session that a test drives by hand, and its client's end."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from supervisor.fsproxy.dispatch import HANDLERS
from supervisor.fsproxy.ports import Services
from supervisor.fsproxy.pump import Pump
from supervisor.fsproxy.session import Session
from vfs.filesystem import Filesystem
from vfs.ledger import Ledger
from vfs.payload import PayloadBudget
from vfs.places import open_place
from vfs.policy import Policy

if TYPE_CHECKING:
    from pathlib import Path


class Dialogue:
    """A client's end of one session, and the session."""

    def __init__(
        self,
        root: Path,
        dialect: int = 2,
        *,
        alone: bool = True,
        top_level: bool = False,
        read_fd: int = -1,
    ) -> None:
        """Make a client and its session.

        Args:
            root: its private root.
            dialect: 1 or 2.
            alone: no other client is active.
            top_level: it may take the top-level view.
            read_fd: requests come here, and not by the socket; owned.
        """
        self.alone = alone
        self.ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        fd = theirs.detach()
        self.fs = Filesystem()
        self.place = open_place(str(root), read=True, write=True, relative=b"")
        policy = Policy((self.place,), top_level=top_level, cwd_fd=-1)
        client = self.fs.connect(policy, Ledger(open_files=8), "test")
        self._pump = Pump()
        self.session = Session(
            self._pump,
            self.fs,
            client,
            fd if read_fd < 0 else read_fd,
            fd,
            PayloadBudget(),
            handlers=HANDLERS,
            services=Services(),
            dialect=dialect,
            max_write_bytes=1 << 20,
            deadline_s=5.0,
            on_closed=lambda _: None,
        )

    def ask(self, request: bytes) -> bytes:
        """Send bytes, let the session serve, return what it sent."""
        self.serve(request)
        return self.ours.recv(1 << 16)

    def serve(self, sent: bytes) -> None:
        """Send bytes and let the session have its turn."""
        self.ours.sendall(sent)
        self.session.serve(alone=self.alone)

    def open(self, name: str, mode: str) -> bytes:
        """Open a file and return its fileno's token."""
        reply = self.ask(f"OPEN {name} {mode} false\n".encode())
        assert reply.startswith(b"OK "), reply
        return reply[3:-1]

    def close(self) -> None:
        """Give everything back."""
        self.fs.disconnect(self.session.client, "test")
        self.place.backend.close()
        for fd in {self.session.read_fd, self.session.write_fd}:
            os.close(fd)
        self.ours.close()
        self._pump.close()
