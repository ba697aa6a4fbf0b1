"""The layer "landlock": the paths that the kernel lets a child open.

One probe (`version`) and one apply.

Rules:
 1. Everything the kernel can restrict is restricted; a rule gives back what is listed.
 2. A path that is not there needs no rule: it cannot be opened.
 3. The descriptors 0, 1 and 2 may be opened again as they are open (``/dev/stderr``).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat

from hostlib.linux.syscalls import NOT_THERE, caller, open_exactly, system_call
from supervisor.spawn.launchpad.layers.fresh_root import identity_of

# <asm/unistd.h>: the same on every architecture since 424.
_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446
_VERSION = 1 << 0  # LANDLOCK_CREATE_RULESET_VERSION
_PATH_BENEATH = 1  # LANDLOCK_RULE_PATH_BENEATH

# <linux/landlock.h>: LANDLOCK_ACCESS_FS_*, one bit each.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
# All rights of a version; 13 rights came with the first one.
_FILE_SYSTEM = (0, (1 << 13) - 1, (1 << 14) - 1, (1 << 15) - 1, (1 << 15) - 1)
_FILE_SYSTEM_NOW = (1 << 16) - 1
_TCP = 3  # bind and connect, since version 4
_TCP_VERSION = 4
_SCOPES = 3  # abstract unix sockets and signals, since version 6
_SCOPE_VERSION = 6

_KINDS = {
    "list": _READ_DIR,
    "read": _READ_FILE | _READ_DIR,
    "execute": _READ_FILE | _READ_DIR | _EXECUTE,
    "device": _READ_FILE | _WRITE_FILE | _IOCTL_DEV,
    "write": _FILE_SYSTEM_NOW & ~_IOCTL_DEV,
}
"""Rights beneath a path, by their word in a rule."""


class RulesetAttributes(ctypes.Structure):
    """The argument of landlock_create_ruleset(2), by the kernel's names."""

    _fields_ = (  # type: ignore[mutable-override]
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (  # type: ignore[mutable-override]
        ("allowed_access", ctypes.c_uint64),
        ("parent_fd", ctypes.c_int32),
    )


# One for all rules, and before the fork: there are some 60 of them in each child.
_rule = _Beneath()
_RULE_AT = ctypes.addressof(_rule)
_add_rule = caller(_SYS_ADD_RULE, "nnnn")


def version() -> int:
    """Ask the kernel for the version of Landlock.

    Raises:
        OSError: ENOSYS, EOPNOTSUPP: it has none, or it is switched off.
    """
    return system_call(_SYS_CREATE_RULESET, 0, 0, _VERSION)


class Ruleset:
    """Rules that were made before it was known which ones are wanted.

    Attributes:
        fd: of the kernel's object.
        no_tcp: it restricts TCP as well.
        made: by rule, (device, inode) of what the path was then, None for nothing.
    """

    __slots__ = ("fd", "made", "no_tcp")

    def __init__(self, *, no_tcp: bool) -> None:
        self.fd = create_ruleset(no_tcp=no_tcp)
        self.no_tcp = no_tcp
        self.made: dict[tuple[bytes, str], tuple[int, int] | None] = {}


def prepare(rules: tuple[tuple[bytes, str], ...], *, no_tcp: bool) -> Ruleset:
    """Make a ruleset that `apply` may then be given.

    Raises:
        OSError: it cannot be had.
    """
    ready = Ruleset(no_tcp=no_tcp)
    handled = _handled_rights(version())
    for rule in rules:
        ready.made[rule] = _allow(ready.fd, rule[0], _KINDS[rule[1]] & handled)
    return ready


def apply(
    rules: tuple[tuple[bytes, str], ...], *, no_tcp: bool, ready: Ruleset | None = None
) -> str:
    """Restrict this process and what it starts; it must have no_new_privs.

    Args:
        rules: (path, a word of `_KINDS`).
        no_tcp: also neither bind(2) nor connect(2) of TCP, where the version has it.
        ready: made before; taken if it allows nothing else, and nothing older, than
            the rules say.

    Returns:
        The applied rules, in a few words.

    Raises:
        OSError: it cannot be had; E2BIG: 16 layers are there already.
    """
    abi = version()
    handled = _handled_rights(abi)
    made: dict[tuple[bytes, str], tuple[int, int] | None] = {}
    if ready is not None and ready.no_tcp == no_tcp and _is_true(ready, rules):
        fd, made = ready.fd, ready.made
    else:
        fd = create_ruleset(no_tcp=no_tcp)
    try:
        for path, kind in rules:
            if (path, kind) not in made:
                _allow(fd, path, _KINDS[kind] & handled)
        for number in range(3):
            _allow_again(fd, number, handled)
        system_call(_SYS_RESTRICT_SELF, fd, 0)
    finally:
        os.close(fd)
    words = [f"ABI {abi}"]
    if abi >= _TCP_VERSION and no_tcp:
        words.append("no TCP")
    if abi >= _SCOPE_VERSION:
        words.append("signals and abstract sockets scoped")
    return ", ".join(words)


def _is_true(ready: Ruleset, rules: tuple[tuple[bytes, str], ...]) -> bool:
    """Return whether a prepared ruleset has wanted rules only, and no path changed."""
    if not ready.made.keys() <= set(rules):
        return False
    return all(was == identity_of(rule[0]) for rule, was in ready.made.items())


def _handled_rights(abi: int) -> int:
    """Return all rights on files that a version of Landlock restricts."""
    return _FILE_SYSTEM[abi] if abi < len(_FILE_SYSTEM) else _FILE_SYSTEM_NOW


def create_ruleset(*, no_tcp: bool) -> int:
    """Return a descriptor of a fresh ruleset that restricts all that can be."""
    abi = version()
    ruleset = RulesetAttributes(_handled_rights(abi))
    size = 8
    if abi >= _TCP_VERSION:
        size = 16
        if no_tcp:
            ruleset.handled_access_net = _TCP
    if abi >= _SCOPE_VERSION:
        size = 24
        ruleset.scoped = _SCOPES
    return system_call(_SYS_CREATE_RULESET, ctypes.addressof(ruleset), size, 0)


def _allow(ruleset: int, path: bytes, access: int) -> tuple[int, int] | None:
    """Add a rule; return what the path is, None if nothing can be reached there."""
    try:
        fd = open_exactly(path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return None  # rule 2; a path out of reach now stays so for the child
    try:
        found = os.fstat(fd)
        if not stat.S_ISDIR(found.st_mode):
            access &= _ON_FILES
        _add(ruleset, fd, access)
    finally:
        os.close(fd)
    return found.st_dev, found.st_ino


def _allow_again(ruleset: int, number: int, handled: int) -> None:
    """Let a standard descriptor be opened again, if a rule can name what it is."""
    try:
        mode = os.fstat(number).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
            return  # pipes and sockets are not restricted
        how = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
        fd = os.open(f"/proc/self/fd/{number}", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # closed, or no /proc: it can be used as it is open all the same
    access = _IOCTL_DEV if stat.S_ISCHR(mode) else 0
    if how != os.O_WRONLY:
        access |= _READ_FILE
    if how != os.O_RDONLY:
        access |= _WRITE_FILE | _TRUNCATE
    try:
        _add(ruleset, fd, access & handled)
    finally:
        os.close(fd)


def _add(ruleset: int, fd: int, access: int) -> None:
    _rule.allowed_access, _rule.parent_fd = access, fd
    try:
        _add_rule(ruleset, _PATH_BENEATH, _RULE_AT, 0)
    except OSError as error:
        if error.errno not in {errno.EBADFD, errno.EBADF}:  # of no file system at all
            raise
