"""The fuzzer's target for ToolExec takes any input, and sees a difference."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.toolexec import body
from tests.fuzz import fuzz_toolexec

WORDS = [
    b"5",
    b"\r\n",
    b"0",
    b"hello",
    b"\n",
    b";a",
    b"A: b",
    b"\r",
    b"tool=",
    b"&",
    b"%",
]


@given(st.binary(max_size=16), st.lists(st.sampled_from(WORDS) | st.binary(max_size=9)))
def test_the_target_takes_any_input(sizes: bytes, words: list[bytes]) -> None:
    fuzz_toolexec.target(bytes([len(sizes)]) + sizes.ljust(16) + b"".join(words))
    fuzz_toolexec.target(sizes)


def test_the_target_sees_a_reader_that_is_lenient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = bytes(17) + b"5\r\nhello\r\n0\r\n\r\n"
    fuzz_toolexec.check(data)
    for name in ("_take_part", "_take_whole_chunks"):
        monkeypatch.setattr(body.BodyReader, name, lambda _: None)
    with pytest.raises(AssertionError):
        fuzz_toolexec.check(data)


def test_without_atheris_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    assert fuzz_toolexec.main(["fuzz_toolexec.py"]) == 2
    assert capsys.readouterr().err.startswith("fuzz_toolexec: cannot fuzz: atheris")
