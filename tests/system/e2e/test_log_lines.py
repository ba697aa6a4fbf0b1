"""A daemon's log: each line says who and why, in fields.

In a JSON log each line is JSON.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import ENVIRONMENT, TIMEOUT_S, sandhost
from tests.helpers.daemon import Daemon, daemon

pytestmark = pytest.mark.slow

CHILD = """
[policy.plain]
sandbox = "none"

[child.{name}]
policy = "plain"
command = ["sh", "-c", {script}]
"""

Line = dict[str, Any]


def child(name: str, script: str, *more: str) -> str:
    """Return a configuration of one child."""
    text = CHILD.format(name=name, script=json.dumps(script))
    return "\n".join([text, *more, ""])


def lines(running: Daemon) -> list[Line]:
    """Return the lines of a daemon's log; each has to be one JSON object."""
    return [json.loads(line) for line in running.said().splitlines()]


def line(running: Daemon, beginning: str, **fields: object) -> Line:
    """Wait for a line that begins so and has these fields."""

    def found() -> Line | None:
        for one in lines(running):
            if one["message"].startswith(beginning) and fields.items() <= one.items():
                return one
        return None

    return running.wait(found, f"{beginning!r} with {fields}")  # type: ignore[no-any-return]


# spec S3: the seed's text stays, who and why stand beside it.
def test_an_end_that_failed_is_a_warning_with_who_and_why(tmp_path: Path) -> None:
    with daemon(tmp_path, child("web", "exit 3")) as running:
        end = line(running, "Process ", child="web")
        assert end["level"] == "WARNING"
        assert end["message"] == (
            f"Process {end['pid']} terminated, cleaning up client {end['client_id']}"
        )
        assert (end["code"], end["signal"], end["status"]) == (3, None, 3)
        assert end["reason"] == "exited with 3"
        assert end["child_id"] == "child-1"


def test_an_end_by_a_signal_names_it(tmp_path: Path) -> None:
    with daemon(tmp_path, child("web", "kill -9 $$")) as running:
        end = line(running, "Process ", child="web")
        assert (end["level"], end["code"], end["signal"]) == ("WARNING", None, 9)
        assert end["reason"] == "was killed by SIGKILL"


def test_an_end_that_went_well_or_was_asked_for_is_no_warning(tmp_path: Path) -> None:
    config = child("web", "exit 0") + child("long", "exec sleep 600").replace(
        '[policy.plain]\nsandbox = "none"\n', ""
    )
    with daemon(tmp_path, config) as running:
        assert line(running, "Process ", child="web")["level"] == "INFO"
        running.client.stop_child("long")
        end = line(running, "Process ", child="long")
        assert (end["level"], end["signal"]) == ("INFO", signal.SIGTERM)


def test_starts_and_restarts_are_logged(tmp_path: Path) -> None:
    config = child("web", "exit 3", 'restart = "always"', 'backoff = "10ms"')
    with daemon(tmp_path, config) as running:
        start = line(running, "Child web started", child="web", level="INFO")
        assert start["child_id"] == "child-1"
        assert isinstance(start["pid"], int)
        again = line(running, "Child web is started again", child="web")
        assert (again["status"], again["reason"]) == (3, "exited with 3")
        assert (again["child_id"], again["code"], again["signal"]) == (
            "child-1",
            3,
            None,
        )
        assert again["pid"] == start["pid"]
        given_up = line(running, "Child web given up", child="web", level="ERROR")
        assert given_up["status"] == 3
        assert (given_up["code"], given_up["signal"]) == (3, None)
        assert given_up["child_id"] == "child-6"
        assert given_up["reason"].startswith("given up: ")


@pytest.mark.parametrize("by", ["signal", "order"])
def test_a_reload_is_logged_however_it_was_asked_for(tmp_path: Path, by: str) -> None:
    with daemon(tmp_path, child("web", "exec sleep 600")) as running:
        config = tmp_path / "c.toml"
        config.write_text(config.read_text().replace("600", "601"))
        if by == "signal":
            running.send(signal.SIGHUP)
        else:
            running.client.reload()
        said = line(running, "Reloaded: ", level="INFO")
        assert said["restarted"] == ["web"]
        assert said["message"] == "Reloaded: 0 started, 0 stopped, 1 restarted"


def test_a_reload_that_failed_is_logged_once(tmp_path: Path) -> None:
    with daemon(tmp_path, child("web", "exec sleep 600")) as running:
        config = tmp_path / "c.toml"
        config.write_text(config.read_text() + "nonsense = 1\n")
        running.send(signal.SIGHUP)
        line(running, "Not reloaded: ", level="ERROR")
        running.client.ps()
        said = [one for one in lines(running) if "eloaded" in one["message"]]
        assert len(said) == 1


def test_a_replacement_is_logged(tmp_path: Path) -> None:
    with daemon(tmp_path, child("web", "exec sleep 600")) as running:
        running.send(signal.SIGUSR2)
        said = line(running, "Replaced: ", level="INFO")
        assert (said["generation"], said["children"]) == (1, 1)
        line(running, "Replacing the program", level="INFO")


# attack 23: the name is a field, and no byte of it is more than that.
def test_denials_and_closed_files_name_child_and_file(tmp_path: Path) -> None:
    name = b"a\x7f\xc2\x9b\xff b"
    script = (
        "import os\n"
        f"name = {name!r}\n"
        "os.write(3, b'OPEN /%b r true\\n' % name); os.read(3, 4096)\n"
        "os.write(3, b'OPEN %b w false\\n' % name); os.read(3, 4096)\n"
    )
    (tmp_path / "open.py").write_text(script)
    command = f"exec {sys.executable} -I -S {tmp_path}/open.py"
    with daemon(tmp_path, child("web", command)) as running:
        denied = line(running, "Denied OPEN", child_id="child-1")
        closed = line(running, "Auto-closed fileno", child_id="child-1")
        assert not set(running.said()) & {"\x7f", "\x9b"}
    assert (denied["filename"], denied["client_id"]) == ("/a\x7f\x9b\\xff b", "c1")
    assert (closed["filename"], closed["client_id"]) == ("a\x7f\x9b\\xff b", "c1")
    assert closed["message"] == (
        f"Auto-closed fileno {closed['fileno']} for client c1 ({closed['reason']})"
    )


# Under journald each line tells its priority, and what follows is JSON (sd-daemon(3)).
def test_under_journald_each_line_has_its_priority(tmp_path: Path) -> None:
    stderr = tmp_path / "stderr"
    stderr.touch()
    of = stderr.stat()
    journal = {"JOURNAL_STREAM": f"{of.st_dev}:{of.st_ino}"}
    with daemon(tmp_path, child("web", "exit 3"), env=journal) as running:
        running.wait(lambda: "terminated" in running.said(), "its end")
        priorities = {"ERROR": "<3>", "WARNING": "<4>", "INFO": "<6>", "DEBUG": "<7>"}
        said = running.said().splitlines()
        assert len(said) > 1
        for one in said:
            assert one[:3] == priorities[json.loads(one[3:])["level"]]


def test_a_journal_stream_that_is_not_stderr_adds_nothing(tmp_path: Path) -> None:
    journal = {"JOURNAL_STREAM": "1:2"}
    with daemon(tmp_path, child("web", "exit 3"), env=journal) as running:
        line(running, "Process ", child="web")


FAULTS = {
    "an option": ("serve", "--nonsense"),
    "no such file": ("serve", "--config", "nowhere.toml"),
    "a fault in it": ("serve", "--config", "bad.toml"),
    "a directory": ("serve", "--config", "good.toml", "--control", "/proc/none/x"),
    "a port": ("serve", "--config", "taken.toml"),
}


# Whatever ends a daemon before its log begins, or ends it at all, is a line of the log.
@pytest.mark.parametrize("fault", FAULTS)
def test_what_ends_a_daemon_is_a_line_of_its_log(tmp_path: Path, fault: str) -> None:
    where = f'[host]\nruntime_dir = "{tmp_path}/run"\nstate_dir = "{tmp_path}/state"\n'
    (tmp_path / "good.toml").write_text(where)
    (tmp_path / "bad.toml").write_text(where + "nonsense = 1\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        (tmp_path / "taken.toml").write_text(f'{where}[metrics]\nlisten = "{listen}"\n')
        ended = sandhost(*FAULTS[fault], cwd=tmp_path)
    assert ended.status
    assert ended.out == b""
    said = [json.loads(one) for one in ended.err.splitlines()]
    assert said[-1]["level"] == "ERROR"
    assert said[-1]["message"].startswith("sandhost serve: ")


def test_a_text_log_ends_with_a_line_of_text(tmp_path: Path) -> None:
    words = ("serve", "--log-format", "text", "--config", "nowhere.toml")
    ended = sandhost(*words, cwd=tmp_path)
    assert ended.err.startswith(b"sandhost serve: cannot ")


# Messages of libraries and the interpreter, when they believe to say it on stderr.
LIBRARIES = """
import gc, logging, sys, threading, warnings
from hostlib.log import Log
Log("INFO", as_json=True).take_stderr()
warnings.warn("of a library", UserWarning)
logging.getLogger("library").warning("said by a logger")
print("printed\\nin two lines", file=sys.stderr)
class Broken:
    def __del__(self):
        raise ValueError("secret")
Broken()
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
async def never_waited_for():
    pass
never_waited_for()
gc.collect()
raise KeyError("at the end")
"""


def test_what_libraries_say_is_json_too(tmp_path: Path) -> None:
    script = tmp_path / "libraries.py"
    script.write_text(LIBRARIES)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **ENVIRONMENT}, cwd=tmp_path, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    said = [json.loads(one) for one in done.stderr.splitlines()]
    messages = [one["message"] for one in said]
    assert "UserWarning: of a library" in messages
    assert "said by a logger" in messages
    assert {"printed", "in two lines"} <= set(messages)
    assert sum("ValueError" in one for one in messages) == 1
    assert sum("ZeroDivisionError" in one for one in messages) == 1
    assert any("never awaited" in one for one in messages)
    assert any("KeyError" in one for one in messages)
    assert "secret" not in done.stderr
