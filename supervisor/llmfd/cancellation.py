"""Long work in a worker thread ends soon after nobody waits for it any more.

A call that has begun in a worker thread is always waited for (``vfs.mounts``), so that
what takes seconds has to ask between its steps.
"""

from __future__ import annotations

from trio.from_thread import check_cancelled


def stop_if_cancelled() -> None:
    """Raise ``trio.Cancelled`` if the call that this thread works for is cancelled.

    Work that no task waits for, as that of ``Process.call_now``, always goes on.
    """
    try:
        check_cancelled()
    except RuntimeError:  # no worker thread of Trio
        return
