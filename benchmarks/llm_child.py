"""The child of `benchmarks.llm`: asks a model through its host and directly, in turn.

argv: mode, rounds, base URL. Prints one JSON object. The direct peer is the library that
the host uses as well, on Trio, asking the same stand-in; both ask plainly, once each, in
turn, so that a pair of neighbours has the same machine.
"""

import json
import select
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import openai
import trio

from vfs.aio import AsyncClient
from vfs.client import Client

PROMPT = "!words=5 one call"
AT_ONCE = 100

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


async def timed_ms(call: Call) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    await call()
    return 1000 * (time.perf_counter() - began)


async def one_by_one(
    host: AsyncClient, base_url: str, rounds: int
) -> dict[str, object]:
    """Make calls one after the other, in turn; return every time in ms."""
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="key-of-a-bench"
    ) as client:
        calls: dict[str, Call] = {
            "host": lambda: host.llm_chat(PROMPT),
            "plain": direct(client),
            "streamed": direct(client, stream=True),
        }
        for call in calls.values():
            await call()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds):
            names = list(calls) if number % 2 else list(reversed(calls))
            for name in names:
                times[name].append(await timed_ms(calls[name]))
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
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="key-of-a-bench"
    ) as client:
        for _ in range(rounds):
            for name in ("plain", "streamed"):
                calls = [direct(client, stream=name == "streamed")] * AT_ONCE
                times[name].append(await together(calls))
            with reading() as read:
                times["host"].append(await together(through_host))
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
