"""Tools run in what their child runs in: its user, its walls, its workspace."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from supervisor.sandbox.groups import hierarchies
from tests.helpers.command import Outcome, sandhost
from tests.helpers.daemon import daemon
from tests.helpers.toolruns import program
from tests.helpers.toolupgrade import TELL, Tools

pytestmark = pytest.mark.slow

ASK = (
    'curl -sS --unix-socket "${AIFO_TOOLEEXEC_URL#unix://}"'
    ' -H "Authorization: Bearer $AIFO_TOOLEEXEC_TOKEN" -H "X-Aifo-Proto: 2"'
    " --data-urlencode tool=go http://localhost/exec"
)


def run(place: Path, script: str, *options: str, more: str = "") -> Outcome:
    """Run a tool `go` that is a script, from a child in the usual sandbox."""
    (place / "root/bin").mkdir(parents=True, exist_ok=True)
    program(place / "bin", "go", script)
    text = f"[toolexec]\n[sidecar.g]\nkind = 'go'\npath = ['{place}/bin']\n{more}"
    (place / "config.toml").write_text(text)
    assert sandhost("shim", place / "root/bin", "--only", "--tool", "go").status == 0
    words = ("--config", place / "config.toml", "--root", place / "root")
    path = f"PATH={place}/root/bin:/usr/bin:/bin"
    where = ("--cwd", place / "root", "--env", path)
    return sandhost("run", *words, *where, *options, "--", "go", "x")


# ToolExec 5: under the child's uid, limits and grants.
# spec E19
def test_a_tool_has_the_childs_walls(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    script = (
        f"cat {tmp_path}/secret 2>/dev/null && echo ESCAPED; cat given; id -u;"
        " echo made >made && echo more >>given && mkdir -p deep && echo wrote;"
        ' echo x >"$HOME/h" && echo x >"$TMPDIR/t" && echo kept;'
        " grep -c . /proc/net/dev; cat $0 | head -1; exit 7"
    )
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "given").write_text("by the host\n")
    outcome = run(tmp_path, script)
    lines = outcome.out.decode().splitlines()
    assert outcome.status == 7, outcome
    assert "ESCAPED" not in lines
    assert lines[0] == "by the host"
    if os.geteuid() == 0:
        assert int(lines[1]) != 0
        assert (tmp_path / "root" / "made").stat().st_uid == 0
    assert lines[2:4] == ["wrote", "kept"]
    assert (tmp_path / "root" / "made").read_text() == "made\n"


def test_without_a_sandbox_there_are_no_walls(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    outcome = run(tmp_path, f"cat {tmp_path}/secret", "--sandbox", "none")
    assert outcome.out == b"of the host"


def test_a_signal_ends_a_walled_tool(tmp_path: Path) -> None:
    script = "trap 'echo got; exit 5' INT; kill -INT $$; sleep 5"
    outcome = run(tmp_path, script)
    assert (outcome.status, outcome.out) == (5, b"got\n")


def test_python_is_found_behind_the_walls(tmp_path: Path) -> None:
    script = f"exec {sys.executable} -c 'import json; print(json.dumps([1]))'"
    assert run(tmp_path, script).out == b"[1]\n"


LEASE = """
import fcntl, os, signal
signal.signal(signal.SIGIO, signal.SIG_IGN)
open("own", "w").close()
for name in ("own", "given"):
    for command in (1024, 1040):
        try:
            fcntl.fcntl(os.open(name, os.O_RDONLY), command, fcntl.F_WRLCK)
            print("got it")
            raise SystemExit  # the next open(2) would wait for it
        except OSError as why:
            print(why.errno)
"""


# attack 41: nor does a tool, of a file that it has made itself.
@pytest.mark.parametrize(
    ("walls", "expected"), [("auto", ["1"] * 4), ("none", ["got it"])]
)
def test_a_tool_takes_no_lease(tmp_path: Path, walls: str, expected: list[str]) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "given").touch()
    script = f"exec {sys.executable} -I -S - <<'END'\n{LEASE}END"
    said = run(tmp_path, script, "--sandbox", walls).out.decode().split("\n")
    assert said[: len(expected)] == expected  # without walls it is had


# A tool has to have all that its child has; its workspace may lie where that cannot be.
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_layer_that_its_workspace_cannot_have_is_said_to_be_that(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    program(tmp_path / "bin", "go", "echo ran")
    config = tmp_path / "config.toml"
    path = f"path = ['{tmp_path}/bin']"
    config.write_text(f"[toolexec]\n[sidecar.g]\nkind = 'go'\n{path}\n")
    mounted = ("unshare", "-m", "sh", "-c", f'mount -t ramfs none {root} && exec "$@"')
    tried = subprocess.run([*mounted, "sh", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(tried.stderr.decode())
    outcome = sandhost(
        "run", "--config", config, "--root", root, "--cwd", tmp_path / "bin",
        "--", "sh", "-c", ASK, wrapper=(*mounted, "sh"),
    )  # fmt: skip
    said = outcome.out.decode()
    assert "cannot have the layer 'uid' for this child's own paths: " in said
    assert f"{root}: Invalid argument; put it on ext4, xfs, btrfs or tmpfs, or" in said


# ToolExec 5: under the child's limits.
# spec E19
def test_a_tool_has_the_childs_limits(tmp_path: Path) -> None:
    script = (
        f"exec {sys.executable} -c"
        " 'import resource as r\n"
        "print(r.getrlimit(r.RLIMIT_CPU)[0], flush=True)\n"
        'try:\n    b"x" * (1 << 30)\nexcept MemoryError:\n    print("refused")\''
    )
    words = ("--limit", "memory=256M,cpu=17")
    outcome = run(tmp_path, script, *words, more="limits = { cpu = 40 }\n")
    lines = outcome.out.splitlines()
    assert lines[0] == b"17", outcome
    assert lines[1:] == [b"refused"] or outcome.status == 137  # or by its cgroup


# spec HM8: a group bounds both, and the sidecar's own bound is for each of its tools
@pytest.mark.parametrize(("more", "of_tool"), [("", "free"), ("256M", "256")])
def test_addresses_of_a_tool_are_free_but_for_its_sidecars_bound(
    tmp_path: Path, more: str, of_tool: str
) -> None:
    script = (
        f"exec {sys.executable} -c 'import resource as r\n"
        "soft = r.getrlimit(r.RLIMIT_AS)[0]\n"
        'print("free" if soft < 0 else soft >> 20)\''
    )
    limits = f"limits = {{ memory = '{more}' }}\n" if more else ""
    outcome = run(tmp_path, script, "--limit", "memory=512M", more=limits)
    is_bounded = any(h.kind in {"v2", "memory"} for h in hierarchies())
    expected = of_tool if is_bounded or more else "512"
    assert outcome.out.decode().split() == [expected], outcome


APART = """
[toolexec]
listen = ["unix"]
[sidecar.tools]
kind = "c-cpp"
allow = ["sh"]
[policy.one]
root = "{where}/one"
[policy.two]
root = "{where}/two"
[child.one]
command = ["/bin/sh", "-c", '{tell}']
policy = "one"
[child.two]
command = ["/bin/sh", "-c", '{tell}']
policy = "two"
"""


# spec E5, E19: one child's token reaches nothing of another's, on the same sidecar.
@pytest.mark.attack
def test_one_childs_token_reads_no_file_of_anothers() -> None:
    with tempfile.TemporaryDirectory(prefix="two-", dir="/tmp") as name:
        where = Path(name)
        for child in ("one", "two"):
            (where / child).mkdir()
            (where / child / "secret").write_text(f"of {child}")
        with daemon(where, APART.format(where=where, tell=TELL)) as running:
            one, two = Tools(running, where, "one"), Tools(running, where, "two")
            tried = ("secret", "../one/secret", f"{where}/one/secret")
            script = f"for name in {' '.join(tried)}; do cat $name; done 2>/dev/null"
            assert one.run(script).body == b"of one" * len(tried)
            assert two.run(script).body == b"of two"
            socket = one.url.removeprefix("unix://")
            assert two.run(f"test -e {socket} || echo none").body == b"none\n"
            assert running.end() == 0
