"""The quota tree: limits and costs of calls, for each client and its ancestors.

Pure bookkeeping, without I/O and Trio.

Rules of this file.

1. A call reserves its worst case at the node of its client and at every ancestor before
   it is made, and settles its cost at the same nodes afterwards (spec L10, I7).
2. A node without a limit of its own reports its nearest ancestor with one (spec L9).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hostlib.accounts import Account, Reservation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from supervisor.llm.section import Weights

MOST_FACTORS = 64
"""Most models with a factor in one account; the oldest is forgotten."""

MOST_ALONE = 1 << 31
"""Most tokens of output of a call that runs alone, if output costs nothing."""

BYTES_PER_TOKEN = 4
"""The estimate of spec L10: four bytes of text are a token."""


class QuotaError(Exception):
    """The quota does not allow the call (spec L10)."""


class HeldQuotaError(QuotaError):
    """Present calls hold the rest of the quota until they end."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of a call, from the provider's report.

    Attributes:
        prompt: tokens of the prompt, cached ones included.
        completion: tokens of the completion, reasoning included.
        cached: tokens of the prompt that the provider had cached.
        cache_write: tokens of the prompt that it has cached now.
        reasoning: tokens of the completion that are not shown.
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
    """Return an estimate of the tokens of a text's bytes (spec L10)."""
    return -(-size_bytes // BYTES_PER_TOKEN)


class Node:
    """One client's account, or the host's.

    Args:
        parent: the node that pays as well; None for the host's.
        limit: most weighted tokens; None for no limit of its own.
        max_calls: most calls; None for any number.

    Attributes:
        tokens: account of weighted tokens, used and reserved.
        calls: account of calls, made and being made.
        refusals: refused calls in a row, which the gateway counts (spec MD6).
        factors: model -> factor by which its provider exceeded the worst case of a prompt
            (spec MD5).
    """

    __slots__ = ("calls", "factors", "parent", "refusals", "tokens")

    def __init__(
        self,
        parent: Node | None = None,
        limit: float | None = None,
        max_calls: int | None = None,
    ) -> None:
        self.parent = parent
        above = (None, None) if parent is None else (parent.tokens, parent.calls)
        self.tokens: Account[float] = Account(above[0], limit)
        self.calls: Account[int] = Account(above[1], max_calls)
        self.refusals = 0
        self.factors: dict[str, float] = {}

    def path(self) -> Iterator[Node]:
        """Yield this node and its ancestors."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def factor(self, model: str) -> float:
        """Return the factor for the worst case of a prompt (spec MD5)."""
        return max(1.0, *(node.factors.get(model, 1.0) for node in self.path()))

    def learn(self, model: str, factor: float) -> None:
        """Record a provider's factor, here and at every account with a limit.

        So a new child of the same account reserves enough from its first call.
        """
        for node in self.path():
            is_account = node is self or node.tokens.limit is not None
            if is_account and factor > node.factors.get(model, 1.0):
                node.factors.pop(model, None)
                node.factors[model] = factor
                if len(node.factors) > MOST_FACTORS:
                    del node.factors[next(iter(node.factors))]

    def reported_node(self) -> Node:
        """Return the node whose numbers this one reports (spec L9).

        It is this node if no ancestor has a limit.
        """
        for node in self.path():
            if node.tokens.limit is not None:
                return node
        return self

    def status_text(self) -> str:
        """Return the text about the quota in LLM_CHAT's reply (spec L7)."""
        tokens = self.reported_node().tokens
        if tokens.limit is None:
            return f"{tokens.used:.1f} weighted tokens (no limit)"
        return f"{tokens.used:.1f}/{int(tokens.limit)} weighted tokens"

    def quota_text(self) -> str:
        """Return the answer to LLM_QUOTA (spec L9)."""
        tokens = self.reported_node().tokens
        if tokens.limit is None:
            return self.status_text()
        used = 100.0 * tokens.used / tokens.limit if tokens.limit else 100.0
        left = max(0.0, tokens.limit - tokens.used)
        return f"{self.status_text()} ({used:.1f}% used, {left:.1f} remaining)"

    def forget_spending(self) -> None:
        """Begin a new window; reservations of present calls stay."""
        self.tokens.used = 0.0
        self.calls.used = 0
        self.refusals = 0

    def reserve(
        self,
        prompt_tokens: int,
        max_tokens: int | None,
        weights: Weights,
        likely_tokens: int | None = None,
    ) -> ReservedCall:
        """Reserve the worst case of a call here and at every ancestor (spec L10).

        Args:
            prompt_tokens: most tokens of the prompt.
            max_tokens: most tokens of output; None if none is configured.
            weights: the model's weights.
            likely_tokens: estimate of the prompt's tokens; None for the most.

        Raises:
            QuotaError: the quota of tokens or of calls is used up.
            HeldQuotaError: present calls hold the rest of the quota.
        """
        accounts: tuple[Account[Any], ...] = *self.calls.path(), *self.tokens.path()
        if any(account.is_used_up for account in accounts):  # by ended calls alone
            raise QuotaError
        lefts = self.tokens.lefts()
        if min(lefts) <= 0.0 or min(self.calls.lefts()) < 1:
            raise HeldQuotaError
        likely = prompt_tokens if likely_tokens is None else likely_tokens
        least_tokens = min(likely, prompt_tokens)
        cost, bound = self._worst_case(
            prompt_tokens, least_tokens, max_tokens, weights, lefts
        )
        return ReservedCall(self, lefts, weights, cost, bound)

    def _worst_case(
        self,
        prompt_tokens: int,
        likely_tokens: int,
        max_tokens: int | None,
        weights: Weights,
        lefts: list[float],
    ) -> tuple[float, int | None]:
        """Return the weighted tokens to reserve, and the bound on the output.

        Raises:
            HeldQuotaError: present calls hold the rest of the quota.
        """
        left = min(lefts)
        prompt_cost = prompt_tokens * weights.prompt
        room = _output_room(left - prompt_cost, weights)
        if room >= 1:
            granted = room if max_tokens is None else min(max_tokens, room)
            if granted == math.inf:  # no limit in the path, or output costs nothing
                return prompt_cost, None
            tokens = int(granted)
            # Without a maximum reserve all that is left, with fractions of a token.
            cost = left if max_tokens is None else prompt_cost + tokens * weights.output
            return cost, tokens
        # The worst case does not fit: the call runs alone at the nodes where it does not,
        # which admit no other call until it is settled (spec MD5).
        wanted = prompt_cost + weights.output
        for node, left_here in zip(self.path(), lefts, strict=True):
            if left_here < wanted and node.tokens.reservations:
                raise HeldQuotaError
        room = _output_room(left - likely_tokens * weights.input, weights)
        granted = min(room if max_tokens is None else max_tokens, room)
        tokens = int(max(1, min(granted, MOST_ALONE)))
        return prompt_cost + tokens * weights.output, tokens


def _output_room(left: float, weights: Weights) -> float:
    """Return the tokens of output that fit into the rest after the prompt."""
    if left == math.inf:
        return math.inf
    if left < 0.0:
        return 0
    if not weights.output:
        return math.inf
    return math.floor(left / weights.output)


class ReservedCall:
    """A call's worst case, reserved until it is settled.

    Args:
        node: the node that pays, with its ancestors; a node with less left than the worst
            case reserves its rest.
        lefts: the weighted tokens that are left at each of them.
        weights: the model's weights.
        worst_cost: weighted tokens.
        max_tokens: the bound on the output; None for no bound.

    Attributes:
        amounts: each node that pays, with its reserved amount.
        reserved: the largest of these amounts.
        cost: charged weighted tokens; None before the end.
    """

    def __init__(
        self,
        node: Node,
        lefts: list[float],
        weights: Weights,
        worst_cost: float,
        max_tokens: int | None,
    ) -> None:
        amounts = [min(worst_cost, left) for left in lefts]
        self.amounts = tuple(zip(node.path(), amounts, strict=True))
        self.reserved = max(amounts)
        tokens = [(one.tokens, amount) for one, amount in self.amounts]
        calls = [(one.calls, 1) for one, _ in self.amounts]
        self._tokens, self._call = Reservation(tokens), Reservation(calls)
        self.worst_cost = worst_cost
        self.max_tokens = max_tokens
        self._weights = weights
        self.cost: float | None = None

    def settle(self, usage: Usage, least: float = 0.0) -> float:
        """Charge the call's use; return its weighted tokens.

        Args:
            usage: the reported or estimated use.
            least: weighted tokens that are charged in any case.
        """
        return self._end(max(least, usage.cost(self._weights)), counts=True)

    def release(self) -> None:
        """End without a charge: the call was not made, or refused."""
        self._end(0.0, counts=False)

    def _end(self, cost: float, *, counts: bool) -> float:
        if self.cost is None:
            self.cost = cost
            self._tokens.settle(cost)
            self._call.settle(int(counts))
        return self.cost
