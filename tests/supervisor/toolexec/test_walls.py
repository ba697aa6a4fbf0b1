"""A tool is as confined as its child: what the child may not, its tool may not."""

import os
from pathlib import Path

import pytest

from tests.helpers.command import sandhost

pytestmark = pytest.mark.slow

CONFIG = '[toolexec]\n[sidecar.c]\nkind = "c-cpp"\n'
ASK = (
    'curl -sS --unix-socket "${AIFO_TOOLEEXEC_URL#unix://}"'
    ' -H "Authorization: Bearer $AIFO_TOOLEEXEC_TOKEN" -H "X-Aifo-Proto: 2"'
    ' --data-urlencode tool=make --data-urlencode "arg=--eval=all:;@%s"'
    " http://localhost/exec"
)


@pytest.mark.attack
def test_a_tool_is_in_its_childs_sandbox(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")
    (tmp_path / "c.toml").write_text(CONFIG)
    (tmp_path / "here").mkdir()
    script = ASK % f"id -u; grep Seccomp: /proc/self/status; cat {tmp_path}/secret"
    script += f"; id -u; grep Seccomp: /proc/self/status; cat {tmp_path}/secret"
    words = ("--config", str(tmp_path / "c.toml"), "--cwd", str(tmp_path / "here"))
    outcome = sandhost("run", "--sandbox", "auto", *words, "--", "sh", "-c", script)
    assert b"s3cret" not in outcome.out
    tool, child = outcome.out.splitlines()[:2], outcome.out.splitlines()[-2:]
    assert tool == child
    free = sandhost("run", "--sandbox", "none", *words, "--", "sh", "-c", script)
    assert free.out.count(b"s3cret") == 2


SET_ID = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, call):
    try:
        call()
    except OSError as why:
        print(name, why.errno)
    else:
        print(name, "made")
def openat2():
    how = (ctypes.c_uint64 * 3)(os.O_CREAT | os.O_WRONLY, 0o4755, 0)
    if libc.syscall(437, -100, b"new2", how, 24) < 0:
        raise OSError(ctypes.get_errno(), "")
with open("file", "w"):
    pass
for bit in (0o4000, 0o2000):
    tried("chmod", lambda: os.chmod("file", bit | 0o755))
    tried("fchmodat", lambda: os.chmod("file", bit | 0o755, dir_fd=os.open(".", 0)))
    tried("fchmod", lambda: os.fchmod(os.open("file", 0), bit | 0o755))
    tried("open", lambda: os.open("new", os.O_CREAT | os.O_WRONLY, bit | 0o755))
    tried("tmpfile", lambda: os.open(".", os.O_TMPFILE | os.O_WRONLY, bit | 0o755))
    tried("mknod", lambda: os.mknod("node", bit | 0o100755))
tried("openat2", openat2)
tried("usual", lambda: os.chmod("file", 0o755))
"""


# attack 7: what a tool makes in its child's root belongs to the host's user on the disk
@pytest.mark.attack
def test_a_tool_makes_nothing_set_user_id(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[toolexec]\n[sidecar.py]\nkind = "python"\n')
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "try.py").write_text(SET_ID)
    words = ("--config", tmp_path / "c.toml", "--root", tmp_path / "root")
    script = f"{SECRETS}\nrun python3 try.py"
    outcome = sandhost("run", *words, "--cwd", "/usr", "--", "sh", "-c", script)
    said = [line.split() for line in outcome.out.splitlines()]
    assert said[-2:] == [[b"openat2", b"38"], [b"usual", b"made"]], outcome
    assert {answer for _, answer in said[:-2]} == {b"1"}
    bits = {path.name: path.stat().st_mode for path in (tmp_path / "root").iterdir()}
    assert not [name for name, mode in bits.items() if mode & 0o6000]


def test_a_tool_writes_in_its_childs_root(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    script = ASK % "mkdir sub; cd sub; touch made; pwd; ls"
    words = ("--config", str(tmp_path / "c.toml"), "--cwd", str(tmp_path))
    outcome = sandhost("run", "--sandbox", "auto", *words, "--", "sh", "-c", script)
    where, made = outcome.out.splitlines()
    assert where.split(b"/")[-2:] == [b"root", b"sub"]
    assert made == b"made"


SECRETS = """\
make_venv="
import os, sys
os.makedirs('.venv/bin', exist_ok=True)
with open('.venv/bin/python3', 'w') as file:
    file.write('#!/bin/sh\\\\ncat SECRET/key\\\\necho x >SECRET/new\\\\n')
os.chmod('.venv/bin/python3', 0o755)
"
run() {
  tool=$1; shift
  for word; do shift; set -- "$@" --data-urlencode "arg=$word"; done
  curl -sS --unix-socket "${AIFO_TOOLEEXEC_URL#unix://}" \\
    -H "Authorization: Bearer $AIFO_TOOLEEXEC_TOKEN" -H "X-Aifo-Proto: 2" \\
    --data-urlencode "tool=$tool" "$@" http://localhost/exec
}
"""


@pytest.mark.attack
@pytest.mark.parametrize("sandbox", ["auto", "required"])
def test_a_project_shows_its_tools_nothing_of_the_host(
    tmp_path: Path, sandbox: str
) -> None:
    # attacks 3 and 24: links of the child's, followed by a host that is root
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o755)
    (secret / "key").write_text("s3cret")
    (tmp_path / "c.toml").write_text('[toolexec]\n[sidecar.py]\nkind = "python"\n')
    (tmp_path / "here").mkdir()
    script = (
        SECRETS.replace("SECRET", str(secret))
        + f"""
run python3 -c "$make_venv"
run python -c "import os; os.symlink('{secret}', '.venv/lib')"
run python3
mine=$(dirname "${{AIFO_TOOLEEXEC_URL#unix://}}")/sidecar-py
mv "$mine" "$mine.old"; ln -s {secret} "$mine"
run python -c "print(open('{secret}/key').read())"
run pip --version | tail -n 1
"""
    )
    words = ("--config", str(tmp_path / "c.toml"), "--cwd", str(tmp_path / "here"))
    outcome = sandhost("run", "--sandbox", sandbox, *words, "--", "sh", "-c", script)
    assert b"s3cret" not in outcome.out
    assert os.listdir(secret) == ["key"]
    assert b"No such file" in outcome.out, "the tool ran, and saw nothing"
    assert outcome.out.count(b"Not a directory") == 2, "the link is refused by name"


@pytest.mark.attack
def test_a_pipe_in_a_tools_place_holds_up_nobody(tmp_path: Path) -> None:
    # attack 8
    (tmp_path / "c.toml").write_text('[toolexec]\n[sidecar.py]\nkind = "python"\n')
    (tmp_path / "here").mkdir()
    script = (
        SECRETS
        + """
run python -c "import os; os.makedirs('.venv/bin'); os.mkfifo('.venv/bin/pip', 0o755)"
run pip --version
run python -c "print('still there')"
"""
    )
    words = ("--config", str(tmp_path / "c.toml"), "--cwd", str(tmp_path / "here"))
    outcome = sandhost("run", "--sandbox", "auto", *words, "--", "sh", "-c", script)
    assert outcome.out.endswith(b"still there\n")
