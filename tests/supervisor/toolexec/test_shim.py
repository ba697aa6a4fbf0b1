"""Shims in three shells: what they send, print and exit with."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest

from supervisor.toolexec.kinds import ALL_TOOLS
from supervisor.toolexec.shim import MARK, ShimError, install, shim_text
from tests.helpers.command import read_until, sandhost
from tests.helpers.toolserver import Faults, ToolServer, tool_server
from tests.supervisor.toolexec.shells import SHELLS, installed

pytestmark = pytest.mark.slow


@pytest.fixture(params=SHELLS, ids=lambda words: words[0])
def shell(request: pytest.FixtureRequest) -> list[str]:
    """A shell to run shims with."""
    return installed(request.param)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ToolServer]:
    """A server on a unix socket."""
    with tool_server(tmp_path) as running:
        yield running


class Shims:
    """Shims in a directory, and how they are run."""

    def __init__(self, where: Path, shell: list[str], server: ToolServer) -> None:
        self.where = where
        self.shell = shell
        self.env = {
            "PATH": os.environ["PATH"],
            "TMPDIR": str(where / "tmp"),
            "AIFO_TOOLEEXEC_URL": server.url,
            "AIFO_TOOLEEXEC_TOKEN": server.token,
            "http_proxy": "http://127.0.0.1:9",
        }
        (where / "tmp").mkdir()
        install(str(where / "bin"), ["sh", "printf", "sleep"], notify="say")

    def start(
        self, name: str, *args: str | bytes, stdout: int | IO[bytes] = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        """Start a shim."""
        return subprocess.Popen(
            [*self.shell, str(self.where / "bin" / name), *args],
            env=self.env,
            cwd=self.where,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
        )

    def run(
        self, name: str, *args: str | bytes, stdout: int | IO[bytes] = subprocess.PIPE
    ) -> tuple[int, bytes, bytes]:
        """Run a shim to its end: exit code, stdout, stderr."""
        with self.start(name, *args, stdout=stdout) as process:
            out, err = process.communicate(timeout=60)
        assert not os.listdir(self.where / "tmp"), "temporary files are left"
        return process.returncode, out, err


@pytest.fixture
def shims(tmp_path: Path, shell: list[str], server: ToolServer) -> Shims:
    """Shims of a few tools that every system has."""
    return Shims(tmp_path, shell, server)


# ToolExec 7: the seed's client, word by word.
def test_what_a_shim_sends(shims: Shims, server: ToolServer, tmp_path: Path) -> None:
    args = (
        b"%s|",
        b"",
        b"a b",
        b"x\ny\n",
        "é&=+%".encode(),
        b"\xff",
        b"@f",
        b"-o",
        b"*",
    )
    code, out, err = shims.run("printf", *args)
    assert (code, err) == (0, b"")
    assert out == b"".join(arg + b"|" for arg in args[1:])
    (asked,) = server.asked
    assert (asked.method, asked.target) == ("POST", "/exec")
    assert asked.headers["x-aifo-proto"] == "2"
    assert asked.headers["te"] == "trailers"
    assert asked.headers["authorization"] == f"Bearer {server.token}"
    assert len(asked.headers["x-aifo-exec-id"]) == 32
    assert asked.all(b"tool") == [b"printf"]
    assert asked.all(b"arg") == list(args)
    assert asked.all(b"cwd") == [os.fsencode(tmp_path)]


def test_the_exit_code_is_that_of_the_trailer(shims: Shims, server: ToolServer) -> None:
    fake = "printf 'X-Exit-Code: 0\\r\\n\\r\\nX-Exit-Code: 0\\r\\n'; exit 7"
    code, out, _ = shims.run("sh", "-c", fake)
    assert code == 7  # attack 35
    assert out.endswith(b"X-Exit-Code: 0\r\n")
    assert shims.run("sh", "-c", "kill -9 $$")[0] == 137
    server.faults = Faults(no_trailer=True)
    assert shims.run("sh", "-c", "exit 0")[0] == 1


# RFC 9110, 5.1: names of fields have no case; of a server of somebody else's too.
@pytest.mark.parametrize("name", ["x-exit-code", "X-EXIT-CODE", "X-Exit-code"])
def test_the_trailer_may_be_written_in_any_case(
    shims: Shims, server: ToolServer, name: str
) -> None:
    server.faults = Faults(trailer=name)
    assert shims.run("sh", "-c", "echo out; exit 7") == (7, b"out\n", b"")


# A user's settings of curl are not meant for a shim: it could take its output away.
def test_a_curlrc_changes_nothing(shims: Shims, tmp_path: Path) -> None:
    (tmp_path / ".curlrc").write_text("output = x\n")
    shims.env |= {"HOME": str(tmp_path), "CURL_HOME": str(tmp_path)}
    assert shims.run("sh", "-c", "echo out; exit 7") == (7, b"out\n", b"")
    assert not (tmp_path / "x").exists()


def test_a_broken_line_is_1_and_says_so(shims: Shims, server: ToolServer) -> None:
    server.faults = Faults(cut_after=[3])
    code, out, err = shims.run("printf", "abcdef")
    assert (code, out) == (1, b"abc")
    assert err.startswith(b"curl: ")


def test_a_reader_that_stops_is_no_error(shims: Shims, tmp_path: Path) -> None:
    with shims.start("sh", "-c", "while echo line; do :; done") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert read_until(process.stdout.fileno(), b"line\n")
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1  # the trailer was not seen
    assert not os.listdir(tmp_path / "tmp")


def test_a_full_disk_behind_stdout_is_one(shims: Shims) -> None:
    with open("/dev/full", "wb") as full:
        code, _, err = shims.run("printf", "abcdef", stdout=full)
    assert code == 1
    assert err.startswith(b"curl: (23) ")


def test_a_refusal_is_shown_with_its_code(shims: Shims, server: ToolServer) -> None:
    server.faults = Faults(refuse=(403, b"forbidden: tool\n", 86))
    assert shims.run("sh")[:2] == (86, b"forbidden: tool\n")


def test_output_is_live(shims: Shims, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    script = "echo first; echo second >&2; read -r line <gate; echo $line"
    with shims.start("sh", "-c", script) as process:
        assert process.stdout is not None
        out = read_until(process.stdout.fileno(), b"second\n")
        assert out == b"first\nsecond\n"
        (tmp_path / "gate").write_text("third\n")
        assert process.communicate(timeout=60)[0] == b"third\n"
    assert process.returncode == 0


# ToolExec 7: INT and TERM are forwarded through /signal, and what else ends a shim.
@pytest.mark.parametrize("name", ["INT", "QUIT", "TERM", "HUP"])
def test_a_signal_is_forwarded(shims: Shims, server: ToolServer, name: str) -> None:
    script = f"trap 'echo got; exit 5' {name}; echo ready; while :; do sleep 1; done"
    with shims.start("sh", "-c", script) as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"ready\n")
        process.send_signal(getattr(signal, f"SIG{name}"))
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 5
    assert out.endswith(b"got\n")  # after what sh says of its child
    told = server.asked[1]
    assert (told.target, told.all(b"signal")) == ("/signal", [name.encode()])
    assert told.all(b"exec_id")[0].decode() == server.asked[0].headers["x-aifo-exec-id"]


def test_notify_is_its_own_endpoint(shims: Shims, server: ToolServer) -> None:
    code, out, _ = shims.run("say", "--title", "two words")
    assert (code, out) == (3, b"say|--title|two words\n")
    assert server.asked[0].target == "/notify"
    assert server.asked[0].headers["x-aifo-proto"] == "2"


def test_without_a_host_a_shim_says_so(shims: Shims) -> None:
    del shims.env["AIFO_TOOLEEXEC_URL"]
    code, _, err = shims.run("sh")
    assert code == 1
    assert err == b"sh: AIFO_TOOLEEXEC_URL is not set: no host runs tools here\n"


def test_tcp_is_spoken_too(tmp_path: Path, shell: list[str]) -> None:
    with tool_server() as server:
        shims = Shims(tmp_path, shell, server)
        assert shims.run("sh", "-c", "echo tcp; exit 3")[:2] == (3, b"tcp\n")


def test_the_token_is_on_no_command_line(shims: Shims, server: ToolServer) -> None:
    with shims.start("sh", "-c", "echo ready; sleep 1000") as process:
        assert process.stdout is not None
        read_until(process.stdout.fileno(), b"ready\n")
        lines = command_lines()
        assert b"curl" in lines
        assert server.token.encode() not in lines
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 143


def command_lines() -> bytes:
    """The command lines of all processes."""
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # gone meanwhile
            found += path.read_bytes()
    return found


# Installing


def test_the_command_installs_all_tools(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[sidecar.x]\nkind = 'go'\nallow = ['jq', 'go']\n")
    directory = tmp_path / "deep" / "bin"
    words = ("shim", directory, "--tool", "rg", "--notify", "say", "--config", config)
    outcome = sandhost(*words)
    assert outcome.status == 0, outcome.err
    assert set(os.listdir(directory)) == {*ALL_TOOLS, "rg", "jq", "say"}
    for path in directory.iterdir():
        assert path.read_text().startswith(f"#!/bin/sh\n{MARK}: ")
        assert path.stat().st_mode & 0o777 == 0o755
    assert sandhost(*words).status == 0  # a shim may be replaced
    only = sandhost("shim", tmp_path / "few", "--only", "--tool", "rg")
    assert only.out == f"1 shims in {tmp_path}/few: rg\n".encode()


def test_nothing_but_a_shim_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "make").write_text("#!/bin/sh\necho precious\n")
    outcome = sandhost("shim", tmp_path)
    assert outcome.status == 2
    assert outcome.said(f"'{tmp_path}/make' is there and is no shim")
    assert os.listdir(tmp_path) == ["make"]
    (tmp_path / "make").unlink()
    (tmp_path / "make").symlink_to("/bin/true")
    with pytest.raises(ShimError, match="no shim"):
        install(str(tmp_path), ["make"])


# attack 32
@pytest.mark.parametrize("name", ["../x", "a b", "-c", "", "x;y"])
def test_a_shim_has_the_name_of_a_tool(tmp_path: Path, name: str) -> None:
    with pytest.raises(ShimError, match="not the name of a tool"):
        install(str(tmp_path), [name])
    assert shim_text("make") != shim_text("make", notify=True)
