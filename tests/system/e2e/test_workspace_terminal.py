"""Workspaces on a terminal: what is asked there, and what a terminal is shown."""

import os
import pty
import select
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT, SANDHOST
from tests.system.e2e.test_workspace import Place

pytestmark = pytest.mark.slow

PATIENCE_S = 60
QUESTION = b"[c/d/x/K] "


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


class Terminal:
    """A command whose input, output and errors are a terminal."""

    def __init__(self, *words: str) -> None:
        self._fd, theirs = pty.openpty()
        self._process = subprocess.Popen(
            [SANDHOST, *words], env=ENVIRONMENT, start_new_session=True,
            stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        os.close(theirs)
        self.shown = b""

    def answer(self, question: bytes, answer: bytes) -> None:
        """Type a line when a question stands at the end."""
        until_s = time.monotonic() + PATIENCE_S
        while not self.shown.endswith(question):
            assert time.monotonic() < until_s, self.shown
            assert self._read(), self.shown
        os.write(self._fd, answer)

    def _read(self) -> bool:
        if not select.select([self._fd], [], [], PATIENCE_S)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the last process that had it has ended
            return False
        self.shown += data
        return bool(data)

    def end(self) -> int:
        """Return the exit status; all that was shown has been read then."""
        while self._read():
            pass
        os.close(self._fd)
        return self._process.wait(PATIENCE_S)


def run(place: Place, script: str) -> Terminal:
    """Run a shell script in the workspace ``w``, on a terminal."""
    words = ("--state-dir", str(place.state), "--workspace", str(place.base))
    return Terminal("run", *words, "--workspace-name", "w", "--", "sh", "-c", script)


def ask(place: Place, *words: str) -> Terminal:
    """Run ``sandhost workspace`` on a terminal."""
    return Terminal("workspace", *words, "--state-dir", str(place.state))


# spec WS5
@pytest.mark.parametrize(
    ("answer", "content", "names"),
    [
        (b"c\n", "hello\nmore\n", []),
        (b"x\n", "hello\n", []),
        (b"\x04", "hello\n", ["w"]),
    ],
    ids=["commit", "discard", "end of input"],
)
def test_a_run_on_a_terminal_asks_what_becomes_of_changes(
    place: Place, answer: bytes, content: str, names: list[str]
) -> None:
    terminal = run(place, "echo more >> a.txt; exit 3")
    terminal.answer(QUESTION, answer)
    assert terminal.end() == 3
    assert (place.base / "a.txt").read_text() == content
    assert [row["name"] for row in place.rows("list")] == names


# Bytes by which a program hides a line: a carriage return, a backspace, escapes in seven
# and eight bits, and text that runs from right to left.
HIDING = r"printf 'evil\rgood\b\033[2K\302\2332K\342\200\256x\377\n' >> a.txt"
SHOWN = rb"+evil^Mgood^H^[[2K\x9b2K\u202ex\xff"


# spec WS8
def test_a_patch_on_a_terminal_holds_nothing_that_the_terminal_obeys(
    place: Place,
) -> None:
    terminal = run(place, HIDING)
    terminal.answer(QUESTION, b"d\n")
    terminal.answer(QUESTION, b"\n")
    assert terminal.end() == 0
    assert b"\x1b[32m" + SHOWN + b"\x1b[0m\r\n" in terminal.shown
    looked = ask(place, "diff", "w")
    assert looked.end() == 1
    assert b"\x1b[32m" + SHOWN + b"\x1b[0m\r\n" in looked.shown
    assert b"+evil\rgood\b\x1b[2K" in place.ask("diff", "w").out


# spec WS14
def test_a_discard_on_a_terminal_asks_first(place: Place) -> None:
    place.named("echo more >> a.txt")
    question = b"discard 1 changes of workspace w? [y/N]: "
    for answer, status, left in ((b"n\n", 1, 1), (b"y\n", 0, 0)):
        terminal = ask(place, "discard", "w")
        terminal.answer(question, answer)
        assert terminal.end() == status
        assert len(place.rows("list")) == left
