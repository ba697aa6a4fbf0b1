"""Runs the command `sandhost`, each time in a fork of this process.

The modules of the command are imported once, here: it is four fifths of what a start costs.
Each run begins where the installed script calls `main`, with descriptors, directory,
environment and words of its own. See `helpers/forkserver.py`.

argv[1]: the number of a socket (SOCK_SEQPACKET); its end ends this program.
argv[2]: what is imported: `run`, or `serve`.
A request: a JSON object with `words`, `cwd`, `env` and `steps` (code that runs before, and
its arguments; null for none), and four descriptors: stdin, stdout, stderr, and a pipe that
is told the pid in a line and, at the command's end, its status.
"""

import gc
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

SANDHOST = os.path.join(os.path.dirname(sys.executable), "sandhost")

RUN = (
    "supervisor.__main__",
    "supervisor.cli.app",
    "supervisor.cli.check_config",
    "supervisor.cli.run",
    "supervisor.config.document",
    "supervisor.host",
    "supervisor.spawn.launchpad.start",
    "supervisor.run",
    "supervisor.workspace.directory",
)
"""The modules that `run` and `check-config` import, and no others."""

SERVE = (
    *RUN,
    "supervisor.cli.serve",
    "supervisor.control.server",
    "supervisor.daemon.serve",
    "supervisor.kept_children.roster",
)
"""The modules that `serve` imports at its start."""

LOW = 10
"""Numbers of descriptors that a command finds free: 3 is that of a child's door."""


def main() -> None:
    """Go on without the process that started this, and serve until the socket ends."""
    if os.fork():
        os._exit(0)
    sys.path[0] = os.path.dirname(SANDHOST)  # as the script has it
    _import_command()
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        os.set_inheritable(sock.fileno(), False)
        while True:
            data, fds, _, _ = socket.recv_fds(sock, 1 << 20, 4)
            if not data:
                return
            if os.fork() == 0:
                sock.close()
                _watch(json.loads(data), fds)
            for fd in fds:
                os.close(fd)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _import_command() -> None:
    low = [os.open(os.devnull, os.O_RDONLY) for _ in range(LOW)]
    for name in (
        SERVE if sys.argv[2] == "serve" else RUN
    ):  # one holds a descriptor from its import on
        import_module(name)
    for fd in low:
        os.close(fd)
    gc.freeze()


def _watch(request: dict[str, Any], fds: list[int]) -> None:
    """Run one command, tell how it ended, and exit."""
    told = fds.pop()
    pid = os.fork()
    if pid == 0:
        os.close(told)
        _run(request, fds)
    for fd in fds:
        os.close(fd)
    for fd in (0, 1, 2):
        os.close(fd)
    with suppress(BrokenPipeError):
        os.write(told, b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(told, b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _run(request: dict[str, Any], fds: list[int]) -> None:
    """Be the command."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for name, mode, lines in (
        ("stdin", "r", -1),
        ("stdout", "w", -1),
        ("stderr", "w", 1),
    ):
        old = getattr(sys, name)
        new = open(old.fileno(), mode, lines, old.encoding, old.errors)  # noqa: SIM115
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    sys.argv = [SANDHOST, *request["words"]]
    sys.orig_argv = [sys.executable, *sys.argv]  # the command line of the next program
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if request["steps"] is not None:
            _take(*request["steps"])
        from supervisor.__main__ import main as command  # noqa: PLC0415

        command()
    finally:
        os._exit(70)


def _take(code: str, args: list[str]) -> None:
    """Take the steps before a command (`helpers/steps.py`)."""
    try:
        exec(code, {"args": args, "os": os, "sys": sys})  # noqa: S102 - a test's own
    except SystemExit as why:
        sys.stderr.write(f"{why}\n")
        os._exit(1)


main()
