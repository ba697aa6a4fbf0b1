"""Payloads on their way in: one budget, spooling beyond it, memory by what comes."""

import contextlib
import errno
import gc
import mmap
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vfs.ledger import MOST_MEMORY_BYTES, MOST_SPOOLED_BYTES, Ledger
from vfs.payload import (
    ANSWER_BYTES,
    CHILDREN,
    DEFAULT_BUDGET_BYTES,
    Payload,
    PayloadBudget,
)

KIB = 1024
MIB = 1024 * 1024


@pytest.fixture
def budget(tmp_path: Path, no_leaks: None) -> Iterator[PayloadBudget]:
    """Return a budget of 4 MiB that nobody may owe anything in the end."""
    del no_leaks
    made = PayloadBudget(4 * MIB, os.fspath(tmp_path))
    yield made
    assert made.payload_memory.used == 0
    assert os.listdir(tmp_path) == []


def receive(payload: Payload, data: bytes, step: int = 50_000) -> None:
    """Receive bytes as a session does: straight into the payload's own space."""
    while data:
        space = payload.space()
        count = min(step, len(space), len(data))
        space[:count] = data[:count]
        payload.advance(count)
        data = data[count:]


def pattern(size: int) -> bytes:
    """Return bytes that tell where they are."""
    return b"".join(b"%07d " % number for number in range(size // 8 + 1))[:size]


# spec W3
@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [1, 100, 64 * KIB, 64 * KIB + 1, MIB, MIB + 1, 3 * MIB, 5 * MIB]
)
def test_what_comes_in_comes_out(budget: PayloadBudget, size: int) -> None:
    data = pattern(size)
    payload = budget.begin(size, Ledger())
    assert payload.is_spooled == (size > 2 * MIB)
    payload.add(data[:77])
    receive(payload, data[77:])
    assert payload.left == 0
    for _ in range(2):
        assert bytes(payload.view()) == data
    payload.close()
    payload.close()


# spec W3
@pytest.mark.slow
@given(
    sizes=st.lists(st.integers(1, 200_000), min_size=1, max_size=6),
    limit=st.sampled_from([0, 64 * KIB, 128 * KIB, MIB, 4 * MIB]),
    order=st.randoms(use_true_random=False),
)
def test_many_payloads_at_once_are_kept_apart(
    sizes: list[int], limit: int, order: random.Random
) -> None:
    budget = PayloadBudget(limit)
    payloads = []
    with contextlib.ExitStack() as stack:  # drawing an order may end an example
        for number, size in enumerate(sizes):
            payload = budget.begin(size, Ledger())
            stack.callback(payload.close)
            receive(payload, bytes([number]) * (size // 2))
            payloads.append((number, payload))
            assert budget.payload_memory.used <= limit
        order.shuffle(payloads)
        for number, payload in payloads:
            receive(payload, bytes([100 + number]) * payload.left)
        for number, payload in payloads:
            first = payload.size // 2
            assert bytes(payload.view()) == bytes([number]) * first + bytes(
                [100 + number]
            ) * (payload.size - first)
            payload.close()
    assert budget.payload_memory.used == 0


# spec W3: nobody waits for somebody else's payload.
def test_beyond_the_budget_a_payload_goes_to_a_file(
    budget: PayloadBudget, tmp_path: Path
) -> None:
    held = [budget.begin(MIB, Ledger()) for _ in range(4)]
    assert budget.payload_memory.used == 4 * MIB
    spooled = budget.begin(100_000, Ledger())
    assert spooled.is_spooled
    assert budget.spooled == 1
    assert len(spooled.descriptors()) == 1
    assert os.listdir(tmp_path) == []  # it has no name
    data = pattern(100_000)
    receive(spooled, data, 1000)
    assert bytes(spooled.view()) == data
    assert os.fstat(spooled.descriptors()[0]).st_mode & 0o077 == 0
    spooled.close()
    assert spooled.descriptors() == ()
    held.pop().close()
    payload = budget.begin(100_000, Ledger())
    assert not payload.is_spooled
    for each in (*held, payload):
        each.close()


# spec S7
def test_what_one_child_declares_leaves_memory_for_another(tmp_path: Path) -> None:
    budget, one, other = PayloadBudget(4 * MIB, os.fspath(tmp_path)), Ledger(), Ledger()
    nested = Ledger(one)
    held = [budget.begin(MIB, ledger) for ledger in (one, nested, one, nested)]
    assert [each.is_spooled for each in held] == [False, False, True, True]
    held += [budget.begin(MIB, other) for _ in range(2)]
    assert not any(each.is_spooled for each in held[4:])
    for each in held:
        each.close()
    for ledger in (one, other):
        assert not ledger.payload_memory.used
        assert not ledger.spooled_bytes.used


# spec S7
def test_a_child_may_have_so_much_in_files(tmp_path: Path) -> None:
    budget, one, other = PayloadBudget(0, os.fspath(tmp_path)), Ledger(), Ledger()
    size = MOST_SPOOLED_BYTES // 2
    held = [budget.begin(size, one) for _ in range(2)]
    with pytest.raises(OSError, match="Cannot allocate memory"):
        budget.begin(1, one)
    held.append(budget.begin(size, other))
    held.pop(0).close()
    held.append(budget.begin(size, one))
    for each in held:
        each.close()
    # One alone may be longer: [limits] write is the bound then.
    budget.begin(MOST_SPOOLED_BYTES + 1, one).close()
    assert not one.spooled_bytes.used
    assert budget.spooled == 5


def test_a_spool_directory_without_unnamed_files(
    budget: PayloadBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_open = os.open

    def without_unnamed(path: str, flags: int, *args: int, **where: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no unnamed files")
        return plain_open(path, flags, *args, **where)

    monkeypatch.setattr(os, "open", without_unnamed)
    payload = budget.begin(5 * MIB, Ledger())
    assert payload.is_spooled
    receive(payload, b"x" * (5 * MIB))
    assert bytes(payload.view()[-3:]) == b"xxx"
    payload.close()


# attack 18: no descriptor for a file is an error of this payload, and costs nothing.
def test_a_spool_that_cannot_be_made(
    budget: PayloadBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", no_more)
    monkeypatch.setattr(tempfile, "mkstemp", no_more)
    with pytest.raises(OSError, match="Too many"):
        budget.begin(5 * MIB, Ledger())
    assert budget.payload_memory.used == 0
    assert budget.spooled == 0


def test_a_mapping_that_cannot_be_made_costs_nothing(
    budget: PayloadBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(*_: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", no_more)
        with pytest.raises(OSError, match="allocate"):
            budget.begin(2 * MIB, Ledger())
    assert budget.payload_memory.used == 0


# I1: a payload that is dropped half-way gives everything back.
@pytest.mark.parametrize("size", [1000, 500_000, 3 * MIB, 5 * MIB])
def test_a_payload_that_is_dropped(budget: PayloadBudget, size: int) -> None:
    payload = budget.begin(size, Ledger())
    receive(payload, b"x" * 100)
    payload.close()
    assert budget.payload_memory.used == 0


# Buffers are used again: their pages are there already.
def test_small_payloads_share_their_memory(budget: PayloadBudget) -> None:
    for size in (100, 64 * KIB, 200_000, MIB):
        first = budget.begin(size, Ledger())
        receive(first, b"a" * size)
        first.close()
        kept = budget.kept_bytes
        assert kept >= size
        second = budget.begin(size, Ledger())
        assert budget.kept_bytes < kept
        second.close()
    # The dead bytes of one are never part of another.
    payload = budget.begin(50, Ledger())
    receive(payload, b"b" * 50)
    assert bytes(payload.view()) == b"b" * 50
    payload.close()


def test_only_some_memory_is_kept() -> None:
    budget = PayloadBudget()
    payloads = [
        budget.begin(size, Ledger()) for size in (100, MIB, 2 * MIB) for _ in range(20)
    ]
    for payload in payloads:
        payload.close()
    assert 0 < budget.kept_bytes <= 5 * MIB


def resident_kib() -> int:
    """Return this process's resident memory, in KiB."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE") // KIB


LIARS = 500
"""Each may take a descriptor: no more than there are where 1,024 is the limit."""


# attack 15, I9: memory is taken by what comes; nobody is refused.
@pytest.mark.slow
@pytest.mark.parametrize("size", [16 * MIB, MIB, 64 * KIB])
def test_lies_about_lengths_cost_nothing(tmp_path: Path, size: int) -> None:
    budget = PayloadBudget(DEFAULT_BUDGET_BYTES, os.fspath(tmp_path))
    gc.collect()
    before = resident_kib()
    payloads = [budget.begin(size, Ledger()) for _ in range(LIARS)]
    for payload in payloads:
        receive(payload, b"x")
    grown = resident_kib() - before
    assert budget.payload_memory.used <= DEFAULT_BUDGET_BYTES
    assert budget.spooled == max(0, LIARS - DEFAULT_BUDGET_BYTES // size)
    for payload in payloads:
        payload.close()
    assert grown < 4 * KIB, f"{grown} KiB"


# attack 42
def test_a_child_reserves_so_much_for_all_its_clients() -> None:
    budget, top = PayloadBudget(), Ledger()
    below = Ledger(Ledger(top))
    with budget.reservation(below, MOST_MEMORY_BYTES // 2) as held:
        held.add(MOST_MEMORY_BYTES // 4)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            budget.reservation(top, MOST_MEMORY_BYTES // 2)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            held.raise_to(MOST_MEMORY_BYTES + 1)
        assert (
            top.memory.used == budget.request_memory.used == MOST_MEMORY_BYTES // 4 * 3
        )
        budget.reservation(top, MOST_MEMORY_BYTES // 4).close()
    assert top.memory.used == budget.request_memory.used == 0


# attack 42, spec S7
def test_what_one_child_reserves_another_has_as_well() -> None:
    budget = PayloadBudget()
    freed = []
    budget.on_freed = lambda: freed.append(budget.request_memory.used)
    held = [budget.reservation(Ledger(), MOST_MEMORY_BYTES) for _ in range(CHILDREN)]
    with pytest.raises(OSError, match="Cannot allocate memory"):
        budget.reservation(Ledger(), 1)
    for one in held:
        assert not freed
        one.close()
    assert freed == [0]
    budget.reservation(Ledger(), 1).close()
    assert freed == [0]  # it was little


# attack 42
def test_what_requests_reserve_leaves_room_for_answers() -> None:
    budget, ledger = PayloadBudget(), Ledger()
    with (
        budget.reservation(ledger, MOST_MEMORY_BYTES) as held,
        budget.reservation(ledger) as other,
    ):
        for grow in (other.resize, other.raise_to):
            with pytest.raises(OSError, match="Cannot allocate memory"):
                grow(1)
        held.add(1)
        other.add(ANSWER_BYTES - 1)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            held.add(1)
        other.add(1 - ANSWER_BYTES)
    assert ledger.memory.used == budget.request_memory.used == 0


# attack 42, spec S7
def test_what_all_children_reserve_leaves_room_for_answers() -> None:
    budget = PayloadBudget()
    held = [budget.reservation(Ledger(), MOST_MEMORY_BYTES) for _ in range(CHILDREN)]
    answer = budget.reservation(Ledger())
    with pytest.raises(OSError, match="Cannot allocate memory"):
        answer.raise_to(1)
    answer.add(ANSWER_BYTES)
    for one in (*held, answer):
        one.close()
    assert budget.request_memory.used == 0
