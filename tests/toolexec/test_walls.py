"""A tool is as confined as its child: what the child may not, its tool may not."""

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
