"""The state of a conversation whose request cannot be continued."""

import msgspec
import pytest
import trio
import trio.testing

from hostlib.handover import HandoverError
from supervisor.fsproxy.inbound import Inbound
from supervisor.fsproxy.outbound import Outbound
from supervisor.fsproxy.replies import REPLACED
from supervisor.fsproxy.session import Session
from supervisor.fsproxy.session_state import BodyState, OutboundState, SessionState
from supervisor.handover.exchange import replace
from supervisor.handover.next_program import Program
from tests.helpers.sessions import Hall, hall
from vfs.handover import Numbering

__all__ = ["hall"]

NOT_HANDED_OVER: dict[type, tuple[type[msgspec.Struct], set[str]]] = {
    Session: (
        SessionState,
        {
            # `owns`, `closed`, `held` and `body`, and the fields of `OutboundState`.
            *("narrowed_places", "why_closed", "conn", "inbound", "begun", "outbound"),
            # The next program gives its own.
            *("pump", "fs", "services", "counts", "check_effect", "on_attach"),
            *("_handlers", "_on_closed", "deadline_s", "max_write_bytes"),
            # They follow from the client, and from the order of the forms.
            *("top", "parent"),
            # A job is handed over as what is left of it, or is answered by an error.
            *("job", "_holding", "_interrupted", "_kind"),
            *("_over", "_stop", "_suspended", "_wake"),
            # For the record of its end, and for the status page.
            *("closed_files", "failure", "last_error", "last_request"),
        },
    ),
    Outbound: (
        OutboundState,
        {
            # The next program gives its own.
            *("_pump", "_write_fd", "_deadline_s", "_ledger", "_top"),
            # Its bytes are read again.
            "redo",
            *("_waiting", "is_stopped"),
        },
    ),
    Inbound: (
        BodyState,
        {
            # The next program gives its own.
            *("_conn", "_read_fd", "_budget", "_ledger"),
            # `spool` and `got`, `reply`, and `reserved` in the form of the session.
            *("payload", "drain_reply", "reserved"),
            # The request that is read again has its own.
            *("_finish", "_memory"),
        },
    ),
}


@pytest.mark.parametrize("owner", NOT_HANDED_OVER, ids=lambda owner: owner.__name__)
def test_no_field_is_forgotten(owner: type) -> None:
    form, left_out = NOT_HANDED_OVER[owner]
    assert {*vars(owner)["__slots__"]} - {*form.__struct_fields__} == left_out


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
    assert session.is_at_work
    session.conn.put_back(b"PING\nPI")
    state = session.snapshot(Numbering())
    assert (state.unsent, state.held) == (REPLACED, b"PING\nPI")
    assert state.unsent.startswith(b"ERROR ")
    assert state.unsent.count(b"\n") == 1
    # To be taken down has changed nothing: if there is no exchange, it goes on.
    release.set()
    assert await line.line() == b"OK at last"
    assert await line.line() == b"OK"
    await line.send(b"NG\n")
    assert await line.line() == b"OK"
    assert not session.is_at_work


async def test_a_reply_that_waits_for_its_client_is_no_work(hall: Hall) -> None:
    line = hall.connect()
    reply = b"OK %d\n" % 4_000_000 + b"x" * 4_000_000
    line.session.start(lambda: _sent(reply))
    await trio.testing.wait_all_tasks_blocked()
    assert not line.session.is_at_work
    state = line.session.snapshot(Numbering())
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
