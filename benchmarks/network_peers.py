"""The peers of `benchmarks.network`: a server, a copier, a client.

serve FD_BULK FD_FIRST MEBIBYTES    sends MiB to connections of one listener, a byte
to those of the other
copy FD ADDRESS PORT ...            joins connections by splice(2), in two threads
ask [NAMESPACE]...                  answers lines: `name NAME`, `bulk ADDRESS PORT`
(prints s), `first ADDRESS PORT COUNT` (median ms
to a byte), `crowd NAME PORT COUNT` (s until all
connections of all namespaces have a byte), `reach NAME
PORT` (byte or refused), `request URL CA|- new|kept COUNT`
(median ms of a request, with connections as said)
tls ADDRESS TLS FIRST CERTIFICATE   serves HTTP by TLS, and a byte at another port
world ADDRESS BULK FIRST MEBIBYTES COMMAND...    serves while a command runs
take NAME BULK FIRST COUNT          prints s of a download and ms to a byte, by name
"""

import ctypes
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

PIECE = bytes(1 << 20)
PIPE_BYTES = 262_144
F_SETPIPE_SZ = 1031
NEW_NET = 0x40000000


def serve(bulk: int, first: int, mebibytes: int) -> None:
    """Serve at two listeners."""

    def send_bulk(sock: socket.socket) -> None:
        for _ in range(mebibytes):
            sock.sendall(PIECE)

    thread = threading.Thread(target=accept, args=(first, lambda s: s.sendall(b"x")))
    thread.start()
    accept(bulk, send_bulk)


def accept(fd: int, handle: Callable[[socket.socket], None]) -> None:
    """Handle one connection after another."""
    listener = socket.socket(fileno=fd)
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with sock, suppress(OSError):
            handle(sock)


def copy(fd: int, address: str, port: int) -> None:
    """Join what comes at a listener to connections to an address."""

    def join(inner: socket.socket) -> None:
        with socket.create_connection((address, port)) as outer:
            outer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=splice, args=(inner, outer))
            back.start()
            splice(outer, inner)
            back.join()

    accept(fd, join)


def splice(source: socket.socket, sink: socket.socket) -> None:
    """Move all of one direction, and its end."""
    import fcntl  # noqa: PLC0415 - a client needs none

    out, into = os.pipe()
    fcntl.fcntl(into, F_SETPIPE_SZ, PIPE_BYTES)
    with suppress(OSError):
        while size := os.splice(source.fileno(), into, PIPE_BYTES):
            while size:
                size -= os.splice(out, sink.fileno(), size)
        sink.shutdown(socket.SHUT_WR)
    os.close(out)
    os.close(into)


def ask(namespaces: list[int]) -> None:
    """Answer questions from stdin."""
    for line in sys.stdin:
        match line.split():
            case ["name", name]:
                print(resolve(name), flush=True)
            case ["bulk", address, port]:
                print(bulk(address, int(port)), flush=True)
            case ["first", address, port, count]:
                print(first(address, int(port), int(count)), flush=True)
            case ["crowd", name, port, count]:
                print(crowd(namespaces, name, int(port), int(count)), flush=True)
            case ["reach", name, port]:
                print(reach(name, int(port)), flush=True)
            case ["request", url, authority, keeping, count]:
                is_kept = keeping == "kept"
                print(request(url, authority, is_kept, int(count)), flush=True)
            case _:
                sys.exit(f"no question: {line}")


def world(
    address: str, bulk: int, first: int, mebibytes: int, command: list[str]
) -> int:
    """Serve while a command runs; return its status."""
    listeners = [
        socket.create_server((address, port), backlog=1024) for port in (bulk, first)
    ]
    fds = [listener.detach() for listener in listeners]
    threading.Thread(target=serve, args=(*fds, mebibytes), daemon=True).start()
    return subprocess.run(command, check=False).returncode


def take(name: str, bulk_port: int, first_port: int, count: int) -> None:
    """Print seconds of a download, and milliseconds until a first byte."""
    seconds = bulk(name, bulk_port)
    print(seconds, first(name, first_port, count))


def dial(host: str, port: int) -> socket.socket:
    """Connect, through the proxy of the environment if there is one."""
    proxy = os.environ.get("HTTP_PROXY")
    if proxy is None:
        return socket.create_connection((host, port))
    from base64 import b64encode  # noqa: PLC0415 - a client without a proxy needs none
    from urllib.parse import unquote, urlsplit  # noqa: PLC0415

    url = urlsplit(proxy)
    sock = socket.create_connection((url.hostname, url.port))
    lines = [f"CONNECT {host}:{port} HTTP/1.1", f"Host: {host}:{port}"]
    if url.username is not None:
        secret = f"{unquote(url.username)}:{unquote(url.password or '')}"
        lines.append(
            f"Proxy-Authorization: Basic {b64encode(secret.encode()).decode()}"
        )
    sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = sock.recv(1)
        if not byte:
            sys.exit(f"the proxy has ended: {head!r}")
        head += byte
    if head.split()[1] != b"200":
        sys.exit(f"the proxy has refused: {head!r}")
    return sock


def resolve(name: str) -> str:
    """Return the address of a name by the DNS of this namespace."""
    labels = b"".join(bytes([len(word)]) + word.encode() for word in name.split("."))
    question = struct.pack("!6H", 1, 256, 1, 0, 0, 0) + labels + b"\0\0\1\0\1"
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.settimeout(5)
        sock.connect(("127.0.0.1", 53))
        sock.send(question)
        return socket.inet_ntoa(sock.recv(512)[-4:])


def bulk(address: str, port: int) -> float:
    """Return how long it takes to read all that a server sends."""
    buffer = bytearray(1 << 20)
    begun = time.perf_counter()
    with dial(address, port) as sock:
        size = 0
        while count := sock.recv_into(buffer):
            size += count
    taken_s = time.perf_counter() - begun
    if size % len(PIECE) or not size:
        sys.exit(f"{size} bytes have come")
    return taken_s


def first(address: str, port: int, count: int) -> float:
    """Return the median of milliseconds until the first byte is there."""
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        with dial(address, port) as sock:
            if sock.recv(1) != b"x":
                sys.exit("no byte has come")
            times.append(time.perf_counter() - begun)
    return statistics.median(times) * 1000


def reach(name: str, port: int) -> str:
    """Return what a connection to a name ends with: byte, or refused."""
    try:
        with socket.create_connection((name, port)) as sock:
            return "byte" if sock.recv(1) else "refused"
    except OSError:
        return "refused"


def request(url: str, authority: str, is_kept: bool, count: int) -> float:
    """Return the median of milliseconds of a request, on its own connection or on one."""
    import http.client  # noqa: PLC0415 - other peers need none
    import ssl  # noqa: PLC0415
    from urllib.parse import urlsplit  # noqa: PLC0415

    where = urlsplit(url)
    host = where.hostname or ""
    line: http.client.HTTPConnection
    if authority == "-":
        line = http.client.HTTPConnection(host, where.port)
    else:
        context = ssl.create_default_context(cafile=authority)
        line = http.client.HTTPSConnection(host, where.port, context=context)
    times = []
    for number in range(count + is_kept):  # the first one connects
        begun = time.perf_counter()
        line.request("GET", "/")
        answer = line.getresponse()
        if answer.read() != b"said":
            sys.exit(f"answer {answer.status}")
        if number or not is_kept:
            times.append(time.perf_counter() - begun)
        if not is_kept:
            line.close()
    line.close()
    return statistics.median(times) * 1000


def serve_tls(address: str, tls_port: int, first: int, certificate: str) -> None:
    """Serve HTTP by TLS, and one byte a connection at another port; say when."""
    import ssl  # noqa: PLC0415 - other peers need none
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # noqa: PLC0415

    class Says(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "4")
            self.end_headers()
            self.wfile.write(b"said")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = ThreadingHTTPServer((address, tls_port), Says)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    listener = socket.create_server((address, first))
    words = (listener.detach(), lambda sock: sock.sendall(b"x"))
    threading.Thread(target=accept, args=words, daemon=True).start()
    print("serving", flush=True)
    server.serve_forever()


def crowd(namespaces: list[int], name: str, port: int, count: int) -> float:
    """Return how long many connections take that begin at once."""
    libc = ctypes.CDLL(None, use_errno=True)
    waiting = []
    for namespace in namespaces:
        if libc.setns(namespace, NEW_NET):
            sys.exit(f"setns: {os.strerror(ctypes.get_errno())}")
        address = resolve(name)
        for _ in range(count):
            sock = socket.socket()
            sock.setblocking(False)
            waiting.append((sock, address))
    begun = time.perf_counter()
    for sock, address in waiting:
        sock.connect_ex((address, port))
    for sock, _ in waiting:
        sock.settimeout(60)
        if sock.recv(1) != b"x":
            sys.exit("no byte has come")
    taken_s = time.perf_counter() - begun
    for sock, _ in waiting:
        sock.close()
    return taken_s


def main(argv: list[str]) -> None:
    """Be one of the peers, until killed."""
    if argv[0] == "serve":
        serve(*map(int, argv[1:]))
    elif argv[0] == "copy":
        for at in range(4, len(argv), 3):
            more = (int(argv[at]), argv[at + 1], int(argv[at + 2]))
            threading.Thread(target=copy, args=more, daemon=True).start()
        copy(int(argv[1]), argv[2], int(argv[3]))
    elif argv[0] == "tls":
        serve_tls(argv[1], int(argv[2]), int(argv[3]), argv[4])
    elif argv[0] == "world":
        address, bulk_port, first_port, mebibytes, *command = argv[1:]
        ports = int(bulk_port), int(first_port)
        os._exit(world(address, *ports, int(mebibytes), command))
    elif argv[0] == "take":
        take(argv[1], *map(int, argv[2:]))
    else:
        ask([*map(int, argv[1:])])


if __name__ == "__main__":
    main(sys.argv[1:])
