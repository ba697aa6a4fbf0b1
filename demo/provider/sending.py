"""How an answer goes out: plain or as a stream, with the faults that it was told."""

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import trio

from demo.provider import chat, messages, responses
from demo.provider.answer import MIB, Answer, Event
from demo.provider.line import Line
from demo.provider.orders import Orders, listed
from demo.provider.question import Api

HUGE_PIECE = b"x" * MIB
FAILURE = "it broke\nin two"
HEADER_NAMES = ("x-request-id", "request-id", "openai-organization", "retry-after")


CHANGES = frozenset({"lack", "leak-field", "leak-name"})
"""Orders that change the fields of an answer."""


class Form(Protocol):
    """An API's form of answers: a module of this package."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the answer in one piece."""

    def events(self, answer: Answer) -> Iterator[Event]:
        """Yield the answer as a stream."""

    def refusal(self, status: int, text: str, code: str | None) -> dict[str, Any]:
        """Return the body of a refusal."""

    def failure(self, answer: Answer, text: str, code: str | None) -> Event:
        """Return the event that tells of an error in the middle."""

    def ping(self) -> Event | None:
        """Return a sign of life; None where the API has no event for it."""


FORMS: dict[Api, Form] = {"chat": chat, "responses": responses, "messages": messages}


class Sending:
    """One answer on its way."""

    def __init__(self, line: Line, answer: Answer, told: str, note: "Note") -> None:
        self._line = line
        self._answer = answer
        self._served = answer.served
        self._orders = answer.orders
        self._told = told
        self._note = note
        api = answer.question.api
        self._form = FORMS[api]
        for foreign, form in FORMS.items():
            if self._orders.get("foreign") == foreign:
                self._form = form

    async def send(self) -> None:
        """Send it as it was asked for, or as it was told to."""
        orders = self._orders
        self._line.cut_after = int(orders["cut"]) if "cut" in orders else None
        streamed = bool(self._answer.question.body.get("stream"))
        if "huge" in orders:
            await self._send_huge(int(orders["huge"]))
        elif "broken" in orders:
            await self._line.reply(b'{"choices": [oops')
        elif "nothing" in orders:
            await self._line.reply(b"")
        elif "empty" in orders:
            await self._send_plain()
        elif (streamed and "plain" not in orders) or is_always_stream(orders):
            await self._send_stream()
        else:
            await self._send_plain()

    async def _send_plain(self) -> None:
        value = disguise(self._form.whole(self._answer), self._orders, self._told)
        data = json.dumps(value).encode()
        if "truncated" in self._orders:
            self._line.cut_after = len(data) // 2
        self._served.pieces = 0 if "empty" in self._orders else self._answer.pieces
        self._served.thoughts = len(self._answer.thoughts)
        self._served.reported = self._answer.reported
        kind = self._orders.get("kind", "application/json")
        await self._line.reply(data, 200, headers(self._orders, self._told), kind)
        self._finish()

    async def _send_stream(self) -> None:
        orders = self._orders
        kind = orders.get("kind", "text/event-stream")
        await self._line.begin(200, kind, headers(orders, self._told))
        if "first" in orders:
            await self._pause(float(orders["first"]))
        if "leak-event" in orders:
            await self._line.send_data(_leaking(self._told), more=True)
        for event in reordered(self._form.events(self._answer), orders):
            if event.is_piece and await self._fails_before_piece():
                return
            # What is no piece goes with the next one, or with the end.
            await self._send_event(event, more=not event.is_piece)
            if event.is_piece:
                self._served.pieces += 1
                self._served.thoughts += event.is_thought
                self._note("piece")
        if self._served.pieces == int(orders.get("hang-after", -1)):
            await self._line.hang()
        self._served.reported = self._answer.reported
        if "unended" in orders:
            await self._line.break_off()
        await self._line.end()
        self._finish()

    async def _fails_before_piece(self) -> bool:
        """Do what was told for the place before a piece; return if the stream ended."""
        orders = self._orders
        sent = self._served.pieces
        if sent == int(orders.get("hang-after", -1)):
            await self._line.hang()
        if "slow" in orders:
            await self._pause(float(orders["slow"]))
        if "pings" in orders:
            await self._ping()
        if sent != self._answer.pieces // 2:
            return False
        if "truncated" in orders:
            await self._line.break_off()
        if {"error", "leak-error"}.isdisjoint(orders):
            return False
        text = self._told if "leak-error" in orders else FAILURE
        failure = self._form.failure(self._answer, text, orders.get("code"))
        await self._send_event(failure, more=True)
        await self._line.end()
        return True

    async def _pause(self, time_s: float) -> None:
        await self._line.flush()
        await trio.sleep(time_s)

    async def _ping(self) -> None:
        event = self._form.ping()
        if event is None:
            await self._line.send_data(b": ping\n\n")
        else:
            await self._send_event(event, more=False)

    async def _send_event(self, event: Event, *, more: bool) -> None:
        value = event.value
        if isinstance(value, dict):
            value = json.dumps(disguise(value, self._orders, self._told))
        name = f"event: {event.name}\n" if event.name else ""
        data = f"{name}data: {value}\n\n".encode()
        await self._line.send_data(data, more=more)

    async def _send_huge(self, size_mib: int) -> None:
        await self._line.begin(200, "application/json", {})
        await self._line.send_data(b'{"choices": "')
        for _ in range(size_mib):
            await self._line.send_data(HUGE_PIECE)
        await self._line.send_data(b'"}')
        await self._line.end()
        self._finish()

    def _finish(self) -> None:
        self._served.done = True
        self._note("done")


class Note(Protocol):
    """Notes an event of a request."""

    def __call__(self, event: str) -> None:
        """Note it."""


def is_always_stream(orders: Orders) -> bool:
    """Return whether the answer streams, whatever was asked for."""
    return "stream" in orders or "endless" in orders


def reordered(events: Iterable[Event], orders: Orders) -> Iterator[Event]:
    """Yield events with some left out, sent twice, or after the next one."""
    dropped = listed(orders, "drop")
    twice = int(orders.get("twice", -1))
    swapped = int(orders.get("swap", -1))
    late: Event | None = None
    kept = (event for event in events if event.type not in dropped)
    for place, event in enumerate(kept):
        if place == swapped:
            late = event
            continue
        yield from itertools.repeat(event, 1 + (place == twice))
        if late is not None:
            yield late
            late = None
    if late is not None:
        yield late


def disguise(value: Any, orders: Orders, told: str) -> Any:
    """Return a value without the fields to lack, and with the key where told."""
    if CHANGES.isdisjoint(orders):
        return value
    lacking = listed(orders, "lack")
    leaking = listed(orders, "leak-field")

    def changed(part: Any) -> Any:
        if isinstance(part, list):
            return [changed(one) for one in part]
        if not isinstance(part, dict):
            return part
        return {
            name: told if name in leaking else changed(one)
            for name, one in part.items()
            if name not in lacking
        }

    found = changed(value)
    return {**found, told: told} if "leak-name" in orders else found


def headers(orders: Orders, told: str) -> dict[str, str]:
    """Return the headers that an answer was told to have."""
    pairs = (one.split(":", 1) for one in orders.get("header", "").split())
    found = {name.lower(): text for name, text in pairs}
    if "leak-header" in orders:
        found |= dict.fromkeys(HEADER_NAMES, told)
    return found


def _leaking(told: str) -> bytes:
    """Return an event that no API has, which holds the key wherever SSE lets it."""
    return f": {told}\nid: {told}\nevent: {told}\ndata: {{}}\n\n".encode()
