"""Rules that hold without a layer: the others do not count on it.

A machine may have no Landlock, and a host that is root a file system that shows no owners
as others; or it has Landlock, and no namespaces for a host that is not root.
"""

import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.sandbox.plan import PROFILES, make_profile
from supervisor.sandbox.scratch import Scratch
from supervisor.spawn.launchpad.layers import landlock
from tests.helpers.stage import open_stage
from tests.system.attacks.conftest import NAMESPACES
from tests.system.attacks.test_reports import layers_of, said_by_it
from tests.system.attacks.test_walls import LOOKING, Attacker, listening

__all__ = ["listening"]

KERNELS = make_profile("kernels", ["landlock", "seccomp"])
"""The layers of a host that is not root and can make no namespaces."""

OPEN = make_profile("open", ["landlock"])
NO_PATHS = replace(KERNELS, unix_sockets=False)


@pytest.fixture
async def attacker(readable: Path) -> AsyncIterator[Attacker]:
    """Somebody whose walls the test chooses."""
    (readable / "cwd").mkdir()
    scratch = Scratch(None)
    async with open_stage(readable) as stage:
        yield Attacker(stage, scratch)
    await scratch.remove()


# attack 24: whoever stays user 0 owns them without any capability, and a program that the
# kernel is to run at a crash (core_pattern) is run outside.
async def test_the_settings_of_the_machine_are_not_to_be_changed(
    attacker: Attacker,
) -> None:
    program = """
for name in ('sys/kernel/core_pattern', 'sys/vm/drop_caches', 'sysrq-trigger'):
    print(attempt(lambda: os.open('/proc/' + name, os.O_WRONLY)))
print(open('/proc/self/comm').read())
"""
    for profile in (NAMESPACES, make_profile("bare", ["mountns", "userns"]), KERNELS):
        attacker.stage.sandbox = profile
        said = (await attacker.says(program)).split()
        assert set(said[:3]) <= {"EACCES", "EROFS", "ENOENT"}, profile.name
        assert said[3].startswith("python")


# attack 6: the old root lies above the fresh one until it is unmounted, and what leads to
# the parent of a root leads into what is mounted there.
async def test_the_hosts_root_is_nowhere_above_the_fresh_one(
    attacker: Attacker,
) -> None:
    secret = attacker.stage.where / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    program = """
for top in ('', '/..', '/../..', '/proc/self/root/..', '/proc/self/cwd' + '/..' * 40):
    seen = os.lstat(top + '/').st_dev, sorted(os.listdir(top + '/'))
    name = attempt(lambda: os.open(top + sys.argv[1], os.O_RDONLY))
    print(seen == (os.lstat('/').st_dev, sorted(os.listdir('/'))), name)
tops = [line.split()[4] for line in open('/proc/self/mountinfo')]
print(tops.count('/'))
"""
    for profile in (NAMESPACES, make_profile("bare", ["mountns", "userns"])):
        attacker.stage.sandbox = profile
        said = (await attacker.says(program, str(secret))).split()
        assert said == [*["True", "ENOENT"] * 5, "1"], profile.name


# attack 24: what a program needs to start of /etc is there, and nothing else: not mounted,
# or, where Landlock says what of it is read, not to be opened.
async def test_secrets_of_the_machine_are_not_to_be_read(attacker: Attacker) -> None:
    program = """
for name in ('shadow', 'gshadow', 'fstab', 'passwd', 'nsswitch.conf'):
    print(attempt(lambda: os.open('/etc/' + name, os.O_RDONLY) > 2))
"""
    attacker.stage.sandbox = NAMESPACES
    said = (await attacker.says(program)).split()
    assert said == ["ENOENT", "ENOENT", "ENOENT", "True", "True"]
    whole = make_profile("whole /etc", ["landlock", "mountns", "userns"])
    for profile in (PROFILES["auto"], whole, KERNELS):
        attacker.stage.sandbox = profile
        said = (await attacker.says(program)).split()
        assert set(said[:3]) <= {"EACCES", "ENOENT"}, profile.name
        assert said[3:] == ["True", "True"], profile.name


# spec face: --cwd and COMMAND's installation are to be read and executed. Of a host that
# is root the child is root here, and of another one it is the host's user: its mounts and
# its user keep it from nothing.
async def test_what_is_to_be_read_is_not_to_be_changed(attacker: Attacker) -> None:
    cwd = attacker.stage.where / "cwd"
    (cwd / "note").write_text("as it was")
    (cwd / "empty").mkdir()
    program = """
libc.truncate.argtypes = ctypes.c_char_p, ctypes.c_long
def truncated():
    if libc.truncate(b'note', 0) < 0:
        raise OSError(ctypes.get_errno(), 'truncate')
into = os.environ['TMPDIR']
open(into + '/own', 'w').close()
for change in (
    lambda: os.open('note', os.O_WRONLY), lambda: os.open('note', os.O_RDWR),
    lambda: os.open('note', os.O_RDONLY | os.O_TRUNC), truncated,
    lambda: os.open('new', os.O_WRONLY | os.O_CREAT), lambda: os.mkdir('new'),
    lambda: os.open('.', os.O_WRONLY | os.O_TMPFILE), lambda: os.mkfifo('new'),
    lambda: os.symlink('a', 'new'), lambda: os.link('note', 'new'),
    lambda: os.rename('note', 'new'), lambda: os.unlink('note'),
    lambda: os.rmdir('empty'), lambda: os.rename('note', into + '/note'),
    lambda: os.rename(into + '/own', 'new'), lambda: os.link(into + '/own', 'new'),
    lambda: os.open('/usr/new', os.O_WRONLY | os.O_CREAT),
):
    print(attempt(change))
print(open('note').read())
"""
    attacker.stage.sandbox = KERNELS
    env = {"TMPDIR": attacker.scratch.tmp}
    *said, note = (await attacker.says(program, env=env)).split("\n")
    assert len(said) == 17
    # EXDEV: Landlock's word for a file that would get other rights where it goes.
    assert set(said) <= {"EACCES", "EXDEV"}, said
    assert note == "as it was"
    assert sorted(path.name for path in cwd.iterdir()) == ["empty", "note"]


# attack 24: nor are private keys, also where user 0 or their group could read them.
async def test_private_keys_of_the_machine_are_not_to_be_read(
    attacker: Attacker,
) -> None:
    program = """
for top in ('/etc/ssl', '/etc/pki/tls'):
    print(attempt(lambda: len(os.listdir(top + '/private'))))
print(attempt(lambda: len(os.listdir('/etc/ssl/certs')) > 0))
"""
    for profile in (NAMESPACES, KERNELS):
        attacker.stage.sandbox = profile
        said = (await attacker.says(program)).split()
        assert set(said[:2]) <= {"EACCES", "ENOENT"}, profile.name
        assert said[2] == str(os.access("/etc/ssl/certs", os.R_OK))


@pytest.fixture
def groups() -> Iterator[list[str]]:
    """Supplementary groups of the host; made before it, and what it starts, begins."""
    if os.geteuid() != 0:
        pytest.skip("only root chooses its groups")
    before = os.getgroups()
    try:
        os.setgroups([4, 42])
    except PermissionError:
        pytest.skip("this root does not: a user namespace's, or without CAP_SETGID")
    yield ["4", "42"]
    os.setgroups(before)


# attack 24: what a group of the host's may read (/etc/shadow, logs) is not its children's,
# with all layers or with the fewest that give them users.
async def test_a_user_of_its_own_is_in_no_group_of_the_hosts(
    groups: list[str], attacker: Attacker
) -> None:
    program = """
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
print(*status['Groups'].split())
"""
    attacker.stage.sandbox = PROFILES["none"]
    assert (await attacker.says(program)).split() == groups  # so that it is the layer
    for profile in (PROFILES["auto"], make_profile("users", ["uid", "mountns"])):
        attacker.stage.sandbox = profile
        child, lines = await said_by_it(attacker, program)
        if "uid" not in layers_of(child):
            pytest.skip("no user of its own can be had here")
        assert lines == [""], profile.name


# A host without the right to empty the bounding set keeps it: a host that is not root, where there
# is no user namespace either.
async def test_a_bounding_set_that_is_left_is_told(attacker: Attacker) -> None:
    program = """
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
print(*(int(status[name], 16) for name in ('CapBnd', 'CapEff', 'CapPrm', 'CapInh')))
"""
    attacker.stage.sandbox = make_profile("alone", ["landlock"])
    child, (line,) = await said_by_it(attacker, program)
    bounding, *others = map(int, line.split())
    assert others == [0, 0, 0]
    told = dict(child.walls.applied)["capabilities"]
    if bounding:
        assert told == "none left but in the bounding set"
    else:
        assert told.startswith("none left")


# attack 29: what no process has mapped is memory, too.
async def test_what_stands_in_its_dev_shm_is_bounded_in_number(
    attacker: Attacker,
) -> None:
    attacker.stage.sandbox = NAMESPACES
    program = (
        "shm = os.statvfs('/dev/shm'); print(shm.f_files, shm.f_frsize * shm.f_blocks)"
    )
    said = (await attacker.says(program)).split()
    assert said == [str(16 * 1024), str(64 * 1024 * 1024)]


# attack 25: a limit of processor's time ends whom it is set for, and Landlock, which keeps
# signals in, does not know of it.
async def test_a_child_sets_limits_for_none_but_itself(attacker: Attacker) -> None:
    attacker.stage.sandbox = KERNELS
    victim = await attacker.victim()
    assert victim.process is not None
    before = resource.prlimit(victim.process.pid, resource.RLIMIT_CPU)
    program = """
import resource
cpu = resource.RLIMIT_CPU
for pid in (int(sys.argv[1]), int(sys.argv[2]), os.getppid(), os.getpid()):
    print(attempt(lambda: resource.prlimit(pid, cpu, (1, 1))))
print(resource.prlimit(os.getpid(), cpu) == resource.getrlimit(cpu))
print(attempt(lambda: resource.setrlimit(cpu, (50, 60))), *resource.getrlimit(cpu))
"""
    pids = (str(victim.process.pid), str(attacker.stage.launchpad))
    said = (await attacker.says(program, *pids)).split()
    assert said == [*["EPERM"] * 4, "True", "None", "50", "60"]
    assert resource.prlimit(victim.process.pid, resource.RLIMIT_CPU) == before


# attack 25, spec N4: nor does it take anybody's processor away, a relay's say.
async def test_a_child_says_for_none_but_itself_when_it_runs(
    attacker: Attacker,
) -> None:
    attacker.stage.sandbox = KERNELS
    victim = await attacker.victim()
    assert victim.process is not None
    program = """
idle, one = os.sched_param(0), {min(os.sched_getaffinity(0))}
for pid in (int(sys.argv[1]), int(sys.argv[2]), os.getpid(), 0):
    print(attempt(lambda: os.setpriority(os.PRIO_PROCESS, pid, 19)))
    print(attempt(lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, idle)))
    print(attempt(lambda: os.sched_setaffinity(pid, one)))
print(attempt(lambda: os.setpriority(os.PRIO_USER, 0, 19)))
print(attempt(lambda: os.setpriority(os.PRIO_PGRP, 0, 19)))
"""
    pids = (str(victim.process.pid), str(attacker.stage.launchpad))
    said = (await attacker.says(program, *pids)).split()
    assert said == [*["EPERM"] * 9, *["None"] * 3, *["EPERM"] * 2]


# attack 25: children of one user, who see each other in /proc.
async def test_a_sibling_cannot_be_looked_into_without_namespaces(
    attacker: Attacker,
) -> None:
    attacker.stage.sandbox = KERNELS
    victim = await attacker.victim()
    assert victim.process is not None
    said = (await attacker.says(LOOKING, str(victim.process.pid))).split()
    assert len(said) == 10
    if landlock.version() < 6:  # no scopes: its user signals it
        assert said.pop() == "None"
    seen = said.pop(2)  # that there is a process of that number is to be seen
    assert seen in {"seen", "EPERM"}
    assert set(said) == {"EPERM", "EACCES"}, said
    assert victim.exit is None


# attack 25: nor does it end anybody, of whatever user, its host included. attack 31: an
# abstract socket has no path that could be out of its sight.
async def test_signals_and_abstract_sockets_stay_inside(attacker: Attacker) -> None:
    if landlock.version() < 6:
        pytest.skip("this kernel's Landlock has no scopes")
    attacker.stage.sandbox = KERNELS
    victim = await attacker.victim()
    assert victim.process is not None
    pids = map(str, (victim.process.pid, attacker.stage.launchpad, os.getpid()))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("")  # unix(7), autobind: the kernel makes up an abstract name
        server.listen()
        name = server.getsockname()[1:].decode()
        program = """
print(attempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0' + sys.argv[1])))
print(*(attempt(lambda: os.kill(int(pid), 0)) for pid in sys.argv[2:]))
print(attempt(lambda: os.kill(os.getpid(), 0)))
"""
        said = (await attacker.says(program, name, *pids)).split()
    assert said == [*["EPERM"] * 4, "None"]
    assert victim.exit is None


# attack 31: without a namespace of its own Landlock and the filter keep the network away.
async def test_no_network_is_none_without_a_namespace(attacker: Attacker) -> None:
    program = """
import socket
here = ('127.0.0.1', 9)
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for family in (socket.AF_INET, socket.AF_INET6):
        print(attempt(lambda: socket.socket(family, kind)))
if sys.argv[1] == 'landlock':
    print(attempt(lambda: socket.socket().connect(here)))
    print(attempt(lambda: socket.socket().bind(('127.0.0.1', 0))))
"""
    attacker.stage.sandbox = KERNELS
    assert (await attacker.says(program, "both")).split() == ["EAFNOSUPPORT"] * 4
    if landlock.version() < 4:
        pytest.skip("this kernel's Landlock knows no TCP")
    attacker.stage.sandbox = make_profile("landlock alone", ["landlock"])
    said = (await attacker.says(program, "landlock")).split()
    assert said[-2:] == ["EACCES"] * 2


# attack 31: without namespaces, and without a user of its own, the filter is what can
# keep a child from sockets by path. Its door and pairs of sockets it has all the same.
async def test_a_profile_can_refuse_every_socket_by_path(
    listening: tuple[str, socket.socket], attacker: Attacker
) -> None:
    path, _ = listening
    program = """
print(attempt(lambda: socket.socket(socket.AF_UNIX).connect(sys.argv[1])))
one, other = socket.socketpair()
one.send(b'pair')
print(other.recv(9).decode())
os.write(3, b'PING\\n')
print(os.read(3, 9).decode())
"""
    attacker.stage.sandbox = OPEN
    said = (await attacker.says(program, path)).split()
    assert said == ["None", "pair", "OK"]  # so that it is the filter's doing
    attacker.stage.sandbox = NO_PATHS
    said = (await attacker.says(program, path)).split()
    assert said == ["EAFNOSUPPORT", "pair", "OK"]


# attack 31: one of a pair of datagrams sends to a path (/dev/log, say), and connects to
# another than it was made with; one of a pair of streams does neither.
async def test_no_pair_of_sockets_leads_to_a_path(
    listening: tuple[str, socket.socket], attacker: Attacker
) -> None:
    path, _ = listening
    program = """
stream, log = sys.argv[1:]
def pair(kind):
    fds = (ctypes.c_int * 2)()
    if libc.socketpair(socket.AF_UNIX, kind, 0, fds) < 0:
        raise OSError(ctypes.get_errno(), 'pair')
    return [socket.socket(socket.AF_UNIX, kind & 15, fileno=fd) for fd in fds]
def send(kind):
    one, other = pair(kind)
    sent = one.sendto(b'sent', log)
    one.connect(log)
    return sent
def talk(kind):
    one, other = pair(kind)
    one.send(b'pair')
    one.shutdown(socket.SHUT_WR)
    return other.recv(9).decode() + attempt(lambda: one.connect(stream))
for flags in (0, socket.SOCK_CLOEXEC):
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        print(attempt(lambda: send(kind | flags)))
    print(talk(socket.SOCK_STREAM | flags), talk(socket.SOCK_SEQPACKET | flags))
"""
    talk = ["pairEISCONN", "pairEPROTOTYPE"]  # such kernels have no SOCK_SEQPACKET
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        name = os.path.join(os.path.dirname(path), "log")
        log.bind(name)
        os.chmod(name, 0o777)
        log.setblocking(False)
        attacker.stage.sandbox = OPEN
        said = (await attacker.says(program, path, name)).split()
        assert said == ["4", "4", *talk] * 2
        assert [log.recv(9) for _ in range(4)] == [b"sent"] * 4
        attacker.stage.sandbox = NO_PATHS
        said = (await attacker.says(program, path, name)).split()
        assert said == ["EPERM", "EPERM", *talk] * 2
        with pytest.raises(BlockingIOError):
            log.recv(9)
