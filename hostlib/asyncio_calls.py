"""Calls of a Trio loop by tasks of asyncio, in a process of another library."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

from hostlib.threads import LoopThread

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def call_loop(
    thread: LoopThread, function: Callable[[*Ts], Awaitable[T]], *args: *Ts
) -> T:
    """Run a function in a Trio loop, from a task of asyncio; return its result.

    The call holds no thread. A fault of the function ends the loop.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def take(value: T) -> None:
        if not result.cancelled():
            result.set_result(value)

    async def run() -> None:
        loop.call_soon_threadsafe(take, await function(*args))

    thread.begin(run)
    return await result
