"""The child of `benchmarks.llm`: calls a model by its host and directly, in turn.

argv: mode, rounds, base URL. Prints one JSON object. The direct peer is the library that
the host uses as well, on Trio, asking the same stand-in, plainly and streamed; the limit
is a bare socket that sends bytes made before and looks at none that come. All ask once
each, in turn and in changing order, so that neighbours have the same machine.
"""

import json
import re
import select
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

import openai
import trio

from vfs.client import Client
from vfs.client.aio import AsyncClient

PROMPT = "!words=5 one call"
AT_ONCE = 100
KEY = "key-of-a-bench"
WARM_UP = 20
"""Calls of each kind that are not counted: the first ones import, connect, and teach the
interpreter what is called often."""

Call = Callable[[], Awaitable[object]]


def direct(client: openai.AsyncOpenAI, *, stream: bool = False) -> Call:
    """Return a call of the library."""

    async def plain() -> object:
        return await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": PROMPT}]
        )

    async def streamed() -> object:
        events = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": PROMPT}],
            stream=True,
            stream_options={"include_usage": True},
        )
        return [event async for event in events]

    return streamed if stream else plain


async def bare(base_url: str) -> Call:
    """Return a call of nobody: one write, and reads until the answer's last byte."""
    place = urlsplit(base_url)
    port = place.port or 80
    stream = await trio.open_tcp_stream(place.hostname or "", port)
    said = {"model": "m", "messages": [{"role": "user", "content": PROMPT}]}
    body = json.dumps(said).encode()
    head = (
        f"POST {place.path}/chat/completions HTTP/1.1\r\nHost: {place.netloc}\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    sent = head.encode() + body

    async def call() -> None:
        await stream.send_all(sent)
        data = b""
        while b"\r\n\r\n" not in data:
            data += await stream.receive_some(65_536)
        head, _, body = data.partition(b"\r\n\r\n")
        (size,) = re.findall(rb"(?i)content-length: (\d+)", head)
        left = int(size) - len(body)
        while left > 0:
            left -= len(await stream.receive_some(left))

    return call


async def timed_ms(call: Call) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    await call()
    return 1000 * (time.perf_counter() - began)


async def one_by_one(
    host: AsyncClient, base_url: str, rounds: int
) -> dict[str, object]:
    """Make calls one after the other, in turn; return every time in ms."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY) as client:
        calls: dict[str, Call] = {
            "host": lambda: host.llm_chat(PROMPT),
            "plain": direct(client),
            "streamed": direct(client, stream=True),
            "bare": await bare(base_url),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        names = list(calls)
        for number in range(-WARM_UP, rounds):
            names = names[1:] + names[:1] if number % 2 else names[::-1]
            for name in names:
                took_ms = await timed_ms(calls[name])
                if number >= 0:
                    times[name].append(took_ms)
    return {**times}


async def all_at_once(
    host: AsyncClient, base_url: str, rounds: int
) -> dict[str, object]:
    """Make 100 calls at once, in turn; READ beside the host's; all times in ms."""
    hosts = [await host.attach() for _ in range(AT_ONCE)]
    times: dict[str, list[float]] = {"host": [], "plain": [], "streamed": []}

    async def together(calls: list[Call]) -> float:
        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for call in calls:
                nursery.start_soon(call)
        return 1000 * (time.perf_counter() - began)

    through_host: list[Call] = [partial(one.llm_chat, PROMPT) for one in hosts]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY) as client:
        # Once each to warm up: a hundred connections are made.
        for number in range(-1, rounds):
            took_ms = {}
            for name in ("plain", "streamed"):
                calls = [direct(client, stream=name == "streamed")] * AT_ONCE
                took_ms[name] = await together(calls)
            with reading() as read:
                took_ms["host"] = await together(through_host)
            if number >= 0:
                for name, took in took_ms.items():
                    times[name].append(took)
                times.setdefault("read", []).extend(read)
    return {**times}


@contextmanager
def reading() -> Iterator[list[float]]:
    """Have another process of the child READ meanwhile; its times in ms."""
    times: list[float] = []
    command = [sys.executable, "-m", "benchmarks.llm_child", "read", "0", ""]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(3,)
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("no pipes")
        process.stdout.readline()  # it has its own connection
        try:
            yield times
        finally:
            process.stdin.close()
            times += json.loads(process.stdout.read())


def read_until_told() -> None:
    """READ, and note how long it takes, until standard input ends."""
    times = []
    with Client().attach() as client:
        fileno = client.open("file")
        print("ready", flush=True)
        while not select.select([0], [], [], 0.002)[0]:
            began = time.perf_counter()
            client.seek(fileno, 0)
            client.read(fileno, 4096)
            times.append(1000 * (time.perf_counter() - began))
    print(json.dumps(times))


async def main() -> None:
    """Measure what argv asks for."""
    mode, rounds, base_url = sys.argv[1:]
    program = one_by_one if mode == "one" else all_at_once
    async with AsyncClient() as host:
        print(json.dumps(await program(host, base_url, int(rounds))))


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read_until_told()
    else:
        trio.run(main)
