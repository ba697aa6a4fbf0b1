"""The shells that shims and what stands in for container engines have to do with."""

import shutil

import pytest

SHELLS = (("dash",), ("bash", "--posix"), ("busybox", "sh"))
"""Parameters of a fixture, as `installed` takes them."""


def installed(words: tuple[str, ...]) -> list[str]:
    """Return how a shell is called; skip the test where it is not installed."""
    if shutil.which(words[0]) is None:
        pytest.skip(f"{words[0]} is not installed")
    return list(words)
