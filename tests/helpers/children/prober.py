"""A child that does what it is told by the socket `door` in its working directory.

    prober.py NAME

It says its name, and answers each line, an expression in the words below, with one line:
the repr of the value. An error of the network is its symbol: `ECONNREFUSED`, `no name`;
`reset` stands for all forms of one.
"""

import errno
import socket
import sys
import threading

TIMEOUT_S = 60.0
_RESETS = {errno.ECONNRESET, errno.EPIPE}
_held: dict[str, socket.socket] = {}
_begun: dict[str, threading.Thread] = {}
_ended: dict[str, object] = {}


def value_of(text: str) -> object:
    """Return the value of an expression, or the word of an error of the network."""
    try:
        return eval(text, globals())  # noqa: S307 - it does what it is told
    except socket.gaierror:
        return "no name"
    except OSError as why:
        code = why.errno or 0
        return "reset" if code in _RESETS else errno.errorcode.get(code, repr(why))


def connect(host: str, port: int) -> socket.socket:
    """Connect to a host."""
    return socket.create_connection((host, port), TIMEOUT_S)


def read(sock: socket.socket) -> bytes:
    """Return all that comes until the end."""
    return b"".join(iter(lambda: sock.recv(65_536), b""))


def send(host: str, port: int, data: bytes = b"") -> bytes:
    """Send some bytes and their end; return what comes back until its end."""
    with connect(host, port) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        return read(sock)


def get(host: str, port: int = 80, path: str = "/said") -> str:
    """Return the body of a file."""
    head = f"GET {path} HTTP/1.0\r\nHost: {host}\r\n\r\n"
    with connect(host, port) as sock:
        sock.sendall(head.encode())
        return read(sock).partition(b"\r\n\r\n")[2].decode()


def get_by_tls(host: str, name: str | None, path: str = "/said") -> str:
    """Return the body of a file over TLS, for a name in the ClientHello."""
    import ssl  # noqa: PLC0415 - for few

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    head = f"GET {path} HTTP/1.0\r\n\r\n".encode()
    with context.wrap_socket(connect(host, 443), server_hostname=name) as sock:
        sock.sendall(head)
        return read(sock).partition(b"\r\n\r\n")[2].decode()


def hold(key: str, host: str, port: int, size: int) -> bytes:
    """Connect and keep the connection, once some bytes have come."""
    sock = _held[key] = connect(host, port)
    return sock.recv(size, socket.MSG_WAITALL)


def held(key: str, data: bytes = b"") -> bytes:
    """Send bytes on a connection that was kept, return all that comes, and close it."""
    with _held.pop(key) as sock:
        sock.sendall(data)
        return read(sock)


def begin(key: str, text: str) -> None:
    """Begin to evaluate an expression in a thread of its own."""

    def run() -> None:
        _ended[key] = value_of(text)

    _begun[key] = threading.Thread(target=run, daemon=True)
    _begun[key].start()


def end(key: str) -> object:
    """Return the value of what was begun."""
    _begun.pop(key).join()
    return _ended.pop(key)


def serve(port: int, data: bytes) -> int:
    """Say something at a port of 127.0.0.1, which is returned."""
    listener = socket.create_server(("127.0.0.1", port))

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(data)

    threading.Thread(target=accept, daemon=True).start()
    number: int = listener.getsockname()[1]
    return number


def addresses(name: str) -> list[str]:
    """Return the addresses of a name, sorted."""
    rows = socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)
    return sorted(str(row[4][0]) for row in rows)


def text_of(path: str) -> str:
    """Return what is in a file."""
    with open(path) as file:
        return file.read()


def shell(*words: str) -> tuple[int, str]:
    """Run a command; return its exit status and what it said on stderr."""
    import subprocess  # noqa: PLC0415 - for few

    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def start(*words: str) -> int:
    """Start a command; return its pid."""
    import subprocess  # noqa: PLC0415 - for few

    return subprocess.Popen(words).pid


def main(name: str) -> None:
    """Do what comes until the end."""
    with socket.socket(socket.AF_UNIX) as door:
        door.connect("door")
        file = door.makefile("rw")
        print(name, file=file, flush=True)
        for line in file:
            print(repr(value_of(line)), file=file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
