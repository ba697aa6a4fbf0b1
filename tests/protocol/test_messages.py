"""Messages are values: equal by what they carry, and shown with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import messages
from tests.protocol import strategies


@pytest.mark.slow
@given(st.lists(strategies.requests(), min_size=2, max_size=2))
def test_requests_are_equal_if_they_carry_the_same(
    pair: list[messages.Request],
) -> None:
    first, second = pair
    assert (first == second) is (repr(first) == repr(second))
    if first == second:
        assert hash(first) == hash(second)


def test_equal_requests_have_equal_hashes() -> None:
    seen = {messages.Read(b"1", 2), messages.Read(b"1", 2), messages.Seek(b"1", 2)}
    assert len(seen) == 2


def test_a_request_differs_from_another_command_and_from_other_things() -> None:
    assert messages.Read(b"1", 2) != messages.Write(b"1", 2)
    assert messages.Ping() != messages.Caps()
    assert messages.Ping() != b"PING"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (messages.Ping(), "Ping()"),
        (messages.Read(b"01", 2), "Read(token=b'01', size=2)"),
        (messages.Open(b"a", b"r", None), "Open(name=b'a', mode=b'r', flag=None)"),
        (
            messages.Refusal(b"ERROR\n", 3),
            r"Refusal(reply=b'ERROR\n', body=3, token=None, parts=())",
        ),
        (messages.Reply(True, b"3", 3, 3), "Reply(True, b'3', 3, 3)"),
    ],
)
def test_a_message_shows_what_it_carries(message: object, text: str) -> None:
    assert repr(message) == text


@pytest.mark.parametrize("size", [0, 5, 10**18 - 1])
def test_a_read_and_a_write_carry_the_reply_for_all_of_it(size: int) -> None:
    # spec R1, W1
    assert messages.Read(b"1000", size).head == b"OK %d\n" % size
    assert messages.Write(b"1000", size).head == b"OK %d\n" % size
