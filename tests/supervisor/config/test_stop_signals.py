"""The signals by which a child can be asked to end."""

import signal

import pytest

from hostlib.user_values import OptionError
from supervisor.config.child import (
    ChildSection,
    check_children,
    signal_number,
    stop_signal,
)


@pytest.mark.parametrize("name", ["TERM", "SIGINT", "QUIT", "USR1", "KILL", "WINCH"])
def test_a_signal_by_which_programs_end_can_be_the_stop_signal(name: str) -> None:
    number = getattr(signal, f"SIG{name.removeprefix('SIG')}")
    assert stop_signal(name) == number
    section = ChildSection(["true"], stop_signal=name)
    assert not list(check_children({"a": section}))


# face: a stop is a request to end, and SIGKILL only when the grace is over.
@pytest.mark.parametrize(
    "name", ["CONT", "SIGSTOP", "TSTP", "TTIN", "TTOU", "CHLD", "CLD", "URG"]
)
def test_a_signal_that_ends_no_program_cannot_be_the_stop_signal(name: str) -> None:
    section = ChildSection(["true"], stop_signal=name)
    ((key, reason),) = check_children({"a": section})
    assert key == "a.stop_signal"
    assert reason.startswith(f"does not end a program: {name!r}; write TERM, INT, ")
    with pytest.raises(OptionError, match="does not end a program"):
        stop_signal(name)
    number = getattr(signal, f"SIG{name.removeprefix('SIG')}")
    assert signal_number(name) == number, "an order may send it all the same"


@pytest.mark.parametrize("name", ["KILLER", "", "15", "_IGN"])
def test_what_is_no_signal_is_told_as_such(name: str) -> None:
    with pytest.raises(OptionError, match="not a signal"):
        stop_signal(name)
