"""A PostgreSQL for tests: a server of its own, on a port of the loopback.

    with server() as base:
        PostgresStore(base.address)

It is never run by root: a scratch user has it then. Its password stands in a file, as an
operator's does. Debian's package `postgresql` has the programs.
"""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

USER = "fleet"
SCRATCH = "nobody"
"""The user that has the server where the tests are root's: one that every system has."""

PATIENCE_S = 60.0

SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
dynamic_shared_memory_type = mmap
shared_buffers = 1MB
max_connections = 20
"""


def program(name: str) -> str | None:
    """Return a program of the server; Debian keeps them apart from the others."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else shutil.which(name)


@dataclass
class Server:
    """One server.

    Attributes:
        where: its files.
        port: on the loopback.
        password_file: as libpq reads it.
        process: of its first process; None while it does not run.
    """

    where: Path
    port: int
    password: str
    password_file: Path
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        """The address of its database."""
        return self.address_of("postgres")

    def address_of(self, base: str, user: str = USER) -> str:
        """Return the address of a database."""
        place = f"{user}@127.0.0.1:{self.port}/{base}"
        return f"postgresql://{place}?passfile={self.password_file}"

    def start(self) -> None:
        """Start it, also after it was killed; return when it takes connections."""
        (self.where / "data" / "postmaster.pid").unlink(missing_ok=True)
        with (self.where / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(program("postgres")), "-D", str(self.where / "data")],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.where,
                **_scratch(),
            )  # fmt: skip
        self._await_ready()

    def _await_ready(self) -> None:
        assert self.process is not None
        pid_file = self.where / "data" / "postmaster.pid"
        while self.process.poll() is None:
            with suppress(OSError):
                if pid_file.read_text().split()[-1:] == ["ready"]:
                    return
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.02)
        raise AssertionError((self.where / "log").read_text())

    def kill(self) -> None:
        """Kill all its processes at once, as the end of its machine does."""
        self._signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(PATIENCE_S)

    def pids(self) -> list[int]:
        """Return its processes, the first one first."""
        assert self.process is not None
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [self.process.pid, *map(int, path.read_text().split())]

    def stop(self) -> None:
        """Stop all its processes, as a server that does not answer: see `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):  # one of a session that has ended
                os.kill(pid, number)

    def end(self) -> None:
        """End it at once: nothing of it is needed any more."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(PATIENCE_S)

    def run(self, query: str, base: str = "postgres") -> list[tuple[Any, ...]]:
        """Return the rows of a statement of the server's owner."""
        import psycopg  # noqa: PLC0415 - an extra

        with psycopg.connect(self.address_of(base), autocommit=True) as connection:
            cursor = connection.execute(query)
            return cursor.fetchall() if cursor.description else []

    def make_base(self) -> str:
        """Make an empty database; return its name."""
        name = f"b{secrets.token_hex(4)}"
        self.run(f"CREATE DATABASE {name}")
        return name


@contextmanager
def server() -> Iterator[Server]:
    """Yield a server that runs; at the end it is gone.

    Skips the test where there is none.
    """
    pytest.importorskip("psycopg")
    if program("initdb") is None or program("postgres") is None:
        pytest.skip("no PostgreSQL is installed: Debian's package is `postgresql`")
    where = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    try:
        one = _initialised(where)
        try:
            one.start()
            yield one
        finally:
            one.end()
    finally:
        shutil.rmtree(where)


def _initialised(where: Path) -> Server:
    password = secrets.token_hex(8)
    (where / "password").write_text(password)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    password_file = where / "pgpass"
    password_file.write_text(f"127.0.0.1:{port}:*:{USER}:{password}\n")
    password_file.chmod(0o600)
    if "user" in (scratch := _scratch()):
        os.chown(where, scratch["user"], scratch["group"])
        os.chmod(where / "password", 0o644)
    subprocess.run(
        [
            str(program("initdb")), "--auth=scram-sha-256", f"--username={USER}",
            f"--pwfile={where / 'password'}", "--encoding=UTF8", "--locale=C",
            "--no-sync", "-D", str(where / "data"),
        ],
        check=True, capture_output=True, cwd=where, **scratch,
    )  # fmt: skip
    os.unlink(where / "password")
    with (where / "data" / "postgresql.conf").open("a") as settings:
        settings.write(f"{SETTINGS}port = {port}\n")
    return Server(where, port, password, password_file)


def _scratch() -> dict[str, Any]:
    """Return who runs the server: it refuses to be root's."""
    if os.geteuid():
        return {}
    entry = pwd.getpwnam(SCRATCH)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
