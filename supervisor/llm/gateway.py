"""The gateway: a list of messages in, a checked and paid completion out.

The one way to the model, for LLM_CHAT, for the endpoint and for whatever else of the
host asks it.

Rules of this file.

1. Reserve, call, settle; on every way out the reservation ends (spec L10). It is in the
   ledger before the call is sent: a host that is killed has forgotten none (spec FL7).
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
import math
import os
import re
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import trio

from hostlib.threads import in_thread
from supervisor.fleet.fence import Fence, FencedError
from supervisor.llm.answer import first_text
from supervisor.llm.answer_reader import AnswerError, BrokenOffError, ProviderError
from supervisor.llm.apis import CHAT, EMBEDDINGS
from supervisor.llm.deltas import drop_logprobs
from supervisor.llm.provider import MAX_RETRIES, CallError, Request
from supervisor.llm.quota import QuotaError, Usage, Weights

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from hostlib.journal import Journal
    from hostlib.redact import Redactor
    from supervisor.llm.answer_reader import AnswerReader
    from supervisor.llm.apis import Api
    from supervisor.llm.ledger import Spending
    from supervisor.llm.provider import Provider
    from supervisor.llm.quota import Node, ReservedCall
    from vfs.ledger import Ledger
    from vfs.payload import PayloadBudget
    from vfs.payload import Reservation as MemoryReservation

LARGE_BYTES = 256 * 1024
"""Longest text that is encoded or decoded in the Trio thread: about a millisecond."""

END_S = 0.5
"""How long a reply may go on behind the last event of its answer: the connection is used
again if it ends by then."""

NO_MEMORY = "other requests of this child take its memory; ask again when one has ended"

MAX_SENT_TOKENS = 4096
"""Highest bound on the output that is sent where the configuration has none: models
refuse a bound above their own, and the smallest of those is this one."""


MAX_CODE_CHARS = 64
"""Longest word for an error that is passed on: those of the APIs have 40 at most."""

_CODE = re.compile(r"[a-z][a-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Model:
    """A model that calls can name.

    Attributes:
        name: as the configuration and clients know it.
        id: as its provider knows it.
        provider: who has it.
        weights: what its tokens cost.
        bound_name: what its provider calls the bound on the output.
        apis: those that it is asked by.
        has_reasoning: it reasons, and Chat Completions may ask it for an effort.
    """

    name: str
    id: str
    provider: Provider
    weights: Weights
    bound_name: str = "max_tokens"
    apis: tuple[Api, ...] = (CHAT,)
    has_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """What is asked, by whom, and who pays.

    Attributes:
        model: who is asked.
        api: by which API.
        encode: returns the request with a bound on its output; None: with the caller's
            own, or none.
        is_large: it takes longer than a moment to encode it.
        prompt_tokens: the estimate for its messages (spec L10).
        most_prompt_tokens: the most that a provider can count for them.
        likely_prompt_tokens: what it counts for most texts (spec MD5).
        max_tokens: most tokens of output; None for no bound of the caller's.
        node: pays.
        ledger: counts the memory that it takes.
        child_id: for the journal.
        client_id: for the journal.
        asked: the model's name as the caller said it; empty for none.
        has_reasoning: reasoning was asked for, which may not be shown.
        headers: for the provider, beside the host's own.
        max_retries: how often a provider that failed is asked again.
    """

    model: Model
    api: Api
    encode: Callable[[int | None], bytes]
    is_large: bool
    prompt_tokens: int
    most_prompt_tokens: int
    likely_prompt_tokens: int
    max_tokens: int | None
    node: Node
    ledger: Ledger
    child_id: str
    client_id: str
    asked: str = ""
    has_reasoning: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    max_retries: int = MAX_RETRIES


def encode_chat(model: Model, body: Mapping[str, object], bound: int | None) -> bytes:
    """Return a request of Chat Completions, whose answer comes in pieces.

    Args:
        model: who is asked.
        body: the request but for its model, its stream and its bound on the output.
        bound: that.
    """
    whole = {
        **body,
        "model": model.id,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if bound is not None:
        whole[model.bound_name] = bound
    return msgspec.json.encode(whole)


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer, redacted.

    Attributes:
        data: it as JSON: a ``chat.completion``, or what another API has for one.
        object: the same as plain values; empty for a stream that was passed on.
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
        may_pass: nothing was charged, and the same call may be answered later.
        code: the provider's own word for it, one plain word; empty for none.
    """

    def __init__(
        self,
        reason: str,
        status: int = 0,
        retry_after_s: int | None = None,
        *,
        may_pass: bool = False,
        code: str = "",
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.status = status
        self.retry_after_s = retry_after_s
        self.may_pass = may_pass


class NoMemoryError(FailedCallError):
    """A call was given up because its child, or the host, has no memory left for it."""


OnEvent: TypeAlias = "Callable[[dict[str, Any], bool], Awaitable[None]]"
"""Told of each event of the stream as it comes, not redacted, and whether it is large."""


TakeEvents: TypeAlias = "Callable[[list[dict[str, Any]], bool], Awaitable[None]]"
"""The same of the events that a piece of the stream completes."""


class Gateway:
    """Makes calls.

    Args:
        redactor: knows every secret.
        spending: keeps what is charged.
        timeout_s: for one call, retries included (spec L11).
        journal: is told of every call, never of a text.
        budget: the host's memory.
        fence: of the host.
    """

    def __init__(
        self,
        redactor: Redactor,
        spending: Spending,
        timeout_s: float,
        journal: Journal,
        budget: PayloadBudget,
        fence: Fence | None = None,
    ) -> None:
        self._redactor = redactor
        self._spending = spending
        self._timeout_s = timeout_s
        self._journal = journal
        self._budget = budget
        self._fence = Fence() if fence is None else fence

    async def complete(self, call: Call, on_event: OnEvent | None = None) -> Completion:
        """Make a call.

        Args:
            call: what, by whom.
            on_event: told of each event of a streamed answer; see ``OnEvent``.

        Raises:
            QuotaError: it cannot be paid; nothing was asked (spec L10).
            FailedCallError: the provider failed, or answered what cannot be used.

        Cancellation: ends the call; what was reported or received is charged.
        """
        if call.api not in (*call.model.apis, EMBEDDINGS):
            text = f"the model {call.model.name!r} is not asked by {call.api.path[1:]}"
            raise FailedCallError(text)
        reservation = self._reserve(call)
        answer, request = call.api.reader(), Request()
        meter = _Meter(self, call, reservation, answer, request)
        memory = self._budget.reservation(call.ledger)
        has_no_memory, after_s, code = False, None, ""

        take = partial(_take, memory, answer, on_event)
        try:
            with trio.fail_after(self._timeout_s), memory:
                found, is_large = await self._exchange(
                    call, reservation, answer, request, take
                )
                usage = answer.usage() or answer.estimate(
                    call.prompt_tokens, reservation.max_tokens
                )
                completion = await self._checked(found, usage, is_large=is_large)
                meter.settle("ok")
                await self._spending.kept()
                return completion
        except trio.TooSlowError:
            reason, status = f"no complete answer within {self._timeout_s:g} s", 0
        except (CallError, ProviderError) as why:
            reason, status = str(why), getattr(why, "status", 0)
            after_s, code = getattr(why, "retry_after_s", None), why.code
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
        is_fault = status in (0, 429) or status >= 500
        may_pass = is_fault and not request.is_sent
        raise FailedCallError(
            self._one_line(reason),
            status,
            after_s,
            may_pass=may_pass,
            code=self._plain_code(code),
        )

    def _check_fence(self, call: Call) -> None:
        """Let a call go out (spec FL6).

        Raises:
            FailedCallError: the lease of its child is over.
        """
        try:
            self._fence.check(call.child_id)
        except FencedError as why:
            raise FailedCallError(str(why)) from None

    def _reserve(self, call: Call) -> ReservedCall:
        self._check_fence(call)
        try:
            factor = call.node.factor(call.model.name)
            return call.node.reserve(
                math.ceil(factor * call.most_prompt_tokens),
                call.max_tokens,
                call.model.weights,
                math.ceil(factor * call.likely_prompt_tokens),
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
        reservation: ReservedCall,
        answer: AnswerReader,
        request: Request,
        take: TakeEvents,
    ) -> tuple[dict[str, Any], bool]:
        """Return the answer, and whether it is large."""
        bound = reservation.max_tokens
        if call.max_tokens is None and bound is not None and bound > MAX_SENT_TOKENS:
            bound = None
        if call.is_large:
            data = await in_thread(call.encode, bound)
        else:
            data = call.encode(bound)
        await self._spending.kept()
        self._check_fence(call)
        ask = call.model.provider.ask
        asking = ask(call.api, data, request, call.headers, call.max_retries)
        received = await _receive(asking, answer, take)
        if received > LARGE_BYTES:
            return await in_thread(answer.finish), True
        return answer.finish(), False

    async def _checked(
        self, found: dict[str, Any], usage: Usage, *, is_large: bool
    ) -> Completion:
        redact = partial(self._redacted, found, usage)
        return await in_thread(redact) if is_large else redact()

    def _redacted(self, found: dict[str, Any], usage: Usage) -> Completion:
        data = msgspec.json.encode(found)
        clean = self._redactor.data(data)
        if clean != data:
            try:
                found = msgspec.json.decode(clean)
            except msgspec.DecodeError:  # what was blotted out has escaped what follows
                raise AnswerError("it holds a secret, and is nothing without") from None
            drop_logprobs(found)  # they would spell it out
            clean = msgspec.json.encode(found)
        return Completion(clean, found, usage)

    def _one_line(self, reason: str) -> str:
        return " ".join(self._redactor.text(reason).split())

    def _plain_code(self, code: str) -> str:
        """Return a provider's word for an error; empty if it is no plain word (I10)."""
        is_plain = len(code) <= MAX_CODE_CHARS and _CODE.fullmatch(code)
        return code if is_plain and self._redactor.text(code) == code else ""

    def reserve(self, reservation: ReservedCall) -> int:
        """Let the ledger keep what a call may cost; return its number there."""
        return self._spending.reserve(reservation.amounts)

    def settle(self, call: Call, number: int, cost: float, *, counts: bool) -> None:
        """Let the ledger keep what a call has cost in place of that."""
        self._spending.add(call.node, cost, int(counts), number)

    def charged(
        self,
        call: Call,
        usage: Usage,
        cost: float,
        *,
        outcome: str,
        latency_s: float,
    ) -> None:
        """Tell of a call that has ended (spec L13: no text of it)."""
        self._journal.write(
            "llm.called",
            child_id=call.child_id,
            client_id=call.client_id,
            model=call.model.name,
            outcome=outcome,
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            cache_write_tokens=usage.cache_write,
            completion_tokens=usage.completion,
            reasoning_tokens=usage.reasoning,
            cost=round(cost, 4),
            api=call.api.name,
            asked=call.asked,
            latency_ms=round(1000 * latency_s, 3),
        )


async def _receive(
    asking: AbstractAsyncContextManager[AsyncIterator[bytes]],
    answer: AnswerReader,
    take: TakeEvents,
) -> int:
    """Read an answer to its end; return its length in bytes.

    Behind its last event it is whole, whatever becomes of the connection.

    Args:
        asking: the request, which yields the answer's bytes.
        answer: reads them.
        take: called with the events that each piece completes.
    """
    received = 0
    try:
        with trio.CancelScope() as scope:
            async with asking as pieces:
                async for piece in pieces:
                    received += len(piece)
                    is_large = answer.pending_bytes > LARGE_BYTES
                    if is_large:
                        await take(await in_thread(answer.feed, piece), True)
                    else:
                        answer.receive(piece)
                        await take(answer.next_events(), False)
                        while answer.has_lines:
                            await take(answer.next_events(), False)
                    if answer.has_ended and scope.deadline == math.inf:
                        scope.deadline = trio.current_time() + END_S
    except BrokenOffError:
        if not answer.has_ended:
            raise
    return received


def _learn(call: Call, usage: Usage) -> None:
    """Record a provider that counts more than the worst case, to reserve it (MD5)."""
    factor = usage.prompt / max(1, call.most_prompt_tokens)
    call.node.learn(call.model.name, factor)


async def _take(
    memory: MemoryReservation,
    answer: AnswerReader,
    on_event: OnEvent | None,
    events: list[dict[str, Any]],
    is_large: bool,
) -> None:
    """Reserve what has come, and pass events on; others have a turn after each.

    So a burst of a fast provider keeps no other child waiting, and its first event is on
    its way before the last is looked at.
    """
    memory.add(answer.held_bytes - memory.size_bytes)
    # Not cancelled in a turn of others: what has come is charged whole.
    if not events:
        await trio.lowlevel.cancel_shielded_checkpoint()
    for event in events:
        if on_event is not None:
            await on_event(event, is_large)
        await trio.lowlevel.cancel_shielded_checkpoint()


class _Meter:
    """Ends the reservation of one call, once, and tells what it came to."""

    def __init__(
        self,
        gateway: Gateway,
        call: Call,
        reservation: ReservedCall,
        answer: AnswerReader,
        request: Request,
    ) -> None:
        self._gateway = gateway
        self._call = call
        self._reservation = reservation
        self._answer = answer
        self._request = request
        self._number = gateway.reserve(reservation)
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
            _learn(self._call, usage)
        else:
            reservation.release()
        latency_s = time.monotonic() - self._began
        self._gateway.settle(self._call, self._number, cost, counts=counts)
        self._gateway.charged(
            self._call,
            usage,
            cost,
            outcome=outcome,
            latency_s=latency_s,
        )

    def _used(self) -> tuple[Usage, float]:
        """Return what the call took, and the least that it costs, weighted tokens."""
        try:
            reported = self._answer.usage()
        except AnswerError:
            reported = None
        if reported is not None and not self._answer.has_early_usage:
            return reported, 0.0
        bound = self._reservation.max_tokens
        usage = self._answer.estimate(self._call.prompt_tokens, bound)
        if reported is not None:  # before the output was written (spec MD5)
            usage = replace(
                reported,
                prompt=max(reported.prompt, usage.prompt),
                completion=max(reported.completion, usage.completion),
            )
        # Reasoning is not shown: there may have been as much as was allowed. The request
        # asks for it, or the model reasons unasked (spec L10, MD5).
        is_hidden = self._call.has_reasoning or self._call.model.has_reasoning
        return usage, self._reservation.reserved if is_hidden else 0.0
