"""The key of every host of the tests, and the search for it in others' view.

    assert not found_in(data)              # in one text
    told("stdout of a command", data)      # a text; the test fails at its end if it is there
    search(directory)                      # all that is beneath a directory

The key (each process of tests has its own), how it could show, the account of where it
was looked for, and `held`, by which a host in the test's own process holds it.

The search is for the middle of the key, which is 24 hexadecimal digits: it shows as it
is in a URL, in JSON or in half a key, and the number of other forms is small.
"""

import base64
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

VARIABLE = "OPENAI_API_KEY"
"""Of the environment: where a host has its key from when no file is configured."""

MIDDLE = secrets.token_hex(12)
KEY = f"sk-canary+{MIDDLE}/aa=b"
"""The key that must show nowhere. It has what URLs, JSON and base64 each write in another way."""

MASK = 0x95
"""Of each byte of what children look for; `children/puppet.py` has it as well."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

PIECE_BYTES = 1 << 20
"""So much of a file is looked at once."""


def forms(middle: str = MIDDLE) -> tuple[bytes, ...]:
    """Return how hexadecimal digits show.

    As they are, in URLs, hexadecimal, in base64.

    As they are is also in URLs and JSON, which write none of them in another way. In
    hexadecimal, and as a URL may write every byte, they are digits alone, so lower and upper
    case are one. In base64 they are letters and digits at each of three offsets; characters
    that depend on what stands before or after are left out.
    """
    raw = middle.encode()
    found = [raw, raw.upper(), raw.hex().encode(), b"".join(b"%%%x" % b for b in raw)]
    for offset in range(3):
        text = base64.b64encode(bytes(offset) + raw)
        found.append(text[(0, 2, 3)[offset] : len(text) // 4 * 4 - 4])
    return tuple(found)


FORMS = forms()
LONGEST_BYTES = max(map(len, FORMS))


def found_in(data: bytes, wanted: tuple[bytes, ...] = FORMS) -> bytes | None:
    """Return the form in which a key stands in a text; None if it does not."""
    return next((form for form in wanted if form in data), None)


def masked(wanted: tuple[bytes, ...] = FORMS) -> str:
    """Return the forms for a child to look for, in a writing in which none of them is."""
    return ",".join(bytes(byte ^ MASK for byte in form).hex() for form in wanted)


@dataclass(slots=True)
class Account:
    """Where the key of this process was looked for, and found.

    Attributes:
        wanted: the forms that are looked for.
        hosts: that were started while they held it.
        puppets: children that looked around themselves and told what came of it.
        children: processes beneath a launchpad that were looked into from outside.
        missed: such processes that had ended before they could be looked into.
        texts: words of programs: replies, output, figures.
        files: in directories of tests, names and links included.
        left_out: key files, by their paths.
        searched_bytes: of all of these.
        hits: where it was found; taken by the test that looks next.
    """

    wanted: tuple[bytes, ...] = FORMS
    hosts: int = 0
    puppets: int = 0
    children: int = 0
    missed: int = 0
    texts: int = 0
    files: int = 0
    searched_bytes: int = 0
    left_out: set[str] = field(default_factory=set)
    hits: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Return the figures, by name."""
        names = ("hosts", "puppets", "children", "missed", "texts", "files")
        found: dict[str, int] = {name: getattr(self, name) for name in names}
        return {**found, "bytes": self.searched_bytes}

    def take_hits(self) -> list[str]:
        """Return what was found since this was last asked."""
        found, self.hits = self.hits, []
        return found


ACCOUNT = Account()


def told(what: str, data: bytes, account: Account = ACCOUNT) -> None:
    """Look through what somebody said."""
    account.texts += 1
    _look(what, data, account)


def around_a_puppet(found: object) -> None:
    """Take what a child found when it looked around itself: a list of places."""
    ACCOUNT.puppets += 1
    if found != []:
        ACCOUNT.hits.append(f"seen by a child: {found}")


def leave_out(path: str, account: Account = ACCOUNT) -> None:
    """Have one file left out: it is a key file, and the test made it."""
    account.left_out.add(path)


@contextmanager
def held() -> Iterator[None]:
    """Have a host in this process hold the key, as hosts do, until the block ends.

    It was read from a file by the module that reads keys; and it is in the environment, where
    a host without a model leaves it, for whatever is started with too much of it.
    """
    from hostlib.keys import read_key  # noqa: PLC0415 - not for each test

    ACCOUNT.hosts += 1
    fd = os.memfd_create("key", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, KEY.encode())
        key, _ = read_key(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    ours = os.environ.setdefault(VARIABLE, key) == key
    try:
        yield
    finally:
        if ours:
            os.environ.pop(VARIABLE, None)


def search(directory: str, account: Account = ACCOUNT) -> None:
    """Look through every file beneath a directory, its name and where its links lead."""
    with suppress(OSError):  # gone, or not for this user
        _search(os.open(directory, _DIRECTORY), directory, account)


def _search(fd: int, path: str, account: Account) -> None:
    """Look through one directory, which is closed.

    Not by its path, which may be too long.
    """
    try:
        for name in os.listdir(fd):
            whole = f"{path}/{name}"
            _look(f"name {whole!r}", os.fsencode(name), account)
            with suppress(OSError):  # gone meanwhile, or not for this user
                _search_one(fd, name, whole, account)
    finally:
        os.close(fd)


def _search_one(fd: int, name: str, whole: str, account: Account) -> None:
    kind = stat.S_IFMT(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    if kind == stat.S_IFLNK:
        _look(f"link {whole!r}", os.fsencode(os.readlink(name, dir_fd=fd)), account)
    elif kind == stat.S_IFDIR:
        inner = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        _search(inner, whole, account)
    elif kind == stat.S_IFREG and whole not in account.left_out:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(name, flags, dir_fd=fd)
        try:
            _search_file(file, whole, account)
        finally:
            os.close(file)


def _search_file(fd: int, whole: str, account: Account) -> None:
    """Look through what a file has; what it only claims to have is passed over."""
    account.files += 1
    size, start = os.fstat(fd).st_size, 0
    while start < size:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA)
        except OSError:
            return  # ENXIO: nothing but a hole is left
        data = os.pread(fd, PIECE_BYTES, start)
        if not data or _look(f"file {whole!r}", data, account):
            return
        if start + len(data) >= size:
            return
        start += max(1, len(data) - LONGEST_BYTES)


def _look(what: str, data: bytes, account: Account) -> bool:
    account.searched_bytes += len(data)
    form = found_in(data, account.wanted)
    if form is not None:
        account.hits.append(f"{what}, as {form.decode()}")
    return form is not None
