"""Exit statuses of `sandhost run`, and the one line that explains each."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.command import (
    beneath,
    finished,
    heard,
    running,
    sandhost,
    shell,
    still_there,
)
from tests.helpers.hanging import hanging

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("code", [0, 1, 7, 124, 126, 255])
def test_the_status_is_the_childs(code: int) -> None:
    outcome = sandhost("run", "--", "sh", "-c", f"exit {code}")
    assert (outcome.status, outcome.out, outcome.err) == (code, b"", b"")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_child_ended_by_a_signal_is_128_and_its_number(number: int) -> None:
    outcome = sandhost("run", "--", "sh", "-c", f"kill -{int(number)} $$")
    assert (outcome.status, outcome.err) == (128 + number, b"")


def test_what_a_child_prints_passes_through() -> None:
    outcome = shell('echo in | $S run -- sh -c "cat; echo out; echo err >&2"')
    assert (outcome.status, outcome.out, outcome.err) == (0, b"in\nout\n", b"err\n")


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("no-such-command", 127, "directory of PATH; install it, or name it by its"),
        ("./no-such-command", 127, "No such file or directory; check its path"),
        ("", 127, "cannot start ''"),
        ("/etc/passwd", 126, "Permission denied; make it executable (chmod +x)"),
        ("/", 126, "cannot start '/': Is a directory"),
        ("./no-program", 126, "Exec format error"),
        ("./no-interpreter", 127, "/nonexistent/interpreter is not"),
    ],
)
def test_what_cannot_be_started_is_said(
    tmp_path: Path, command: str, status: int, said: str
) -> None:
    texts = {"no-program": "x", "no-interpreter": "#!/nonexistent/interpreter\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    outcome = sandhost("run", "--", command, cwd=tmp_path)
    assert outcome.status == status
    assert outcome.said(said)
    assert outcome.said("sandhost run: ")


def test_a_timeout_is_124_and_ends_the_child() -> None:
    begin = time.monotonic()
    outcome = sandhost("run", "--timeout", "300ms", "--", "sleep", "1000")
    assert outcome.status == 124
    assert time.monotonic() - begin >= 0.3


def test_a_timeout_of_nothing_is_none() -> None:
    assert sandhost("run", "--timeout", "0", "--", "sh", "-c", "exit 7").status == 7
    assert sandhost("run", "--timeout", "", "--", "true").status == 125


def test_a_timeout_ends_a_child_that_does_not_listen(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("[host]\ngrace = '200ms'\n")
    script = "trap '' TERM; while :; do sleep 1000; done"
    options = ("--config", config, "--timeout", "0.2")
    assert sandhost("run", *options, "--", "sh", "-c", script).status == 124


# spec S6
@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
        (signal.SIGHUP, 129),
        (signal.SIGQUIT, 131),
    ],
)
def test_a_signal_stops_run_and_its_child(number: int, status: int) -> None:
    with running("run", "--", "sh", "-c", "echo $$; exec sleep 1000") as process:
        heard(process, b"\n")
        children = beneath(process.pid)
        assert children
        process.send_signal(number)
        outcome = finished(process)
    assert (outcome.status, outcome.err) == (status, b"")
    assert not still_there(children)


# spec S6: a child that ends well in its grace period does not hide the signal, and
# what it still writes is kept.
# While it imports what it needs, nothing heeds a signal yet.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("command", ["run", "pipeline"])
def test_a_host_that_has_just_begun_has_a_status_too(
    command: str, number: signal.Signals
) -> None:
    with running(command, "--", "sleep", "1000") as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text():  # its launchpad
            assert process.poll() is None
        process.send_signal(number)
        outcome = finished(process)
    assert (outcome.status, outcome.err) == (128 + number, b"")


def test_a_stopped_child_may_leave_in_order(tmp_path: Path) -> None:
    script = (
        "trap 'printf \"OPEN last w false\\nWRITE 1000 3\\nbye\" >&3; exit 0' TERM;"
        "echo ready; while :; do sleep 0.05; done"
    )
    with running("run", "--root", tmp_path, "--", "sh", "-c", script) as process:
        heard(process, b"ready\n")
        process.send_signal(signal.SIGTERM)
        assert finished(process).status == 143
    assert (tmp_path / "last").read_bytes() == b"bye"


# spec S6: the second signal does not wait for the grace period.
def test_a_second_signal_insists(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("[host]\ngrace = '10m'\n")
    script = "trap 'echo asked' TERM; echo ready; while :; do sleep 0.05; done"
    with running("run", "--config", config, "--", "sh", "-c", script) as process:
        heard(process, b"ready\n")
        process.send_signal(signal.SIGTERM)
        heard(process, b"asked\n")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGTERM)
        assert finished(process).status == 143


# spec S6: who is not its program yet cannot be asked to end, and its exec can hang for as
# long as a disk does. A later command of a pipeline is not started any more.
@pytest.mark.parametrize("more", [(), (":::", "sleep", "1000")])
@pytest.mark.parametrize("sandbox", ["none", "auto"])
def test_a_signal_stops_run_while_the_exec_of_its_child_hangs(
    tmp_path: Path, sandbox: str, more: tuple[str, ...]
) -> None:
    script = "echo $0 >&2; exec sleep 1000"
    words = ("--sandbox", sandbox, "--", "sh", "-c", script, "ready", ":::")
    with (
        hanging(tmp_path) as program,
        running("pipeline", *words, program, *more) as process,
    ):
        assert process.stderr is not None
        assert process.stderr.readline() == b"ready\n"
        time.sleep(0.2)  # the next one is on its way
        children = beneath(process.pid)
        begun_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        outcome = finished(process)
        assert time.monotonic() - begun_s < 10
    assert (outcome.status, outcome.err) == (143, b"")
    assert not still_there(children)


# Bounds: its time goes while it is being started, too.
@pytest.mark.parametrize("option", ["--timeout=1s", "--limit=time=1s"])
@pytest.mark.parametrize("sandbox", ["none", "auto"])
def test_a_time_limit_is_kept_while_the_exec_of_a_child_hangs(
    tmp_path: Path, sandbox: str, option: str
) -> None:
    with hanging(tmp_path) as program:
        words = ("run", "--sandbox", sandbox, option, "--", program)
        with running(*words) as process:
            time.sleep(0.5)  # it is on its way
            children = beneath(process.pid)
            outcome = finished(process)
    assert outcome.status == 124
    assert not still_there(children)
    why = "it did not begin within its time limit, 1 s; look at the disk that it is on"
    assert outcome.said(f"sandhost run: cannot execute '{program}': {why}")
    outcome = sandhost("run", option, "--", "sleep", "1000")
    assert (outcome.status, outcome.err) == (124, b"")


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("run --bogus -- true", 125),
        ("check-config /nope", 2),
        ("ps --control /nope", 2),
        ("run -- no-such-command", 127),
        ("run --pass-env S -- sh -c '$S fs cat nope 2>/dev/full'", 1),
    ],
)
def test_a_status_does_not_depend_on_who_takes_the_line(
    words: str, status: int
) -> None:
    for where in ("/dev/full", "&-"):
        outcome = shell(f"export S; $S {words} 2>{where}")
        assert outcome.status == status


def test_a_report_that_cannot_be_written_is_one_line() -> None:
    outcome = shell("$S doctor >/dev/full")
    assert outcome.err == (
        b"sandhost doctor: cannot write to stdout: No space left on device\n"
    )
    assert outcome.status not in {0, 125}
