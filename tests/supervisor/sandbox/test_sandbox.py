"""Layers and visible paths of a child: the host's side, without children."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.sandbox import visible as sandbox_paths
from supervisor.sandbox.plan import (
    FIRST_USER,
    LAYERS,
    PROFILES,
    USERS,
    Machine,
    Plan,
    Walls,
    make_profile,
)
from supervisor.sandbox.shown_files import ShownFiles
from supervisor.sandbox.view import PathRule, View
from supervisor.sandbox.visible import view_of
from supervisor.spawn.request import SpawnError
from tests.helpers.spawning import ROOT


def kinds(view: View) -> dict[str, str]:
    """Return what may be done, by path."""
    return {rule.path: rule.kind for rule in view.rules}


def failure(layer: str, number: int) -> SpawnError:
    """Return what the launchpad says of a layer that failed."""
    reason = os.strerror(number)
    return SpawnError(number, layer, f"cannot start 'x': {reason}", reason)


# ------------------------------------------------------------------------ what it sees


def test_of_an_installation_only_programs_and_libraries_are_seen(
    tmp_path: Path,
) -> None:
    for name in ("bin", "lib", "share", "secrets"):
        (tmp_path / name).mkdir()
    tool = tmp_path / "bin" / "tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    seen = kinds(view_of(str(tool), ShownFiles("/")))
    assert seen[f"{tmp_path}/bin"] == seen[f"{tmp_path}/lib"] == "execute"
    assert f"{tmp_path}/share" not in seen
    assert str(tmp_path) not in seen


def test_links_and_interpreters_are_followed_to_their_installations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one/bin", "two/bin", "two/lib", "scripts"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "two" / "bin" / "run").write_text("")
    (tmp_path / "two" / "bin" / "run").chmod(0o755)
    (tmp_path / "one" / "bin" / "run").symlink_to("../../two/bin/run")
    script = tmp_path / "scripts" / "work"
    script.write_text("#!/usr/bin/env -S run -x\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/one/bin")
    view = view_of(str(script), ShownFiles("/"))
    seen = kinds(view)
    assert {f"{tmp_path}/{n}" for n in ("one/bin", "two/bin", "two/lib")} <= set(seen)
    assert seen[str(script)] == "execute"
    assert (f"{tmp_path}/one/bin/run", "../../two/bin/run") in view.links


def test_a_working_directory_that_is_the_top_adds_nothing() -> None:
    assert kinds(view_of("/bin/true", ShownFiles("/"))).get("/") is None


def test_root_s_files_are_shown_as_the_child_s_wherever_its_own_lie(
    tmp_path: Path,
) -> None:
    own = str(tmp_path / "own")
    (tmp_path / "own").mkdir()
    (tmp_path / "work").mkdir()
    for cwd in (str(tmp_path / "work"), str(tmp_path)):
        rules = view_of("/bin/true", ShownFiles(cwd, own=(own,))).rules
        assert PathRule(cwd, "execute", mapped=True) in rules
        assert PathRule(own, "write") in rules


def test_what_loops_and_what_is_gone_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    seen = kinds(view_of(str(tmp_path / "a"), ShownFiles(str(tmp_path / "gone"))))
    assert not [path for path in seen if path.startswith(str(tmp_path / "gone"))]


def test_mounts_come_outer_ones_first_and_none_twice(tmp_path: Path) -> None:
    (tmp_path / "work" / "own").mkdir(parents=True)
    own = str(tmp_path / "work" / "own")
    view = view_of(sys.executable, ShownFiles(str(tmp_path / "work"), own=(own,)))
    paths = [os.fsdecode(path) for path, _, _ in view.mounts()]
    assert len(set(paths)) == len(paths)
    for index, path in enumerate(paths):
        assert not [p for p in paths[index + 1 :] if path.startswith(f"{p}/")]
    assert paths.index(own) > paths.index(str(tmp_path / "work"))
    assert "/proc" not in paths
    # The content of /usr comes with /usr.
    assert not [path for path in paths if path.startswith("/usr/")]


def test_links_beneath_a_mount_are_there_with_it() -> None:
    view = View((PathRule("/usr", "execute"),), (("/bin", "usr/bin"), ("/usr/x", "y")))
    assert view.symlinks(view.mounts()) == ((b"/bin", b"usr/bin"),)


# -------------------------------------------------------------------- what is asked for


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return what a host that is root knows before its first child."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        "supervisor.sandbox.ownership.find_chown_fault", lambda _user: ""
    )
    return Machine()


def test_root_asks_for_all_but_a_user_namespace(machine: Machine) -> None:
    plan = Plan(PROFILES["auto"], "none", machine)
    assert plan.wanted() == set(LAYERS) - {"userns"}
    assert Plan(PROFILES["auto"], "host", machine).wanted() == set(LAYERS) - {
        "userns",
        "netns",
    }


def test_others_need_one_for_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    plan = Plan(PROFILES["auto"], "none", Machine())
    assert plan.wanted() == set(LAYERS) - {"uid"}
    assert plan.failed(failure("userns", errno.EPERM))
    assert plan.wanted() == {
        "no_new_privs", "capabilities", "rlimits", "landlock", "seccomp", "cgroup",
    }  # fmt: skip
    assert plan.missing["userns"] == "Operation not permitted"
    assert plan.missing["netns"] == "neither root nor a user namespace"


def test_what_hangs_on_a_missing_layer_is_missing_too(machine: Machine) -> None:
    profile = make_profile("as root", LAYERS.keys() - {"uid"})
    plan = Plan(profile, "none", machine)
    assert plan.failed(failure("mountns", errno.ENOSYS))
    assert {"mountns", "pidns"}.isdisjoint(plan.wanted())
    assert plan.missing["pidns"] == "needs the layer mountns"


# attack 50: root's child has a user of its own, or its profile says that it has none.
def test_a_child_of_root_is_refused_where_it_would_be_root(machine: Machine) -> None:
    plan = Plan(PROFILES["auto"], "none", machine)
    assert plan.failed(failure("mountns", errno.ENOSYS))
    with pytest.raises(SpawnError, match="user of its own: needs the layer mountns; "):
        plan.wanted()
    machine.lacking.clear()
    with pytest.raises(
        SpawnError, match="Operation not permitted; to start it as root"
    ):
        plan.failed(failure("uid", errno.EPERM))
    assert not machine.lacking, "so the next start asks again"


def test_a_label_counts_what_the_machine_did_not_give() -> None:
    walls = Walls("auto", "none")
    assert walls.label == "auto"
    # A host that is not root gives no users, and a limit is no layer.
    walls.missing = {"uid": "the host is not root", "limit of processes": "root's"}
    assert (walls.label, walls.lost) == ("auto", {})
    walls.missing |= {"netns": "no", "pidns": "no"}
    assert walls.row()["label"] == "auto-2"


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EAGAIN, errno.ENOMEM, errno.E2BIG, errno.EMFILE]
)
def test_what_is_used_up_weakens_no_sandbox(machine: Machine, number: int) -> None:
    plan = Plan(PROFILES["auto"], "none", machine)
    assert not plan.failed(failure("landlock", number))
    assert not machine.lacking


# Another process of this user's may remove a group between two steps.
@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENODEV])
def test_a_group_that_vanished_is_missing_at_one_start(
    machine: Machine, number: int
) -> None:
    plan = Plan(PROFILES["auto"], "none", machine)
    assert "cgroup" in plan.wanted()
    assert plan.failed(failure("cgroup", number))
    assert "cgroup" not in plan.wanted()
    assert plan.missing["cgroup"] == os.strerror(number)
    assert "cgroup" in Plan(PROFILES["auto"], "none", machine).wanted()
    needed = Plan(make_profile("mine", None, ["cgroup"]), "none", machine)
    with pytest.raises(SpawnError, match="'cgroup' is required and missing"):
        needed.failed(failure("cgroup", number))


def test_a_program_that_cannot_be_executed_is_no_layer(machine: Machine) -> None:
    assert not Plan(PROFILES["auto"], "none", machine).failed(
        failure("exec", errno.EACCES)
    )


def test_a_required_layer_is_required_from_the_first_child_on(machine: Machine) -> None:
    profile = make_profile("mine", ["landlock", "seccomp"], ["landlock"])
    with pytest.raises(SpawnError, match="'landlock' is required and missing"):
        Plan(profile, "none", machine).failed(failure("landlock", errno.ENOSYS))
    machine.lacking["landlock"] = "no such thing"
    with pytest.raises(SpawnError, match="no such thing; it takes Linux") as info:
        Plan(profile, "none", machine).wanted()
    assert info.value.exit_status == 125


# A child never runs in less than what is required, also where the host itself has no use
# for the layer; and no report calls that layer missing where nobody requires it.
@pytest.mark.parametrize(
    ("layer", "network", "why"),
    [("userns", "none", "the host is root"), ("netns", "host", "the network 'host'")],
)
def test_a_required_layer_that_has_no_use_here_refuses_the_start(
    machine: Machine, layer: str, network: str, why: str
) -> None:
    said = f"'{layer}' is required and not made here: {why}"
    with pytest.raises(SpawnError, match=said) as info:
        Plan(make_profile("mine", None, [layer]), network, machine).wanted()
    assert info.value.exit_status == 125
    plan = Plan(make_profile("mine", None), network, machine)
    assert layer not in plan.wanted() | plan.missing.keys()


def test_users_are_given_to_one_child_at_a_time(machine: Machine) -> None:
    first, second = machine.take_user(), machine.take_user()
    assert first != second
    machine.give_user_back(first)
    assert machine.take_user() == first


# Whatever pid a host may have (2**22 of them), its range is its own and has numbers.
def test_no_two_hosts_share_a_user(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = []
    for pid in (1, 2, 1_048_577, 4_194_302, 4_194_303):
        monkeypatch.setattr("supervisor.sandbox.plan.os.getpid", lambda pid=pid: pid)
        host = Machine()
        users = [host.take_user() for _ in range(USERS)]
        assert len(set(users)) == USERS
        assert min(users) > FIRST_USER
        assert max(users) < 2**32 - 1
        ranges.append(set(users))
        with pytest.raises(SpawnError, match="all 767 users of this host have one"):
            host.take_user()
    assert len(set.union(*ranges)) == USERS * len(ranges)


# A thousand children of one host: what is its launchpad's by its pid is its own as well.
def test_a_host_has_the_users_of_its_launchpad_too() -> None:
    host = Machine(os.getpid() + 1)
    users = {host.take_user() for _ in range(2 * USERS)}
    assert len(users) == 2 * USERS > 1000
    with pytest.raises(SpawnError, match="all 1534 users of this host have one"):
        host.take_user()
    host.give_user_back(max(users))
    assert host.take_user() == max(users)


def test_the_common_part_is_found_once() -> None:
    assert sandbox_paths.common_view() is sandbox_paths.common_view()


# In a mount namespace of its own, with an /etc that is empty at first.
ETC_PROGRAM = """
import os, sys
sys.path.insert(0, {source!r})
from hostlib.linux import mount_calls
from supervisor.spawn.launchpad.layers import namespaces
from supervisor.sandbox.visible import common_view
namespaces.enter("mountns")
mount_calls.mount(b"none", b"/", b"", mount_calls.MS_REC_PRIVATE, b"")
mount_calls.mount(b"tmpfs", b"/etc", b"tmpfs", 0, b"")
def tell():
    print(*sorted(r.path for r in common_view().rules if r.path.startswith("/etc/")))
tell()
for change in (
    lambda: os.mkdir("/etc/ssl"),
    lambda: open("/etc/ssl/openssl.cnf", "x").close(),
    lambda: open("/etc/zone", "x").close(),
    lambda: os.symlink("zone", "/etc/localtime"),
    lambda: os.unlink("/etc/localtime"),
):
    change()
    tell()
"""


# A daemon runs for months, and its machine's settings change meanwhile.
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts without a user")
def test_what_comes_into_etc_later_is_seen_by_the_next_child() -> None:
    program = ETC_PROGRAM.format(source=str(ROOT))
    done = subprocess.run(
        [sys.executable, "-I", "-c", program],
        capture_output=True,
        check=False,
        text=True,
    )
    assert not done.stderr
    assert done.stdout.splitlines() == [
        "",
        "",
        "/etc/ssl/openssl.cnf",
        "/etc/ssl/openssl.cnf",
        "/etc/ssl/openssl.cnf /etc/zone",
        "/etc/ssl/openssl.cnf",
    ]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a child's root, beside a directory that is none of its business."""
    for name in ("secret/bin", "secret/lib", "root/.venv/bin", "root/pkg/bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "secret" / "key").write_text("s3cret")
    (tmp_path / "secret" / "bin" / "run").write_text("#!/bin/sh\n")
    (tmp_path / "secret" / "bin" / "run").chmod(0o755)
    program(tmp_path / "root" / ".venv" / "bin" / "python3")
    program(tmp_path / "root" / "pkg" / "bin" / "tsc")
    return tmp_path / "root"


def program(path: Path, first_line: str = "#!/bin/sh") -> None:
    path.unlink(missing_ok=True)
    path.write_text(f"{first_line}\n")
    path.chmod(0o755)


def seen_by_tool(root: Path, tool: str, *program_files: str) -> dict[str, str]:
    """Return what a tool sees that a project has, by path."""
    path, top = f"{root}/{tool}", str(root)
    return kinds(
        view_of(
            path,
            ShownFiles(top, programs=program_files, shared=(top,), theirs={top: True}),
        )
    )


@pytest.mark.parametrize(
    "made",
    [
        "link .venv/lib ../secret",
        "link .venv/lib SECRET",
        "link .venv/pyvenv.cfg SECRET/key",
        "link .venv/bin/python3 SECRET/bin/run",
        "link .venv/bin/python3 /proc/self/root/SECRET/bin/run",
        "link .venv/bin SECRET/bin",
        "link .venv SECRET",
        "line #!SECRET/bin/run",
        "line #!/usr/bin/env SECRET/bin/run",
        "line #!/usr/bin/env run",
        "line #!/usr/bin/env ../secret/bin/run",
    ],
)
def test_a_projects_program_brings_nothing_along_from_elsewhere(
    project: Path, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # attacks 3 and 24: the host looks as root, at what the child has made
    secret = str(project.parent / "secret")
    monkeypatch.setenv("PATH", f"{secret}/bin")
    what, *words = made.replace("SECRET", secret).split(" ")
    if what == "line":
        program(project / ".venv" / "bin" / "python3", " ".join(words))
    else:
        place, target = words
        shutil.rmtree(project / place, ignore_errors=True)
        (project / place).unlink(missing_ok=True)
        if (project / place).name == ".venv":
            shutil.copytree(
                project / "pkg", project.parent / "secret", dirs_exist_ok=True
            )
            program(project.parent / "secret" / "bin" / "run")
        (project / place).symlink_to(target)
    for tool in (".venv/bin/python3", ".venv/bin/run"):
        seen = seen_by_tool(project, tool)
        assert not [path for path in seen if path.startswith(secret)], seen
        assert seen[str(project)] == "write"


def test_a_projects_program_finds_what_the_sidecar_names(project: Path) -> None:
    programs = project.parent / "opt" / "bin"
    (project.parent / "opt" / "lib").mkdir(parents=True)
    programs.mkdir()
    program(programs / "python3")
    place = project / ".venv" / "bin" / "python3"
    for first_line in ("link", "#!/usr/bin/env python3"):
        place.unlink()
        if first_line == "link":
            place.symlink_to(programs / "python3")
        else:
            program(place, first_line)
        seen = seen_by_tool(project, ".venv/bin/python3", str(programs))
        assert seen[f"{project.parent}/opt/lib"] == "execute"
    place.unlink()
    place.symlink_to("/usr/bin/env")
    assert str(place.parent.parent) not in seen_by_tool(project, ".venv/bin/python3")


def test_a_directory_of_the_childs_own_is_no_way_out(project: Path) -> None:
    # attack 3: it is the child's, and so is what stands under its name
    run, secret = project.parent / "run", project.parent / "secret"
    run.mkdir()
    (run / "sidecar-c").symlink_to(secret)
    own = (f"{run}/sidecar-c",)
    theirs = dict.fromkeys((str(run), str(project)), True)
    for shared in ((), (str(project),)):
        seen = kinds(
            view_of("/bin/true", ShownFiles("/", own=own, shared=shared, theirs=theirs))
        )
        assert not [path for path in seen if path.startswith(str(secret))]


def test_a_command_is_followed_and_links_around_it_are_not(project: Path) -> None:
    # The operator has named it; what lies beside it the child may have made.
    secret, other = project.parent / "secret", project.parent / "other"
    (other / "bin").mkdir(parents=True)
    (other / "lib").mkdir()
    program(other / "bin" / "python3")
    place = project / ".venv" / "bin" / "python3"
    place.unlink()
    place.symlink_to(other / "bin" / "python3")
    (project / ".venv" / "lib").symlink_to(secret)
    theirs = {str(project): True}
    seen = kinds(view_of(str(place), ShownFiles(str(project), theirs=theirs)))
    assert seen[f"{other}/lib"] == "execute"
    assert not [path for path in seen if path.startswith(str(secret))]


@pytest.mark.parametrize("line", ["", "#!FIFO"])
def test_a_pipe_in_a_programs_place_is_not_waited_for(project: Path, line: str) -> None:
    # attack 8: whoever opens a FIFO waits for whoever writes, and the host looks alone
    fifo = project / "fifo"
    os.mkfifo(fifo, 0o755)
    named = fifo
    if line:
        named = project / "script"
        program(named, f"#!{fifo}")
    for shared in ((), (str(project),)):
        view_of(str(named), ShownFiles("/", shared=shared, theirs={str(project): True}))
