"""Sandboxes from outside: what `doctor` says, profiles, networks, nested children."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from supervisor.sandbox.plan import PROFILES
from tests.helpers.command import ENVIRONMENT, SANDHOST, sandhost
from tests.helpers.trees import SHM
from tests.system.e2e.layers import as_root, layers, present
from tests.system.e2e.older import without

pytestmark = pytest.mark.slow

IS_X86_64 = os.uname().machine == "x86_64"

DROP = ("setpriv", "--inh-caps", "-all", "--bounding-set")
"""The prefix that takes a right from root, and the right."""


@pytest.fixture(scope="module")
def whole() -> set[str]:
    """The layers of this machine when none is switched off."""
    return present(layers(()))


NAMESPACES = {"mountns", "pidns", "netns", "ipcns", "utsns"}
UNSHARE = 272 if IS_X86_64 else 97
SETNS = 308 if IS_X86_64 else 268
CLONE3 = 435


# A filter takes that, or the rights that a user namespace of its own gives.
WITHOUT_NO_NEW_PRIVS = {"no_new_privs"} | ({"seccomp"} if os.geteuid() == 0 else set())


@pytest.mark.nobody
@pytest.mark.parametrize(
    ("number", "answer", "value", "lost"),
    [
        (444, 38, None, {"landlock"}),
        (444, 95, None, {"landlock"}),
        (445, 38, None, {"landlock"}),
        (446, 1, None, {"landlock"}),
        (157 if IS_X86_64 else 167, 22, 38, WITHOUT_NO_NEW_PRIVS),
        (317 if IS_X86_64 else 277, 38, None, {"seccomp"}),
        (317 if IS_X86_64 else 277, 22, None, {"seccomp"}),
        (442, 38, None, {"mountns", "pidns", "uid"}),
        (428, 38, None, {"mountns", "pidns", "uid"}),
        (117 if IS_X86_64 else 147, 1, None, {"uid"}),
        (126 if IS_X86_64 else 91, 1, None, {"capabilities"}),
        (UNSHARE, 22, 0x40000000, {"netns"}),
        (UNSHARE, 22, 0x08000000, {"ipcns"}),
        (UNSHARE, 22, 0x04000000, {"utsns"}),
        (UNSHARE, 22, 0x20000000, {"pidns"}),
        # Only root's launchpad goes into a pid namespace, and has to come back.
        (SETNS, 1, None, set() if os.geteuid() else {"pidns"}),
        (CLONE3, 38, None, set()),
        (UNSHARE, 1, 0x00020000, {"mountns", "pidns", "uid"}),
        (UNSHARE, 1, None, {*NAMESPACES, "uid", "userns"}),
    ],
)
def test_the_table_is_true_with_each_layer_switched_off(
    whole: set[str], number: int, answer: int, value: int | None, lost: set[str]
) -> None:
    table = layers(without(number, answer, value))
    assert present(table) == whole - lost
    for layer in lost & whole:
        assert table[layer]["state"] == "missing"
        assert table[layer]["detail"]


# Other mounts of groups may be there as well, those of a booted systemd beside, say.
@pytest.mark.skipif(os.geteuid() != 0, reason="takes a mount namespace")
def test_the_table_is_true_without_groups(whole: set[str]) -> None:
    groups = '$3 == "cgroup" || $3 == "cgroup2" {print $2}'
    script = f"umount -l $(awk '{groups}' /proc/mounts) && exec \"$@\""
    table = layers(("unshare", "--mount", "sh", "-c", script, "sh"))
    assert present(table) == whole - {"cgroup"}
    assert table["cgroup"]["detail"] == "no hierarchy of groups is mounted"


# A group of version 2 without controllers is there, and keeps no limit.
@pytest.mark.skipif(os.geteuid() != 0, reason="takes a mount namespace")
def test_groups_that_bound_nothing_are_told_of_so(whole: set[str]) -> None:
    if "cgroup" not in whole:
        pytest.skip("no groups can be made here")
    others = 'umount -l $(awk \'$3 == "cgroup" {print $2}\' /proc/mounts); exec "$@"'
    wrapper = ("unshare", "--mount", "sh", "-c", others, "sh")
    row = layers(wrapper)["cgroup"]
    if row["state"] != "present":
        pytest.skip("there is no version 2 here")
    group = Path(row["detail"].partition(": ")[0]).parent
    given = (group / "cgroup.subtree_control").read_text(encoding="ascii").split()
    bounded = {"memory", "pids", "cpu"} & set(given)
    assert ("bounds nothing" in row["detail"]) == (not bounded)


# Without prlimit64 a host cannot rule out core files of itself.
def test_a_host_that_cannot_close_itself_says_so() -> None:
    number = 302 if IS_X86_64 else 261
    outcome = sandhost("run", "--", "true", wrapper=without(number, 1))
    assert outcome.status == 125
    assert outcome.said("the host may not rule out core files of itself: ")


# doctor is for machines on which a host does not start: it says why, and leaves nothing.
@pytest.mark.skipif(not IS_X86_64, reason="its numbers")
@pytest.mark.parametrize(
    ("number", "answer", "said"),
    [
        (434, errno.ENOSYS, "pidfds missing: Function not implemented"),
        (424, errno.EPERM, "pidfds missing: Operation not permitted"),
        # It may end before the request, or in it: "cannot start 'python': the ...".
        (289, errno.ENOSYS, "the launchpad "),
        (56, errno.EPERM, "unknown: cannot start '"),
    ],
    ids=["pidfd_open", "pidfd_send_signal", "signalfd4", "clone"],
)
def test_doctor_tells_of_a_machine_that_has_no_host(
    number: int, answer: int, said: str
) -> None:
    outcome = sandhost("doctor", wrapper=without(number, answer))
    assert outcome.status == 1
    assert said in " ".join(outcome.out.decode().split())
    outcome = sandhost("run", "--", "true", wrapper=without(number, answer))
    assert outcome.status in {125, 126}


# face.md: what, why, and what to do; an interpreter that this user may not execute, say.
def test_a_launchpad_that_cannot_be_started_is_told_with_what_to_do() -> None:
    code = (
        "import sys; sys.executable = '/nowhere/python'; sys.argv[1:] = ['run', 'true'];"
        "from supervisor.__main__ import main; main()"
    )
    words = [sys.executable, "-c", code]
    outcome = subprocess.run(words, capture_output=True, text=True, check=False)
    said = (
        "'/nowhere/python': No such file or directory; name what is there, or make it"
    )
    assert outcome.returncode == 125
    assert outcome.stderr == f"sandhost run: cannot start the launchpad: {said} first\n"


# A limit of memory that is too small for the command itself, a relay say.
@pytest.mark.parametrize(
    "why",
    ["MemoryError()", "ImportError('x.so: failed to map segment from shared object')"],
)
def test_too_little_memory_is_no_internal_error(why: str) -> None:
    code = (
        "import supervisor.__main__ as command\n"
        f"def fail(words): raise {why}\n"
        "command.run_command = fail; command.main()"
    )
    words = [sys.executable, "-c", code]
    outcome = subprocess.run(words, capture_output=True, text=True, check=False)
    said = "there is too little memory for it; raise the limit memory, or ulimit -v, to"
    assert outcome.returncode == 125
    assert outcome.stderr == f"sandhost: {said} 100M at least\n"


def test_required_is_what_the_documents_say() -> None:
    required = {"landlock", "seccomp", "no_new_privs", "capabilities"}
    assert PROFILES["required"].required == required


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has no use for a layer")
def test_a_layer_that_the_host_has_no_use_for_is_not_called_missing() -> None:
    table = layers()
    assert table["userns"]["state"] == "not needed"
    lines = sandhost("doctor").out.decode().splitlines()
    (line,) = [line for line in lines if line.startswith("userns")]
    assert line.split(None, 1)[1] == "not needed: root makes namespaces without one"


@pytest.mark.parametrize("sandbox", ["auto", "groups"])
@pytest.mark.parametrize(
    "wrapper", [(), without(CLONE3, 38)], ids=["forked into it", "joining by itself"]
)
def test_a_child_is_in_every_group_that_is_told_of(
    tmp_path: Path, sandbox: str, wrapper: tuple[str, ...]
) -> None:
    config, journal = tmp_path / "config", tmp_path / "journal"
    config.write_text("[sandbox.groups]\nlayers = ['cgroup', 'seccomp']\n")
    options = ("--config", config, "--journal", journal, "--sandbox", sandbox)
    told = sandhost("run", *options, "cat", "/proc/self/cgroup", wrapper=wrapper)
    lines = map(json.loads, journal.read_text().splitlines())
    (spawned,) = [line for line in lines if line["event"] == "child.spawned"]
    groups = spawned["isolation"]["details"].get("cgroup")
    if groups is None:
        pytest.skip(spawned["isolation"]["missing"]["cgroup"])
    names = [Path(group).name for group in groups.split(", ")]
    joined = [Path(line).name for line in told.out.decode().splitlines()]
    assert sorted(names) == sorted(name for name in joined if name in names)


def test_a_required_layer_that_is_missing_refuses_the_start() -> None:
    wrapper = without(444, 38)
    words = ("run", "--sandbox", "required", "--", "true")
    outcome = sandhost(*words, wrapper=wrapper)
    assert outcome.status == 125
    assert outcome.said("the sandbox layer 'landlock' is required and missing")
    assert outcome.said("Function not implemented; it takes Linux 5.13")
    assert sandhost(*words).status == 0


def test_a_required_layer_that_the_network_has_no_use_for_refuses_the_start(
    tmp_path: Path,
) -> None:
    config = tmp_path / "config"
    config.write_text("[sandbox.x]\nrequired = ['netns']\n")
    words = ("run", "--config", config, "--sandbox", "x", "--network", "host")
    outcome = sandhost(*words, "--", "touch", "done", cwd=tmp_path)
    assert outcome.status == 125
    assert outcome.said(
        "--network: 'host' contradicts sandbox 'x', which requires the layer"
    )


def test_a_named_profile_is_what_it_says(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "[sandbox.small]\nlayers = ['seccomp']\nrequired = ['seccomp']\n"
        "[policy.run]\nsandbox = 'small'\nnetwork = 'host'\n"
    )
    options = ("--config", config, "--journal", tmp_path / "journal")
    script = "grep -c 'Seccomp:.2' /proc/self/status; echo $$ > file; cat file"
    outcome = sandhost("run", *options, "--", "sh", "-c", script, cwd=tmp_path)
    assert outcome.status == 0
    assert int(outcome.out.split()[1]) > 2
    lines = map(json.loads, (tmp_path / "journal").read_text().splitlines())
    (spawned,) = [line for line in lines if line["event"] == "child.spawned"]
    assert spawned["isolation"]["profile"] == "small"
    assert set(spawned["isolation"]["layers"]) == {
        "session", "no_new_privs", "capabilities", "seccomp", "descriptors",
    }  # fmt: skip
    assert spawned["isolation"]["network"] == "host"


def test_a_network_that_nothing_keeps_away_is_not_called_none(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "[sandbox.x]\nlayers = ['rlimits']\n[policy.run]\nsandbox = 'x'\n"
    )
    options = ("--config", config, "--journal", tmp_path / "journal")
    assert sandhost("run", *options, "--", "true", cwd=tmp_path).status == 0
    lines = map(json.loads, (tmp_path / "journal").read_text().splitlines())
    (spawned,) = [line for line in lines if line["event"] == "child.spawned"]
    assert spawned["isolation"]["network"] == "host"
    assert "network" in spawned["isolation"]["missing"]


@pytest.mark.parametrize(("network", "others"), [("none", 0), ("host", 1)])
def test_the_network_is_what_was_asked_for(network: str, others: int) -> None:
    script = "cut -d: -f1 /proc/net/dev | grep -vc 'lo\\|Inter\\|face'"
    count = sandhost("run", "--sandbox", "none", "--", "sh", "-c", script).out
    if int(count) == 0:
        pytest.skip("this machine has no network but its loopback")
    outcome = sandhost("run", "--network", network, "--", "sh", "-c", script)
    assert min(int(outcome.out), 1) == others


# spec A5, N1: each level is in walls of its own, within those of the level above; also
# where nobody may make a namespace.
@pytest.mark.parametrize(
    "wrapper", [(), without(UNSHARE, 1)], ids=["as it is", "no namespaces"]
)
def test_eight_levels_of_children_work(
    tmp_path: Path, wrapper: tuple[str, ...]
) -> None:
    (tmp_path / "note").write_text("through eight doors\n")
    levels = (SANDHOST, "relay", "--") * 8
    words = ("--root", tmp_path, "--", *levels, SANDHOST, "fs", "cat", "note")
    options = as_root(tmp_path) if wrapper else ()
    outcome = sandhost("run", *options, *words, wrapper=wrapper)
    assert (outcome.status, outcome.out) == (0, b"through eight doors\n")


def test_the_level_that_the_kernel_refuses_is_a_clear_error(tmp_path: Path) -> None:
    if not present(layers()) >= {"landlock"}:
        pytest.skip("this kernel has no Landlock")
    script = tmp_path / "deep.py"
    script.write_text(
        "import os, sys\n"
        "from supervisor.spawn.launchpad.layers.landlock import apply\n"
        "for _ in range(15):\n"
        "    apply(((b'/', 'write'), (b'/', 'execute')), no_tcp=False)\n"
        "os.execv(sys.argv[1], [*sys.argv[1:]])\n"
    )
    words = (sys.executable, str(script), SANDHOST, "relay", "--", "true")
    outcome = sandhost("run", "--cwd", tmp_path, "--", *words)
    assert outcome.status == 125
    assert outcome.said("the kernel stacks 16 layers of Landlock")
    # `relay` itself has no such option.
    assert outcome.said("nest fewer children, or run the outermost with --sandbox none")


def test_a_shell_script_finds_the_command_in_walls(tmp_path: Path) -> None:
    tool = tmp_path / "work.sh"
    tool.write_text(f"#!/bin/sh\necho hello | {SANDHOST} fs put a\n")
    tool.chmod(0o755)
    (tmp_path / "root").mkdir()
    outcome = sandhost("run", "--root", "root", "--", "./work.sh", cwd=tmp_path)
    assert (outcome.status, outcome.err) == (0, b"")
    assert (tmp_path / "root" / "a").read_text() == "hello\n"


def test_it_can_open_its_standard_streams_again(tmp_path: Path) -> None:
    script = "echo one; echo two > /dev/stdout; echo three > /dev/stderr"
    outcome = sandhost("run", "--", "sh", "-c", script, cwd=tmp_path)
    assert (outcome.status, outcome.out, outcome.err) == (0, b"one\ntwo\n", b"three\n")


# A host that is root makes TMPDIR for another user, in a directory that is root's alone.
def test_its_tmpdir_may_lie_in_its_working_directory(tmp_path: Path) -> None:
    script = "echo mine > $TMPDIR/a && cat $TMPDIR/a && ls -d $TMPDIR/../run"
    env = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
    tmp_path.chmod(0o755)
    outcome = sandhost("run", "--", "sh", "-c", script, cwd=tmp_path, env=env)
    assert (outcome.status, outcome.err) == (0, b"")
    assert outcome.out.startswith(b"mine\n")


# Linux counts the processes of every user but root (setrlimit(2)).
@pytest.mark.skipif(os.geteuid() != 0, reason="asks what becomes of root's processes")
def test_a_limit_that_the_kernel_does_not_keep_for_root_is_told(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    words = ("--journal", journal, "--limit", "processes=8", "--", "true")
    outcome = sandhost("run", "--sandbox", "none", *words, cwd=tmp_path)
    assert outcome.status == 0
    assert outcome.said(
        "goes without its limit of processes: the kernel does not count"
    )
    (spawned,) = spawned_in(journal)
    assert list(spawned["isolation"]["missing"]) == ["limit of processes"]
    outcome = sandhost("run", "--limit", "processes=8", "--", "true", cwd=tmp_path)
    assert (outcome.status, outcome.err) == (0, b"")


def spawned_in(journal: Path) -> list[dict[str, Any]]:
    """Return what a journal says of children that were spawned."""
    lines = map(json.loads, journal.read_text().splitlines())
    return [line for line in lines if line["event"] == "child.spawned"]


# A container's root: user 0 of a user namespace, in which children have no numbers; or one
# that may give nothing away, or not remove what it has given.
@pytest.mark.parametrize(
    ("wrapper", "why"),
    [
        (("unshare", "--user", "--map-root-user"), "cannot be given to user"),
        ((*DROP, "-chown"), "cannot be given to user"),
        ((*DROP, "-fowner"), "cannot be taken back from user"),
        ((*DROP, "-dac_override"), "cannot be taken back from user"),
    ],
    ids=["no users", "no chown", "no fowner", "no dac_override"],
)
def test_a_root_that_gives_nothing_away_starts_children_as_root_if_told_to(
    tmp_path: Path, wrapper: tuple[str, ...], why: str
) -> None:
    words = [shutil.which(wrapper[0]) or "false", *wrapper[1:], "id", "-u"]
    tried = subprocess.run(words, capture_output=True, check=False)
    if tried.stdout != b"0\n":
        pytest.skip(f"{wrapper[0]}(1) makes no such root here")
    journal = tmp_path / "journal"
    made = (
        "id -u; cd $TMPDIR && mkdir a b && touch a/b b/c && chmod 1777 a && chmod 0 b"
    )
    program = ("--journal", journal, "--", "sh", "-c", made)
    # attack 50
    outcome = sandhost("run", *program, wrapper=wrapper, cwd="/")
    assert (outcome.status, outcome.out) == (125, b"")
    assert outcome.said(why)
    assert outcome.said("; to start it as root, name a profile without the layer 'uid'")
    options = as_root(tmp_path)
    outcome = sandhost("run", *options, *program, wrapper=wrapper, cwd="/")
    assert (outcome.status, outcome.out, outcome.err) == (0, b"0\n", b"")
    (spawned,) = spawned_in(journal)
    assert "uid" not in spawned["isolation"]["missing"]


# A child that stays user 0 would have again at its exec what can be inherited.
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has any")
def test_capabilities_that_are_inherited_are_not_kept(tmp_path: Path) -> None:
    one = "+net_admin"
    wrapper = ("setpriv", "--inh-caps", one, "--ambient-caps", one)
    tried = subprocess.run([*wrapper, "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("setpriv(1) cannot hand them on here")
    config = tmp_path / "config"
    config.write_text("[sandbox.x]\nlayers = ['capabilities']\n")
    script = "id -u; sed -n 's/^Cap...:.//p' /proc/self/status"
    words = ("run", "--config", config, "--sandbox", "x", "--", "sh", "-c", script)
    user, *sets = sandhost(*words, wrapper=wrapper, cwd="/").out.split()
    assert user == b"0"
    assert sets == [b"0" * 16] * 5


# Semaphores and shared memory of POSIX are files there.
def test_shared_memory_is_its_own(whole: set[str]) -> None:
    if "mountns" not in whole:
        pytest.skip("without a root of its own it has no /dev/shm")
    program = "import multiprocessing, os; multiprocessing.Lock().acquire();"
    program += "open('/dev/shm/own', 'x'); print(os.listdir('/dev/shm'))"
    outcome = sandhost("run", "--", sys.executable, "-I", "-c", program)
    assert (outcome.status, outcome.out) == (0, b"['own']\n")


# spec face: a child can always read --cwd and execute COMMAND.
@pytest.mark.parametrize("words", [("./run",), ("cat", "run")])
def test_a_closed_directory_of_shared_memory_is_one_to_work_in(
    words: tuple[str, ...],
) -> None:
    if not os.access(SHM, os.W_OK):
        pytest.skip(f"{SHM} cannot be written")
    with tempfile.TemporaryDirectory(dir=SHM) as closed:
        program = Path(closed, "run")
        program.write_text('#!/bin/sh\nread -r line < "$0" && echo "$line"\n')
        program.chmod(0o700)
        outcome = sandhost("run", "--cwd", closed, "--", *words)
        assert (outcome.status, outcome.err) == (0, b"")
        assert outcome.out.startswith(b"#!/bin/sh\n")


# It refuses to do anything where it may not read a configuration that is there.
@pytest.mark.skipif(not Path("/etc/gitconfig").exists(), reason="there is none")
@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_git_works_where_the_machine_has_a_configuration_for_it() -> None:
    script = "git init -q $TMPDIR/a && git -C $TMPDIR/a status --short"
    outcome = sandhost("run", "--", "sh", "-c", script)
    assert (outcome.status, outcome.err) == (0, b"")


def test_a_shim_finds_the_version_that_it_stands_for(tmp_path: Path) -> None:
    tree = tmp_path / "manager"
    for name, text in (
        ("shims/hello", f'exec {tree}/libexec/choose "$@"'),
        ("libexec/choose", f'exec {tree}/versions/1.0/bin/hello "$@"'),
        ("versions/1.0/bin/hello", 'echo "hello $1"'),
        ("other/secret", "echo secret"),
    ):
        program = tree / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    place = tmp_path / "place"
    place.mkdir()
    outcome = sandhost("run", "--", str(tree / "shims/hello"), "you", cwd=place)
    assert (outcome.status, outcome.out) == (0, b"hello you\n")
    shell = f"{tree}/shims/hello me; cat {tree}/other/secret"
    outcome = sandhost("run", "--", "sh", "-c", shell, cwd=place)
    assert outcome.status == 1  # only COMMAND is visible
    assert b"hello me" not in outcome.out


# 3.5: a host leaves no core file, whatever its shell allows.
def test_a_host_leaves_no_core_file() -> None:
    shell = 'ulimit -Sc unlimited && exec "$@"'
    words = (SANDHOST, "run", "--sandbox", "none", "--", "sh", "-c", "echo; read _")
    with subprocess.Popen(
        ["sh", "-c", shell, "sh", *words],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
    ) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        host.stdout.readline()
        limits = Path(f"/proc/{host.pid}/limits").read_text(encoding="ascii")
        (core,) = [line for line in limits.splitlines() if line.startswith("Max core")]
        assert core.split()[4] == "0"
        host.stdin.write(b"\n")
        host.stdin.flush()
        assert host.wait() == 0
