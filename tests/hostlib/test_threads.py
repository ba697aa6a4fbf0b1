"""Calls in worker threads: whose error is whose; calls of a loop in a thread."""

import errno
import subprocess
import sys

import pytest
import trio

from hostlib.threads import in_abandonable_thread, in_thread

NO_THREAD = "can't start new thread"


def fail() -> None:
    """Fail as a library may that has nothing to do with threads."""
    raise RuntimeError("of the call")


async def test_an_error_of_the_call_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="of the call"):
        await in_thread(fail)
    with pytest.raises(RuntimeError, match="of the call"):
        await in_abandonable_thread(fail, limiter=trio.CapacityLimiter(1))


async def test_a_thread_that_cannot_be_started_is_an_error_of_the_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError(NO_THREAD)

    monkeypatch.setattr(trio.to_thread, "run_sync", refuse)
    with pytest.raises(OSError, match="temporarily unavailable") as caught:
        await in_abandonable_thread(fail, limiter=trio.CapacityLimiter(1))
    assert caught.value.errno == errno.EAGAIN
    with pytest.raises(OSError, match="temporarily unavailable"):
        await in_thread(fail)


LOOP_CALLS = """
import asyncio, os, threading, trio
from hostlib.asyncio_calls import call_loop
from hostlib.threads import LoopThread

async def main(task_status):
    global all_called
    all_called = trio.Event()
    task_status.started()
    await trio.sleep_forever()

called = 0

async def wait(number):
    global called
    called += 1
    if called == 200:
        print("threads", threading.active_count(), flush=True)
        all_called.set()
    await all_called.wait()
    return number

async def ask():
    return await asyncio.gather(*(call_loop(loop, wait, number) for number in range(200)))

loop = LoopThread(main, lambda why: print("fault", why, flush=True))
print(asyncio.run(ask()) == list(range(200)), flush=True)
os._exit(0)
"""


# spec FL11
def test_calls_of_a_loop_hold_no_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOP_CALLS], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("threads 2\nTrue\n", "")
