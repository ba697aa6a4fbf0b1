"""The filter of the layer "seccomp": a deny list of system calls, as classic BPF.

1. It refuses system calls that no child needs; Landlock bounds files.
2. All calls of another architecture are refused.
3. ``clone3`` and ``openat2`` hide their flags: ENOSYS, and programs take older calls.
4. No set-user-ID files: on the disk, they would be the host's.
5. A child that sees other processes sets limits and scheduling for itself alone.
6. Contexts of aio(7) are counted over the machine: ENOSYS.
7. No lease or delegation (fcntl(2)): other opens wait up to 45 s for it. The kernel looks
   at the low 32 bits of the command, and so does the filter.
"""

from __future__ import annotations

import errno
import os
import struct
from functools import cache
from itertools import chain
from typing import NamedTuple

# <linux/audit.h>
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# <asm/unistd.h>: number on x86_64, number on aarch64 (and on all newer ones), None
# where there is no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "vhangup": (153, 58),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "_sysctl": (156, None),
    "ustat": (136, None),
    "nfsservctl": (180, 42),
}
"""Refused with EPERM, whatever the arguments."""

# Numbers as above, and which argument is the mode.
_MODES = {
    "creat": (85, None, 1),
    "chmod": (90, None, 1),
    "fchmod": (91, 52, 1),
    "fchmodat": (268, 53, 2),
    "fchmodat2": (452, 452, 2),
    "mknod": (133, None, 1),
    "mknodat": (259, 33, 2),
}
_OPENING = {"open": (2, None), "openat": (257, 56)}
_OPENAT2 = 437
# <linux/stat.h>, <asm-generic/fcntl.h>: S_ISUID | S_ISGID; O_CREAT | __O_TMPFILE.
_SET_ID, _MAKES = 0o6000, 0o100 | 0o20000000

# <linux/fcntl.h>: F_SETLEASE, and F_SETDELEG (Linux 6.19), which directories have, too.
_LEASES = (1024, 1040)

_FCNTL = {"x86_64": 72, "aarch64": 25}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_IOCTL = {"x86_64": 16, "aarch64": 29}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_PRLIMIT = {"x86_64": 302, "aarch64": 261}
_IO_SETUP = {"x86_64": 206, "aarch64": 0}
# sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr: the
# process is the first argument.
_SCHEDULING = {"x86_64": (142, 144, 203, 314), "aarch64": (118, 119, 122, 274)}
# setpriority(2), ioprio_set(2): the kind of number, then the number; the kind that is a
# process (<linux/resource.h>, <linux/ioprio.h>).
_PRIORITIES = {
    "x86_64": {"nice": (141, 0), "ioprio": (251, 1)},
    "aarch64": {"nice": (140, 0), "ioprio": (30, 1)},
}
_SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
# <linux/sched.h>: CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET.
_NAMESPACES = 0x7E020000
# <asm-generic/ioctls.h>: putting words into a terminal's mouth.
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
# <linux/net.h>: the bit that SOCK_DGRAM (2) has and SOCK_RAW (3), of which unix makes
# the same; SOCK_STREAM (1) and SOCK_SEQPACKET (5) do not. Flags are higher bits.
_DATAGRAMS = 2
_X32 = 0x40000000

# <linux/filter.h>, <linux/seccomp.h>
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data


def _argument(index: int) -> int:
    """Return the offset of the low half of an argument (both are little-endian)."""
    return 16 + 8 * index


class Instruction(NamedTuple):
    """One, with the labels it jumps to; an empty label is the next instruction."""

    code: int
    value: int
    yes: str = ""
    no: str = ""
    label: str = ""


class UnknownMachineError(Exception):
    """There is no list of numbers for this architecture."""


@cache
def build(
    machine: str, *, network: bool, unix: bool = True, alone: bool = True
) -> bytes:
    """Return the filter as an array of ``struct sock_filter``.

    Args:
        machine: as ``os.uname().machine`` has it.
        network: sockets of the internet are left alone: there is a namespace of its
            own, or the child may use the host's network.
        unix: sockets of the family unix can be made; without it pairs alone, and none
            of datagrams.
        alone: it sees no processes but its own: it has a pid namespace.

    Raises:
        UnknownMachineError: neither x86_64 nor aarch64.
    """
    if machine not in _ARCHITECTURES:
        raise UnknownMachineError(machine)
    return assemble(_program(machine, network=network, unix=unix, alone=alone))


def build_here(*, network: bool, unix: bool = True, alone: bool = True) -> bytes:
    """Return the filter for this machine; see ``build``."""
    return build(os.uname().machine, network=network, unix=unix, alone=alone)


def _program(
    machine: str, *, network: bool, unix: bool, alone: bool
) -> list[Instruction]:
    column = 0 if machine == "x86_64" else 1
    found = (numbers[column] for numbers in DENIED.values())
    denied = sorted(number for number in found if number is not None)
    families = [_AF_NETLINK, *((_AF_INET, _AF_INET6) if network else ())]
    if unix:
        families.insert(0, _AF_UNIX)
    code = [
        Instruction(_LOAD, _ARCHITECTURE),
        Instruction(_JUMP_EQUAL, _ARCHITECTURES[machine], no="perm"),
        Instruction(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        code.append(Instruction(_JUMP_ABOVE, _X32, yes="perm"))
    code += [
        Instruction(_JUMP_EQUAL, _CLONE3, yes="nosys"),
        Instruction(_JUMP_EQUAL, _CLONE[machine], yes="clone"),
        Instruction(_JUMP_EQUAL, _IOCTL[machine], yes="ioctl"),
        Instruction(_JUMP_EQUAL, _FCNTL[machine], yes="fcntl"),
        Instruction(_JUMP_EQUAL, _SOCKET[machine], yes="socket"),
        Instruction(_JUMP_EQUAL, _SOCKETPAIR[machine], yes="pair"),
        Instruction(_JUMP_EQUAL, _OPENAT2, yes="nosys"),
        Instruction(_JUMP_EQUAL, _IO_SETUP[machine], yes="nosys"),
        *(() if alone else _refuse_for_others(machine)),
        *(
            Instruction(_JUMP_EQUAL, number, yes=name)
            for name, numbers in _OPENING.items()
            if (number := numbers[column]) is not None
        ),
        *(
            Instruction(_JUMP_EQUAL, number, yes=f"mode {index}")
            for *numbers, index in _MODES.values()
            if (number := numbers[column]) is not None
        ),
        *(Instruction(_JUMP_EQUAL, number, yes="perm") for number in denied),
        Instruction(_RETURN, _ALLOW),
        Instruction(_LOAD, _argument(0), label="clone"),
        Instruction(_JUMP_BITS, _NAMESPACES, yes="perm", no="allow"),
        Instruction(_LOAD, _argument(1), label="ioctl"),
        Instruction(_JUMP_EQUAL, _TIOCSTI, yes="perm"),
        Instruction(_JUMP_EQUAL, _TIOCLINUX, yes="perm", no="allow"),
        Instruction(_LOAD, _argument(1), label="fcntl"),
        *(Instruction(_JUMP_EQUAL, command, yes="perm") for command in _LEASES),
        Instruction(_RETURN, _ALLOW),
        # Without these flags there is no mode, and anything may stand in its place.
        Instruction(_LOAD, _argument(1), label="open"),
        Instruction(_JUMP_BITS, _MAKES, yes="mode 2", no="allow"),
        Instruction(_LOAD, _argument(2), label="openat"),
        Instruction(_JUMP_BITS, _MAKES, yes="mode 3", no="allow"),
        *chain.from_iterable(map(_mode, range(1, 4))),
        *chain.from_iterable(
            (
                Instruction(_LOAD, _argument(0), label=name),
                Instruction(_JUMP_EQUAL, kind, no="perm"),
                Instruction(_LOAD, _argument(1)),
                Instruction(_JUMP_EQUAL, 0, yes="allow", no="perm"),
            )
            for name, (_, kind) in _PRIORITIES[machine].items()
        ),
        Instruction(_LOAD, _argument(0), label="schedule"),
        Instruction(_JUMP_EQUAL, 0, yes="allow", no="perm"),
        # Its own by 0, or nothing to be set: a null pointer, both halves of it.
        Instruction(_LOAD, _argument(0), label="limit"),
        Instruction(_JUMP_EQUAL, 0, yes="allow"),
        Instruction(_LOAD, _argument(2)),
        Instruction(_JUMP_EQUAL, 0, no="perm"),
        Instruction(_LOAD, _argument(2) + 4),
        Instruction(_JUMP_EQUAL, 0, yes="allow", no="perm"),
        Instruction(_LOAD, _argument(0), label="socket"),
        *(Instruction(_JUMP_EQUAL, family, yes="allow") for family in families),
        Instruction(_RETURN, _ERRNO | errno.EAFNOSUPPORT),
        # The kernel makes both, and loads the family for that, before it says that there
        # are no pairs of it.
        Instruction(_LOAD, _argument(0), label="pair"),
        Instruction(_JUMP_EQUAL, _AF_UNIX, yes="allow" if unix else "kind"),
        Instruction(_RETURN, _ERRNO | errno.EAFNOSUPPORT),
        # One of datagrams sends to any path, and connects anew; the others are connected
        # to each other for good (EISCONN, EINVAL).
        Instruction(_LOAD, _argument(1), label="kind"),
        Instruction(_JUMP_BITS, _DATAGRAMS, yes="perm", no="allow"),
        Instruction(_RETURN, _ERRNO | errno.EPERM, label="perm"),
        Instruction(_RETURN, _ERRNO | errno.ENOSYS, label="nosys"),
        Instruction(_RETURN, _ALLOW, label="allow"),
    ]
    return code


def _refuse_for_others(machine: str) -> list[Instruction]:
    """Find the calls that name a process by its number, and change how it runs."""
    return [
        Instruction(_JUMP_EQUAL, _PRLIMIT[machine], yes="limit"),
        *(Instruction(_JUMP_EQUAL, n, yes="schedule") for n in _SCHEDULING[machine]),
        *(
            Instruction(_JUMP_EQUAL, number, yes=name)
            for name, (number, _) in _PRIORITIES[machine].items()
        ),
    ]


def _mode(index: int) -> tuple[Instruction, Instruction]:
    return (
        Instruction(_LOAD, _argument(index), label=f"mode {index}"),
        Instruction(_JUMP_BITS, _SET_ID, yes="perm", no="allow"),
    )


def assemble(code: list[Instruction]) -> bytes:
    """Turn instructions into bytes; a jump leads forward, 255 instructions at most.

    Raises:
        ValueError: a label that is not there, behind, or too far ahead.
    """
    places = {step.label: index for index, step in enumerate(code) if step.label}
    words = []
    for index, step in enumerate(code):
        jumps = [_distance(places, name, index) for name in (step.yes, step.no)]
        words.append(struct.pack("=HBBI", step.code, *jumps, step.value))
    return b"".join(words)


def _distance(places: dict[str, int], label: str, index: int) -> int:
    if not label:
        return 0
    distance = places.get(label, -1) - index - 1
    if not 0 <= distance <= 255:
        raise ValueError(f"no way from instruction {index} to {label!r}")
    return distance
