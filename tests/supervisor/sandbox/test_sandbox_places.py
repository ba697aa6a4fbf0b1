"""A child's files under other names, and the targets that its links may have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.sandbox.shown_files import ShownFiles
from supervisor.sandbox.view import View
from supervisor.sandbox.visible import view_of
from tests.helpers.command import ENVIRONMENT, Outcome, sandhost
from tests.helpers.spawning import ROOT

pytestmark = pytest.mark.attack


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """Return a directory with two grants of a child, and what is none of its business."""
    for name in ("root/sub", "other/work", "named", "part", "secret/bin", "secret/lib"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "secret" / "key").write_text("s3cret")
    program(tmp_path / "secret" / "bin" / "run")
    tmp_path.chmod(0o755)
    return tmp_path


def program(path: Path, first_line: str = "#!/bin/sh") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(f"{first_line}\n")
    path.chmod(0o755)


def kinds(view: View) -> dict[str, str]:
    return {rule.path: rule.kind for rule in view.rules}


# ---------------------------------------------------------- the names of one directory

MOUNTED = """
mount --bind root named && mount --bind root/sub part && mount --make-rprivate / &&
exec "$@"
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")


def mounted(places: Path, *words: str | Path) -> Outcome:
    """Run a host where the child's root has a second name, and a part of it a third."""
    tried = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip(tried.stderr.decode())
    wrapper = ("unshare", "-m", "sh", "-c", MOUNTED, "sh")
    return sandhost(*words, wrapper=wrapper, cwd=str(places), env=ENVIRONMENT)


# attack 3: it lies in the child's root, whatever that is called
@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("name", ["root/sub", "named/sub", "part"])
def test_a_link_of_the_childs_is_its_own_by_each_name_of_its_root(
    places: Path, name: str
) -> None:
    (places / "root" / "sub" / "work").symlink_to(places / "secret")
    words = ("--root", places / "root", "--cwd", places / name / "work")
    outcome = mounted(places, "run", *words, "--", "cat", "key")
    assert outcome.status == 125, outcome
    assert b"cannot use the working directory" in outcome.err


VIEW = """
import sys
sys.path.insert(0, {source!r})
from supervisor.sandbox.shown_files import ShownFiles
from supervisor.sandbox.visible import view_of
view = view_of({command!r}, ShownFiles({cwd!r}, theirs={{{root!r}: True}}))
for rule in view.rules:
    if rule.path.startswith({top!r}):
        print(rule.path.removeprefix({top!r}), rule.kind, rule.mapped)
print(view.cwd.removeprefix({top!r}))
"""


def seen(places: Path, command: str, cwd: str) -> list[str]:
    """Say what a child sees beneath `places`, with the mounts."""
    text = VIEW.format(
        source=str(ROOT),
        command=command,
        cwd=cwd,
        root=f"{places}/root",
        top=f"{places}/",
    )
    run = ("unshare", "-m", "sh", "-c", MOUNTED, "sh", sys.executable, "-c", text)
    done = subprocess.run(run, capture_output=True, text=True, check=False, cwd=places)
    if "unshare:" in done.stderr:
        pytest.skip(done.stderr)
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


# A path named by the child's command is shown as to others, not as the child's.
@needs_root
@pytest.mark.slow
@pytest.mark.parametrize("name", ["root/sub", "named/sub", "part"])
def test_a_command_of_the_childs_is_its_own_by_each_name(
    places: Path, name: str
) -> None:
    program(places / "root" / "sub" / "run", f"#!{places}/secret/bin/run")
    found = seen(places, f"{places}/{name}/run", "/")
    assert f"{name}/run execute True" in found
    assert "secret/lib execute False" in found


@needs_root
@pytest.mark.slow
def test_a_link_leads_from_one_name_to_another(places: Path) -> None:
    (places / "root" / "link").symlink_to(places / "part")
    assert "part execute True" in seen(places, "/bin/true", f"{places}/named/link")


# ------------------------------------------------------ what a link of its own leads to


@pytest.mark.parametrize("may_read", [True, False])
def test_a_link_leads_into_another_grant_that_may_be_read(
    places: Path, may_read: bool
) -> None:
    root, other = str(places / "root"), str(places / "other")
    (places / "root" / "work").symlink_to(places / "other" / "work")
    theirs = {root: True, other: may_read}
    view = view_of("/bin/true", ShownFiles(f"{root}/work", theirs=theirs))
    assert view.cwd == (f"{other}/work" if may_read else "")
    assert kinds(view).get(f"{other}/work") == ("execute" if may_read else None)


def test_a_link_opens_nothing_in_a_grant_that_may_not_be_read(places: Path) -> None:
    root = str(places / "root")
    (places / "root" / "work").symlink_to("sub")
    theirs = {root: False}
    assert not view_of("/bin/true", ShownFiles(f"{root}/work", theirs=theirs)).cwd
    # Paths that the operator has named are there.
    assert view_of("/bin/true", ShownFiles(f"{root}/sub", theirs=theirs)).cwd


def test_nothing_is_written_by_way_of_a_link_into_another_grant(places: Path) -> None:
    root, other = str(places / "root"), str(places / "other")
    (places / "root" / "own").symlink_to(places / "other" / "work")
    theirs = {root: True, other: True}
    for own, shared in (((f"{root}/own",), ()), ((), (f"{root}/own",))):
        view = view_of(
            "/bin/true", ShownFiles("/", own=own, shared=shared, theirs=theirs)
        )
        assert "write" not in kinds(view).values()


@pytest.mark.slow
async def test_a_child_starts_where_its_link_leads_into_its_other_grant(
    places: Path,
) -> None:
    (places / "root" / "work").symlink_to(places / "other" / "work")
    (places / "other" / "work" / "file").write_text("mine")
    grants = ("--read", places / "other", "--write", places / "other")
    words = ("--root", places / "root", *grants, "--cwd", places / "root" / "work")
    outcome = sandhost("run", *words, "--", "cat", "file")
    assert outcome.out == b"mine", outcome


# ------------------------------------------------------------ programs of the sidecar's


@pytest.fixture
def tools(places: Path) -> Path:
    """Return a sidecar's `path` by a link, in which a link leads to an installation."""
    (places / "py" / "lib").mkdir(parents=True)
    program(places / "py" / "bin" / "python3.11")
    (places / "tools-1" / "bin").mkdir(parents=True)
    (places / "tools-1" / "bin" / "python3").symlink_to("../../py/bin/python3.11")
    (places / "tools").symlink_to("tools-1")
    return places / "tools" / "bin"


def seen_by_tool(places: Path, tools: str) -> dict[str, str]:
    root = str(places / "root")
    tool = f"{root}/.venv/bin/python3"
    return kinds(
        view_of(
            tool,
            ShownFiles(root, programs=(tools,), shared=(root,), theirs={root: True}),
        )
    )


@pytest.mark.parametrize("how", ["file", "directory"])
def test_a_projects_program_may_be_a_link_among_the_sidecars(
    places: Path, tools: Path, how: str
) -> None:
    bin_dir = places / "root" / ".venv" / "bin"
    bin_dir.parent.mkdir()
    if how == "directory":
        bin_dir.symlink_to(tools)
    else:
        bin_dir.mkdir()
        (bin_dir / "python3").symlink_to(tools / "python3")
    found = seen_by_tool(places, str(tools))
    assert found[f"{places}/py/lib"] == found[f"{places}/py/bin"] == "execute"


# attack 3: a sidecar's `path` may name a directory of the project
@pytest.mark.parametrize("what", ["link", "script", "directory"])
def test_env_finds_nothing_for_a_project_where_the_project_has_put_it(
    places: Path, what: str
) -> None:
    found_in, secret = places / "root" / "bin", places / "secret"
    if what == "directory":
        found_in.symlink_to(secret / "bin")
    elif what == "link":
        found_in.mkdir()
        (found_in / "run").symlink_to(secret / "bin" / "run")
    else:
        program(found_in / "run", f"#!{secret}/bin/run")
    program(places / "root" / ".venv" / "bin" / "python3", "#!/usr/bin/env run")
    found = seen_by_tool(places, str(found_in))
    assert not [path for path in found if path.startswith(str(secret))], found


# attack 3: only what is a program there, and only if it is none of the child's
@pytest.mark.parametrize("what", ["no program", "deeper", "theirs", "its own link"])
def test_of_links_among_programs_only_the_operators_programs_are_followed(
    places: Path, tools: Path, what: str
) -> None:
    bin_dir, secret = places / "root" / ".venv" / "bin", places / "secret"
    bin_dir.mkdir(parents=True)
    path = str(tools)
    target = tools / "python3"
    if what == "no program":
        (tools / "key").symlink_to(secret / "key")
        target = tools / "key"
    elif what == "deeper":
        (tools / "all").symlink_to(secret)
        target = tools / "all" / "bin" / "run"
    elif what == "theirs":
        path = str(places / "root" / "bin")
        target = places / "root" / "bin" / "run"
        target.parent.mkdir()
        target.symlink_to(secret / "bin" / "run")
    else:
        (places / "link").mkdir()
        (places / "link" / "run").symlink_to(secret / "bin" / "run")
        path = str(places / "root" / "bin")
        (places / "root" / "bin").symlink_to(places / "link")
        target = places / "link" / "run"
    (bin_dir / "python3").symlink_to(target)
    found = seen_by_tool(places, path)
    assert not [path for path in found if path.startswith(str(secret))], found
