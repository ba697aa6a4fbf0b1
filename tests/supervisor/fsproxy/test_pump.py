"""The pump: everybody gets a turn, and nobody is woken for nothing."""

import os
import threading
import time
from pathlib import Path

import pytest
import trio

from supervisor.fsproxy import pump as pump_module
from supervisor.fsproxy.pump import BATCH, POLLS, SLICE_S, Pump
from supervisor.fsproxy.replies import EOF
from supervisor.fsproxy.session import PIPELINED, Session
from tests.helpers.sessions import Hall, Line, hall, open_hall
from tests.supervisor.fsproxy.dialogue import Dialogue
from vfs.backends.host_file import HostHandle
from vfs.ledger import SHARE, Ledger

__all__ = ["hall"]


def serve_ready(pump: Pump) -> None:
    """Serve once each session that is ready, without a wait."""
    pump.serve_events(pump.epoll.poll(0, BATCH))


async def taken(line: Line, count: int) -> None:
    """Take the replies of `count` PINGs."""
    assert await line.exactly(3 * count) == b"OK\n" * count


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks but the one that made it."""

    def __init__(self) -> None:
        self.me = trio.lowlevel.current_task()
        self.steps: list[str] = []

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Note a step."""
        if task is not self.me:
            self.steps.append(task.name)


# Turns


# spec S5: of many clients that all have much to ask, each gets as much.
async def test_clients_get_equal_turns(hall: Hall) -> None:
    policy = hall.policy()
    lines = [hall.connect(policy) for _ in range(5)]
    async with trio.open_nursery() as nursery:
        for line in lines:
            await line.send(b"PING\n" * 5000)
            nursery.start_soon(taken, line, 5000)
        while max(done := [line.session.requests for line in lines]) < 5000:
            await trio.lowlevel.checkpoint()
    # Turns are equal; a client that takes its replies late is late by as many.
    assert min(done) > 5000 // 3, done


# spec S5: who asked in advance comes after those who have just asked, whatever it sends
# besides; nor does its turn last.
def test_who_asked_in_advance_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, calm = Dialogue(tmp_path), Dialogue(tmp_path)
    pump = calm.session.pump = ahead.session.pump
    served: list[Session] = []
    serve = Session.serve

    def noted(session: Session, *, alone: bool) -> bool:
        served.append(session)
        return serve(session, alone=alone)

    monkeypatch.setattr(Session, "serve", noted)
    try:
        for one in (ahead, calm):
            pump.add(one.session)
        ahead.ours.sendall(b"PING\n" * 1000)
        serve_ready(pump)
        assert 0 < ahead.session.requests <= PIPELINED
        for number in range(1, 20):
            answered = ahead.session.requests
            ahead.ours.sendall(b"PING\n")
            calm.ours.sendall(b"PING\n")
            serve_ready(pump)
            assert served[-2:] == [calm.session, ahead.session]
            assert calm.session.requests == number
            assert 0 < ahead.session.requests - answered <= PIPELINED
    finally:
        for one in (ahead, calm):
            pump.suspend(one.session)
            one.close()


# A client that asked in advance and was answered has no turn any more.
def test_who_is_left_over_is_not_left_over_for_ever(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path)
    pump = dialogue.session.pump
    try:
        pump.add(dialogue.session)
        dialogue.ours.sendall(b"PING\n" * (PIPELINED + 2))
        serve_ready(pump)
        assert pump.statistics().left_over == 1
        for _ in range(2):  # a turn ends early where the machine is busy
            serve_ready(pump)
        assert pump.statistics().left_over == 0
        assert dialogue.session.requests == PIPELINED + 2
    finally:
        pump.suspend(dialogue.session)
        dialogue.close()


# A refused watch is not counted: its share would never come back.
def test_a_connection_that_cannot_be_watched_is_not_counted(tmp_path: Path) -> None:
    dialogue = Dialogue(tmp_path)
    session, pump = dialogue.session, dialogue.session.pump
    fd, session.read_fd = session.read_fd, os.open(tmp_path, os.O_RDONLY)
    session.top = Ledger()  # as if it were attached
    try:
        with pytest.raises(PermissionError):  # a directory has nothing to wait for
            pump.add(session)
        assert not pump.sessions
        assert pump.statistics().attached == 0
    finally:
        os.close(session.read_fd)
        session.read_fd = fd
        dialogue.close()


# spec S5, S7: a child has no more turns for the connections that it has attached.
def test_of_one_childs_connections_a_turn_serves_a_few(tmp_path: Path) -> None:
    many = [Dialogue(tmp_path) for _ in range(7)]
    calm = Dialogue(tmp_path)
    pump = calm.session.pump
    for one in many:
        one.session.pump = pump
        one.session.top = many[0].session.top  # as where they were attached
    try:
        for one in (*many, calm):
            pump.add(one.session)
        for one in many:
            one.ours.sendall(b"PING\n" * 1000)
        for turn in range(1, 30):
            calm.ours.sendall(b"PING\n")
            before = [one.session.requests for one in many]
            serve_ready(pump)
            after = [one.session.requests for one in many]
            assert calm.session.requests == turn
            served = [n - was for was, n in zip(before, after, strict=True) if n > was]
            assert len(served) == SHARE
            assert max(served) <= PIPELINED
        answered = [one.session.requests for one in many]
        assert max(answered) - min(answered) <= 2 * PIPELINED  # each has its turn
        for one in many[1:]:
            pump.suspend(one.session)
        assert pump.statistics().attached == 0
    finally:
        for one in (many[0], calm):
            pump.suspend(one.session)
        for one in (*many, calm):
            one.close()


# More clients than one poll returns.
async def test_more_clients_than_a_poll_returns(hall: Hall) -> None:
    policy = hall.policy()
    lines = [hall.connect(policy) for _ in range(3 * pump_module.BATCH + 5)]
    for _ in range(3):
        for line in lines:
            await line.send(b"PING\n" * 2)
        with trio.fail_after(30):
            for line in lines:
                await taken(line, 2)


# spec S5: Trio's other tasks get their turn while clients keep the pump busy.
@pytest.mark.slow
async def test_other_tasks_get_their_turn(hall: Hall) -> None:
    policy = hall.policy()
    lines = [hall.connect(policy) for _ in range(4)]
    longest = 0.0
    async with trio.open_nursery() as nursery:
        for line in lines:
            await line.send(b"PING\n" * 10_000)
            nursery.start_soon(taken, line, 10_000)
        last = time.thread_time()
        while any(line.session.requests < 10_000 for line in lines):
            await trio.lowlevel.checkpoint()
            now = time.thread_time()
            longest, last = max(longest, now - last), now
    # A slice, one round of turns, and the tests' own end of the lines. Time that others
    # had on the processor is not this thread's.
    assert longest < SLICE_S + 0.1


# Idling


# An idle host never wakes up, however many clients it has.
@pytest.mark.slow
@pytest.mark.parametrize("clients", [0, 1, 300])
async def test_an_idle_pump_is_parked(hall: Hall, clients: int) -> None:
    policy = hall.policy()
    lines = [hall.connect(policy) for _ in range(clients)]
    for line in lines:
        assert await line.ask(b"PING\n") == b"OK"
    await trio.testing.wait_all_tasks_blocked()
    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    busy = time.process_time()
    await trio.sleep(0.3)  # the idling itself
    busy = time.process_time() - busy
    trio.lowlevel.remove_instrument(steps)
    assert steps.steps == []
    assert busy < 0.1


# After a reply the core is yielded twice at most, then nothing until something comes.
async def test_the_polling_after_a_reply_is_bounded(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    yields: list[float] = []
    real = os.sched_yield

    def counted() -> None:
        yields.append(time.monotonic())
        real()

    line = hall.connect()
    assert await line.ask(b"PING\n") == b"OK"
    await trio.testing.wait_all_tasks_blocked()
    monkeypatch.setattr("supervisor.fsproxy.session.yield_core", counted)
    await line.send(b"PING\n")
    assert await line.line() == b"OK"
    await trio.testing.wait_all_tasks_blocked()
    assert 1 <= len(yields) <= 1 + POLLS


# The clock of an unfinished message does not tick once it is finished.
@pytest.mark.slow
async def test_no_clock_ticks_between_messages(hall: Hall) -> None:
    line = hall.connect(deadline_s=1.0)
    await line.send(b"PI")
    await trio.testing.wait_all_tasks_blocked()
    assert hall.pump.statistics().deadlines == 1
    assert await line.ask(b"NG\n") == b"OK"
    await trio.testing.wait_all_tasks_blocked()
    assert hall.pump.statistics().deadlines == 0
    await trio.sleep(1.1)  # the deadline passes
    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    await trio.sleep(0.1)
    trio.lowlevel.remove_instrument(steps)
    assert steps.steps == []
    assert await line.ask(b"PING\n") == b"OK"


# Whose a session is


# A session is in the set, or its task owns it.
async def test_a_session_with_a_job_is_not_in_the_set(hall: Hall) -> None:
    line = hall.connect()
    may_end = trio.Event()

    async def job() -> bytes:
        await may_end.wait()
        return b"done\n"

    session = line.session
    session.start(job)
    assert session.read_fd not in hall.pump.sessions
    await line.send(b"PING\n" * 3)
    await trio.testing.wait_all_tasks_blocked()
    assert session.requests == 0
    may_end.set()
    # spec T3: what was sent meanwhile comes after it.
    assert await line.exactly(14) == b"done\nOK\nOK\nOK\n"
    assert hall.pump.sessions[session.read_fd] is session


# Requests that were received before a job began are answered without anything new.
async def test_what_was_received_before_a_job_is_not_forgotten(hall: Hall) -> None:
    line = hall.connect()
    (hall.root / "file").touch()
    fileno = await line.open(b"file")
    await line.send(b"SYNC %d\nPING\nSYNC %d\nSYNC %d\nPING\n" % ((fileno,) * 3))
    assert await line.exactly(15) == b"OK\n" * 5


# A session that is over is in no table of the pump.
async def test_a_session_that_is_over_is_forgotten(hall: Hall) -> None:
    lines = [hall.connect() for _ in range(3)]
    await lines[0].send(b"PI")
    await lines[1].send(b"PING\n" * 1000)
    lines[2].session.close_soon(EOF)
    for line in lines:
        line.close()
    for line in lines:
        await line.gone()
    assert not hall.pump.sessions
    assert hall.pump.statistics().left_over == 0
    assert hall.pump.statistics().deadlines == 0
    # I1: what it is asked again about one that is over is nothing to its successor.
    successor = hall.connect()
    for line in lines:
        hall.pump.suspend(line.session)
    assert await successor.ask(b"PING\n") == b"OK"


async def test_the_pump_gives_back_its_descriptors() -> None:
    pump = Pump()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pump.run)
        await trio.testing.wait_all_tasks_blocked()
        held = pump.descriptors()
        for fd in held:
            os.fstat(fd)
        nursery.cancel_scope.cancel()
    for fd in held:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


# I1: a session whose job ends after the pump asks for nothing that the pump had. A host
# that is cancelled from outside ends like that.
@pytest.mark.parametrize("ahead", [b"", b"PING\n"])
async def test_a_job_may_end_after_the_pump(
    tmp_path: Path, no_leaks: None, monkeypatch: pytest.MonkeyPatch, ahead: bytes
) -> None:
    del no_leaks
    begun, may_end = threading.Event(), threading.Event()

    def sync(_: HostHandle) -> None:
        begun.set()
        assert may_end.wait(60)

    monkeypatch.setattr(HostHandle, "sync", sync)
    halls = []

    async def work() -> None:
        async with open_hall(tmp_path) as hall:
            halls.append(hall)
            line = hall.connect()
            fileno = await line.open(b"a", b"w")
            await line.send(b"SYNC %d\n" % fileno + ahead)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        while not begun.is_set():
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            while not halls[0].pump.is_closed:
                await trio.lowlevel.checkpoint()
        may_end.set()
    (line,) = halls[0].lines
    assert line.session.is_over
    assert line.session.failure is None
    line.close()
    with trio.fail_after(30):
        await halls[0].close()
