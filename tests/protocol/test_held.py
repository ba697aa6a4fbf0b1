"""One end of a connection goes on where another one stopped."""

from hypothesis import given
from hypothesis import strategies as st

from protocol import HostConnection

LINES = (
    b"OPEN a r false\n",
    b"READ 1000 5\n",
    b"PING\n",
    b"nonsense\n",
    b"x" * 70_000 + b"\n",
    b"CLOSE 1000\n",
)


def messages(conn: HostConnection, data: bytes) -> list[object]:
    """Feed bytes to a connection; return the messages that they complete."""
    found: list[object] = []
    message = conn.receive_data(data) if data else None
    while message is not None:
        found.append(message)
        message = conn.next_message()
    return found


# spec F3, F4: what another end of the connection has held is read once, by the next one.
@given(
    st.lists(st.sampled_from(LINES), min_size=1, max_size=5).map(b"".join), st.data()
)
def test_a_connection_goes_on_where_another_one_stopped(
    stream: bytes, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(stream)))
    later = data.draw(st.integers(cut, len(stream)))
    whole = messages(HostConnection(), stream)
    one = HostConnection()
    found = messages(one, stream[:cut])
    two = HostConnection()
    held, skipping = one.unread()
    two.put_back(held, skipping=skipping)
    message = two.next_message() if two.pending else None
    assert message is None
    for piece in (stream[cut:later], stream[later:]):
        found += messages(two, piece)
    assert found == whole
    assert two.idle
