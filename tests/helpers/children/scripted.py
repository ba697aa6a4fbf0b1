"""A child that writes one file in three WRITEs, when it is told to begin.

argv: a FIFO whose end of file is the signal, the file's name and its mode. Prints the reply line
of each request; "gone" where the host does not answer any more.
"""

import os
import sys

PIECES = (b"1" * 5_000, b"2" * 1_300_000, b"3" * 300)
"""One in a small buffer, one that a thread writes, one more."""


def ask(request: bytes) -> bytes:
    """Send a request; receive, print and return the reply line."""
    view = memoryview(request)
    reply = b""
    try:
        while view:
            view = view[os.write(3, view) :]
        while not reply.endswith(b"\n"):
            more = os.read(3, 4096)
            if not more:
                break
            reply += more
    except ConnectionError:
        reply = b""
    if not reply:
        os.write(1, b"gone\n")
        os._exit(1)
    os.write(1, reply)
    return reply


def main() -> None:
    """Open, write, close."""
    begin, name, mode = sys.argv[1:]
    with open(begin, "rb") as fifo:
        fifo.read()
    opened = ask(b"OPEN %b %b false\n" % (os.fsencode(name), os.fsencode(mode)))
    if not opened.startswith(b"OK"):
        return
    fileno = opened.split()[1]
    for piece in PIECES:
        ask(b"WRITE %b %d\n%b" % (fileno, len(piece), piece))
    ask(b"CLOSE %b\n" % fileno)


if __name__ == "__main__":
    main()
