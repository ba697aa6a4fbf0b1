"""A working directory that is no workspace, and a child's own system calls.

The keeper by the layers of a child:

- ``landlock``: names and contents. Modes, times and attributes are its user's to change.
- ``mountns``: all of it, for it is a mount to read. But a child of root's that has neither
  ``uid``, ``pidns`` nor ``landlock`` sees, by ``/proc/PID/root``, what another process of
  root's without capabilities sees: a child without ``mountns``, say.
- neither of them: nothing; a start warns of that.

No other layer has a part in it, nor has the child's end.
"""

import hashlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from supervisor.children.child import Child
from supervisor.parts import Settings
from supervisor.sandbox.plan import make_profile
from supervisor.sandbox.scratch import Scratch
from tests.helpers.command import sandhost
from tests.helpers.rounds import LONG
from tests.helpers.stage import open_stage
from tests.system.attacks.test_walls import PRELUDE, Attacker

pytestmark = [pytest.mark.slow, pytest.mark.attack]

MOUNTS = (
    (),
    ("mountns",),
    ("mountns", "pidns"),
    ("mountns", "uid"),
    ("mountns", "pidns", "uid"),
)
OTHERS = (("landlock", "seccomp"), (), ("landlock",), ("seccomp",))
TRIED = [
    pytest.param(mounts, others, id="-".join((*mounts, *others)) or "no-walls")
    for number, mounts in enumerate(MOUNTS)
    for turn, others in enumerate(OTHERS)
    if LONG or turn // 2 == number % 2
]
"""Pairwise: with each of `MOUNTS` landlock and seccomp, each there and not."""

BESIDE = ("userns", "netns", "rlimits", "cgroup")
"""Layers that are there, and keep nothing of this."""

HAMMERS = 3
"""Processes that try, each in a session of its own."""

HAMMER = """
import mmap, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
cwd, away = os.getcwd(), os.environ['TMPDIR']
is_x86 = os.uname().machine == 'x86_64'
def number(x86, other): return x86 if is_x86 else other
def path(name): return ctypes.c_char_p(os.fsencode(name))
AT = ctypes.c_long(-100)
def done(result):
    if result != 'done':
        raise OSError(0, result)
def mapped(name):
    fd = os.open(name, os.O_RDWR)
    mmap.mmap(fd, 4)[:4] = b'bad!'
def again(name):
    fd = os.open(name, os.O_RDONLY)
    for flags in (os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_TRUNC):
        os.write(os.open(f'/proc/self/fd/{fd}', flags), b'bad')
def by_handle(name):
    handle = (ctypes.c_uint32 * 34)(128)
    mount = ctypes.c_int()
    done(call(number(303, 264), AT, path(name), handle, ctypes.byref(mount), 0))
    fd = libc.syscall(number(304, 265), os.open(cwd, os.O_RDONLY), handle, os.O_RDWR)
    os.write(fd, b'bad')
def bound(name):
    with socket.socket(socket.AF_UNIX) as one:
        os.chdir(name)
        one.bind('socket')
def written(name, flags):
    os.write(os.open(name, os.O_WRONLY | flags), b'bad')
def flagged(name):
    import fcntl
    fcntl.ioctl(os.open(name, os.O_RDONLY), 0x40086602, (0x80).to_bytes(8, 'little'))
def contents(top):
    me = f'{os.getpid()}'
    own = f'{away}/own-{me}'
    yield lambda: written(f'{top}/note', 0)
    yield lambda: written(f'{top}/note', os.O_APPEND)
    yield lambda: written(f'{top}/note', os.O_TRUNC)
    yield lambda: os.open(f'{top}/note', os.O_RDONLY | os.O_TRUNC)
    yield lambda: written(f'{top}/new-{me}', os.O_CREAT | os.O_EXCL)
    yield lambda: os.truncate(f'{top}/note', 0)
    yield lambda: mapped(f'{top}/note')
    yield lambda: again(f'{top}/note')
    yield lambda: by_handle(f'{top}/note')
    yield lambda: os.unlink(f'{top}/gone')
    yield lambda: os.rename(f'{top}/note', f'{own}-out')
    yield lambda: os.rename(f'{top}/note', f'{top}/other')
    yield lambda: os.close(os.open(own, os.O_CREAT | os.O_WRONLY))
    yield lambda: os.rename(own, f'{top}/new-{me}')
    yield lambda: os.link(own, f'{top}/link-{me}')
    yield lambda: os.link(f'{top}/note', f'{own}-link')
    yield lambda: done(call(number(316, 276), AT, path(own), AT, path(f'{top}/note'), 2))
    yield lambda: os.symlink('note', f'{top}/symlink-{me}')
    yield lambda: os.mkdir(f'{top}/dir-{me}')
    yield lambda: os.rmdir(f'{top}/empty')
    yield lambda: os.mkfifo(f'{top}/fifo-{me}')
    yield lambda: os.mknod(f'{top}/node-{me}', 0o100600)
    yield lambda: bound(top)
    yield lambda: os.open(top, os.O_TMPFILE | os.O_RDWR)
def others(top):
    for name in (top, f'{top}/note'):
        yield lambda: os.chmod(name, 0o777)
        yield lambda: os.chown(name, os.getuid(), os.getgid())
        yield lambda: os.utime(name, (7, 7))
        yield lambda: os.utime(os.open(name, os.O_RDONLY), (7, 7))
        yield lambda: os.fchmod(os.open(name, os.O_RDONLY), 0o777)
        yield lambda: os.setxattr(name, 'user.bad', b'bad')
        yield lambda: flagged(name)
def processes():
    return [name for name in os.listdir('/proc') if name.isdigit()]
this = os.stat(cwd)
def is_this(name):  # and not that of another test, which it may well reach
    try:
        return os.path.samestat(os.stat(name), this)
    except OSError:
        return False
def tops():
    yield from ('.', cwd, '/proc/self/cwd', '/proc/self/root' + cwd, '..' + '/..' * 20 + cwd)
    for pid in processes():
        yield f'/proc/{pid}/cwd' if is_this(f'/proc/{pid}/cwd') else '/none'
        yield f'/proc/{pid}/root' + cwd
def remounted():
    # What no filter refuses: a user namespace, with all rights over mounts of its own.
    for flags in (0x10020000, 0x20000, 0x10000000):
        yield lambda: done(call(number(272, 97), flags))
    for name in (cwd, '/'):
        for flags in (32, 32 | 4096, 1 << 18):  # MS_REMOUNT, MS_REMOUNT | MS_BIND, private
            yield lambda: done(call(number(165, 40), 0, path(name), 0, flags, 0))
        clear = (ctypes.c_uint64 * 4)(0, 1, 0, 0)  # MOUNT_ATTR_RDONLY
        yield lambda: done(call(442, AT, path(name), 0x8000, clear, 32))
        yield lambda: done(call(number(166, 39), path(name), 2))
        yield lambda: done(call(number(165, 40), path(name), path(away), 0, 4096, 0))
        yield lambda: done(call(428, AT, path(name), 1))
    def moved():
        fd = libc.syscall(428, AT, path(cwd), 1)
        call(442, fd, path(''), 0x1000, clear, 32)
        done(call(429, fd, path(''), AT, path(away), 4))
    yield moved
    yield lambda: os.chroot(away)
    yield lambda: os.chdir(cwd)
def round_of(where):
    for top in where:
        for work in (*contents(top), *others(top)):
            try:
                work()
                os.chdir(cwd)
            except (OSError, ValueError):
                pass
    for fd in range(4, 60):
        try:
            os.close(fd)
        except OSError:
            pass
def again_and_again(line):
    while True:
        round_of(tops())
        seen = processes()
        pid = os.fork()
        if pid == 0:
            for work in remounted():
                try:
                    work()
                except OSError:
                    pass
            round_of(('.', cwd, *(f'/proc/{pid}/root' + cwd for pid in seen)))
            os._exit(0)
        os.waitpid(pid, 0)
        os.write(line, b'.')
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        os.setsid()
        again_and_again(1)
again_and_again(1)
"""
"""Each process writes a full stop after each round of tries; none ends by itself."""


def seen_of(top: Path) -> dict[str, tuple[object, ...]]:
    """Return names and contents beneath a directory, and what holds them."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (top, *sorted(top.rglob("*"))):
        status = path.lstat()
        is_file = path.is_file() and not path.is_symlink()
        data = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else ""
        found[str(path.relative_to(top))] = (status.st_ino, status.st_size, data)
    return found


def all_of(top: Path) -> dict[str, tuple[object, ...]]:
    """Return that, with modes, owners, links, times and attributes."""
    found = seen_of(top)
    for name, known in found.items():
        path = top / name
        status = path.lstat()
        more = (status.st_mode, status.st_uid, status.st_gid, status.st_nlink)
        times = (status.st_mtime_ns, status.st_ctime_ns)
        attributes = tuple(os.listxattr(path, follow_symlinks=False))
        found[name] = (*known, *more, *times, *attributes)
    return found


@pytest.fixture
async def attacker(readable: Path) -> AsyncIterator[Attacker]:
    """A child with a working directory, and walls that the test chooses."""
    cwd = readable / "cwd"
    (cwd / "empty").mkdir(parents=True)
    for name in ("note", "other", "gone"):
        (cwd / name).write_text("as it was")
    scratch = Scratch(None, where=str(readable))
    async with open_stage(readable, Settings(grace_s=0.5)) as stage:
        yield Attacker(stage, scratch)
    await scratch.remove()


async def hammered(attacker: Attacker) -> Child:
    """Have a child try all, be told to end, and go on until it is killed."""
    child, ours = await attacker.start(HAMMER, str(HAMMERS))
    with os.fdopen(ours, "rb", buffering=0) as said:
        with trio.fail_after(120):
            for _ in range(HAMMERS + 1):
                await trio.to_thread.run_sync(said.read, 1, abandon_on_cancel=True)
        assert child.exit is None
        child.stop()
        await child.wait_gone()
        assert child.status == 137
    return child


# attack 50
@pytest.mark.chaos
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("mounts", "others"), TRIED)
async def test_a_working_directory_is_not_to_be_changed(
    attacker: Attacker, mounts: tuple[str, ...], others: tuple[str, ...]
) -> None:
    if os.geteuid() != 0 and "uid" in mounts:
        pytest.skip("a host that is not root has no users to give")
    if os.geteuid() == 0 and mounts == ("mountns",) and "landlock" not in others:
        pytest.skip("what else runs as root here decides: the test below")
    attacker.stage.sandbox = make_profile("tried", [*mounts, *others, *BESIDE])
    cwd = attacker.stage.where / "cwd"
    names, everything = seen_of(cwd), all_of(cwd)
    child = await hammered(attacker)
    has = dict(child.walls.applied)
    assert {*mounts, *others} <= has.keys()
    if "mountns" in has:
        assert all_of(cwd) == everything
    elif "landlock" in has:
        assert seen_of(cwd) == names
        assert all_of(cwd) != everything  # by its user, who owns it
    else:
        assert seen_of(cwd) != names  # so the tries are such as would do it


# attack 50: once a file had changed after a run that was ended by its time limit. Another
# child of root's was there then, which was root without capabilities, as this one is.
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("more", "is_kept"),
    [
        (("seccomp",), False),
        (("landlock",), True),
        (("pidns",), True),
        (("uid",), True),
    ],
    ids=["seccomp", "landlock", "pidns", "uid"],
)
async def test_another_childs_root_is_no_way_to_the_working_directory(
    attacker: Attacker, more: tuple[str, ...], is_kept: bool
) -> None:
    if os.geteuid() != 0:
        if "uid" in more:
            pytest.skip("a host that is not root has no users to give")
        is_kept = True  # by its user namespace: the other one's is not beneath it
    cwd = attacker.stage.where / "cwd"
    attacker.stage.sandbox = make_profile("without mountns", ["landlock", "seccomp"])
    await attacker.victim()
    attacker.stage.sandbox = make_profile("tried", ["mountns", *more, *BESIDE])
    everything = all_of(cwd)
    child = await hammered(attacker)
    assert "mountns" in dict(child.walls.applied)
    assert (all_of(cwd) == everything) is is_kept


# attack 50: the same by the command, ended by its time limit.
@pytest.mark.timeout(240)
def test_a_time_limit_leaves_the_working_directory_as_it_was(readable: Path) -> None:
    cwd = readable / "cwd"
    (cwd / "empty").mkdir(parents=True)
    for name in ("note", "other", "gone"):
        (cwd / name).write_text("as it was")
    config = readable / "c.toml"
    layers = "['mountns', 'pidns', 'seccomp', 'userns', 'netns']"
    config.write_text(f"[sandbox.x]\nlayers = {layers}\n[host]\ngrace = '500ms'\n")
    everything = all_of(cwd)
    words = ("--config", config, "--sandbox", "x", "--timeout", "3s", "--cwd", cwd)
    program = (sys.executable, "-I", "-S", "-c", PRELUDE + HAMMER, str(HAMMERS))
    outcome = sandhost("run", *words, "--", *program)
    assert outcome.status == 124
    assert all_of(cwd) == everything


# attack 6: a file that is stdin has a name in /proc that leads past the mounts to read.
@pytest.mark.parametrize(
    ("layers", "is_kept"),
    [("'landlock'", True), ("'mountns', 'pidns', 'userns'", False)],
    ids=["landlock", "mountns"],
)
def test_a_file_that_is_stdin_is_kept_by_landlock_alone(
    readable: Path, layers: str, is_kept: bool
) -> None:
    config, note = readable / "c.toml", readable / "note"
    config.write_text(f"[sandbox.x]\nlayers = ['seccomp', {layers}]\n")
    note.write_text("as it was")
    words = ("--config", config, "--sandbox", "x", "--cwd", readable)
    script = "printf bad > /proc/self/fd/0"
    with note.open() as file:
        sandhost("run", *words, "--", "sh", "-c", script, stdin=file)
    assert (note.read_text() == "as it was") is is_kept
