"""Records that say of themselves whether they are whole: header, length, checksum."""

import random
import zlib
from pathlib import Path

_HEADER_BYTES = 28


def record(number: int, size: int, choice: random.Random) -> bytes:
    """Make a record of `size` bytes in all."""
    body = choice.randbytes(64) * ((size - _HEADER_BYTES) // 64 + 1)
    body = body[: max(0, size - _HEADER_BYTES)]
    return b"%08d %08d %08x\n" % (number, len(body), zlib.crc32(body)) + b"\n" + body


def faults(data: bytes) -> str | None:
    """Tell what is wrong with a file of records, None if all of them are whole."""
    at = 0
    while at < len(data):
        head, body = data[at : at + _HEADER_BYTES], data[at + _HEADER_BYTES :]
        try:
            _, length, checksum = head[:26].split()
        except ValueError:
            return f"a torn header at {at}: {head!r}"
        size = int(length)
        if len(body) < size:
            return f"{len(body)} of {size} bytes of the record at {at}"
        if zlib.crc32(memoryview(body)[:size]) != int(checksum, 16):
            return f"the record at {at} is not what it was"
        at += _HEADER_BYTES + size
    return None


class Store:
    """Records in files, for children that send them with `cat`.

    Args:
        where: a directory for them.
        choice: what they are made of.
    """

    SIZES = (40, 100, 1000, 5000, 70_000, 300_000, 1_100_000, 2_500_000)
    """Small ones in one piece, those that come in many, those that a thread writes."""

    def __init__(self, where: Path, choice: random.Random) -> None:
        where.mkdir()
        self.paths = []
        for number, size in enumerate(self.SIZES):
            data = record(number, size, choice)
            path = where / f"{number}.{len(data)}"
            path.write_bytes(data)
            self.paths.append(path)

    def draw(self, choice: random.Random) -> Path:
        """Choose a record, small ones more often."""
        return self.paths[int(choice.random() ** 2 * len(self.paths))]
