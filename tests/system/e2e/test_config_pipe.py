"""`--config <(...)`: a configuration from a shell's pipe."""

import fcntl
import os
import signal
import subprocess
import termios
from pathlib import Path

import pytest

from supervisor.config import source
from supervisor.config.loader import ConfigError, load_config
from tests.helpers.command import ENVIRONMENT, SANDHOST, TIMEOUT_S, Outcome

pytestmark = pytest.mark.slow


def substituted(shell: str, *words: str, cwd: Path) -> Outcome:
    """Run a command whose `@` is what a shell command prints (process substitution)."""
    line = " ".join(f"<({shell})" if word == "@" else word for word in words)
    script = f"exec {SANDHOST} {line}"
    done = subprocess.run(
        ["/bin/bash", "-c", script],
        capture_output=True,
        cwd=cwd,
        env=ENVIRONMENT,
        timeout=TIMEOUT_S,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (("check-config", "@"), 0),
        (("run", "--config", "@", "--", "true"), 0),
        (("shim", "bin", "--config", "@"), 0),
    ],
)
def test_a_pipe_that_the_shell_has_opened_is_read(
    tmp_path: Path, words: tuple[str, ...], status: int
) -> None:
    good = "printf '[limits]\\n'; sleep 0.1; printf 'open_files_per_client = 9\\n'"
    outcome = substituted(good, *words, cwd=tmp_path)
    assert (outcome.status, outcome.err) == (status, b"")
    wrong = substituted("printf '[limits]\\nfiles = 1\\n'", *words, cwd=tmp_path)
    assert wrong.status != 0
    assert wrong.said("limits.files")
    nothing = substituted("exit 1", *words, cwd=tmp_path)
    assert nothing.status != 0
    assert nothing.said("it is a pipe that brought nothing")


def test_a_pipe_without_an_end_is_not_read_to_it(tmp_path: Path) -> None:
    outcome = substituted("cat /dev/zero", "check-config", "@", cwd=tmp_path)
    assert outcome.status == 2
    assert outcome.said("it has more than 16777216 bytes")


def test_a_pipe_is_nothing_for_a_daemon(tmp_path: Path) -> None:
    outcome = substituted("echo", "serve", "--config", "@", cwd=tmp_path)
    assert outcome.status == 78
    assert outcome.said("it is a pipe, and this is read again at each reload")


def test_ctrl_c_ends_the_wait_for_a_pipe() -> None:
    command = [SANDHOST, "check-config", "/dev/stdin"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b"[limits]\n")
        process.stdin.flush()
        while any(fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4))):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) in {130, -signal.SIGINT}


def test_a_pipe_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PIPE_S", 0.05)
    reads, writes = os.pipe()
    try:
        os.write(writes, b"[limits]\n")
        with pytest.raises(ConfigError, match=r"has not ended within 0\.05 s"):
            load_config(f"/dev/fd/{reads}", once=True)
    finally:
        os.close(reads)
        os.close(writes)
