"""A user namespace for the owners of files, where no process can be forked."""

import errno
import os
from typing import NoReturn

import pytest

from supervisor.spawn.launchpad.layers import owners

UNUSED_UID = 54_321


def refuse() -> NoReturn:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


# The launchpad goes on, and is asked again: four descriptors a time, and it has none left.
def test_a_fork_that_fails_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", refuse)
        with pytest.raises(BlockingIOError):
            owners.owners_of(UNUSED_UID)
    assert os.listdir("/proc/self/fd") == before
