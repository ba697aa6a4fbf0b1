"""Calls to an actor that answers late; the actor is a stand-in for Ray's."""

from collections.abc import Callable
from typing import Self

import pytest
import trio
import trio.testing

pytest.importorskip("ray")

from supervisor.cluster import ray_adapter
from supervisor.cluster.ray_adapter import Actors, Mailbox, answered
from supervisor.cluster.requests import RequestError


class Call:
    """A call of the actor, which ends when it is told to."""

    def __init__(self, messages: list[bytes]) -> None:
        self.messages = messages

    def future(self) -> Self:
        """Return this call as its own outcome."""
        return self

    def add_done_callback(self, done: Callable[[object], None]) -> None:
        """Keep a function for the end."""
        self._done = done

    def exception(self) -> None:
        """Tell that the call went well."""

    def end(self) -> None:
        """End the call."""
        self._done(self)


class SlowActor:
    """An actor that answers no call by itself."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    @property
    def receive(self) -> Self:
        """Return its one method."""
        return self

    def options(self, concurrency_group: str) -> Self:
        """Take the group in which the call is made."""
        assert concurrency_group == "messages"
        return self

    def remote(self, messages: list[bytes]) -> Call:
        """Begin a call."""
        self.calls.append(Call(messages))
        return self.calls[-1]

    async def wait_calls(self, count: int) -> None:
        """Return when there were so many calls."""
        while len(self.calls) < count:
            await trio.lowlevel.checkpoint()


# spec FL5
async def test_calls_to_an_actor_that_answers_none_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_adapter, "MOST_CALLS", 2)
    monkeypatch.setattr(ray_adapter, "MOST_MESSAGES", 3)
    actor = SlowActor()
    mailbox = Mailbox(lambda: actor)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.run)
        for count in (1, 2):
            mailbox.put([b"early"])
            await actor.wait_calls(count)
        for number in range(5):
            mailbox.put([b"%d" % number])
            await trio.testing.wait_all_tasks_blocked()
        assert len(actor.calls) == 2
        actor.calls[0].end()
        await actor.wait_calls(3)
        # The oldest are thrown away: their sender sends them again.
        assert actor.calls[2].messages == [b"2", b"3", b"4"]
        nursery.cancel_scope.cancel()


# spec FL5
async def test_a_mailbox_that_gets_nothing_ends() -> None:
    actor = SlowActor()
    mailbox = Mailbox(lambda: actor, idle_s=0.2)
    mailbox.put([b"one"])
    await mailbox.run()
    assert [call.messages for call in actor.calls] == [[b"one"]]


class Answer:
    """The outcome of a call of `LastingActor`."""

    def __init__(self, words: object) -> None:
        self.words = words
        self._is_over = False
        self._done: list[Callable[[object], None]] = []

    def future(self) -> Self:
        """Return this answer as its own outcome."""
        return self

    def add_done_callback(self, done: Callable[[object], None]) -> None:
        """Keep a function for the end; call it if that has been."""
        if self._is_over:
            done(self)
        self._done.append(done)

    def result(self) -> tuple[bool, bytes]:
        """Return what was done."""
        return True, b"done"

    def end(self) -> None:
        """End the call."""
        self._is_over = True
        for done in self._done:
            done(self)


class LastingActor:
    """An actor whose requests last; its signs of life come at once, or never."""

    def __init__(self, *, is_alive: bool) -> None:
        self._is_alive = is_alive
        self._request: Answer | None = None
        self._signs = 0

    @property
    def ask(self) -> Self:
        """Return the method for requests."""
        return self

    @property
    def receive(self) -> Self:
        """Return the method for messages."""
        return self

    def options(self, concurrency_group: str) -> Self:
        """Take the group in which the call is made."""
        assert concurrency_group == "messages"
        return self

    def remote(self, *words: object) -> Answer:
        """Begin a call; the request ends at the third sign of life."""
        answer = Answer(words)
        if words != ([],):
            self._request = answer
        elif self._is_alive:
            answer.end()
            self._signs += 1
            if self._signs == 3 and self._request is not None:
                self._request.end()
        return answer


class AnsweringActor(LastingActor):
    """An actor whose requests are done at once."""

    def remote(self, *words: object) -> Answer:
        """Return the answer to a call."""
        answer = Answer(words)
        answer.end()
        return answer


# spec FL11
@pytest.mark.slow
async def test_a_request_may_last_while_its_actor_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_adapter, "ALIVE_S", 0.1)
    actor = LastingActor(is_alive=True)
    assert await answered(actor, "node 'b'", "fleet-2", "leave") == (True, b"done")
    actor = LastingActor(is_alive=False)
    with pytest.raises(RequestError, match="node 'b': its actor does not answer"):
        await answered(actor, "node 'b'", "fleet-2", "leave")


# spec FL8: nodes with names of their own come and go.
async def test_actors_that_are_known_are_bounded() -> None:
    found: list[str] = []

    def find(name: str) -> LastingActor:
        found.append(name)
        return AnsweringActor(is_alive=True)

    actors = Actors(find, most=2)
    for name in ("a", "b", "a", "c", "b", "a"):
        assert await actors.ask(name, f"node {name!r}") == b"done"
    assert found == ["a", "b", "c", "a"]
