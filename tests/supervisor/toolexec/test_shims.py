"""Shims against the real server.

Ours, and one as strangers write it, in three shells.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from supervisor.toolexec.shim import install
from tests.helpers.toolscene import Scene
from tests.supervisor.toolexec.shells import SHELLS, installed

pytestmark = pytest.mark.slow


# The original's client as its description has it, and no line of ours.
FOREIGN = r"""#!/bin/sh
tool=$(basename "$0")
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
case $AIFO_TOOLEEXEC_URL in
  unix://*) sock="--unix-socket ${AIFO_TOOLEEXEC_URL#unix://}"
            target=http://localhost/exec ;;
  *) sock=; target=$AIFO_TOOLEEXEC_URL ;;
esac
first=$#
for a in "$@"; do set -- "$@" --data-urlencode "arg=$a"; done
while [ "$first" -gt 0 ]; do shift; first=$((first - 1)); done
curl -sS --no-buffer $sock -D "$tmp/h" \
  -H "Authorization: Bearer $AIFO_TOOLEEXEC_TOKEN" \
  -H "X-Aifo-Proto: 2" -H "TE: trailers" \
  --data-urlencode "tool=$tool" --data-urlencode "cwd=." "$@" "$target"
code=$(sed -n 's/^[Xx]-[Ee]xit-[Cc]ode: *\([0-9]*\).*/\1/p' "$tmp/h" | tail -1)
exit "${code:-1}"
"""


@pytest.fixture(params=SHELLS, ids=lambda words: words[0])
def shell(request: pytest.FixtureRequest) -> list[str]:
    """A shell to run shims with."""
    return installed(request.param)


def make_shims(scene: Scene, where: Path, *, foreign: bool) -> Path:
    """Put shims of `sh` and `printf` into a directory."""
    if not foreign:
        install(str(where), ["sh", "printf"])
        return where
    where.mkdir()
    for name in ("sh", "printf"):
        (where / name).write_text(FOREIGN)
    return where


def environment(scene: Scene, url: str, place: Path) -> dict[str, str]:
    """Say what a shim finds."""
    return {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(place),
        "AIFO_TOOLEEXEC_URL": url,
        "AIFO_TOOLEEXEC_TOKEN": scene.child.token,
    }


# spec toolexec 7: foreign shims that speak the seed's protocol work unchanged.
@pytest.mark.parametrize("foreign", [False, True], ids=["own", "foreign"])
@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_shims_run_tools_of_the_host(
    scene: Scene, tmp_path: Path, shell: list[str], foreign: bool, transport: str
) -> None:
    shims = make_shims(scene, tmp_path / "shims", foreign=foreign)
    url = scene.child.url if transport == "unix" else scene.tool.shared_url
    assert url is not None
    env = environment(scene, url, tmp_path)
    for name, args, said, code in (
        ("printf", ("%s|", "a b", "", "é", "$(id)", "x\ny"), "a b||é|$(id)|x\ny|", 0),
        ("sh", ("-c", "echo out; echo err >&2; exit 7"), "out\nerr\n", 7),
        ("sh", ("-c", "kill -TERM $$"), "", 128 + signal.SIGTERM),
    ):
        # Not by trio.run_process: it starts processes in a thread, and those of a host
        # block all signals, SIGCHLD too, for which a shell waits.
        with subprocess.Popen(  # noqa: ASYNC220
            [*shell, str(shims / name), *args],
            env=env,
            cwd=scene.workspace,
            stdout=subprocess.PIPE,
        ) as process:
            out, _ = await trio.to_thread.run_sync(process.communicate)
        assert (out.decode(), process.returncode) == (said, code)


@pytest.fixture(params=[*SHELLS, ("bash",), ("sh",)], ids=" ".join)
def any_shell(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """A shell to run shims with; "sh" is bash by that name."""
    if request.param != ("sh",):
        return installed(request.param)
    (tmp_path / "sh").symlink_to(shutil.which(installed(("bash",))[0]) or "")
    return [str(tmp_path / "sh")]


# spec toolexec 7: what a terminal's Ctrl-C and Ctrl-\ send goes to the shim's whole group.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
async def test_a_terminals_key_leaves_a_tool_its_last_words_and_its_exit_code(
    scene: Scene, tmp_path: Path, any_shell: list[str], number: signal.Signals
) -> None:
    shims = make_shims(scene, tmp_path / "shims", foreign=False)
    place = tmp_path / "tmp"
    place.mkdir()
    name = number.name.removeprefix("SIG")
    script = f"trap 'echo got; exit 5' {name}; echo up; while :; do sleep 0.1; done"
    with subprocess.Popen(  # noqa: ASYNC220
        [*any_shell, str(shims / "sh"), "-c", script],
        env=environment(scene, scene.child.url, place),
        cwd=scene.workspace,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert await trio.to_thread.run_sync(process.stdout.readline) == b"up\n"
        os.killpg(process.pid, number)
        out, _ = await trio.to_thread.run_sync(process.communicate)
    assert out.endswith(b"got\n")
    assert process.returncode == 5
    assert not os.listdir(place)  # the token lay there


def test_shims_call_no_shims(tmp_path: Path, shell: list[str]) -> None:
    names = ("curl", "mktemp", "od", "printf", "rm", "sh", "sleep", "tr")
    for where in ("one", "two"):
        install(str(tmp_path / where), names)
    (tmp_path / "linked").symlink_to(tmp_path / "one")
    (tmp_path / "tmp").mkdir()
    # A server that takes a connection and says nothing shows that curl was called.
    with socket.create_server(("127.0.0.1", 0)) as server:
        env = {
            "PATH": f"linked:{tmp_path}/two/:{tmp_path}/one:{os.environ['PATH']}",
            "TMPDIR": str(tmp_path / "tmp"),
            "AIFO_TOOLEEXEC_URL": f"http://127.0.0.1:{server.getsockname()[1]}/exec",
            "AIFO_TOOLEEXEC_TOKEN": "t",
        }
        server.settimeout(10)
        with subprocess.Popen(
            [*shell, str(tmp_path / "one" / "tr"), "a", "b"],
            env=env,
            cwd=tmp_path,
            start_new_session=True,
        ) as process:
            try:
                with server.accept()[0] as line:
                    line.settimeout(10)
                    asked = b""
                    while not asked.endswith(b"&arg=a&arg=b"):
                        asked += line.recv(65_536)
                assert process.wait(timeout=60) == 1
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    assert b"\r\n\r\ntool=tr&" in asked
    assert re.search(rb"X-Aifo-Exec-Id: [0-9a-f]{32}\r\n", asked)
    assert not os.listdir(tmp_path / "tmp")


def test_a_shim_that_finds_nothing_but_shims_says_so(
    tmp_path: Path, shell: list[str]
) -> None:
    install(str(tmp_path / "bin"), ["tr"])
    done = subprocess.run(
        [str(shutil.which(shell[0])), *shell[1:], str(tmp_path / "bin" / "tr")],
        env={"PATH": "/nowhere", "SANDHOST_SHIM": "make"},
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    why = b"tr: a shim is called by a shim, and nothing else is found\n"
    assert done.stderr == why


class Unanswered:
    """A shim that nobody answers, with commands of its own that can be held."""

    def __init__(self, where: Path) -> None:
        install(str(where / "shims"), ["make"])
        for name in ("tmp", "bin"):
            (where / name).mkdir()
        self.where = where
        self.tmp = where / "tmp"

    def put(self, name: str, script: str) -> None:
        """Put something in the place of a command."""
        path = self.where / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def start(self, shell: list[str]) -> subprocess.Popen[bytes]:
        """Start the shim as a terminal would: with a group of its own."""
        env = {
            "PATH": f"{self.where}/bin:{os.environ['PATH']}",
            "TMPDIR": str(self.tmp),
            "AIFO_TOOLEEXEC_URL": f"unix://{self.where}/nobody",
            "AIFO_TOOLEEXEC_TOKEN": "t",
        }
        return subprocess.Popen(
            [*shell, str(self.where / "shims" / "make")],
            env=env,
            cwd=self.where,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )


def let_go(process: subprocess.Popen[bytes], gate: Path) -> bytes:
    """Open the gate that a shim waits at; return its stderr to its end."""
    fd = os.open(gate, os.O_RDWR)  # waits for no reader
    os.write(fd, b"go\n")
    _, err = process.communicate(timeout=60)
    os.close(fd)
    return err


SIGNALS = pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT]
)


@SIGNALS
def test_a_shim_that_is_ended_early_leaves_nothing(
    tmp_path: Path, any_shell: list[str], number: signal.Signals
) -> None:
    shim = Unanswered(tmp_path)
    os.mkfifo(tmp_path / "made")
    os.mkfifo(tmp_path / "gate")
    made = f'made=$({shutil.which("mktemp")} "$@")'
    shim.put("mktemp", f"{made}\n: >made\nread -r x <gate\necho $made")
    with shim.start(any_shell) as process:
        (tmp_path / "made").read_bytes()
        assert os.listdir(shim.tmp)
        os.killpg(process.pid, number)
        err = let_go(process, tmp_path / "gate")
    assert (process.returncode, err) == (128 + number, b"")
    assert not os.listdir(shim.tmp)


# The file that holds the token is there whole, or not at all.
@SIGNALS
def test_a_shim_that_is_ended_while_it_writes_its_token_leaves_nothing(
    tmp_path: Path, any_shell: list[str], number: signal.Signals
) -> None:
    shim = Unanswered(tmp_path)
    os.mkfifo(tmp_path / "gate")
    os.mkfifo(tmp_path / "made")
    made = f'made=$({shutil.which("mktemp")} "$@"); mkfifo "$made/a"'
    shim.put("mktemp", f'{made}; echo "$made" >made; read -r x <gate; echo "$made"')
    with shim.start(any_shell) as process:
        place = Path((tmp_path / "made").read_text().strip()) / "a"
        full = os.open(place, os.O_RDWR | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            while os.write(full, bytes(4096)):
                pass
        gate = os.open(tmp_path / "gate", os.O_RDWR)
        os.write(gate, b"go\n")
        wait_for_writer(process.pid, place)
        os.killpg(process.pid, number)
        with suppress(BlockingIOError):
            while os.read(full, 65_536):
                pass
        _, err = process.communicate(timeout=60)
        os.close(gate)
        os.close(full)
    assert (process.returncode, err) == (128 + number, b"")
    assert not os.listdir(shim.tmp)


def wait_for_writer(group: int, place: Path) -> None:
    """Wait until somebody of a group has a file open as its output."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # gone meanwhile, or somebody else's
                if os.getpgid(int(path.name)) != group:
                    continue
                if os.readlink(path / "fd" / "1") == str(place):
                    return
    raise AssertionError("nobody writes")


# A second signal, or a second key, while it tidies up.
@SIGNALS
def test_a_shim_that_is_signalled_at_its_end_leaves_nothing(
    tmp_path: Path, any_shell: list[str], number: signal.Signals
) -> None:
    shim = Unanswered(tmp_path)
    os.mkfifo(tmp_path / "gate")
    os.mkfifo(tmp_path / "called")
    remove = f'exec {shutil.which("rm")} "$@"'
    shim.put("rm", f": >called; read -r x <gate; {remove}")
    with shim.start(any_shell) as process:
        (tmp_path / "called").read_bytes()
        os.killpg(process.pid, number)
        err = let_go(process, tmp_path / "gate")
    assert process.returncode == 1  # no server answered
    assert err.startswith(b"curl: ")
    assert not os.listdir(shim.tmp)
