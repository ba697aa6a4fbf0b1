"""`FSPROXY_SOCKET` and the command `sandhost` in a child: programs without FD 3."""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT, SANDHOST, Outcome, sandhost

pytestmark = pytest.mark.slow

of_root = pytest.mark.skipif(os.geteuid() != 0, reason="it takes a host that is root")
with_node = pytest.mark.skipif(shutil.which("node") is None, reason="it takes node")

WALLS = ["auto", "none"]


def run(script: str, *options: str | Path, program: str = sys.executable) -> Outcome:
    """Run a program that reads a script behind `-c` (Node: `-e`)."""
    flag = "-e" if program == "node" else "-c"
    env = {**ENVIRONMENT, "PATH": f"{os.path.dirname(SANDHOST)}:{ENVIRONMENT['PATH']}"}
    return sandhost("run", *options, "--", program, flag, script, env=env)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A private root with a file."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").write_text("hello\n")
    return tmp_path / "root"


BY_SUBPROCESS = """
import os, subprocess, sys
run = subprocess.run
print(run(["sandhost", "fs", "cat", "a"], check=True, capture_output=True).stdout)
script = '''
import os
from vfs.client import Client
client = Client()
print(client.read_all(client.open("a")), Client().listdir(), flush=True)
if os.fork() == 0:
    print(client.llm_quota.__name__, client.stat("a").size, flush=True)
    os._exit(0)
os.wait()
client.ping()
import trio
from vfs.client.aio import AsyncClient
async def main():
    print(await AsyncClient().listdir())
trio.run(main)
'''
sys.stdout.flush()
sys.exit(run([sys.executable, "-c", script]).returncode)
"""


# spec HM6
@pytest.mark.parametrize("walls", WALLS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=pytest.mark.nobody),
        ("--transport", "pipes"),
        ("--dialect", "1"),
    ],
    ids=" ".join,
)
def test_what_python_starts_without_descriptor_3_reaches_the_host(
    root: Path, walls: str, options: tuple[str, ...]
) -> None:
    done = run(BY_SUBPROCESS, "--root", root, "--sandbox", walls, *options)
    listed = b"[('a', 'file')]\n"
    shown = b"b'hello\\n'"
    expected = b"%b\n%b %bllm_quota 6\n%b" % (shown, shown, listed, listed)
    assert (done.status, done.err, done.out) == (0, b"", expected)


# spec HM6: Node puts a channel of its own on descriptor 3.
BY_NODE = """
const { execFileSync, spawn } = require("child_process");
process.stdout.write(execFileSync("sandhost", ["fs", "cat", "a"]));
const pipes = ["ignore", "inherit", "inherit", "ipc"];
spawn("sandhost", ["fs", "cat", "a"], { stdio: pipes }).on("exit", (code) => process.exit(code));
"""


@with_node
@pytest.mark.parametrize("walls", WALLS)
def test_what_node_starts_reaches_the_host(root: Path, walls: str) -> None:
    done = run(BY_NODE, "--root", root, "--sandbox", walls, program="node")
    assert (done.status, done.err, done.out) == (0, b"", b"hello\nhello\n")


# spec HM6: nobody but the child finds a path that works, and it is gone with the child.
def test_a_profile_without_unix_sockets_has_none_and_says_so(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        "[sandbox.tight]\nlayers = ['seccomp']\nunix_sockets = false\n"
        "[policy.run]\nsandbox = 'tight'\n"
    )
    script = (
        "import os, subprocess\n"
        "print('FSPROXY_SOCKET' in os.environ, flush=True)\n"
        "subprocess.run(['sandhost', 'fs', 'ls'])\n"
    )
    env = ("--env", "FSPROXY_SOCKET=/tmp/another")
    done = run(script, "--config", config, *env)
    assert done.out == b"False\n"
    assert b"fs: descriptor 3 is not open, and there is no FSPROXY_SOCKET" in done.err


# spec HM6, A5: a nested child has descriptor 3, and never its parent's socket.
def test_a_nested_child_is_not_told_of_its_parents_socket(root: Path) -> None:
    script = (
        "import os, subprocess, sys\n"
        "nested = 'sandhost fs cat a; echo ${FSPROXY_SOCKET:-none}; exec sandhost fs ls'\n"
        "relay = ['sandhost', 'relay', '--read', 'a', '--', 'sh', '-c', nested]\n"
        "sys.exit(subprocess.run(relay).returncode)\n"
    )
    done = run(script, "--root", root)
    assert done.out == b"hello\nnone\n", done
    assert b"'.': VFS access denied" in done.err


SEEKING = """
import glob, os

run_dir = os.path.join(os.path.dirname(os.path.dirname(os.environ["TMPDIR"])), "run")
found = []
try:
    found += os.listdir(run_dir)
except OSError as why:
    print(type(why).__name__)
for path in (*glob.glob("/proc/[0-9]*/environ"), "/proc/net/unix"):
    try:
        with open(path, "rb") as file:
            found += [path] * (NAME in file.read())
    except OSError:
        pass
print(found)
"""


# attack 37: a nested child has Landlock alone, and the directory is in its reach; it would
# have to know the name.
@pytest.mark.parametrize("network", ["none", "host"])
def test_a_nested_child_does_not_find_its_parents_socket(network: str) -> None:
    script = (
        "import os, subprocess, sys\n"
        "path = os.environ['FSPROXY_SOCKET']\n"
        "assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]\n"
        "name = os.path.basename(path)\n"
        # Cut in two, or it would find its own arguments.
        "cut = f'({name[:6]!r} + {name[6:]!r}).encode()'\n"
        f"seeking = {SEEKING!r}.replace('NAME', cut)\n"
        "relay = ['sandhost', 'relay', '--', sys.executable, '-c', seeking]\n"
        "sys.exit(subprocess.run(relay).returncode)\n"
    )
    done = run(script, "--network", network)
    assert done.out == b"PermissionError\n[]\n", done


LEAKED = """
import os, sys, trio
from vfs.relay import open_relay

WORDS = ("sandhost", "fs", "cat", "a")

async def main():
    async with open_relay() as relay:
        nested = await relay.new_client({"read": [], "write": []})
        fd = nested.child_end.fileno()
        script = f"import os; os.dup2({fd}, 3); os.execvp('sandhost', {WORDS})"
        words = [sys.executable, "-c", script]
        process = await trio.run_process(words, pass_fds=[fd], check=False)
        nested.child_end.close()
        print(process.returncode)

trio.run(main)
"""


# spec A5: descriptor 3 is a relay's, and is taken although the variable is another's.
@pytest.mark.parametrize("walls", WALLS)
def test_a_relays_descriptor_3_counts_more_than_the_variable(
    root: Path, walls: str
) -> None:
    done = run(LEAKED, "--root", root, "--sandbox", walls)
    assert done.out == b"1\n", done
    assert b"hello" not in done.out


# attack 24: a sibling that knows the path.
@pytest.mark.nobody
def test_a_sibling_cannot_connect(root: Path) -> None:
    first = "echo $FSPROXY_SOCKET; while echo; do sleep 0.02; done 2>/dev/null"
    second = (
        "import errno, os, socket, sys\n"
        "path = sys.stdin.readline().strip()\n"
        "own = os.environ['FSPROXY_SOCKET']\n"
        "assert path.startswith('/') and path != own\n"
        "for each in (path, own):\n"
        "    found = socket.socket(socket.AF_UNIX).connect_ex(each)\n"
        "    print(errno.errorcode.get(found, found))\n"
    )
    done = sandhost(
        "pipeline", "--", "sh", "-c", first, ":::", sys.executable, "-c", second
    )
    refused, own = done.out.split()
    assert refused in {b"ENOENT", b"EACCES"}, done
    assert own == b"0"


@pytest.mark.nobody
def test_the_path_is_removed_at_the_end() -> None:
    done = run("import os; print(os.environ['FSPROXY_SOCKET'])", "--sandbox", "none")
    path = Path(os.fsdecode(done.out.strip()))
    assert path.is_absolute()
    assert not path.exists()


def test_a_path_too_long_for_others_is_none_for_these_clients(root: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="d" * 90, dir="/tmp") as name:
        env = {**ENVIRONMENT, "TMPDIR": name}
        script = "import subprocess as s; s.run(['sandhost', 'fs', 'cat', 'a'])"
        words = ("--root", root, "--", sys.executable, "-c", script)
        done = sandhost("run", *words, env=env)
    assert (done.status, done.out) == (0, b"hello\n"), done


# spec HM6: on the PATH of its root, whatever its host's PATH is.
@pytest.mark.nobody
def test_the_command_is_in_usr_local_bin(root: Path) -> None:
    script = "command -v sandhost; sandhost fs cat a; ls /usr/local/bin"
    env = {**ENVIRONMENT, "PATH": "/usr/local/bin:/usr/bin:/bin"}
    done = sandhost("run", "--root", root, "--", "sh", "-c", script, env=env)
    first, second, *listed = done.out.splitlines()
    assert (first, second) == (b"/usr/local/bin/sandhost", b"hello"), done
    # The machine's own stay there.
    assert {*map(os.fsencode, os.listdir("/usr/local/bin"))} <= set(listed)
    assert not os.path.exists("/usr/local/bin/sandhost")


# A project's module of the same name is not the command's.
def test_the_command_takes_no_module_of_the_child(root: Path, tmp_path: Path) -> None:
    (tmp_path / "vfs").mkdir()
    (tmp_path / "vfs" / "__init__.py").write_text("raise SystemExit('another vfs')")
    script = "PYTHONPATH=. /usr/local/bin/sandhost fs cat a"
    words = ("--root", root, "--cwd", tmp_path, "--", "sh", "-c", script)
    assert sandhost("run", *words).out == b"hello\n"
