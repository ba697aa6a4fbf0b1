"""One provider: its address, its key, its client; requests go out, answer bytes come in.

Rules of this file.

1. It is the only module that holds a key.  What it raises and yields has passed the
   redactor, or is passed through it by ``gateway`` before anybody sees it (I10).
2. ``openai`` is imported here alone, by ``load``, in a worker thread: it takes half a
   second.  Retries (429, 5xx, connections) are its business (spec L11).
3. No body is read beyond a bound, that of an error neither.
4. Requests are made ready one at a time: each takes the library some milliseconds, and
   Trio would make a hundred of them ready before anybody else had a turn (spec L14).
"""

from __future__ import annotations

import json
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit, urlunsplit

import trio

from supervisor.llm.answer_reader import BrokenOffError
from supervisor.llm.apis import ASKABLE, CHAT, EMBEDDINGS, MESSAGES, RESPONSES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from supervisor.llm.apis import Api

OPENAI_HOST = "api.openai.com"
DEFAULT_BASE_URL = f"https://{OPENAI_HOST}/v1"

MAX_RETRIES = 2
"""After the first try; with the library's growing pauses, two bridge a few seconds.  Where
programs of a child ask by themselves, it is theirs to try again (spec MD6)."""

MESSAGES_VERSION = "2023-06-01"
"""The version of the Messages API that is asked for where a child names none."""

MOST_DIGITS = 6
"""Longest ``retry-after`` that is passed on, in digits: eleven days."""

MAX_ERROR_BYTES = 65_536
"""Longest body of a refusal that is read for its one line."""


UNTOLD = tuple(
    f"X-Stainless-{name}"
    for name in (
        "Lang", "Package-Version", "OS", "Arch", "Runtime", "Runtime-Version", "Async",
    )
)  # fmt: skip
"""Headers in which the library tells what machine this is.  It is nobody's business, and
they are half of the headers of a request."""


class CallError(Exception):
    """A call failed (spec L11).

    Attributes:
        reason: why; not redacted and not one line yet.
        status: the provider's HTTP status; 0 where there was none.
        retry_after_s: the provider's ``retry-after``, in seconds; None for none.
        code: the provider's word for it, not checked yet; empty for none.
    """

    def __init__(
        self,
        reason: str,
        status: int = 0,
        retry_after_s: int | None = None,
        code: str = "",
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.status = status
        self.retry_after_s = retry_after_s


def load() -> None:
    """Import what calls need (for a worker thread)."""
    # The library would log prompts to stderr where this is set.
    os.environ.pop("OPENAI_LOG", None)
    # What these would import by themselves, but with the first call, in Trio's thread.
    import encodings.idna  # noqa: PLC0415

    import anyio._backends._trio  # noqa: PLC0415
    import httpx2  # noqa: F401, PLC0415 - rule 2
    import openai  # noqa: PLC0415
    import openai.resources.chat  # noqa: PLC0415

    from supervisor.llm import wire  # noqa: F401, PLC0415

    del anyio, encodings, openai


def stripped(url: str) -> str:
    """Return an address without credentials, query and fragment (spec L13)."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def credentials_of(url: str) -> Iterator[str]:
    """Yield what is secret in an address."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    if at:
        name, colon, word = user.partition(":")
        yield user
        yield unquote(user)
        yield word if colon else name
        yield unquote(word if colon else name)
    if parts.query:
        for pair in parts.query.split("&"):
            yield pair.partition("=")[2]


@dataclass(slots=True)
class Request:
    """A request on its way.

    Attributes:
        is_sent: it has gone out whole, and was not refused: it may cost something.
    """

    is_sent: bool = False


class Provider:
    """A server that models are asked at.

    Args:
        base_url: its address.
        key: what it wants; None for nothing.
        turns: shared by all providers of a host (rule 4).

    Attributes:
        base_url: its address, without credentials.
        bound_name: what it is taken to call the bound on the output.  OpenAI's newer
            models know ``max_completion_tokens`` alone, and its older ones know it too;
            servers that speak like it began with ``max_tokens``, which some still want.
        apis: what its models are taken to speak where nothing is configured.
        has_key: whether calls carry a key.
        secrets: what must not show anywhere.
    """

    def __init__(self, base_url: str, key: str | None, turns: Turns) -> None:
        self.base_url = stripped(base_url)
        self.has_key = key is not None
        is_openai = urlsplit(base_url).hostname == OPENAI_HOST
        self.bound_name = "max_completion_tokens" if is_openai else "max_tokens"
        self.apis = (CHAT, RESPONSES) if is_openai else (CHAT,)
        found = (key or "", *credentials_of(base_url))
        self.secrets = tuple(dict.fromkeys(text for text in found if text))
        self._turns = turns
        self._requests: dict[trio.lowlevel.Task, Request] = {}
        openai, httpx2, wire = _libraries()
        self._sockets = wire.Sockets()
        self._http = httpx2.AsyncClient(
            timeout=None,
            transport=wire.Transport(base_url, turns.end, self._sent, self._sockets),
            follow_redirects=False,  # the key goes where it is meant to go
            event_hooks={"response": [self._answered]},
        )
        omit = openai.Omit()
        self._client = openai.AsyncOpenAI(
            api_key=key or "none",
            base_url=base_url,
            max_retries=MAX_RETRIES,
            timeout=None,
            http_client=self._http,
            default_headers={
                # What the host's environment says about accounts goes to OpenAI only.
                **({} if is_openai else _no_account(omit)),
                **dict.fromkeys((*_ambient_headers(), *UNTOLD), omit),
                "Authorization": f"Bearer {key}" if key else omit,
                # A small body could become a large one.
                "Accept-Encoding": "identity",
            },
        )
        base = self._client.base_url
        path, query, asked = base.raw_path.partition(b"?")
        # Whole, for the library to parse it once less in each call, and because it
        # would put the path behind a query.
        self._urls = {
            api.path: str(
                base.copy_with(
                    raw_path=path.rstrip(b"/") + api.path.encode() + query + asked
                )
            )
            for api in (*ASKABLE.values(), EMBEDDINGS)
        }
        self._headers: dict[str, Any] = {"Content-Type": "application/json"}
        self._headers["X-Stainless-Retry-Count"] = omit
        if not key:
            self._headers["Authorization"] = omit
        self._message_headers = {**self._headers, "Authorization": omit}
        self._message_headers["anthropic-version"] = MESSAGES_VERSION
        if key:
            self._message_headers["x-api-key"] = key
        self._response = httpx2.Response
        self._stream = openai.AsyncStream[Any]

    @asynccontextmanager
    async def ask(
        self,
        api: Api,
        body: bytes,
        request: Request,
        headers: Mapping[str, str],
        max_retries: int,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request; yield the bytes of the answer as they come.

        Args:
            api: by which.
            body: its JSON.
            request: is told what becomes of it.
            headers: of the API, beside the host's own.
            max_retries: how often it is tried again.

        Raises:
            CallError: the provider refused, cannot be reached, or broke off.
        """
        openai, httpx2, wire = _libraries()
        await self._turns.begin()
        task = trio.lowlevel.current_task()
        self._requests[task] = request
        try:
            response = await self._client.post(
                self._urls[api.path],
                cast_to=self._response,
                content=body,
                options={
                    "headers": {**self._headers_of(api), **headers},
                    "max_retries": max_retries,
                },
                stream=True,
                stream_cls=self._stream,
            )
        except openai.APIStatusError as why:
            after_s = _retry_after_s(why.response.headers.get("retry-after", ""))
            code = str(why.code or "")
            raise CallError(
                _refusal_text(why), why.status_code, after_s, code
            ) from None
        except openai.APIConnectionError as why:
            raise CallError(f"cannot connect: {_cause_text(why)}") from None
        except (openai.OpenAIError, httpx2.HTTPError, httpx2.InvalidURL) as why:
            raise CallError(f"{type(why).__name__}: {why}") from None
        finally:
            self._turns.end()
            del self._requests[task]
        plain = response.headers.get("content-encoding", "identity") == "identity"
        source = response.extensions[wire.STREAM] if plain else response.aiter_bytes()
        pieces = aiter(source)
        try:
            with wire.errors_translated():
                yield pieces
        except (httpx2.HTTPError, httpx2.StreamError) as why:
            raise BrokenOffError(f"broken off: {_cause_text(why)}") from None
        finally:
            await wire.break_off(pieces)
            await response.aclose()

    def _headers_of(self, api: Api) -> dict[str, Any]:
        return self._message_headers if api is MESSAGES else self._headers

    def _sent(self) -> None:
        """Record that the current task's request has gone out whole."""
        self._requests[trio.lowlevel.current_task()].is_sent = True

    async def _answered(self, response: Any) -> None:
        """Record an answer's status; bound the body of an error."""
        is_refused = response.status_code >= 300
        self._requests[trio.lowlevel.current_task()].is_sent = not is_refused
        if is_refused:  # the library reads it whole
            _, _, wire = _libraries()
            response.stream = wire.BoundedBody(response.stream, MAX_ERROR_BYTES)

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield what the client holds of the process's descriptors."""
        for fd in self._sockets.numbers():
            yield fd, "model provider"

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.close()


class Turns:
    """Whose request is being made ready (rule 4)."""

    def __init__(self) -> None:
        self._lock = trio.Lock()
        self._whose: trio.lowlevel.Task | None = None

    async def begin(self) -> None:
        """Wait for a turn."""
        await self._lock.acquire()
        self._whose = trio.lowlevel.current_task()

    def end(self) -> None:
        """Let the next one begin, if this task has not done so yet."""
        if self._whose is trio.lowlevel.current_task():
            self._whose = None
            self._lock.release()


def _libraries() -> tuple[Any, Any, Any]:
    import httpx2  # noqa: PLC0415 - rule 2
    import openai  # noqa: PLC0415

    from supervisor.llm import wire  # noqa: PLC0415

    return openai, httpx2, wire


def _ambient_headers() -> list[str]:
    """Return the headers that the library would take from the host's environment.

    They may be keys, and would go to every address: the configuration alone says what
    goes where (spec L13).
    """
    lines = os.environ.get("OPENAI_CUSTOM_HEADERS", "").split("\n")
    return [
        name.strip() for name, colon, _ in (s.partition(":") for s in lines) if colon
    ]


def _no_account(omit: Any) -> dict[str, Any]:
    return {"OpenAI-Organization": omit, "OpenAI-Project": omit}


def _retry_after_s(text: str) -> int | None:
    """Return the seconds of a ``retry-after``; None for a date (RFC 9110 10.2.3)."""
    is_number = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    return int(text) if is_number else None


def _refusal_text(why: Any) -> str:
    """Return the provider's own words for a refusal, or its status alone."""
    body = why.body
    message = body.get("message") if isinstance(body, dict) else None
    if not message:
        try:
            found = json.loads(why.response.text)
            error = found.get("error", found) if isinstance(found, dict) else found
            message = error.get("message") if isinstance(error, dict) else error
        except ValueError:
            message = why.response.text
    if not message or not isinstance(message, str):
        message = why.response.reason_phrase
    return f"{why.status_code} {message}".strip()


def _cause_text(why: BaseException) -> str:
    """Return the first words that an error, or what caused it, has to say."""
    seen: BaseException | None = why.__cause__ or why
    while seen is not None:
        text = str(seen)
        if text and not text.startswith("Connection error"):
            return text
        seen = seen.__cause__ or seen.__context__
    return type(why).__name__
