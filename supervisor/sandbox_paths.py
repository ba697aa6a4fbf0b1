"""What of the file system a sandboxed child may see, beside what comes through FD 3.

What it is: a list of paths with what may be done beneath each, made in the host, which
may look everywhere.  What it is not: the layers that keep it (``launchpad_landlock``,
``launchpad_mounts``).

Rules of this file.

1. System directories are read and executed; of ``/etc`` what programs need to start, of
   ``/dev`` what has no memory of its own.
2. COMMAND, what its ``#!`` line names, the installation of each (found by following its
   symbolic links, one after the other) and the working directory are read and executed,
   wherever they are.  Of an installation only the directories that hold programs and
   libraries: ``~/.local`` holds programs, and secrets beside them.
3. A working directory ``/`` adds nothing: a daemon starts there, and everything is
   beneath it.
4. TMPDIR and the directory of the child's sockets are its own.  Its private root, and
   the grants, are not on the list: they come through FD 3.
"""

# ruff: noqa: PTH100, PTH112, PTH115, PTH118, PTH119, PTH120, PTH123 - links are followed
# one by one, and what is asked for is text
from __future__ import annotations

import os
import stat
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")

_SYSTEM_TOPS = tuple(f"{path}/" for path in _SYSTEM)

_ETC = tuple(
    f"/etc/{name}"
    for name in (
        "alternatives", "bash.bashrc", "ca-certificates", "crypto-policies", "fonts",
        "gai.conf", "group", "host.conf", "hostname", "hosts", "inputrc", "java",
        "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.conf",
        "localtime", "magic", "mime.types", "networks", "nsswitch.conf", "os-release",
        "passwd", "perl", "pki", "profile", "profile.d", "protocols", "python3",
        "python3.11", "python3.12", "python3.13", "resolv.conf", "services", "shells",
        "ssl", "terminfo", "timezone", "xattr.conf",
    )
)  # fmt: skip

_KERNEL = (
    "/proc",
    "/sys/devices/system/cpu",
)

_DEVICES = tuple(
    f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")
)

_PARTS = ("bin", "lib", "lib64", "libexec", "ssl", "pyvenv.cfg")
"""Of an installation."""

_SHIMS_PARTS = (
    *("bin", "lib", "libexec", "plugins", "shims"),
    *("versions", "installs", "version"),
)
"""Of what keeps several versions (pyenv, rbenv, nodenv, asdf) behind shims."""

_LINKS = 40
"""As many symbolic links as the kernel follows for one name."""


class Rule(NamedTuple):
    """What may be done with a path and all beneath it.

    Attributes:
        path: without symbolic links.
        kind: ``list``, ``read``, ``execute``, ``write`` or ``device``.
        mapped: root's files there are shown as the child's, if it is another user.
    """

    path: str
    kind: str
    mapped: bool = False


class View(NamedTuple):
    """What a child sees.

    Attributes:
        rules: what may be done where.
        links: (path, target) of the symbolic links on the way.
    """

    rules: tuple[Rule, ...]
    links: tuple[tuple[str, str], ...]

    def landlock(self) -> tuple[tuple[bytes, str], ...]:
        """Return the rules as ``launchpad_landlock`` takes them."""
        return tuple((os.fsencode(rule.path), rule.kind) for rule in self.rules)

    def everything_listed(self) -> View:
        """Return it with every directory to be listed: nothing else is mounted."""
        return self._replace(rules=(*self.rules, Rule("/", "list")))

    def mounts(self) -> tuple[tuple[bytes, str, bool], ...]:
        """Return the trees as ``launchpad_mounts`` takes them, outer ones first.

        ``/proc`` is its own affair; ``/etc`` is there as a whole, and Landlock says
        what of it is read.  One that lies in another of the same kind is there already.
        """
        trees: dict[str, Rule] = {}
        around: list[Rule] = []  # the trees that the path at hand lies in
        whole = (Rule("/etc", "read"),)
        for rule in sorted((*self.rules, *whole), key=_parts):
            if rule.kind == "list" or rule.path == "/proc":
                continue
            while around and not rule.path.startswith(around[-1].path + "/"):
                around.pop()
            if not around or not _gives(around[-1], rule):
                trees[rule.path] = rule
                around.append(rule)
        return tuple((os.fsencode(r.path), r.kind, r.mapped) for r in trees.values())

    def symlinks(
        self, trees: tuple[tuple[bytes, str, bool], ...]
    ) -> tuple[tuple[bytes, bytes], ...]:
        """Return the links that are not beneath one of the trees."""
        tops = tuple(path + b"/" for path, _, _ in trees)
        links = ((os.fsencode(p), os.fsencode(to)) for p, to in sorted(self.links))
        return tuple((path, to) for path, to in links if not path.startswith(tops))


def _gives(tree: Rule, rule: Rule) -> bool:
    """Tell whether what lies in a tree is there as a rule wants it."""
    # Nothing tells a mount to be read from one to be executed from.
    kinds = {tree.kind, rule.kind}
    alike = len(kinds) == 1 or kinds == {"read", "execute"}
    return alike and tree.mapped == rule.mapped


def _parts(rule: Rule) -> list[str]:
    """Return what sorts a path right after what it lies in."""
    return rule.path.split("/")


def _holder(places: Iterable[str], path: str) -> str:
    """Return the nearest of some places that a path lies in; "" for none."""
    around = [p for p in places if p == path or path.startswith(p.rstrip("/") + "/")]
    return max(around, key=len, default="")


class _Finder:
    """Collects rules, and the links that lead to them."""

    def __init__(self) -> None:
        self.rules: dict[str, Rule] = {}
        self.links: dict[str, str] = {}

    def add(self, path: str, kind: str, *, mapped: bool = False) -> str:
        """Allow something; nothing happens if it is not there.

        Returns:
            Its path without links, "" if there is none.
        """
        hops = list(self._walk(path))
        if not hops:
            return ""
        real = hops[-1]
        # The system's own is everybody's to read, as it is.
        mapped = mapped and not real.startswith(_SYSTEM_TOPS)
        known = self.rules.get(real)
        if known is None or known.kind == "list" or kind == "write":
            self.rules[real] = Rule(real, kind, mapped)
        return real

    def _walk(self, path: str) -> Iterator[str]:
        """Follow a name link by link; yield each file that the last part names."""
        for _ in range(_LINKS):
            real = self._without_links(os.path.dirname(path))
            if real is None:
                return
            name = os.path.basename(path)
            place = os.path.join(real, name) if name else real
            try:
                mode = os.lstat(place).st_mode
            except OSError:
                return
            yield place
            if not stat.S_ISLNK(mode):
                return
            target = os.readlink(place)
            self.links[place] = target
            path = os.path.normpath(os.path.join(real, target))

    def _without_links(self, path: str) -> str | None:
        """Return a directory without links, and take note of those on its way."""
        if path in ("", "/"):
            return "/"
        hops = list(self._walk(path))
        return hops[-1] if hops else None

    def add_program(self, path: str) -> None:
        """Allow a program, what its ``#!`` line names, and their installations."""
        for _ in range(4):  # as deep as the kernel follows "#!"
            for hop in list(self._walk(path)):
                self._add_installation(hop)
            self.add(path, "execute", mapped=True)
            interpreter = _interpreter(path)
            if interpreter is None:
                return
            path = interpreter

    def _add_installation(self, program: str) -> None:
        prefix, kind = os.path.split(os.path.dirname(program))
        # What stands in "shims" finds the program among installed versions by itself.
        parts = {"bin": _PARTS, "sbin": _PARTS, "shims": _SHIMS_PARTS}.get(kind, ())
        if prefix in ("/", "/usr"):
            return
        for part in parts:
            self.add(f"{prefix}/{part}", "execute", mapped=True)


def _interpreter(path: str) -> str | None:
    """Return the program of a ``#!`` line; through env(1), what that starts."""
    try:
        with open(path, "rb") as file:
            line = file.readline(256)
    except OSError:
        return None
    if not line.startswith(b"#!"):
        return None
    words = [os.fsdecode(word) for word in line[2:].split()]
    if not words:
        return None
    if os.path.basename(words[0]) == "env":
        for word in words[1:]:
            if not word.startswith("-") and "=" not in word:
                return _on_path(word) or words[0]
    return words[0]


def _on_path(name: str) -> str | None:
    for entry in os.environ.get("PATH", os.defpath).split(":"):
        candidate = f"{entry or '.'}/{name}"
        if os.access(candidate, os.X_OK) and not os.path.isdir(candidate):
            return os.path.abspath(candidate)
    return None


@cache
def _common() -> View:
    """Return what every child sees: the system, and this very program."""
    finder = _Finder()
    for path in _SYSTEM:
        finder.add(path, "execute")
    for path in (*_ETC, *_KERNEL):
        finder.add(path, "read")
    for path in _DEVICES:
        finder.add(path, "device")
    import sys  # noqa: PLC0415 - one use

    finder.add_program(sys.executable)
    for prefix in (sys.prefix, sys.base_prefix):
        finder._add_installation(f"{prefix}/bin/python")  # noqa: SLF001 - same file
    packages = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    finder.add(packages, "list")  # an import looks into the directory first
    for package in ("supervisor", "vfs", "protocol"):
        finder.add(f"{packages}/{package}", "execute", mapped=True)
    return View(tuple(finder.rules.values()), tuple(finder.links.items()))


def view_of(
    executable: str,
    cwd: str,
    own: Iterable[str],
    program_files: Iterable[str] = (),
    shared: Iterable[str] = (),
) -> View:
    """Return what one child sees.

    Args:
        executable: the absolute path of its program.
        cwd: its working directory.
        own: directories that are the child's to write.
        program_files: more that it may read and execute.
        shared: directories that it may write, and that are the host's: what is root's
            there is shown as its own.
    """
    common = _common()
    finder = _Finder()
    finder.rules = {rule.path: rule for rule in common.rules}
    finder.links = dict(common.links)
    finder.add_program(executable)
    for path in program_files:
        finder.add(path, "execute", mapped=True)
    own = tuple(own)
    shared = tuple(shared)
    for path in shared:
        finder.add(path, "write", mapped=True)
    if cwd != "/" and not _holder(shared, cwd):
        # A directory that holds this child's own, /tmp say, holds other children's too:
        # those are root's, and must not become this one's to read.
        around = any(_holder([cwd], path) for path in own)
        finder.add(cwd, "execute", mapped=not around)
    for path in own:
        finder.add(path, "write")
    return View(tuple(finder.rules.values()), tuple(finder.links.items()))
