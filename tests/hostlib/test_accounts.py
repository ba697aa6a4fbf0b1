"""One account tree: charges, reservations and their ends in any order (I7)."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hostlib.accounts import Account, Reservation

LIMITS = st.none() | st.integers(0, 60)
AMOUNTS = st.integers(1, 30)


class Tree(RuleBasedStateMachine):
    """Accounts of a host, its children and their clients, against plain lists of sums."""

    def __init__(self) -> None:
        super().__init__()
        self.accounts: list[Account[int]] = []
        self.used: dict[Account[int], int] = {}
        self.open: list[tuple[Account[int], int, Reservation[int]]] = []
        self.went_over: set[Account[int]] = set()

    def promised(self, account: Account[int]) -> int:
        """Return the sum of what is reserved at an account and beneath it."""
        return sum(amount for at, amount, _ in self.open if account in at.path())

    def fits(self, at: Account[int], amount: int) -> bool:
        """Tell whether an amount fits here and at every ancestor."""
        return all(
            one.limit is None
            or self.used[one] + self.promised(one) + amount <= one.limit
            for one in at.path()
        )

    def note(self, at: Account[int], amount: int) -> None:
        """Count an amount here and above."""
        for one in at.path():
            self.used[one] += amount

    @initialize(limit=LIMITS)
    def host(self, limit: int | None) -> None:
        """The topmost account."""
        self.accounts = [Account(None, limit)]
        self.used = {self.accounts[0]: 0}

    @rule(data=st.data(), limit=LIMITS)
    def add(self, data: st.DataObject, limit: int | None) -> None:
        """One more account, anywhere in the tree."""
        if len(self.accounts) < 10:
            account = Account(data.draw(st.sampled_from(self.accounts)), limit)
            self.accounts.append(account)
            self.used[account] = 0

    # spec S7: a charge is taken at every ancestor, or at none.
    @rule(data=st.data(), amount=AMOUNTS)
    def charge(self, data: st.DataObject, amount: int) -> None:
        """A charge fits everywhere, or is refused by the first account that is full."""
        at = data.draw(st.sampled_from(self.accounts))
        fits = self.fits(at, amount)
        refused = sum(one.refused for one in self.accounts)
        assert at.charge(amount) is fits
        assert sum(one.refused for one in self.accounts) == refused + (not fits)
        if fits:
            self.note(at, amount)

    @rule(data=st.data(), amount=AMOUNTS)
    def take_back(self, data: st.DataObject, amount: int) -> None:
        """A negative amount is always accepted."""
        at = data.draw(st.sampled_from(self.accounts))
        assert at.charge(-amount)
        self.note(at, -amount)

    @rule(data=st.data(), amount=AMOUNTS)
    def give_back(self, data: st.DataObject, amount: int) -> None:
        """Giving back an amount that was never charged takes no count below 0."""
        at = data.draw(st.sampled_from(self.accounts))
        at.give_back(amount)
        for one in at.path():
            self.used[one] -= min(amount, max(0, self.used[one]))

    @rule(data=st.data(), amount=AMOUNTS)
    def record(self, data: st.DataObject, amount: int) -> None:
        """A use that has happened is counted, also beyond a limit."""
        at = data.draw(st.sampled_from(self.accounts))
        at.record(amount)
        self.note(at, amount)
        self.went_over.update(at.path())

    # spec L10: a worst case is reserved at every ancestor, or nowhere.
    @rule(data=st.data(), amount=AMOUNTS)
    def reserve(self, data: st.DataObject, amount: int) -> None:
        """A reservation fits everywhere, or there is none."""
        at = data.draw(st.sampled_from(self.accounts))
        fits = self.fits(at, amount)
        found = at.reserve(amount)
        assert (found is not None) is fits
        if found is not None:
            self.open.append((at, amount, found))

    @rule(data=st.data(), part=st.floats(0, 1))
    def settle(self, data: st.DataObject, part: float) -> None:
        """A reservation ends with what was used of it, once."""
        if self.open:
            number = data.draw(st.integers(0, len(self.open) - 1))
            at, amount, found = self.open.pop(number)
            found.settle(int(part * amount))
            self.note(at, int(part * amount))
            found.settle(1000)
            found.release()

    @rule(data=st.data(), more=AMOUNTS)
    def overrun(self, data: st.DataObject, more: int) -> None:
        """More was used than was reserved."""
        if self.open:
            number = data.draw(st.integers(0, len(self.open) - 1))
            at, amount, found = self.open.pop(number)
            found.settle(amount + more)
            self.note(at, amount + more)
            self.went_over.update(at.path())

    @rule(data=st.data(), limit=st.integers(0, 60))
    def lower(self, data: st.DataObject, limit: int) -> None:
        """A limit only shrinks, and no further than to what is reserved beneath it."""
        at = data.draw(st.sampled_from(self.accounts))
        before = [one.limit for one in at.path() if one.limit is not None]
        held = at.used + at.reserved if at.reservations else 0
        at.lower(limit)
        assert at.limit == min((max(limit, held), *before))
        if at.used + at.promised > at.limit:  # used before there was such a limit
            self.went_over.add(at)

    # I7
    @invariant()
    def reserved_is_at_most_what_is_left(self) -> None:
        """At every account with a limit, whatever has happened."""
        for one in self.accounts:
            if one.limit is not None:
                assert one.reserved <= max(0, one.limit - one.used)
                assert one.left == max(0, one.limit - one.used) - one.reserved >= 0
                assert one.excess == max(0, one.used - one.limit)

    @invariant()
    def no_admission_passes_a_limit(self) -> None:
        """Only what was recorded, or used beyond its worst case, goes over a limit."""
        for one in self.accounts:
            if one.limit is not None and one not in self.went_over:
                assert one.used + one.promised <= one.limit

    @invariant()
    def sums_are_those_of_what_is_open(self) -> None:
        """Reservations that ended have given back their amounts."""
        for one in self.accounts:
            assert one.used == self.used[one]
            assert one.promised == self.promised(one)
            assert one.is_used_up is (one.limit is not None and one.used >= one.limit)


TestTree = pytest.mark.slow(Tree.TestCase)


# I7: sums of fractions are exact once nothing is open.
def test_the_last_reservation_leaves_no_rounding() -> None:
    account: Account[float] = Account(None, 1.0)
    some = [account.reserve(0.1) for _ in range(3)]
    for one in some:
        assert one is not None
        one.release()
    assert account.promised == 0


# spec S7: what a client may use is the least of its own limit and those above.
def test_a_nested_account_is_held_by_every_limit_above() -> None:
    host: Account[int] = Account(None, 10)
    child = Account(host, 6)
    client = Account(child, None)
    kept = client.reserve(4)
    assert kept is not None
    assert (client.left, child.left, host.left) == (float("inf"), 2, 6)
    assert not client.charge(3)
    assert (child.refused, host.refused) == (1, 0)
    assert Account(host).charge(6)
    assert not client.charge(1)
    assert (child.refused, host.refused) == (1, 1)
    kept.settle(1)
    assert [one.used for one in (client, child, host)] == [1, 1, 7]


@pytest.mark.parametrize("limit", [None, 5])
def test_a_negative_charge_needs_no_room(limit: int | None) -> None:
    account: Account[int] = Account(None, limit)
    account.record(9)
    assert account.charge(-20)
    assert account.used == -11


# spec S7: a child that was restored, or began before its host's account was known.
def test_an_account_that_joins_another_brings_its_use() -> None:
    host: Account[int] = Account(None, 10)
    child: Account[int] = Account()
    client = Account(child)
    client.record(7)
    child.join(host)
    assert host.used == 7
    assert client.charge(3)
    assert not client.charge(1)
    assert (host.refused, host.left, host.excess) == (1, 0, 0)


def test_a_use_is_given_back_at_the_end_of_its_block() -> None:
    host: Account[int] = Account(None, 2)
    child = Account(host)
    with child.holding(5):
        assert [(one.used, one.excess) for one in child.path()] == [(5, 0), (5, 3)]
    assert [one.used for one in child.path()] == [0, 0]
