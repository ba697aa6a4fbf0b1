"""The filter: run by a small interpreter of its instructions, for both machines."""

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.sandbox import seccomp_filter
from supervisor.sandbox.seccomp_filter import (
    DENIED,
    Instruction,
    UnknownMachineError,
    build,
)

ALLOW = 0x7FFF0000
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(code: bytes, number: int, arch: int, *arguments: int) -> int | None:
    """Return the errno that a call gets, None if it is allowed."""
    args = [*arguments, *[0] * (6 - len(arguments))]
    call = struct.pack("=IIQ6Q", number, arch, 0, *args)
    steps = list(struct.iter_unpack("=HBBI", code))
    at = accumulator = 0
    while True:
        operation, yes, no, value = steps[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", call, value)
        elif operation == 0x06:
            return None if value == ALLOW else value & 0xFFFF
        else:
            test = {0x15: accumulator == value, 0x35: accumulator >= value}
            test[0x45] = bool(accumulator & value)
            at += yes if test[operation] else no


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("network", [True, False])
def test_what_is_listed_is_refused_and_nothing_else(
    machine: str, network: bool
) -> None:
    code, arch = build(machine, network=network), MACHINES[machine]
    column = list(MACHINES).index(machine)
    denied = {numbers[column] for numbers in DENIED.values()}
    own = {"x86_64": {16, 41, 53, 56}, "aarch64": {29, 198, 199, 220}}[machine]
    nosys = {435, 437, {"x86_64": 206, "aarch64": 0}[machine]}
    special = {*nosys, *own}
    for number in range(600):
        if number not in special:
            expected = errno.EPERM if number in denied else None
            assert verdict(code, number, arch) == expected, number
    assert {verdict(code, number, arch) for number in nosys} == {errno.ENOSYS}


# <asm/unistd.h>, written down here once more: what falls off the list is to be missed.
DOORS = {
    "x86_64": {
        "ptrace and its like": (101, 310, 311, 312, 438, 440),
        "mounts": (155, 161, 165, 166, 428, 429, 430, 431, 432, 433, 442, 467),
        "namespaces": (272, 308),
        "keys": (248, 249, 250),
        "bpf, perf and userfaultfd": (321, 298, 323),
        "io_uring": (425, 426, 427),
        "handles of files": (303, 304),
        "the kernel itself": (169, 175, 176, 246, 313, 320),
    },
    "aarch64": {
        "ptrace and its like": (117, 270, 271, 272, 438, 440),
        "mounts": (39, 40, 41, 51, 428, 429, 430, 431, 432, 433, 442, 467),
        "namespaces": (97, 268),
        "keys": (217, 218, 219),
        "bpf, perf and userfaultfd": (280, 241, 282),
        "io_uring": (425, 426, 427),
        "handles of files": (264, 265),
        "the kernel itself": (104, 105, 106, 142, 273, 294),
    },
}


# attack 25
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("alone", [True, False])
def test_every_door_that_is_promised_is_closed(machine: str, alone: bool) -> None:
    code, arch = build(machine, network=True, alone=alone), MACHINES[machine]
    for what, numbers in DOORS[machine].items():
        for number in numbers:
            assert verdict(code, number, arch) == errno.EPERM, (what, number)


@given(number=st.integers(0, 2**32 - 1), arch=st.integers(0, 2**32 - 1))
def test_a_call_of_another_architecture_is_refused(number: int, arch: int) -> None:
    for machine, own in MACHINES.items():
        if arch != own:
            assert verdict(build(machine, network=True), number, arch) == errno.EPERM


# x32: the same architecture, other numbers.
@given(st.integers(0x40000000, 2**32 - 1))
def test_numbers_of_x32_are_refused(number: int) -> None:
    code = build("x86_64", network=True)
    assert verdict(code, number, MACHINES["x86_64"]) == errno.EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_decide_where_a_call_has_good_uses(machine: str) -> None:
    ioctl, socket, clone = {"x86_64": (16, 41, 56), "aarch64": (29, 198, 220)}[machine]
    arch = MACHINES[machine]
    for network in (True, False):
        code = build(machine, network=network)
        assert verdict(code, ioctl, arch, 0, 0x5401) is None
        assert verdict(code, ioctl, arch, 0, 0x5412) == errno.EPERM  # TIOCSTI
        assert verdict(code, ioctl, arch, 0, 0x541C) == errno.EPERM  # TIOCLINUX
        assert verdict(code, ioctl, arch, 0, 0x7700000000005412) == errno.EPERM
        assert verdict(code, clone, arch, 0x11) is None
        for flag in (17, 25, 26, 27, 28, 29, 30):
            assert verdict(code, clone, arch, 0x11 | 1 << flag) == errno.EPERM
        for family in (1, 16):
            assert verdict(code, socket, arch, family) is None
        for family in (17, 38, 40):
            assert verdict(code, socket, arch, family) == errno.EAFNOSUPPORT
        expected = None if network else errno.EAFNOSUPPORT
        assert verdict(code, socket, arch, 2) == expected
        assert verdict(code, socket, arch, 10) == expected


# attack 41: of an int the kernel takes the low half of a register, whatever is above.
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("above", [0, 1 << 32, 0xFFFFFFFF << 32])
def test_no_lease_and_no_delegation_is_taken(machine: str, above: int) -> None:
    fcntl, arch = {"x86_64": 72, "aarch64": 25}[machine], MACHINES[machine]
    for alone in (True, False):
        code = build(machine, network=True, alone=alone)
        for command in (1024, 1040):  # F_SETLEASE, F_SETDELEG
            assert verdict(code, fcntl, arch, 5, command | above, 1) == errno.EPERM
        # Calls that programs need: descriptors, flags, locks, pipes, seals; and their like.
        for command in {*range(64), *range(1025, 1060)} - {1040}:
            assert verdict(code, fcntl, arch, 5, command | above, 1) is None


# attack 25
@pytest.mark.parametrize("machine", MACHINES)
def test_who_sees_others_sets_limits_for_none_but_itself(machine: str) -> None:
    arch, prlimit = MACHINES[machine], {"x86_64": 302, "aarch64": 261}[machine]
    code = build(machine, network=True, alone=False)
    assert verdict(code, prlimit, arch, 0, 7, 1 << 33, 0) is None
    assert verdict(code, prlimit, arch, 5, 7, 0, 1 << 33) is None
    for address in (1, 1 << 33):
        assert verdict(code, prlimit, arch, 5, 7, address, 0) == errno.EPERM
        alone = build(machine, network=True)
        assert verdict(alone, prlimit, arch, 5, 7, address, 0) is None


# attack 25, spec N4: who sees a relay, or the host, does not take its processor away.
@pytest.mark.parametrize("machine", MACHINES)
def test_who_sees_others_says_for_none_when_it_runs(machine: str) -> None:
    arch, code = MACHINES[machine], build(machine, network=True, alone=False)
    alone = build(machine, network=True)
    by_pid, nice, ioprio = {
        "x86_64": ((142, 144, 203, 314), 141, 251),
        "aarch64": ((118, 119, 122, 274), 140, 30),
    }[machine]
    for number in by_pid:
        assert verdict(code, number, arch, 0, 1, 2) is None
        assert verdict(code, number, arch, 7, 1, 2) == errno.EPERM
        assert verdict(alone, number, arch, 7, 1, 2) is None
    for number, process in ((nice, 0), (ioprio, 1)):
        assert verdict(code, number, arch, process, 0, 19) is None
        assert verdict(alone, number, arch, process, 7, 19) is None
        for kind in range(4):  # of a process, a group of them, a user
            assert verdict(code, number, arch, kind, 7, 19) == errno.EPERM
            expected = None if kind == process else errno.EPERM
            assert verdict(code, number, arch, kind, 0, 19) == expected


# Counted over the whole machine, fs.aio-max-nr: one child could have them all.
@pytest.mark.parametrize("machine", MACHINES)
def test_there_is_no_asynchronous_io(machine: str) -> None:
    number = {"x86_64": 206, "aarch64": 0}[machine]
    for alone in (True, False):
        code = build(machine, network=True, alone=alone)
        assert verdict(code, number, MACHINES[machine], 128) == errno.ENOSYS


MAKING = {
    "x86_64": [(2, 1, 2), (257, 2, 3)],
    "aarch64": [(56, 2, 3)],
}
MODES = {
    "x86_64": [(85, 1), (90, 1), (91, 1), (133, 1), (259, 2), (268, 2), (452, 2)],
    "aarch64": [(33, 2), (52, 1), (53, 2), (452, 2)],
}


# attack 7
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    ("mode", "expected"),
    [(0o755, None), (0o1777, None), (0o4755, 1), (0o2755, 1), (1 << 40 | 0o4000, 1)],
)
def test_no_file_is_made_set_user_id(
    machine: str, mode: int, expected: int | None
) -> None:
    code, arch = build(machine, network=True), MACHINES[machine]
    for number, index in MODES[machine]:
        arguments = [0] * index + [mode]
        assert verdict(code, number, arch, *arguments) == expected, number
    for number, flags, index in MAKING[machine]:
        for makes in (0o100, 0o20200000, 0):
            words = [0] * 6
            words[flags], words[index] = 0o2 | makes, mode
            # A plain open has no mode: whatever stands in that register.
            wanted = expected if makes else None
            assert verdict(code, number, arch, *words) == wanted, number


# A request for a pair of a family makes the kernel load it, and make one of it first.
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("network", [True, False])
def test_pairs_of_sockets_are_of_the_family_unix(machine: str, network: bool) -> None:
    socketpair = {"x86_64": 53, "aarch64": 199}[machine]
    code, arch = build(machine, network=network, unix=network), MACHINES[machine]
    assert verdict(code, socketpair, arch, 1) is None
    for family in (0, 2, 10, 16, 17, 21, 30, 38, 40, 1 << 31):
        assert verdict(code, socketpair, arch, family) == errno.EAFNOSUPPORT


# attack 31
@pytest.mark.parametrize("machine", MACHINES)
def test_a_profile_without_unix_sockets_has_none(machine: str) -> None:
    socket, socketpair = {"x86_64": (41, 53), "aarch64": (198, 199)}[machine]
    code, arch = build(machine, network=True, unix=False), MACHINES[machine]
    assert verdict(code, socket, arch, 2) is None
    others = build(machine, network=True)
    for flags in (0, 0o2000000, 0o4000, 0o2004000, 1 << 32):  # CLOEXEC, NONBLOCK
        for kind in (1, 2, 3, 5):
            assert verdict(code, socket, arch, 1, kind | flags) == errno.EAFNOSUPPORT
            assert verdict(others, socketpair, arch, 1, kind | flags) is None
        for kind in (1, 5):  # SOCK_STREAM, SOCK_SEQPACKET
            assert verdict(code, socketpair, arch, 1, kind | flags) is None
        for kind in (2, 3):  # SOCK_DGRAM, and SOCK_RAW, which becomes one
            assert verdict(code, socketpair, arch, 1, kind | flags) == errno.EPERM


def test_a_machine_without_a_list_is_said() -> None:
    with pytest.raises(UnknownMachineError, match="riscv64"):
        build("riscv64", network=True)


def test_a_jump_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="no way"):
        seccomp_filter.assemble([Instruction(0x15, 1, yes="gone")])
