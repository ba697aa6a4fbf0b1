"""One provider: its address, key and client; sends requests, yields answer bytes.

Rules of this file.

1. No other module holds a key.  The redactor is applied to its errors and results here or
   in ``gateway``, before another part sees them (I10).
2. ``openai`` is imported only here, by ``load``, in a worker thread: it takes half a second.
   It does the retries (429, 5xx, connections; spec L11).
3. Requests are prepared one at a time: each takes the library some milliseconds, and Trio
   would prepare a hundred of them before other tasks run (spec L14).
"""

from __future__ import annotations

import json
import os
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, unquote_plus, urlsplit, urlunsplit

import trio

from supervisor.llm.answer_reader import BrokenOffError
from supervisor.llm.apis import ASKABLE, CHAT, EMBEDDINGS, MESSAGES, RESPONSES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    import httpx2
    import openai

    from supervisor.llm.apis import Api

OPENAI_HOST = "api.openai.com"
DEFAULT_BASE_URL = f"https://{OPENAI_HOST}/v1"

MAX_RETRIES = 2
"""Tries after the first; with the library's growing pauses they bridge a few seconds.
Programs that use the endpoint retry by themselves (spec MD6)."""

MESSAGES_VERSION = "2023-06-01"
"""The version of the Messages API for requests without one."""

MOST_DIGITS = 6
"""Longest ``retry-after`` that is passed on, in digits: eleven days."""

UNTOLD = tuple(
    f"X-Stainless-{name}"
    for name in (
        "Lang", "Package-Version", "OS", "Arch", "Runtime", "Runtime-Version", "Async",
    )
)  # fmt: skip
"""Headers in which the library describes this machine, which are not sent: they are half of
the headers of a request."""


ACCOUNT = ("OpenAI-Organization", "OpenAI-Project")
"""Headers of an account of OpenAI."""


class CallError(Exception):
    """A call failed (spec L11).

    Attributes:
        reason: the reason; not redacted and not one line yet.
        status: the provider's HTTP status; 0 without one.
        retry_after_s: the provider's ``retry-after``, in seconds; None for none.
        code: the provider's code, not checked yet; empty for none.
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
    """Import the modules that calls need; for a worker thread."""
    # With this variable the library would log prompts to stderr.
    os.environ.pop("OPENAI_LOG", None)
    # Modules that these would import in the first call, in the Trio thread.
    import encodings.idna  # noqa: PLC0415

    import anyio._backends._trio  # noqa: PLC0415
    import httpx2  # noqa: F401, PLC0415 - rule 2
    import openai  # noqa: PLC0415
    import openai.resources.chat  # noqa: PLC0415

    from supervisor.llm import transport  # noqa: F401, PLC0415

    del anyio, encodings, openai


def strip_url(url: str) -> str:
    """Return an address without credentials, query and fragment (spec L13)."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


_SETTING = re.compile(r"true|false|[0-9]{4}-[0-9]{2}-[0-9]{2}(-preview)?")
"""A value in an address that is no key; any other may be one."""


def credentials_of(url: str) -> Iterator[str]:
    """Yield the secret parts of an address, as they are written and decoded.

    The version of an API is none: in answers it is ordinary text.
    """
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    if at:
        name, colon, word = user.partition(":")
        yield user
        yield unquote(user)
        yield word if colon else name
        yield unquote(word if colon else name)
    for pair in parts.query.split("&"):
        name, _, value = pair.partition("=")
        text = value or name
        if name != "api-version" and not _SETTING.fullmatch(text):
            yield text
            yield unquote(text)
            yield unquote_plus(text)


@dataclass(slots=True)
class Request:
    """A request of one call.

    Attributes:
        check: called before each attempt; raises if the call may not go out any more; None
            if it always may.
        is_sent: a try was sent completely and not refused, so it may cost something.
        was_sent: ``is_sent``, before the present try.
    """

    check: Callable[[], None] | None
    is_sent: bool = False
    was_sent: bool = False


class Provider:
    """A server of models.

    Args:
        base_url: its address.
        key: its key; None for none.
        turns: held by a task while it prepares a request; shared by all providers of a
            host (rule 3).

    Raises:
        OSError: the proxy of the host's environment cannot be used.

    Attributes:
        base_url: its address, without credentials.
        bound_name: its default member for the bound on the output.  All models of OpenAI
            know ``max_completion_tokens``; some compatible servers know only
            ``max_tokens``.
        apis: the default APIs of its models.
        has_key: whether calls have a key.
        secrets: texts that must be redacted.
    """

    def __init__(self, base_url: str, key: str | None, turns: trio.Lock) -> None:
        from http.cookiejar import (  # noqa: PLC0415 - rule 2
            CookieJar,
            DefaultCookiePolicy,
        )

        import httpx2  # noqa: PLC0415
        import openai  # noqa: PLC0415

        from supervisor.llm import transport  # noqa: PLC0415

        self.base_url = strip_url(base_url)
        self.has_key = key is not None
        is_openai = urlsplit(base_url).hostname == OPENAI_HOST
        self.bound_name = "max_completion_tokens" if is_openai else "max_tokens"
        self.apis = (CHAT, RESPONSES) if is_openai else (CHAT,)
        found = (key or "", *credentials_of(base_url))
        self.secrets = tuple(dict.fromkeys(text for text in found if text))
        self._turns = turns
        self._requests: dict[trio.lowlevel.Task, Request] = {}
        self._transport = transport.Transport(base_url, self._end_turn, self._note_sent)
        self._http = httpx2.AsyncClient(
            timeout=None,
            transport=self._transport,
            # One jar would serve all children.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            follow_redirects=False,  # the key goes to the configured address only
            event_hooks={"request": [self._check], "response": [self._note_answer]},
        )
        omit = openai.Omit()
        own_headers = {
            # Accounts in the host's environment go to OpenAI only.
            **({} if is_openai else dict.fromkeys(ACCOUNT, omit)),
            **dict.fromkeys((*_ambient_headers(), *UNTOLD), omit),
            "Authorization": f"Bearer {key}" if key else omit,
            # Packed answers are not read: a small one could become a large one.
            "Accept-Encoding": "identity",
        }
        self._client = openai.AsyncOpenAI(
            api_key=key or "none",
            base_url=base_url,
            max_retries=MAX_RETRIES,
            timeout=None,
            http_client=self._http,
            # The library takes Omit here too, though it does not say so.
            default_headers=cast("dict[str, str]", own_headers),
        )
        base = self._client.base_url
        path, query, asked = base.raw_path.partition(b"?")
        # Complete addresses: the library parses them once less in each call, and would
        # append the path after a query.
        self._urls = {
            api.path: str(
                base.copy_with(
                    raw_path=path.rstrip(b"/") + api.path.encode() + query + asked
                )
            )
            for api in (*ASKABLE.values(), EMBEDDINGS)
        }
        self._headers: dict[str, str | openai.Omit] = {
            "Content-Type": "application/json",
            "X-Stainless-Retry-Count": omit,
        }
        if not key:
            self._headers["Authorization"] = omit
        self._message_headers = {**self._headers, "Authorization": omit}
        self._message_headers["anthropic-version"] = MESSAGES_VERSION
        if key:
            self._message_headers["x-api-key"] = key
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
            api: the API.
            body: the JSON of the request.
            request: gets the state of the request.
            headers: headers of the API, beside the host's own.
            max_retries: number of tries after the first.

        Raises:
            CallError: the provider refused, cannot be reached, or broke off.
        """
        import httpx2  # noqa: PLC0415 - rule 2
        import openai  # noqa: PLC0415

        from supervisor.llm import transport  # noqa: PLC0415

        await self._turns.acquire()
        task = trio.lowlevel.current_task()
        self._requests[task] = request
        try:
            found = await self._client.post(
                self._urls[api.path],
                cast_to=httpx2.Response,
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
            self._end_turn()
            del self._requests[task]
        response = cast("httpx2.Response", found)  # as ``cast_to`` asks
        pieces = response.aiter_bytes()
        try:
            yield pieces
        except (httpx2.HTTPError, httpx2.StreamError) as why:
            raise BrokenOffError(f"broken off: {_cause_text(why)}") from None
        finally:
            await transport.break_off(pieces)
            await response.aclose()

    def _headers_of(self, api: Api) -> dict[str, str | openai.Omit]:
        return self._message_headers if api is MESSAGES else self._headers

    def _end_turn(self) -> None:
        """End this task's turn to prepare a request, unless it has ended already."""
        if self._turns.statistics().owner is trio.lowlevel.current_task():
            self._turns.release()

    async def _check(self, _request: object) -> None:
        """Begin a try of the current task's call; raise if it may not go out any more."""
        request = self._requests[trio.lowlevel.current_task()]
        request.was_sent = request.is_sent
        if request.check is not None:
            request.check()

    def _note_sent(self) -> None:
        """Record that the current task's request was sent completely."""
        self._requests[trio.lowlevel.current_task()].is_sent = True

    async def _note_answer(self, response: httpx2.Response) -> None:
        """Record whether an answer is a refusal: that try costs nothing."""
        request = self._requests[trio.lowlevel.current_task()]
        request.is_sent = request.was_sent or response.status_code < 300

    def descriptors(self) -> Iterator[tuple[int, str]]:
        """Yield the descriptors of the client."""
        for fd in self._transport.numbers():
            yield fd, "model provider"

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.close()


def _ambient_headers() -> list[str]:
    """Return the headers that the library would take from the host's environment.

    They may be keys, and would go to every address; only the configuration decides that
    (spec L13).
    """
    lines = os.environ.get("OPENAI_CUSTOM_HEADERS", "").split("\n")
    return [
        name.strip() for name, colon, _ in (s.partition(":") for s in lines) if colon
    ]


def _retry_after_s(text: str) -> int | None:
    """Return the seconds of a ``retry-after``; None for a date (RFC 9110 10.2.3)."""
    is_number = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    return int(text) if is_number else None


def _refusal_text(why: openai.APIStatusError) -> str:
    """Return the provider's text of a refusal, or its status."""
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
    """Return the first text of an error or its causes."""
    seen: BaseException | None = why.__cause__ or why
    while seen is not None:
        text = str(seen)
        if text and not text.startswith("Connection error"):
            return text
        seen = seen.__cause__ or seen.__context__
    return "the connection broke"
