"""A child that counts: every number is written, appended and read exactly once.

argv: a name, how many attached connections it has beside its own, and the path of a file
whose appearance ends it. Each turn it sends on each connection, in pieces cut anywhere,
`WRITE` of the next number to one file, the same in mode `a` to another, and a `READ` of
the next number of a third; now and then a WRITE of 200 KB and a READ of as much. The
replies must be exactly those of these requests. Prints "done TURNS" or "wrong ...".
"""

import os
import random
import socket
import struct
import sys

_numbers = [int(number) for number in os.environ.get("FSPROXY_FD", "3").split(",")]
LARGE = 200_000
EVERY = 40
PRELOADED = 100_000


class WrongError(Exception):
    """The reply is not the expected one."""


class Door:
    """One connection, and the three files of it."""

    def __init__(self, reader: int, writer: int, name: str) -> None:
        self._reader = reader
        self._writer = writer
        self._held = b""
        self._dice = random.Random(name)
        self._turn = 0
        name_ = name.encode()
        self.written = self.open(b"%b.written" % name_, b"w")
        self.appended = self.open(b"%b.appended" % name_, b"a")
        self.read = self.open(b"numbers", b"r")
        self.large = self.open(b"%b.large" % name_, b"w+")

    def send(self, data: bytes) -> None:
        """Send bytes, cut anywhere."""
        while data:
            cut = self._dice.randrange(1, len(data) + 1)
            piece, data = data[:cut], data[cut:]
            while piece:
                piece = piece[os.write(self._writer, piece) :]

    def line(self) -> bytes:
        """Receive a line, without its LF."""
        while b"\n" not in self._held:
            self._more()
        line, _, self._held = self._held.partition(b"\n")
        return line

    def take(self, size: int) -> bytes:
        """Receive so many bytes."""
        while len(self._held) < size:
            self._more()
        data, self._held = self._held[:size], self._held[size:]
        return data

    def _more(self) -> None:
        data = os.read(self._reader, 65_536)
        if not data:
            raise WrongError("the host has closed")
        self._held += data

    def expect(self, wanted: bytes) -> None:
        """Receive exactly these bytes."""
        got = self.take(len(wanted))
        if got != wanted:
            raise WrongError(
                f"turn {self._turn}: {got[:200]!r} came for {wanted[:200]!r}"
            )

    def open(self, name: bytes, mode: bytes) -> int:
        """OPEN a file that must open."""
        self.send(b"OPEN %b %b false\n" % (name, mode))
        line = self.line()
        if not line.startswith(b"OK "):
            raise WrongError(f"OPEN {name!r}: {line!r}")
        return int(line[3:])

    def ask(self) -> None:
        """Send the requests of a turn."""
        number = b"%07d\n" % self._turn
        self.send(
            b"WRITE %d 8\n%bWRITE %d 8\n%bREAD %d 8\n"
            % (self.written, number, self.appended, number, self.read)
        )
        if self._turn % EVERY == 0:
            letter = b"%c" % (97 + self._turn // EVERY % 26)
            self.send(b"WRITE %d %d\n" % (self.large, LARGE) + letter * LARGE)
            self.send(b"SEEK %d 0\nREAD %d %d\n" % (self.large, self.large, LARGE))
            self.send(b"SEEK %d 0\n" % self.large)

    def hear(self) -> None:
        """Check the replies of a turn."""
        number = b"%07d\n" % self._turn
        self.expect(b"OK 8\nOK 8\nOK 8\n" + number)
        if self._turn % EVERY == 0:
            letter = b"%c" % (97 + self._turn // EVERY % 26)
            self.expect(b"OK %d\nOK 0\n" % LARGE)
            self.expect(b"OK %d\n" % LARGE + letter * LARGE + b"OK 0\n")
        self._turn += 1


def attach() -> int:
    """ATTACH on the own door; return the descriptor of the new connection."""
    os.write(_numbers[1] if len(_numbers) > 1 else _numbers[0], b"ATTACH\n")
    beside = len(_numbers) > 2
    with socket.socket(fileno=os.dup(_numbers[2] if beside else _numbers[0])) as door:
        data, control, _, _ = door.recvmsg(1, socket.CMSG_LEN(4))
    line = b"" if beside else data
    while not line.endswith(b"\n"):
        line += os.read(_numbers[0], 1)
    if not line.startswith(b"OK "):
        raise WrongError(f"ATTACH: {line!r}")
    (number,) = struct.unpack("i", control[0][2])
    return int(number)


def main() -> None:
    """Count until the file appears."""
    name, attached, stop = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    turns = 0
    try:
        doors = [attach() for _ in range(attached)]
        own = (_numbers[0], _numbers[1] if len(_numbers) > 1 else _numbers[0])
        pairs = [own, *((fd, fd) for fd in doors)]
        every = [Door(*pair, f"{name}.{n}") for n, pair in enumerate(pairs)]
        while turns < PRELOADED and not (turns % 20 == 0 and os.path.exists(stop)):
            for door in every:
                door.ask()
            for door in every:
                door.hear()
            turns += 1
    except (WrongError, OSError) as why:
        os.write(1, f"wrong {name}: {why}\n".encode())
        os._exit(1)
    os.write(1, f"done {turns}\n".encode())


main()
