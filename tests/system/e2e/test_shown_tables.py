"""The tables of a daemon from outside: on a terminal, over a pipe, as JSON."""

import fcntl
import json
import os
import pty
import struct
import termios
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT, finished, running, sandhost
from tests.helpers.daemon import daemon

pytestmark = pytest.mark.slow

NAME = "a-child-with-a-name-that-is-" + "long-" * 7 + "x"
ENDED = "b-ended"
CONFIG = f"""
[policy.plain]
sandbox = "none"
[child.{NAME}]
policy = "plain"
command = ["sh", "-c", "echo 'OPEN note w false' >&3; read -r x <&3; sleep 1000", "{"w" * 90}"]
[child.{ENDED}]
policy = "plain"
command = ["sh", "-c", "exit 3"]
"""


def on_terminal(*words: str, columns: int, **env: str) -> list[str]:
    """Return the lines of a command whose stdout is a terminal of so many columns."""
    fd, theirs = pty.openpty()
    try:
        size = struct.pack("4H", 24, columns, 0, 0)
        fcntl.ioctl(fd, termios.TIOCSWINSZ, size)
        env = {**ENVIRONMENT, "NO_COLOR": "1", "TERM": "dumb", **env}
        with running(*words, stdout=theirs, env=env) as process:
            os.close(theirs)
            text = b""
            while more := _read(fd):
                text += more
            assert finished(process).status == 0
    finally:
        os.close(fd)
    return text.decode().splitlines()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65_536)
    except OSError:  # EIO: no program has the other end any more
        return b""


def test_tables_are_as_wide_as_the_terminal_and_name_children(tmp_path: Path) -> None:
    with daemon(tmp_path, CONFIG) as it:
        it.wait(it.client.files, "an open file")
        it.wait(lambda: it.row(ENDED).reason, "an end")
        control = ("--control", it.client.path)

        # spec face: no limit over a pipe, whatever COLUMNS says
        piped = sandhost("ps", *control, env={**ENVIRONMENT, "COLUMNS": "60"})
        head, long, ended = piped.out.decode().splitlines()
        assert long.startswith(NAME + " ")
        assert "w" * 90 in long
        assert ended.startswith(ENDED + " ")
        assert ended.endswith(it.row(ENDED).reason or "-")

        for columns, env in ((100, {}), (200, {}), (80, {"COLUMNS": "100"})):
            head, long, ended = on_terminal("ps", *control, columns=columns, **env)
            wide = int(env.get("COLUMNS", columns))
            assert max(map(len, (head, long, ended))) <= wide
            assert str(it.row(NAME).pid) in long
            assert ended[head.index("REASON") :].strip()
        assert len(long) > 80

        (client,) = json.loads(sandhost("clients", "--json", *control).out)
        (file,) = json.loads(sandhost("files", "--json", *control).out)
        assert client["child"] == file["child"] == NAME
        assert NAME in sandhost("clients", *control).out.decode()
        assert NAME in sandhost("files", *control).out.decode()
