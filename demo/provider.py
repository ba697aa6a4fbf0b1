"""A stand-in for a model provider: real HTTP on loopback, no model.

    python -m demo.provider [--port N] [--key K] [--log FILE] [--script FILE]

It speaks Chat Completions, plain and streamed, and counts tokens in a simple way: five
bytes of a prompt are one, and so is each word of the answer.  The demo, the tests and
the benchmarks use it.  Words in the last message that begin with ``!`` tell it how to
behave; see ``ORDERS``.  With ``--script`` it gives the answers of a JSON list, one after
the other: a text, or a list of ``[tool, arguments]``, which waits for a request that
offers those tools.  With ``--log`` it appends a JSON line for each request, and one for
each piece it has sent.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11
import trio

ORDERS = {
    "!words=N": "answer with N words",
    "!say=TEXT": "answer with TEXT, underscores as blanks",
    "!slow=S": "wait S seconds before each piece of the answer",
    "!wait=S": "wait S seconds before the answer begins",
    "!hang": "never answer",
    "!hang-after=N": "send N pieces, then nothing more",
    "!status=N": "refuse with an HTTP status",
    "!once=N": "refuse the first try of this message with an HTTP status",
    "!retry-after=S": "with a refusal: the header",
    "!cached=N": "report N tokens of the prompt as cached; null works too",
    "!usage=TEXT": "none: report no usage; bad: report texts instead of numbers",
    "!prompt-tokens=N": "report N tokens for the prompt",
    "!dense": "count each byte of the prompt as a token, and an image as 2,000",
    "!plain": "do not stream, whatever was asked for",
    "!broken": "answer with what is no JSON",
    "!truncated": "break off in the middle",
    "!empty": "answer without choices",
    "!newer": "refuse max_tokens: the model knows max_completion_tokens alone",
    "!nothing": "answer with an empty body",
    "!huge=N": "answer with N MiB",
    "!error": "fail in the middle of the stream, by an event",
    "!leak": "answer with the key that came with the request",
    "!leak-tool": "answer with a call of a tool whose arguments hold that key",
    "!leak-refused": "refuse with a message that holds the key",
    "!tool": "answer with a call of the first tool",
    "!script=JSON": "in the user's last message: a list of answers, one for each round;"
    " an answer is a text as for !say, or a list of [tool, arguments] to call",
}

ORDER = re.compile(r"!([a-z-]+)(?:=(\S+))?")
PROMPT_BYTES_PER_TOKEN = 5
IMAGE_TOKENS = 2000
MESSAGE_TOKENS = 4
COUNTED = ("tools", "functions", "response_format", "tool_choice", "stop", "user")
ARGUMENT_PIECE_CHARS = 12
MAX_BODY_BYTES = 64 << 20


@dataclass
class Served:
    """One request, and how much of an answer was sent.

    Attributes:
        path: of the request.
        headers: of the request, names in lower case.
        body: of the request.
        prompt_tokens: what it counts for the prompt.
        pieces: tokens of the answer that were sent.
        done: the whole answer was sent.
    """

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    prompt_tokens: int = 0
    pieces: int = 0
    done: bool = False


@dataclass
class Provider:
    """The stand-in.

    Attributes:
        key: what requests must carry; None asks for nothing.
        port: where it listens.
        served: every request so far.
        connections: how many are open.
        at_once: requests that are being answered.
        most_at_once: the most there ever were.
        script: the answers that are still to be given; None obeys messages instead.
    """

    key: str | None = None
    port: int = 0
    served: list[Served] = field(default_factory=list)
    connections: int = 0
    at_once: int = 0
    most_at_once: int = 0
    log_fd: int = -1
    arrived: trio.Condition = field(default_factory=trio.Condition)
    script: list[str | list[Any]] | None = None
    _refused: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        """The base URL for clients."""
        return f"http://127.0.0.1:{self.port}/v1"

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
                "request": self.served.index(served),
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

    async def _handle_one(self, line: "Line") -> bool:
        request = await line.request()
        if request is None:
            return False
        headers = {n.decode(): v.decode("latin-1") for n, v in request.headers}
        path = request.target.decode("latin-1")
        data = await line.body()
        try:
            body = json.loads(data or b"{}")
        except ValueError:
            await line.refuse(400, "that is no JSON")
            return line.may_go_on
        served = Served(path, headers, body)
        self.served.append(served)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            async with self.arrived:
                self.arrived.notify_all()
            await self._answer(line, served)
        finally:
            self.at_once -= 1
        return line.may_go_on

    async def _answer(self, line: "Line", served: Served) -> None:
        authorization = served.headers.get("authorization")
        if self.key is not None and authorization != f"Bearer {self.key}":
            await line.refuse(401, "wrong key")
            return
        path = served.path.partition("?")[0]
        if path.endswith("/models"):
            listed = {"object": "list", "data": [{"id": "stand-in", "object": "model"}]}
            await line.reply(json.dumps(listed).encode())
            return
        if not path.endswith("/chat/completions"):
            await line.refuse(404, f"there is no {served.path}")
            return
        text = _last_text(served.body)
        if self.script is None:
            try:
                orders = {**dict(re.findall(ORDER, text)), **_scripted(served.body)}
            except ValueError:
                await line.refuse(400, "that script is no JSON")
                return
        else:
            orders = self._take_answer(self.script, served.body)
        served.prompt_tokens = int(
            orders.get("prompt-tokens")
            or (_dense_tokens if "dense" in orders else _prompt_tokens)(served.body)
        )
        self.note(served, "request")
        if not await self._refuse_as_told(line, served, orders, text):
            await _Answer(self, line, served, orders, text).send()

    @staticmethod
    def _take_answer(
        script: list[str | list[Any]], body: dict[str, Any]
    ) -> dict[str, str]:
        """Take the next answer of a script; none if it calls a tool not offered."""
        offered = {tool["function"]["name"] for tool in body.get("tools") or ()}
        match script[:1]:
            case [str(text)]:
                del script[0]
                return {"text": text}
            case [list(calls)] if {call[0] for call in calls} <= offered:
                del script[0]
                return {"calls": json.dumps(calls)}
        return {}

    async def _refuse_as_told(
        self, line: "Line", served: Served, orders: dict[str, str], text: str
    ) -> bool:
        if "wait" in orders:
            await trio.sleep(float(orders["wait"]))
        if "hang" in orders:
            await line.hang()
        status = orders.get("status")
        if "once" in orders and text not in self._refused:
            self._refused.add(text)
            status = orders["once"]
        if "leak-refused" in orders:
            key = served.headers.get("authorization", "")
            await line.refuse(400, f"you sent\n{key}")
            return True
        if "newer" in orders and "max_tokens" in served.body:
            await line.refuse(400, "Unsupported parameter: 'max_tokens'")
            return True
        if status:
            more = {"retry-after": orders.get("retry-after", "0")}
            await line.refuse(int(status), "as it was told", more)
            return True
        return False


class Line:
    """One HTTP connection, as a server has it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.connection = h11.Connection(h11.SERVER)
        self._unsent = bytearray()

    @property
    def may_go_on(self) -> bool:
        """Whether another request may come."""
        return self.connection.our_state is h11.DONE is self.connection.their_state

    async def _event(self) -> Any:
        while True:
            event = self.connection.next_event()
            if event is not h11.NEED_DATA:
                return event
            self.connection.receive_data(await self.stream.receive_some(65_536))

    async def request(self) -> h11.Request | None:
        """Return the next request; None at the end of the connection."""
        event = await self._event()
        return event if isinstance(event, h11.Request) else None

    async def body(self) -> bytes:
        """Return the request's body."""
        pieces = []
        size = 0
        while isinstance(event := await self._event(), h11.Data):
            pieces.append(bytes(event.data))
            size += len(event.data)
            if size > MAX_BODY_BYTES:
                raise h11.RemoteProtocolError("too much", 413)
        return b"".join(pieces)

    async def hang(self) -> None:
        """Do nothing until the client is gone."""
        while await self.stream.receive_some(65_536):
            pass
        raise trio.BrokenResourceError

    async def send(self, event: Any, *, more: bool = False) -> None:
        """Send one event; with the next one if that is known to follow at once."""
        self._unsent += self.connection.send(event) or b""
        if self._unsent and not more:
            data = bytes(self._unsent)
            self._unsent.clear()
            await self.stream.send_all(data)

    async def begin(self, status: int, kind: str, more: dict[str, str]) -> None:
        """Send the head of a reply, with what follows it."""
        headers = [("content-type", kind), *more.items()]
        await self.send(h11.Response(status_code=status, headers=headers), more=True)

    async def reply(
        self, data: bytes, status: int = 200, more: dict[str, str] | None = None
    ) -> None:
        """Send a whole reply."""
        length = {"content-length": str(len(data)), **(more or {})}
        await self.begin(status, "application/json", length)
        await self.send(h11.Data(data=data), more=True)
        await self.send(h11.EndOfMessage())

    async def refuse(
        self, status: int, text: str, more: dict[str, str] | None = None
    ) -> None:
        """Send an error in the provider's form."""
        error = {"error": {"message": text, "type": "stand_in", "code": None}}
        await self.reply(json.dumps(error).encode(), status, more)


class _Answer:
    """One answer."""

    def __init__(
        self,
        provider: Provider,
        line: Line,
        served: Served,
        orders: dict[str, str],
        text: str,
    ) -> None:
        self._provider = provider
        self._line = line
        self._served = served
        self._orders = orders
        bounds = ("max_tokens", "max_completion_tokens")
        most = next((served.body[name] for name in bounds if name in served.body), None)
        self._words = _words(orders, text, served)[:most]

    async def send(self) -> None:
        """Send it as it was asked for, or as it was told to."""
        orders = self._orders
        if "huge" in orders:
            await self._send_huge(int(orders["huge"]))
        elif "broken" in orders:
            await self._line.reply(b'{"choices": [oops')
        elif "nothing" in orders:
            await self._line.reply(b"")
        elif "empty" in orders:
            await self._line.reply(json.dumps({**self._head(), "choices": []}).encode())
        elif self._served.body.get("stream") and "plain" not in orders:
            await self._send_stream()
        else:
            await self._send_plain()

    def _head(self) -> dict[str, object]:
        return {
            "id": "chatcmpl-stand-in",
            "object": "chat.completion",
            "created": 1_700_000_000,
            "model": self._served.body.get("model"),
        }

    def _usage(self) -> dict[str, object] | None:
        told = self._orders.get("usage")
        if told == "none":
            return None
        if told == "bad":
            return {"prompt_tokens": "many", "completion_tokens": "more"}
        cached = self._orders.get("cached")
        prompt, output = self._served.prompt_tokens, len(self._words)
        usage: dict[str, object] = {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
        }
        if cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": json.loads(cached)}
        return usage

    def _tool_calls(self) -> list[dict[str, object]]:
        if "leak-tool" in self._orders:
            key = self._served.headers.get("authorization")
            wanted: list[Any] = [("tell", {"key": key})]
        elif "calls" in self._orders:
            wanted = json.loads(self._orders["calls"])
        else:
            wanted = [(self._served.body["tools"][0]["function"]["name"], {"a": 1})]
        return [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for number, (name, arguments) in enumerate(wanted, 1)
        ]

    @property
    def _calls_tools(self) -> bool:
        return not {"tool", "calls", "leak-tool"}.isdisjoint(self._orders)

    async def _send_plain(self) -> None:
        message: dict[str, object] = {"role": "assistant", "content": self.text}
        reason = "stop"
        if self._calls_tools:
            message = {"role": "assistant", "content": None}
            message["tool_calls"] = self._tool_calls()
            reason = "tool_calls"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        if self._served.body.get("logprobs"):
            tokens = [{"token": word, "logprob": -0.5} for word in self._words]
            choice["logprobs"] = {"content": tokens}
        whole = {**self._head(), "choices": [choice], "usage": self._usage()}
        data = json.dumps(whole).encode()
        if "truncated" in self._orders:
            more = {"content-length": str(len(data))}
            await self._line.begin(200, "application/json", more)
            await self._line.send(h11.Data(data=data[: len(data) // 2]))
            await self._break_off()
        await self._line.reply(data)
        self._served.pieces = len(self._words)
        self._finish()

    @property
    def text(self) -> str:
        """The answer in one piece."""
        return "".join(self._words)

    async def _send_stream(self) -> None:
        orders = self._orders
        await self._line.begin(200, "text/event-stream", {})
        await self._event({"role": "assistant", "content": ""})
        stop = int(orders.get("hang-after", -1))
        half = len(self._words) // 2
        for number, word in enumerate(self._words):
            if number == stop:
                await self._line.hang()
            await trio.sleep(float(orders.get("slow", 0)))
            if number == half and "truncated" in orders:
                await self._break_off()
            if number == half and "error" in orders:
                await self._raw({"error": {"message": "it broke\nin two"}})
                break
            await self._event({"content": word})
            self._served.pieces += 1
            self._provider.note(self._served, "piece")
        if stop == len(self._words):
            await self._line.hang()
        await self._end_stream()

    async def _break_off(self) -> None:
        await self._line.stream.aclose()
        raise trio.BrokenResourceError

    async def _end_stream(self) -> None:
        if self._calls_tools:
            for index, call in enumerate(self._tool_calls()):
                await self._send_tool_call(index, call)
        reason = "tool_calls" if self._calls_tools else "stop"
        await self._event({}, reason, more=True)
        options = self._served.body.get("stream_options") or {}
        usage = self._usage()
        if options.get("include_usage") and usage is not None:
            chunk = {**self._head(), "choices": [], "usage": usage}
            await self._raw({**chunk, "object": "chat.completion.chunk"}, more=True)
        await self._line.send(h11.Data(data=b"data: [DONE]\n\n"), more=True)
        await self._line.send(h11.EndOfMessage())
        self._finish()

    async def _send_tool_call(self, index: int, call: dict[str, Any]) -> None:
        """Send a call with its arguments in pieces; the first comes with the name."""
        function = call["function"]
        size = 1 if "leak-tool" in self._orders else ARGUMENT_PIECE_CHARS
        first, *more = wrapped(function["arguments"], size)
        function["arguments"] = first
        await self._event({"tool_calls": [{"index": index, **call}]})
        for piece in more:
            part = {"index": index, "function": {"arguments": piece}}
            await self._event({"tool_calls": [part]})

    async def _event(
        self, delta: dict[str, object], reason: str | None = None, *, more: bool = False
    ) -> None:
        choice: dict[str, object] = {
            "index": 0,
            "delta": delta,
            "finish_reason": reason,
        }
        if self._served.body.get("logprobs") and "content" in delta:
            token = {"token": delta["content"], "logprob": -0.5}
            choice["logprobs"] = {"content": [token]}
        chunk = {**self._head(), "choices": [choice]}
        await self._raw({**chunk, "object": "chat.completion.chunk"}, more=more)

    async def _raw(self, value: dict[str, Any], *, more: bool = False) -> None:
        text = b"data: " + json.dumps(value).encode() + b"\n\n"
        await self._line.send(h11.Data(data=text), more=more)

    async def _send_huge(self, size_mib: int) -> None:
        await self._line.begin(200, "application/json", {})
        await self._line.send(h11.Data(data=b'{"choices": "'))
        for _ in range(size_mib):
            await self._line.send(h11.Data(data=b"x" * (1 << 20)))
        await self._line.send(h11.Data(data=b'"}'))
        await self._line.send(h11.EndOfMessage())
        self._finish()

    def _finish(self) -> None:
        self._served.done = True
        self._provider.note(self._served, "done")


def wrapped(text: str, size: int) -> list[str]:
    """Cut a text into pieces of a size; an empty one is one piece."""
    return [text[at : at + size] for at in range(0, len(text), size)] or [text]


def _last_text(body: dict[str, Any]) -> str:
    messages = body.get("messages") or [{}]
    content = messages[-1].get("content") or ""
    return content if isinstance(content, str) else json.dumps(content)


def _scripted(body: dict[str, Any]) -> dict[str, str]:
    """Return what the script in the user's last message says of this round."""
    rounds = 0
    for message in reversed(body.get("messages") or ()):
        if message.get("role") == "user":
            break
        rounds += message.get("role") == "assistant"
    else:
        return {}
    orders = dict(re.findall(ORDER, str(message.get("content"))))
    script = json.loads(orders.get("script") or "[]")
    if rounds >= len(script):
        return {}
    answer = script[rounds]
    if isinstance(answer, str):
        return {"say": answer}
    return {"calls": json.dumps(answer)}


def _prompt_tokens(body: dict[str, Any]) -> int:
    size = sum(
        len(str(message.get("content") or "").encode())
        for message in body.get("messages") or ()
    )
    return -(-size // PROMPT_BYTES_PER_TOKEN)


def _dense_tokens(body: dict[str, Any]) -> int:
    """Count as many tokens as a provider may at most: one for each byte of text."""
    total = sum(_size(body[name]) for name in COUNTED if name in body)
    for message in body.get("messages") or ():
        content = message.get("content") or ""
        total += MESSAGE_TOKENS + len(message.get("name", "").encode())
        total += _size(message.get("tool_calls") or "")
        parts = [{"text": content}] if isinstance(content, str) else content
        for part in parts:
            text = part.get("text")
            total += IMAGE_TOKENS if text is None else len(text.encode())
    return total


def _size(value: Any) -> int:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return len(text.encode())


def _words(orders: dict[str, str], text: str, served: Served) -> list[str]:
    if not {"tool", "calls", "leak-tool"}.isdisjoint(orders):
        return []
    if "leak" in orders:
        key = served.headers.get("authorization", "")
        return [*key]  # one character a piece, the hardest to find
    told = orders.get("text") or orders.get("say", "").replace("_", " ")
    if told:
        return re.findall(r"\S+\s*|\s+", told)
    if "words" in orders:
        return [f"word{number} " for number in range(int(orders["words"]))]
    said = len(re.findall(r"\S+", text))
    return re.findall(r"\S+\s*", f"The message has {said} words.")


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


async def main() -> None:
    """Serve until a signal ends it; the first line of output is the base URL."""
    parser = argparse.ArgumentParser(prog="python -m demo.provider")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--key", default=None)
    parser.add_argument("--log", type=Path, default=None)
    parser.add_argument("--script", type=Path, default=None)
    given = parser.parse_args()
    async with serving(given.key, given.port) as provider:
        if given.script is not None:
            provider.script = json.loads(given.script.read_text())
        if given.log is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            provider.log_fd = os.open(given.log, flags, 0o600)
        print(provider.url, flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    try:
        trio.run(main)
    except KeyboardInterrupt:
        sys.exit(130)
