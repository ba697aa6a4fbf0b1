"""Look-ups of the host: shared, cached, bounded, and never in the Trio thread."""

import socket
import threading
from collections.abc import Callable
from ipaddress import ip_address

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from supervisor.network.hosts import Address
from supervisor.network.resolver import (
    KEPT_S,
    MAX_ADDRESSES,
    MAX_KEPT,
    THREADS_PER_CHILD,
    Resolver,
    ResolverError,
    ask_system,
)

ONE = (ip_address("203.0.113.5"),)


@pytest.fixture
def mock_clock() -> MockClock:
    """Return a clock that stands still, and can be put forward."""
    return MockClock(rate=0.0)


class Server:
    """A resolver that answers when a test tells it to.

    Attributes:
        asked: the names, in order.
    """

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, tuple[Address, ...] | ResolverError] = {}
        self._may_answer = threading.Event()
        self._has_asked = threading.Semaphore(0)

    def look_up(self, name: str) -> tuple[Address, ...]:
        """Wait until it may answer; blocks."""
        self.asked.append(name)
        self._has_asked.release()
        assert threading.current_thread() is not threading.main_thread()
        self._may_answer.wait()
        answer = self.answers.get(name, ONE)
        if isinstance(answer, ResolverError):
            raise answer
        return answer

    def answer(self) -> None:
        """Let all questions be answered."""
        self._may_answer.set()

    async def wait_asked(self, count: int) -> None:
        """Wait until so many more questions have come."""
        for _ in range(count):
            await trio.to_thread.run_sync(self._has_asked.acquire)


def _share() -> trio.CapacityLimiter:
    return trio.CapacityLimiter(THREADS_PER_CHILD)


# spec NET6: all who ask for a name at once share one look-up.
async def test_a_look_up_is_shared() -> None:
    server = Server()
    resolver = Resolver(server.look_up)
    answers = []

    async def ask() -> None:
        answers.append(await resolver.resolve("web.test", _share()))

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(ask)
        await server.wait_asked(1)
        server.answer()
    assert answers == [ONE] * 10
    assert server.asked == ["web.test"]


# spec NET6: answers are kept at most 5 s, failures and missing names as well.
@pytest.mark.parametrize("answer", [ONE, (), ResolverError("EAI_AGAIN")])
async def test_an_answer_is_kept_for_a_while(
    answer: tuple[Address, ...] | ResolverError, mock_clock: MockClock
) -> None:
    server = Server()
    server.answers["web.test"] = answer
    server.answer()
    resolver = Resolver(server.look_up)

    async def ask() -> tuple[Address, ...] | str:
        try:
            return await resolver.resolve("web.test", _share())
        except ResolverError as why:
            return why.reason

    expected = answer.reason if isinstance(answer, ResolverError) else answer
    for seconds, asked in ((0, 1), (KEPT_S - 0.1, 1), (0.2, 2)):
        mock_clock.jump(seconds)
        assert await ask() == expected
        assert len(server.asked) == asked


# spec NET6: who is cancelled leaves the look-up to the others, who ask anew.
async def test_others_ask_anew_when_the_first_is_cancelled() -> None:
    server = Server()
    resolver = Resolver(server.look_up)
    first = trio.CancelScope()
    answers = []

    async def ask_first() -> None:
        with first:
            await resolver.resolve("web.test", _share())

    async def ask() -> None:
        answers.append(await resolver.resolve("web.test", _share()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask_first)
        await server.wait_asked(1)
        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        first.cancel()  # a thread that waits for a server holds nobody up
        await server.wait_asked(1)
        server.answer()
    assert answers == [ONE]


# spec NET6: a child whose names do not answer keeps no other child from the same name.
async def test_a_child_has_a_few_look_ups_at_once() -> None:
    server = Server()
    resolver = Resolver(server.look_up)
    greedy, other = _share(), _share()
    answers = []

    async def ask(name: str, share: trio.CapacityLimiter) -> None:
        answers.append(await resolver.resolve(name, share))

    async with trio.open_nursery() as nursery:
        for n in range(100):
            nursery.start_soon(ask, f"n{n}.test", greedy)
        await server.wait_asked(THREADS_PER_CHILD)
        await wait_all_tasks_blocked()
        assert len(server.asked) == THREADS_PER_CHILD
        waiting = next(n for n in range(100) if f"n{n}.test" not in server.asked)
        nursery.start_soon(ask, f"n{waiting}.test", other)
        await server.wait_asked(1)
        assert server.asked[-1] == f"n{waiting}.test"
        server.answer()
    assert len(answers) == 101
    assert len(server.asked) == 100


# spec NET6: the table of answers is bounded.
@pytest.mark.slow
async def test_the_oldest_answer_makes_room(mock_clock: MockClock) -> None:
    del mock_clock
    server = Server()
    server.answer()
    resolver = Resolver(server.look_up)
    share = _share()
    for n in range(MAX_KEPT + 1):
        await resolver.resolve(f"n{n}.test", share)
    await resolver.resolve(f"n{MAX_KEPT}.test", share)
    await resolver.resolve("n1.test", share)
    assert len(server.asked) == MAX_KEPT + 1
    await resolver.resolve("n0.test", share)
    assert server.asked[-1] == "n0.test"
    assert len(server.asked) == MAX_KEPT + 2


# spec NET3: an answer that would take long to judge is none.
async def test_an_answer_of_very_many_addresses_is_a_failure() -> None:
    server = Server()
    many = tuple(ip_address(0xCB007100 + n) for n in range(MAX_ADDRESSES + 1))
    server.answers = {"most.test": many[1:], "more.test": many}
    server.answer()
    resolver = Resolver(server.look_up)
    assert len(await resolver.resolve("most.test", _share())) == MAX_ADDRESSES
    with pytest.raises(ResolverError, match="EMSGSIZE"):
        await resolver.resolve("more.test", _share())


Rows = list[tuple[int, int, int, str, tuple[str, int]]]


def _answering(rows: Rows | Exception) -> Callable[..., Rows]:
    def getaddrinfo(host: bytes, *_: object, **options: object) -> Rows:
        assert (
            host == b"web.test."
        )  # absolute: no domain of the host's is put behind it
        assert options == {"type": socket.SOCK_STREAM}
        if isinstance(rows, Exception):
            raise rows
        return rows

    return getaddrinfo


# spec NET6: the host's resolver is asked for an absolute name, in both families.
def test_the_system_is_asked_for_an_absolute_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = ["203.0.113.5", "2001:db8::1", "203.0.113.5", "fe80::1%eth0"]
    rows = [(0, 0, 0, "", (text, 0)) for text in texts]
    monkeypatch.setattr(socket, "getaddrinfo", _answering(rows))
    found = ask_system("web.test")
    assert [str(address) for address in found] == [texts[0], texts[1], texts[3]]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (socket.EAI_NONAME, None),
        (socket.EAI_NODATA, None),
        (socket.EAI_AGAIN, "EAI_AGAIN"),
        (socket.EAI_FAIL, "EAI_FAIL"),
        (socket.EAI_SYSTEM, "EAI_SYSTEM"),
    ],
)
def test_a_missing_name_is_told_from_a_failure(
    code: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", _answering(socket.gaierror(code, "")))
    if reason is None:
        assert ask_system("web.test") == ()
    else:
        with pytest.raises(ResolverError, match=reason):
            ask_system("web.test")


def test_a_name_that_does_not_exist_has_no_address() -> None:
    try:
        assert ask_system("does-not-exist.invalid") == ()
    except ResolverError as why:
        assert why.reason == "EAI_AGAIN"  # noqa: PT017 - a machine without servers


# I1, spec S3: a look-up that was given up holds its socket until its server's time is up:
# the leak check knows it.
async def test_what_an_abandoned_look_up_holds_is_named() -> None:
    asked, may_end = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()
    held: list[int] = []

    def look_up(_name: str) -> tuple[Address, ...]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(("127.0.0.1", 53))
            held.append(sock.fileno())
            token.run_sync_soon(asked.set)
            may_end.wait()
        return ()

    resolver = Resolver(look_up)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(resolver.resolve, "a.example", trio.CapacityLimiter(1))
        await asked.wait()
        nursery.cancel_scope.cancel()
    assert [*resolver.descriptors()] == held
    may_end.set()
    while resolver.is_asking:  # noqa: ASYNC110 - its thread tells nobody
        await trio.sleep(0.001)
    assert [*resolver.descriptors()] == []
