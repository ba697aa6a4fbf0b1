"""All the world of a host, with a name server that lies.

In a net namespace of its own.

    nameworld.py DIRECTORY COMMAND...

Run by unshare(1) with a net and a mount namespace, by the standard library alone. Each
question is written to DIRECTORY/questions. A web server says what Host it was asked for,
at 203.0.113.5, 10.1.0.5 and 169.254.169.254; an abstract socket waits beside it.
"""

import os
import socket
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.helpers.networkworld import furnish

TIMEOUT_S = 50.0
NAME_SERVER = "203.0.113.53"
PUBLIC, PRIVATE, METADATA = "203.0.113.5", "10.1.0.5", "169.254.169.254"
ABSTRACT = "\0of-the-world"
SETUP = f"""link set lo up
address add 203.0.113.1/24 dev lo
route add local 10.1.0.0/16 dev lo
route add local {METADATA}/32 dev lo
"""
FILES = {
    "resolv.conf": f"nameserver {NAME_SERVER}\noptions timeout:1 attempts:1\n",
    "nsswitch.conf": "hosts: files dns\n",
    "hosts": "127.0.0.1 localhost\n",
}
A, CNAME, AAAA = 1, 5, 28
LATE, RELEASE, NEVER = "late.test", "release.test", "never.test"
"""`LATE` is answered once `RELEASE` was asked for, and `NEVER` is not."""
Row = tuple[str, int, str]
RECORDS: dict[str, list[Row]] = {
    "ok.test": [("ok.test", A, PUBLIC)],
    "chain.test": [
        ("chain.test", CNAME, "one.public.test"),
        ("one.public.test", CNAME, "two.public.test"),
        ("two.public.test", A, PRIVATE),
    ],
    "mixed.test": [("mixed.test", A, PUBLIC), ("mixed.test", A, PRIVATE)],
    "loop.test": [("loop.test", A, "127.0.0.1")],
    "own.test": [("own.test", A, "203.0.113.1")],
    "meta.test": [("meta.test", A, METADATA)],
    "mapped.test": [("mapped.test", AAAA, f"::ffff:{PRIVATE}")],
    "private.test": [("private.test", A, PRIVATE)],
    "rebind.test": [("rebind.test", A, PUBLIC)],
    "other.test": [("ok.test", A, PUBLIC)],
    LATE: [(LATE, A, PUBLIC)],
}
"""By the name that is asked for; `rebind.test` is private from the second time on."""


class Web(BaseHTTPRequestHandler):
    """Says which Host it was asked for."""

    def do_GET(self) -> None:
        """Answer."""
        body = f"{self.connection.getsockname()[0]} {self.headers['Host']}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class WebServer(ThreadingHTTPServer):
    """Serves, and asks nobody what its address is called."""

    def server_bind(self) -> None:
        """Bind, without a look-up."""
        TCPServer.server_bind(self)


def main(argv: list[str]) -> int:
    """Run a command, and return its exit status."""
    directory, *command = argv
    furnish(Path(directory), SETUP, FILES)
    serve_names(Path(directory, "questions"))
    for address in (PUBLIC, PRIVATE, METADATA):
        server = WebServer((address, 80), Web)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(ABSTRACT)
    abstract.listen()
    return subprocess.run(command, check=False, timeout=TIMEOUT_S).returncode


def serve_names(log: Path) -> None:
    """Answer questions for names in a thread of its own, and write them down."""
    names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    names.bind((NAME_SERVER, 53))
    log.touch()
    threading.Thread(target=answer_names, args=(names, log), daemon=True).start()


def answer_names(sock: socket.socket, log: Path) -> None:
    """Answer each question, and write it down."""
    records, late = {**RECORDS}, []
    while True:
        packet, peer = sock.recvfrom(4096)
        name, kind, end = read_question(packet)
        with log.open("a") as file:
            file.write(f"{name} {kind}\n")
        if name == NEVER:
            continue
        reply = write_reply(packet[:end], records.get(name), kind)
        if name == LATE:
            late.append((reply, peer))
            continue
        sock.sendto(reply, peer)
        if name == "rebind.test" and kind == A:
            records[name] = [(name, A, PRIVATE)]
        while name == RELEASE and late:
            sock.sendto(*late.pop())


def write_reply(packet: bytes, rows: list[Row] | None, kind: int) -> bytes:
    """Return the reply to a question; there is no such name if there are no rows."""
    answers = [row for row in rows or () if row[1] in {CNAME, kind}]
    code = 3 if rows is None else 0
    head = packet[:2] + struct.pack("!5H", 0x8180 | code, 1, len(answers), 0, 0)
    return head + packet[12:] + b"".join(map(write_record, answers))


def read_question(packet: bytes) -> tuple[str, int, int]:
    """Return the name, the type, and where the question ends."""
    labels, at = [], 12
    while size := packet[at]:
        labels.append(packet[at + 1 : at + 1 + size].decode("latin-1").lower())
        at += 1 + size
    (kind,) = struct.unpack_from("!H", packet, at + 1)
    return ".".join(labels), kind, at + 5


def write_record(row: Row) -> bytes:
    """Return a record as it is sent; TTL 0."""
    name, kind, value = row
    if kind == CNAME:
        data = encode(value)
    else:
        data = socket.inet_pton(socket.AF_INET if kind == A else socket.AF_INET6, value)
    return encode(name) + struct.pack("!HHIH", kind, 1, 0, len(data)) + data


def encode(name: str) -> bytes:
    """Return a name as it is sent."""
    labels = name.encode("ascii").split(b".")
    return b"".join(bytes((len(label),)) + label for label in labels) + b"\0"


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # the servers' threads have nothing to end
