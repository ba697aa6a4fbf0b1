"""The doctor: probes are tried, and leftovers of dead hosts only are found.

Other hosts may live and die on this machine meanwhile, so tests look for their own.
"""

import ctypes
import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hostlib.linux import syscalls
from hostlib.linux.syscalls import PR_SET_CHILD_SUBREAPER, prctl
from supervisor.cli import doctor, doctor_layers
from supervisor.cli.doctor import examine_machine, find_leaks, leaks_text
from supervisor.control.client import ControlError
from supervisor.sandbox import attempts, probes
from supervisor.sandbox.groups import Hierarchy, hierarchies
from supervisor.sandbox.plan import LAYERS
from supervisor.sandbox.probes import (
    MISSING,
    PRESENT,
    PROBES,
    UNKNOWN,
    Finding,
    probe_machine,
)
from supervisor.workspace.use import MODES
from tests.helpers.spawning import ROOT
from tests.helpers.stage import stage

pytestmark = pytest.mark.slow

__all__ = ["stage"]


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No host of the machine's is found by the environment."""
    monkeypatch.delenv("SANDHOST_CONTROL", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def found(what: str) -> Finding:
    """The finding of one name."""
    (finding,) = [f for f in probe_machine() if f.what == what]
    return finding


def refusing(code: int) -> Any:
    """Something to call that always fails."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


# ---------------------------------------------------------------- the machine


def test_what_every_host_needs_is_here() -> None:
    lacking = [f for f in probe_machine() if f.is_needed and f.state != PRESENT]
    assert not lacking


def test_every_row_says_what_was_tried_and_what_is_done_without() -> None:
    findings = probe_machine()
    assert len(findings) == len(PROBES) >= 15
    for finding in findings:
        assert finding.state in {PRESENT, MISSING, UNKNOWN}
        assert finding.what
        assert finding.detail
        assert finding.probed
        assert finding.without


@pytest.mark.parametrize("before", [0, 1])
def test_probing_leaves_this_process_as_it_was(before: int) -> None:
    kept, own = subreaper(), os.getpid()
    try:
        prctl(PR_SET_CHILD_SUBREAPER, before)
        probe_machine()
        assert subreaper() == before
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, kept)
    for each in hierarchies():
        assert f"sandhost-doctor-{own}" not in os.listdir(each.group)


# A group of version 2 that has no controllers ends its processes, and bounds nothing.
@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), "bounds nothing"),
        (("cgroup.kill",), "bounds nothing, ends all at once"),
        (("pids.max", "cgroup.kill"), "bounds processes of all together"),
        (
            ("memory.max", "pids.max", "cpu.max"),
            "bounds memory, processes, cpus of all together",
        ),
    ],
)
def test_what_a_new_group_can_bound_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], said: str
) -> None:
    real, removed = os.mkdir, list[str]()

    def mkdir(path: str) -> None:  # as the kernel: the files come with it, and go
        real(path)
        for name in files:
            Path(path, name).touch()

    own = (Hierarchy("v2", str(tmp_path)),)
    monkeypatch.setattr(attempts, "hierarchies", lambda: own)
    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "rmdir", removed.append)
    assert attempts.cgroup() == f"{tmp_path}: {said}"
    assert [str(path) for path in tmp_path.iterdir()] == removed


def subreaper() -> int:
    """Whether orphans come to this process: PR_GET_CHILD_SUBREAPER."""
    answer = ctypes.c_int()
    ctypes.CDLL(None).prctl(37, ctypes.byref(answer), 0, 0, 0)
    return answer.value


@pytest.mark.parametrize(
    ("what", "where", "name"),
    [
        ("user namespaces", attempts, "_status_of"),
        ("pidfds", os, "pidfd_open"),
        ("O_TMPFILE in TMPDIR", os, "open"),
        ("RWF_NOWAIT in TMPDIR", os, "preadv"),
        ("flock in TMPDIR", fcntl, "flock"),
        ("openat2", syscalls, "openat2"),
        ("close_range", syscalls, "system_call"),
        ("Landlock", syscalls, "system_call"),
        ("seccomp filters", syscalls, "system_call"),
        ("cgroup v2", os, "mkdir"),
    ],
)
def test_what_the_kernel_refuses_is_missing(
    what: str, where: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (probe,) = [p for p in PROBES if p.what == what]
    monkeypatch.setattr(where, name, refusing(errno.EOPNOTSUPP))
    finding = probes.try_probe(probe)
    monkeypatch.undo()
    assert finding.state == MISSING
    assert finding.detail == os.strerror(errno.EOPNOTSUPP)


@pytest.mark.parametrize(
    ("release", "state"),
    [
        ("5.3.18-lts", MISSING),
        ("4.20", MISSING),
        ("5.4-rc1", PRESENT),
        ("10.0.1", PRESENT),
        ("six", UNKNOWN),
    ],
)
def test_an_old_kernel_is_told(
    release: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.uname()
    other = os.uname_result((real[0], real[1], release, real[3], real[4]))
    monkeypatch.setattr(os, "uname", lambda: other)
    finding = probes.try_probe(PROBES[0])
    assert (finding.what, finding.state) == ("Linux", state)
    assert release in finding.detail


def test_a_program_that_is_not_there_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert found("bubblewrap").state == MISSING


def test_a_user_namespace_that_is_refused_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts, "UNSHARE", "import os; os._exit(1)")
    finding = found("user namespaces")
    assert finding.state == MISSING
    assert finding.detail == f"unshare: {os.strerror(errno.EPERM)}"
    monkeypatch.setattr(attempts, "UNSHARE", "import os; os._exit(129)")
    assert found("user namespaces").detail.startswith("mapping a user: ")


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), 9)", "signal.pause()"])
def test_what_could_not_be_tried_is_unknown(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "UNSHARE", f"import os, signal; {ends}")
    monkeypatch.setattr(attempts, "PROBE_TIMEOUT_S", 0.3)
    assert found("user namespaces").state == UNKNOWN


# A host sees its launchpad, which is closed up, or it starts nobody.
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts, and it sees all")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("hidepid=2", "missing /proc is mounted with hidepid=invisible"),
        ("hidepid=1", "missing /proc is mounted with hidepid=noaccess"),
        ("hidepid=2,gid=65534", "present all are to be seen"),
        ("hidepid=0", "present all are to be seen"),
    ],
)
def test_hidden_processes_are_told_of(options: str, said: str) -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from supervisor.sandbox.probes import probe_machine\n"
        "os.setgroups([65534]); os.setresuid(65534, 65534, 65534)\n"
        "(one,) = (f for f in probe_machine() if f.what == 'processes in /proc')\n"
        "print(one.state, one.detail)"
    )
    mount = f'mount -t proc -o {options} proc /proc && exec "$@"'
    root = str(Path(__file__).parents[3])
    words = [
        "unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", code, root
    ]  # fmt: skip
    outcome = subprocess.run(words, capture_output=True, text=True, check=False)
    assert outcome.stdout.strip() == said, outcome.stderr


def test_no_process_to_try_it_in_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_spawn", refusing(errno.EAGAIN))
    assert found("user namespaces").state == UNKNOWN


@pytest.fixture
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """No child can be started: these tests are no host."""
    why = None, "cannot start the launchpad: it is not there"
    monkeypatch.setattr(doctor_layers, "try_layers", lambda: why)


@pytest.mark.usefixtures("no_child")
def test_the_report_fits_80_columns_and_is_honest_about_walls() -> None:
    text, status = examine_machine()
    # A machine on which nobody can be started is not a sound one.
    assert status == doctor.FOUND
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    assert "review missing: no child can be started: cannot start the" in flat
    # Nothing is reported that was not tried.
    assert "landlock unknown: cannot start the launchpad" in flat
    for probe in PROBES:
        assert " ".join(probe.probed.split()) in flat


@pytest.mark.usefixtures("no_child")
def test_the_report_as_json_has_a_row_for_each() -> None:
    text, status = examine_machine(as_text=False)
    report = json.loads(text)
    assert status == doctor.FOUND
    assert report["isolation"] is None
    assert [row["layer"] for row in report["layers"]] == list(LAYERS)
    assert {row["state"] for row in report["layers"]} == {UNKNOWN}
    # spec WS4: each mode is told, and why it cannot be had.
    assert [row["mode"] for row in report["workspaces"]] == list(MODES)
    (told,) = {(row["state"], row["detail"]) for row in report["workspaces"]}
    why = "cannot start the launchpad: it is not there"
    assert told == (MISSING, f"no child can be started: {why}")
    assert [row["what"] for row in report["probes"]] == [p.what for p in PROBES]
    assert set(report["probes"][0]) == {
        "what",
        "state",
        "detail",
        "probed",
        "without",
        "needed",
    }


def test_a_machine_without_what_is_needed_is_told_by_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "pidfd_open", refusing(errno.ENOSYS))
    text, status = examine_machine()
    assert status == doctor.FOUND
    # A launchpad could not end what it starts: none is started.
    assert "landlock unknown: not tried without pidfds" in " ".join(text.split())


# ---------------------------------------------------------------- sockets, and asking


# attack 39; sun_path has 108 bytes, a directory may have more
@pytest.mark.parametrize("directory", [".", "d" * 120])
def test_a_socket_that_nobody_listens_on_is_found(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / directory).mkdir(exist_ok=True)
    path = str(tmp_path / directory / "control")
    monkeypatch.setenv("SANDHOST_CONTROL", path)
    monkeypatch.chdir(tmp_path / directory)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind("control")
    text, status = find_leaks(None, tmp=str(tmp_path))
    assert status == doctor.FOUND
    assert f"path {path}" in text
    with pytest.raises(ControlError, match="its host has ended"):
        find_leaks(path)


def test_a_host_that_is_named_and_not_there_cannot_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ControlError, match="no such socket"):
        find_leaks(str(tmp_path / "control"))
    monkeypatch.setenv("SANDHOST_CONTROL", str(tmp_path / "control"))
    with pytest.raises(ControlError, match="no such socket"):
        find_leaks(None)


@pytest.mark.parametrize(
    ("answer", "status"), [({"clean": True}, 0), ({"clean": False}, 1), ({}, 1)]
)
def test_a_host_is_asked_where_one_is_named(
    answer: dict[str, object], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def call(path: str, do: str) -> dict[str, object]:
        asked.append((path, do))
        return answer

    monkeypatch.setattr(doctor, "call", call)
    assert find_leaks("/x/control")[1] == status
    assert asked == [("/x/control", "leaks")]


def test_an_answer_that_is_no_report_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "call", lambda *_: [])
    with pytest.raises(ControlError, match="its answer is no report"):
        find_leaks("/x/control")


# attack 23
def test_names_in_the_report_cannot_forge_lines() -> None:
    report = {
        "clean": False,
        "staged": [{"directory": "a\nnothing found", "name": "\x1b[2J"}],
    }
    lines = leaks_text("host 1", report).splitlines()
    assert lines == [
        "host 1:",
        "1 names of files that were being published:",
        "  directory a?nothing found, name ?[2J",
    ]


def test_the_doctor_needs_no_trio() -> None:
    code = "import sys, supervisor.cli.doctor; print('trio' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True
    )
    assert done.stdout.strip() == b"False"
