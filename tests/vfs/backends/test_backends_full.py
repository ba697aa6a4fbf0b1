"""No room for a write: it fails as a whole, and adds nothing (spec W5)."""

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.helpers.memory_directory import MemoryDirectory
from tests.helpers.trees import PROJECT, SHM, opened, put

__all__ = []


# spec W5: what was appended beyond the old end is cut off again.
def test_a_tree_in_memory_is_bounded() -> None:
    tree = MemoryDirectory(limit_bytes=100)
    handle = opened(tree, b"a", b"w+")
    handle.pwrite(bytes(90), 0)
    for failing in (
        lambda: handle.pwrite(b"x" * 20, 85),
        lambda: handle.append(b"x" * 11),
        lambda: handle.truncate(10**17),
        lambda: handle.pwrite(b"x", 10**17),
    ):
        with pytest.raises(OSError, match="No space") as raised:
            failing()
        assert raised.value.errno == errno.ENOSPC
        assert handle.pread_wait(200, 0) == bytes(90)
    other = opened(tree, b"b", b"w")
    other.pwrite(bytes(10), 0)
    handle.truncate(0)
    other.append(bytes(90))
    handle.close()
    other.close()
    tree.remove(b"b")
    del other
    put(tree, b"c", bytes(100))


FILE_SIZE = """
    import os, resource, sys
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    sys.path.insert(0, sys.argv[1])
    from vfs.backends import MODES, HostDirectory
    tree = HostDirectory(os.open(sys.argv[2], os.O_PATH | os.O_DIRECTORY))

    def attempt(call, *args):
        try:
            call(*args)
        except OSError as why:
            return why.strerror
        return "done"

    for size in (0, 100, 9_000, 9_999, 10_000):
        for length in (1, 2, 4000, 4097, 200_000):
            handle = tree.open(
                b"a", MODES[b"w+"], create=True, exclusive=False, staged=False
            )
            handle.truncate(0)
            handle.pwrite(b"o" * size, 0)
            for way in ("write", "append"):
                if way == "write":
                    said = attempt(handle.pwrite, b"n" * length, size)
                else:
                    appender = tree.open(
                        b"a", MODES[b"a"], create=True, exclusive=False, staged=False
                    )
                    handle.truncate(size)
                    said = attempt(appender.append, b"n" * length)
                    appender.close()
                found = handle.pread_wait(300_000, 0)
                fits = size + length <= 10_000
                assert said == ("done" if fits else "File too large"), (said, size, length)
                wanted = b"o" * size + (b"n" * length if fits else b"")
                assert found == wanted, (way, size, length, len(found))
            handle.close()
"""


# spec W5: EFBIG in the middle of a write; what was within the old size may be new.
@pytest.mark.slow
@pytest.mark.parametrize("where", ["disk", "tmpfs"])
def test_a_file_that_may_not_grow(where: str, tmp_path: Path) -> None:
    directory = tmp_path if where == "disk" else SHM / f"limit-{os.getpid()}"
    directory.mkdir(exist_ok=True)
    program = textwrap.dedent(FILE_SIZE)
    done = subprocess.run(
        [sys.executable, "-c", program, str(PROJECT), str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    subprocess.run(["rm", "-r", directory], check=True)
    assert done.returncode == 0, done.stderr


FULL_DISK = """
    import ctypes, os, sys
    sys.path.insert(0, sys.argv[1])
    where = os.fsencode(sys.argv[2])
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name, *args):
        if getattr(libc, name)(*args) != 0:
            print("cannot", name, os.strerror(ctypes.get_errno()))
            sys.exit(0)

    call("unshare", 0x00020000)  # CLONE_NEWNS
    call("mount", b"none", b"/", None, 0x4000 | 0x40000, None)  # MS_REC | MS_PRIVATE
    call("mount", b"tmpfs", where, b"tmpfs", 0, b"size=1m")

    from vfs.backends import MODES, HostDirectory
    tree = HostDirectory(os.open(where, os.O_PATH | os.O_DIRECTORY))

    def opened(name, mode, staged=False):
        return tree.open(name, MODES[mode], create=True, exclusive=False, staged=staged)

    def refused(call, *args):
        try:
            call(*args)
        except OSError as why:
            assert why.strerror == "No space left on device", why
        else:
            raise AssertionError("it was not refused")

    kept = opened(b"kept", b"w+")
    kept.pwrite(b"k" * 5000, 0)
    for offset in (0, 4000, 5000, 100_000):
        refused(kept.pwrite, b"n" * (2 << 20), offset)
        assert kept.size() == 5000, kept.size()
    assert kept.pread_wait(9000, 4096)[:1] in (b"n", b"k")
    kept.pwrite(b"k" * 5000, 0)
    appender = opened(b"kept", b"a")
    refused(appender.append, b"n" * (2 << 20))
    assert kept.pread_wait(9000, 0) == b"k" * 5000
    staged = opened(b"kept", b"w", staged=True)
    refused(staged.pwrite, b"n" * (2 << 20), 0)
    staged.close()
    # What was cut off is free again: as much as before fits.
    room = os.statvfs(where)
    opened(b"more", b"w").pwrite(b"m" * (room.f_bavail * room.f_bsize), 0)
    assert sorted(os.listdir(where)) == [b"kept", b"more"]
    assert kept.pread_wait(9000, 0) == b"k" * 5000
"""


# spec W5: ENOSPC in the middle of a large write.
@pytest.mark.slow
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    program = textwrap.dedent(FULL_DISK)
    done = subprocess.run(
        [sys.executable, "-c", program, str(PROJECT), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("cannot"):
        pytest.skip(f"no mount of our own: {done.stdout.strip()}")
