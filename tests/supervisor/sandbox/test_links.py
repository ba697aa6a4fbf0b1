"""Names that a child has laid out for a host that is root.

Where they lead, how long.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from supervisor.sandbox import links as sandbox_links
from supervisor.sandbox import programs as sandbox_programs
from supervisor.sandbox import visible as sandbox_paths
from supervisor.sandbox.links import Links
from supervisor.sandbox.scratch import remove_tree
from supervisor.sandbox.shown_files import ShownFiles
from supervisor.sandbox.view import View
from supervisor.sandbox.visible import view_of

pytestmark = pytest.mark.attack


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a child's root with a program, beside what is none of its business."""
    for name in ("secret/bin", "secret/lib", "root/.venv/bin", "root/pkg"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "secret" / "key").write_text("s3cret")
    program(tmp_path / "secret" / "bin" / "run")
    program(tmp_path / "root" / ".venv" / "bin" / "python3")
    return tmp_path / "root"


def program(path: Path, first_line: str = "#!/bin/sh") -> None:
    path.unlink(missing_ok=True)
    path.write_text(f"{first_line}\n")
    path.chmod(0o755)


def links(*theirs: Path, seen: tuple[str, ...] = ("/usr",)) -> Links:
    """Return names as a child has them."""
    found = Links((("/bin", "usr/bin"),), lambda: seen)
    found.belong(dict.fromkeys(map(str, theirs), True))
    return found


def kinds(view: View) -> dict[str, str]:
    return {rule.path: rule.kind for rule in view.rules}


def tool(root: Path, name: str, *program_files: str) -> View:
    top = str(root)
    return view_of(
        f"{root}/{name}",
        ShownFiles(top, programs=program_files, shared=(top,), theirs={top: True}),
    )


# ------------------------------------------------------------- as the kernel does


@pytest.mark.parametrize(
    "name",
    [
        "a/b",
        "a/b/../c",
        "l/../c",
        "l/x",
        "a/./b/",
        "m",
        "m/../deep",
        "l2",
        "abs/x",
        "up",
    ],
)
def test_a_name_leads_where_the_kernel_goes(tmp_path: Path, name: str) -> None:
    for made in ("a/b", "a/c", "far/deep", "far/c"):
        (tmp_path / made).mkdir(parents=True)
    (tmp_path / "far" / "deep" / "x").touch()
    (tmp_path / "l").symlink_to("far/deep")  # l/.. is far
    (tmp_path / "m").symlink_to("l/../c")
    (tmp_path / "l2").symlink_to("l/x")
    (tmp_path / "abs").symlink_to(tmp_path / "l")
    (tmp_path / "up").symlink_to("..")
    path = f"{tmp_path}/{name}"
    assert links().walk(path).real == os.path.realpath(path)


@pytest.mark.parametrize(
    "name", ["file/..", "gone/..", "loop", "file/x", "relative", "dangling"]
)
def test_what_leads_nowhere_for_the_kernel_leads_nowhere(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("gone")
    path = "relative" if name == "relative" else f"{tmp_path}/{name}"
    assert links().walk(path) == sandbox_links.NOWHERE


# attack 3: 2**39 steps, for a resolver with 40 links for each name on the way
def test_links_that_double_are_followed_no_more_than_40_times(project: Path) -> None:
    bin_dir = project / ".venv" / "bin"
    (bin_dir / "python3").unlink()
    (bin_dir / "python3").symlink_to("l0")
    for number in range(39):
        (bin_dir / f"l{number}").symlink_to(f"l{number + 1}/l{number + 1}")
    (bin_dir / "l39").symlink_to(".")
    steps = links(project)
    assert steps.walk(f"{bin_dir}/python3") == sandbox_links.NOWHERE
    assert sandbox_links.STEPS - steps.steps_left < 1000
    assert kinds(tool(project, ".venv/bin/python3"))[str(project)] == "write"


def test_names_of_one_child_have_so_many_steps_together(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(200):
        deep /= "a"
    deep.mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/" * 200)
    names = links()
    taken = [names.walk(f"{tmp_path}/link").real for _ in range(100)]
    assert taken[0] == str(deep)
    assert taken[-1] == "", "used up"
    assert names.walk(str(deep)).real == str(deep), "what has no links takes none"


# 600 levels are 1,200 bytes: no name is too long, and no recursion as deep
def test_a_project_may_lie_deep(project: Path) -> None:
    deep = f"{project}{'/a' * 600}"
    (project / "link").symlink_to(deep)
    subprocess.run(["mkdir", "-p", f"{deep}/.venv/bin"], check=True)
    program(Path(f"{deep}/.venv/bin/python3"))
    top = (str(project),)
    try:
        for way in (deep, f"{project}/link"):
            view = view_of(f"{way}/.venv/bin/python3", ShownFiles(way, shared=top))
            assert kinds(view)[str(project)] == "write"
        view = view_of(
            "/bin/true", ShownFiles(f"{project}/link", theirs={str(project): True})
        )
        assert view.cwd == deep
    finally:
        assert remove_tree(project) is None


# --------------------------------------------------------- what a child's links give


# attack 3: a place that it sees and may not write, under the name of one that it may
@pytest.mark.parametrize("how", ["own", "shared"])
@pytest.mark.parametrize("to", ["host", "/usr", "secret", "elsewhere"])
def test_nothing_is_written_by_way_of_a_childs_link(
    tmp_path: Path, project: Path, how: str, to: str
) -> None:
    run = tmp_path / "run"
    (run / "other").mkdir(parents=True)
    host = str(Path(sandbox_paths.__file__).parent)
    target = {
        "host": host,
        "secret": f"{tmp_path}/secret",
        "elsewhere": f"{run}/other",
    }
    state = run / "sidecar-py"
    state.symlink_to(target.get(to, to))
    theirs = dict.fromkeys((str(run), str(project)), True)
    given = {how: (str(state),)}
    view = view_of(
        "/bin/true",
        ShownFiles(
            "/", own=given.get("own", ()), shared=given.get("shared", ()), theirs=theirs
        ),
    )
    assert "write" not in kinds(view).values()


def test_what_is_seen_anyhow_is_seen_no_better(project: Path) -> None:
    (project / "work").symlink_to("/etc/ssl/certs")
    (project / "cpu").symlink_to("/sys/devices/system/cpu/cpu0")
    before = kinds(view_of("/bin/true", ShownFiles("/")))
    for name in ("work", "cpu"):
        theirs = {str(project): True}
        view = view_of("/bin/true", ShownFiles(f"{project}/{name}", theirs=theirs))
        assert view.cwd == os.readlink(project / name)
        assert kinds(view) == before


def test_a_childs_link_leads_to_nothing_of_the_hosts_proc(project: Path) -> None:
    for target in ("/proc/self/cwd", "/proc/self", f"/proc/{os.getpid()}/fd"):
        (project / "work").unlink(missing_ok=True)
        (project / "work").symlink_to(target)
        theirs = {str(project): True}
        view = view_of("/bin/true", ShownFiles(f"{project}/work", theirs=theirs))
        assert view.cwd == ""


# attack 24: whether something is there is not looked at where the child may not look
@pytest.mark.parametrize(
    "target", ["SECRET/key", "SECRET/gone", "SECRET/bin/../key", "../../../secret/key"]
)
def test_nothing_is_looked_at_that_the_child_may_not_see(
    project: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    secret = str(project.parent / "secret")
    (project / ".venv" / "bin" / "pip").symlink_to(target.replace("SECRET", secret))
    looked: list[str] = []
    really = os.open

    def opened(path: str, *args: int, **more: int) -> int:
        looked.append(path)
        return really(path, *args, **more)

    names = links(project)
    monkeypatch.setattr(os, "open", opened)
    assert names.walk(f"{project}/.venv/bin/pip") == sandbox_links.NOWHERE
    assert not {"secret", "key", "gone"} & set(looked)


# attack 4: above a directory that is moved meanwhile lies something else
def test_a_directory_that_is_moved_meanwhile_leads_nowhere(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "a" / "b" / "c").mkdir(parents=True)
    (project / "a" / "secret").mkdir()
    (project / "link").symlink_to("a/b/c/../../secret")
    names = links(project)
    assert names.walk(f"{project}/link").real == f"{project}/a/secret"
    looked: list[str] = []
    really = os.open

    def opened(path: str, *args: int, **more: int) -> int:
        fd = really(path, *args, **more)
        looked.append(os.readlink(f"/proc/self/fd/{fd}"))
        if path == "c":
            (project / "a" / "b" / "c").rename(project / "c")
        return fd

    monkeypatch.setattr(os, "open", opened)
    assert names.walk(f"{project}/link") == sandbox_links.NOWHERE
    assert f"{project.parent}/secret" not in looked


# --------------------------------------------------------------- "#!" lines


@pytest.mark.parametrize(
    "line",
    [
        "#!PROJECT/env ..",
        "#!/usr/bin/env ..",
        "#!/usr/bin/env .",
        "#!/usr/bin/env private",
        "#!/usr/bin/env ../private",
        "#!PROJECT/env run",
    ],
)
def test_env_finds_programs_and_nothing_else(project: Path, line: str) -> None:
    tools = project.parent / "tools"
    (tools / "bin" / "private").mkdir(parents=True)
    (tools / "lib").mkdir()
    program(tools / "bin" / "run")
    program(project / "env")
    place = project / ".venv" / "bin" / "pip"
    program(place, line.replace("PROJECT", str(project)))
    seen = kinds(tool(project, ".venv/bin/pip", str(tools / "bin")))
    assert str(tools) not in seen
    assert str(tools / "lib") not in seen
    assert seen[str(tools / "bin")] == "execute"


def test_the_first_line_is_that_of_what_was_looked_at(project: Path) -> None:
    # attack 4: a name that is a link by now
    script = project / "script"
    program(script, "#!/usr/bin/env run")
    (project / "link").symlink_to("script")
    (project / "way").symlink_to(".")
    assert sandbox_programs.name_in_env(str(script)) == "run"
    for name in ("link", "way/script"):
        assert sandbox_programs.name_in_env(f"{project}/{name}") is None
        assert sandbox_programs.interpreter(f"{project}/{name}") is None


def test_a_pipe_is_not_opened(project: Path) -> None:
    # attack 8: whoever opens it to read lets a writer go on, and a device does more
    os.mkfifo(project / "fifo")
    went_on = threading.Event()

    def write() -> None:
        os.close(os.open(project / "fifo", os.O_WRONLY))
        went_on.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            assert sandbox_programs.interpreter(f"{project}/fifo") is None
        assert not went_on.is_set()
    finally:
        os.close(os.open(project / "fifo", os.O_RDONLY | os.O_NONBLOCK))
        writer.join()


LEASE = """
import fcntl, os, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
sys.stdin.read()
"""


def test_somebodys_lease_is_not_waited_for(project: Path) -> None:
    # The kernel lets its holder take 45 seconds to give it back.
    script = project / "script"
    program(script, "#!/usr/bin/env run")
    command = [sys.executable, "-I", "-S", "-c", LEASE, str(script)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"held\n":
            pytest.skip("no lease is given here")
        began = time.monotonic()
        assert sandbox_programs.interpreter(str(script)) is None
        assert time.monotonic() - began < 20
        holder.kill()


# --------------------------------------------------------- what a command names


def named(view: View) -> dict[str, bool]:
    return {rule.path: rule.mapped for rule in view.rules}


def test_what_a_command_of_the_childs_names_is_there_as_it_is_to_others(
    project: Path,
) -> None:
    secret = project.parent / "secret"
    command = project / "run"
    for line, shown in (
        (f"#!{secret}/bin/run", True),  # a program, with its installation
        (f"#!{secret}/key", False),
        (f"#!{secret}", False),
    ):
        program(command, line)
        rules = named(
            view_of(str(command), ShownFiles("/", theirs={str(project): True}))
        )
        assert rules[str(command)]  # the operator has named it
        found = {path for path in rules if path.startswith(str(secret))}
        assert bool(found) == shown, line
        assert not any(rules[path] for path in found)
    command.unlink()
    command.symlink_to(secret / "bin" / "run")
    rules = named(view_of(str(command), ShownFiles("/", theirs={str(project): True})))
    assert not any(rules[path] for path in rules if path.startswith(str(secret)))


def test_two_slashes_are_one(project: Path) -> None:
    out = project / "out"
    out.symlink_to(project.parent / "secret")
    assert not links(Path(f"/{project}")).walk(str(out)).real
    assert view_of("/bin/true", ShownFiles(f"/{project}")).cwd == str(project)
