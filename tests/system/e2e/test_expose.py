"""`--expose`, and grants to read: what a child's own system calls see of the host."""

from pathlib import Path

import pytest
import trio

from supervisor.children.specs import policy_options
from supervisor.config.policy import PolicySection
from tests.helpers.command import SANDHOST, Outcome, sandhost
from tests.system.e2e.test_check_config import check, faults

pytestmark = pytest.mark.slow

WALLS = {
    "auto": "",
    "paths": '[sandbox.paths]\nlayers = ["landlock", "seccomp"]\n',
    "mounts": '[sandbox.mounts]\nlayers = ["userns", "mountns", "uid", "seccomp"]\n',
}
"""Profiles by what keeps a child from files: all of it, Landlock alone, mounts alone."""


@pytest.fixture(params=WALLS)
def walls(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    """Options for one of the profiles."""
    config = tmp_path / "walls.toml"
    config.write_text(WALLS[request.param])
    return "--config", str(config), "--sandbox", request.param


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory of the operator's, with what nobody else may read."""
    top = tmp_path / "tree"
    (top / "sub").mkdir(parents=True)
    (top / "sub" / "note").write_text("text\n")
    (top / "sub" / "note").chmod(0o600)
    (top / "tool").write_text("#!/bin/sh\necho ran\n")
    (top / "tool").chmod(0o700)
    return top


def run(script: str, *options: str | Path) -> Outcome:
    """Run a shell child at the top of the file system, in which `$0` is the command."""
    words = (*options, "--cwd", "/")
    return sandhost("run", *words, "--", "sh", "-c", script, SANDHOST)


def written(tree: Path) -> str:
    """Return a script that tries to change a tree, and says what of that it could."""
    tries = (
        f"echo x > {tree}/new",
        f"echo x >> {tree}/sub/note",
        f"rm {tree}/tool",
        f"mv {tree}/sub {tree}/other",
        f"chmod 777 {tree}/tool",
    )
    return "; ".join(f"({each}) 2>/dev/null && echo done" for each in tries)


# spec HM5
@pytest.mark.nobody
def test_what_is_exposed_is_read_and_executed_and_never_written(
    walls: tuple[str, ...], tree: Path
) -> None:
    outcome = run(f"cat {tree}/sub/note; {tree}/tool", *walls, "--expose", tree)
    assert outcome.out == b"text\nran\n", outcome
    before = sorted(tree.rglob("*"))
    # Landlock knows no modes: the child is the files' own user there.
    keep = "chmod" if "paths" in walls else "nothing"
    script = "; ".join(p for p in written(tree).split("; ") if keep not in p)
    assert run(script, *walls, "--expose", tree).out == b""
    assert sorted(tree.rglob("*")) == before
    assert (tree / "sub" / "note").read_text() == "text\n"


# spec HM5
def test_what_is_not_exposed_is_not_seen(walls: tuple[str, ...], tree: Path) -> None:
    script = f"cat {tree}/sub/note; {tree}/tool"
    assert run(script, *walls, "--expose", tree / "tool").out == b"ran\n"
    assert run(script, *walls).out == b""


# spec HM5
def test_a_link_that_is_exposed_works_as_a_link(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("tree/sub")
    script = f"cat {tmp_path}/link/note {tree}/sub/note; ls {tree}"
    outcome = run(script, "--expose", tmp_path / "link")
    assert outcome.out == b"text\ntext\nsub\n"


# spec HM5
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("gone", "there is no 'gone'; make it first"),
        ("/", "'/' holds what is the host's own; name a directory in it"),
        ("/proc", "'/proc' lies in /proc, of which a child has its own; leave it out"),
        ("/proc/self/root", "'/' holds what is the host's own"),
        ("/sys/kernel", "lies in /sys"),
        ("/dev/null", "'/dev/null' is neither a file nor a directory; name one"),
        ("/run", "lies in /run"),
        ("", "not a path: ''"),
    ],
)
def test_what_no_child_may_see_is_refused(tmp_path: Path, path: str, why: str) -> None:
    outcome = sandhost("run", "--expose", path, "--", "true", cwd=tmp_path)
    assert outcome.status == 125
    assert outcome.said("sandhost run: --expose: ")
    assert outcome.said(why)
    fault = ("policy.a.expose", path and why)
    found = faults(check(tmp_path, f"[policy.a]\nexpose = ['{path}']\n", "--json"))
    assert [key for key, _ in found] == [fault[0]]
    assert why in found[0][1]


# spec HM5
def test_where_workspaces_are_kept_is_refused(tree: Path) -> None:
    env = {"SANDHOST_STATE": str(tree / "sub")}
    for path in (tree, tree / "sub", tree / "sub" / "note"):
        words = ("run", "--expose", path, "--", "true")
        outcome = sandhost(*words, env={"PATH": "/usr/bin:/bin", **env})
        assert outcome.said("no child may see")


# spec HM5
def test_a_file_of_a_key_is_neither_exposed_nor_read(
    walls: tuple[str, ...], tree: Path, tmp_path: Path
) -> None:
    key = tree / "sub" / "key"
    key.write_text("sk-of-nobody\n")
    key.chmod(0o600)
    config = tmp_path / "walls.toml"
    config.write_text(
        f'{config.read_text()}[llm]\nbase_url = "http://127.0.0.1:9/v1"\n'
        f'api_key_file = "{key}"\ndefault_model = "m"\n'
    )
    quiet = (*walls, "--log-level", "error")
    assert run("true", *quiet, "--expose", key).said("no child may see")
    script = f"cat {tree}/sub/note {key}; true"
    can_hide = "paths" not in walls
    for option in ("--expose", "--read"):
        outcome = run(script, *quiet, option, tree)
        assert b"sk-of" not in outcome.out + outcome.err
        assert outcome.out == (b"text\n" if can_hide else b"")
        assert outcome.status == (
            125 if (option, can_hide) == ("--expose", False) else 0
        )


# spec HM5
def test_a_grant_to_read_is_seen_and_neither_written_nor_executed(
    walls: tuple[str, ...], tree: Path
) -> None:
    script = f"cat {tree}/sub/note; {tree}/tool; $0 fs cat {tree}/sub/note"
    outcome = run(script, *walls, "--top-level", "--read", tree)
    assert outcome.out == b"text\ntext\n", outcome
    assert run(f"echo x > {tree}/new; true", *walls, "--read", tree).status == 0
    assert not (tree / "new").exists()


# spec HM5
def test_a_grant_to_write_is_not_seen(walls: tuple[str, ...], tree: Path) -> None:
    script = f"cat {tree}/sub/note; echo x > {tree}/sub/note"
    assert run(script, *walls, "--write", tree).out == b""
    assert (tree / "sub" / "note").read_text() == "text\n"
    help_text = sandhost("run", "--help").out.decode()
    assert "Grant to write, by FD 3 alone" in help_text


# spec HM5, attack 3: who may write there can make one
def test_a_link_where_a_child_may_write_exposes_nothing(
    tree: Path, tmp_path: Path
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link").symlink_to(tree)
    options = ("--write", tmp_path / "open", "--expose", tmp_path / "open" / "link")
    outcome = run("true", *options)
    assert outcome.status == 125
    assert outcome.said("a link on its way may be a child's; name what it leads to")


# spec HM5: the workspace is what is written
@pytest.mark.nobody
def test_a_workspace_stays_one_beneath_what_is_exposed(
    tree: Path, tmp_path: Path
) -> None:
    state = ("--state-dir", tmp_path / "state", "--workspace", tree / "sub")
    script = f"echo new > {tree}/sub/note && cat {tree}/sub/note && {tree}/tool"
    outcome = run(script, *state, "--expose", tree)
    assert outcome.out == b"new\nran\n", outcome
    assert (tree / "sub" / "note").read_text() == "text\n"
    within = run("true", *state, "--expose", tree / "sub" / "note")
    assert within.status == 125
    assert b"which is seen anyhow; leave it out" in within.err


# spec HM5: layers of other workspaces lie there
@pytest.mark.nobody
def test_where_this_workspace_is_kept_is_not_seen(tree: Path, tmp_path: Path) -> None:
    state = tmp_path / "kept"
    options = ("--state-dir", state, "--workspace", tree / "sub")
    script = (
        f"echo new > {tree}/sub/note; cat {tree}/sub/note; ls {state}; ls {tmp_path}"
    )
    shown = run(script, *options, "--expose", tmp_path)
    assert shown.out == b"new\nkept\ntree\n", shown
    refused = run(script, *options, "--expose", state)
    assert refused.status == 125
    assert b"no child may see" in refused.err
    directory = sandhost("run", *options, "--cwd", tmp_path, "--", "ls", state)
    assert (directory.status, directory.out) == (0, b"")


# spec HM5
def test_a_nested_child_sees_of_that_what_it_is_shown(
    walls: tuple[str, ...], tree: Path
) -> None:
    if "mounts" in walls:
        pytest.skip("without Landlock a nested child has no walls of its own")
    nested = f"-- cat {tree}/sub/note"
    script = (
        f"$0 relay {nested}; $0 relay --expose {tree}/sub {nested};"
        f" $0 relay --read {tree}/sub {nested}; $0 relay --expose /proc -- true"
    )
    # Of a command whose packages lie elsewhere, as the one that is not root's here.
    packages = Path(trio.__file__).parents[1]
    options = ("--expose", tree, "--read", tree, "--expose", packages)
    outcome = run(script, *walls, *options)
    assert outcome.out == b"text\ntext\n", outcome
    assert outcome.status == 125
    assert b"sandhost relay: --expose: '/proc' lies in /proc" in outcome.err


# spec HM5
def test_a_policy_exposes(tree: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f"[policy.run]\nexpose = ['{tree}/sub']\n")
    outcome = run(f"cat {tree}/sub/note", "--config", config)
    assert outcome.out == b"text\n"
    both = run(f"{tree}/tool", "--config", config, "--expose", tree / "tool")
    assert both.out == b"ran\n"


# spec HM5: a reload compares the options of each child
def test_what_a_policy_exposes_is_among_its_options() -> None:
    one, other = (policy_options(PolicySection(expose=e)) for e in (["/opt"], []))
    assert (one.expose, one == other) == (("/opt",), False)


# spec HM5, HM1: what a daemon has for itself is neither shown nor given as a HOME
@pytest.mark.parametrize("key", ["expose", "home"])
def test_a_policy_reaches_nothing_of_the_daemon_s(tmp_path: Path, key: str) -> None:
    (tmp_path / "state").mkdir()
    where = f"{tmp_path}/state"
    value = f"['{where}']" if key == "expose" else f"'{where}'"
    text = f"[host]\nstate_dir = '{where}'\n[policy.a]\n{key} = {value}\n"
    found = faults(check(tmp_path, text, "--json"))
    assert [at for at, _ in found] == [f"policy.a.{key}"]
    assert "its children could reach other children's files" in found[0][1]
