"""The units as a real systemd sees them.

Booted, watched, killed, reloaded, stopped.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT
from tests.helpers.canary import KEY, found_in
from tests.system.systemd.booted import booted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

UNITS = ROOT / "systemd"
CONFIG = """
[host]
grace = "2s"
[policy.p]
[child.a]
command = ["sh", "-c", "setsid sleep 1000 & exec sleep 1000"]
policy = "p"
restart = "always"
backoff = "10ms"
[child.b]
command = ["sleep", "1000"]
after = ["a"]
"""


@pytest.fixture
def analyze() -> str:
    """The tool, where it is installed."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    return tool


# It exits 0 on misspelled keys: only its silence tells.
def test_the_units_are_spelled_right(analyze: str, tmp_path: Path) -> None:
    names = ("sandhost.service", "sandhost.socket", "sandhost-toolexec.socket")
    for unit in names:
        text = (UNITS / unit).read_text()
        # The program is not installed on this machine.
        (tmp_path / unit).write_text(
            text.replace("/usr/local/lib/sandhost/bin/sandhost", "/bin/true")
        )
    units = [str(tmp_path / unit) for unit in names]
    command = [analyze, "verify", "--man=no", "--recursive-errors=no", *units]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_is_ready_reloaded_and_stopped_in_time(tmp_path: Path) -> None:
    with booted(
        tmp_path, CONFIG, service="LoadCredential=api_key:/etc/sandhost/api_key"
    ) as it:
        main = it.wait_active()
        # READY only when children and socket are up.
        before = {row["name"]: row["pid"] for row in it.children()}
        assert set(before) == {"a", "b"}
        assert it.show("StatusText") == "2 children"
        assert it.show("NotifyAccess") == "main"
        assert it.show("User") == "sandhost"
        assert it.python("tests.helpers.slices", str(main)) == "short\n"
        # The credential is there for the host, and in no environment.
        credential = "/run/credentials/sandhost.service/api_key"
        enter = ("nsenter", "--target", str(main), "--mount", "--user", "--wd=/")
        as_it = ("setpriv", "--reuid=sandhost", "--keep-groups", "cat", credential)
        assert it.run(*enter, *as_it).stdout == KEY + "\n"
        for pid in (main, *before.values()):
            environment = it.run("cat", f"/proc/{pid}/environ").stdout
            assert not found_in(environment.encode())
            assert "NOTIFY_SOCKET" not in environment or pid == main
        changed = CONFIG.replace("after =", "env = { A = '1' }\nafter =")
        Path(f"/proc/{it.pid}/root/etc/sandhost/sandhost.toml").write_text(changed)
        it.run("systemctl", "reload", "sandhost.service")
        after = {row["name"]: row["pid"] for row in it.children()}
        assert after["a"] == before["a"]
        assert after["b"] != before["b"]
        # A reload that is refused fails.
        Path(f"/proc/{it.pid}/root/etc/sandhost/sandhost.toml").write_text("[typo]\n")
        failed = it.run("systemctl", "reload", "sandhost.service", check=False)
        assert failed.returncode != 0
        it.run("systemctl", "stop", "sandhost.service")
        assert it.show("Result") == "success"
        assert it.show("ExecMainStatus") == "0"
        assert it.run("pgrep", "-u", "sandhost", check=False).stdout == ""


def test_a_stalled_loop_is_killed_by_the_watchdog_and_comes_back(
    tmp_path: Path,
) -> None:
    with booted(tmp_path, CONFIG, service="WatchdogSec=1s") as it:
        main = it.wait_active()
        it.run("kill", "-STOP", str(main))
        it.wait(lambda: it.show("NRestarts") == "1", "no restart")
        again = it.wait_active()
        assert again != main
        assert {row["name"] for row in it.children()} == {"a", "b"}


# It does not go away by starting again; what fails for another reason is started again.
def test_a_fault_of_the_configuration_is_not_started_again(tmp_path: Path) -> None:
    with booted(tmp_path, "[typo]\n") as it:
        it.wait(lambda: it.show("ActiveState") == "failed", "not failed")
        assert it.show("ExecMainStatus") == "78"
        assert it.show("NRestarts") == "0"
        # Nor what is found out with a start.
        path = Path(f"/proc/{it.pid}/root/etc/sandhost/sandhost.toml")
        path.write_text("[sandbox.s]\nrequired = ['uid']\n[policy.p]\nsandbox = 's'\n")
        it.run("systemctl", "start", "sandhost.service", check=False)
        assert it.show("ExecMainStatus") == "78"
        assert (it.show("ActiveState"), it.show("NRestarts")) == ("failed", "0")
        path.write_text(CONFIG)
        it.run("systemctl", "start", "sandhost.service")
        assert len(it.children()) == 2


# ADR 43: READY again, the same main pid, and a watchdog that watches the next program.
@pytest.mark.parametrize("wants", ["sandhost.service", "sandhost.socket"])
def test_a_program_is_replaced_under_the_manager(tmp_path: Path, wants: str) -> None:
    config = CONFIG + "[toolexec]\nlisten = ['unix']\n"
    with booted(tmp_path, config, service="WatchdogSec=3s", wants=wants) as it:
        if wants == "sandhost.socket":
            it.wait(
                lambda: it.show("ActiveState", wants) == "active", "no active socket"
            )
            it.sandhost("ps")  # starts it
        main = it.wait_active()
        before = {row["name"]: row["pid"] for row in it.children()}
        ready = it.show("ActiveEnterTimestampMonotonic")
        for number in (1, 2):
            answer = it.sandhost("reload", "--exec", "--json")
            told = {"generation": number, "connections_reset": 0}
            assert json.loads(answer) == told, it.said()
            it.wait(lambda: it.show("SubState") == "running", "not ready again")
            assert it.show("StatusText") == "2 children"
            assert it.wait_active() == main
            assert {row["name"]: row["pid"] for row in it.children()} == before
        assert it.show("ActiveEnterTimestampMonotonic") == ready
        # It is fed: nothing happens for longer than it would take to be killed...
        fed = it.show("WatchdogTimestampMonotonic")
        it.wait(lambda: it.show("WatchdogTimestampMonotonic") != fed, "not fed")
        it.run("sleep", "4")
        assert (it.show("NRestarts"), it.wait_active()) == ("0", main)
        # ... and it bites.
        it.run("kill", "-STOP", str(main))
        it.wait(lambda: it.show("NRestarts") == "1", "no restart")
        assert it.wait_active() != main
        it.run("systemctl", "stop", "sandhost.service")
        assert it.show("Result") == "success"
        assert it.run("pgrep", "-u", "sandhost", check=False).stdout == ""


def test_a_host_that_was_killed_leaves_no_child_and_comes_back(tmp_path: Path) -> None:
    with booted(tmp_path, CONFIG) as it:
        main = it.wait_active()
        pids = [row["pid"] for row in it.children()]
        it.run("kill", "-KILL", str(main))
        it.wait(lambda: it.show("NRestarts") == "1", "no restart")
        assert it.wait_active() != main
        rows = it.children()
        assert {row["name"] for row in rows} == {"a", "b"}
        assert not {row["pid"] for row in rows} & set(pids)
        for pid in pids:
            assert it.run("kill", "-0", str(pid), check=False).returncode != 0
        # One of each, and the one that detached itself from the first.
        sleeps = it.run("pgrep", "-c", "-x", "sleep").stdout.strip()
        assert sleeps == "3"
        assert "did not end in order" in it.said()


def test_a_control_socket_of_the_manager_starts_the_host(tmp_path: Path) -> None:
    with booted(tmp_path, CONFIG, wants="sandhost.socket") as it:
        it.wait(
            lambda: it.show("ActiveState", "sandhost.socket") == "active", "no socket"
        )
        assert it.show("ActiveState") == "inactive"
        # The question waits in the socket until the host that it starts answers.
        assert "a" in {row["name"] for row in it.children()}
        main = it.wait_active()
        assert {row["name"] for row in it.children()} == {"a", "b"}
        # `ls` exits 1 where one that it has listed is closed before it is read.
        held = it.run("ls", "-l", f"/proc/{main}/fd", check=False).stdout
        assert " 0 -> " in held
        child = it.children()[0]["pid"]
        theirs = it.run("ls", f"/proc/{child}/fd").stdout.split()
        assert theirs == ["0", "1", "2", "3"]
        assert " 3 -> socket" not in held or " 64 -> socket" in held
        it.run("systemctl", "stop", "sandhost.service")
        # It is the manager's and stays.
        it.run("test", "-S", "/run/sandhost/control")


def steps() -> list[str]:
    """The commands of docs/how-to/daemon.md that lead to a hardened unit, in order.

    Left out is what fetches: the checkout stands where pip would install it.
    """
    text = (ROOT / "docs" / "how-to" / "daemon.md").read_text()
    _, _, text = text.partition("## From an empty machine to a hardened unit\n")
    section, _, _ = text.partition("\n## ")
    blocks = section.split("```sh\n")[1:]
    lines = "".join(block.partition("```")[0] for block in blocks).splitlines()
    return [line for line in lines if "venv" not in line and "/pip " not in line]


# The page, word by word, on a machine that has the program and no unit yet.
def test_the_page_leads_to_a_hardened_unit(tmp_path: Path) -> None:
    lines = steps()
    assert len(lines) > 10
    with booted(tmp_path, CONFIG, wants="") as it:
        etc = "/etc/systemd/system"
        it.run("rm", f"{etc}/sandhost.service", f"{etc}/sandhost.socket")
        script = "set -ex\ncd /usr/local/lib/sandhost/src\n" + "\n".join(lines)
        done = it.run("sh", "-c", script)
        assert "status=0" not in done.stdout
        assert "active (running)" in done.stdout
        assert '"2 children"' in done.stdout
        assert "no faults" in done.stdout
        exposure = re.search(r"exposure level for \S+: ([\d.]+) ", done.stdout)
        assert exposure is not None
        assert float(exposure[1]) <= 2.5
        assert it.show("UnitFileState") == "enabled"
        assert {row["name"] for row in it.children()} == {"a", "b"}
        rights = it.run("stat", "-c", "%a %U", "/var/lib/sandhost", "/run/sandhost")
        assert rights.stdout.split() == ["700", "sandhost"] * 2
