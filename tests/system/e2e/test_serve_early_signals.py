"""`sandhost serve`: SIGHUP and SIGUSR2 before its children have begun."""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from supervisor.handover.next_program import VARIABLE
from tests.helpers.daemon import Daemon, daemon
from tests.helpers.hanging import hanging

pytestmark = pytest.mark.slow

CHILDREN = "".join(f"[child.{n}]\ncommand = ['sleep', '1000']\n" for n in "ab")

SIDECAR = "[toolexec]\n[sidecar.s]\nkind = 'go'\nsandbox = 'none'\nstart = {}\n"
"""The first start of a sidecar is awaited before children are started."""


@contextmanager
def waiting_for_its_sidecar(where: Path) -> Iterator[tuple[Daemon, ExitStack]]:
    """Start a daemon that has begun and opens services until the stack is closed."""
    with ExitStack() as hold:
        program = hold.enter_context(hanging(where))
        config = CHILDREN + SIDECAR.format([str(program)])
        with daemon(where, config, ready=False) as running:
            running.wait(lambda: "host.started" in journal(where), "its journal")
            yield running, hold


def journal(where: Path) -> list[str]:
    """Return the names of the journal's events; of starts, those of the children."""
    directory = where / "state" / "journal"
    files = sorted(directory.iterdir()) if directory.exists() else []
    lines = [line for file in files for line in file.read_bytes().splitlines()]
    rows = map(json.loads, lines)
    return [
        row["name"] if row["event"] == "child.spawned" else row["event"] for row in rows
    ]


def assert_one_process_a_child(running: Daemon) -> None:
    """Check that each child was started once, and runs."""
    events = journal(running.where)
    assert sorted(name for name in events if name in {"a", "b"}) == ["a", "b"]
    states = {row.name: row.state for row in running.client.ps()}
    assert states == {"a": "running", "b": "running"}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR2])
def test_a_signal_before_the_children_begin_is_obeyed_after_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    with waiting_for_its_sidecar(tmp_path) as (running, hold):
        running.send(number)
        assert running.is_silent(1.0)  # neither RELOADING=1 nor READY=1
        hold.close()
        running.hear("READY=1")
        done = "host.reloaded" if number == signal.SIGHUP else "host.replacing"
        running.wait(lambda: done in journal(tmp_path), done)
        running.wait(lambda: len(running.client.ps()) == 2, "its answer")
        assert_one_process_a_child(running)
        assert running.end() == 0


# The signal waits in the kernel until the next program has its handlers.
def test_a_reload_right_after_a_hand_over_starts_no_second_process(
    tmp_path: Path,
) -> None:
    config = CHILDREN + SIDECAR.format(["sleep", "1000"])
    with daemon(tmp_path, config) as running, ExitStack() as hold:
        program = hold.enter_context(hanging(tmp_path))
        file = tmp_path / "c.toml"
        text = file.read_text().replace("start = ['sleep'", f"start = ['{program}'")
        file.write_text(text)
        running.send(signal.SIGUSR2)
        running.hear("RELOADING=1")
        environ = Path(f"/proc/{running.process.pid}/environ")
        running.wait(lambda: VARIABLE.encode() in environ.read_bytes(), "its exec")
        running.send(signal.SIGHUP)
        assert running.is_silent(1.0)
        hold.close()
        running.hear("READY=1")
        running.wait(lambda: "host.reloaded" in journal(tmp_path), "its reload")
        assert_one_process_a_child(running)
        assert running.end() == 0


def test_a_reload_before_all_have_begun_does_not_say_that_it_is_ready(
    tmp_path: Path,
) -> None:
    with ExitStack() as hold:
        program = hold.enter_context(hanging(tmp_path))
        config = f"[child.a]\ncommand = ['{program}']\n"
        with daemon(tmp_path, config, ready=False) as running:
            running.hear("STATUS=starting 0 of 1")
            running.send(signal.SIGHUP)
            running.wait(lambda: "host.reloaded" in journal(tmp_path), "its reload")
            assert running.client.stats()  # the turn in which it was told is over
            assert not any("READY=1" in heard for heard in running.take_heard())
            hold.close()
            running.hear("READY=1")
            assert running.end() == 0
