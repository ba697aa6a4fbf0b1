"""What is mounted, as the kernel's table says it, and whether that has changed.

What it is: the kind of file system behind a device number, for ``vfs.hostio``.  What it is
not: how each kind is read and written (``hostio.Mount``).

Rules of this file.

1. A file system without a disk has a number that is free again when it is unmounted: a
   ``proc`` may get that of a ``tmpfs`` that was there before.  So what is known of such a
   number is believed only while the table is the same (``is_passing``).
2. One descriptor of the table is held for as long as the process lives.  The kernel
   notes at each change of the table that whoever polls it has not been told: to ask
   costs 0.3 us, to read the table 25 us and more.
3. What cannot be asked about is not believed: without the table nothing is known.

Sources: proc(5) for mountinfo, poll(2).
"""

import os
import select
import threading

UNKNOWN = "unknown"
"""The kind of a file system that the table does not name."""

_READ_BYTES = 65_536


def is_passing(device: int) -> bool:
    """Tell whether a device number is given to somebody else when it is unmounted.

    The number of a disk (one with a major number) is that disk's.
    """
    return os.major(device) == 0


class MountTable:
    """The table of this process's mount namespace.

    Attributes:
        lock: held by whoever calls: a change is told to one only, and what was known has
            to be forgotten before another one asks.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._fd = -1
        self._poll = select.poll()
        # At once: a program that counts its descriptors counts it from the beginning.
        self._open()

    def has_changed(self) -> bool:
        """Tell whether something was mounted or unmounted since the last time."""
        if self._fd < 0:
            self._open()
            return True
        return bool(self._poll.poll(0))

    def kind_of(self, device: int, fd: int) -> str:
        """Return the kind of file system of a device number, or of an open file on it."""
        wanted = f"{os.major(device)}:{os.minor(device)}"
        try:
            mount_id = _mount_id_of(fd) if fd >= 0 else ""
            lines = self._read().decode(errors="replace").splitlines()
        except OSError:
            return UNKNOWN
        rows = [fields for line in lines if len(fields := line.split()) > 6]
        for column, value in ((2, wanted), (0, mount_id)):
            for fields in rows:
                if fields[column] == value:
                    return fields[fields.index("-") + 1]
        return UNKNOWN

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptor that is held."""
        return (self._fd,) if self._fd >= 0 else ()

    def _open(self) -> None:
        try:
            fd = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # no /proc here; or no descriptor at the moment
            return
        self._fd = fd
        self._poll.register(fd, select.POLLPRI)  # and POLLERR, which is always told

    def _read(self) -> bytes:
        os.lseek(self._fd, 0, os.SEEK_SET)
        pieces = []
        while piece := os.read(self._fd, _READ_BYTES):
            pieces.append(piece)
        return b"".join(pieces)


def _mount_id_of(fd: int) -> str:
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("mnt_id:"):
                    return line.split()[1]
    except OSError:
        pass
    return ""
