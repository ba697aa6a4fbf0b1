"""The gateway: all calls of models go through it, checked, paid and redacted.

1. Reserve, call, settle; the reservation ends on every path (spec L10).  The ledger has it
   before the call is sent, so a killed host forgets none (spec FL7).
2. Answers are streamed from the provider: a call whose client is gone is ended, and the
   received part charged.  A request that was sent completely is charged and counts as a
   call, unless the provider refused it (spec L10, L11).
3. Completions, reasons and events are redacted before they leave (I10).
4. Large texts are encoded and decoded in a worker thread, and other tasks run after each
   event that is passed on (L14, MD3).
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
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import trio

from hostlib.threads import LARGE_BYTES, in_thread, in_thread_if
from supervisor.fleet.fence import Fence, FencedError, UnpaidError
from supervisor.llm.answer import first_text
from supervisor.llm.answer_reader import AnswerError, BrokenOffError, ProviderError
from supervisor.llm.apis import CHAT, EMBEDDINGS
from supervisor.llm.deltas import drop_logprobs
from supervisor.llm.errors import NO_MEMORY
from supervisor.llm.provider import MAX_RETRIES, CallError, Request
from supervisor.llm.quota import HeldQuotaError, QuotaError, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
    from contextlib import AbstractAsyncContextManager

    from hostlib.documents import Object
    from hostlib.journal import Journal
    from hostlib.redact import Redactor
    from supervisor.fleet.fence import Payer
    from supervisor.llm.answer_reader import AnswerReader
    from supervisor.llm.apis import Api
    from supervisor.llm.ledger import Spending
    from supervisor.llm.provider import Provider
    from supervisor.llm.quota import Node, ReservedCall
    from supervisor.llm.section import Weights
    from vfs.ledger import Ledger
    from vfs.payload import MemoryReservation, PayloadBudget

TURN_STEPS = 32
"""Received pieces and their events between two turns of other tasks: half a millisecond."""

END_S = 0.5
"""How long a reply may continue after the last event of its answer; if it ends by then, the
connection is reused."""

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
    """

    data: bytes
    object: Object

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


FAILURES = (trio.TooSlowError, CallError, ProviderError, OSError, AnswerError)
"""The errors with which a call fails, beside the end of its child's lease."""

OnEvent: TypeAlias = "Callable[[Object, bool], Awaitable[None]]"
"""Called with each event of the stream, not redacted, and whether it is large."""


@dataclass(frozen=True, slots=True)
class _ReservedCall:
    """A call and its reservations (spec L10, FL7).

    Attributes:
        call: the call; of a fleet child, with a bound on its output.
        reserved: its worst case at its accounts.
        number: its number in the ledger.
        payer: the payer of a fleet child's call; None for another child's.
        name: the name of the reservation in the payer's slices; None for none.
        began_s: when it was reserved.
    """

    call: Call
    reserved: ReservedCall
    number: int
    payer: Payer | None
    name: str | None
    began_s: float


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
        request = Request(self._fence.check_of(call.child_id))
        paid = await self._reserve(call, request)
        answer = call.api.reader()
        completion: Completion | None = None
        failed: list[FailedCallError] = []  # raised from here, it is in no circle
        with self._budget.reservation(call.ledger) as memory:
            try:
                with trio.fail_after(self._timeout_s):
                    completion = await self._exchange(
                        paid, request, answer, memory, on_event
                    )
            except FencedError as why:
                failed.append(FailedCallError(str(why)))
            except FAILURES as why:
                failed.append(self._failure_of(why, request))
            finally:
                unfinished = "failed" if failed else "cancelled"
                outcome = unfinished if completion is None else "ok"
                self._settle(paid, request, answer, outcome)
                with trio.CancelScope(shield=True):  # bounded: one small transaction
                    await self._spending.wait_written()
        if completion is None:
            raise failed.pop()
        return completion

    def _failure_of(self, why: Exception, request: Request) -> FailedCallError:
        """Return the error of a failed call, without secrets."""
        match why:
            case trio.TooSlowError():
                reason = f"no complete answer within {self._timeout_s:g} s"
            case OSError(errno=errno.ENOMEM):
                return NoMemoryError(NO_MEMORY)
            case OSError():  # no thread can be started
                reason = os.strerror(why.errno or errno.EIO)
            case AnswerError():
                reason = f"invalid response: {why}"
            case _:
                reason = str(why)
        status, code = getattr(why, "status", 0), getattr(why, "code", "")
        is_fault = status in (0, 429) or status >= 500
        return FailedCallError(
            self.describe_in_a_line(reason),
            status,
            getattr(why, "retry_after_s", None),
            may_pass=is_fault and not request.is_sent,
            code=self._plain_code(code),
        )

    async def _reserve(self, call: Call, request: Request) -> _ReservedCall:
        """Reserve a call at its accounts, in its fleet's slices and in the ledger.

        Raises:
            QuotaError: an account has no room.
            FailedCallError: the lease is over, or the directory does not answer.
        """
        try:
            _check_fence(request)
        except FencedError as why:
            raise FailedCallError(str(why)) from None
        is_of_fleet = self._fence.life_of(call.child_id) is not None
        payer = self._fence.payer if is_of_fleet else None
        if payer is not None and call.max_tokens is None:  # a worst case is finite
            call = replace(call, max_tokens=MAX_SENT_TOKENS)
        factor = call.node.factor(call.model.name)
        try:
            reserved = call.node.reserve(
                math.ceil(factor * call.most_prompt_tokens),
                call.max_tokens,
                call.model.weights,
                math.ceil(factor * call.likely_prompt_tokens),
            )
            name = None if payer is None else await _reserve_slice(payer, reserved)
        except QuotaError as why:
            if not isinstance(why, HeldQuotaError):
                call.node.refusals += 1
            self._journal.write(
                "quota.denied",
                child_id=call.child_id,
                client_id=call.client_id,
                model=call.model.name,
            )
            raise
        call.node.refusals = 0
        number = self._spending.reserve(reserved.amounts)
        return _ReservedCall(call, reserved, number, payer, name, time.monotonic())

    async def _exchange(
        self,
        paid: _ReservedCall,
        request: Request,
        answer: AnswerReader,
        memory: MemoryReservation,
        on_event: OnEvent | None,
    ) -> Completion:
        """Send a call, and return its completion."""
        call, bound = paid.call, paid.reserved.max_tokens
        if call.max_tokens is None and bound is not None and bound > MAX_SENT_TOKENS:
            bound = None
        data = await in_thread_if(call.is_large, call.encode, bound)
        await self._spending.wait_written()
        ask = call.model.provider.ask
        asking = ask(call.api, data, request, call.headers, call.max_retries)
        received = await _receive(asking, request, answer, memory, on_event)
        is_large = received > LARGE_BYTES
        return await in_thread_if(is_large, self._finish, answer)

    def _settle(
        self, paid: _ReservedCall, request: Request, answer: AnswerReader, outcome: str
    ) -> None:
        """Charge a call's use, or nothing if it was not made (spec L10, L11).

        Its journal entry has no texts (spec L13).
        """
        call, usage, cost = paid.call, Usage(0, 0), 0.0
        if request.is_sent:
            usage, least = _use(paid, answer)
            cost = paid.reserved.settle(usage, least)
            # A provider may count more than the worst case: reserve more next time (MD5).
            factor = usage.prompt / max(1, call.most_prompt_tokens)
            call.node.learn(call.model.name, factor)
        else:
            paid.reserved.release()
        if paid.payer is not None and paid.name is not None:
            paid.payer.settle(paid.name, cost)
        self._spending.add(call.node, cost, int(request.is_sent), paid.number)
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
            latency_ms=round(1000 * (time.monotonic() - paid.began_s), 3),
        )

    def _finish(self, answer: AnswerReader) -> Completion:
        """Return the completion of an answer that has ended."""
        return self.redact_completion(answer.finish())

    def redact_completion(self, found: Object) -> Completion:
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
        return Completion(clean, found)

    def describe_in_a_line(self, reason: str) -> str:
        """Return a reason as one line, without secrets."""
        return " ".join(self._redactor.text(reason).split())

    def _plain_code(self, code: str) -> str:
        """Return a provider's code of an error; empty if it is no plain word (I10)."""
        is_plain = len(code) <= MAX_CODE_CHARS and _CODE.fullmatch(code)
        return code if is_plain and self._redactor.text(code) == code else ""


def _check_fence(request: Request) -> None:
    """Let a call go on (spec FL6).

    Raises:
        FencedError: the lease of its child is over.
    """
    if request.check is not None:
        request.check()


async def _reserve_slice(payer: Payer, reserved: ReservedCall) -> str | None:
    """Reserve a call in a fleet's slices, or release it; return its name there."""
    try:
        return await payer.reserve(reserved.worst_cost)
    except BaseException as why:
        reserved.release()
        if isinstance(why, UnpaidError) and why.is_refused:
            raise (HeldQuotaError if why.is_held else QuotaError) from None
        if isinstance(why, (UnpaidError, FencedError)):
            raise FailedCallError(str(why), may_pass=True) from None
        raise


async def _receive(
    asking: AbstractAsyncContextManager[AsyncIterator[bytes]],
    request: Request,
    answer: AnswerReader,
    memory: MemoryReservation,
    on_event: OnEvent | None,
) -> int:
    """Read an answer to its end; return its length in bytes.

    After its last event the answer is complete, whatever happens to the connection.

    Args:
        asking: the request, which yields the answer's bytes.
        request: its state.
        answer: the reader of the answer.
        memory: the reservation for what is received.
        on_event: called with each event.

    Raises:
        FencedError: the lease of the call's child is over.
    """
    received = steps = 0
    try:
        with trio.CancelScope() as scope:
            async with asking as pieces:
                async for piece in pieces:
                    received += len(piece)
                    is_large = answer.pending_bytes > LARGE_BYTES
                    batches: Iterable[list[Object]]
                    if is_large:
                        batches = [await in_thread(answer.feed, piece)]
                    else:
                        batches = answer.batches(piece)
                    for events in batches:
                        _check_fence(request)
                        steps += 1 + len(events)
                        new_bytes = answer.held_bytes - memory.size_bytes
                        if (
                            steps >= TURN_STEPS
                            or new_bytes > LARGE_BYTES
                            or on_event is not None
                            or answer.has_lines
                        ):
                            steps = 0
                            memory.add(new_bytes)
                            await _pass_on(events, on_event, is_large=is_large)
                    if answer.has_ended and scope.deadline == math.inf:
                        scope.deadline = trio.current_time() + END_S
    except BrokenOffError:
        if not answer.has_ended:
            raise
    _check_fence(request)
    memory.add(answer.held_bytes - memory.size_bytes)
    return received


async def _pass_on(
    events: list[Object], on_event: OnEvent | None, *, is_large: bool
) -> None:
    """Pass events on; other tasks run after each, or once if there is none to pass.

    So a burst of a fast provider does not delay other children, and its first event is
    sent before the last is parsed.  Not cancelled meanwhile: all received bytes are
    charged.
    """
    if on_event is None or not events:
        await trio.lowlevel.cancel_shielded_checkpoint()
        return
    for event in events:
        await on_event(event, is_large)
        await trio.lowlevel.cancel_shielded_checkpoint()


def _use(paid: _ReservedCall, answer: AnswerReader) -> tuple[Usage, float]:
    """Return a call's use, and its least cost in weighted tokens."""
    call, reserved = paid.call, paid.reserved
    try:
        reported = answer.usage()
    except AnswerError:
        reported = None
    if reported is not None and not answer.has_early_usage:
        return reported, 0.0
    usage = answer.estimate(call.prompt_tokens, reserved.max_tokens)
    if reported is not None:  # reported before the output was written (spec MD5)
        usage = replace(
            reported,
            prompt=max(reported.prompt, usage.prompt),
            completion=max(reported.completion, usage.completion),
        )
    # Reasoning is not shown, so there may have been as much as allowed; the request
    # asks for it, or the model always reasons (spec L10, MD5).
    is_hidden = call.has_reasoning or call.model.has_reasoning
    return usage, reserved.reserved if is_hidden else 0.0
