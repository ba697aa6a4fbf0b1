"""Orders that came before: what is remembered of them is what would be made (ADR 79)."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from supervisor.launchpad import calls
from supervisor.spawn_request import SpawnRequest
from supervisor.standby import KNOWN_ORDERS, KnownOrder, KnownOrders

TEXT = st.text(st.sampled_from("abc"), max_size=3)
REQUESTS = st.builds(
    lambda name, argv, env, targets, limits, umask, is_layer: SpawnRequest(
        name, ("t", *argv), env, cwd_fd=0,
        fds=tuple((0, target) for target in targets), rlimits=tuple(limits),
        umask=umask, layers={"rlimits": None} if is_layer else {},
    ),
    st.sampled_from(["/bin/true", "/bin/false"]),
    st.lists(TEXT, max_size=2),
    st.dictionaries(TEXT.filter(bool), TEXT, max_size=2),
    st.lists(st.integers(0, 5), unique=True, max_size=3),
    st.lists(st.just((7, 64, 64)), max_size=1),
    st.sampled_from([None, 0o22]),
    st.booleans(),
)  # fmt: skip


# ADR 79: from memory or not, it is the same order.
@given(st.lists(st.tuples(REQUESTS, st.integers(1, 6)), max_size=40))
def test_an_order_that_was_made_before_is_the_same_again(
    asked: list[tuple[SpawnRequest, int]],
) -> None:
    known = KnownOrders()
    for request, page in (*asked, *asked):
        fresh = KnownOrder(request, calls.Shapes())
        expected = fresh.calls(page << 12), fresh.applied
        assert known.of(request, page << 12) == expected
        assert len(known._known) <= KNOWN_ORDERS
    for order in known._known.values():
        assert len(order._made) <= 4


def test_a_long_order_is_not_remembered() -> None:
    known = KnownOrders()
    request = SpawnRequest("/bin/true", ("t", "x" * 4096), {}, cwd_fd=0, fds=())
    for _ in range(2):
        assert b"x" * 4096 in known.of(request, 4096)[0]
    assert not known._known


def test_an_order_is_remembered_for_a_few_addresses() -> None:
    known = KnownOrders()
    request = SpawnRequest("/bin/true", ("t",), {}, cwd_fd=0, fds=())
    for page in range(1, 20):
        known.of(request, page << 12)
    (order,) = known._known.values()
    assert len(order._made) <= 4


def test_limits_are_said_where_they_are_a_layer() -> None:
    known = KnownOrders()
    without = SpawnRequest("/bin/true", ("t",), {}, cwd_fd=0, fds=())
    with_layer = replace(without, layers={"rlimits": None})
    said = [dict(known.of(one, 4096)[1]) for one in (without, with_layer)]
    assert ["rlimits" in one for one in said] == [False, True]
