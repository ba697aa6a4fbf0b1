"""The layers of children of the shipped unit and its strict variant."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from supervisor.sandbox.plan import LAYERS
from tests.architecture.tree import ROOT
from tests.system.systemd.booted import booted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.attack]

UNITS = ROOT / "systemd"
CONFIG = """
[child.a]
command = ["sh", "-c", '''
echo pids $(ls /proc | grep -c '^[0-9]')
echo networks $(tail -n +3 /proc/net/dev | cut -d: -f1)
echo of-its-init $(tail -n +3 /proc/1/net/dev | cut -d: -f1)
cat /etc/sandhost/sandhost.toml
ls /run /home /root /var/lib/sandhost/logs
echo user $(id -u) of $(cut -c12-22 /proc/self/uid_map | head -1)
exec sleep 1000
''']
[child.b]
command = ["sleep", "1000"]
"""

HOST_IS_NOT_ROOT = {"uid"}


# attack 50: the walls are what the product is for; a unit that takes them away is none.
def test_a_child_of_the_shipped_unit_has_its_walls(tmp_path: Path) -> None:
    with booted(tmp_path, CONFIG) as it:
        it.wait_active()
        assert it.show("User") == "sandhost"
        rows = it.children()
        assert len(rows) == 2
        for row in rows:
            isolation = row["isolation"]
            assert set(LAYERS) - set(isolation["layers"]) == HOST_IS_NOT_ROOT, isolation
            assert isolation["label"] == "auto"
            assert isolation["network"] == "none"
        # Its report of itself is true.
        ns = ("mnt", "pid", "net", "ipc", "uts", "user")
        a, b = (
            [it.run("readlink", f"/proc/{row['pid']}/ns/{kind}").stdout for kind in ns]
            for row in rows
        )
        main = it.show("MainPID")
        host = [it.run("readlink", f"/proc/{main}/ns/{kind}").stdout for kind in ns]
        assert not set(a) & set(b)
        assert not set(a) & set(host)
        said = it.wait(lambda: it.sandhost("logs", "a"), "nothing was said")
        lines = dict(line.split(" ", 1) for line in said.splitlines() if " " in line)
        assert int(lines["pids"]) < 8
        assert lines["networks"] == lines["of-its-init"] == "lo"
        for place in ("/etc/sandhost/sandhost.toml", "/run", "/home", "/root"):
            assert re.search(f"{place}'?: (Permission denied|No such file)", said), said
        assert "without the sandbox layer" not in it.said()
        it.run("systemctl", "stop", "sandhost.service")
        assert it.show("Result") == "success"


NETWORK_CONFIG = """
[policy.names]
network = ["granted.example"]
[child.a]
command = ["sh", "-c", "getent ahosts granted.example; getent ahosts other.example || echo none; sleep 1000"]
policy = "names"
"""


# spec NET1: in the shipped unit too.
def test_a_child_of_the_shipped_unit_has_its_network(tmp_path: Path) -> None:
    with booted(tmp_path, NETWORK_CONFIG) as it:
        it.wait_active()
        (row,) = it.children()
        assert set(LAYERS) - set(row["isolation"]["layers"]) == HOST_IS_NOT_ROOT
        it.wait(lambda: "none\n" in it.sandhost("logs", "a"), "no second answer")
        assert "\n198.18." in it.sandhost("logs", "a")


# An operator who wants no namespaces in the service has a drop-in, and is told of what that takes.
def test_the_strict_variant_is_told_of_each_wall_that_it_takes(tmp_path: Path) -> None:
    strict = (UNITS / "sandhost-strict.conf").read_text()
    service = strict.partition("[Service]\n")[2]
    with booted(tmp_path, CONFIG, service=service) as it:
        it.wait_active()
        for row in it.children():
            isolation = row["isolation"]
            assert {"landlock", "seccomp", "rlimits", "cgroup", "capabilities"} <= set(
                isolation["layers"]
            )
            lost = {*isolation["missing"]} - HOST_IS_NOT_ROOT
            assert lost == {"userns", "mountns", "pidns", "netns", "ipcns", "utsns"}
            assert isolation["label"] == "auto-6"
        # Once for a policy, not for each child.
        assert it.said().count("without the sandbox layer 'netns'") == 1


# The units are judged by the tool that operators use.
@pytest.mark.parametrize(("variant", "most"), [("", 2.5), ("strict", 1.5)])
def test_the_exposure_is_low(tmp_path: Path, variant: str, most: float) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "sandhost.service"
    shutil.copy(UNITS / "sandhost.service", unit)
    if variant:
        (tmp_path / "sandhost.service.d").mkdir()
        shutil.copy(
            UNITS / "sandhost-strict.conf", tmp_path / "sandhost.service.d" / "a.conf"
        )
    words = [tool, "security", "--offline=true", str(unit)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    exposure = re.search(r"exposure level for \S+: ([\d.]+) ", done.stdout)
    assert exposure is not None, done.stdout[-300:] + done.stderr
    assert float(exposure[1]) <= most, done.stdout
