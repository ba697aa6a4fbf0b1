"""A host that is root gives each child a user of its own, or refuses its start.

Mounts of these tests are in a namespace of their own.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command import sandhost
from tests.helpers.daemon import daemon
from tests.helpers.scrape import curl, parsed
from tests.system.e2e.older import without

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root gives children users"),
]

IS_X86_64 = os.uname().machine == "x86_64"
UNSHARE = 272 if IS_X86_64 else 97
NEW_IPC = 0x08000000
MOUNT_SETATTR = 442

LOOK = """
import os
def seen(path):
    try:
        return sorted(os.listdir(path))
    except OSError as why:
        return why.strerror
print(os.getuid() != 0, open("note").read())
for path in ("ram", "mem", "mem/deep", "groups"):
    print(path, seen(path))
"""


def mounted(where: Path, script: str) -> tuple[str, ...]:
    """Return what runs a command with something mounted beneath a directory."""
    wrapper = ("unshare", "-m", "sh", "-c", f'set -e\ncd {where}\n{script}\nexec "$@"')
    tried = subprocess.run([*wrapper, "sh", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(tried.stderr.decode())
    return (*wrapper, "sh")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a working directory, in which other directories can be mounted on."""
    project = tmp_path / "project"
    for name in ("ram/under", "mem", "groups"):
        (project / name).mkdir(parents=True)
    (project / "note").write_text("read")
    tmp_path.chmod(0o755)
    return project


# attack 50: a cgroup mount beneath --cwd was enough for a child to be root.
def test_a_mount_that_cannot_show_owners_is_left_out_and_the_rest_is_there(
    tmp_path: Path, project: Path
) -> None:
    wrapper = mounted(
        project,
        "mount -t ramfs none ram && touch ram/secret\n"
        "mount -t tmpfs none mem && mkdir mem/deep && touch mem/own\n"
        "mount -t ramfs none mem/deep && touch mem/deep/secret\n"
        "mount -t cgroup2 none groups",
    )
    journal = tmp_path / "journal"
    words = ("--cwd", project, "--journal", journal, "--", sys.executable, "-c", LOOK)
    outcome = sandhost("run", *words, wrapper=wrapper)
    assert (outcome.status, outcome.err) == (0, b"")
    assert outcome.out.decode().splitlines() == [
        "True read",
        # Nor is what the mount covers to be seen.
        "ram []",
        "mem ['deep', 'own']",
        "mem/deep []",
        "groups []",
    ]
    lines = map(json.loads, journal.read_text().splitlines())
    (spawned,) = (line for line in lines if line["event"] == "child.spawned")
    told = spawned["isolation"]["details"]["mountns"]
    places = [f"{project}/{name}" for name in ("groups", "mem/deep", "ram")]
    assert told.endswith(f", without what is mounted at {', '.join(places)}")


# attack 50
def test_a_working_directory_that_cannot_show_owners_refuses_the_start(
    project: Path,
) -> None:
    wrapper = mounted(project, "mount -t ramfs none ram && chmod 755 ram")
    words = ("--cwd", project / "ram", "--", "id", "-u")
    outcome = sandhost("run", *words, wrapper=wrapper)
    assert (outcome.status, outcome.out) == (125, b"")
    assert outcome.said(f"{project}/ram: Invalid argument; ")
    assert outcome.said("or name a profile without 'uid'")
    # Which is the operator's word for it.
    config = project / "config.toml"
    config.write_text("[sandbox.x]\nlayers = ['landlock', 'mountns']\n")
    options = ("--config", config, "--sandbox", "x")
    outcome = sandhost("run", *options, *words, wrapper=wrapper)
    assert (outcome.status, outcome.out) == (0, b"0\n")


# attack 50: nor does the loss of another layer make a child root.
@pytest.mark.parametrize("profile", ["auto", "required"])
def test_a_machine_without_mount_namespaces_starts_no_child_as_root(
    project: Path, profile: str
) -> None:
    words = ("--sandbox", profile, "--cwd", project, "--", "id", "-u")
    outcome = sandhost("run", *words, wrapper=without(MOUNT_SETATTR, 38))
    assert (outcome.status, outcome.out) == (125, b"")
    assert outcome.said(
        "cannot start a child as a user of its own: needs the layer mountns; to start it"
        " as root, name a profile without the layer 'uid'"
    )


# attack 50: check-config tells it before anybody is started.
@pytest.mark.parametrize(
    ("profile", "wrapper", "why"),
    [
        ("layers = ['uid']", (), "needs the layer mountns"),
        ("", ("setpriv", "--inh-caps", "-all", "--bounding-set", "-chown"), "be given"),
    ],
    ids=["no mountns", "no chown"],
)
def test_a_profile_whose_children_would_be_root_is_a_fault(
    tmp_path: Path, profile: str, wrapper: tuple[str, ...], why: str
) -> None:
    text = f"[sandbox.x]\n{profile}\n[policy.p]\nsandbox = 'x'\n"
    (tmp_path / "c.toml").write_text(text)
    outcome = sandhost("check-config", "c.toml", cwd=tmp_path, wrapper=wrapper)
    assert outcome.status == 2
    text = "policy.p.sandbox: cannot start a child as a user of its own: "
    assert text in outcome.err.decode()  # beside warnings of what else it lacks
    assert why in outcome.err.decode()


CONFIG = """
[metrics]
listen = "tcp://127.0.0.1:0"
page = true
[policy.p]
[child.a]
command = ["/bin/sleep", "1000"]
policy = "p"
[child.b]
command = ["/bin/sleep", "1000"]
policy = "p"
[child.c]
command = ["/bin/sleep", "1000"]
"""


# attack 50: what a policy lost on this machine is seen: once in the log, and in each table.
def test_a_lost_layer_is_told_once_for_a_policy_and_shown_of_each_child(
    tmp_path: Path,
) -> None:
    older = without(UNSHARE, 22, NEW_IPC)
    with daemon(tmp_path, CONFIG, wrapper=older) as running:
        for name in "abc":
            running.wait(lambda name=name: running.row(name).state == "running")  # type: ignore[misc]
        lost = [line for line in running.said().splitlines() if "'ipcns'" in line]
        assert len(lost) == 2
        assert all("WARNING" in line and "Invalid argument" in line for line in lost)
        assert sum("Children of policy 'p'" in line for line in lost) == 1
        assert sum("Children of no policy" in line for line in lost) == 1
        control = ("--control", tmp_path / "run" / "control")
        for words in (("ps",), ("top", "--once")):
            table = sandhost(*words, *control).out.decode()
            assert table.count(" auto-1 ") == 3, table
        (url,) = re.findall(r"Metrics at (http://\S+)/metrics", running.said())
        figures = parsed(curl(f"{url}/metrics").body)
        name = "sandhost_children_missing_layer"
        assert figures[f"{name}{{layer=ipcns}}"] == 3
        assert figures[f"{name}{{layer=netns}}"] == 0
        page = curl(url).body
        assert page.count("auto-1") == 3
        assert running.end() == 0


# attack 50: likewise what a sidecar's own process lost, once in all its starts.
def test_a_layer_that_a_sidecar_lost_is_told_once(tmp_path: Path) -> None:
    config = "[toolexec]\n[sidecar.s]\nkind = 'go'\nstart = ['sh', '-c', 'exit 3']\n"
    older = without(UNSHARE, 22, NEW_IPC)
    with daemon(tmp_path, config, wrapper=older) as running:
        running.wait(lambda: running.said().count("is down") > 1, "two more starts")
        lost = [line for line in running.said().splitlines() if "'ipcns'" in line]
        assert len(lost) == 1
        assert running.said().count("runs without the sandbox layer") == 1
        assert "WARNING" in lost[0]
        assert "Sidecar 's' runs without the sandbox layer 'ipcns'" in lost[0]
        assert running.end() == 0
