"""Files that a sandboxed child sees beside those through FD 3: paths and rights.

1. System directories: read and execute; ``/etc`` for starts, ``/dev`` without memory.
2. COMMAND, its ``#!`` program, their installations (programs and libraries only, npm
   packages, venvs) and the working directory: read and execute.
3. A working directory ``/`` adds nothing: a daemon starts there.
4. TMPDIR and the directory of sockets are its own; root and grants come through FD 3.
   Directories around them, and a daemon's own, are hidden.
5. A link of the child leads only to files that it may read or sees anyhow.
6. Programs that all may read are not mapped to its user: an owner may take leases.
"""

# ruff: noqa: PTH100, PTH116, PTH120, PTH208 - what is asked for is text
from __future__ import annotations

import contextlib
import os
import stat
import time
from functools import lru_cache
from typing import TYPE_CHECKING

from hostlib.linux.syscalls import open_exactly
from supervisor.sandbox.links import Links, Walk, holder
from supervisor.sandbox.programs import (
    base_of_venv,
    find,
    interpreter,
    modules_around,
    name_in_env,
)
from supervisor.sandbox.view import PathRule, View

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.sandbox.shown_files import ShownFiles

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")

_AS_THEY_ARE = (*(f"{path}/" for path in _SYSTEM), "/dev/", "/sys/")
"""Directories beneath which files keep their owners."""

_USERS = "/dev/shm/"  # noqa: S108 - no file
"""The exception among them: beneath it, files belong to users as in ``/tmp``."""

_ETC = tuple(
    f"/etc/{name}"
    for name in (
        "adduser.conf", "alternatives", "bash.bashrc", "ca-certificates", "crypto-policies",
        "debian_version", "fonts",
        "gai.conf", "gitconfig", "group", "host.conf", "hostname", "hosts", "inputrc",
        "java", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.conf",
        "localtime", "login.defs", "lsb-release", "magic", "mime.types", "networks", "nsswitch.conf", "os-release",
        "passwd", "perl", "profile", "profile.d", "protocols", "python3",
        "python3.11", "python3.12", "python3.13", "resolv.conf", "services", "shells", "skel",
        "terminfo", "timezone", "xattr.conf",
    )
)  # fmt: skip

_ETC_KINDS = ("-release", "-openjdk")
"""Suffixes of names in ``/etc`` that tell which system, or which Java, this is."""

_BESIDE_KEYS = ("/etc/ssl", "/etc/pki", "/etc/pki/tls")
"""Directories of certificates and settings, with private keys among them."""

_TICK_NS = 100_000_000
"""Two changes of a directory within this time may have the same time stamp."""

_KERNEL = (
    "/proc",
    "/sys/devices/system/cpu",
)

_DEVICES = tuple(
    f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")
)

_PARTS = ("bin", "lib", "lib64", "libexec", "ssl", "pyvenv.cfg")
"""Names of the parts of an installation."""

_SHIMS_PARTS = (
    *("bin", "lib", "libexec", "plugins", "shims"),
    *("versions", "installs", "version"),
)
"""Parts of a manager of versions with shims (pyenv, rbenv, nodenv, asdf)."""


_NOTHING = View((), ())


class _Finder:
    """Collects rules, and the links that lead to them.

    Args:
        view: the rules and links of before.
    """

    def __init__(self, view: View = _NOTHING) -> None:
        self.rules = {rule.path: rule for rule in view.rules}
        self.links = Links(view.links, self._list_seen)

    def _list_seen(self) -> Iterator[str]:
        """Yield the places that a link of the child's may lead to (rule 5)."""
        for rule in self.rules.values():
            # ``/proc/self`` is another directory for the host than for the child.
            if rule.kind != "list" and rule.path != "/proc":
                yield rule.path

    def view(self, cwd: str) -> View:
        """Return what was found."""
        links = tuple(self.links.followed.items())
        return View(tuple(self.rules.values()), links, cwd)

    def add(self, path: str, kind: str, *, mapped: bool = False) -> str:
        """Allow something; nothing happens if it is not there.

        Returns:
            Its path without links, "" if there is none.
        """
        return self._allow(self.links.walk(path), kind, mapped=mapped)

    def _allow(self, walk: Walk, kind: str, *, mapped: bool) -> str:
        real = walk.real
        if not real:
            return ""
        if walk.maker and not holder(self.links.readable, real):
            # It is there to be seen, and as it is: a link of the child's gives nothing.
            return "" if kind == "write" else real
        if walk.maker and kind == "write":
            return ""
        # The system's own is everybody's to read, as it is.
        is_users = real.startswith(_USERS) or not real.startswith(_AS_THEY_ARE)
        mapped = mapped and is_users
        known = self.rules.get(real)
        if known is None or known.kind == "list" or kind == "write":
            self.rules[real] = PathRule(real, kind, mapped)
        return real

    def add_installed(self, path: str, *, mapped: bool = True) -> None:
        """Allow a program, or a part of an installation, if it exists.

        Args:
            path: of it.
            mapped: root's files there are shown as the child's, if they are not
                everybody's to read.
        """
        self._allow_installed(self.links.walk(path), mapped=mapped)

    def _allow_installed(self, walk: Walk, *, mapped: bool) -> None:
        if mapped and not self._is_theirs(walk.real):
            mapped = not _is_everybodys_to_read(walk.real)
        self._allow(walk, "execute", mapped=mapped)

    def expose(self, path: str) -> str:
        """Allow to read and execute what the operator shows by name (``exposed``).

        Returns:
            Its path without links; "" if it is not there, or a link on its way may be the
            child's.
        """
        walk = self.links.walk(path)
        if not walk.real or walk.maker:
            return ""
        self._show(walk.real, "execute")
        return walk.real

    def show(self, path: str) -> None:
        """Allow to read a path without links that is granted by FD 3 as well."""
        if self.links.walk(path).real == path:
            self._show(path, "read")

    def _show(self, real: str, kind: str) -> None:
        known = self.rules.get(real)
        if known is None or known.kind in {"list", "read"}:
            is_users = real.startswith(_USERS) or not real.startswith(_AS_THEY_ARE)
            is_mapped = is_users and not _is_everybodys(real)
            self.rules[real] = PathRule(real, kind, is_mapped, if_possible=True)

    def add_program(self, path: str) -> None:
        """Allow a program, the program of its ``#!`` line, and their installations."""
        is_named_by_them = False
        for _ in range(4):  # as deep as the kernel follows "#!"
            walk = self.links.walk(path, is_trusted=True)
            if not walk.real or not os.path.isfile(walk.real):  # noqa: PTH113 - text
                return
            is_named_by_them |= any(map(self._is_theirs, walk.hops))
            is_foreign = is_named_by_them and not self._is_theirs(walk.real)
            if is_foreign and not os.access(walk.real, os.X_OK):
                return
            # The target of a child's file or link is there as it is to others.
            for hop in walk.hops:
                prefix = os.path.dirname(os.path.dirname(hop))
                is_mapped = not is_named_by_them or self._is_theirs(prefix)
                self.add_installation(hop, mapped=is_mapped)
            self._allow_installed(walk, mapped=not is_foreign)
            following = interpreter(walk.real)
            if following is None:
                return
            path = following

    def add_tool(self, path: str) -> None:
        """Allow a program that may be a project's own, and then the child's (rule 5)."""
        walk = self.links.walk(path)
        if walk.program:
            directory, name = os.path.split(walk.program)
            self._add_named(name, (directory,))
        if not walk.real:
            return
        if not self._is_theirs(walk.hops[0]):
            self.add_program(walk.hops[0])
            return
        self._allow(walk, "execute", mapped=True)
        for hop in walk.hops:
            if not self._is_theirs(hop):
                self.add_installation(hop)
        self._add_named(name_in_env(walk.real), self.links.programs)

    def _add_named(self, name: str | None, directories: tuple[str, ...]) -> None:
        """Allow the program of a bare name that one of some directories has."""
        program = find(name, directories) if name else None
        if program is not None:
            self.add_program(program)

    def _is_theirs(self, path: str) -> bool:
        return bool(holder(self.links.theirs, path))

    def add_installation(self, program: str, *, mapped: bool = True) -> None:
        """Allow the programs and libraries that lie around a program."""
        modules = modules_around(program)
        if modules and not modules.startswith(_AS_THEY_ARE):
            self.add_installed(modules, mapped=mapped)
        self._add_parts(program, mapped=mapped)
        prefix, kind = os.path.split(os.path.dirname(program))
        if kind == "bin" and not self._is_theirs(prefix):
            base = base_of_venv(prefix)
            if base:
                self._add_parts(f"{base}/python", mapped=mapped)

    def _add_parts(self, program: str, *, mapped: bool) -> None:
        prefix, kind = os.path.split(os.path.dirname(program))
        # A program in "shims" finds the installed version by itself.
        parts = {"bin": _PARTS, "sbin": _PARTS, "shims": _SHIMS_PARTS}.get(kind, ())
        if prefix in ("/", "/usr"):
            return
        for part in parts:
            self.add_installed(f"{prefix}/{part}", mapped=mapped)


def _public() -> Iterator[str]:
    """Yield what everybody reads of what lies beside private keys."""
    for top in _BESIDE_KEYS:
        found = []
        with contextlib.suppress(OSError):
            found = [f"{top}/{name}" for name in os.listdir(top)]
        for path in found:
            with contextlib.suppress(OSError):  # a link to nothing
                is_apart = path.endswith("/private") or path in _BESIDE_KEYS
                if not is_apart and os.stat(path).st_mode & stat.S_IROTH:
                    yield path


def _list_etc() -> Iterator[str]:
    """Yield what is read of ``/etc`` for the ends of its names."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/etc"):
            if name.endswith(_ETC_KINDS):
                yield f"/etc/{name}"


def common_view() -> View:
    """Return what every child sees: the system and this program, nothing of a child's."""
    mtimes_ns = tuple(map(_mtime_ns, ("/etc", *_BESIDE_KEYS)))
    if 0 <= time.time_ns() - max(mtimes_ns) < _TICK_NS:
        return _find_common_view()
    return _common_view_at(mtimes_ns)


# 3 ms: found again when a name came into the directories of settings, or left them.
@lru_cache(maxsize=1)
def _common_view_at(_mtimes_ns: tuple[int, ...]) -> View:
    return _find_common_view()


def _find_common_view() -> View:
    finder = _Finder()
    for path in _SYSTEM:
        finder.add(path, "execute")
    for path in (*_ETC, *_list_etc(), *_public(), *_KERNEL):
        finder.add(path, "read")
    for path in _DEVICES:
        finder.add(path, "device")
    import sys  # noqa: PLC0415 - one use

    finder.add_program(sys.executable)
    for prefix in (sys.prefix, sys.base_prefix):
        finder.add_installation(f"{prefix}/bin/python")
    packages = os.path.abspath(__file__).rpartition("/supervisor/")[0]
    finder.add(packages, "list")  # an import looks into the directory first
    for package in ("supervisor", "vfs", "hostlib", "protocol"):
        finder.add_installed(f"{packages}/{package}")
    return finder.view("/")


def view_of(executable: str, files: ShownFiles) -> View:
    """Return what one child sees, before its mounts and what is hidden from it.

    Args:
        executable: the absolute path of its program.
        files: the files that it is to see.
    """
    finder = _Finder(common_view())
    own, shared = (*files.own, *files.kept), files.shared
    finder.links.belong({**files.theirs, **dict.fromkeys((*own, *shared), True)})
    for path in (*files.programs, *files.unwritten):
        finder.add_installed(path)
        finder.links.has_programs(path)
    if shared:
        finder.add_tool(executable)
    else:
        finder.add_program(executable)
    for path in shared:
        finder.add(path, "write", mapped=True)
    inside = files.cwd
    if inside != "/" and not holder(shared, inside):
        is_ours = not _is_everybodys(finder.links.walk(inside).real)
        inside = finder.add(inside, "execute", mapped=is_ours)
    for path in own:
        finder.add(path, "write")
    if files.home:
        finder.add(files.home, "write", mapped=True)
    shown = tuple((path, finder.expose(path)) for path in files.exposed)
    for path in files.readable:
        finder.show(path)
    return finder.view(inside)._replace(exposed=shown)


def _is_everybodys(path: str) -> bool:
    """Tell whether everybody keeps files in a directory without links, as in ``/tmp``.

    Root's files there are no child's business: they are shown as they are.
    """
    mode = _mode(path)
    return bool(mode & stat.S_ISVTX and mode & stat.S_IWOTH)


def _is_everybodys_to_read(path: str) -> bool:
    """Tell whether all users may read and execute a path as its owner may.

    For a directory, this does not include the files in it: they have their own modes.
    """
    mode = _mode(path)
    wanted = stat.S_IROTH | (stat.S_IXOTH if mode & stat.S_IXUSR else 0)
    return mode & wanted == wanted


def _mtime_ns(path: str) -> int:
    """Return when names of a directory changed last; 0 where none is there."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _mode(path: str) -> int:
    """Return the mode of a path without links; 0 where nothing is there."""
    try:
        fd = open_exactly(os.fsencode(path))
    except OSError:  # which is told by what enters it
        return 0
    try:
        return os.fstat(fd).st_mode
    finally:
        os.close(fd)
