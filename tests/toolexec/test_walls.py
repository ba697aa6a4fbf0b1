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
