"""A child that does what it is told: each line of stdin is a Python expression.

It answers each with one line, the repr of the value. The functions below are the words
of the expressions; they speak on FD 3 (or the pipes of `FSPROXY_FD`) byte for byte, so
that a test can say anything, torn and malformed requests included. Standard library
only and nothing heavy: it starts in the time of a bare interpreter.

Driven by `tests/helpers/hosts.py`.
"""

import os
import signal
import struct
import sys
import time

_DOOR = [int(number) for number in os.environ.get("FSPROXY_FD", "3").split(",")]
IN = _DOOR[0]
OUT = _DOOR[1] if len(_DOOR) > 1 else IN

_held = {}  # what came beyond a line, by descriptor


def send(data, fd=OUT):
    """Send all of `data`; tell how much that was."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    return len(data)


def line(fd=IN):
    """Receive one line, without its LF; what came of it if the host closed."""
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


def take(size, fd=IN):
    """Receive exactly `size` bytes, fewer if the host closed."""
    data = _held.pop(fd, b"")
    while len(data) < size:
        more = _receive(fd, size - len(data))
        if not more:
            break
        data += more
    if data[size:]:
        _held[fd] = data[size:]
    return data[:size]


def _receive(fd, size):
    try:
        return os.read(fd, size)
    except ConnectionResetError:
        return b""


def ask(data, fd=None):
    """Send a request and receive its reply line."""
    send(data, OUT if fd is None else fd)
    return line(IN if fd is None else fd)


def read(fileno, size, fd=None):
    """READ: the bytes, or the error line."""
    reply = ask(b"READ %d %d\n" % (fileno, size), fd)
    return take(int(reply[3:]), IN if fd is None else fd) if reply[:2] == b"OK" else reply


def opened(name, mode=b"r", claim=b"false", fd=None):
    """OPEN: the fileno, or the error line."""
    reply = ask(b"OPEN %b %b %b\n" % (name, mode, claim), fd)
    return int(reply[3:]) if reply[:3] == b"OK " else reply


def slowest(fileno, count, size=4096):
    """READ from the start `count` times; tell the slowest round trip, in seconds."""
    worst = 0.0
    for _ in range(count):
        ask(b"SEEK %d 0\n" % fileno)
        start = time.monotonic()
        read(fileno, size)
        worst = max(worst, time.monotonic() - start)
    return worst


def descriptors():
    """Tell what this process has open: number -> what it is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor that listed the directory
    return found


def _sleep_for_ever():
    while True:
        signal.pause()


def daemon():
    """Start a daemon (double fork, session of its own) that keeps FD 3; tell its pid."""
    ours, theirs = os.pipe()
    if not (middle := os.fork()):
        os.setsid()
        if os.fork():
            os._exit(0)
        for number in (0, 1, 2):
            os.close(number)
        os.write(theirs, b"%d" % os.getpid())
        _sleep_for_ever()
    os.waitpid(middle, 0)
    pid = int(os.read(ours, 32))
    os.close(ours)
    os.close(theirs)
    return pid


def forked(*expressions, fd=None):
    """Fork a process that evaluates expressions and stays; tell its pid and values.

    Args:
        fd: what it finds as FD 3; None for this process's own.
    """
    ours, theirs = os.pipe()
    if not (pid := os.fork()):
        if fd is not None:
            os.dup2(fd, IN)
        _held.clear()
        os.write(theirs, repr([eval(text) for text in expressions]).encode())
        os.close(theirs)
        _sleep_for_ever()
    os.close(theirs)
    text = b""
    while more := os.read(ours, 65_536):
        text += more
    os.close(ours)
    return pid, eval(text)


def attached(fd=None):
    """ATTACH: the descriptor of one more connection, or the error line."""
    import socket

    send(b"ATTACH\n", OUT if fd is None else fd)
    door = socket.socket(fileno=os.dup(IN if fd is None else fd))
    with door:
        data, control, _, _ = door.recvmsg(1, socket.CMSG_LEN(4))
    reply = data + line(IN if fd is None else fd)
    if not control:
        return reply
    return struct.unpack("i", control[0][2])[0]


def stuff(count, data=b"\n"):
    """Send `data` on FD 3 with `count` copies of a descriptor beside it."""
    import socket

    null = os.open(os.devnull, os.O_RDONLY)
    with socket.socket(fileno=os.dup(OUT)) as door:
        sent = socket.send_fds(door, [data], [null] * count)
    os.close(null)
    return sent


def die():
    """End like the abnormal way: at once, by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def main():
    """Answer expressions until stdin ends."""
    for text in sys.stdin:
        print(repr(eval(text)), flush=True)


main()
