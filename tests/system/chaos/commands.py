"""Commands of `sandhost`, each a fork of a process that has imported them all.

As a program it reads orders on stdin, in lines of JSON: `words`, `out` and `err` (files
that are appended to), `kill_after_s` (None: it ends by itself). It says on stdout `ended STATUS`
and then `gone`, when every process that the command has left behind has ended as well:
orphans become its children, so it can wait for them.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import supervisor.cli.run
import supervisor.cli.workspace
import supervisor.run
import supervisor.workspace.sweep
import supervisor.workspace.verbs  # noqa: F401 - each command would import them anew
from hostlib.linux.syscalls import PR_SET_CHILD_SUBREAPER, prctl
from supervisor.__main__ import main as run_command
from tests.helpers import canary
from tests.helpers.command import ENVIRONMENT

PATIENCE_S = 60.0
"""However busy the machine is."""


class Commands:
    """The process that becomes one command after the other."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout.fileno()
        self._heard = b""

    def start(self, *words: str, out: Path, kill_after_s: float | None = None) -> None:
        """Start a command; what it says on stdout and stderr is added to two files.

        Args:
            words: of it.
            out: the file for stdout; that for stderr has ``.err`` at its end.
            kill_after_s: when it is killed; None if it is not.
        """
        order = {"words": words, "out": str(out), "err": f"{out}.err"}
        order["kill_after_s"] = kill_after_s  # type: ignore[assignment]
        self._stdin.write(json.dumps(order).encode() + b"\n")
        self._stdin.flush()

    def end(self) -> int:
        """Wait until a command and all that it started has ended; return its status."""
        (status,) = self._hear("ended")
        self._hear("gone")
        return int(status)

    def run(self, *words: str, out: Path, kill_after_s: float | None = None) -> int:
        """Run a command to its end, or until it is killed; return its status."""
        self.start(*words, out=out, kill_after_s=kill_after_s)
        return self.end()

    def _hear(self, word: str) -> list[str]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self._heard:
            left_s = max(0.0, deadline - time.monotonic())
            assert select.select([self._stdout], [], [], left_s)[0], self._left(word)
            self._heard += os.read(self._stdout, 4096)
        line, _, self._heard = self._heard.partition(b"\n")
        first, *words = line.decode().split()
        assert first == word, line
        return words

    def _left(self, word: str) -> str:
        pid = self._process.pid
        command = ["ps", "-o", "pid,stat,wchan:20,args", "--ppid", str(pid)]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        return f"not {word}; alive:\n{shown.stdout}"


@contextmanager
def commands(tmp: Path) -> Iterator[Commands]:
    """Start the process that becomes commands; end it when the block ends.

    Args:
        tmp: where commands make temporary files.
    """
    environment = {**ENVIRONMENT, "TMPDIR": str(tmp)}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.system.chaos.commands"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        cwd=Path(__file__).parents[3],
    ) as process:  # fmt: skip
        try:
            yield Commands(process)
        finally:
            process.kill()


def _become(order: dict[str, Any]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, path in ((1, order["out"]), (2, order["err"])):
        os.dup2(os.open(path, flags, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["sandhost", *order["words"]]
    run_command()


def _kill_late(pid: int, kill_after_s: float) -> None:
    pidfd = os.pidfd_open(pid)
    if not select.select([pidfd], [], [], kill_after_s)[0]:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)


def main() -> None:
    """Fork a command for each order."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for line in sys.stdin:
        order = json.loads(line)
        canary.ACCOUNT.hosts += order["words"][0] == "run"
        pid = os.fork()
        if pid == 0:
            _become(order)
        if order["kill_after_s"] is not None:
            _kill_late(pid, order["kill_after_s"])
        _, status = os.waitpid(pid, 0)
        os.write(1, b"ended %d\n" % os.waitstatus_to_exitcode(status))
        while True:
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                break
        os.write(1, b"gone\n")


if __name__ == "__main__":
    main()
