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
5. Who looks may be root, and what it looks at may be the child's: a link that the child
   may have made leads to what is the child's or what it sees anyhow, or it leads nowhere,
   and a program of a project brings nothing along that it names itself.  The one that
   whoever runs the host has named is followed wherever it leads (rule 2).
6. A path of a rule has no links.  Whoever uses it opens it without following any
   (``launchpad_kernel.open_exactly``): what is replaced meanwhile is not there.
"""

# ruff: noqa: PTH100, PTH112, PTH115, PTH116, PTH118, PTH119, PTH120, PTH123 - links are followed
# one by one, and what is asked for is text
from __future__ import annotations

import os
import stat
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

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
        cwd: the working directory, without links; "" if it is none that it may be in.
    """

    rules: tuple[Rule, ...]
    links: tuple[tuple[str, str], ...]
    cwd: str = ""

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
            if rule.kind == "list" or f"{rule.path}/".startswith("/proc/"):
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
    """Collects rules, and the links that lead to them.

    Args:
        view: what there is already.
    """

    def __init__(self, view: View | None = None) -> None:
        self.rules: dict[str, Rule] = {}
        self.links: dict[str, str] = {}
        self._theirs: tuple[str, ...] = ()
        if view is not None:
            self.rules = {rule.path: rule for rule in view.rules}
            self.links = dict(view.links)

    def belong(self, paths: Iterable[str]) -> None:
        """Take note of what the child may write: links in there may be the child's.

        One after the other: what lies in another one is not followed out of that.
        """
        for path in paths:
            real = self._without_links(path)
            if real is not None and real != "/":
                self._theirs += (real,)

    def add(self, path: str, kind: str, *, mapped: bool = False) -> str:
        """Allow something; nothing happens if it is not there.

        Returns:
            Its path without links, "" if there is none.
        """
        return self._allow(self._walk(path), kind, mapped=mapped)

    def _allow(self, hops: list[str], kind: str, *, mapped: bool) -> str:
        if not hops:
            return ""
        real = hops[-1]
        # The system's own is everybody's to read, as it is.
        mapped = mapped and not real.startswith(_SYSTEM_TOPS)
        known = self.rules.get(real)
        if known is None or known.kind == "list" or kind == "write":
            self.rules[real] = Rule(real, kind, mapped)
        return real

    def _walk(self, path: str, *, is_trusted: bool = False) -> list[str]:
        """Follow a name link by link; return each file that the last part names.

        Args:
            path: the name.
            is_trusted: links that may be the child's are followed as all others.

        Returns:
            None, where such a link leads to what is neither the child's nor seen by it.
        """
        hops: list[str] = []
        maker = ""
        for _ in range(_LINKS):
            real = self._without_links(os.path.dirname(path))
            if real is None:
                break
            name = os.path.basename(path)
            place = os.path.join(real, name) if name else real
            if maker and not self._may_lead_to(maker, place):
                return []
            try:
                mode = os.lstat(place).st_mode
                if not stat.S_ISLNK(mode):
                    return [*hops, place]
                target = os.readlink(place)
            except OSError:
                break
            hops.append(place)
            if not is_trusted:
                maker = maker or _holder(self._theirs, place)
            self.links[place] = target
            path = os.path.normpath(os.path.join(real, target))
        return hops

    def _may_lead_to(self, maker: str, place: str) -> bool:
        seen = (rule.path for rule in self.rules.values() if rule.kind != "list")
        return bool(_holder((maker, *seen), place))

    def _without_links(self, path: str) -> str | None:
        """Return a directory without links, and take note of those on its way."""
        if path in ("", "/"):
            return "/"
        hops = self._walk(path)
        return hops[-1] if hops else None

    def add_program(self, path: str) -> None:
        """Allow a program, what its ``#!`` line names, and their installations."""
        for _ in range(4):  # as deep as the kernel follows "#!"
            hops = self._walk(path, is_trusted=True)
            for hop in hops:
                self._add_installation(hop)
            self._allow(hops, "execute", mapped=True)
            interpreter = _interpreter(path)
            if interpreter is None:
                return
            path = interpreter

    def add_tool(self, path: str, program_files: tuple[str, ...]) -> None:
        """Allow a program that may be a project's own, and then the child's (rule 5)."""
        hops = self._walk(path)
        if hops and not _holder(self._theirs, hops[0]):
            self.add_program(hops[0])
            return
        self._allow(hops, "execute", mapped=True)
        for hop in hops:
            if not _holder(self._theirs, hop):
                self._add_installation(hop)
        name = _name_in_env(hops[-1]) if hops else None
        for directory in program_files if name else ():
            if os.access(f"{directory}/{name}", os.X_OK):
                self.add_program(f"{directory}/{name}")
                return

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
    words = _first_line(path)
    if not words:
        return None
    name = _named(words)
    return (_on_path(name) if name else None) or words[0]


def _name_in_env(path: str) -> str | None:
    """Return the bare name that a ``#!`` line has env(1) look for, None for others."""
    words = _first_line(path, os.O_NOFOLLOW)
    name = _named(words) if words else None
    return None if name is None or "/" in name else name


def _named(words: list[str]) -> str | None:
    if os.path.basename(words[0]) == "env":
        for word in words[1:]:
            if not word.startswith("-") and "=" not in word:
                return word
    return None


def _first_line(path: str, how: int = 0) -> list[str]:
    """Return the words of a ``#!`` line; none, where there is no such line."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return []
        # What it is may have changed: a FIFO would be waited for.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | how)
        with open(fd, "rb") as file:
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            line = file.readline(256) if is_file else b""
    except OSError:
        return []
    if not line.startswith(b"#!"):
        return []
    return [os.fsdecode(word) for word in line[2:].split()]


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
    theirs: Iterable[str] = (),
) -> View:
    """Return what one child sees.

    Args:
        executable: the absolute path of its program.
        cwd: its working directory.
        own: directories that are the child's to write.
        program_files: more that it may read and execute.
        shared: directories that it may write, and that are the host's: what is root's
            there is shown as its own.  Where there are any, the program is a tool.
        theirs: directories that it may write by other means, or that hold its own.
    """
    finder = _Finder(_common())
    own = tuple(own)
    shared = tuple(shared)
    program_files = tuple(program_files)
    finder.belong((*theirs, *own, *shared))
    for path in program_files:
        finder.add(path, "execute", mapped=True)
    if shared:
        finder.add_tool(executable, program_files)
    else:
        finder.add_program(executable)
    for path in shared:
        finder.add(path, "write", mapped=True)
    inside = cwd
    if cwd != "/" and not _holder(shared, cwd):
        # A directory that holds this child's own, /tmp say, holds other children's too:
        # those are root's, and must not become this one's to read.
        around = any(_holder([cwd], path) for path in own)
        inside = finder.add(cwd, "execute", mapped=not around)
    for path in own:
        finder.add(path, "write")
    return View(tuple(finder.rules.values()), tuple(finder.links.items()), inside)


def common_view() -> View:
    """Return what a process sees that has nothing of any child's."""
    return _common()._replace(cwd="/")
