"""The stand-in's server: its doors, and what it notes of each request."""

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import h11
import trio

from demo.provider import embeddings, messages
from demo.provider.answer import make_answer
from demo.provider.line import Line
from demo.provider.orders import Orders, read_orders
from demo.provider.question import Api, Question, fault_of
from demo.provider.refusal import PAGE, refusal_for
from demo.provider.script import Script, scripted
from demo.provider.sending import FORMS, Sending, disguise, headers
from demo.provider.served import Served, Tokens

MODEL = "stand-in"
DOORS = {
    "/chat/completions": "chat",
    "/responses": "responses",
    "/messages": "messages",
    "/messages/count_tokens": "count_tokens",
    "/embeddings": "embeddings",
}
"""The API that stands at the end of a path, for POST."""

MODELS = ("/models", f"/models/{MODEL}")


@dataclass
class Provider:
    """The stand-in.

    Attributes:
        key: the one that requests must carry; None asks for none.
        port: where it listens.
        served: every request so far.
        connections: how many are open.
        at_once: requests that are being answered.
        most_at_once: the most there ever were.
        script: the answers that are still to be given; None obeys messages instead.
        orders: words of every request, beside those of its own last message.
        tell: makes its words on a key, where it gives that away.
    """

    key: str | None = None
    port: int = 0
    served: list[Served] = field(default_factory=list)
    connections: int = 0
    at_once: int = 0
    most_at_once: int = 0
    log_fd: int = -1
    arrived: trio.Condition = field(default_factory=trio.Condition)
    script: list[Any] | None = None
    orders: str = ""
    tell: Callable[[str], str] = str
    _refused: set[str] = field(default_factory=set)
    _script: Script = field(default_factory=Script)

    @property
    def root(self) -> str:
        """The base URL for clients of Messages."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The base URL for clients of the other APIs."""
        return f"{self.root}/v1"

    def tokens(self, api: str | None = None) -> Tokens:
        """Return what was counted for all calls, or for those of one API."""
        chosen = (one for one in self.served if api in {None, one.api})
        return sum((one.tokens for one in chosen), Tokens())

    async def wait_for(self, count: int) -> None:
        """Wait until so many requests have come."""
        async with self.arrived:
            while len(self.served) < count:
                await self.arrived.wait()

    def note(self, served: Served, event: str) -> None:
        """Append a line to the log, if there is one."""
        if self.log_fd >= 0:
            line = {
                "event": event,
                "request": served.number,
                "api": served.api,
                "model": served.body.get("model"),
                "prompt_tokens": served.prompt_tokens,
                "pieces": served.pieces,
            }
            os.write(self.log_fd, json.dumps(line).encode() + b"\n")

    # One connection

    async def handle(self, stream: trio.SocketStream) -> None:
        """Serve one connection until it ends."""
        line = Line(stream)
        self.connections += 1
        try:
            async with stream:
                while await self._handle_one(line):
                    line.connection.start_next_cycle()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return
        except h11.RemoteProtocolError:
            return
        finally:
            self.connections -= 1

    async def _handle_one(self, line: Line) -> bool:
        request = await line.request()
        if request is None:
            return False
        named = {n.decode(): v.decode("latin-1") for n, v in request.headers}
        path = request.target.decode("latin-1")
        data = await line.body()
        visit = _Visit(self, line, Served(path, named, {}, data))
        visit.served.method = request.method.decode()
        visit.served.api = _api(visit.served)
        try:
            body = json.loads(data or b"{}")
        except ValueError:
            await visit.refuse(400, "that is no JSON")
            return line.may_go_on
        if not isinstance(body, dict):
            await visit.refuse(400, "that is no object")
            return line.may_go_on
        visit.served.body = body
        visit.served.number = len(self.served)
        self.served.append(visit.served)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            async with self.arrived:
                self.arrived.notify_all()
            await visit.answer()
        finally:
            self.at_once -= 1
        return line.may_go_on

    def orders_for(self, question: Question) -> Orders:
        """Return what the answer to a question is told.

        Raises:
            ValueError: the script in the question is no JSON.
        """
        common = read_orders(self.orders)
        if self.script is not None:
            return {**common, **self._script.take(self.script, question)}
        return {**common, **read_orders(question.last_text), **scripted(question)}

    def is_first_try(self, text: str) -> bool:
        """Return whether a message comes for the first time."""
        is_first = text not in self._refused
        self._refused.add(text)
        return is_first


def _api(served: Served) -> str:
    """Return the API that a request asks; empty if there is none."""
    path = served.path.partition("?")[0]
    ends = DOORS.items() if served.method == "POST" else ()
    found = [api for end, api in ends if path.endswith(end)]
    if served.method in {"GET", "HEAD"} and path.endswith(MODELS):
        return "models"
    return found[0] if found else ""


class _Visit:
    """One request and the way back to its client."""

    def __init__(self, provider: Provider, line: Line, served: Served) -> None:
        self._provider = provider
        self._line = line
        self.served = served

    @property
    def _is_of_messages(self) -> bool:
        """Whether errors have the form of Messages."""
        is_named = "anthropic-version" in self.served.headers
        return self.served.api in {"messages", "count_tokens"} or is_named

    async def answer(self) -> None:
        """Answer it."""
        served = self.served
        if served.method == "HEAD" and served.path == "/":
            await self._line.begin(200, "application/json", {"content-length": "0"})
            await self._line.end()
            return
        if "upgrade" in served.headers:
            await self.refuse(426, "no WebSocket", {"connection": "close"})
            return
        key = self._provider.key
        if key is not None and not self._shows(key):
            await self.refuse(401, "wrong key")
            return
        match served.api:
            case "models":
                await self._list_models()
            case "embeddings":
                await self._embed()
            case "count_tokens":
                await self._count()
            case "chat" | "responses" | "messages" as api:
                await self._talk(api)
            case _:
                await self.refuse(404, f"there is no {served.path}")

    def _shows(self, key: str) -> bool:
        named = self.served.headers
        is_borne = named.get("authorization") == f"Bearer {key}"
        return is_borne or named.get("x-api-key") == key

    async def refuse(
        self,
        status: int,
        text: str,
        more: dict[str, str] | None = None,
        code: str | None = None,
    ) -> None:
        """Send an error in the API's form."""
        self.served.status = status
        form = FORMS["messages" if self._is_of_messages else "responses"]
        error = form.refusal(status, text, code)
        await self._line.reply(json.dumps(error).encode(), status, more)

    async def _reply(self, value: dict[str, Any], orders: Orders) -> None:
        self.served.status = 200
        told = self._told
        value = disguise(value, orders, told)
        more = headers(orders, told)
        await self._line.reply(json.dumps(value).encode(), 200, more)
        self.served.done = True

    @property
    def _told(self) -> str:
        return self._provider.tell(self.served.authorization)

    async def _list_models(self) -> None:
        one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "demo"}
        if self._is_of_messages:
            date = "2025-01-01T00:00:00Z"
            one = {"id": MODEL, "type": "model", "created_at": date}
            one["display_name"] = "Stand-in"
        if not self.served.path.partition("?")[0].endswith("/models"):
            await self._reply(one, {})
            return
        listed: dict[str, Any] = {"object": "list", "data": [one]}
        if self._is_of_messages:
            listed = {"data": [one], "has_more": False}
            listed |= {"first_id": MODEL, "last_id": MODEL}
        await self._reply(listed, {})

    async def _embed(self) -> None:
        served = self.served
        given = embeddings.inputs(served.body)
        orders = read_orders(self._provider.orders)
        if given and isinstance(given[-1], str):
            orders |= read_orders(given[-1])
        served.prompt_tokens = int(
            orders.get("prompt-tokens") or embeddings.prompt_tokens(served.body)
        )
        self._provider.note(served, "request")
        if await self._refuses(orders, json.dumps(given)):
            return
        tokens = None if orders.get("usage") == "none" else served.prompt_tokens
        await self._reply(embeddings.whole(served.body, tokens), orders)

    async def _count(self) -> None:
        fault = messages.fault(self.served.body, self.served.headers)
        fault = fault or fault_of("messages", self.served.body)
        if fault is not None:
            await self.refuse(400, fault)
            return
        question = Question("messages", self.served.body)
        orders = self._provider.orders_for(question)
        if await self._refuses(orders, question.last_text):
            return
        counted = question.count(dense="dense" in orders)
        tokens = int(orders.get("prompt-tokens") or counted)
        await self._reply({"input_tokens": tokens}, orders)

    async def _talk(self, api: Api) -> None:
        served, provider = self.served, self._provider
        if api == "messages":
            fault = messages.fault(served.body, served.headers)
            fault = fault or messages.bound_fault(served.body)
            if fault is not None:
                await self.refuse(400, fault)
                return
        fault = fault_of(api, served.body)
        if fault is not None:
            await self.refuse(400, fault)
            return
        question = Question(api, served.body)
        try:
            orders = provider.orders_for(question)
        except ValueError:
            await self.refuse(400, "that script is no JSON")
            return
        answer = make_answer(question, served, orders, self._told)
        provider.note(served, "request")
        if not await self._refuses(orders, question.last_text):
            served.status = 200
            note = partial(provider.note, served)
            await Sending(self._line, answer, self._told, note).send()

    async def _refuses(self, orders: Orders, text: str) -> bool:
        """Wait and refuse as it was told; return whether it refused."""
        if "wait" in orders:
            await trio.sleep(float(orders["wait"]))
        if "hang" in orders:
            await self._line.hang()
        is_first = "once" in orders and self._provider.is_first_try(text)
        body = self.served.body
        refusal = refusal_for(orders, body, self._told, is_first=is_first)
        if refusal is None:
            return False
        more = {**refusal.headers, **headers(orders, self._told)}
        status = refusal.status
        if refusal.is_page:
            self.served.status = status
            await self._line.reply(PAGE, status, more, "text/html")
        else:
            await self.refuse(status, refusal.text, more, orders.get("code"))
        return True


@asynccontextmanager
async def serving(key: str | None = None, port: int = 0) -> AsyncIterator[Provider]:
    """Serve in this Trio program; it ends with the block."""
    provider = Provider(key)
    async with trio.open_nursery() as nursery:
        (listener, *_) = await trio.open_tcp_listeners(port, host="127.0.0.1")
        provider.port = listener.socket.getsockname()[1]
        nursery.start_soon(_serve, provider, listener)
        try:
            yield provider
        finally:
            nursery.cancel_scope.cancel()


async def _serve(provider: Provider, listener: trio.SocketListener) -> None:
    await trio.serve_listeners(provider.handle, [listener])
