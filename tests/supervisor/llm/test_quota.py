"""The quota tree alone: any interleaving of calls, deaths and failures (I7)."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from supervisor.llm.quota import (
    HeldQuotaError,
    Node,
    QuotaError,
    ReservedCall,
    Usage,
    tokens_of,
)
from supervisor.llm.section import Weights

SLACK = 1e-6
"""Sums of floating point numbers, in weighted tokens."""

WEIGHTS = st.builds(
    Weights,
    input=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    cached=st.sampled_from([0.0, 0.25]),
    output=st.sampled_from([0.0, 1.0, 4.0, 7.5]),
)
LIMITS = st.none() | st.floats(0, 2000) | st.integers(0, 200)


class Tree(RuleBasedStateMachine):
    """Nodes come and go, calls begin and end in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.gone: list[Node] = []
        self.calls: list[tuple[Node, ReservedCall, int, Weights]] = []
        self.overshoot: dict[Node, float] = {}

    @initialize(limit=LIMITS, max_calls=st.none() | st.integers(0, 20))
    def begin(self, limit: float | None, max_calls: int | None) -> None:
        """The host's own node."""
        self.nodes.append(Node(None, limit, max_calls))

    @rule(data=st.data(), limit=LIMITS)
    def connect(self, data: st.DataObject, limit: float | None) -> None:
        """A client, anywhere in the tree."""
        if len(self.nodes) < 12:
            self.nodes.append(Node(data.draw(st.sampled_from(self.nodes)), limit))

    @rule(
        data=st.data(),
        prompt=st.integers(0, 300),
        most=st.none() | st.integers(1, 200),
        weights=WEIGHTS,
    )
    def call(
        self, data: st.DataObject, prompt: int, most: int | None, weights: Weights
    ) -> None:
        """A call begins, or is refused and nothing changes."""
        node = data.draw(st.sampled_from(self.nodes))
        before = [
            (n.tokens.promised, n.tokens.used, n.calls.reservations)
            for n in node.path()
        ]
        found, is_held = None, False
        try:
            found = node.reserve(prompt, most, weights)
        except HeldQuotaError:
            is_held = True
        except QuotaError:
            pass
        if found is None:
            assert before == [
                (n.tokens.promised, n.tokens.used, n.calls.reservations)
                for n in node.path()
            ]
            # spec MD6: what calls under way hold comes back, what is spent does not.
            is_spent = any(
                (n.tokens.limit is not None and n.tokens.used >= n.tokens.limit)
                or (n.calls.limit is not None and n.calls.used >= n.calls.limit)
                for n in node.path()
            )
            assert is_held is not is_spent
            assert is_spent or any(n.calls.reservations for n in node.path())
            return
        if most is not None:
            assert found.max_tokens is not None
            assert 1 <= found.max_tokens <= most
        assert all(
            n.tokens.limit is None or n.tokens.used < n.tokens.limit
            for n in node.path()
        )
        self.calls.append((node, found, prompt, weights))

    def _end(
        self, data: st.DataObject
    ) -> tuple[Node, ReservedCall, int, Weights] | None:
        if not self.calls:
            return None
        return self.calls.pop(data.draw(st.integers(0, len(self.calls) - 1)))

    @rule(data=st.data(), part=st.floats(0, 1), is_hidden=st.booleans())
    def settle(self, data: st.DataObject, part: float, is_hidden: bool) -> None:
        """A call ends within its worst case, or is cancelled on the way."""
        ended = self._end(data)
        if ended is None:
            return
        _, call, prompt, weights = ended
        most = 100 if call.max_tokens is None else call.max_tokens
        usage = Usage(prompt, int(most * part))
        least = call.reserved if is_hidden else 0.0
        cost = call.settle(usage, least)
        assert cost == max(least, usage.cost(weights))
        assert call.settle(Usage(10**9, 10**9)) == cost  # once and no more
        call.release()

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """A call fails and costs nothing."""
        ended = self._end(data)
        if ended is not None:
            node, call, *_ = ended
            spent = [one.tokens.used for one in node.path()]
            call.release()
            assert spent == [one.tokens.used for one in node.path()]

    @rule(
        data=st.data(), usage=st.builds(Usage, st.integers(0, 900), st.integers(0, 900))
    )
    def overrun(self, data: st.DataObject, usage: Usage) -> None:
        """A provider counts as it likes."""
        ended = self._end(data)
        if ended is not None:
            ended[1].settle(usage)

    @rule(data=st.data(), limit=st.floats(0, 500))
    def narrow(self, data: st.DataObject, limit: float) -> None:
        """A client gives up some of its quota."""
        node = data.draw(st.sampled_from(self.nodes))
        before = math.inf if node.tokens.limit is None else node.tokens.limit
        node.tokens.lower(limit)
        assert node.tokens.limit is not None
        above = [n.tokens.limit for n in node.path() if n.tokens.limit is not None]
        assert node.tokens.limit == min((before, *above))

    @rule()
    def new_window(self) -> None:
        """Midnight."""
        for node in self.nodes:
            node.forget_spending()

    # I7
    @invariant()
    def reserved_is_at_most_what_is_left(self) -> None:
        """The invariant itself."""
        for node in self.nodes:
            tokens = node.tokens
            if tokens.limit is not None:
                assert tokens.reserved <= max(0.0, tokens.limit - tokens.used) + SLACK
                assert tokens.left >= -SLACK
            assert tokens.reserved >= -SLACK
            assert node.calls.reservations >= 0

    @invariant()
    def nothing_is_promised_without_a_call(self) -> None:
        """Reservations that ended have given back their amounts."""
        for node in self.nodes:
            mine = [call for payer, call, *_ in self.calls if node in payer.path()]
            assert node.calls.reservations == len(mine)
            if not mine:
                assert node.tokens.promised == 0.0


TestTree = pytest.mark.slow(Tree.TestCase)


# spec L10: the overshoot is one call's at most, where calls keep to their worst case.
@given(
    limit=st.integers(1, 300),
    calls=st.lists(
        st.tuples(
            st.integers(0, 60), st.none() | st.integers(1, 40), st.integers(1, 6)
        ),
        max_size=30,
    ),
)
def test_the_overshoot_is_one_calls(
    limit: int, calls: list[tuple[int, int | None, int]]
) -> None:
    root = Node(None, float(limit))
    clients = [Node(root) for _ in range(4)]
    under_way: list[tuple[ReservedCall, int]] = []
    last = 0.0
    for number, (prompt, most, keep) in enumerate(calls):
        with contextlib.suppress(QuotaError):
            call = clients[number % 4].reserve(prompt, most, Weights())
            under_way.append((call, prompt))
        while len(under_way) > keep:
            call, sent = under_way.pop(0)
            last = max(last, call.settle(Usage(sent, call.max_tokens or 0)))
    for call, sent in under_way:
        last = max(last, call.settle(Usage(sent, call.max_tokens or 0)))
    assert root.tokens.used <= limit + last + SLACK
    assert root.tokens.used == pytest.approx(
        sum(client.tokens.used for client in clients)
    )


# spec L8
def test_weighted_tokens_are_the_formula() -> None:
    weights = Weights(1.0, 0.25, 4.0)
    assert Usage(1000, 50, 400).cost(weights) == 600 + 100 + 200
    assert Usage(10, 0, 99).cost(weights) == 2.5


@pytest.mark.parametrize(("size", "tokens"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_four_bytes_are_a_token(size: int, tokens: int) -> None:
    assert tokens_of(size) == tokens


# spec L7, L9
def test_the_words_of_the_contract() -> None:
    node = Node(None, 5000.0)
    node.tokens.used = 1250.5
    assert node.status_text() == "1250.5/5000 weighted tokens"
    assert node.quota_text() == (
        "1250.5/5000 weighted tokens (25.0% used, 3749.5 remaining)"
    )
    child = Node(node)
    child.tokens.used = 7.0
    assert child.status_text() == node.status_text()
    free = Node()
    free.tokens.used = 110.0
    assert free.quota_text() == free.status_text() == "110.0 weighted tokens (no limit)"
    assert Node(None, 0).quota_text() == (
        "0.0/0 weighted tokens (100.0% used, 0.0 remaining)"
    )


# spec L10: what is too little for a token of output goes while nothing else is under way
# at the node that has it, and with the rest of it alone.
def test_the_rest_is_for_one_that_goes_alone() -> None:
    root = Node(None, 46.0)
    first, second = Node(root), Node(root)
    call = first.reserve(5, 10, Weights())
    assert root.tokens.left == 1.0
    with pytest.raises(QuotaError):
        second.reserve(5, 10, Weights())
    call.settle(Usage(5, 10))
    alone = second.reserve(5, 10, Weights())
    assert (alone.max_tokens, root.tokens.reserved) == (1, 1.0)
    alone.settle(Usage(5, 1))
    assert root.tokens.used == 54.0


# spec L10: a client's own limit holds as well as the host's.
def test_every_ancestor_pays_and_can_refuse() -> None:
    root = Node(None, 100.0)
    child = Node(root, 50.0)
    nested = Node(child)
    call = nested.reserve(10, 10, Weights())
    assert [node.tokens.reserved for node in (nested, child, root)] == [
        50.0,
        50.0,
        50.0,
    ]
    with pytest.raises(QuotaError):
        child.reserve(1, 1, Weights())
    other = Node(root).reserve(10, 10, Weights())
    assert root.tokens.reserved == 100.0
    call.settle(Usage(10, 5))
    other.release()
    assert [node.tokens.used for node in (nested, child, root)] == [30.0, 30.0, 30.0]
    assert root.tokens.reserved == 0.0


# spec MD5: what was seen is known where the quota is, and its memory has an end.
def test_what_a_provider_counts_is_known_at_each_account() -> None:
    host = Node(limit=1000)
    open_host = Node()
    child, other = Node(host), Node(host)
    child.learn("m", 3.0)
    child.learn("m", 2.0)
    Node(open_host).learn("m", 3.0)
    assert (child.factor("m"), other.factor("m"), other.factor("n")) == (3.0, 3.0, 1.0)
    assert Node(open_host).factor("m") == 1.0
    for number in range(100):
        child.learn(f"m{number}", 2.0)
    assert len(host.factors) == len(child.factors) == 64
    assert other.factor("m99") == 2.0
