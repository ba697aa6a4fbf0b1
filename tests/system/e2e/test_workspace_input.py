"""A wrong workspace, or a wrong order for one, is reported in one line."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.command import SANDHOST, Outcome, sandhost
from tests.system.attacks.test_unprivileged import NOBODY, nobodys_command

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


# spec WS12
@of_root
def test_a_commit_to_a_base_that_is_mounted_read_only_says_so(tmp_path: Path) -> None:
    base = tmp_path / "repo"
    base.mkdir()
    assert run(tmp_path, base, "--workspace-name", "w").status == 0
    script = (
        'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'
    )
    words = (SANDHOST, "workspace", "commit", "w", "--state-dir", tmp_path / "state")
    done = subprocess.run(
        ("unshare", "-m", "sh", "-c", script, "sh", base, *words),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert b"it is mounted read-only; nothing changed: mount it to write" in done.stderr
    assert ask(tmp_path, "commit", "w").status == 0


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


# spec WS5, Forms
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--workspace", "missing"), "No such file or directory"),
        (("--workspace", "repo/inner"), "lie in each other"),
        (("--env", "wrong"), "not a variable"),
        (("--commit", "maybe"), "none of ask, never, on-success"),
        (("--workspace", ""), "it names no directory"),
        (("--workspace", ":direct"), "it names no directory"),
    ],
)
def test_a_run_that_is_refused_leaves_no_workspace(
    tmp_path: Path, options: tuple[str, ...], reason: str
) -> None:
    (tmp_path / "repo/inner").mkdir(parents=True)
    words = ("--state-dir", "state", "--workspace", "repo", *options, "--", "true")
    done = sandhost("run", *words, cwd=tmp_path)
    assert done.status == 125
    assert reason in one_line(done)
    assert json.loads(ask(tmp_path, "list", "--json").out) == []


# spec WS4
@pytest.mark.parametrize(
    ("mode", "setting", "key"),
    [
        ("direct", "guard = ['x']", "guard"),
        ("direct", "limits = { files = 5 }", "limits"),
        ("direct", "durable = false", "durable"),
        ("read-only", "hide = ['x']", "hide"),
    ],
)
def test_a_mode_refuses_what_it_cannot_keep(
    tmp_path: Path, mode: str, setting: str, key: str
) -> None:
    config = tmp_path / "host.toml"
    text = f"[workspace.repo]\nbase = {str(tmp_path)!r}\n{setting}\nmode = {mode!r}\n"
    config.write_text(text)
    done = sandhost("check-config", str(config))
    assert done.status == 2
    assert f"workspace.repo.{key}: mode {mode!r}" in one_line(done)


# spec WS4
def test_names_are_not_guarded_where_the_base_is_written_to(tmp_path: Path) -> None:
    base = tmp_path / "repo"
    base.mkdir()
    where = (base.parent, Path(f"{base}:direct"))
    done = run(*where, "--guard", "new")
    assert done.status == 125
    assert "with guard: mode 'direct' has no layer" in one_line(done)
    assert os.listdir(base) == []


# spec WS7
@pytest.mark.parametrize("command", ["workspace", "ws"])
def test_a_verb_that_is_missing_is_told_in_one_line(command: str) -> None:
    assert "Missing command" in one_line(sandhost(command))


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
    listed = ask(tmp_path, "list", "--json")
    assert "discard the workspace" in one_line(listed)
    (row,) = json.loads(listed.out)
    assert (row["base"], row["state"]) == (str(base), "idle")
    assert (row["child"], row["changed"], row["bytes"]) == ("", None, None)
    assert row["created_at"].endswith("Z")
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


# spec WS5, WS7
def test_a_name_that_begins_like_a_removed_one_is_listed(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    name = "app.discover"
    assert run(tmp_path, tmp_path / "repo", "--workspace-name", name).status == 0
    (row,) = json.loads(ask(tmp_path, "list", "--json").out)
    assert row["name"] == name


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


class Nobody:
    """A user without rights, with an installation and a directory of its own."""

    def __init__(self, top: Path) -> None:
        self.top = top
        python, env = nobodys_command(top)
        self.command = [*python, str(Path(python[-1]).with_name("sandhost"))]
        self.env = {**env, "SANDHOST_STATE": str(top / "state")}


@pytest.fixture(scope="module")
def nobody() -> Iterator[Nobody]:
    """Return that user; its directory is not pytest's, which it may not enter."""
    with tempfile.TemporaryDirectory(prefix="sandhost-tests-") as name:
        yield Nobody(Path(name))


# spec WS12, WS18
@of_root
def test_a_layer_that_has_filled_its_disk_is_looked_at_and_a_part_of_it_taken(
    tmp_path: Path,
) -> None:
    for name in ("repo", "state"):
        (tmp_path / name).mkdir()
    (tmp_path / "repo/kept").write_text("old\n")
    script = """
    mount -t tmpfs -o size=1m tmpfs state
    "$1" run --state-dir state --workspace repo --workspace-name w --commit on-success \
      -- sh -c 'echo new > kept; cat /dev/zero > big 2>/dev/null; :' 2>run
    "$1" workspace diff w --state-dir state --name-only 2>looked
    "$1" workspace commit w --state-dir state 2>refused; echo "$? $(cat repo/kept)"
    "$1" workspace commit w --state-dir state --only big --mine big; echo "$?"
    "$1" workspace commit w --state-dir state; echo "$? $(cat repo/kept)"
    """
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", SANDHOST],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout == "big\nkept\n2 old\n0\ncommitted  kept\n0 new\n"
    (line,) = (tmp_path / "looked").read_text().splitlines()
    assert "nothing was recorded, for the disk is full; make room, or drop" in line
    (line,) = (tmp_path / "refused").read_text().splitlines()
    assert "No space left on device; nothing changed: make room" in line


# spec WS1
@of_root
@pytest.mark.parametrize("is_root", [True, False])
def test_nothing_is_executed_where_the_base_s_mount_forbids_it(
    nobody: Nobody, *, is_root: bool
) -> None:
    command = [SANDHOST] if is_root else nobody.command
    base = nobody.top / f"base-{is_root}"
    base.mkdir()
    script = f"""
    mount -t tmpfs -o noexec,nosuid,nodev tmpfs {base.name}
    printf '#!/bin/sh\\necho ran\\n' > {base.name}/old; chmod 755 {base.name}/old
    chown -R {NOBODY}:{NOBODY} {base.name}
    exec "$@"
    """
    state = "roots" if is_root else "state"
    words = ["--state-dir", str(nobody.top / state), "--workspace", str(base)]
    child = "cp old new; ./old; echo $?; ./new; echo $?; sh ./new"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh",
         *command, "run", *words, "--", "sh", "-c", child],
        cwd=nobody.top, env=nobody.env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "126\n126\nran\n", done.stderr
    assert done.stderr.count("Permission denied") == 2


# spec WS1, WS3a
@of_root
def test_what_others_own_stays_theirs_for_a_host_that_is_not_root(
    nobody: Nobody,
) -> None:
    base = nobody.top / "shared"
    base.mkdir()
    for name, mode in (("shut", 0o600), ("closed", 0o644), ("open", 0o666)):
        (base / name).write_text("old\n")
        (base / name).chmod(mode)
    before = {path.name: path.stat() for path in base.iterdir()}

    def as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*nobody.command, *words],
            cwd=nobody.top, env=nobody.env, capture_output=True, text=True, check=False,
        )  # fmt: skip

    script = "for f in shut closed open; do cat $f; echo x >> $f; done; echo new > new"
    words = ("run", "--workspace", str(base), "--workspace-name", "w")
    refused = as_nobody(*words, "--", "true")
    assert refused.returncode == 125
    (line,) = refused.stderr.splitlines()
    assert "user 0 owns it; run as its owner" in line
    os.chown(base, NOBODY, NOBODY)
    done = as_nobody(*words, "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (0, "old\nold\n")
    reasons = ("Permission denied", "Value too large for defined data type")
    assert [done.stderr.count(reason) for reason in reasons] == [3, 1]
    assert as_nobody("workspace", "commit", "w").stdout == "committed  new\n"
    for name, status in before.items():
        now = (base / name).stat()
        assert (now.st_ino, now.st_uid, now.st_ctime_ns) == (
            status.st_ino, 0, status.st_ctime_ns,
        )  # fmt: skip
    assert (base / "new").stat().st_uid == NOBODY


# spec WS12
def test_a_base_that_is_replaced_while_a_program_runs_is_not_committed_to(
    tmp_path: Path,
) -> None:
    base = tmp_path / "repo"
    base.mkdir()
    words = ("--state-dir", str(tmp_path / "state"), "--workspace", str(base))
    options = ("--workspace-name", "w", "--commit", "on-success")
    script = "echo ready; read go; echo new > new"
    process = subprocess.Popen(
        [SANDHOST, "run", *words, *options, "--", "sh", "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        cwd=tmp_path, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    base.rename(tmp_path / "aside")
    base.mkdir()
    _, err = process.communicate("go\n")
    assert process.returncode == 0
    assert "the base" in err.splitlines()[-1]
    assert os.listdir(tmp_path / "aside") == []
    assert os.listdir(base) == []
    base.rmdir()
    (tmp_path / "aside").rename(base)
    assert ask(tmp_path, "commit", "w").out == b"committed  new\n"


# spec WS3b
@of_root
def test_a_state_directory_on_an_overlay_is_refused_with_the_option(
    tmp_path: Path,
) -> None:
    for name in ("lower", "upper", "work", "kept", "repo"):
        (tmp_path / name).mkdir()
    script = """
    mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work kept
    "$1" run --state-dir kept/state --workspace repo -- true
    """
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", SANDHOST],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 125
    [line] = done.stderr.splitlines()
    assert "use --state-dir on" in line
    assert os.listdir(tmp_path / "upper/state/workspaces") == []


# spec WS3b, WS12
@of_root
def test_a_base_on_an_overlay_is_refused_with_what_works(tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "repo"):
        (tmp_path / name).mkdir()
    (tmp_path / "lower/in").mkdir()
    (tmp_path / "lower/in/file").write_text("text\n")
    # The first change in it copies the base up, and the copy is younger.
    script = """
    mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work repo
    "$1" run --state-dir state --workspace repo/in -- cat file
    "$1" run --config c.toml --sandbox plain --state-dir state --workspace repo/in \
      --workspace-name w --commit never -- sh -c 'echo more >> file'
    touch repo/in/beside
    "$1" workspace commit w --state-dir state; cat repo/in/file
    """
    layers = '["mountns", "pidns", "seccomp", "no_new_privs", "landlock"]'
    (tmp_path / "c.toml").write_text(f"[sandbox.plain]\nlayers = {layers}\n")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", SANDHOST],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    line, *_ = done.stderr.splitlines()
    assert "an overlay" in line
    assert "on a volume" in line
    assert done.stdout == "committed  file\ntext\nmore\n"
