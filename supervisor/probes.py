"""What this machine gives a host: each thing tried, not looked up in a list of versions.

What it is: the probes behind ``doctor``.  What it is not: a decision; the host's parts
try for themselves what they need, when they need it.

Rules of this file.

1. A probe tries the thing itself, and undoes it.  What was not tried is "unknown".
2. Each row says what was tried and what a host does without it.
3. No sandbox layer is used by this version: rows that only tell about layers say so.
"""

# ruff: noqa: PTH123 - one small file of /proc each
from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from supervisor.launchpad_kernel import PR_SET_CHILD_SUBREAPER

if TYPE_CHECKING:
    from collections.abc import Callable

PRESENT = "present"
MISSING = "missing"
UNKNOWN = "unknown"

OLDEST_LINUX = (5, 4)
"""waitid(2) for a pidfd; everything else that is newer has another way."""

FEWEST_DESCRIPTORS = 1024
"""Hard limit below which a host could not hold its children's files."""

PROBE_TIMEOUT_S = 5.0
"""For a process that tries something in the place of this one."""

_NOT_USED = "nothing is lost yet: isolation layers are not available in this version"

# <asm/unistd.h>; the newer architectures share one table, x86_64 has its own. From 424
# on all have the same numbers.
_IS_X86_64 = os.uname().machine == "x86_64"
_SYS_OPENAT2 = 437
_SYS_CLOSE_RANGE = 436
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_SECCOMP = 317 if _IS_X86_64 else 277
_RESOLVE_BENEATH_NO_MAGICLINKS = 0x08 | 0x02
_CLOSE_RANGE_CLOEXEC = 4
_LANDLOCK_CREATE_RULESET_VERSION = 1
_SECCOMP_GET_ACTION_AVAIL = 2
_SECCOMP_RET_KILL_PROCESS = 0x80000000
_PR_GET_CHILD_SUBREAPER = 37

# Exit status: 0 it worked, n < 128 unshare(2) failed with errno n, else the mapping did.
_UNSHARE = """
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


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report.

    Attributes:
        what: the thing.
        state: ``present``, ``missing`` or ``unknown``.
        detail: which version, which limit, why not.
        probed: what was tried.
        without: what a host does where it is missing.
        is_needed: no host works without it.
    """

    what: str
    state: str
    detail: str
    probed: str
    without: str
    is_needed: bool = False

    def row(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return {
            "what": self.what,
            "state": self.state,
            "detail": self.detail,
            "probed": self.probed,
            "without": self.without,
            "needed": self.is_needed,
        }


@dataclass(frozen=True, slots=True)
class _Probe:
    what: str
    attempt: Callable[[], str]
    probed: str
    without: str
    is_needed: bool = False


class _MissingError(Exception):
    """It was tried and is not there."""


class _UnknownError(Exception):
    """It could not be tried."""


def probe_machine() -> tuple[Finding, ...]:
    """Try everything; takes some 50 ms, changes nothing."""
    return tuple(_try(probe) for probe in PROBES)


def _try(probe: _Probe) -> Finding:
    try:
        state, detail = PRESENT, probe.attempt()
    except _UnknownError as why:
        state, detail = UNKNOWN, str(why)
    except _MissingError as why:
        state, detail = MISSING, str(why)
    except OSError as why:
        state, detail = MISSING, why.strerror or str(why)
    return Finding(
        probe.what, state, detail, probe.probed, probe.without, probe.is_needed
    )


def _linux() -> str:
    release = os.uname().release
    parts = release.split("-")[0].split(".")
    if os.uname().sysname != "Linux":
        raise _MissingError(f"this is {os.uname().sysname}")
    if tuple(int(part) for part in parts[:2]) < OLDEST_LINUX:
        raise _MissingError(
            f"{release} is older than {OLDEST_LINUX[0]}.{OLDEST_LINUX[1]}"
        )
    return release


class _OpenHow(ctypes.Structure):
    _fields_ = (  # type: ignore[mutable-override]
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(number: int, *arguments: object) -> int:
    """Make a system call; pointers are given as ctypes objects, the rest as long.

    Raises:
        OSError: it failed.
    """
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _openat2() -> str:
    how = _OpenHow(os.O_PATH | os.O_CLOEXEC, 0, _RESOLVE_BENEATH_NO_MAGICLINKS)
    size = ctypes.sizeof(how)
    top = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(_call(_SYS_OPENAT2, top, b".", ctypes.byref(how), size))
        try:
            os.close(_call(_SYS_OPENAT2, top, b"..", ctypes.byref(how), size))
        except OSError as why:
            if why.errno != errno.EXDEV:
                raise
            return "'..' is refused"
    finally:
        os.close(top)
    raise _MissingError("it let '..' lead out")


def _unnamed_file() -> int:
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    return os.open(tempfile.gettempdir(), flags, 0o600)


def _tmpfile() -> str:
    os.close(_unnamed_file())
    return tempfile.gettempdir()


def _nowait() -> str:
    with tempfile.TemporaryFile() as file:
        file.write(b"x")
        file.flush()
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            return "known; the data was not in memory"
    return tempfile.gettempdir()


def _flock() -> str:
    fd = os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "known; somebody else holds it"
    finally:
        os.close(fd)
    return tempfile.gettempdir()


def _pidfd() -> str:
    fd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(fd, 0)
    finally:
        os.close(fd)
    return "opened, and signalled with 0"


def _close_range() -> str:
    _call(_SYS_CLOSE_RANGE, 0x7FFFFFF0, 0x7FFFFFFF, _CLOSE_RANGE_CLOEXEC)
    return "with CLOSE_RANGE_CLOEXEC"


def _subreaper() -> str:
    before = ctypes.c_int()
    zeros = (ctypes.c_ulong(0),) * 3
    for option, value in (
        (_PR_GET_CHILD_SUBREAPER, ctypes.byref(before)),
        (PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1)),
    ):
        if _libc.prctl(option, value, *zeros) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _libc.prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(before.value), *zeros)
    return "set, and set back"


def _children_lists() -> str:
    with open("/proc/thread-self/children", "rb") as file:
        file.read()
    return "CONFIG_PROC_CHILDREN"


def _descriptors() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "no limit" if hard == resource.RLIM_INFINITY else f"{hard}"
    if hard != resource.RLIM_INFINITY and hard < FEWEST_DESCRIPTORS:
        raise _MissingError(f"the hard limit is {hard}; raise it (ulimit -Hn)")
    return f"hard limit {text}, soft limit {soft}"


def _user_namespace() -> str:
    status = _status_of(_UNSHARE)
    if status == 0:
        return "made, and a user mapped"
    code, step = status & 127, "unshare" if status < 128 else "mapping a user"
    raise _MissingError(f"{step}: {os.strerror(code)}")


def _status_of(program: str) -> int:
    """Run a Python program of a line or two; return what it exits with.

    Raises:
        _UnknownError: it could not be run to its end.
    """
    argv = [sys.executable, "-I", "-S", "-c", program]
    try:
        pid = os.posix_spawn(argv[0], argv, {})
    except OSError as why:
        raise _UnknownError(f"no process to try it in: {why.strerror}") from None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        os.waitid(os.P_PID, pid, os.WEXITED)
        raise _UnknownError("there is no pidfd to wait by") from None
    try:
        in_time = bool(select.select([pidfd], [], [], PROBE_TIMEOUT_S)[0])
        if not in_time:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    finally:
        os.close(pidfd)
    if not in_time or ended is None or ended.si_code != os.CLD_EXITED:
        raise _UnknownError("the process that tried it was killed")
    return ended.si_status


def _landlock() -> str:
    version = _call(
        _SYS_LANDLOCK_CREATE_RULESET, 0, 0, _LANDLOCK_CREATE_RULESET_VERSION
    )
    return f"ABI {version}"


def _seccomp() -> str:
    action = ctypes.c_uint32(_SECCOMP_RET_KILL_PROCESS)
    _call(_SYS_SECCOMP, _SECCOMP_GET_ACTION_AVAIL, 0, ctypes.byref(action))
    return "filters can kill a process"


def _cgroup() -> str:
    group = _own_cgroup()
    fresh = os.path.join(group, f"sandhost-doctor-{os.getpid()}")  # noqa: PTH118
    os.mkdir(fresh)  # noqa: PTH102
    os.rmdir(fresh)  # noqa: PTH106
    return group


def _own_cgroup() -> str:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
        for line in table:
            fields = line.split()
            if fields[fields.index("-") + 1] == "cgroup2":
                mount = fields[4].replace("\\040", " ")
                break
        else:
            raise _MissingError("no cgroup2 file system is mounted")
    with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as table:
        for line in table:
            if line.startswith("0::"):
                return mount + line[3:].strip().rstrip("/")
    raise _MissingError("this process is in no group of version 2")


def _bubblewrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise _MissingError("no bwrap in PATH")
    return found


PROBES = (
    _Probe("Linux", _linux, "uname(2)", "no host: it cannot wait by pidfd", True),
    _Probe("pidfds", _pidfd, "pidfd_open(2) of itself", "no host", True),
    _Probe(
        "child subreaper",
        _subreaper,
        "prctl(2) PR_SET_CHILD_SUBREAPER",
        "no host: detached processes would outlive their child",
        is_needed=True,
    ),
    _Probe(
        "descriptors",
        _descriptors,
        "getrlimit(2) RLIMIT_NOFILE",
        "no host: children's files need descriptors",
        is_needed=True,
    ),
    _Probe(
        "flock in TMPDIR",
        _flock,
        "flock(2) on the directory",
        "no private root or TMPDIR: nobody could tell whose they were",
        is_needed=True,
    ),
    _Probe(
        "openat2",
        _openat2,
        "openat2(2) of '.' and '..' with RESOLVE_BENEATH",
        "names are walked one part at a time with O_NOFOLLOW; slower, as safe",
    ),
    _Probe(
        "close_range",
        _close_range,
        "close_range(2) on unused numbers",
        "descriptors are marked one by one; slower",
    ),
    _Probe(
        "lists of children",
        _children_lists,
        "read /proc/thread-self/children",
        "every process of the machine is read to end a tree; slower",
    ),
    _Probe(
        "O_TMPFILE in TMPDIR",
        _tmpfile,
        "open(2) of an unnamed file",
        "files to be published have a name (.sandhost-*) meanwhile, which a crash of"
        " the machine can leave",
    ),
    _Probe(
        "RWF_NOWAIT in TMPDIR",
        _nowait,
        "preadv2(2) of a file just written",
        "every READ goes through a thread; some 100 us slower",
    ),
    _Probe("Landlock", _landlock, "landlock_create_ruleset(2), version", _NOT_USED),
    _Probe("seccomp filters", _seccomp, "seccomp(2) GET_ACTION_AVAIL", _NOT_USED),
    _Probe(
        "user namespaces",
        _user_namespace,
        "unshare(2) and a mapping, in a process of its own",
        _NOT_USED,
    ),
    _Probe("cgroup v2", _cgroup, "mkdir(2) and rmdir(2) in its own group", _NOT_USED),
    _Probe("bubblewrap", _bubblewrap, "looked for bwrap in PATH; not run", _NOT_USED),
)
"""Everything that is tried, what a host needs first."""
