"""The attempts behind ``sandbox.probes``: each tries one thing and undoes it.

One function a thing, which returns a few words about what it found.

Rules of this file.

1. Failing with ``OSError`` or ``MissingError`` says that the thing is not there;
   ``UnknownError``, that it could not be tried.
2. A trial that could harm this process runs in another one.
"""

# ruff: noqa: PTH123 - one small file of /proc each
from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import shutil
import signal
import sys
import tempfile

from hostlib.linux import delegation, syscalls
from hostlib.linux.cgroup_files import describe_bounds
from hostlib.linux.namespace_counts import explain_refusal
from hostlib.linux.processes import exit_status
from hostlib.linux.syscalls import PR_SET_CHILD_SUBREAPER
from supervisor.sandbox.groups import hierarchies
from supervisor.sandbox.held_mount import try_way
from supervisor.spawn.launchpad.layers.overlay import ATTACHED, DETACHED, NAMED

OLDEST_LINUX = (5, 4)
"""waitid(2) for a pidfd; everything else that is newer has another way."""

FEWEST_DESCRIPTORS = 1024
"""Hard limit below which a host could not hold its children's files."""

PROBE_TIMEOUT_S = 5.0
"""Longest run of a process that tries something in the place of this one."""

# <asm/unistd.h>; the newer architectures share one table, x86_64 has its own. From 424
# on all have the same numbers.
_IS_X86_64 = os.uname().machine == "x86_64"
_SYS_CLOSE_RANGE = 436
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_SECCOMP = 317 if _IS_X86_64 else 277
_CLOSE_RANGE_CLOEXEC = 4
_LANDLOCK_CREATE_RULESET_VERSION = 1
_SECCOMP_GET_ACTION_AVAIL = 2
_SECCOMP_RET_KILL_PROCESS = 0x80000000
_PR_GET_CHILD_SUBREAPER = 37

# Exit status: 0 it worked, n < 128 unshare(2) failed with errno n, else the mapping did.
UNSHARE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
uid = os.getuid()
if libc.unshare(0x10000000) != 0:
    os._exit(ctypes.get_errno() & 127)
try:
    with open("/proc/self/setgroups", "w") as file:
        file.write("deny")
    with open("/proc/self/uid_map", "w") as file:
        file.write(f"0 {uid} 1")
except OSError as why:
    os._exit(128 + (why.errno & 127))
os._exit(0)
"""

# Exit status: errno.
_OVERLAY = """
import os, sys
sys.path.append({packages!r})
from supervisor.spawn.launchpad.layers.overlay_trials import try_as_user
os._exit(try_as_user({way!r}))
"""


class MissingError(Exception):
    """It was tried and is not there."""


class UnknownError(Exception):
    """It could not be tried."""


def linux() -> str:
    """Return the release, if it is new enough."""
    release = os.uname().release
    if os.uname().sysname != "Linux":
        raise MissingError(f"this is {os.uname().sysname}")
    major, _, rest = release.partition(".")
    minor = rest.partition(".")[0].partition("-")[0]
    if not (major.isdecimal() and minor.isdecimal()):
        raise UnknownError(f"{release} is no number of a release")
    if (int(major), int(minor)) < OLDEST_LINUX:
        raise MissingError(
            f"{release} is older than {OLDEST_LINUX[0]}.{OLDEST_LINUX[1]}"
        )
    return release


def openat2() -> str:
    """Open beneath a directory, and try to leave it."""
    flags = os.O_PATH | os.O_CLOEXEC
    resolve = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_MAGICLINKS
    top = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(syscalls.openat2(top, b".", flags, 0, resolve))
        try:
            os.close(syscalls.openat2(top, b"..", flags, 0, resolve))
        except OSError as why:
            if why.errno != errno.EXDEV:
                raise
            return "'..' is refused"
    finally:
        os.close(top)
    raise MissingError("it let '..' lead out")


def _open_unnamed_file() -> int:
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    return os.open(tempfile.gettempdir(), flags, 0o600)


def tmpfile() -> str:
    """Open an unnamed file in TMPDIR."""
    os.close(_open_unnamed_file())
    return tempfile.gettempdir()


def nowait() -> str:
    """Read with RWF_NOWAIT in TMPDIR."""
    with tempfile.TemporaryFile() as file:
        file.write(b"x")
        file.flush()
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            return "known; the data was not in memory"
    return tempfile.gettempdir()


def flock() -> str:
    """Lock TMPDIR, as a scratch directory is."""
    fd = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "known; somebody else holds it"
    finally:
        os.close(fd)
    return tempfile.gettempdir()


def pidfd() -> str:
    """Open a pidfd of this process and signal it."""
    fd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(fd, 0)
    finally:
        os.close(fd)
    return "opened, and signalled with 0"


def close_range() -> str:
    """Mark numbers close-on-exec that nobody uses."""
    first, last = 0x7FFFFFF0, 0x7FFFFFFF
    syscalls.system_call(_SYS_CLOSE_RANGE, first, last, _CLOSE_RANGE_CLOEXEC)
    return "with CLOSE_RANGE_CLOEXEC"


def subreaper() -> str:
    """Become a subreaper, and undo that."""
    before = ctypes.c_int()
    syscalls.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(before))
    syscalls.prctl(PR_SET_CHILD_SUBREAPER, 1)
    syscalls.prctl(PR_SET_CHILD_SUBREAPER, before.value)
    return "set, and set back"


def processes() -> str:
    """Return whether the host sees processes that it may not look into.

    Closed up as it is, so is its launchpad, and so are children until they exec.
    """
    if os.geteuid() == 0:
        return "root sees all"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
        mounts = [line.split() for line in table]
    shown_to = {f"gid={group}" for group in os.getgroups()}
    for fields in mounts:
        options = set(fields[-1].split(","))
        hides = {one for one in options if one.startswith("hidepid=")} - _HIDES_NOTHING
        if fields[4] == "/proc" and hides and not options & shown_to:
            raise MissingError(f"/proc is mounted with {', '.join(hides)}")
    return "all are to be seen"


_HIDES_NOTHING = frozenset({"hidepid=0", "hidepid=off"})


def children_lists() -> str:
    """Read this thread's list of children."""
    with open("/proc/thread-self/children", "rb") as file:
        file.read()
    return "CONFIG_PROC_CHILDREN"


def descriptors() -> str:
    """Return the limits on descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "no limit" if hard == resource.RLIM_INFINITY else f"{hard}"
    if hard != resource.RLIM_INFINITY and hard < FEWEST_DESCRIPTORS:
        raise MissingError(f"the hard limit is {hard}; raise it (ulimit -Hn)")
    return f"hard limit {text}, soft limit {soft}"


def user_namespace() -> str:
    """Make a user namespace in another process."""
    status = _status_of(UNSHARE)
    if status == 0:
        return "made, and a user mapped"
    code, step = status & 127, "unshare" if status < 128 else "mapping a user"
    why, how = explain_refusal("userns") if code == errno.ENOSPC else ("", "")
    raise MissingError(f"{why}; {how}" if why else f"{step}: {os.strerror(code)}")


def _status_of(program: str) -> int:
    """Run a Python program of a line or two; return what it exits with.

    Raises:
        UnknownError: it could not be run to its end.
    """
    argv = [sys.executable, "-I", "-S", "-c", program]
    try:
        pid = os.posix_spawn(argv[0], argv, {})
    except OSError as why:
        raise UnknownError(f"no process to try it in: {why.strerror}") from None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        os.waitid(os.P_PID, pid, os.WEXITED)
        raise UnknownError("there is no pidfd to wait by") from None
    try:
        status = exit_status(pidfd, PROBE_TIMEOUT_S)
    finally:
        os.close(pidfd)
    if status is None:
        raise UnknownError("the process that tried it was killed")
    return status


def landlock() -> str:
    """Ask for the version of Landlock."""
    version = syscalls.system_call(
        _SYS_LANDLOCK_CREATE_RULESET, 0, 0, _LANDLOCK_CREATE_RULESET_VERSION
    )
    return f"ABI {version}"


def seccomp() -> str:
    """Ask whether a filter may kill a process."""
    action = ctypes.c_uint32(_SECCOMP_RET_KILL_PROCESS)
    where = ctypes.addressof(action)
    syscalls.system_call(_SYS_SECCOMP, _SECCOMP_GET_ACTION_AVAIL, 0, where)
    return "filters can kill a process"


def cgroup() -> str:
    """Make a group where those of children belong, and remove it."""
    groups = [each.group for each in hierarchies() if each.kind == "v2"]
    if not groups:
        raise MissingError("this process is in no group of version 2 that is mounted")
    group = groups[0]
    fresh = os.path.join(group, f"sandhost-doctor-{os.getpid()}")  # noqa: PTH118
    os.mkdir(fresh)  # noqa: PTH102
    try:
        # The files of its controllers come with it: without them there is no bound.
        said = f"{group}: {describe_bounds((fresh,))}"
    finally:
        os.rmdir(fresh)  # noqa: PTH106
    given = ", ".join(delegation.controllers_to_enable(group))
    return (
        f"{said}; a host has {given} given on, which was not tried" if given else said
    )


def detached_layers() -> str:
    """Make an overlay of layers that are attached nowhere."""
    if os.geteuid() != 0:
        raise UnknownError("only a host that is root has a use for it")
    return _overlay(DETACHED)


def attached_layers() -> str:
    """Make an overlay of layers of a mount namespace of its own, by descriptor."""
    return _overlay(ATTACHED)


def named_layers() -> str:
    """Make an overlay of such layers, by name."""
    return _overlay(NAMED)


def used_layers() -> str:
    """Return how a workspace gets its layers here, as the rows of ``probes`` say it."""
    for what, attempt in (
        ("detached layers", detached_layers),
        ("layers by descriptor", attached_layers),
    ):
        try:
            attempt()
        except (MissingError, UnknownError):
            continue
        return what
    return "layers by name"


def _overlay(way: str) -> str:
    if os.geteuid() == 0:
        try:
            try_way(way)
        except OSError as why:
            raise MissingError(f"refused: {why.strerror}") from None
        return "made by root"
    packages = os.path.abspath(__file__).rpartition("/supervisor/")[0]  # noqa: PTH100
    status = _status_of(_OVERLAY.format(packages=packages, way=way))
    if status:
        raise MissingError(f"refused: {os.strerror(status)}")
    return "made in a user namespace"


def bubblewrap() -> str:
    """Look for the program; it is not run."""
    found = shutil.which("bwrap")
    if found is None:
        raise MissingError("no bwrap in PATH")
    return found
