"""A next program that cannot be.

The host goes on as if nobody had asked, and says why.
"""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostlib.handover import HandoverError
from supervisor.handover.exchange import FREE_DESCRIPTORS, check_room
from supervisor.handover.state import versions
from tests.helpers.replacing import Hand, Replaced, hands, replaced

pytestmark = pytest.mark.slow


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[tuple[Replaced, Hand]]:
    """A host with one child, which is in the middle of a WRITE."""
    with hands(tmp_path, "one") as (one,):
        with replaced(tmp_path, one.spec()) as host:
            fileno = one.do("opened(b'new', b'w')")
            one.do(f"send(b'WRITE {fileno} 6\\nabc')")
            yield host, one


def assert_goes_on(host: Replaced, one: Hand) -> None:
    """Check that the child can go on, that nothing leaks, and that a later one comes."""
    one.do("send(b'def')")
    assert one.do("line()") == b"OK 6"
    assert one.ask(b"PING\n") == b"OK"
    host.assert_no_leaks()
    (host.where / "next").unlink()
    host.replace()
    assert one.ask(b"PING\n") == b"OK"
    assert (host.where / "root" / "new").read_bytes() == b"abcdef"
    assert len(host.events("host.replaced")) == 1


def test_a_program_that_is_missing_is_refused(scene: tuple[Replaced, Hand]) -> None:
    host, one = scene
    (host.where / "next").write_text("/no/such/program")
    assert "No such file" in host.hear_refusal()
    (row,) = host.events("host.not_replaced")
    assert "/no/such/program" in row["reason"]
    assert_goes_on(host, one)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "is no host that can take over (status 0)"),
        ("exit 3", "is no host that can take over (status 3)"),
        ("kill -9 $$", "is no host that can take over (status None)"),
        ("echo sandhost handover 0.0 99.1", "takes over versions 0.0, 99.1, not"),
        ("echo something else", "is no host that can take over (status 0)"),
        (
            "echo Traceback >&2; echo 'ImportError: no x' >&2; echo >&2; exit 1",
            "is no host that can take over (status 1): ImportError: no x",
        ),
    ],
)
def test_a_program_that_cannot_take_over_is_refused(
    scene: tuple[Replaced, Hand], script: str, reason: str
) -> None:
    host, one = scene
    host.next_is(script)
    assert reason in host.hear_refusal()
    assert one.ask(b"def") == b"OK 6"
    assert one.ask(b"PING\n") == b"OK"
    host.assert_no_leaks()


def test_a_program_that_vanishes_after_the_check_is_refused(
    scene: tuple[Replaced, Hand],
) -> None:
    host, one = scene
    host.next_is(f'rm "$0"; echo sandhost handover {versions()}')
    assert "cannot execute" in host.hear_refusal()
    assert_goes_on(host, one)


# spec S6: whoever is asked to end ends, also while a next program is looked at.
def test_a_stop_while_the_next_program_is_checked(scene: tuple[Replaced, Hand]) -> None:
    host, one = scene
    os.mkfifo(host.where / "asked")
    host.next_is(f"echo >{host.where}/asked; exec sleep 30")
    host.ask_replace()
    assert (host.where / "asked").read_text() == "\n"
    host.process.terminate()
    name, status = host.hear("ended")
    assert (name, status in {"143", "137"}) == (one.name, True)
    assert host.wait() == 0


# Others may have taken the descriptors that loading the next program needs: then it is not begun.
# attack 18
def test_without_descriptors_to_load_it_there_is_no_next_program() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, most[0]), most[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/", os.O_PATH))
        for _ in range(FREE_DESCRIPTORS - 1):
            os.close(held.pop())
        with pytest.raises(HandoverError, match="descriptors are free: Too many open"):
            check_room()
        os.close(held.pop())
        check_room()
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
