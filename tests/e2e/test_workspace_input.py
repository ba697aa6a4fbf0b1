"""What cannot be a workspace, or cannot be done with one, is told in one line."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.command import SANDHOST, Outcome, sandhost

pytestmark = pytest.mark.slow

of_root = pytest.mark.skipif(os.geteuid() != 0, reason="it mounts file systems")


def run(top: Path, base: Path, *options: str, script: str = "echo x > new") -> Outcome:
    words = ("--state-dir", str(top / "state"), "--workspace", str(base), *options)
    return sandhost("run", *words, "--", "sh", "-c", script)


def ask(top: Path, *words: str) -> Outcome:
    return sandhost("workspace", *words, "--state-dir", str(top / "state"))


def one_line(done: Outcome) -> str:
    """Return the one line of a refusal."""
    (line,) = done.err.decode().splitlines()
    assert line.startswith("sandhost")
    return line


# spec WS19
@pytest.mark.parametrize(("first", "second"), [("", "inner"), ("inner", "")])
def test_a_base_in_another_s_base_is_refused(
    tmp_path: Path, first: str, second: str
) -> None:
    base = tmp_path / "repo"
    (base / "inner").mkdir(parents=True)
    assert run(tmp_path, base / first, "--workspace-name", "w").status == 0
    done = run(tmp_path, base / second, "--workspace-name", "other")
    assert done.status == 125
    assert "the base of another" in one_line(done)
    again = run(tmp_path, base / first, "--workspace-name", "beside")
    assert again.status == 0


# spec WS14
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_workspace_whose_base_is_gone_can_be_discarded(
    tmp_path: Path, *, is_replaced: bool
) -> None:
    base = tmp_path / "repo"
    base.mkdir()
    run(tmp_path, base, "--workspace-name", "w")
    base.rename(tmp_path / "aside")
    if is_replaced:
        base.mkdir()
    assert "discard the workspace" in one_line(ask(tmp_path, "commit", "w"))
    done = ask(tmp_path, "discard", "w", "--yes")
    assert done.status == 0
    assert "its base is gone" in one_line(done)
    assert ask(tmp_path, "list", "--json").out.strip() == b"[]"


# spec WS14
def test_a_workspace_that_a_child_made_unreadable_can_be_discarded(
    tmp_path: Path,
) -> None:
    (tmp_path / "repo").mkdir()
    name = 250 * "d"  # 17 of them are more than a path may have
    script = f"for n in $(seq 17); do mkdir {name}; cd -P {name} || exit 1; done"
    run(tmp_path, tmp_path / "repo", "--workspace-name", "w", script=script)
    assert ask(tmp_path, "diff", "w").status == 2
    done = ask(tmp_path, "discard", "w", "--yes")
    assert done.status == 0
    assert "were not counted: File name too long" in one_line(done)
    assert ask(tmp_path, "list", "--json").out.strip() == b"[]"


def test_an_empty_name_is_no_name(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    done = run(tmp_path, tmp_path / "repo", "--workspace-name", "")
    assert done.status == 125
    assert "workspace name ''" in one_line(done)


# spec WS12
@of_root
def test_a_full_disk_at_a_commit_is_told_and_nothing_changes(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    script = """
    mount -t tmpfs -o size=256k tmpfs repo && echo old > repo/kept
    head -c 200000 /dev/zero > repo/full
    "$1" run --state-dir state --workspace repo --workspace-name w -- \\
      sh -c 'head -c 100000 /dev/zero > new; echo new > kept' 2>/dev/null
    "$1" workspace commit w --state-dir state; echo "status $?"; cat repo/kept; ls repo
    rm repo/full; "$1" workspace commit w --state-dir state; echo "status $?"; cat repo/kept
    """
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", SANDHOST],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    first, second = done.stdout.split("status 2\n")
    assert first == ""
    assert second.startswith("old\nfull\nkept\n")
    assert second.endswith("status 0\nnew\n")
    (line,) = done.stderr.splitlines()
    assert "No space left on device; nothing changed: make room" in line


# spec WS3b
@of_root
def test_a_base_on_an_overlay_is_refused_with_what_works(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "repo"):
        (tmp_path / name).mkdir()
    (tmp_path / "lower/file").write_text("text\n")
    script = """
    mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work repo
    "$1" run --state-dir state --workspace repo -- cat file
    "$1" run --config c.toml --sandbox plain --state-dir state --workspace repo \
      --commit on-success -- sh -c 'echo more >> file'; cat repo/file
    """
    layers = '["mountns", "pidns", "seccomp", "no_new_privs", "landlock"]'
    (tmp_path / "c.toml").write_text(f"[sandbox.plain]\nlayers = {layers}\n")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", SANDHOST],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    line, committed = done.stderr.splitlines()
    assert "an overlay" in line
    assert "on a volume" in line
    assert "1 of 1 committed" in committed
    assert done.stdout == "text\nmore\n"
