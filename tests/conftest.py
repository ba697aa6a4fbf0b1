"""Fixtures of every test.

The leak check, the search for the hosts' key, a TMPDIR, no clocks.

Imports nothing of the product before a test needs it: a file of unit tests starts quickly.
"""

import gc
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers import canary
from tests.helpers.canary_plugin import CanaryPlugin
from tests.helpers.forkserver import ForkServer
from tests.helpers.leaks import holdings, left_over

# A deadline or "too slow" would measure the machine's other load, not the code. In CI
# the examples are the same in every run, so that a red run can be repeated, and fewer: what
# a run by hand and the long form try is as many as hypothesis has.
settings.register_profile(
    "sandhost", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
IS_LONG = int(os.environ.get("CHAOS_ROUNDS", "400")) >= 10_000
settings.register_profile(
    "sandhost-ci",
    parent=settings.get_profile("sandhost"),
    derandomize=True,
    max_examples=100 if IS_LONG else 40,
)
settings.load_profile("sandhost-ci" if os.environ.get("CI") else "sandhost")

# The tests may have been started with ignored signals (`nohup`, a shell's `&`), and that
# is inherited by all that the tests start: no shell can trap such a signal.
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(_number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

MOST_DESCRIPTORS = 64
"""Descriptors that a process of tests may have when they are over: 19 were seen."""

# Nor is it known how many descriptors a process may have: hundreds of payloads that are
# spooled take as many, and 1024 is what many start with.
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
_wanted = 4096 if _hard == resource.RLIM_INFINITY else min(4096, _hard)
if _soft != resource.RLIM_INFINITY and _soft < _wanted:
    resource.setrlimit(resource.RLIMIT_NOFILE, (_wanted, _hard))


# A host that is killed leaves its children's directories behind. They all are in one, which
# goes when the tests are over; as in ``/tmp``, users of children's own are let through, and
# its name is short, for sockets are made in there. Directories of pytest stay where it was.
_IS_WORKER = (
    "PYTEST_XDIST_WORKER" in os.environ
)  # it has the directory of who started it
if not _IS_WORKER:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="st-")
    Path(tempfile.tempdir).chmod(0o1777)


def pytest_unconfigure() -> None:
    """Remove what hosts have left."""
    if _IS_WORKER:
        return
    top = Path(os.environ["TMPDIR"])
    with suppress(OSError):  # ENOTEMPTY: hosts were there
        top.rmdir()
    if top.exists():
        from supervisor.sandbox.scratch import remove_tree  # noqa: PLC0415

        why = remove_tree(top)
        assert why is None, why


def pytest_configure(config: pytest.Config) -> None:
    """Have the key of the hosts looked for in all that the tests make."""
    config.pluginmanager.register(CanaryPlugin())


def pytest_collection(session: pytest.Session) -> None:
    """Turn the garbage collector off; objects stay until all tests are over."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Turn it on again; it does not look at thousands of tests each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """The server that forks commands.

    There before any leak check, and gone after all of them.
    """
    # It has the TMPDIR that is made here.
    from tests.helpers.command import ENVIRONMENT  # noqa: PLC0415

    server = ForkServer({**ENVIRONMENT, canary.VARIABLE: ""})
    yield server
    server.close()


@pytest.fixture
def no_leaks() -> None:
    """Ask for the leak check in a test that is not marked `slow`."""


@pytest.fixture(scope="session", autouse=True)
def _few_descriptors() -> Iterator[None]:
    """Fail a run whose tests have left many descriptors, each of them few."""
    yield
    gc.collect()
    left = sorted(holdings().descriptors.values())
    assert len(left) < MOST_DESCRIPTORS, f"open after all tests: {'; '.join(left)}"


@pytest.fixture(autouse=True)
def _leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a descriptor or a child process behind.

    Being autouse it is set up before the other fixtures of a test and torn down after
    them, so what those release in time is no leak.
    """
    watched = (
        request.node.get_closest_marker("slow") is not None
        or "no_leaks" in request.fixturenames
    )
    if not watched:
        yield
        return
    # It holds a descriptor from its import on, which is no leak.
    import vfs.mounts  # noqa: F401, PLC0415

    before = holdings()
    yield
    left = left_over(before, holdings())
    assert not left, "left behind: " + "; ".join(left)
