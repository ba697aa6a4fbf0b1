"""A world with an index, a registry, git, a database and a corporate proxy.

    recipeworld.py DIRECTORY COMMAND...
    recipeworld.py --behind-proxy DIRECTORY COMMAND...

Started as `networkworld` is, in a directory that `tests.helpers.recipestock` has filled.
With ``--behind-proxy`` the host knows no name but that of the proxy, which knows the
others. PostgreSQL and sshd are the real ones where they are installed.
"""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.helpers import networkworld as world

NAMES = (
    "index.example.com",
    "files.example.com",
    "registry.example.com",
    "git.example.com",
)
"""Served at `networkworld.ADDRESS`."""

PROXY, PROXY_ADDRESS, PROXY_PORT = "proxy.example.com", "203.0.113.9", 3128
DATABASE, DATABASE_ADDRESS = "db.example.internal", "10.20.0.5"
MACHINE_ADDRESS = "192.168.7.20"
"""An address that no name stands for, with the same database."""

SETUP = world.SETUP + "".join(
    f"address add {address} dev lo\n" for address in ("10.20.0.1/24", "192.168.7.1/24")
)
DATABASE_USER = 65534
"""PostgreSQL refuses to be root's."""

START_S = 30.0
PRIVILEGE_SEPARATION = Path("/run/sshd")
"""Where sshd wants an empty directory of root's (sshd, FILES)."""


class Served(world.Files):
    """Serves files, and repositories by git's own program."""

    def do_GET(self) -> None:  # noqa: N802
        """Serve a file, or ask git."""
        if self.path.startswith("/git/"):
            self._ask_git(b"")
        else:
            super().do_GET()

    def do_POST(self) -> None:  # noqa: N802
        """Ask git (git-http-backend)."""
        self._ask_git(self.rfile.read(int(self.headers["Content-Length"])))

    def _ask_git(self, body: bytes) -> None:
        url = urlsplit(self.path)
        env = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.directory),
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": url.path.removeprefix("/git"),
            "QUERY_STRING": url.query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "HTTP_GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }
        done = subprocess.run(
            ["git", "http-backend"], input=body, env=env, check=True,
            stdout=subprocess.PIPE, timeout=world.TIMEOUT_S,
        )  # fmt: skip
        head, _, answer = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(fields.pop("Status", "200").split()[0]))
        for name, value in fields.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


def main(argv: list[str]) -> int:
    """Run a command, and return its exit status."""
    is_behind = argv[0] == "--behind-proxy"
    directory, command = Path(argv[is_behind]), argv[is_behind + 1 :]
    hosts = [(PROXY_ADDRESS, PROXY)]
    if not is_behind:
        hosts += [(world.ADDRESS, name) for name in NAMES]
        hosts.append((DATABASE_ADDRESS, DATABASE))
    lines = [f"{address} {name}.\n" for address, name in hosts]
    files = {"hosts": "".join(["127.0.0.1 localhost\n", *lines])}
    world.furnish(directory, SETUP, files)
    world.serve_files(partial(Served, directory=str(directory)), directory / "tls.pem")
    world.serve(PROXY_ADDRESS, PROXY_PORT, connect)
    with ExitStack() as stack:
        stack.enter_context(database(directory))
        stack.enter_context(shell_server(directory))
        done = subprocess.run(command, check=False, timeout=world.TIMEOUT_S)
    return done.returncode


@contextmanager
def database(directory: Path) -> Iterator[None]:
    """Serve a database at both of its addresses."""
    program, place = directory / "postgres", directory / "database"
    if not program.exists():
        for address in (DATABASE_ADDRESS, MACHINE_ADDRESS):
            world.serve(address, 5432, world.speak_postgres)
        yield
        return
    words = [str(program.readlink()), "-D", str(place), "-c", "fsync=off"]
    words += ["-c", f"listen_addresses={DATABASE_ADDRESS},{MACHINE_ADDRESS}"]
    words += ["-c", "unix_socket_directories=", "-c", "log_min_messages=fatal"]
    with started(words, (MACHINE_ADDRESS, 5432), DATABASE_USER):
        yield


@contextmanager
def shell_server(directory: Path) -> Iterator[None]:
    """Serve ssh, if there is an sshd."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        yield
        return
    PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    words = [program, "-D", "-e", "-f", str(directory / "sshd" / "config")]
    with started(words, (world.ADDRESS, 22), 0):
        yield


@contextmanager
def started(words: list[str], address: tuple[str, int], user: int) -> Iterator[None]:
    """Have a server run that listens at an address."""
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=sys.stderr, user=user, group=user,
        extra_groups=[], cwd="/",
    )  # fmt: skip
    try:
        deadline = time.monotonic() + START_S
        while process.poll() is None:
            with suppress(OSError), socket.create_connection(address, START_S):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"cannot start {words[0]}: it does not listen")
            time.sleep(0.02)
        else:
            raise ChildProcessError(f"cannot start {words[0]}: it has ended")
        yield
    finally:
        process.terminate()
        process.wait()


def connect(client: socket.socket) -> None:
    """Be a proxy that knows CONNECT, and tell on stderr what it was asked for."""
    request = b""
    while b"\r\n\r\n" not in request:
        request += client.recv(4096)
    method, target = request.decode().split()[:2]
    sys.stderr.write(f"the proxy was asked: {method} {target}\n")
    name, _, port = target.rpartition(":")
    if method != "CONNECT" or name not in NAMES:
        client.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        return
    with socket.create_connection((world.ADDRESS, int(port))) as server:
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        back = threading.Thread(target=copy, args=(server, client))
        back.start()
        copy(client, server)
        back.join()


def copy(source: socket.socket, sink: socket.socket) -> None:
    """Move all of one direction, and its end."""
    with suppress(OSError):
        while part := source.recv(65_536):
            sink.sendall(part)
        sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # the servers' threads have nothing to end
