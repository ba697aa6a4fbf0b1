"""Records that show whether they are whole, and the process that checks.

As a program it reads JSON lines from stdin, one file to check each (the fields of
`Expected`), and answers each with what is wrong with it, or null. A process of its own:
in the host's process its work would hold up the host, which is what chaos measures.
"""

import json
import random
import sys
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

_HEAD_BYTES = 28


def record(number: int, size: int, choice: random.Random) -> bytes:
    """Make a record of `size` bytes in all: number, length and checksum, then a body."""
    body = choice.randbytes(64) * ((size - _HEAD_BYTES) // 64 + 1)
    body = body[: size - _HEAD_BYTES]
    return b"%08d %08d %08x\n\n%b" % (number, len(body), zlib.crc32(body), body)


def faults(data: bytes) -> str | None:
    """Tell what is wrong with a file of records, None if all of them are whole."""
    view = memoryview(data)
    at = 0
    while at < len(data):
        head = bytes(view[at : at + _HEAD_BYTES])
        at += _HEAD_BYTES
        try:
            _, length, checksum = head.split()
        except ValueError:
            return f"a torn header before {at}: {head!r}"
        body = view[at : at + int(length)]
        at += int(length)
        if len(body) < int(length):
            return f"{len(body)} of {int(length)} bytes of the last record"
        if zlib.crc32(body) != int(checksum, 16):
            return f"the record before {at} is not what it was"
    return None


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected content of a file.

    Attributes:
        path: where it is.
        old: a file with what it held before; empty for nothing.
        records: files with what was acknowledged behind that; None where nobody knows
            how many of them came, but each must be whole.
    """

    path: str
    old: str
    records: list[str] | None

    def fault(self) -> str | None:
        """Tell what is wrong with it, None if nothing is."""
        path = Path(self.path)
        data = path.read_bytes() if path.exists() else b""
        if self.records is None:
            return faults(data)
        parts = [self.old, *self.records]
        wanted = b"".join(Path(part).read_bytes() for part in parts if part)
        if data != wanted:
            return f"{len(data)} bytes, not the {len(wanted)} that were to be there"
        return None

    def line(self) -> bytes:
        """The line that asks for it."""
        return json.dumps(asdict(self)).encode() + b"\n"


class Store:
    """Records in files, for children that send them with `cat`.

    Args:
        where: a directory for them.
        choice: draws their content.

    Attributes:
        paths: the files, named NUMBER.SIZE.
    """

    SIZES = (40, 100, 1000, 5000, 70_000, 300_000, 1_100_000, 2_500_000)
    """Small ones in one piece, those that come in many, those that a thread writes."""

    def __init__(self, where: Path, choice: random.Random) -> None:
        where.mkdir()
        self.paths = []
        for number, size in enumerate(self.SIZES):
            path = where / f"{number}.{size}"
            path.write_bytes(record(number, size, choice))
            self.paths.append(path)

    def draw(self, choice: random.Random) -> Path:
        """Choose a record, small ones more often."""
        return self.paths[int(choice.random() ** 2 * len(self.paths))]


def main() -> None:
    """Check files until stdin ends."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(Expected(**json.loads(line)).fault()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
