"""Commands of a fleet's child: a request that is none is not sent."""

from typing import Any

import pytest

from supervisor.cluster.commands import Commands, Seat


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
