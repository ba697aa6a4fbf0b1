"""The gateway: a list of messages in, a checked and paid completion out.

What it is: the one way to the model, for LLM_CHAT, for the endpoint and for whatever
else of the host asks it.  What it is not: who may ask for which model (``service``).

Rules of this file.

1. Reserve, call, settle; on every way out the reservation ends (spec L10).
2. It streams from the provider, so that who is gone costs nothing more, and what was
   received until then is charged.  A request that has gone out whole is charged however
   it ends, and counts as a call, unless the provider refused it (spec L10, L11).
3. What leaves is redacted: completions, reasons, events (I10).
4. A large text is encoded and decoded in a worker thread: nobody waits for it (L14).
5. What comes is reserved for as long as it is held (attack 42). Who makes a call has
   reserved what is sent.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from supervisor.llm.answer import Answer, first_text
from supervisor.llm.answer_reader import AnswerError, ProviderError
from supervisor.llm.provider import CallError, Request
from supervisor.llm.quota import QuotaError, Usage, Weights
from vfs.hostio import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from supervisor.journal import Journal
    from supervisor.llm.ledger import Spending
    from supervisor.llm.provider import Provider
    from supervisor.llm.quota import Node, Reservation
    from supervisor.llm.redact import Redactor
    from vfs.ledger import Ledger
    from vfs.payload import PayloadBudget
    from vfs.payload import Reservation as MemoryReservation

LARGE_BYTES = 256 * 1024
"""Longest text that is encoded or decoded in the Trio thread: about a millisecond."""

NO_MEMORY = "other requests of this child take its memory; ask again when one has ended"

MAX_SENT_TOKENS = 4096
"""Highest bound on the output that is sent where the configuration has none: models
refuse a bound above their own, and the smallest of those is this one."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model that calls can name.

    Attributes:
        name: as the configuration and clients know it.
        id: as its provider knows it.
        provider: who has it.
        weights: what its tokens cost.
        bound_name: what its provider calls the bound on the output.
    """

    name: str
    id: str
    provider: Provider
    weights: Weights
    bound_name: str = "max_tokens"


@dataclass(frozen=True, slots=True)
class Call:
    """What is asked, by whom, and who pays.

    Attributes:
        model: who is asked.
        body: the request but for its model, its stream and its bound on the output.
        prompt_tokens: the estimate for its messages (spec L10).
        most_prompt_tokens: the most that a provider can count for them.
        max_tokens: most tokens of output; None for no bound of the caller's.
        node: pays.
        ledger: counts the memory that it takes.
        child_id: for the journal.
        client_id: for the journal.
    """

    model: Model
    body: Mapping[str, object]
    prompt_tokens: int
    most_prompt_tokens: int
    max_tokens: int | None
    node: Node
    ledger: Ledger
    child_id: str
    client_id: str


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer, redacted.

    Attributes:
        data: a ``chat.completion`` as JSON.
        object: the same as plain values.
        usage: what it took.
    """

    data: bytes
    object: dict[str, Any]
    usage: Usage

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return first_text(self.object)


class FailedCallError(Exception):
    """A call failed; ``reason`` is one redacted line (spec L11, L15).

    Attributes:
        status: the provider's HTTP status; 0 where there was none.
        retry_after_s: the provider's ``retry-after``, in seconds; None for none.
    """

    def __init__(
        self, reason: str, status: int = 0, retry_after_s: int | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.retry_after_s = retry_after_s


class NoMemoryError(FailedCallError):
    """A call was given up because its child, or the host, has no memory left for it."""


OnEvent = "Callable[[dict[str, Any]], None]"
"""Told of each event of the stream, as it comes and not redacted."""


class Gateway:
    """Makes calls.

    Args:
        redactor: knows every secret.
        spending: what is charged, for whoever keeps it.
        timeout_s: for one call, retries included (spec L11).
        journal: is told of every call, never of a text.
        budget: the host's memory.
    """

    def __init__(
        self,
        redactor: Redactor,
        spending: Spending,
        timeout_s: float,
        journal: Journal,
        budget: PayloadBudget,
    ) -> None:
        self._redactor = redactor
        self._spending = spending
        self._timeout_s = timeout_s
        self._journal = journal
        self._budget = budget

    async def complete(
        self, call: Call, on_event: Callable[[dict[str, Any]], None] | None = None
    ) -> Completion:
        """Make a call.

        Args:
            call: what, by whom.
            on_event: told of each event of a streamed answer.

        Raises:
            QuotaError: it cannot be paid; nothing was asked (spec L10).
            FailedCallError: the provider failed, or answered what cannot be used.

        Cancellation: ends the call; what was reported or received is charged.
        """
        reservation = self._reserve(call)
        answer, request = Answer(), Request()
        meter = _Meter(self, call, reservation, answer, request)
        memory = self._budget.reservation(call.ledger)
        has_no_memory, after_s = False, None

        take = partial(_take, memory, answer, on_event)
        try:
            with trio.fail_after(self._timeout_s), memory:
                found = await self._exchange(call, reservation, answer, request, take)
                usage = answer.usage() or answer.estimate(
                    call.prompt_tokens, reservation.max_tokens
                )
                completion = await self._checked(found, usage, answer.output_bytes)
                meter.settle("ok")
                await self._spending.kept()
                return completion
        except trio.TooSlowError:
            reason, status = f"no complete answer within {self._timeout_s:g} s", 0
        except (CallError, ProviderError) as why:
            reason, status = str(why), getattr(why, "status", 0)
            after_s = getattr(why, "retry_after_s", None)
        except OSError as why:  # no thread can be started, or no memory is left
            reason, status = os.strerror(why.errno or errno.EIO), 0
            has_no_memory = why.errno == errno.ENOMEM
        except AnswerError as why:
            reason, status = f"invalid response: {why}", 0
        except BaseException:
            meter.settle("cancelled")
            with trio.CancelScope(shield=True):  # bounded: one small transaction
                await self._spending.kept()
            raise
        meter.settle("failed")
        await self._spending.kept()
        if has_no_memory:
            raise NoMemoryError(NO_MEMORY)
        raise FailedCallError(self._one_line(reason), status, after_s)

    def _reserve(self, call: Call) -> Reservation:
        try:
            return call.node.reserve(
                call.most_prompt_tokens, call.max_tokens, call.model.weights
            )
        except QuotaError:
            self._journal.write(
                "quota.denied",
                child_id=call.child_id,
                client_id=call.client_id,
                model=call.model.name,
            )
            raise

    async def _exchange(
        self,
        call: Call,
        reservation: Reservation,
        answer: Answer,
        request: Request,
        take: Callable[[list[dict[str, Any]]], None],
    ) -> dict[str, Any]:
        body = {
            **call.body,
            "model": call.model.id,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        bound = reservation.max_tokens
        if bound is not None and (call.max_tokens or bound <= MAX_SENT_TOKENS):
            body[call.model.bound_name] = bound
        encode = partial(msgspec.json.encode, body)
        is_large = call.prompt_tokens * 4 > LARGE_BYTES
        data = await in_thread(encode) if is_large else encode()
        received = 0
        async with call.model.provider.ask(data, request) as pieces:
            async for piece in pieces:
                received += len(piece)
                if answer.pending_bytes > LARGE_BYTES:
                    events = await in_thread(answer.feed, piece)
                else:
                    events = answer.feed(piece)
                take(events)
        if received > LARGE_BYTES:
            return await in_thread(answer.finish)
        return answer.finish()

    async def _checked(
        self, found: dict[str, Any], usage: Usage, size_bytes: int
    ) -> Completion:
        redact = partial(self._redacted, found, usage)
        return await in_thread(redact) if size_bytes > LARGE_BYTES else redact()

    def _redacted(self, found: dict[str, Any], usage: Usage) -> Completion:
        data = msgspec.json.encode(found)
        clean = self._redactor.data(data)
        if clean != data:
            try:
                found = msgspec.json.decode(clean)
            except msgspec.DecodeError:  # what was blotted out has escaped what follows
                raise AnswerError("it holds a secret, and is nothing without") from None
            for choice in found["choices"]:
                if "logprobs" in choice:
                    choice["logprobs"] = None  # they would spell it out
            clean = msgspec.json.encode(found)
        return Completion(clean, found, usage)

    def _one_line(self, reason: str) -> str:
        return " ".join(self._redactor.text(reason).split())

    def charged(
        self,
        call: Call,
        usage: Usage,
        cost: float,
        *,
        counts: bool,
        outcome: str,
        latency_s: float,
    ) -> None:
        """Take note of a call that has ended (spec L13: no text of it)."""
        self._spending.add(call.node, cost, int(counts))
        self._journal.write(
            "llm.called",
            child_id=call.child_id,
            client_id=call.client_id,
            model=call.model.name,
            outcome=outcome,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            completion_tokens=usage.completion,
            cost=round(cost, 4),
            latency_ms=round(1000 * latency_s, 3),
        )


def _take(
    memory: MemoryReservation,
    answer: Answer,
    on_event: Callable[[dict[str, Any]], None] | None,
    events: list[dict[str, Any]],
) -> None:
    """Reserve what has come, and pass events on."""
    memory.resize(answer.held_bytes)
    if on_event is not None:
        for event in events:
            on_event(event)


class _Meter:
    """Ends the reservation of one call, once, and tells what it came to."""

    def __init__(
        self,
        gateway: Gateway,
        call: Call,
        reservation: Reservation,
        answer: Answer,
        request: Request,
    ) -> None:
        self._gateway = gateway
        self._call = call
        self._reservation = reservation
        self._answer = answer
        self._request = request
        self._began = time.monotonic()

    def settle(self, outcome: str) -> None:
        """Charge what the call took, or nothing if nothing was asked (spec L10, L11)."""
        reservation = self._reservation
        if reservation.cost is not None:
            return
        counts = self._request.is_sent
        usage, cost = Usage(0, 0), 0.0
        if counts:
            usage, least = self._used()
            cost = reservation.settle(usage, least)
        else:
            reservation.release()
        latency_s = time.monotonic() - self._began
        self._gateway.charged(
            self._call,
            usage,
            cost,
            counts=counts,
            outcome=outcome,
            latency_s=latency_s,
        )

    def _used(self) -> tuple[Usage, float]:
        """Return what the call took, and the least that it costs, weighted tokens."""
        try:
            reported = self._answer.usage()
        except AnswerError:
            reported = None
        if reported is not None:
            return reported, 0.0
        bound = self._reservation.max_tokens
        usage = self._answer.estimate(self._call.prompt_tokens, bound)
        # Reasoning is not shown: there may have been as much as was allowed.
        is_hidden = self._call.body.get("reasoning_effort") not in (None, "none")
        return usage, max(self._reservation.amounts) if is_hidden else 0.0
