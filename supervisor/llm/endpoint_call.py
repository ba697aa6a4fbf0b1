"""Answers to requests of the endpoint: calls of a model, and the list of models.

Rules of this file.

1. All APIs take the same way: they differ by a row of ``apis``, a reader and a writer of
   answers (spec MD2).
2. A restricted child gets its model, whatever model it names; a top-level one may name
   those of the configuration, and an alias (spec L6, MD4).
3. A member that could cost more than is reserved is refused by its name, never dropped.
4. The same gateway, quota, redaction and journal as for LLM_CHAT.  A client that closes
   its connection ends its call (spec L10).
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote

import msgspec
import trio

from hostlib.documents import MOST_VALUES
from hostlib.footprint import document_bytes
from hostlib.threads import LARGE_BYTES, in_thread_if
from supervisor.fsproxy.ports import LEAVE_S
from supervisor.llm import (
    messages_request,
    messages_writer,
    native_request,
    responses_request,
    responses_writer,
)
from supervisor.llm.answer_writers import ChatWriter, PassedWriter, TranslatedWriter
from supervisor.llm.apis import (
    CHAT,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    Api,
    BadRequestError,
    check_native,
    check_request,
    has_reasoning,
)
from supervisor.llm.endpoint_http import FORMS, reserve, reserve_answer
from supervisor.llm.errors import (
    CODE_STATUSES,
    RefusedRequestError,
    TooManyBytesError,
)
from supervisor.llm.gateway import (
    Completion,
    FailedCallError,
    NoMemoryError,
)
from supervisor.llm.json_request import BadJsonError, is_short, read_request
from supervisor.llm.prompt_size import size_of_body, size_of_request
from supervisor.llm.quota import HeldQuotaError, QuotaError
from supervisor.llm.translation import UntranslatableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hostlib.documents import Object
    from hostlib.redact import Redactor
    from supervisor.llm.answer_writers import AnswerWriter, Maker
    from supervisor.llm.endpoint_http import HttpConnection, HttpRequest
    from supervisor.llm.gateway import Call, Model
    from supervisor.llm.json_request import JsonRequest
    from supervisor.llm.models import Models
    from supervisor.llm.quota import Node
    from supervisor.llm.translation import Translation
    from vfs.clients import Client
    from vfs.payload import MemoryReservation

T = TypeVar("T")

DOORS: Mapping[str, Api] = {
    f"/v1{api.path}": api for api in (CHAT, RESPONSES, MESSAGES, EMBEDDINGS)
}
"""Path of the endpoint -> API."""

MOST_NAME_CHARS = 200
"""Most characters of a requested model's name in the journal."""

BETAS = ("anthropic-beta", "openai-beta")
"""Headers that ask for new features of an API, which another API cannot express."""

MODELS = "/v1/models"
COUNT_TOKENS = "/v1/messages/count_tokens"

QUOTA_CODE = "insufficient_quota"
RATE_CODE = "rate_limit_exceeded"

HELD_QUOTA = (
    "cannot reserve this call: calls under way hold the rest of the quota; ask again when"
    " one has ended, or bound the output of each (max_tokens)"
)

FINAL_REFUSAL = 4
"""From this refusal in a row on the status is 400, after which clients stop."""

SOON_S = 60
"""``retry-after`` names the end of a window only if it is this near: some clients sleep as
long as it says, whatever the time."""

PASSED_STATUSES = frozenset({400, 404, 413, 422, 529})
"""Statuses of the provider that are passed on."""

SOON_STATUSES = frozenset({429, 529})
"""Statuses that pass by themselves: the program asks again, also if it was charged."""

HIDDEN_STATUSES = frozenset({401, 403})
"""Statuses of the provider for faults of the operator's key: passed on, the child's own key
would seem wrong."""

SENT_BYTES = 65_536
"""Size of the pieces in which waiting events are sent."""


@dataclass(frozen=True, slots=True)
class Asker:
    """The client of a request.

    Attributes:
        models: the host's models.
        client: the client whose rights count.
        node: the node that pays.
    """

    models: Models
    client: Client
    node: Node


async def answer(asker: Asker, http: HttpConnection, request: HttpRequest) -> None:
    """Answer one request.

    Raises:
        RefusedRequestError: the request is refused; nothing has been sent.
    """
    path = request.head.path.rstrip("/")
    api = DOORS.get(path)
    if api is RESPONSES and request.head.is_upgrade:
        why = _invalid("no WebSocket here; ask with POST", 426)
        why.headers = {**why.headers, "connection": "close"}
        raise why
    match request.head.method, path:
        case "POST", _ if api is not None:
            await _ModelRequest(asker, http, request, api).answer()
        case "POST", _ if path == COUNT_TOKENS:
            await _count_tokens(http, request)
        case "GET" | "HEAD", _ if path == MODELS or path.startswith(f"{MODELS}/"):
            wanted = unquote(path.removeprefix(MODELS)[1:])
            await http.answer(200, _models(asker, wanted))
        case _ if api is not None or path in (MODELS, COUNT_TOKENS):
            why = _invalid(f"{request.head.method} does nothing here", 405)
            allow = "GET, HEAD" if path == MODELS else "POST"
            why.headers = {**why.headers, "allow": allow}
            raise why
        case _:
            raise _invalid(_no_door(request.head.path), 404)


def _no_door(path: str) -> str:
    if path.startswith("/v1/responses/"):
        return "no response is kept here; send what was said with each request"
    paths = ", ".join((*DOORS, MODELS, COUNT_TOKENS))
    return f"there is no {path[:200]}; there are {paths}"


def _models(asker: Asker, wanted: str) -> bytes:
    """Return the models that a client may name, or one of them."""
    names = sorted(asker.models.models_of(asker.client))
    rows = [
        {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "sandhost",
            "type": "model",
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
        }
        for name in names
        if wanted in ("", name)
    ]
    if wanted:
        if not rows:
            text = f"there is no model {wanted[:200]!r}; GET {MODELS} lists them"
            raise _invalid(text, 404)
        return msgspec.json.encode(rows[0])
    listed = {"object": "list", "data": rows, "has_more": False}
    listed |= {"first_id": names[0], "last_id": names[-1]}
    return msgspec.json.encode(listed)


async def _count_tokens(http: HttpConnection, request: HttpRequest) -> None:
    """Answer with an estimate, without a provider or a charge."""
    await _reserve_forms(request)
    count = await in_thread_if(not is_short(request.body), _count, request.body)
    await http.answer(200, msgspec.json.encode({"input_tokens": count}))


def _count(body: bytearray) -> int:
    """Return an estimate of the input tokens of a request."""
    return messages_request.count_tokens_estimate(_read(body).whole_value())


async def _reserve_forms(request: HttpRequest) -> int:
    """Reserve the memory of all copies of a body; return that of the decoded one."""
    body, memory = request.body, request.memory
    is_long = not is_short(body)
    size = await in_thread_if(is_long, document_bytes, body, MOST_VALUES)
    reserve(memory, FORMS * len(body) + size - memory.size_bytes)
    return size


def _read(body: bytearray) -> JsonRequest:
    try:
        return read_request(body, MOST_VALUES)
    except BadJsonError as why:
        raise _invalid(str(why)) from None


def _invalid(text: str, status: int = 400) -> RefusedRequestError:
    return RefusedRequestError(status, text, "invalid_request_error")


def _out_of_quota(models: Models, node: Node) -> RefusedRequestError:
    """Return the refusal of a call that cannot be paid (spec MD6).

    Some programs repeat a call after 429, for minutes or without end; almost none does
    after 400.
    """
    text = "quota exceeded: cannot make LLM call"
    is_final = node.refusals >= FINAL_REFUSAL
    status = 400 if is_final else models.section.quota_status or 429
    refusal = RefusedRequestError(status, text, QUOTA_CODE, QUOTA_CODE)
    left_s = models.accounts.spending.window_left_s
    if left_s <= SOON_S:
        refusal.headers = {**refusal.headers, "retry-after": str(math.ceil(left_s))}
    return refusal


def _refusal_of(why: FailedCallError) -> RefusedRequestError:
    """Return the refusal of a call that the provider refused (spec MD6)."""
    text = f"OpenAI API call failed: {why}"
    code = why.code or None
    # An error in an event has no status; its code gives the one it would have.
    told = why.status or CODE_STATUSES.get(why.code, 0)
    # Not the code of a used-up quota, even if the provider sent it: to the program it
    # would mean the child's own quota.
    if told in HIDDEN_STATUSES or code == QUOTA_CODE:
        code = None
    if told == 429:
        refusal = RefusedRequestError(429, text, RATE_CODE, RATE_CODE)
    else:
        # Errors of the caller are passed on; other errors of the provider become 502.
        status = told if told in PASSED_STATUSES else 502
        refusal = RefusedRequestError(status, text, "provider_error", code)
    if why.may_pass or (not why.status and told in SOON_STATUSES):
        # The host does not retry: the program does, as with the provider itself.
        after_s = why.retry_after_s
        refusal.headers = {} if after_s is None else {"retry-after": str(after_s)}
    return refusal


async def _leave_with(http: HttpConnection, scope: trio.CancelScope) -> None:
    """End a call, a moment after its client has gone."""
    await http.wait_gone()
    scope.deadline = trio.current_time() + LEAVE_S
    await trio.sleep_forever()


@dataclass(frozen=True, slots=True)
class _ReadyRequest:
    """A request that is ready to be sent.

    Attributes:
        call: the call to make.
        writer: writes the answer.
        is_stream: the answer is streamed.
        dropped: members that are left out, for they change nothing.
        size_bytes: size of the translated request; 0 if it is not translated.
    """

    call: Call
    writer: AnswerWriter
    is_stream: bool = False
    dropped: tuple[str, ...] = ()
    size_bytes: int = 0


class _ModelRequest:
    """One request to a model.

    Args:
        asker: the client.
        http: the connection.
        request: the request.
        api: the API of the request.
    """

    def __init__(
        self, asker: Asker, http: HttpConnection, request: HttpRequest, api: Api
    ) -> None:
        self._asker = asker
        self._models = asker.models
        self._http = http
        self._request = request
        self._memory = request.memory
        self._api = api

    async def answer(self) -> None:
        """Call the model, and pass the answer on.

        Raises:
            RefusedRequestError: the request is refused; nothing has been sent.
        """
        body = self._request.body
        decoded_bytes = await _reserve_forms(self._request)
        self._models.accounts.begin_window()  # not in a thread: it changes accounts
        ready = await in_thread_if(not is_short(body), self._prepare)
        if ready.size_bytes:
            # Texts of the translated request; it replaces the body unless it is longer.
            longer_bytes = max(0, ready.size_bytes - len(body))
            reserve(self._memory, decoded_bytes + FORMS * longer_bytes)
        self._models.note_dropped(self._asker.client, self._api, ready.dropped)
        refusal: RefusedRequestError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_leave_with, self._http, nursery.cancel_scope)
            # An exception that leaves a nursery is in a reference cycle, and would keep
            # the request, whose memory is not reserved any more (attack 42).
            try:
                await self._pass_on(ready)
            except (TooManyBytesError, NoMemoryError):
                refusal = TooManyBytesError()
            except HeldQuotaError:
                refusal = RefusedRequestError(
                    429, HELD_QUOTA, RATE_CODE, RATE_CODE, retry_after_s=1
                )
            except QuotaError:
                refusal = _out_of_quota(self._models, self._asker.node)
            except FailedCallError as why:
                refusal = _refusal_of(why)
            nursery.cancel_scope.cancel()
        if refusal is not None:
            try:
                raise refusal
            finally:
                del refusal

    async def _pass_on(self, ready: _ReadyRequest) -> None:
        """Make a call, and pass its answer on."""
        call, writer = ready.call, ready.writer
        if ready.is_stream:
            await _Stream(self._http, writer, self._memory).send(self._models, call)
        else:
            completion = await self._models.gateway.complete(call)
            reserve_answer(self._memory, 2 * len(completion.data))
            is_long = len(completion.data) > LARGE_BYTES
            data = await in_thread_if(is_long, writer.whole, completion)
            await self._http.answer(200, data)

    def _prepare(self) -> _ReadyRequest:
        """Return the request ready to be sent."""
        document = _read(self._request.body)
        models, api, asked = self._models, self._api, document.value
        try:
            check_request(api, asked, models.section.hosted_tools or "refuse")
        except BadRequestError as why:
            raise _invalid(str(why)) from None
        named = asked.get("model")
        name = models.model_for(self._asker.client, api.name, named)
        model = models.model(name)
        is_stream = bool(asked.get("stream")) and api.streams
        if api in model.apis or (api is EMBEDDINGS and CHAT in model.apis):
            made = self._pass_unchanged(document, model)
        elif CHAT in model.apis and api in (RESPONSES, MESSAGES):
            made = self._translate(document, model, named or name)
        else:
            text = f"model: {name!r} is not asked by {api.path[1:]} here"
            raise _invalid(f"{text}; GET {MODELS} lists what there is")
        told = (named or "")[:MOST_NAME_CHARS]
        call = replace(made.call, asked=told, max_retries=0)
        return replace(made, call=call, is_stream=is_stream)

    def _pass_unchanged(self, document: JsonRequest, model: Model) -> _ReadyRequest:
        api, asked, models = self._api, document.value, self._models
        section = models.section
        client, node = self._asker.client, self._asker.node
        try:
            check_native(api, asked, section.hosted_tools or "refuse")
        except BadRequestError as why:
            raise _invalid(str(why)) from None
        size = size_of_request(api, document)
        encode = partial(
            native_request.encode_native,
            api,
            model,
            document,
            temperature=section.temperature if api is CHAT else None,
            drops_hosted_tools=section.hosted_tools == "drop",
        )
        call = replace(
            models.new_call(client, model, api, size, encode, node),
            max_tokens=1 if not api.bounds else self._bound(asked),
            has_reasoning=has_reasoning(api, asked),
            headers=self._headers(),
        )
        name = asked.get("model") or model.name
        if api is CHAT:
            options = asked.get("stream_options") or {}
            usage = bool(options.get("include_usage"))
            writer = ChatWriter(models.redactor, name, include_usage=usage)
            return _ReadyRequest(call, writer)
        return _ReadyRequest(call, PassedWriter(models.redactor, name, api))

    def _headers(self) -> dict[str, str]:
        told = self._request.head.headers
        return {name: told[name] for name in told if name in self._api.headers}

    def _translate(
        self, document: JsonRequest, model: Model, name: str
    ) -> _ReadyRequest:
        models, api = self._models, self._api
        section = models.section
        try:
            made, writer = translate(
                api,
                document.whole_value(),
                name,
                models.redactor,
                has_reasoning=model.has_reasoning,
                drops_hosted_tools=section.hosted_tools == "drop",
            )
        except UntranslatableError as why:
            raise _invalid(str(why)) from None
        if section.temperature is not None:
            made.body.setdefault("temperature", section.temperature)
        size = size_of_body(made.body)
        call = models.call_for_body(
            self._asker.client,
            model.name,
            made.body,
            size=size,
            max_tokens=self._bound(document.value),
            node=self._asker.node,
        )
        betas = tuple(name for name in self._headers() if name in BETAS)
        dropped = (*made.dropped, *betas)
        return _ReadyRequest(call, writer, False, dropped, size.size_bytes)

    def _bound(self, asked: Object) -> int | None:
        """Return the smallest bound on the output; None without one."""
        return self._api.least_bound(asked, self._models.section.max_tokens)


def translate(
    api: Api,
    asked: Object,
    name: str,
    redactor: Redactor,
    *,
    has_reasoning: bool,
    drops_hosted_tools: bool,
) -> tuple[Translation, TranslatedWriter]:
    """Return a request in the form of Chat Completions, and the writer of its answer.

    Args:
        api: the API of the request.
        asked: the request.
        name: the name of the model in the answer.
        redactor: knows every secret.
        has_reasoning: the model takes an effort of reasoning.
        drops_hosted_tools: leave out tools that a provider runs itself.

    Raises:
        UntranslatableError: the request cannot be translated.
    """
    maker: Maker
    if api is MESSAGES:
        translation = messages_request.translate_request(
            asked, has_reasoning=has_reasoning
        )
        maker = messages_writer.MessagesWriter(asked, translation, name)
    else:
        translation = responses_request.translate_request(
            asked, drops_hosted_tools=drops_hosted_tools
        )
        body = translation.body
        if not has_reasoning and body.pop("reasoning_effort", None) is not None:
            translation.dropped = (*translation.dropped, "reasoning.effort")
        now = int(time.time())
        maker = responses_writer.ResponsesWriter(asked, translation, name, now)
    return translation, TranslatedWriter(redactor, api, maker)


def _waiting(
    receiver: trio.MemoryReceiveChannel[bytes], room_bytes: int
) -> Iterator[bytes]:
    """Yield waiting frames, as far as there is room."""
    with suppress(trio.WouldBlock, trio.EndOfChannel):
        while room_bytes > 0:
            frame = receiver.receive_nowait()
            room_bytes -= len(frame)
            yield frame


class _Stream:
    """A streamed answer to a child.

    Args:
        http: the connection.
        writer: writes the answer.
        memory: the reservation for the request and for events that wait.
    """

    def __init__(
        self, http: HttpConnection, writer: AnswerWriter, memory: MemoryReservation
    ) -> None:
        self._http = http
        self._writer = writer
        self._memory = memory
        self._has_begun = False

    async def send(self, models: Models, call: Call) -> None:
        """Make a call and pass its events on as they come.

        Raises:
            QuotaError, FailedCallError: the call failed before anything was sent.
        """
        # Bounded by the memory that is reserved for waiting events.
        sender, receiver = trio.open_memory_channel[bytes](math.inf)
        done: list[Completion | FailedCallError | QuotaError] = []

        async def ask() -> None:
            with sender:
                put = partial(self._put, sender)
                try:
                    done.append(await models.gateway.complete(call, put))
                except (FailedCallError, QuotaError) as why:
                    done.append(why)  # send earlier events first

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            async for frame in receiver:
                # Send waiting frames together, so that the client wakes once.
                room_bytes = SENT_BYTES - len(frame)
                frames = b"".join((frame, *_waiting(receiver, room_bytes)))
                await self._send(frames)
                self._memory.add(-len(frames))
        ended = done.pop()
        if isinstance(ended, Completion):
            is_long = len(ended.data) > LARGE_BYTES
            last = await in_thread_if(is_long, self._writer.finish, ended)
        elif self._has_begun and isinstance(ended, FailedCallError):
            last = self._writer.fail(_refusal_of(ended))
        else:
            try:
                raise ended
            finally:
                del ended
        if not self._has_begun:
            await self._send(b"")
        await self._http.end_events(b"".join(last))

    async def _put(
        self, sender: trio.MemorySendChannel[bytes], event: Object, is_large: bool
    ) -> None:
        """Queue the frames of a provider's event."""
        for frame in await in_thread_if(is_large, self._writer.feed, event):
            self._memory.add(len(frame))
            sender.send_nowait(frame)

    async def _send(self, frames: bytes) -> None:
        if self._has_begun:
            await self._http.events(frames)
        else:
            self._has_begun = True
            await self._http.begin_events(frames, self._writer.fail)
