"""The client of ``benchmarks.toolexec``: runs tools directly and by the host.

Runs inside a child, with the standard library only. Each measure is taken both ways,
one right after the other, and in the other order in the next round; the numbers go to
stdout as JSON.

usage: toolclient.py ROUNDS HOST_PID
"""

import hashlib
import io
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SIZE = 268_435_456
STALLED_SIZE = 1 << 30
STALL_S = 2.0  # for the tool to fill what may be filled
TRUES = 100
AT_ONCE = 64

PATH = os.environ["AIFO_TOOLEEXEC_URL"].removeprefix("unix://")
TOKEN = os.environ["AIFO_TOOLEEXEC_TOKEN"]
BUFFER = bytearray(1 << 20)
NUMBERS = itertools.count()


def ask(form: str, proto: int = 2) -> socket.socket:
    """Connect and ask for a tool."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(PATH)
    head = (
        "POST /exec HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: Bearer {TOKEN}\r\nX-Aifo-Proto: {proto}\r\n"
        f"Content-Length: {len(form)}\r\n\r\n"
    )
    sock.sendall((head + form).encode())
    return sock


def drain(sock: socket.socket) -> int:
    """Read to the end; return how much came."""
    with sock:
        return count(sock.recv_into)


def count(take_into: Callable[[bytearray], int]) -> int:
    """Take to the end; return how much came."""
    got = 0
    while size := take_into(BUFFER):
        got += size
    return got


def timed(call: Callable[[], int], at_least: int) -> float:
    """Return how long a call takes, seconds; it must return that much."""
    begun_s = time.monotonic()
    got = call()
    taken_s = time.monotonic() - begun_s
    if got < at_least:
        sys.exit(f"only {got} of {at_least} came")
    return taken_s


PIPE = f"head -c {SIZE} /dev/zero | cat"


def pipe() -> int:
    """Move the bytes through a pipe, to where nobody reads them."""
    subprocess.run(["/bin/sh", "-c", f"{PIPE} >/dev/null"], check=True)
    return SIZE


def pipe_here() -> int:
    """Move them through a pipe and to here, where a stream's bytes come to."""
    with subprocess.Popen(
        ["/bin/sh", "-c", PIPE], stdout=subprocess.PIPE, bufsize=0
    ) as shell:
        stdout: io.FileIO = shell.stdout  # type: ignore[assignment]
        return count(stdout.readinto)


def hosted_stream() -> int:
    """Move them through the host."""
    return drain(ask(f"tool=head&arg=-c&arg={SIZE}&arg=/dev/zero"))


def direct_byte() -> int:
    """Wait for the first byte of a program."""
    with subprocess.Popen(["/bin/echo", "x"], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None  # noqa: S101 - for the type
        return len(program.stdout.read(1))


def hosted_byte() -> int:
    """Wait for the first byte of a tool's output."""
    with ask("tool=echo&arg=x") as sock:
        data = b""
        while b"\r\nx\n" not in data:
            data += sock.recv(4096)
    return 1


def direct_trues() -> int:
    """Run programs, one after the other."""
    for _ in range(TRUES):
        with subprocess.Popen(["/bin/true"]) as program:
            program.wait()
    return TRUES


def hosted_trues() -> int:
    """Run tools, one after the other."""
    return sum(b"X-Exit-Code: 0" in read_all(ask("tool=true")) for _ in range(TRUES))


def direct_others() -> int:
    """Run programs with arguments that never come again, one after the other.

    Two each: `true` with one asks for its locale, which takes longer here than there.
    """
    for _ in range(TRUES):
        with subprocess.Popen(["/bin/true", "x", str(next(NUMBERS))]) as program:
            program.wait()
    return TRUES


def hosted_others() -> int:
    """Run tools with such arguments."""
    forms = (f"tool=true&arg=x&arg={next(NUMBERS)}" for _ in range(TRUES))
    return sum(b"X-Exit-Code: 0" in read_all(ask(form)) for form in forms)


def read_all(sock: socket.socket) -> bytes:
    """Read a small reply."""
    with sock:
        parts = []
        while data := sock.recv(65_536):
            parts.append(data)
    return b"".join(parts)


def direct_at_once() -> int:
    """Run programs at once."""

    def one() -> bool:
        with subprocess.Popen(["/bin/true"]) as program:
            return program.wait() == 0

    return in_threads(one)


def hosted_at_once() -> int:
    """Run tools at once."""
    return in_threads(lambda: b"X-Exit-Code: 0" in read_all(ask("tool=true")))


def in_threads(one: Callable[[], bool]) -> int:
    """Do something in many threads; return in how many it went well."""
    good: list[bool] = []
    threads = [
        threading.Thread(target=lambda: good.append(one())) for _ in range(AT_ONCE)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(good)


def chunks(sock: socket.socket) -> Iterator[memoryview]:
    """Yield the body of a streamed reply, in pieces."""
    with sock, io.BufferedReader(sock.makefile("rb", 0), 1 << 20) as reply:
        while reply.readline() != b"\r\n":
            pass
        while size := int(reply.readline(), 16):
            while size:
                data = reply.read1(min(size, len(BUFFER)))
                yield memoryview(data)
                size -= len(data)
            reply.readline()


def resident_bytes(pid: int) -> int:
    """Return the resident set of a process."""
    text = Path(f"/proc/{pid}/statm").read_text(encoding="ascii")
    return int(text.split()[1]) * os.sysconf("SC_PAGESIZE")


def busy_s(pid: int) -> float:
    """Return the processor time of a process's first thread, in seconds.

    Unlike the time that passes it hardly depends on what else the machine does.
    Source: Documentation/scheduler/sched-stats.rst.
    """
    text = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii")
    return int(text.split()[0]) / 1e9


def stream_busy_s(host_pid: int) -> float:
    """Return what a stream costs the host, seconds of processor time."""
    before = busy_s(host_pid)
    hosted_stream()
    return busy_s(host_pid) - before


def stalled(host_pid: int) -> dict[str, float]:
    """Read nothing for a while, then everything."""
    before = resident_bytes(host_pid)
    sock = ask(f"tool=head&arg=-c&arg={STALLED_SIZE}&arg=/dev/zero")
    time.sleep(STALL_S)
    grown = resident_bytes(host_pid) - before
    digest = hashlib.sha256()
    for part in chunks(sock):
        digest.update(part)
        grown = max(grown, resident_bytes(host_pid) - before)
    expected = hashlib.sha256()
    for _ in range(STALLED_SIZE >> 20):
        expected.update(bytes(1 << 20))
    return {
        "grown_bytes": grown,
        "is_equal": digest.hexdigest() == expected.hexdigest(),
    }


def main(rounds: int, host_pid: int) -> None:
    """Measure, and print."""
    pairs: dict[str, tuple[Callable[[], int], Callable[[], int], int]] = {
        "stream": (pipe, hosted_stream, SIZE),
        "stream_here": (pipe_here, hosted_stream, SIZE),
        "byte": (direct_byte, hosted_byte, 1),
        "trues": (direct_trues, hosted_trues, TRUES),
        "others": (direct_others, hosted_others, TRUES),
        "at_once": (direct_at_once, hosted_at_once, AT_ONCE),
    }
    hosted_stream()  # pays for the pages that later rounds use again
    found: dict[str, list[list[float]]] = {name: [] for name in pairs}
    stream_s = []
    for number in range(rounds):
        for name, (direct, hosted, least) in pairs.items():
            if name == "trues":
                hosted_trues()  # this also closes the rest of the streams
            calls = [direct, hosted]
            order = calls[::-1] if number % 2 else calls
            taken = {call: timed(call, least) for call in order}
            found[name].append([taken[call] for call in calls])
        stream_s.append(stream_busy_s(host_pid))
    more = {"stream_s": stream_s, "stalled": stalled(host_pid)}
    print(json.dumps({**found, **more}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
