"""Calls that the product may not make, and why.

The rules that a review would miss once.

ruff's ban list says most of this while one types; here it holds for the product without
exceptions by comment, and the checker itself is shown to see.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.architecture import uses
from tests.architecture.tree import parsed, product_files, relative


@dataclass(frozen=True, slots=True)
class Ban:
    """One rule.

    Attributes:
        names: the dotted names it bans, with everything beneath each.
        why: the reason, for the one who meets it.
        within: the files it holds in.
        but: the files it does not hold in.
        look: the name in a node of a syntax tree that is compared with `names`.
    """

    names: tuple[str, ...]
    why: str
    within: tuple[str, ...] = ("*",)
    but: tuple[str, ...] = ()
    look: Callable[[ast.AST], Iterator[tuple[int, str]]] = uses.used


LAUNCHPAD = ("supervisor/spawn/launchpad/*.py",)

BANS = (
    Ban(
        ("os.kill", "os.killpg"),
        "pids are reused: signal by pidfd",
        # All in a child's pid namespace at once, from inside it; there, groups of
        # commands that were not waited for yet.
        but=(
            "supervisor/workspace/freeze_guard.py",
            "supervisor/cluster/command_server.py",
        ),
    ),
    Ban(
        ("os.waitpid", "os.wait", "os.wait3", "os.wait4"),
        "waiting by pid steals statuses: wait on a pidfd",
        but=LAUNCHPAD,
    ),
    Ban(
        ("os.fork", "os.forkpty", "pty.fork", "multiprocessing"),
        "forking the host costs its size: the launchpad forks",
        # A program of its own, of one thread, which has to fork into a pid namespace.
        but=(*LAUNCHPAD, "supervisor/workspace/freeze_guard.py"),
    ),
    Ban(("preexec_fn",), "loses vfork, runs Python in a fork", look=uses.keywords),
    Ban(
        ("subprocess.Popen", "subprocess.run", "subprocess.call", "os.system"),
        "children are spawned by the launcher",
        # git(1) and the command itself, by the command line, which has no launchpad.
        # Ray by commands and actors, for neither has one. Commands inside a child.
        but=(
            "supervisor/cluster/command_server.py",
            "supervisor/workspace/git.py",
            "supervisor/cli/doctor_workspaces.py",
            "supervisor/cluster/ray_processes.py",
        ),
    ),
    Ban(
        ("subprocess", "pty", "os.posix_spawn", "os.posix_spawnp"),
        "files and wire know no processes",
        within=("protocol/*", "vfs/*", "supervisor/llmfd/*"),
    ),
    Ban(
        ("trio.run_process", "trio.lowlevel.open_process"),
        "forks in a thread whose end kills the child: use the launcher",
    ),
    Ban(
        ("os.path.realpath", "os.path.commonpath", "os.path.commonprefix", "pathlib"),
        "a string is no proof: resolve from a held directory (spec A4)",
        within=("vfs/*", "supervisor/llmfd/*", "hostlib/linux/resolve.py"),
    ),
    Ban(
        ("resolve", "is_relative_to"),
        "a string is no proof: resolve from a held directory (spec A4)",
        within=("vfs/*", "supervisor/llmfd/*", "hostlib/linux/resolve.py"),
        look=uses.methods,
    ),
    Ban(
        ("trio.to_thread", "trio.from_thread"),
        "one module leaves the Trio thread, and comes back to it",
        but=("hostlib/threads.py",),
    ),
    Ban(
        ("asyncio", "concurrent.futures", "threading"),
        "Trio only, threads through hostlib.threads",
        but=("hostlib/threads.py", "supervisor/cluster/loop_thread.py"),  # Ray's actors
    ),
    Ban(("trio.lowlevel.spawn_system_task",), "tasks live in a nursery we own"),
    Ban(
        ("time.sleep",),
        "it stops every client: wait for something",
        but=("supervisor/cli/observe.py",),  # a command of its own, without a loop
    ),
    Ban(("socket.recv_fds",), "ignores flags: recvmsg with MSG_CMSG_CLOEXEC"),
    Ban(
        ("raise",),
        "comes in a group before Python 3.11.4: raise it behind the except*",
        look=uses.raised_in_groups,
    ),
)


@cache
def seen_in(
    path: Path, look: Callable[[ast.AST], Iterator[tuple[int, str]]]
) -> tuple[tuple[int, str], ...]:
    """Return what one look sees in a file: most bans look at the same."""
    return tuple(look(parsed(path)))


def offences(seen: Iterable[tuple[int, str]], file: str, ban: Ban) -> list[str]:
    """Return "file:line: name: why" for each breach of one rule in one file."""
    held = any(fnmatch(file, pattern) for pattern in ban.within)
    if not held or any(fnmatch(file, pattern) for pattern in ban.but):
        return []
    return [
        f"{file}:{line}: {name}: {ban.why}"
        for line, name in seen
        if any(name == banned or name.startswith(f"{banned}.") for banned in ban.names)
    ]


@pytest.mark.parametrize("ban", BANS, ids=lambda ban: ban.names[0])
def test_the_product_keeps_the_ban(ban: Ban) -> None:
    found = [
        line
        for path in product_files()
        for line in offences(seen_in(path, ban.look), relative(path), ban)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("supervisor/a.py", "import os\nos.kill(1, 9)"),
        ("supervisor/a.py", "import os as o\no.kill(1, 9)"),
        ("supervisor/a.py", "from os import kill as k\nk(1, 9)"),
        ("supervisor/a.py", "def f():\n    import os\n    g = os.killpg"),
        ("supervisor/a.py", "spawn(preexec_fn=print)"),
        ("supervisor/a.py", "import os\nos.fork()"),
        ("vfs/a.py", "import subprocess"),
        ("protocol/a.py", "from subprocess import PIPE"),
        ("vfs/backends/a.py", "import os.path\nos.path.realpath('a')"),
        ("vfs/a.py", "from os.path import realpath"),
        ("vfs/a.py", "root.resolve()"),
        ("vfs/a.py", "import trio\ntrio.to_thread.run_sync(print)"),
        ("supervisor/a.py", "from threading import Thread"),
        ("vfs/a.py", "import threading\nlock = threading.Lock()"),
        ("vfs/a.py", "import trio\ntrio.from_thread.run_sync(print)"),
        ("supervisor/spawn/launchpad/main.py", "import os\nos.kill(1, 9)"),
        ("supervisor/a.py", "try: f()\nexcept* OSError: raise ValueError"),
    ],
)
def test_the_check_sees_an_offence(file: str, source: str) -> None:
    tree = ast.parse(source)
    assert any(offences(ban.look(tree), file, ban) for ban in BANS)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("supervisor/spawn/launchpad/main.py", "import os\nos.fork()"),
        ("supervisor/a.py", "import subprocess\nx = subprocess.DEVNULL"),
        ("supervisor/a.py", "import signal\nsignal.pidfd_send_signal(3, 9)"),
        ("hostlib/threads.py", "import trio\ntrio.to_thread.run_sync(print)"),
        ("vfs/a.py", "import os\nos.open('a', 0, dir_fd=3)"),
        ("supervisor/a.py", "class A:\n    def kill(self): ...\nA().kill()"),
        ("supervisor/a.py", "try: f()\nexcept* OSError: raise"),
    ],
)
def test_the_check_lets_the_allowed_pass(file: str, source: str) -> None:
    tree = ast.parse(source)
    assert not [line for ban in BANS for line in offences(ban.look(tree), file, ban)]
