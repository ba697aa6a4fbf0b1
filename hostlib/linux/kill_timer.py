"""A timer with which the kernel kills this process: timer_create(2).

The kernel sends SIGKILL at an absolute time of CLOCK_BOOTTIME, even if this process is
stopped.  A fork does not inherit the timer, and an exec removes it.
"""

from __future__ import annotations

import ctypes
import os
import struct

from hostlib.linux.syscalls import system_call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# <asm/unistd.h>: timer_create, timer_settime; newer architectures share the numbers.
_SYS_TIMER_CREATE: Mapping[str, int] = {"x86_64": 222}
_SYS_TIMER_CREATE_GENERIC = 107
_SYS_TIMER_SETTIME: Mapping[str, int] = {"x86_64": 223}
_SYS_TIMER_SETTIME_GENERIC = 110
_CLOCK_BOOTTIME = 7
_SIGEV_SIGNAL = 0
_SIGKILL = 9
_TIMER_ABSTIME = 1
# struct sigevent: value, signal, how to notify; 64 bytes with its padding.
_SIGEVENT = struct.Struct("qii48x")
# struct itimerspec: interval, value; both in seconds and nanoseconds.
_ITIMERSPEC = struct.Struct("qqqq")
_TIMER_ID = struct.Struct("i")


class KillTimer:
    """The kill timer of this process.

    Raises:
        OSError: the kernel makes none (EAGAIN: RLIMIT_SIGPENDING is used up).
    """

    def __init__(self) -> None:
        machine = os.uname().machine
        create = _SYS_TIMER_CREATE.get(machine, _SYS_TIMER_CREATE_GENERIC)
        self._settime = _SYS_TIMER_SETTIME.get(machine, _SYS_TIMER_SETTIME_GENERIC)
        event = ctypes.create_string_buffer(_SIGEVENT.pack(0, _SIGKILL, _SIGEV_SIGNAL))
        place = ctypes.create_string_buffer(_TIMER_ID.size)
        system_call(
            create, _CLOCK_BOOTTIME, ctypes.addressof(event), ctypes.addressof(place)
        )
        (self._timer,) = _TIMER_ID.unpack(place)

    def arm(self, deadline_ns: int) -> None:
        """Set the time of CLOCK_BOOTTIME at which this process ends, instead of any other.

        A time that has passed ends it at once.
        """
        # Zero would disarm it.
        seconds, rest_ns = divmod(max(1, deadline_ns), 1_000_000_000)
        when = ctypes.create_string_buffer(_ITIMERSPEC.pack(0, 0, seconds, rest_ns))
        where = ctypes.addressof(when)
        system_call(self._settime, self._timer, _TIMER_ABSTIME, where, 0)
