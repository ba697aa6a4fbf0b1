"""What the endpoint's requests mean: ``POST /v1/chat/completions``, ``GET /v1/models``.

Rules of this file.

1. The model is the child's, whatever was asked for, unless that is one it may have; the
   bound on the output is the smaller of the child's and the configuration's (spec L6).
2. What could cost more than is reserved is refused by its name, never dropped.
3. The same gateway, quota, redaction and journal as for LLM_CHAT.  A client that closes
   its connection ends its call (spec L10).
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from supervisor.documents import MOST_VALUES, check_values
from supervisor.footprint import document_bytes
from supervisor.llm.answer_reader import DONE
from supervisor.llm.deltas import ChoiceRedactor
from supervisor.llm.endpoint_http import (
    FORMS,
    RefusedRequestError,
    TooManyBytesError,
    reserve,
)
from supervisor.llm.gateway import LARGE_BYTES, FailedCallError, NoMemoryError
from supervisor.llm.prompt_size import size_of_body
from supervisor.llm.quota import HeldQuotaError, QuotaError
from vfs.hostio import in_thread

if TYPE_CHECKING:
    from supervisor.llm.endpoint_http import HttpConnection, HttpRequest
    from supervisor.llm.gateway import Call, Completion
    from supervisor.llm.quota import Node
    from supervisor.llm.redact import Redactor
    from supervisor.llm.service import LlmService
    from vfs.filesystem import Client
    from vfs.payload import Reservation

PASSED = frozenset(
    {
        "messages", "tools", "tool_choice", "parallel_tool_calls", "functions",
        "function_call", "response_format", "stop", "temperature", "top_p",
        "presence_penalty", "frequency_penalty", "logit_bias", "logprobs",
        "top_logprobs", "seed", "user", "reasoning_effort", "verbosity",
    }
)  # fmt: skip
"""Passed on to the provider as they are."""

READ = frozenset(
    {"model", "stream", "stream_options", "max_tokens", "max_completion_tokens"}
)
"""Looked at here."""

HARMLESS: dict[str, object] = {"n": 1, "store": False, "metadata": None}
"""Taken with these values, which change nothing."""

QUOTA_CODE = "insufficient_quota"
RATE_CODE = "rate_limit_exceeded"

FINAL_REFUSAL = 4
"""From this refusal in a row on the status is 400, at which clients end."""

SOON_S = 60
"""The end of a window is told in ``retry-after`` if it is no further off: some clients sleep
as long as they are told to, however long that is."""

PASSED_STATUSES = frozenset({400, 404, 413, 422, 529})
"""Statuses of the provider that are passed on."""

LEAVE_S = 0.002
"""As for LLM_CHAT: what the provider has sent by then is read, and charged."""


async def answer(
    service: LlmService,
    client: Client,
    node: Node,
    http: HttpConnection,
    request: HttpRequest,
) -> None:
    """Answer one request.

    Raises:
        RefusedRequestError: it cannot be answered; nothing has been sent.
    """
    match request.method, request.path.rstrip("/"):
        case "POST", "/v1/chat/completions":
            await _chat(service, client, node, http, request)
        case "GET" | "HEAD", "/v1/models":
            await http.reply(200, _models(service, client))
        case _, "/v1/chat/completions" | "/v1/models" as path:
            why = _invalid(f"{request.method} does nothing here", 405)
            allow = "GET, HEAD" if path == "/v1/models" else "POST"
            why.headers = {**why.headers, "allow": allow}
            raise why
        case _:
            text = f"there is no {request.path[:200]}; there are /v1/chat/completions and /v1/models"
            raise _invalid(text, 404)


def _models(service: LlmService, client: Client) -> bytes:
    rows = [
        {"id": name, "object": "model", "created": 0, "owned_by": "sandhost"}
        for name in sorted(service.models_of(client))
    ]
    return msgspec.json.encode({"object": "list", "data": rows})


async def _chat(
    service: LlmService,
    client: Client,
    node: Node,
    http: HttpConnection,
    request: HttpRequest,
) -> None:
    body, memory = request.body, request.memory
    is_large = len(body) > LARGE_BYTES
    size = await in_thread(_measured, body) if is_large else _measured(body)
    reserve(memory, FORMS * len(body) + size - memory.size_bytes)
    make = partial(_call, service, client, node, body)
    call, options = await in_thread(make) if is_large else make()
    refusal: RefusedRequestError | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_leave_with, http, nursery.cancel_scope)
            if options.get("stream"):
                include = (options.get("stream_options") or {}).get("include_usage")
                stream = _Stream(
                    http, service.redactor, memory, include_usage=bool(include)
                )
                await stream.send(service, call)
            else:
                completion = await service.gateway.complete(call)
                reserve(memory, 2 * len(completion.data))
                await http.reply(200, completion.data)
            nursery.cancel_scope.cancel()
    except* (TooManyBytesError, NoMemoryError):
        refusal = TooManyBytesError()
    except* HeldQuotaError:
        text = "other calls of this account hold what is left of its quota; ask again"
        refusal = RefusedRequestError(429, text, RATE_CODE, RATE_CODE, retry_after_s=1)
    except* QuotaError:
        refusal = _out_of_quota(service, node)
    except* FailedCallError as group:
        refusal = _failed(group)
    if (
        refusal is not None
    ):  # raised up there it would be in a group, before Python 3.11.4
        raise refusal


def _out_of_quota(service: LlmService, node: Node) -> RefusedRequestError:
    """Return the refusal of a call that cannot be paid (spec MD6).

    Some programs repeat a call that got 429, for minutes or without end. Nearly none
    repeats one that got 400.
    """
    text = "quota exceeded: cannot make LLM call"
    is_final = node.refusals >= FINAL_REFUSAL
    status = 400 if is_final else service.section.quota_status
    refusal = RefusedRequestError(status, text, QUOTA_CODE, QUOTA_CODE)
    left_s = service.spending.window_left_s
    if left_s <= SOON_S:
        refusal.headers = {**refusal.headers, "retry-after": str(math.ceil(left_s))}
    return refusal


def _failed(group: BaseExceptionGroup[FailedCallError]) -> RefusedRequestError:
    """Return the refusal of a call that the provider refused (spec MD6)."""
    why: BaseException = group
    while isinstance(why, BaseExceptionGroup):
        why = why.exceptions[0]
    text = f"OpenAI API call failed: {why}"
    if not isinstance(why, FailedCallError):
        return RefusedRequestError(502, text, "provider_error")
    if why.status == 429:
        # Not the code of a used-up quota, even if the provider said so: that is the
        # child's own quota, of which something may be left.
        return RefusedRequestError(
            429, text, RATE_CODE, RATE_CODE, retry_after_s=why.retry_after_s
        )
    # The caller's own faults stay the caller's; what else the provider said is ours.
    status = why.status if why.status in PASSED_STATUSES else 502
    return RefusedRequestError(status, text, "provider_error")


async def _leave_with(http: HttpConnection, scope: trio.CancelScope) -> None:
    """End a call, a moment after its client has gone."""
    await http.wait_gone()
    scope.deadline = trio.current_time() + LEAVE_S
    await trio.sleep_forever()


def _call(
    service: LlmService, client: Client, node: Node, body: bytearray
) -> tuple[Call, dict[str, Any]]:
    """Return the call that a request makes, and the request."""
    asked = _asked(body)
    passed = {name: asked[name] for name in asked if name in PASSED}
    section = service.section
    if section.temperature is not None:
        passed.setdefault("temperature", section.temperature)
    name = asked.get("model")
    model = service.model_name(client, claim=True)
    if isinstance(name, str) and name in service.models_of(client):
        model = name
    bounds = (asked.get("max_tokens"), asked.get("max_completion_tokens"))
    call = service.prepared(
        client,
        model,
        passed,
        size=size_of_body(passed),
        max_tokens=_bound(section.max_tokens, bounds),
        node=node,
    )
    return call, asked


def _asked(body: bytearray) -> dict[str, Any]:
    """Return a request that can be made.

    Raises:
        RefusedRequestError: it cannot.
    """
    asked = _decoded(body)
    if not isinstance(asked, dict):
        raise _invalid("the body is no JSON object")
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages: a list of at least one")
    for name, value in asked.items():
        if name in PASSED or name in READ or value is None:
            continue
        if name in HARMLESS and value == HARMLESS[name]:
            continue
        raise _invalid(f"{name[:100]}: not available through this host")
    if not isinstance(asked.get("stream_options") or {}, dict):
        raise _invalid("stream_options: an object")
    return asked


def _measured(body: bytearray) -> int:
    """Return what a body takes once it is decoded.

    Raises:
        RefusedRequestError: it has too many values.
    """
    if len(body) <= LARGE_BYTES:
        return document_bytes(body, len(body))
    try:
        check_values(body, "what is long in a request is a text")
    except ValueError as why:
        raise _invalid(str(why)) from None
    return document_bytes(body, MOST_VALUES)


def _decoded(body: bytearray) -> object:
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError) as why:
        raise _invalid(f"the body is no JSON: {why}") from None


def _bound(configured: int | None, asked: tuple[object, ...]) -> int | None:
    """Return the smallest of the bounds on the output that there are."""
    found = math.inf if configured is None else configured
    for value in asked:
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise _invalid("max_tokens: a number from 1 on")
        found = min(found, value)
    return None if found == math.inf else int(found)


def _invalid(text: str, status: int = 422) -> RefusedRequestError:
    return RefusedRequestError(status, text, "invalid_request_error")


class _Stream:
    """A streamed answer on its way to a child, redacted across its pieces."""

    def __init__(
        self,
        http: HttpConnection,
        redactor: Redactor,
        memory: Reservation,
        *,
        include_usage: bool,
    ) -> None:
        self._http = http
        self._memory = memory
        self._redactor = redactor
        self._include_usage = include_usage
        self._choices: dict[int, ChoiceRedactor] = {}
        self._last: dict[str, Any] = {}
        self._has_begun = False

    async def send(self, service: LlmService, call: Call) -> None:
        """Make a call and pass its events on as they come.

        Raises:
            QuotaError, FailedCallError: before anything was sent.
        """
        # Bounded by the memory that is reserved for what the client has not taken.
        sender, receiver = trio.open_memory_channel[bytes](math.inf)
        done: list[Completion] = []

        def put(event: dict[str, Any]) -> None:
            data = self._passed(event)
            if data is not None:
                self._memory.add(len(data))
                sender.send_nowait(data)

        async def ask() -> None:
            with sender:
                done.append(await service.gateway.complete(call, put))

        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                async for data in receiver:
                    await self._begin()
                    await self._http.event(data)
                    self._memory.add(-len(data))
        except* FailedCallError as group:
            if not self._has_begun:
                raise
            await self._http.event(_failed(group).body())
        if done:
            await self._end(done[0])
        await self._http.end_events()

    async def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._http.begin_events()

    def _passed(self, event: dict[str, Any]) -> bytes | None:
        """Return what the client gets of an event; None: nothing."""
        choices = event.get("choices") or []
        if event.get("usage") is not None and not self._include_usage:
            event = {key: value for key, value in event.items() if key != "usage"}
            if not choices:
                return None
        if choices:
            self._last = {**event, "choices": []}
        for choice in choices:
            self._choice(choice.get("index", 0)).feed(choice)
        return self._redacted(event)

    def _choice(self, index: int) -> ChoiceRedactor:
        known = self._choices.get(index)
        if known is None:
            known = self._choices[index] = ChoiceRedactor(self._redactor)
        return known

    def _redacted(self, event: dict[str, Any]) -> bytes:
        return self._redactor.data(msgspec.json.encode(event))

    async def _event(self, event: dict[str, Any]) -> None:
        await self._http.event(self._redacted(event))

    async def _end(self, completion: Completion) -> None:
        if not self._last:  # a provider that does not stream
            await self._begin()
            await self._whole(completion)
        for index, known in self._choices.items():
            if rest := known.rest():
                choice = {"index": index, "delta": rest, "finish_reason": None}
                await self._event({**self._last, "choices": [choice]})
        await self._http.event(DONE)

    async def _whole(self, whole: Completion) -> None:
        """Pass an answer on that came in one piece."""
        completion = whole.object
        head = {
            key: value
            for key, value in completion.items()
            if key not in ("choices", "usage")
        }
        head["object"] = "chat.completion.chunk"
        choices = []
        for choice in completion["choices"]:
            delta = dict(choice["message"])
            calls = delta.get("tool_calls") or ()
            if calls:
                delta["tool_calls"] = [
                    {"index": number, **call} for number, call in enumerate(calls)
                ]
            reason = choice.get("finish_reason") or "stop"
            index = choice.get("index", 0)
            choices.append({"index": index, "delta": delta, "finish_reason": reason})
        event = {**head, "choices": choices}
        if len(whole.data) > LARGE_BYTES:
            await self._http.event(await in_thread(self._redacted, event))
        else:
            await self._event(event)
        if self._include_usage and completion.get("usage"):
            await self._event({**head, "choices": [], "usage": completion["usage"]})
