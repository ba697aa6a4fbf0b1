"""The gateway: all calls of models go through it, checked, paid and redacted.

1. Reserve, call, settle; the reservation ends on every path (spec L10).  The ledger has it
   before the call is sent, so a killed host forgets none (spec FL7).
2. Answers are streamed from the provider: a call whose client is gone is ended, and the
   received part charged.  A request that was sent completely is charged and counts as a
   call, unless the provider refused it (spec L10, L11).
3. Completions, reasons and events are redacted before they leave (I10).
4. Large texts are encoded and decoded in a worker thread (L14).
5. Received bytes are reserved as long as they are held; the caller has reserved the
   request (attack 42).
"""

from __future__ import annotations

import errno
import math
import os
import re
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import trio

from hostlib.threads import in_thread
from supervisor.fleet.fence import Fence, FencedError, UnpaidError
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
    from supervisor.fleet.fence import Payer
    from supervisor.llm.answer_reader import AnswerReader
    from supervisor.llm.apis import Api
    from supervisor.llm.ledger import Spending
    from supervisor.llm.pieces import Object
    from supervisor.llm.provider import Provider
    from supervisor.llm.quota import Node, ReservedCall
    from vfs.ledger import Ledger
    from vfs.payload import PayloadBudget
    from vfs.payload import Reservation as MemoryReservation

LARGE_BYTES = 256 * 1024
"""Longest text that is encoded or decoded in the Trio thread: about a millisecond."""

END_S = 0.5
"""How long a reply may continue after the last event of its answer; if it ends by then, the
connection is reused."""

NO_MEMORY = "other requests of this child take its memory; ask again when one has ended"

MAX_SENT_TOKENS = 4096
"""Highest bound on the output that is sent without a configured one: models refuse a bound
above their own, and this is the smallest of those."""


MAX_CODE_CHARS = 64
"""Longest code of an error that is passed on; those of the APIs have at most 40."""

_CODE = re.compile(r"[a-z][a-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Model:
    """A model that calls can name.

    Attributes:
        name: its name for the configuration and clients.
        id: its name for its provider.
        provider: its provider.
        weights: the costs of its tokens.
        bound_name: the provider's member for the bound on the output.
        apis: its APIs.
        has_reasoning: it reasons, and takes an effort in Chat Completions.
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
    """A call of a model, with its client and payer.

    Attributes:
        model: the model.
        api: the API.
        encode: takes a bound on the output (None for the caller's own, or none), and
            returns the request.
        is_large: encoding it takes longer than a moment.
        prompt_tokens: the estimate for its messages (spec L10).
        most_prompt_tokens: the most that a provider can count for them.
        likely_prompt_tokens: the most that it counts for most texts (spec MD5).
        max_tokens: most tokens of output; None for no bound of the caller's.
        node: the node that pays.
        ledger: the ledger that is charged its memory.
        child_id: the child's id, for the journal.
        client_id: the client's id, for the journal.
        asked: the model's name in the request; empty for none.
        has_reasoning: the request asks for reasoning, which may not be shown.
        headers: headers for the provider, beside the host's own.
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
    """Return a request of Chat Completions for a streamed answer.

    Args:
        model: the model.
        body: the request without model, stream and bound on the output.
        bound: the bound on the output; None for none.
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
        data: its JSON: a ``chat.completion``, or that of another API.
        object: the same as plain values; empty for a stream that was passed on.
        usage: its tokens.
    """

    data: bytes
    object: Object
    usage: Usage

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return first_text(self.object)


class FailedCallError(Exception):
    """A call failed; ``reason`` is one redacted line (spec L11, L15).

    Attributes:
        status: the provider's HTTP status; 0 without one.
        retry_after_s: the provider's ``retry-after``, in seconds; None for none.
        may_pass: nothing was charged, and the same call may succeed later.
        code: the provider's code, one plain word; empty for none.
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
    """A call was ended because its child or the host has no memory left for it."""


OnEvent: TypeAlias = "Callable[[Object, bool], Awaitable[None]]"
"""Called with each event of the stream, not redacted, and whether it is large."""


TakeEvents: TypeAlias = "Callable[[list[Object], bool], Awaitable[None]]"
"""Called with the events that a piece of the stream completes, and whether they are large."""


class Gateway:
    """Makes calls.

    Args:
        redactor: knows every secret.
        spending: stores the charges.
        timeout_s: longest time of one call with its retries (spec L11).
        journal: gets every call, without texts.
        budget: the host's memory.
        fence: the host's fence; None for none.
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
        """Make a call, and return its completion.

        Args:
            call: the call.
            on_event: called with each event of a streamed answer; see ``OnEvent``.

        Raises:
            QuotaError: the call cannot be paid, and was not made (spec L10).
            FailedCallError: the provider failed, or its answer cannot be used.

        Cancellation: ends the call; the reported or received part is charged.
        """
        if call.api not in (*call.model.apis, EMBEDDINGS):
            text = f"the model {call.model.name!r} is not asked by {call.api.path[1:]}"
            raise FailedCallError(text)
        call, reservation, paid = await self._pay(call)
        answer, request = call.api.reader(), Request(partial(self._check_fence, call))
        meter = _Meter(self, call, reservation, answer, request, paid)
        memory = self._budget.reservation(call.ledger)
        has_no_memory, after_s, code = False, None, ""

        take = partial(_take, request.check, memory, answer, on_event)
        try:
            with trio.fail_after(self._timeout_s), memory:
                found, is_large = await self._exchange(
                    call, reservation, answer, request, take
                )
                usage = answer.usage() or answer.estimate(
                    call.prompt_tokens, reservation.max_tokens
                )
                completion = await self._check(found, usage, is_large=is_large)
                meter.settle("ok")
                await self._spending.wait_written()
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
                await self._spending.wait_written()
            raise
        meter.settle("failed")
        await self._spending.wait_written()
        if has_no_memory:
            raise NoMemoryError(NO_MEMORY)
        is_fault = status in (0, 429) or status >= 500
        may_pass = is_fault and not request.is_sent
        raise FailedCallError(
            self.describe_in_a_line(reason),
            status,
            after_s,
            may_pass=may_pass,
            code=self._plain_code(code),
        )

    def _payer_of(self, call: Call) -> Payer | None:
        """Return the payer of a fleet child's calls; None for any other child."""
        is_of_fleet = self._fence.life_of(call.child_id) is not None
        return self._fence.payer if is_of_fleet else None

    def _bounded(self, call: Call) -> Call:
        """Return a call whose worst case is finite, if a fleet pays for it."""
        if call.max_tokens is not None or self._payer_of(call) is None:
            return call
        return replace(call, max_tokens=MAX_SENT_TOKENS)

    async def _pay(self, call: Call) -> tuple[Call, ReservedCall, Paid | None]:
        """Reserve a call at its accounts, and in a slice if it is a fleet child's.

        Returns:
            The call as it is made, and both reservations (spec FL7).

        Raises:
            QuotaError: an account has no room.
            FailedCallError: the lease is over, or the directory does not answer.
        """
        call = self._bounded(call)
        reservation = self._reserve(call)
        payer = self._payer_of(call)
        if payer is None:
            return call, reservation, None
        try:
            name = await payer.reserve(reservation.worst_cost)
        except BaseException as why:
            reservation.release()
            if isinstance(why, UnpaidError) and why.is_refused:
                self._tell_denied(call)
                raise QuotaError from None
            if isinstance(why, (UnpaidError, FencedError)):
                raise FailedCallError(str(why), may_pass=True) from None
            raise
        return call, reservation, None if name is None else Paid(payer, name)

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
            self._tell_denied(call)
            raise

    def _tell_denied(self, call: Call) -> None:
        self._journal.write(
            "quota.denied",
            child_id=call.child_id,
            client_id=call.client_id,
            model=call.model.name,
        )

    async def _exchange(
        self,
        call: Call,
        reservation: ReservedCall,
        answer: AnswerReader,
        request: Request,
        take: TakeEvents,
    ) -> tuple[Object, bool]:
        """Return the answer, and whether it is large."""
        bound = reservation.max_tokens
        if call.max_tokens is None and bound is not None and bound > MAX_SENT_TOKENS:
            bound = None
        if call.is_large:
            data = await in_thread(call.encode, bound)
        else:
            data = call.encode(bound)
        await self._spending.wait_written()
        ask = call.model.provider.ask
        asking = ask(call.api, data, request, call.headers, call.max_retries)
        received = await _receive(asking, answer, take)
        if received > LARGE_BYTES:
            return await in_thread(answer.finish), True
        return answer.finish(), False

    async def _check(
        self, found: Object, usage: Usage, *, is_large: bool
    ) -> Completion:
        redact = partial(self.redact_completion, found, usage)
        return await in_thread(redact) if is_large else redact()

    def redact_completion(self, found: Object, usage: Usage) -> Completion:
        """Return the completion of an answer, without secrets."""
        data = msgspec.json.encode(found)
        clean = self._redactor.data(data)
        if clean != data:
            try:
                found = msgspec.json.decode(clean)
            except msgspec.DecodeError:  # a backslash before the blot escapes its text
                raise AnswerError("it holds a secret, and is nothing without") from None
            drop_logprobs(found)  # they would spell the secret
            clean = msgspec.json.encode(found)
        return Completion(clean, found, usage)

    def describe_in_a_line(self, reason: str) -> str:
        """Return a reason as one line, without secrets."""
        return " ".join(self._redactor.text(reason).split())

    def _plain_code(self, code: str) -> str:
        """Return a provider's code of an error; empty if it is no plain word (I10)."""
        is_plain = len(code) <= MAX_CODE_CHARS and _CODE.fullmatch(code)
        return code if is_plain and self._redactor.text(code) == code else ""

    def reserve(self, reservation: ReservedCall) -> int:
        """Store the worst cost of a call in the ledger; return its number there."""
        return self._spending.reserve(reservation.amounts)

    def settle(self, call: Call, number: int, cost: float, *, counts: bool) -> None:
        """Replace the worst cost in the ledger by the cost of the call."""
        self._spending.add(call.node, cost, int(counts), number)

    def record_call(
        self,
        call: Call,
        usage: Usage,
        cost: float,
        outcome: str,
        latency_s: float,
    ) -> None:
        """Write an ended call to the journal, without its texts (spec L13)."""
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

    After its last event the answer is complete, whatever happens to the connection.

    Args:
        asking: the request, which yields the answer's bytes.
        answer: the reader of the answer.
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


async def _take(
    check: Callable[[], None],
    memory: MemoryReservation,
    answer: AnswerReader,
    on_event: OnEvent | None,
    events: list[Object],
    is_large: bool,
) -> None:
    """Reserve the received bytes and pass events on; other tasks run after each.

    So a burst of a fast provider does not delay other children, and its first event is
    sent before the last is parsed.

    Raises:
        FailedCallError: the lease of the call's child is over.
    """
    check()
    memory.add(answer.held_bytes - memory.size_bytes)
    # Not cancelled while other tasks run: all received bytes are charged.
    if not events:
        await trio.lowlevel.cancel_shielded_checkpoint()
    for event in events:
        if on_event is not None:
            await on_event(event, is_large)
        await trio.lowlevel.cancel_shielded_checkpoint()


@dataclass(frozen=True, slots=True)
class Paid:
    """A call that a fleet pays for.

    Attributes:
        payer: the payer of the node.
        name: the name of the reservation in its slices.
    """

    payer: Payer
    name: str

    def settle(self, cost: float) -> None:
        """Count what the call cost; 0 if it was never sent."""
        self.payer.settle(self.name, cost)


class _Meter:
    """Ends the reservation of one call, once, and records its cost."""

    def __init__(
        self,
        gateway: Gateway,
        call: Call,
        reservation: ReservedCall,
        answer: AnswerReader,
        request: Request,
        paid: Paid | None,
    ) -> None:
        self._paid = paid
        self._gateway = gateway
        self._call = call
        self._reservation = reservation
        self._answer = answer
        self._request = request
        self._number = gateway.reserve(reservation)
        self._began = time.monotonic()

    def settle(self, outcome: str) -> None:
        """Charge the call's use, or nothing if it was not made (spec L10, L11)."""
        reservation = self._reservation
        if reservation.cost is not None:
            return
        counts = self._request.is_sent
        usage, cost = Usage(0, 0), 0.0
        if counts:
            usage, least = self._use()
            cost = reservation.settle(usage, least)
            # A provider may count more than the worst case: reserve more next time (MD5).
            factor = usage.prompt / max(1, self._call.most_prompt_tokens)
            self._call.node.learn(self._call.model.name, factor)
        else:
            reservation.release()
        if self._paid is not None:
            self._paid.settle(cost)
        latency_s = time.monotonic() - self._began
        self._gateway.settle(self._call, self._number, cost, counts=counts)
        self._gateway.record_call(self._call, usage, cost, outcome, latency_s)

    def _use(self) -> tuple[Usage, float]:
        """Return the call's use, and its least cost in weighted tokens."""
        try:
            reported = self._answer.usage()
        except AnswerError:
            reported = None
        if reported is not None and not self._answer.has_early_usage:
            return reported, 0.0
        bound = self._reservation.max_tokens
        usage = self._answer.estimate(self._call.prompt_tokens, bound)
        if reported is not None:  # reported before the output was written (spec MD5)
            usage = replace(
                reported,
                prompt=max(reported.prompt, usage.prompt),
                completion=max(reported.completion, usage.completion),
            )
        # Reasoning is not shown, so there may have been as much as allowed; the request
        # asks for it, or the model always reasons (spec L10, MD5).
        is_hidden = self._call.has_reasoning or self._call.model.has_reasoning
        return usage, self._reservation.reserved if is_hidden else 0.0
