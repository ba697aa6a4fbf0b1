"""All the world of a host.

Servers of one name in a net namespace, and the host itself.

    networkworld.py DIRECTORY CERTIFICATE COMMAND...

Run by unshare(1) with a net and a mount namespace of its own, by the standard library
alone. `web.test` is known by /etc/hosts, also with the dot at its end by which the host asks.
Files are served at ports 80 and 443; 22 and 5432 say what ssh and psql want to hear first.
"""

import hashlib
import os
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TIMEOUT_S = 50.0
ADDRESS = "203.0.113.5"
SETUP = "link set lo up\naddress add 203.0.113.1/24 dev lo\n"
FILES = {"hosts": f"127.0.0.1 localhost\n{ADDRESS} web.test. web.test\n"}


class Files(SimpleHTTPRequestHandler):
    """Serves files, whatever stands behind a question mark, and what it was asked."""

    def do_GET(self) -> None:
        """Serve a file; at `/echo` the header of a secret, and what tells that it came."""
        if self.path != "/echo":
            super().do_GET()
            return
        value = self.headers.get("Authorization", "")
        digest = hashlib.sha256(value.encode()).hexdigest()
        body = f"{digest}\n{self.headers['Host']} {value}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main(argv: list[str]) -> int:
    """Run a command, and return its exit status."""
    directory, certificate, *command = argv
    furnish(Path(directory), SETUP, FILES)
    serve_files(partial(Files, directory=directory), Path(certificate))
    for port, say in ((22, speak_ssh), (5432, speak_postgres)):
        serve(ADDRESS, port, say)
    return subprocess.run(command, check=False, timeout=TIMEOUT_S).returncode


def furnish(directory: Path, setup: str, files: Mapping[str, str]) -> None:
    """Set up this namespace by lines of `ip -batch`, with its own files of /etc."""
    subprocess.run(["ip", "-batch", "-"], input=setup.encode(), check=True)
    for name, text in files.items():
        path = directory / name
        path.write_text(text, encoding="ascii")
        subprocess.run(["mount", "--bind", str(path), f"/etc/{name}"], check=True)


def serve_files(
    handler: Callable[..., SimpleHTTPRequestHandler], certificate: Path
) -> None:
    """Serve files at ports 80 and, by TLS, 443, in threads of their own."""
    servers = [ThreadingHTTPServer((ADDRESS, port), handler) for port in (80, 443)]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    servers[1].socket = context.wrap_socket(servers[1].socket, server_side=True)
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()


def serve(address: str, port: int, say: Callable[[socket.socket], None]) -> None:
    """Say something on each connection to a port, in a thread of its own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.create_server((address, port), family=family)
    threading.Thread(target=accept, args=(sock, say), daemon=True).start()


def accept(listener: socket.socket, say: Callable[[socket.socket], None]) -> None:
    """Say something on each connection, in a thread of its own."""

    def speak(sock: socket.socket) -> None:
        with sock, suppress(ConnectionError):
            say(sock)

    while True:
        sock, _ = listener.accept()
        threading.Thread(target=speak, args=(sock,), daemon=True).start()


def speak_ssh(sock: socket.socket) -> None:
    """Name a server, and end once the client has named itself."""
    sock.sendall(b"SSH-2.0-OfTheTest\r\n")
    sock.recv(4096)


def speak_postgres(sock: socket.socket) -> None:
    """Let anybody in, and answer every question with one row (PostgreSQL, 55)."""
    if struct.unpack("!II", sock.recv(8))[1] == 80877103:  # it asks for TLS
        sock.sendall(b"N")
        sock.recv(8)
    sock.recv(4096)
    sock.sendall(message(b"R", bytes(4)) + message(b"Z", b"I"))
    while sock.recv(4096)[:1] == b"Q":
        column = b"said\0" + struct.pack("!IHIHIH", 0, 0, 25, 0xFFFF, 0xFFFFFFFF, 0)
        row = struct.pack("!HI", 1, 13) + b"from postgres"
        sock.sendall(
            message(b"T", b"\0\1" + column)
            + message(b"D", row)
            + message(b"C", b"SELECT 1\0")
            + message(b"Z", b"I")
        )


def message(kind: bytes, body: bytes) -> bytes:
    """Return a message of PostgreSQL's protocol."""
    return kind + struct.pack("!I", 4 + len(body)) + body


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # the servers' threads have nothing to end
