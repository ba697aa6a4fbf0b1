"""The quota tree: what calls may cost, what they have cost, and who pays.

Pure and synchronous bookkeeping; nothing here waits, opens or imports Trio.

Rules of this file.

1. A call reserves its worst case at the node of its client and at every ancestor before
   it is made, and settles what it cost at the same nodes afterwards (spec L10).
2. Invariant (I7), at every node with a limit: reserved <= max(0, limit - spent).
3. A reservation is settled once, whatever happens; a second settlement does nothing.
4. A node without a limit of its own is counted, and asks its nearest ancestor that has
   one (spec L9).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_FACTORS = 64
"""Models of which an account knows how their providers count; the oldest is forgotten."""

MOST_ALONE = 1 << 31
"""Most tokens of output of a call that goes alone, where output costs nothing."""

BYTES_PER_TOKEN = 4
"""The estimate of spec L10: four bytes of text are a token."""


class QuotaError(Exception):
    """The quota does not allow the call (spec L10)."""


class HeldQuotaError(QuotaError):
    """It would, but for calls under way, which hold what is left until they end."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What a token of each kind costs (spec L8).

    Attributes:
        input: a token of the prompt.
        cached: one that the provider had cached.
        output: one of the completion, reasoning included.
        cache_write: one that the provider puts into its cache; None: as ``input``.
    """

    input: float = 1.0
    cached: float = 0.25
    output: float = 4.0
    cache_write: float | None = None

    @property
    def written(self) -> float:
        """What a token costs that the provider puts into its cache."""
        return self.input if self.cache_write is None else self.cache_write

    @property
    def prompt(self) -> float:
        """The most that a token of a prompt can cost."""
        return max(self.input, self.written)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a call took, in tokens, as the provider reports it.

    Attributes:
        prompt: all of it, cached tokens included.
        completion: all of it, reasoning included.
        cached: of the prompt, those that the provider had cached.
        cache_write: of the prompt, those that it has put into its cache.
        reasoning: of the completion, those that are not shown.
    """

    prompt: int
    completion: int
    cached: int = 0
    cache_write: int = 0
    reasoning: int = 0

    def cost(self, weights: Weights) -> float:
        """Return the weighted tokens of spec L8 and MD5."""
        cached = min(self.cached, self.prompt)
        written = min(self.cache_write, self.prompt - cached)
        return (
            (self.prompt - cached - written) * weights.input
            + cached * weights.cached
            + written * weights.written
            + self.completion * weights.output
        )


def tokens_of(size_bytes: int) -> int:
    """Estimate the tokens of so many bytes of text (spec L10)."""
    return -(-size_bytes // BYTES_PER_TOKEN)


class Node:
    """One client's account, or the host's.

    Args:
        parent: who pays as well; None for the host's.
        limit: weighted tokens; None for none of its own.
        max_calls: calls that may count; None for any number.

    Attributes:
        spent: weighted tokens that calls have cost.
        promised: what calls under way were told that they may cost.
        calls: calls that counted.
        under_way: calls that are being made.
        refusals: calls in a row for which nothing was left (spec MD6).
        factors: how many times the worst case of a prompt a provider has counted, by
            model (spec MD5).
    """

    __slots__ = (
        "calls",
        "factors",
        "limit",
        "max_calls",
        "parent",
        "promised",
        "refusals",
        "spent",
        "under_way",
    )

    def __init__(
        self,
        parent: Node | None = None,
        limit: float | None = None,
        max_calls: int | None = None,
    ) -> None:
        self.parent = parent
        self.limit = limit
        self.max_calls = max_calls
        self.spent = 0.0
        self.promised = 0.0
        self.calls = 0
        self.under_way = 0
        self.refusals = 0
        self.factors: dict[str, float] = {}

    def path(self) -> Iterator[Node]:
        """Yield this node and its ancestors."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    @property
    def reserved(self) -> float:
        """What is set aside for calls under way.

        As promised, unless a call cost more than its worst case (a provider counts as
        it likes): what it took beyond is not there for the others any more (I7).
        """
        if self.limit is None:
            return self.promised
        return min(self.promised, max(0.0, self.limit - self.spent))

    @property
    def left(self) -> float:
        """What calls that are not reserved yet may cost; infinite without a limit."""
        if self.limit is None:
            return math.inf
        return max(0.0, self.limit - self.spent) - self.reserved

    @property
    def is_used_up(self) -> bool:
        """Whether no call can be paid here, whatever becomes of those under way."""
        if self.max_calls is not None and self.calls >= self.max_calls:
            return True
        return self.limit is not None and self.spent >= self.limit

    def factor(self, model: str) -> float:
        """Return how many times the worst case of a prompt may be counted (spec MD5)."""
        return max(1.0, *(node.factors.get(model, 1.0) for node in self.path()))

    def learn(self, model: str, factor: float) -> None:
        """Record what a provider has counted, here and at every account with a limit.

        So a new child of the same account is reserved for as the one before it was.
        """
        for node in self.path():
            is_account = node is self or node.limit is not None
            if is_account and factor > node.factors.get(model, 1.0):
                node.factors.pop(model, None)
                node.factors[model] = factor
                if len(node.factors) > MOST_FACTORS:
                    del node.factors[next(iter(node.factors))]

    def shown(self) -> Node:
        """Return the node whose numbers this one reports (spec L9).

        Its own without any limit above: it reports what it has spent itself.
        """
        for node in self.path():
            if node.limit is not None:
                return node
        return self

    def lower(self, limit: float) -> None:
        """Set a limit that may not grow; what is under way stays reserved (I7).

        It is no larger than any above, which would only be a promise that nobody keeps.
        """
        wanted = max(limit, self.spent + self.reserved) if self.under_way else limit
        bounds = (node.limit for node in self.path() if node.limit is not None)
        self.limit = min((wanted, *bounds))

    def forget_spending(self) -> None:
        """Begin a new window; what is under way stays reserved."""
        self.spent = 0.0
        self.calls = 0
        self.refusals = 0

    def reserve(
        self,
        prompt_tokens: int,
        max_tokens: int | None,
        weights: Weights,
        likely_tokens: int | None = None,
    ) -> Reservation:
        """Reserve the worst case of a call here and at every ancestor (spec L10).

        Args:
            prompt_tokens: the most that the prompt may take.
            max_tokens: most tokens of output; None where nothing is configured.
            weights: of the model.
            likely_tokens: what the prompt will take by an estimate; None for the most.

        Raises:
            QuotaError: nothing is left, or as many calls were made as may be.
            HeldQuotaError: what is left is held by calls under way.
        """
        path = tuple(self.path())
        if any(node.is_used_up for node in path):
            self.refusals += 1
            raise QuotaError
        likely = prompt_tokens if likely_tokens is None else likely_tokens
        prompt = (prompt_tokens, min(likely, prompt_tokens))
        reservation = _reserve_left(path, prompt, max_tokens, weights)
        self.refusals = 0
        return reservation


def _reserve_left(
    path: tuple[Node, ...],
    prompt: tuple[int, int],
    max_tokens: int | None,
    weights: Weights,
) -> Reservation:
    """Reserve a call at nodes of which none is used up.

    Args:
        path: they.
        prompt: tokens of the prompt, the most and by an estimate.
        max_tokens: see ``Node.reserve``.
        weights: see ``Node.reserve``.

    Raises:
        HeldQuotaError: what is left is held by calls under way.
    """
    for node in path:
        most = node.max_calls
        if most is not None and node.calls + node.under_way >= most:
            raise HeldQuotaError
    prompt_tokens, likely_tokens = prompt
    prompt_cost = prompt_tokens * weights.prompt
    left = min(node.left for node in path)
    if left <= 0.0:
        raise HeldQuotaError
    room = _output_room(left - prompt_cost, weights)
    if room >= 1:
        granted = room if max_tokens is None else min(max_tokens, room)
        if granted == math.inf:  # no limit in the path, or output costs nothing
            amounts = (prompt_cost,) * len(path)
            return Reservation(path, amounts, None, prompt_tokens, weights)
        tokens = int(granted)
        # Without a maximum all that remains is reserved, fractions of a token too.
        cost = left if max_tokens is None else prompt_cost + tokens * weights.output
        cost = min(cost, left)
        amounts = (cost,) * len(path)
        return Reservation(path, amounts, tokens, prompt_tokens, weights)
    # The worst case does not fit: it goes alone where it does not, and nothing is
    # admitted there until it is settled (spec MD5).
    wanted = prompt_cost + weights.output
    if any(node.left < wanted and node.under_way for node in path):
        raise HeldQuotaError
    room = _output_room(left - likely_tokens * weights.input, weights)
    granted = min(room if max_tokens is None else max_tokens, room)
    tokens = int(max(1, min(granted, MOST_ALONE)))
    wanted = prompt_cost + tokens * weights.output
    amounts = tuple(min(wanted, node.left) for node in path)
    return Reservation(path, amounts, tokens, prompt_tokens, weights)


def _output_room(left: float, weights: Weights) -> float:
    """Return how many tokens of output fit into what is left after the prompt."""
    if left == math.inf:
        return math.inf
    if left < 0.0:
        return 0
    if not weights.output:
        return math.inf
    return math.floor(left / weights.output)


@dataclass(slots=True, eq=False)
class Reservation:
    """A call's worst case, reserved until it is settled.

    Attributes:
        path: the nodes that pay, the client's own first.
        amounts: weighted tokens reserved at each of them.
        max_tokens: what the output is held to; None for no bound.
        prompt_tokens: what was reserved for the prompt.
        weights: of the model.
        cost: weighted tokens that were charged; None before the end.
    """

    path: tuple[Node, ...]
    amounts: tuple[float, ...]
    max_tokens: int | None
    prompt_tokens: int
    weights: Weights
    cost: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        for node, amount in zip(self.path, self.amounts, strict=True):
            node.promised += amount
            node.under_way += 1

    def settle(self, usage: Usage, least: float = 0.0) -> float:
        """Charge what the call took; return its weighted tokens.

        Args:
            usage: what was reported, or is estimated.
            least: weighted tokens that are charged in any case.
        """
        return self._end(max(least, usage.cost(self.weights)), counts=True)

    def release(self) -> None:
        """Charge nothing: the provider was not asked, or refused."""
        self._end(0.0, counts=False)

    def _end(self, cost: float, *, counts: bool) -> float:
        if self.cost is not None:
            return self.cost
        self.cost = cost
        for node, amount in zip(self.path, self.amounts, strict=True):
            node.under_way -= 1
            # The last one takes what rounding has left with it.
            node.promised = node.promised - amount if node.under_way else 0.0
            node.spent += cost
            node.calls += counts
        return cost


def status_text(node: Node) -> str:
    """Return what LLM_CHAT's reply says of the quota (spec L7)."""
    shown = node.shown()
    if shown.limit is None:
        return f"{shown.spent:.1f} weighted tokens (no limit)"
    return f"{shown.spent:.1f}/{int(shown.limit)} weighted tokens"


def quota_text(node: Node) -> str:
    """Return what LLM_QUOTA answers (spec L9)."""
    shown = node.shown()
    if shown.limit is None:
        return status_text(node)
    used = 100.0 * shown.spent / shown.limit if shown.limit else 100.0
    left = max(0.0, shown.limit - shown.spent)
    return f"{status_text(node)} ({used:.1f}% used, {left:.1f} remaining)"
