"""Attacks beside the door: the kernel stops them where there are walls.

Each attack is run by a child that may load libraries and make any call; what it gets is
compared with what its walls promise.  Without walls there is nothing to promise, which
is said where it is so.
"""

import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

from hostlib.linux.cgroup_files import describe_bounds
from supervisor.children.child import Child
from supervisor.sandbox.groups import make
from supervisor.sandbox.scratch import Scratch
from tests.helpers.stage import Stage, open_stage
from tests.system.attacks.conftest import closed_bwrap, only, put_behind

# A program prints its result: a value, or the name of an error.
PRELUDE = """
import ctypes, errno, os, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    return errno.errorcode[ctypes.get_errno()] if result < 0 else 'done'
def attempt(work):
    try:
        return work()
    except OSError as why:
        return errno.errorcode[why.errno]
"""


class Attacker:
    """Children that run a program and say what came of it."""

    def __init__(self, stage: Stage, scratch: Scratch) -> None:
        self.stage = stage
        self.scratch = scratch

    async def start(
        self, program: str, *words: str, **changes: object
    ) -> tuple[Child, int]:
        """Start a program; the child, and the descriptor of what it prints."""
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        command = (sys.executable, "-I", "-S", "-c", PRELUDE + program, *words)
        null = self.stage.null
        if self.stage.wrapper:
            where, own_two = str(self.stage.where), (self.scratch.tmp, self.scratch.run)
            changes = {"wrapper": closed_bwrap((where,), own_two), **changes}
        own = {"tmp_dir": self.scratch.tmp, "run_dir": self.scratch.run}
        known = {
            "stdio": (null, theirs, 2),
            "cwd": str(self.stage.where / "cwd"),
            **own,
        }
        try:
            child = await self.stage.spawn(*command, **{**known, **changes})
        finally:
            os.close(theirs)
        return child, ours

    async def victim(self) -> Child:
        """Start somebody who is there, and does nothing."""
        child, ours = await self.start("print('up', flush=True); time.sleep(60)")
        os.read(ours, 3)
        os.close(ours)
        return child

    async def says(self, program: str, *words: str, **changes: object) -> str:
        """Return what a program prints until its end."""
        child, ours = await self.start(program, *words, **changes)
        await child.wait_gone()
        with os.fdopen(ours) as file:
            return file.read().strip()


@pytest.fixture
async def attacker(stage: Stage) -> AsyncIterator[Attacker]:
    """A child's own directories, and somebody who uses them."""
    (stage.where / "cwd").mkdir()
    scratch = Scratch(None)
    yield Attacker(stage, scratch)
    await scratch.remove()


LOOKING = """
pid = int(sys.argv[1])
size = ctypes.c_size_t(8)
where = (ctypes.c_size_t * 2)(ctypes.addressof(size), 8)
print(call(101 if os.uname().machine == 'x86_64' else 117, 16, pid, 0, 0))
print(call(310 if os.uname().machine == 'x86_64' else 270, pid, where, 1, where, 1, 0))
fd = call(434, pid, 0)
print(fd if fd != 'done' else 'seen')
for name in ('environ', 'mem', 'maps', 'fd/3', 'root', 'cwd'):
    print(attempt(lambda: os.open(f'/proc/{pid}/{name}', os.O_RDONLY)))
print(attempt(lambda: os.kill(pid, 0)))
"""
"""A child's tries to look into the named process, and to signal it: 10 times."""


# attack 25: a sibling's memory, descriptors and environment. Without walls children of
# one user can look into each other.
@only("auto", "namespaces", "bubblewrap")
async def test_a_sibling_cannot_be_looked_into(attacker: Attacker) -> None:
    victim = await attacker.victim()
    assert victim.process is not None
    said = (await attacker.says(LOOKING, str(victim.process.pid))).split()
    assert len(said) == 10
    assert set(said) <= {"EPERM", "EACCES", "ESRCH", "ENOENT"}, said
    assert victim.exit is None


# attack 25: pidfd_getfd, and the rest of the doors to the kernel that a filter closes.
@only("auto")
async def test_calls_that_no_child_needs_are_refused(attacker: Attacker) -> None:
    program = """
x86 = os.uname().machine == 'x86_64'
calls = {438: 438, 428: 428, 442: 442, 425: 425, 165: 40, 155: 41, 272: 97, 308: 268,
         321: 280, 298: 241, 323: 282, 250: 219, 304: 265, 312: 272, 161: 51}
print(*(call(a if x86 else b, 0, 0, 0, 0, 0) for a, b in calls.items()))
print(call(435, 0, 0))
print(call(56 if x86 else 220, 0x10000000 | 17, 0, 0, 0, 0))
print(attempt(lambda: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)))
import fcntl
print(attempt(lambda: fcntl.ioctl(0, 0x5412, b'x')))
"""
    said = (await attacker.says(program)).split("\n")
    assert set(said[0].split()) == {"EPERM"}
    assert said[1:] == ["ENOSYS", "EPERM", "EAFNOSUPPORT", "EPERM"]


# attack 26: only where a pid namespace is; it would end this very test else.
@pytest.mark.slow
@only("auto", "namespaces", "bubblewrap")
async def test_a_kill_of_everybody_reaches_the_child_alone(
    attacker: Attacker, kind: str
) -> None:
    bystander = await attacker.victim()
    layers = bystander.walls.row()["layers"]
    if kind != "bubblewrap" and "pidns" not in layers:  # type: ignore[operator]
        pytest.skip(f"no pid namespace under {kind}: 'kill -9 -1' ends the tests")
    said = await attacker.says("print(os.getpid(), attempt(lambda: os.kill(-1, 9)))")
    assert said == "2 ESRCH"  # its namespace has an init, itself, and nobody else
    assert bystander.exit is None
    assert attacker.stage.host.launcher.statistics()["children"] == 1


# attack 29: as many processes as the limit says, and not one of anybody else's. It
# takes the layer uid or a cgroup; bubblewrap bounds nothing.
@only("auto")
async def test_a_fork_bomb_stays_in_its_limit(attacker: Attacker) -> None:
    from hostlib.user_values import Limits  # noqa: PLC0415 - one test's

    limits = Limits(processes=20)
    program = """
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
        if count > 150:
            break
except BlockingIOError:
    pass
print(count, flush=True)
os._exit(0)
"""
    said = await attacker.says(program, group_limits=limits, rlimits=limits.rlimits())
    assert 10 <= int(said) <= 20


# attack 29: memory.
@pytest.mark.slow
async def test_a_memory_bomb_ends_alone(attacker: Attacker) -> None:
    from hostlib.user_values import Limits  # noqa: PLC0415

    limits = Limits(memory=256 << 20)
    program = "b = [bytearray(1 << 20) for _ in range(2000)]; print('had', len(b))"
    neighbour = await attacker.stage.puppet()
    said = await attacker.says(
        f"try:\n    {program}\nexcept MemoryError:\n    print('MemoryError')",
        group_limits=limits,
        rlimits=limits.rlimits(),
    )
    assert said in {"MemoryError", ""}  # refused; or killed, where a group bounds it
    assert await neighbour.ask(b"PING\n") == b"OK"


# attack 29: memory, by many processes that each stay within the limit.
@pytest.mark.slow
@only("auto")
async def test_a_memory_bomb_of_many_processes_is_one(attacker: Attacker) -> None:
    from hostlib.user_values import Limits  # noqa: PLC0415

    limits = Limits(memory=128 << 20)
    groups = make("tried", limits)
    bounds = describe_bounds(groups.made)
    groups.remove()
    if "memory" not in bounds:
        pytest.skip("no group bounds memory here")
    program = """
for _ in range(4):
    if os.fork() == 0:
        kept = b'x' * (64 << 20)
        time.sleep(1)
        os._exit(0)
print([os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(4)].count(0))
"""
    changes = {"group_limits": limits, "rlimits": limits.rlimits()}
    assert await attacker.says(program, **changes) in {"", "0", "1"}


@pytest.fixture
def listening() -> Iterator[tuple[str, socket.socket]]:
    """A socket of another program, by path, and one of UDP, of this machine."""
    with (
        tempfile.TemporaryDirectory() as where,  # a path of a socket is short
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        path = f"{where}/docker.sock"
        Path(where).chmod(0o755)
        unix.bind(path)
        Path(path).chmod(0o777)
        unix.listen()
        udp.bind(("127.0.0.1", 0))
        yield path, udp


# attack 31: sockets by path, and the network. Without walls a child connects to whatever
# its user may.
@only("auto", "namespaces", "bubblewrap")
async def test_sockets_of_others_are_out_of_reach(
    listening: tuple[str, socket.socket], attacker: Attacker
) -> None:
    path, udp = listening
    program = """
path, port = sys.argv[1], int(sys.argv[2])
print(attempt(lambda: socket.socket(socket.AF_UNIX).connect(path)))
udp = lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
print(attempt(lambda: udp().sendto(b'x', ('198.51.100.1', 9))))
attempt(lambda: udp().sendto(b'x', ('127.0.0.1', port)))
tcp = lambda: socket.create_connection(('198.51.100.1', 80), 2)
print(attempt(tcp))
"""
    said = (await attacker.says(program, path, str(udp.getsockname()[1]))).split()
    assert said[0] in {"ENOENT", "EACCES"}
    assert set(said[1:]) <= {"ENETUNREACH", "EAFNOSUPPORT", "EACCES"}
    udp.setblocking(False)
    with pytest.raises(BlockingIOError):  # nothing came to this machine's loopback
        udp.recv(1)


# Whatever keeps a child from the sockets of others: its own stay within reach.
async def test_a_childs_own_sockets_stay_reachable(attacker: Attacker) -> None:
    path = os.path.join(attacker.scratch.run, "own.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        program = """
with socket.socket(socket.AF_UNIX) as sock:
    print(attempt(lambda: sock.connect(sys.argv[1])))
"""
        assert await attacker.says(program, path) == "None"


async def test_what_every_profile_admits_is_there(attacker: Attacker) -> None:
    cwd = attacker.stage.where / "cwd"
    (cwd / "note").write_text("mine")
    (cwd / "note").chmod(0o600)
    tool = cwd / "tool"
    tool.write_text(f"#!{sys.executable} -IS\nprint('ran')\n")
    tool.chmod(0o700)
    program = """
import subprocess
print(open('note').read(), subprocess.check_output(['./tool'], text=True).strip())
path = os.environ['TMPDIR'] + '/x'
open(path, 'w').write('kept')
print(open(path).read(), sys.executable == sys.argv[1])
"""
    env = {"TMPDIR": attacker.scratch.tmp}
    said = await attacker.says(program, sys.executable, env=env)
    assert said == "mine ran\nkept True"


# spec A3: the private root and the grants to write come through FD 3 and by no other way
# (to read: HM5). In other walls what a child's user may read it may read.
@only("auto")
async def test_files_are_behind_the_door_only(
    attacker: Attacker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "secret").write_text("secret")
    (elsewhere / "secret").chmod(0o644)
    elsewhere.chmod(0o755)
    program = """
for name in (sys.argv[1], '/etc/shadow', '/etc/gshadow', '/var/log', '/home'):
    print(attempt(lambda: os.open(name, os.O_RDONLY)))
for name in (sys.argv[1], '/var/x', '/usr/x', 'x', '/etc/x', '/proc/self/mem'):
    print(attempt(lambda: os.open(name, os.O_WRONLY | os.O_CREAT)))
import os
client = os.write(3, b'OPEN %b a false\\n' % os.fsencode(sys.argv[1]))
print(os.read(3, 3).decode())
"""
    grant = str(elsewhere / "secret")
    said = (await attacker.says(program, grant, write=(grant,))).split()
    assert len(said) == 12
    refused = set(said[:11])
    assert refused <= {"EACCES", "EPERM", "ENOENT", "EROFS"}, said
    assert said[11] == "OK"


# attack 24: a key in the host is nowhere that a child can look.
async def test_a_canary_in_the_host_is_not_to_be_found(
    readable: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = "sk-canary-8d1f4c0b"
    monkeypatch.setenv("OPENAI_API_KEY", canary)
    (readable / "cwd").mkdir()
    scratch = Scratch(None)
    # The bytes are put together there, for its own memory and command line hold them.
    program = f"""
word = bytes.fromhex({canary.encode()[::-1].hex()!r})[::-1]
found = [name for name in ('environ',) if word in open('/proc/self/' + name, 'rb').read()]
for pid in filter(str.isdigit, os.listdir('/proc')):
    if int(pid) == os.getpid():
        continue
    for name in ('environ', 'cmdline', 'stat'):
        try:
            if word in open(f'/proc/{{pid}}/{{name}}', 'rb').read():
                found.append(pid + name)
        except OSError:
            pass
import resource
print(found, resource.getrlimit(resource.RLIMIT_CORE)[0])
"""
    async with open_stage(readable) as stage:
        put_behind(stage, kind)
        said = await Attacker(stage, scratch).says(program)
    await scratch.remove()
    if kind != "none":
        assert said.startswith("[]"), said
    else:
        # The test itself is not a host that made itself unreadable: the launchpad did.
        assert str(stage.launchpad) not in said
    assert canary not in (readable / "journal").read_text()


async def test_signals_and_statuses_are_those_of_the_program(
    attacker: Attacker,
) -> None:
    child = await attacker.victim()
    assert child.process is not None
    with open(f"/proc/{child.process.pid}/comm") as comm:  # noqa: ASYNC230 - procfs
        name = comm.read()
    assert not name.startswith("sandhost")
    child.process.send_signal(signal.SIGTERM)
    assert await child.wait_gone() == 128 + signal.SIGTERM
    assert child.exit is not None
    assert child.exit.signal == signal.SIGTERM
    child, out = await attacker.start("os.kill(os.getpid(), 11)")
    os.close(out)
    assert await child.wait_gone() == 128 + signal.SIGSEGV


# A child in a pid namespace is another process than the one that was forked for it; the
# first may be dead before anybody has heard which.
@pytest.mark.slow
async def test_many_children_start_and_end_at_once(stage: Stage) -> None:
    spec = stage.spec(("true",))
    statuses: list[int] = []

    async def one() -> None:
        child = await stage.host.spawn(spec)
        statuses.append(await child.wait_gone())

    async with trio.open_nursery() as nursery:
        for _ in range(60):
            nursery.start_soon(one)
    assert statuses == [0] * 60
    stage.assert_nothing_left()


# attacks 18, 30: what is in flight over unix sockets counts for its user, the host's where a
# host is not root; others still get their descriptors (spec S7). It takes the layer rlimits.
@pytest.mark.slow
@only("auto")
async def test_who_stuffs_its_own_sockets_keeps_descriptors_from_nobody(
    attacker: Attacker,
) -> None:
    program = """
import array, errno, socket
null, pairs = os.open('/dev/null', os.O_RDONLY), []
many = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [null] * 253))]
try:
    while True:
        pairs.append(socket.socketpair())
        pairs[-1][0].setblocking(False)
        try:
            while True:
                pairs[-1][0].sendmsg([b'x'], many)
        except BlockingIOError:
            pass
except OSError as why:
    print(errno.errorcode[why.errno], flush=True)
time.sleep(600)
"""
    stuffing, out = await attacker.start(program)
    victim = await attacker.stage.puppet()
    with os.fdopen(out) as said:
        assert await trio.to_thread.run_sync(said.readline) == "ETOOMANYREFS\n"
        for _ in range(20):
            assert await victim.do("attached()") > 0
            assert await attacker.says("print('up')") == "up"
        stuffing.stop(0.0)
        await stuffing.wait_gone()
