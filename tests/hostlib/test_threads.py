"""Calls in worker threads: whose error is whose; calls of a loop in a thread."""

import errno

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
