"""A child that does what it is told: each line of stdin is a Python expression.

It answers each with one line, the repr of the value. The functions below are the words
of the expressions; they speak on FD 3 (or the pipes of `FSPROXY_FD`) byte for byte, so
that a test can say anything, torn and malformed requests included. Standard library
only and nothing heavy: it starts in the time of a bare interpreter.

Driven by `tests/helpers/hosts.py`.
"""

import _signal as signal  # type: ignore[import-not-found] # no `enum`: a third of the start
import os
import struct
import sys
import time

_door = [int(number) for number in os.environ.get("FSPROXY_FD", "3").split(",")]
IN = _door[0]
OUT = _door[1] if len(_door) > 1 else IN

_held: dict[int, bytes] = {}  # bytes received beyond a line, by descriptor


def send(data: bytes, fd: int | None = None) -> int:
    """Send `data`; tell how much of it the host took before it closed."""
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(OUT if fd is None else fd, view) :]
    except (BrokenPipeError, ConnectionResetError):
        pass
    return len(data) - len(view)


def line(fd: int | None = None) -> bytes:
    """Receive one line, without its LF; what came of it if the host closed."""
    fd = IN if fd is None else fd
    data = _held.pop(fd, b"")
    while b"\n" not in data:
        more = _receive(fd, 65_536)
        if not more:
            return data
        data += more
    text, _, rest = data.partition(b"\n")
    if rest:
        _held[fd] = rest
    return text


def take(size: int, fd: int | None = None) -> bytes:
    """Receive exactly `size` bytes, fewer if the host closed."""
    fd = IN if fd is None else fd
    data = _held.pop(fd, b"")
    while len(data) < size:
        more = _receive(fd, size - len(data))
        if not more:
            break
        data += more
    if data[size:]:
        _held[fd] = data[size:]
    return data[:size]


def _receive(fd: int, size: int) -> bytes:
    try:
        return os.read(fd, size)
    except ConnectionResetError:
        return b""


def ask(data: bytes, fd: int | None = None) -> bytes:
    """Send a request and receive its reply line."""
    send(data, fd)
    return line(fd)


def read(fileno: int, size: int, fd: int | None = None) -> bytes:
    """READ: the bytes, or the error line."""
    reply = ask(b"READ %d %d\n" % (fileno, size), fd)
    if reply[:2] != b"OK":
        return reply
    return take(int(reply[3:]), fd)


def opened(
    name: bytes, mode: bytes = b"r", claim: bytes = b"false", fd: int | None = None
) -> int | bytes:
    """OPEN: the fileno, or the error line."""
    reply = ask(b"OPEN %b %b %b\n" % (name, mode, claim), fd)
    return int(reply[3:]) if reply[:3] == b"OK " else reply


def slowest(fileno: int, count: int, size: int = 4096) -> float:
    """READ from the start `count` times; tell the slowest, with its SEEK, in seconds.

    With it, for a host that serves so many requests in a row may always stop behind a READ.
    """
    worst = 0.0
    for _ in range(count):
        start = time.monotonic()
        ask(b"SEEK %d 0\n" % fileno)
        read(fileno, size)
        worst = max(worst, time.monotonic() - start)
    return worst


def descriptors() -> dict[int, str]:
    """Tell what this process has open: number -> what it is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor that listed the directory
    return found


def around(masked: str) -> list[str]:
    """Look for a key in what is shown of this process and its family.

    Tell where it is.

    The family is whoever is above it, and whoever they have started, as far as it sees them.

    Args:
        masked: the forms to look for, hexadecimal, each byte turned, between commas.
    """
    words = [bytes(b ^ 0x95 for b in bytes.fromhex(t)) for t in masked.split(",")]
    found = [f"link {n}" for n, to in descriptors().items() if _has(to.encode(), words)]
    for pid in _family():
        for name in ("environ", "cmdline", "status", "maps", "mountinfo")[
            : _depth(pid)
        ]:
            try:
                with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
                    if _has(file.readall(), words):
                        found.append(f"/proc/{pid}/{name}")
            except OSError:
                continue  # gone, or not for this process
    return found


def _has(text: bytes, words: list[bytes]) -> bool:
    return any(word in text for word in words)


def _depth(pid: str) -> int:
    """Tell how many of the files of a process to look at.

    Of others, environment and words.
    """
    return 5 if pid == "self" else 2


def _family() -> list[str]:
    found, pid = ["self"], os.getppid()
    while pid > 0 and len(found) < 100:
        found.append(str(pid))
        try:
            with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
                found += file.read().split()[:20]
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found


def _sleep_for_ever() -> None:
    while True:
        signal.pause()


def daemon() -> int:
    """Start a daemon (double fork, session of its own) that keeps FD 3; tell its pid."""
    ours, theirs = os.pipe()
    if not (middle := os.fork()):
        os.setsid()
        if os.fork():
            os._exit(0)
        os.write(theirs, b"%d" % os.getpid())
        for number in descriptors():
            if number not in _door:
                os.close(number)
        _sleep_for_ever()
    os.waitpid(middle, 0)
    pid = int(os.read(ours, 32))
    os.close(ours)
    os.close(theirs)
    return pid


def forked(*expressions: str, fd: int | None = None) -> tuple[int, list[object]]:
    """Fork a process that evaluates expressions and stays; tell its pid and values.

    Args:
        expressions: evaluated in order.
        fd: becomes its FD 3; None for this process's own door.
    """
    ours, theirs = os.pipe()
    if not (pid := os.fork()):
        os.close(ours)
        _held.clear()
        if fd is not None:
            _enter_by(fd)
        values = [eval(text) for text in expressions]  # noqa: S307 - the test's own
        os.write(theirs, repr(values).encode() + b"\n")
        os.close(theirs)
        _sleep_for_ever()
    os.close(theirs)
    text = b""
    while not text.endswith(b"\n"):
        more = os.read(ours, 65_536)
        if not more:
            raise EOFError(f"process {pid} ended without an answer")
        text += more
    os.close(ours)
    return pid, eval(text)  # noqa: S307 - what the fork above wrote


def _enter_by(fd: int) -> None:
    """Make a connection the door of this process."""
    global _door, OUT
    os.dup2(fd, IN)
    _door, OUT = [IN], IN


def attached(fd: int | None = None) -> int | bytes:
    """ATTACH: the descriptor of one more connection, or the error line."""
    import socket  # noqa: PLC0415 - slow to import, and most puppets need none

    beside = len(_door) > 2 and fd is None
    send(b"ATTACH\n", fd)
    reply = b""
    if beside and not (reply := line()).startswith(b"OK"):
        return reply
    number = _door[2] if beside else IN if fd is None else fd
    with socket.socket(fileno=os.dup(number)) as door:
        data, control, _, _ = door.recvmsg(1, socket.CMSG_LEN(4))
    if not beside:
        reply = data + line(fd)
    if not control:
        return reply
    (passed,) = struct.unpack("i", control[0][2])
    return int(passed)


def stuff(count: int, data: bytes = b"PING\n", fd: int | None = None) -> int:
    """Send `data` with `count` copies of the null device's descriptor beside it."""
    null = os.open(os.devnull, os.O_RDONLY)
    sent = pass_on([null] * count, data, fd)
    os.close(null)
    return sent


def pass_on(numbers: list[int], data: bytes = b"PING\n", fd: int | None = None) -> int:
    """Send `data` with copies of descriptors beside it."""
    import socket  # noqa: PLC0415 - slow to import, and most puppets need none

    with socket.socket(fileno=os.dup(OUT if fd is None else fd)) as door:
        return socket.send_fds(door, [data], numbers)


def deafen() -> None:
    """Ignore every signal that can be ignored."""
    spared = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
    for number in set(range(1, 32)) - spared:
        signal.signal(number, signal.SIG_IGN)


def last_words(data: bytes, status: int) -> None:
    """At SIGTERM, send `data` and exit."""

    def leave(_number: int, _frame: object) -> None:
        send(data)
        os._exit(status)

    signal.signal(signal.SIGTERM, leave)


def die() -> None:
    """End like the abnormal way: at once, by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Answer expressions until stdin ends."""
    for text in sys.stdin:
        value = eval(text)  # noqa: S307 - the test leads this process by the hand
        os.write(1, b"%b\n" % repr(value).encode())


main()
