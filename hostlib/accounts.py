"""Accounts in a tree: the limit, use and reservations of one resource.

Pure bookkeeping, without I/O.

Rules of this file.

1. An amount is charged or reserved at an account and at all of its ancestors, or at none.
2. Invariant (I7), at every account with a limit: reserved <= max(0, limit - used).
3. A reservation ends once; ending it again changes nothing.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

Amount = TypeVar("Amount", int, float)


class Account(Generic[Amount]):
    """The limit and use of one resource, for an owner and all accounts beneath it.

    Args:
        parent: the account that is charged as well; None for the topmost.
        limit: the most that may be used; None for no bound of its own.

    Attributes:
        used: the charged sum; below 0 if more was given back than charged.
        promised: the sum of all open reservations.
        reservations: number of open reservations.
        refused: number of charges that this account's own limit refused.
    """

    __slots__ = ("limit", "parent", "promised", "refused", "reservations", "used")

    def __init__(
        self, parent: Account[Amount] | None = None, limit: Amount | None = None
    ) -> None:
        self.parent: Account[Amount] | None = parent
        self.limit: Amount | None = limit
        self.used: Amount = 0
        self.promised: Amount = 0
        self.reservations = 0
        self.refused = 0

    def join(self, parent: Account[Amount]) -> None:
        """Charge a parent as well from now on, beginning with the present use.

        Precondition: it has no parent, and nothing is reserved.
        """
        if self.parent is not None or self.reservations:
            raise RuntimeError("an account joins one parent, with nothing reserved")
        self.parent = parent
        parent.record(self.used)

    def path(self) -> Iterator[Account[Amount]]:
        """Yield this account and its ancestors."""
        account: Account[Amount] | None = self
        while account is not None:
            yield account
            account = account.parent

    @property
    def reserved(self) -> Amount:
        """The amount that is kept for open reservations.

        Normally ``promised``.  It is less if some use went beyond its reservation: then
        the rest of the limit is smaller than the promises (I7).
        """
        if self.limit is None:
            return self.promised
        return min(self.promised, max(0, self.limit - self.used))

    @property
    def left(self) -> float:
        """The amount that is neither used nor reserved; infinite without a limit."""
        if self.limit is None:
            return math.inf
        return max(0, self.limit - self.used) - self.reserved

    @property
    def excess(self) -> Amount:
        """The amount that is used beyond the limit; 0 without a limit."""
        return 0 if self.limit is None else max(0, self.used - self.limit)

    def lefts(self) -> list[float]:
        """Return the amount that is left here, and at each account above."""
        return [account.left for account in self.path()]

    @property
    def is_used_up(self) -> bool:
        """Whether the used amount alone has reached the limit."""
        return self.limit is not None and self.used >= self.limit

    def charge(self, amount: Amount) -> bool:
        """Charge an amount here and above, or nowhere; return whether it was charged.

        A negative amount gives back, and is always accepted.
        """
        if amount > 0 and not self._has_room(amount):
            return False
        self.record(amount)
        return True

    def record(self, amount: Amount) -> None:
        """Charge a use that has already happened, here and above, also beyond the limits."""
        account: Account[Amount] | None = self
        while account is not None:
            account.used += amount
            account = account.parent

    @contextmanager
    def holding(self, amount: Amount) -> Iterator[None]:
        """Charge a use for the length of the block, also beyond the limits."""
        self.record(amount)
        try:
            yield
        finally:
            self.record(-amount)

    def give_back(self, amount: Amount) -> None:
        """Give back an amount that may never have been charged; no count goes below 0."""
        for account in self.path():
            account.used -= min(amount, max(0, account.used))

    def reserve(self, amount: Amount) -> Reservation[Amount] | None:
        """Reserve an amount here and above; return None if it does not fit."""
        if not self._has_room(amount):
            return None
        return Reservation([(account, amount) for account in self.path()])

    def _has_room(self, amount: Amount) -> bool:
        account: Account[Amount] | None = self
        while account is not None:
            limit = account.limit
            if limit is not None and account.used + account.promised + amount > limit:
                account.refused += 1
                return False
            account = account.parent
        return True

    def lower(self, limit: Amount) -> None:
        """Set a limit that is no larger than the present ones.

        Open reservations stay reserved (I7).
        """
        if self.reservations:
            limit = max(limit, self.used + self.reserved)
        for account in self.path():
            if account.limit is not None:
                limit = min(limit, account.limit)
        self.limit = limit


class Reservation(Generic[Amount]):
    """Amounts that are reserved until they are settled or released.

    Args:
        amounts: each account with the amount that is reserved there.
    """

    __slots__ = ("_amounts",)

    def __init__(self, amounts: list[tuple[Account[Amount], Amount]]) -> None:
        self._amounts: list[tuple[Account[Amount], Amount]] = amounts
        for account, amount in amounts:
            account.promised += amount
            account.reservations += 1

    def settle(self, used: Amount) -> None:
        """Charge the used amount, which may be less or more than was reserved."""
        amounts, self._amounts = self._amounts, []
        for account, amount in amounts:
            account.reservations -= 1
            # The last reservation also removes the remains of rounding.
            account.promised = account.promised - amount if account.reservations else 0
            account.used += used

    def release(self) -> None:
        """End the reservation without a charge."""
        self.settle(0)
