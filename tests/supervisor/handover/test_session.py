"""The state of a conversation whose request cannot be continued."""

import pytest
import trio
import trio.testing

from hostlib.handover import HandoverError
from supervisor.fsproxy.replies import REPLACED
from supervisor.fsproxy.session_state import SessionState, is_at_work, snapshot_work
from supervisor.handover.exchange import replace
from supervisor.handover.next_program import Program
from tests.helpers.sessions import Hall, hall
from vfs.filesystem import ClientState

__all__ = ["hall"]


def empty() -> SessionState:
    """A conversation in which nothing is under way."""
    limits = (None, None, None, None)
    client = ClientState(
        id="c1",
        pipe_id="child-1:socketpair",
        pid=1,
        connected_at=0.0,
        policy=0,
        limits=limits,
        used=[0] * 4,
    )
    return SessionState(client, 2, -1, -1, False, False, 0, [], [])


# spec L10, T3: a request that waits for a model is answered with one error by the next
# program, and the requests behind it after that.
async def test_a_job_that_does_not_end_is_answered_by_an_error(hall: Hall) -> None:
    line = hall.connect()
    release = trio.Event()

    async def job() -> bytes:
        await release.wait()
        return b"OK at last\n"

    session = line.session
    assert await line.ask(b"PING\n") == b"OK"
    session.start(job)
    await trio.testing.wait_all_tasks_blocked()
    assert is_at_work(session)
    session.conn.put_back(b"PING\nPI")
    state = empty()
    snapshot_work(session, state)
    assert (state.unsent, state.held) == (REPLACED, b"PING\nPI")
    assert state.unsent.startswith(b"ERROR ")
    assert state.unsent.count(b"\n") == 1
    # To be taken down has changed nothing: if there is no exchange, it goes on.
    release.set()
    assert await line.line() == b"OK at last"
    assert await line.line() == b"OK"
    await line.send(b"NG\n")
    assert await line.line() == b"OK"
    assert not is_at_work(session)


async def test_a_reply_that_waits_for_its_client_is_no_work(hall: Hall) -> None:
    line = hall.connect()
    reply = b"OK %d\n" % 4_000_000 + b"x" * 4_000_000
    line.session.start(lambda: _sent(reply))
    await trio.testing.wait_all_tasks_blocked()
    assert not is_at_work(line.session)
    state = empty()
    snapshot_work(line.session, state)
    assert reply.endswith(state.unsent)
    assert 0 < len(state.unsent) < len(reply)
    assert await line.exactly(len(reply)) == reply


async def _sent(reply: bytes) -> bytes:
    await trio.lowlevel.checkpoint()
    return reply


class _Journal:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def write(self, event: str, *, reason: str) -> None:
        """Record why there was no exchange."""
        assert event == "host.not_replaced"
        self.reasons.append(reason)


class _BrokenHost:
    """A host whose parts cannot even be looked at."""

    def __init__(self) -> None:
        self.journal = _Journal()

    @property
    def launcher(self) -> None:
        """Fail."""
        raise ZeroDivisionError("a fault of the program")


async def test_a_fault_on_the_way_is_a_refusal() -> None:
    broken = _BrokenHost()
    program = Program("/bin/true", ("/bin/true",), ())
    with pytest.raises(HandoverError, match="a fault of the program"):
        await replace(broken, program)  # type: ignore[arg-type]
    assert len(broken.journal.reasons) == 1
