r"""A host that is replaced while a test watches.

The test's side of `children/replaced.py`.

Starting one, asking for its replacement, and waiting for what it says.
"""

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from supervisor.control.client import call
from tests.helpers.command import read_until
from tests.helpers.daemon import Daemon
from tests.helpers.stage import CHILDREN, PYTHON

SEQUENCE = (*PYTHON, str(CHILDREN / "sequence.py"))


class Hand:
    """Leads a child by the hand, in the words of `children/puppet.py`.

    Attributes:
        name: the child's.
    """

    def __init__(self, where: Path, name: str) -> None:
        self.name = name
        paths = [where / f"told-{name}", where / f"said-{name}"]
        for path in paths:
            os.mkfifo(path)
        self._tell, self._hear = (os.open(path, os.O_RDWR) for path in paths)
        self._heard = b""
        self._stdin = str(paths[0])

    def spec(self, **changes: Any) -> dict[str, Any]:
        """Describe the child."""
        command = [*PYTHON, str(CHILDREN / "puppet.py")]
        return {"name": self.name, "command": command, "stdin": self._stdin, **changes}

    def tell(self, expression: str) -> None:
        """Have it evaluate an expression; `hear` has the value."""
        data = expression.encode() + b"\n"
        assert os.write(self._tell, data) == len(data), "more than a pipe holds"

    def hear(self) -> Any:
        """Wait for the value of the oldest expression that it was told."""
        while b"\n" not in self._heard:
            self._heard += read_until(self._hear, b"\n")
        text, _, self._heard = self._heard.partition(b"\n")
        return ast.literal_eval(text.decode())

    def do(self, expression: str) -> Any:
        """Have it evaluate an expression, and return the value."""
        self.tell(expression)
        return self.hear()

    def ask(self, data: bytes, fd: int | None = None) -> Any:
        """Have it send a request; return the reply line without LF."""
        return self.do(f"ask({data!r}, {fd})")

    def close(self) -> None:
        """Give the test's descriptors back."""
        os.close(self._tell)
        os.close(self._hear)


class Replaced:
    """One host, one process, many programs.

    Attributes:
        process: the host's.
        where: its directories are in it.
        generation: programs that it was before.
        pids: of its children, as the program that runs now sees them.
    """

    def __init__(self, process: subprocess.Popen[bytes], where: Path) -> None:
        self.process = process
        self.where = where
        self.generation = -1
        self.pids: list[int] = []
        self._heard = b""

    def hear(self, word: str) -> list[str]:
        """Wait for a line that begins with a word; return what follows it."""
        assert self.process.stdout is not None
        while True:
            while b"\n" not in self._heard:
                self._heard += read_until(self.process.stdout.fileno(), b"\n")
            line, _, self._heard = self._heard.partition(b"\n")
            words = line.decode().split()
            if words[0] == word:
                return words[1:]
            assert words[0] not in {"refused", "over"}, line

    def hear_up(self) -> None:
        """Wait until the next program serves."""
        number, *pids = map(int, self.hear("up"))
        self.generation = number
        self.pids = pids

    def ask_replace(self) -> None:
        """Ask for the next program."""
        self.process.send_signal(signal.SIGUSR2)

    def replace(self) -> None:
        """Have it replaced, and wait until the next program serves."""
        before = self.generation
        self.ask_replace()
        self.hear_up()
        assert self.generation == before + 1

    def ask(self, question: str) -> Any:
        """Ask its control socket."""
        return call(str(self.where / "control"), question)

    def next_is(self, script: str) -> None:
        """Let the next program be a shell script; `$HOST` starts the real one."""
        real = f"{sys.executable} -I {CHILDREN / 'replaced.py'}"
        path = self.where / "program"
        path.write_text(f"#!/bin/sh\nHOST='{real}'\n{script}")
        path.chmod(0o755)
        lines = [str(path), str(self.where / "order")]
        (self.where / "next").write_text("\n".join(lines))

    def hear_refusal(self) -> str:
        """Ask for the next program, which must not come; return the reason."""
        self.ask_replace()
        return " ".join(self.hear("refused"))

    def assert_no_leaks(self) -> None:
        """Check that its tables explain all that it holds (`doctor --leaks`)."""
        found = self.ask("leaks")
        assert found["clean"], {k: v for k, v in found.items() if v}

    def events(self, event: str) -> list[dict[str, Any]]:
        """Return the journal's events of one name."""
        lines = (self.where / "journal").read_bytes().splitlines()
        return [row for row in map(json.loads, lines) if row["event"] == event]

    def said(self, name: str = "all") -> str:
        """Return what children have said on stdout."""
        return (self.where / f"said-{name}").read_text()

    def descriptors(self) -> dict[str, str]:
        """Return what the host has open."""
        base = f"/proc/{self.process.pid}/fd"
        found = {}
        for name in os.listdir(base):
            with suppress(FileNotFoundError):  # closed since it was listed
                found[name] = os.readlink(f"{base}/{name}")
        return found

    def wait(self) -> int:
        """Wait for its end; return its exit status."""
        return self.process.wait(60)


@contextmanager
def hands(where: Path, *names: str) -> Iterator[list[Hand]]:
    """Make hands for children of these names."""
    made = [Hand(where, name) for name in names]
    try:
        yield made
    finally:
        for hand in made:
            hand.close()


@contextmanager
def replaced(
    where: Path, *children: dict[str, Any], **order: Any
) -> Iterator[Replaced]:
    """Start a host for these children; at the end it is killed if it still runs."""
    (where / "root").mkdir(exist_ok=True)
    path = where / "order"
    path.write_text(json.dumps({"where": str(where), "children": children, **order}))
    command = [sys.executable, "-I", str(CHILDREN / "replaced.py"), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            host = Replaced(process, where)
            host.hear_up()
            yield host
        finally:
            process.kill()


def replace_daemon(running: Daemon) -> None:
    """Have a daemon replaced as an operator does it."""
    before = running.client.stats()["generation"]
    assert running.client.replace() == before + 1
    running.hear("READY=1")


def assert_clean(running: Daemon) -> None:
    """Check that a daemon explains all that it holds."""
    found = call(running.client.path, "leaks")
    assert found["clean"], {k: v for k, v in found.items() if v}
