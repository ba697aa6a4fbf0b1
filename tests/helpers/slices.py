"""How long the turns are that a thread has asked the scheduler for.

usage: python -m tests.helpers.slices PID
"""

import ctypes
import os
import struct
import sys

from hostlib.linux.syscalls import SHORT_SLICE_NS, ask_for_slices, system_call

GETATTR = 315 if os.uname().machine == "x86_64" else 275
NICE, RUNTIME = 3, 5


def attributes(pid: int = 0) -> tuple[int, ...]:
    """Return a thread's sched_attr: size, policy, flags, nice, priority, runtime ..."""
    memory = ctypes.create_string_buffer(48)
    system_call(GETATTR, pid, ctypes.addressof(memory), 48, 0)
    found: tuple[int, ...] = struct.unpack("IIQiIQQQ", memory.raw)
    return found


def has_slices() -> bool:
    """Tell whether this kernel gives slices of one's own (Linux 6.12)."""
    ask_for_slices(SHORT_SLICE_NS)
    took = attributes()[RUNTIME]
    ask_for_slices(0)
    return took == SHORT_SLICE_NS


if __name__ == "__main__":
    is_short = attributes(int(sys.argv[1]))[RUNTIME] == SHORT_SLICE_NS
    sys.stdout.write("short\n" if is_short or not has_slices() else "its own\n")
