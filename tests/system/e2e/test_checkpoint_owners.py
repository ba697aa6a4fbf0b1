"""Checkpoints over restarts of the daemon.

Each child finds its own, and no other's.
"""

import os
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.command import PROGRAMS
from tests.helpers.daemon import Daemon, daemon

pytestmark = pytest.mark.slow

FDS = (
    "[tools]\nenabled = ['read_fd', 'checkpoint_process', 'list_checkpoints',"
    " 'restore_process', 'delete_checkpoint']\n"
)

SCRIPT = """sandhost fd checkpoints; sandhost fd checkpoint of-{name} >/dev/null
echo over {tag}; exec sleep 1000"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name: an address of a unix socket has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="sd-", dir="/tmp") as name:
        yield Path(name)


def config(*names: str, tag: str) -> str:
    """Return children that list checkpoints, and make one; they start in this order."""
    text = FDS
    for number, name in enumerate(names):
        script = SCRIPT.format(name=name, tag=tag)
        after = f"after = ['{names[number - 1]}']\n" if number else ""
        text += (
            f"[child.{name}]\ncommand = ['sh', '-c', '''{script}''']\n{after}"
            f"env = {{ PATH = '{PROGRAMS}' }}\n"
        )
    return text


def _is_said(running: Daemon, name: str, text: bytes) -> bool:
    return text in running.log(name)


def listed(where: Path, *names: str) -> dict[str, list[str]]:
    """Run a daemon once; return the labels that each child was shown."""
    found, tag = {}, os.urandom(8).hex()  # the log of a name outlives the daemon
    with daemon(where, config(*names, tag=tag)) as running:
        for name in names:
            over = f"over {tag}\n".encode()
            running.wait(partial(_is_said, running, name, over), "the end")
            said = running.log(name).decode().rpartition("<checkpoints ")[2]
            found[name] = re.findall(r'label="([^"]*)"', said)
        assert running.end() == 0
    return found


# attack 44: the order in which children start is not whose their checkpoints are.
def test_a_child_finds_its_own_checkpoints_whatever_place_it_starts_at(
    place: Path,
) -> None:
    assert listed(place, "one", "two") == {"one": [], "two": []}
    again = listed(place, "two", "one")
    assert again == {"one": ["of-one"], "two": ["of-two"]}
    # A name that looks like a place is a name.
    assert listed(place, "child-1", "one")["child-1"] == []


# attack 44: also the next life of a child finds its own, in the same daemon.
def test_a_child_that_is_started_again_finds_its_own(place: Path) -> None:
    text = config("one", "two", tag="life").replace("exec sleep 1000", "exit 0")
    with daemon(place, text.replace("env =", "restart = 'always'\nenv =")) as running:
        for name, other in (("one", b"of-two"), ("two", b"of-one")):
            label = f'label="of-{name}"'.encode()
            running.wait(partial(_is_said, running, name, label), "a second life")
            assert other not in running.log(name)


# attack 44: who has no name in the configuration is shown nobody's, and leaves nobody's.
def test_a_child_without_a_name_is_shown_nothing(place: Path) -> None:
    script = SCRIPT.format(name="nobody", tag="")
    command, env = ["sh", "-c", script], {"PATH": PROGRAMS}
    for _ in range(2):
        with daemon(place, FDS) as running:
            for _ in range(2):
                name = running.client.spawn(command, env=env).name
                running.wait(partial(_is_said, running, name, b"over"), "the end")
                assert b'<checkpoints count="0"/>' in running.log(name)
            assert running.end() == 0


# attack 44: what an older program kept by that order goes, and it is said.
def test_what_was_kept_by_the_order_of_starts_is_dropped(place: Path) -> None:
    listed(place, "one")
    path = place / "state" / "checkpoints" / "checkpoints.sqlite"
    with sqlite3.connect(path) as base:
        for table in ("checkpoint", "held"):
            base.execute(f"UPDATE {table} SET owner = 'child-1'")  # noqa: S608 - ours
    base.close()
    (place / "stderr").unlink()
    with daemon(place, FDS) as running:
        assert "Dropped 1 checkpoints that were kept by the order" in running.said()
        assert running.end() == 0
    with sqlite3.connect(path) as base:
        for table in ("checkpoint", "held"):
            assert not base.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608
    base.close()
    (place / "stderr").unlink()
    with daemon(place, FDS) as running:
        assert "Dropped" not in running.said()
