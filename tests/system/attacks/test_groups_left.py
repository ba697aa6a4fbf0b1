"""A child stays in its groups of processes, which otherwise keep no limit.

Every way out of them that is known, tried in walls that count as keeping a child in,
and in such as do not.
"""

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hostlib.user_values import Limits
from supervisor.children.child import Child
from supervisor.sandbox import start
from supervisor.sandbox.groups import is_held
from supervisor.sandbox.plan import PROFILES, make_profile
from supervisor.sandbox.scratch import Scratch
from tests.helpers.stage import open_stage
from tests.system.attacks.conftest import AS_ROOT
from tests.system.attacks.test_walls import Attacker

LIMITS = Limits(memory=1 << 40, processes=200)

# Each way is tried by a process of its own, and named if it has led outside.
LEAVING = """
import struct
def groups():
    return [line.rstrip().split(':') for line in open('/proc/self/cgroup')]
BEFORE = groups()
def is_outside():
    pairs = zip(BEFORE, groups())
    return any('/sandhost-' in old[2] and '/sandhost-' not in new[2] for old, new in pairs)
def tops():
    for line in open('/proc/self/mountinfo'):
        words = line.split()
        if {'cgroup', 'cgroup2'} & set(words[-4:]):
            yield words[4]
            yield from {words[4] + os.path.dirname(path) for _, _, path in BEFORE}
TOPS = set(tops()) or {'/sys/fs/cgroup/pids', '/sys/fs/cgroup'}
def by_hand(root):
    for top in TOPS:
        attempt(lambda: os.write(os.open(root + top + '/cgroup.procs', os.O_WRONLY), b'0'))
    return is_outside()
def born():
    for top in TOPS:
        fd = attempt(lambda: os.open(top, os.O_PATH | os.O_DIRECTORY))
        if isinstance(fd, str):
            continue
        words = struct.pack('11Q', 0x200000000, *[0] * 3, 17, *[0] * 5, fd)
        pid = libc.syscall(435, words, len(words))
        if pid == 0:
            os._exit(is_outside())
        if pid > 0 and os.waitpid(pid, 0)[1]:
            return True
def by_anothers_root():
    pids = filter(str.isdigit, os.listdir('/proc'))
    return any(by_hand('/proc/' + pid + '/root') for pid in pids)
def widened():
    if libc.unshare(0x10000000 | 0x20000 | 0x2000000):  # user, mounts, cgroups
        return False
    where = os.environ['TMPDIR']
    for kind, options in ((b'cgroup', b'pids'), (b'cgroup2', None)):
        libc.mount(b'none', os.fsencode(where), kind, 0, options)
        with open(where + '/pids.max', 'r+') as file:
            file.write('max')
            return True
for way, go in (
    ('write', lambda: by_hand('')), ('clone3', born), ('root', by_anothers_root),
    ('mount', widened),
):
    if os.fork() == 0:
        print(way if attempt(go) is True else '', flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture
async def attacker(readable: Path) -> AsyncIterator[Attacker]:
    """Somebody whose walls the test chooses; another child is there, in none."""
    (readable / "cwd").mkdir()
    scratch = Scratch(None)
    async with open_stage(readable) as stage:
        stage.sandbox = make_profile("bare", [])
        await stage.sh("sleep 1000")
        yield Attacker(stage, scratch)
    await scratch.remove()


async def ways_out(attacker: Attacker, *layers: str) -> tuple[Child, set[str]]:
    """Return a child with limits, layers and groups, and the ways to leave them."""
    attacker.stage.sandbox = make_profile("its", ["cgroup", "userns", *layers])
    child, out = await attacker.start(
        LEAVING, group_limits=LIMITS, rlimits=LIMITS.rlimits()
    )
    await child.wait_gone()
    with os.fdopen(out) as file:
        ways = set(file.read().split())
    if "cgroup" not in dict(child.walls.applied):
        pytest.skip(child.walls.missing["cgroup"])
    return child, ways


# attack 29: a limit that a child can shake off is none.
@pytest.mark.slow
@pytest.mark.parametrize(
    "layers",
    [
        ("landlock", "seccomp"),
        ("landlock", "mountns"),
        ("mountns", "uid"),
        ("mountns", "pidns", "seccomp"),
    ],
    ids="+".join,
)
async def test_a_child_that_counts_as_held_in_its_groups_does_not_leave_them(
    attacker: Attacker, layers: tuple[str, ...]
) -> None:
    child, ways = await ways_out(attacker, *layers)
    if set(layers) - dict(child.walls.applied).keys():
        pytest.skip(f"this machine does not give all of {', '.join(layers)}")
    assert ways == set()
    assert start.MEMORY not in child.walls.missing
    assert start.PROCESSES not in child.walls.missing
    assert start.HOLD not in child.walls.missing


# attack 29: nor is one told as kept. By which way it goes is this machine's to say (what is
# mounted, who has started the host), but for the plainest one.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "way"),
    [
        (("seccomp",), "write"),
        (("landlock",), "clone3"),
        (("mountns", "seccomp"), "root"),
        (("mountns", "pidns"), "mount"),
    ],
    ids=str,
)
async def test_a_child_that_can_leave_its_groups_is_told_of(
    attacker: Attacker, layers: tuple[str, ...], way: str
) -> None:
    child, ways = await ways_out(attacker, *layers)
    assert way in ways or way != "write"
    row, is_root = child.walls.row(), os.geteuid() == 0
    (spawned,) = attacker.stage.events("child.spawned")[1:]
    assert spawned["isolation"] == row
    told = list(start.shortfalls(child.walls, child.spec.sandbox))
    said = "it can leave its groups, for want of landlock with seccomp or mountns"
    assert child.walls.missing[start.HOLD].startswith(said)
    for limit, why in (
        (start.MEMORY, "each process has its own alone"),
        (start.PROCESSES, "the kernel does not count the processes of root"),
    ):
        if limit == start.PROCESSES and not is_root:
            assert limit not in child.walls.missing  # RLIMIT_NPROC counts them
            continue
        assert child.walls.missing[limit].startswith(f"{why}, and {said}")
        assert f"goes without its {limit}: {child.walls.missing[limit]}" in told


# The group is left, and so is the rlimit beside it the only bound there is.
async def test_the_rlimit_is_no_higher_where_a_group_can_be_left(
    attacker: Attacker,
) -> None:
    program = "import resource; print(*resource.getrlimit(resource.RLIMIT_NPROC))"
    attacker.stage.sandbox = make_profile("its", ["cgroup", "seccomp"])
    more = {"group_limits": LIMITS, "rlimits": LIMITS.rlimits()}
    assert await attacker.says(program, **more) == "200 200"


async def test_what_only_a_group_keeps_is_refused_where_it_can_be_left(
    attacker: Attacker,
) -> None:
    stage = attacker.stage
    stage.host.machine.lacking.update(
        dict.fromkeys(("landlock", "mountns"), "not here")
    )
    limits = Limits(cpus=1.0)
    child = await stage.host.spawn(
        stage.spec(("/bin/true",), sandbox=AS_ROOT, group_limits=limits)
    )
    assert child.failure is not None
    assert child.failure.errno == errno.EOPNOTSUPP
    if "can leave" not in child.failure.text:
        pytest.skip(child.failure.text)  # there are no groups here
    assert child.failure.text.startswith(
        "cannot start a child: nothing keeps the limit 'cpus': it can leave its groups, for"
        " want of landlock"
    )
    assert child.failure.text.endswith("leave the limit out, or add such layers")


def test_every_profile_that_is_made_for_all_layers_holds_its_children() -> None:
    for name, profile in PROFILES.items():
        assert is_held(profile.layers) == (name != "none")
