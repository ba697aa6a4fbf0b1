"""The fuzzer's target for the model's APIs takes any input, and sees a difference."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostlib.redact import StreamRedactor
from tests.fuzz import fuzz_doors
from tests.fuzz.door_turns import told_at_the_end, turns
from tests.fuzz.door_words import KEY


@given(st.binary(max_size=60))
def test_the_target_takes_any_input(data: bytes) -> None:
    fuzz_doors.check(data)


def test_the_target_sees_a_text_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    number = fuzz_doors.CHECKS.index(fuzz_doors.check_redactor)
    beginning = fuzz_doors.TEXTS.index(KEY[:5])
    data = bytes([number, 1, 3, beginning])
    fuzz_doors.check(data)
    monkeypatch.setattr(StreamRedactor, "rest", lambda _: "")
    with pytest.raises(AssertionError, match="another text"):
        fuzz_doors.check(data)


# spec MD8: what another process has run is told by the one that waits for it.
def test_inputs_and_turns_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    turns.cache_clear()
    assert told_at_the_end(lambda: fuzz_doors.check(b"\x02" + b"a" * 60)) == 0
    assert told_at_the_end(lambda: fuzz_doors.check(b"\x02" + b"b" * 60)) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("1 inputs, ")
    assert " turns of the host; the longest " in second
    assert " ms: " in second


def test_without_atheris_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    assert fuzz_doors.main(["fuzz_doors.py"]) == 2
    assert capsys.readouterr().err.startswith("fuzz_doors: cannot fuzz: atheris")
