"""Runs `sandhost`, each time in a fork of a process that has imported it.

The modules of a command are imported once: it is four fifths of what a start costs. Each
run begins where the installed script calls `main`, with descriptors, directory, environment
and words of its own. See `helpers/forkserver.py`.

This process has what every command imports. For each kind of program (`KINDS`) there is a
fork of it that has more; it comes with the first request of its kind.

argv[1]: the number of a socket (SOCK_SEQPACKET); its end ends this program.
A request: a JSON object with `kind`, `words`, `cwd`, `env` and `steps` (code that runs
before, and its arguments; null for none), and four descriptors: stdin, stdout, stderr, and
a pipe that is told the pid in a line and, at the command's end, its status.
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

PROVIDER = "supervisor.llm.provider"
"""Imports the provider's library by `load`."""

KINDS = {
    "run": (),
    "host": (
        PROVIDER,
        "loguru",
        "supervisor.children.child_workspaces",
        "supervisor.cli.serve",
        "supervisor.cli.workspace_options",
        "supervisor.cluster.peers",
        "supervisor.daemon.serve",
        "supervisor.llm.opening",
        "supervisor.llmfd.gateway",
        "supervisor.llmfd.opening",
        "supervisor.membership.base_keeper",
        "supervisor.membership.member",
        "supervisor.network.service",
        "supervisor.observe.listener",
        "supervisor.toolexec.handles",
        "supervisor.toolexec.service",
        "supervisor.toolexec.sidecars",
        "supervisor.workspace.outcome",
        "supervisor.workspace.run",
    ),
    "command": (
        "supervisor.cli.daemon",
        "supervisor.cli.fleet",
        "supervisor.cli.child_commands",
        "supervisor.cli.network",
        "supervisor.cli.tables",
        "supervisor.cli.trace",
        "supervisor.cli.workspace_options",
        "supervisor.cli.workspace_target",
        "supervisor.client",
        "supervisor.cluster.commands",
        "supervisor.observe.fleet_tables",
        "supervisor.workspace.terminal_patch",
        "supervisor.workspace.verbs",
    ),
    "provider": ("demo.provider.__main__",),
}
"""The modules of each kind of program, beside those of `RUN`.

`host` is `serve`, and a `run` that is configured: what either may import. `command` starts
no children. `provider` is the stand-in for a model's.
"""

LOW = 10
"""Numbers of descriptors that a command finds free: 3 is that of a child's door."""


def main() -> None:
    """Go on without the process that started this, and serve until the socket ends."""
    if os.fork():
        os._exit(0)
    sys.path[0] = os.path.dirname(SANDHOST)  # as the script has it
    _import_all(RUN)
    _serve(socket.socket(fileno=int(sys.argv[1])), "run")


def _serve(sock: socket.socket, own: str) -> None:
    """Fork what is asked for until the socket ends; other kinds by their own servers."""
    os.set_inheritable(sock.fileno(), False)
    servers: dict[str, socket.socket] = {}
    while True:
        data, fds, _, _ = socket.recv_fds(sock, 1 << 20, 4)
        if not data:
            os._exit(0)
        request = json.loads(data)
        kind = request["kind"]
        if kind != own:
            if kind not in servers:
                known = [sock.fileno(), *(one.fileno() for one in servers.values())]
                servers[kind] = _start_server(kind, [*known, *fds])
            socket.send_fds(servers[kind], [data], fds)
        elif os.fork() == 0:
            for one in (sock, *servers.values()):
                one.close()
            _watch(request, fds)
        for fd in fds:
            os.close(fd)
        _reap()


def _reap() -> None:
    """Take the statuses of forks that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _start_server(kind: str, inherited: list[int]) -> socket.socket:
    """Fork the server of a kind; return the socket by which it is asked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        for fd in (ours.detach(), *inherited):
            os.close(fd)
        _import_all(KINDS[kind])
        _serve(theirs, kind)
    theirs.close()
    return ours


def _import_all(names: tuple[str, ...]) -> None:
    """Import modules; a descriptor that one of them holds is not a low one."""
    low = [os.open(os.devnull, os.O_RDONLY) for _ in range(LOW)]
    for name in names:
        module = import_module(name)
        if name == PROVIDER:
            module.load()
    for fd in low:
        os.close(fd)
    gc.freeze()
    # Of others, a fork would have what they hold, and not what they do.
    assert len(os.listdir("/proc/self/task")) == 1, "a module has started a thread"


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
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise


main()
