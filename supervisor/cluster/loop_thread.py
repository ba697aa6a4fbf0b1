"""A Trio loop beside one of asyncio: an actor's, whose methods Ray calls."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import TypeVar, TypeVarTuple

import trio

from hostlib.threads import in_daemon_thread

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LoopThread:
    """A Trio loop in a thread of its own, in a process that another library runs.

    Args:
        main: the loop's main task, for `Nursery.start`: calls come once it has started;
            the process ends with it, by status 1.
        tell: takes the fault that has ended it.

    Raises:
        OSError: EAGAIN: no thread can be started.
    """

    def __init__(
        self,
        main: Callable[..., Awaitable[None]],
        tell: Callable[[BaseException], None],
    ) -> None:
        self._main = main
        self._tell = tell
        self._tokens: SimpleQueue[trio.lowlevel.TrioToken] = SimpleQueue()
        in_daemon_thread(self._run)
        self.token = self._tokens.get()

    def begin(self, function: Callable[[], Awaitable[None]]) -> None:
        """Have a task of the loop run a function, whose fault ends the loop."""
        self.token.run_sync_soon(self._nursery.start_soon, function)

    def call_soon(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Have the loop call a function, and do not wait for it."""
        self.token.run_sync_soon(function, *args)

    async def call(self, function: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Run a function in the loop, from a task of asyncio; return its result.

        The call holds no thread. A fault of the function ends the loop.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def take(value: T) -> None:
            if not result.cancelled():
                result.set_result(value)

        async def run() -> None:
            loop.call_soon_threadsafe(take, await function(*args))

        self.begin(run)
        return await result

    def _run(self) -> None:
        # No task waits for this thread: the process ends, and is started again.
        try:
            trio.run(self._serve)
        except BaseException as why:  # noqa: BLE001 - it is told
            self._tell(why)
        finally:
            os._exit(1)

    async def _serve(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await nursery.start(self._main)
            self._tokens.put(trio.lowlevel.current_trio_token())
