"""Slow work on contents in a worker thread; without one, the tool fails."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from hostlib import threads
from supervisor.llmfd.errors import FILE_OPERATION, FdError

if TYPE_CHECKING:
    from collections.abc import Callable

    import trio


T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def in_thread(
    call: Callable[[*Ts], T], *args: *Ts, share: trio.CapacityLimiter | None = None
) -> T:
    """Run a call as ``hostlib.threads.in_thread`` does.

    Raises:
        FdError: ``file_operation``: no thread can be started; the call has not begun.
    """
    try:
        return await threads.in_thread(call, *args, share=share)
    except BlockingIOError as why:  # EAGAIN
        reason = os.strerror(why.errno or 0)
        text = f"Cannot work on content: {reason}"
        details = "The host can start no thread, and nothing was done; ask again"
        raise FdError(FILE_OPERATION, text, details) from None
