"""Files of /proc about the host and its processes cannot be opened by a door.

A host opens for its children, so its own /proc is in reach of every name that leads there:
of a top-level child, and of one with a grant on /proc or all of the machine.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hostlib.linux.host_proc import shows_host
from tests.helpers.stage import Stage
from vfs.backends import MODES, HostDirectory

pytestmark = [pytest.mark.slow, pytest.mark.attack]

SHOWN = ("environ", "mem", "maps", "status", "cmdline", "auxv", "oom_score_adj")
OTHERS = ("/proc/version", "/proc/sys/kernel/ostype", "/proc/meminfo")


@contextmanager
def a_thread() -> Iterator[int]:
    """Have a thread of this process; yield its number."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        yield thread.native_id
    finally:
        over.set()
        thread.join()


def hosts_own(stage: Stage, *pids: int) -> list[str]:
    """Return names of what is shown of the host, its launchpad and other processes."""
    own = os.getpid()
    of = ["self", "thread-self", f"self/task/{own}", f"{own}", f"{own}/task/{own}"]
    of += map(str, (stage.launchpad, *pids))
    names = [f"/proc/{one}/{what}" for one in of for what in SHOWN]
    names += ["/proc/self/net/tcp", "/proc/mounts", "/proc/net/unix"]
    return names


def denied(name: str) -> bytes:
    return b"ERROR VFS access denied: '%b'" % os.fsencode(name)


# attack 24: kernels are built without it (CONFIG_PROC_KCORE), so another file has its name.
def test_the_memory_of_the_machine_is_shown_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other, fds, link, stat = "/proc/version", "/proc/self/fd/", os.readlink, os.stat
    name = other

    def readlink(path: str) -> str:
        return name if path.startswith(fds) and link(path) == other else link(path)

    everything = HostDirectory(-1, beneath=False)
    handle = everything.open(
        other.encode(), MODES[b"r"], create=False, exclusive=False, staged=False
    )
    try:
        monkeypatch.setattr(os, "readlink", readlink)
        monkeypatch.setattr(os, "stat", lambda p: stat(other if p == name else p))
        assert not shows_host(handle)
        name = "/proc/kcore"
        assert shows_host(handle)
    finally:
        monkeypatch.undo()
        handle.close()


# attack 24: what the host was started with, and what it holds in memory.
# attack 25: likewise of siblings, whose walls a host stands outside of.
async def test_a_top_level_child_opens_no_process_of_its_host(stage: Stage) -> None:
    child = await stage.puppet(top_level=True)
    sibling = await stage.puppet()
    with a_thread() as tid:
        names = hosts_own(stage, tid, sibling.pid, child.pid)
        link = stage.where / "link"
        link.symlink_to("/proc/self/environ")
        names += [str(link), "/proc/self/root/proc/self/environ", "/proc/kcore"]
        inside = Path(f"/proc/{sibling.pid}/root/proc")
        if (inside / "1").exists() and not (inside / "self").exists():
            names.append(f"{inside}/1/environ")  # a /proc of its own, without the host
        for name in names:
            for mode in ("r", "r+"):
                reply = await child.ask(f"OPEN {name} {mode} true\n".encode())
                refused = reply.startswith(b"ERROR failed to open file")
                assert reply == denied(name) or refused, (name, mode, reply)
    for name in OTHERS:
        fileno = await child.open(name.encode(), b"r", b"true")
        assert await child.read(fileno, 5)
    assert stage.events("security.denied")


# attack 24
@pytest.mark.parametrize("grant", ["/proc", "/"])
async def test_a_grant_on_proc_opens_no_process_of_the_host(
    stage: Stage, grant: str
) -> None:
    child = await stage.puppet(read=(grant,))
    sibling = await stage.puppet()
    with a_thread() as tid:
        for name in hosts_own(stage, tid, sibling.pid, child.pid):
            reply = await child.ask(f"OPEN {name} r false\n".encode())
            assert reply.startswith(b"ERROR "), (name, reply)
    for name in OTHERS:
        assert isinstance(await child.open(name.encode()), int)


# attack 24: an OPEN that is sent again and again is answered in fewer steps.
async def test_a_link_that_is_turned_meanwhile_is_looked_at_again(stage: Stage) -> None:
    child = await stage.puppet(top_level=True)
    link = stage.where / "link"
    link.symlink_to("/proc/version")
    request = b"OPEN %b r true\n" % os.fsencode(link)
    for _ in range(4):
        assert (await child.ask(request)).startswith(b"OK ")
    link.unlink()
    link.symlink_to("/proc/self/environ")
    assert await child.ask(request) == denied(str(link))
    assert await child.ask(request) == denied(str(link))


# attack 6: what the host has open and nobody can name.
async def test_a_file_without_a_name_is_not_opened_by_its_number(
    stage: Stage, tmp_path: Path
) -> None:
    child = await stage.puppet(top_level=True)
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    try:
        os.write(fd, b"what another child has staged")
        for name in (f"/proc/self/fd/{fd}", f"/proc/{os.getpid()}/fd/{fd}"):
            for mode in (b"r", b"r+", b"w"):
                reply = await child.ask(b"OPEN %b %b true\n" % (name.encode(), mode))
                assert reply == denied(name)
        link = tmp_path / "link"
        link.write_bytes(b"x")
        request = b"OPEN %b r true\n" % os.fsencode(link)
        for _ in range(4):
            assert (await child.ask(request)).startswith(b"OK ")
        link.unlink()
        link.symlink_to(f"/proc/self/fd/{fd}")
        assert await child.ask(request) == denied(str(link))
        assert os.fstat(fd).st_size == 29
    finally:
        os.close(fd)
