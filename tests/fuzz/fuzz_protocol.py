"""Coverage-guided fuzzing of the wire: cut anywhere, a stream means the same.

    python tests/fuzz/fuzz_protocol.py [-max_total_time=60] [libFuzzer options]

Each input is a plan: a dialect, the sizes of the pieces, then a stream made of words of
the language, numbers, line ends, payloads and raw bytes. The stream goes through both
ends in one piece and in many, with payloads through the connection and past it
(`tests/protocol/streams.py`); any difference and any exception is a finding, which
libFuzzer writes to a file whose name begins with `crash-`. Run it again with that file
as its only argument to see it once more.
"""

import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

MISSING = (
    "fuzz_protocol: cannot fuzz: atheris is not installed: `make fuzz` installs it,"
    " where there is a wheel of it for this platform and this Python\n"
)

LONG = 70_000
"""A run of one byte that passes the limit of a line (spec F4)."""


class Plan:
    """An input, taken apart byte by byte; when it ends, every choice is 0.

    Our own instead of atheris' provider, so that a finding can be replayed, and this
    file tested, where atheris is not installed.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def byte(self) -> int:
        """Take one byte."""
        at = self.at
        self.at = at + 1
        return self.data[at] if at < len(self.data) else 0

    def raw(self, size: int) -> bytes:
        """Take up to this many bytes as they are."""
        piece = self.data[self.at : self.at + size]
        self.at += size
        return piece

    @property
    def is_over(self) -> bool:
        """Whether every byte has been taken."""
        return self.at >= len(self.data)


@cache
def words() -> tuple[bytes, ...]:
    """Return the words that a stream is made of."""
    from protocol import COMMANDS, MODES  # noqa: PLC0415 - see main()

    return (
        *COMMANDS,
        *MODES,
        *(b"true", b"false", b"user", b"internal", b"maybe", b"f", b"two words"),
        *(b"0", b"1", b"5", b"1000", b"-1", b"0x10", b"9" * 18, b"9" * 19, b"8388609"),
        *(b"OK", b"ERROR", b"OK 3\n", b"\r", b"\x00", b"\x0b", b"\x1b", b"\xc3\xa9"),
    )


def build(plan: Plan, vocabulary: Sequence[bytes]) -> bytes:
    """Return the stream that a plan describes."""
    stream = bytearray()
    while not plan.is_over:
        choice = plan.byte()
        if choice < 128:
            stream += vocabulary[choice % len(vocabulary)]
        elif choice < 176:
            stream += (b" ", b"\n", b"\t", b"\r\n", b"  ")[choice % 5]
        elif choice < 224:
            stream += plan.raw(choice - 176)
        elif choice < 252:
            stream += b"WRITE 1 %d\n" % (choice - 224)
        else:
            # Anything but LF, for 70,000 empty lines would only be slow.
            stream += (b"x", b" ", b"\x00", b"\r")[plan.byte() % 4] * LONG
    return bytes(stream)


def check(data: bytes) -> None:
    """Run one input; raise if the ways of parsing it differ."""
    from tests.protocol.streams import check_replies, check_requests  # noqa: PLC0415

    plan = Plan(data)
    dialect = 1 + plan.byte() % 2
    scale = (1, 3, 40, 9000)[plan.byte() % 4]
    sizes = [plan.byte() * scale for _ in range(plan.byte() % 32)]
    stream = build(plan, words())
    if scale == 1:
        sizes += [1] * min(len(stream), 400)
    check_requests(stream, sizes, dialect)
    check_replies(_requests(plan), stream, sizes, dialect)


def _requests(plan: Plan) -> list[Any]:
    """Return requests that a stream is taken as the replies to, one of each kind."""
    from protocol import messages as m  # noqa: PLC0415

    kinds = [
        m.Read(b"1", 9),
        m.Close(b"1"),
        m.Quota(),
        m.Seek(b"1", 3),
        m.Chat(True, 0, 0, 0, 0),
    ]
    return [kinds[(size + len(plan.data)) % len(kinds)] for size in range(12)]


def main(argv: list[str]) -> int:
    """Fuzz until libFuzzer ends the process; return 2 if it cannot be started."""
    try:
        import atheris  # noqa: PLC0415 - not on every platform
    except ImportError:
        sys.stderr.write(MISSING)
        return 2
    # Only what is imported here is instrumented, so nothing above imports the package.
    with atheris.instrument_imports(include=["protocol"]):
        import protocol.connection  # noqa: F401, PLC0415
    # A dictionary must be a file; one in memory leaves nothing behind.
    dictionary = os.memfd_create("dictionary", 0)
    for word in words():
        text = "".join(f"\\x{byte:02x}" for byte in word)
        os.write(dictionary, f'"{text}"\n'.encode())
    options = [f"-dict=/proc/self/fd/{dictionary}", "-max_len=4096"]
    atheris.Setup([argv[0], *options, *argv[1:]], check)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
