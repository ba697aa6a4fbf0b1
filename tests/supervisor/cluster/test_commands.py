"""Commands of a fleet's child, as a program asks for them; without a fleet."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from supervisor.client import LogEntry
from supervisor.cluster.commands import Commands, Seat
from supervisor.control.client import SilentError


# spec FL3
@pytest.mark.parametrize(
    ("command", "words", "kind", "said"),
    [
        ([], {}, ValueError, "cannot run []: a command begins with its program"),
        ("ls -l", {}, TypeError, "cannot run 'ls -l': a command is a list of words"),
        (["ls", 4], {}, TypeError, "cannot run 'ls': 4 is no str; convert it"),
        (["ls"], {"env": {"N": 4}}, TypeError, "cannot run 'ls': 4 is no str"),
        (["ls"], {"timeout_s": "5"}, TypeError, "its time is '5'; give seconds"),
        (["ls"], {"timeout_s": float("nan")}, TypeError, "its time is nan"),
    ],
)
def test_a_command_that_is_none_is_not_sent(
    command: Any, words: dict[str, Any], kind: type[Exception], said: str
) -> None:
    nobody: Any = None
    with pytest.raises(kind) as refusal:
        Commands(nobody, Seat("a", "box", "1", 1)).exec(command, **words)
    assert said in str(refusal.value)


class CutLog:
    """A fleet of one child, whose log is read from within a line on."""

    def tell(self, text: str) -> None:
        """Fail: nothing is to be waited for."""
        raise AssertionError(text)

    def ask(self, _do: str, words: dict[str, Any]) -> dict[str, Any]:
        """Take a request."""
        self.request = json.loads(base64.b64decode(words["args"]["data"]))
        return {"is_taken": True, "is_closed": False, "log_end": 40}

    def logs(self, _name: str, words: dict[str, Any]) -> Iterator[LogEntry]:
        """Yield the end of an older answer, and the one to the request."""
        over = {"status": 3, "is_late": False}
        answer = json.dumps({"id": self.request["id"], "over": over})
        data = f"{json.dumps(over)}}}\n{answer}\n".encode()
        yield LogEntry(words["offset"], data, 0, ())


# spec FL3
def test_a_log_may_be_read_from_within_an_answer_on() -> None:
    cut: Any = CutLog()
    assert Commands(cut, Seat("a", "box", "1", 1)).exec(["false"]).status == 3


class RotatedLog:
    """A fleet that loses its first answer; its child's log has lost its first bytes."""

    KEPT = 5000

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def tell(self, text: str) -> None:
        """Fail: nothing is to be waited for."""
        raise AssertionError(text)

    def ask(self, do: str, words: dict[str, Any]) -> dict[str, Any]:
        """Take a request; answer from the second one on."""
        if do == "find":
            return {"id": "1", "incarnation": 1, "state": "running"}
        self.requests.append(json.loads(base64.b64decode(words["args"]["data"])))
        if len(self.requests) == 1:
            raise SilentError
        return {"is_taken": True, "is_closed": False, "log_end": 9000}

    def logs(self, _name: str, words: dict[str, Any]) -> Iterator[LogEntry]:
        """Yield what is kept from an offset on, or from the first byte that is."""
        begin = self.KEPT if words["offset"] is None else words["offset"]
        over = {"status": 3, "is_late": False}
        answer = json.dumps({"id": self.requests[0]["id"], "over": over})
        yield LogEntry(self.KEPT, f"{answer}\n".encode(), self.KEPT - begin, ())


# spec FL3: the child is older than the program, which knows no end of its log.
def test_a_first_request_that_is_repeated_finds_its_answer_in_a_log_that_was_cut() -> (
    None
):
    cut: Any = RotatedLog()
    assert Commands(cut, Seat("a", "box", "1", 1)).exec(["false"]).status == 3
    assert cut.requests[0] == cut.requests[1]
