"""Directories of a daemon and its children, within those that they see and write.

The state directory, the run-time directory and the private directories of every child lie
in each child's working directory, and in the workspace of its tools.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisor.client import HostClient
from tests.helpers.daemon import daemon
from tests.helpers.toolupgrade import TELL, Tools, rest

pytestmark = [pytest.mark.slow, pytest.mark.attack]

CONFIG = """
control = "{where}/control"
[toolexec]
listen = ["unix"]
[sidecar.tools]
kind = "c-cpp"
allow = ["sh"]
workspace = "{around}"
[child.one]
command = ["/bin/sh", "-c", '{tell}']
cwd = "{around}"
[child.two]
command = ["/bin/sh", "-c", 'echo s3cret | sandhost fs put secret; {tell}']
cwd = "{around}"
"""

needs_users = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root gives children users"
)


@contextmanager
def serving(more: str = "", *, tmp: str = "in") -> Iterator[tuple[Path, Tools, Tools]]:
    """Serve two children that see what their host has; gives that and their tools.

    Args:
        more: of the configuration.
        tmp: the host's TMPDIR in that.
    """
    # An address of a unix socket has 107 bytes.
    with tempfile.TemporaryDirectory(prefix="own-", dir="/tmp") as name:
        around, where = Path(name), Path(name) / "in"
        where.mkdir()
        (around / "note").write_text("mine\n")
        (around / "note").chmod(0o600)
        config = CONFIG.format(around=around, where=where, tell=TELL)
        config += more.replace("AROUND", name)
        (around / tmp).mkdir(exist_ok=True)
        env = {"TMPDIR": str(around / tmp)}
        with daemon(where, config, ready=False, env=env) as running:
            running.client = HostClient(str(where / "control"))
            running.hear("READY")
            tools = (Tools(running, where, child) for child in ("one", "two"))
            yield around, *tools  # type: ignore[misc]
            assert running.end() == 0


LOOK = "cat note; find in -type f | sort; cat in/state/*/* in/state/*/*/*; ls -A in/run"
SEEN = ["mine", "in/c.toml", "in/stderr"]


# attack 25, spec E19: a tool writes what its workspace holds, and the host's lies there.
@pytest.mark.nobody
def test_a_tool_sees_nothing_of_its_host_s() -> None:
    with serving() as (around, one, two):
        for tools in (one, two):
            outcome = tools.run(f"({LOOK}) 2>/dev/null").body.decode().splitlines()
            assert outcome == SEEN
        tried = one.run(
            "touch in/state/x in/state/journal/x in/run/x in/state/scratch/x;"
            " rm -rf in/state in/run; mv in/state moved; mv in/run moved; ls in/state"
        ).body.decode()
        assert tried.endswith("scratch\n")
        made = {path.name for path in (around / "in" / "state").iterdir()}
        assert made >= {"journal", "logs", "scratch"}
        assert (around / "in" / "run" / "lock").exists()
        # The child's own directories, and the project's, are there.
        script = (
            "echo kept >$TMPDIR/file && cat $TMPDIR/file; echo made >made; cat made"
        )
        assert one.run(script).body == b"kept\nmade\n"
        assert (around / "made").read_text() == "made\n"


# attack 4: what they lie in is the tool's to move, as all of its workspace.
@pytest.mark.nobody
def test_what_is_moved_is_hidden_where_it_is() -> None:
    with serving() as (around, one, _):
        one.run("mv in moved")
        try:
            one.url = one.url.replace("/in/", "/moved/")
            said = one.run(
                "find moved/state moved/run -type f;"
                " cat moved/state/*/*/* moved/*/lock; echo done"
            ).body.decode()
        finally:
            (around / "moved").rename(around / "in")
        lines = said.splitlines()
        assert lines[-1] == "done"
        assert all("No such file" in line for line in lines[:-1]), said


# attack 25: no way leads to another child's root, but a tool could begin in there.
@needs_users
def test_no_tool_begins_in_what_is_another_child_s() -> None:
    with serving() as (around, one, two):
        (secret,) = around.rglob("secret")
        roots = [path.parent.name for path in secret.parents]
        assert "scratch" in roots

        def begun(tools: Tools, cwd: Path) -> bytes:
            coded = f"&cwd={cwd}".encode()
            whole = tools.request("pwd; cat secret; echo evil >secret")
            head, _, body = whole.partition(b"\r\n\r\n")
            old = b"Content-Length: %d" % len(body)
            new = b"Content-Length: %d" % len(body + coded)
            sock = tools.connect()
            sock.sendall(head.replace(old, new) + b"\r\n\r\n" + body + coded)
            return rest(sock).body

        refused = b"bad request: cwd is not a directory beneath /workspace\n"
        base = secret.parents[1]
        for cwd in (secret.parent, base, base / "tmp"):
            assert begun(one, cwd) == refused, cwd
        for cwd in (secret.parent, base):
            assert begun(two, cwd) == refused, cwd
        assert begun(two, base / "tmp").startswith(bytes(base / "tmp"))
        assert secret.read_text() == "s3cret\n"


OWN = """
[sidecar.own]
kind = "c-cpp"
workspace = "AROUND"
start = ["/bin/sh", "-c", '''
exec 2>&1 >looked
find in -type f
find in/tmp
cat in/state/*/* in/state/*/*/*
echo own >$HOME/file && cat $HOME/file
echo >over
exec sleep 1000
''']
"""


def test_a_sidecar_s_own_process_sees_nothing_of_it_either() -> None:
    with serving(OWN, tmp="in/tmp") as (around, one, _):
        one.running.wait((around / "over").exists)
        lines = (around / "looked").read_text().splitlines()
        (base,) = (path.name for path in (around / "in" / "tmp").glob("sandhost-*"))
        own = f"in/tmp/{base}/run/own"
        assert lines == [
            *sorted({"in/c.toml", "in/stderr"}, key=lines.index),
            "in/tmp", f"in/tmp/{base}", f"in/tmp/{base}/run", own, "own",
        ]  # fmt: skip
        assert (around / own / "file").read_text() == "own\n"


LOOKS = """
[child.looks]
command = ["/bin/sh", "-c", '''
exec 2>&1
cat note
find in ! -path "*sandhost-*" | sort
echo own >$TMPDIR/file && cat $TMPDIR/file
curl -sS --unix-socket "${AIFO_TOOLEEXEC_URL#unix://}" \
  -H "Authorization: Bearer $AIFO_TOOLEEXEC_TOKEN" -H "X-Aifo-Proto: 2" \
  -d tool=sh -d arg=-c --data-urlencode "arg=echo ran" http://localhost/exec
sandhost ps --control in/control
echo over
''']
cwd = "AROUND"
restart = "always"
backoff = "10ms"
max_restarts = 1000
"""


# The third start of one shape is somebody's who waited for it.
def test_a_child_reaches_its_own_again_and_again() -> None:
    with serving(LOOKS) as (_, one, _):
        running = one.running

        def runs() -> list[str]:
            return running.log("looks").decode().split("over\n")[:-1]

        for said in running.wait(lambda: runs() if len(runs()) >= 5 else None):
            mine, *there, own, ran = said.splitlines()[:10]
            assert (mine, own, ran) == ("mine", "own", "ran")
            assert there == [
                "in", "in/c.toml", "in/control", "in/run", "in/state",
                "in/state/scratch", "in/stderr",
            ]  # fmt: skip
            # The socket is to be seen, but who asks is another user than the host.
            assert os.geteuid() or "answers its own user and root only" in said
