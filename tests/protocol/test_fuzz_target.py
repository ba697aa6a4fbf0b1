"""The fuzzer's target takes any input, sees a difference, and names its packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import COMMANDS, HostConnection
from tests.fuzz import fuzz_protocol

SCRIPT = Path(fuzz_protocol.__file__)


@given(st.binary(max_size=300))
def test_the_target_takes_any_input(data: bytes) -> None:
    fuzz_protocol.check(data)


def test_the_target_takes_no_input() -> None:
    fuzz_protocol.check(b"")


def plan(*, sizes: list[int], stream: bytes) -> bytes:
    """Return an input that cuts this stream at these sizes, in dialect 2."""
    raw = [
        bytes([176 + len(stream[at : at + 40])]) + stream[at : at + 40]
        for at in range(0, len(stream), 40)
    ]
    return bytes([1, 1, len(sizes), *sizes]) + b"".join(raw)


def test_the_target_sees_a_payload_that_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = plan(sizes=[4], stream=b"WRITE 1 5\nhelloPING\n" * 3)
    fuzz_protocol.check(data)
    received = HostConnection.body_received

    def forgetful(self: HostConnection, count: int) -> None:
        received(self, max(0, count - 1))

    monkeypatch.setattr(HostConnection, "body_received", forgetful)
    with pytest.raises((AssertionError, IndexError)):
        fuzz_protocol.check(data)


def test_a_stream_may_hold_every_command_and_pass_every_limit() -> None:
    words = fuzz_protocol.words()
    assert set(COMMANDS) < set(words)
    assert len(words) <= 128, "a word that no input can choose"
    stream = fuzz_protocol.build(fuzz_protocol.Plan(b"\xff\x00"), words)
    assert stream == b"x" * fuzz_protocol.LONG


def test_without_atheris_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "atheris", None)
    assert fuzz_protocol.main(["fuzz_protocol.py"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("fuzz_protocol: cannot fuzz: atheris is not installed:")
    assert told.count("\n") == 1


@pytest.mark.slow
def test_it_fuzzes_from_any_directory(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed (make fuzz)")
    done = subprocess.run(
        [sys.executable, os.fspath(SCRIPT), "-runs=200", "-seed=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Done 200 runs" in done.stderr
    assert not list(tmp_path.iterdir()), "something was found, or left behind"
