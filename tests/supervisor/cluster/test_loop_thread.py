"""Calls of a Trio loop by tasks of asyncio, in one process."""

import subprocess
import sys

LOOP_CALLS = """
import asyncio, os, threading, trio
from supervisor.cluster.loop_thread import LoopThread

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
    return await asyncio.gather(*(loop.call(wait, number) for number in range(200)))

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
