"""A world in which a host can be seen to keep each rule of the network.

    ruleworld.py DIRECTORY COMMAND...

That of `nameworld`, with `ok.test` at addresses of both families: files of DIRECTORY at
ports 80 and, by TLS, 443, a digest of what was sent at `DIGEST`, half an answer and a
reset at `CUT`. A proxy that says nothing listens at `SILENT`. `many.test` is in
/etc/hosts, 10,000 times.
"""

import hashlib
import os
import socket
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.helpers import networkworld
from tests.system.e2e import nameworld

PUBLIC_V6 = "2001:db8:1::5"
DIGEST, CUT, SILENT = 7, 9, 8080
SETUP = f"{nameworld.SETUP}address add {PUBLIC_V6}/128 dev lo nodad\n"
MANY = "".join(
    f"203.0.{200 + number // 250}.{number % 250} many.test.\n"
    for number in range(10_000)
)
FILES = {
    **nameworld.FILES,
    "resolv.conf": f"nameserver {nameworld.NAME_SERVER}\noptions timeout:30 attempts:1\n",
    "hosts": f"127.0.0.1 localhost\n{MANY}",
}


def main(argv: list[str]) -> int:
    """Run a command, and return its exit status."""
    directory, *command = argv
    place = Path(directory)
    networkworld.furnish(place, SETUP, FILES)
    nameworld.serve_names(place / "questions")
    files = partial(networkworld.Files, directory=directory)
    networkworld.serve_files(files, place / "tls.pem")
    for address in (nameworld.PUBLIC, nameworld.PRIVATE, PUBLIC_V6):
        networkworld.serve(address, DIGEST, say_digest)
    networkworld.serve(nameworld.PUBLIC, CUT, say_half)
    networkworld.serve(nameworld.PUBLIC, SILENT, say_nothing)
    return subprocess.run(command, check=False).returncode


def say_digest(sock: socket.socket) -> None:
    """Say a digest of all that comes, at its end."""
    digest = hashlib.sha256()
    while data := sock.recv(65_536):
        digest.update(data)
    sock.sendall(digest.hexdigest().encode())


def say_half(sock: socket.socket) -> None:
    """Say something, and end by a reset."""
    sock.sendall(b"half")
    sock.recv(1)  # it has arrived
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def say_nothing(sock: socket.socket) -> None:
    """Read until the end."""
    while sock.recv(65_536):
        pass


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # the servers' threads have nothing to end
