"""A real systemd as PID 1 of namespaces, with the units as they are shipped.

An overlay of this machine's root (nothing of it is changed), this checkout at
/usr/local/lib/sandhost as an installation would be, and `systemctl` in there.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.tree import ROOT
from tests.helpers import canary

SYSTEMD = "/lib/systemd/systemd"
TOOLS = ("systemctl", "systemd-sysusers", "systemd-tmpfiles", "unshare", "nsenter")
TIMEOUT_S = 60.0

TARGET = """
[Unit]
Description=what the test boots
DefaultDependencies=no
AllowIsolate=yes
Wants={wants}
"""

# There is no journal in there; what the host says goes to a file.
DROP_IN = """
[Unit]
DefaultDependencies=no
[Service]
StandardOutput=file:/said
StandardError=file:/said
# An interpreter may be built to look for its library where ProtectHome= hides it.
Environment=LD_LIBRARY_PATH=/usr/local/lib/sandhost-python/lib
{service}
"""

SOCKET_DROP_IN = "[Unit]\nDefaultDependencies=no\n"

PROGRAM = """#!/usr/local/lib/sandhost/bin/python
import sys
sys.path[:0] = ["/usr/local/lib/sandhost/src"]
from supervisor.__main__ import main
main()
"""

# Runs in the new namespaces: mounts, then the real thing.
BOOT = """
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs "$WORK"
mkdir -p "$WORK/upper" "$WORK/work" "$WORK/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$WORK/upper,workdir=$WORK/work" "$WORK/root"
cd "$WORK/root"
mount -t proc proc proc
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount --bind /dev dev
mount -t sysfs sysfs sys 2>/dev/null || mount --bind /sys sys
mount -t tmpfs tmpfs sys/fs/cgroup
mount -t cgroup2 cgroup2 sys/fs/cgroup
rm -rf etc/systemd/system usr/local/lib/sandhost usr/local/lib/sandhost-python var/lib/sandhost
mkdir -p etc/systemd/system usr/local/lib/sandhost usr/local/lib/sandhost-python
mkdir -p usr/local/lib/sandhost/bin usr/local/lib/sandhost/src "usr/local/lib/sandhost/lib/$PYTHON/site-packages"
mount --bind "$PREFIX" usr/local/lib/sandhost-python
mount --bind "$SITE" "usr/local/lib/sandhost/lib/$PYTHON/site-packages"
mount --bind "$SOURCE" usr/local/lib/sandhost/src
ln -s "/usr/local/lib/sandhost-python/bin/$PYTHON" usr/local/lib/sandhost/bin/python
echo "home = /usr/local/lib/sandhost-python/bin" > usr/local/lib/sandhost/pyvenv.cfg
cp -r "$FILES"/. .
systemd-sysusers --root="$PWD" "$PWD/usr/local/lib/sandhost/src/systemd/sandhost.sysusers" >&2
systemd-tmpfiles --root="$PWD" --create "$PWD/usr/local/lib/sandhost/src/systemd/sandhost.tmpfiles" >&2
# Not chroot(2): in one, no user namespace can be made (clone(2)), which PrivateUsers= wants.
mkdir -p mnt && pivot_root . mnt && cd / && umount -l /mnt
# As on a machine: credentials come to a service by mount propagation.
mount --make-rshared /
exec env -i container=sandhost-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
  /lib/systemd/systemd --system --unit=test.target --log-target=console --log-level=notice
"""


class Booted:
    """A system that was booted.

    Attributes:
        pid: of its PID 1, as this machine numbers it.
    """

    def __init__(self, pid: int, console: Path) -> None:
        self.pid = pid
        self._console = console

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command in there."""
        enter = ("nsenter", "--target", str(self.pid), "--all", "--root", "--wd")
        done = subprocess.run(
            [*enter, *words],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stderr}{self.said()}"
        return done

    def sandhost(self, *words: str, check: bool = True) -> str:
        """Run a command of the product in there, and return what it printed."""
        done = self.run("/usr/local/lib/sandhost/bin/sandhost", *words, check=check)
        said = done.stdout + done.stderr
        canary.told("a command", said.encode())
        return said

    def python(self, module: str, *words: str) -> str:
        """Run a module of the checkout in there, and return what it printed.

        The checkout and its interpreter are where an installation has them: by their own
        names they are not there if they lie beneath a directory that is mounted over
        (``/tmp``).
        """
        where = "/usr/local/lib/sandhost"
        script = f'cd {where}/src && exec {where}/bin/python -m "$@"'
        return self.run("sh", "-c", script, "sh", module, *words).stdout

    def show(self, name: str, unit: str = "sandhost.service") -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "-P", name, unit).stdout.strip()

    def children(self) -> list[dict[str, Any]]:
        """Return the rows of `ps`."""
        found: list[dict[str, Any]] = json.loads(self.sandhost("ps", "--json"))
        return found

    def said(self) -> str:
        """Return what the host and the manager said."""
        path = Path(f"/proc/{self.pid}/root/said")
        host = path.read_text() if path.exists() else ""
        return host + self._console.read_text(errors="replace")

    def wait(self, is_so: Callable[[], Any], what: str) -> Any:
        """Wait until something is so."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            try:
                found = is_so()
            except (AssertionError, subprocess.SubprocessError) as why:
                found, last = None, str(why)
            else:
                last = ""
            if found:
                return found
            assert time.monotonic() < deadline, f"{what}: {last}{self.said()}"
            time.sleep(0.2)  # most look by a command in there

    def wait_active(self) -> int:
        """Wait until the service is ready; return its main pid in there."""
        self.wait(lambda: self.show("ActiveState") == "active", "no active service")
        return int(self.show("MainPID"))


def missing() -> str | None:
    """Return why no system can be booted here; None if it can."""
    if os.geteuid() != 0:
        return "only root may make these namespaces"
    if not os.path.exists(SYSTEMD):
        return f"{SYSTEMD} is not installed"
    for tool in TOOLS:
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    return None


@contextmanager
def own_cgroup(where: Path) -> Iterator[Path]:
    """Make a group of the unified hierarchy, for a system to find as its root."""
    point = where / "cgroup"
    point.mkdir()
    command = ["mount", "-t", "cgroup2", "cgroup2", str(point)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no unified cgroups here: {mounted.stderr.strip()}")
    group = point / f"sandhost-test-{os.getpid()}"
    try:
        group.mkdir()
        try:
            yield group
        finally:
            _remove_group(group)
    finally:
        subprocess.run(["umount", str(point)], check=True)


def _remove_group(group: Path) -> None:
    """Remove a group and those beneath it, when the last process in it is gone."""
    deadline = time.monotonic() + TIMEOUT_S
    while "populated 1" in (group / "cgroup.events").read_text():
        assert time.monotonic() < deadline, f"{group} is not empty"
        time.sleep(0.01)
    for directory, _, _ in os.walk(group, topdown=False):
        os.rmdir(directory)


@contextmanager
def booted(
    where: Path, config: str, *, service: str = "", wants: str = "sandhost.service"
) -> Iterator[Booted]:
    """Boot a system with the shipped units; at the end it is killed.

    Args:
        where: for files of this machine.
        config: `/etc/sandhost/sandhost.toml` in there.
        service: more lines for `[Service]`.
        wants: units that are started.
    """
    why_not = missing()
    if why_not is not None:
        pytest.skip(why_not)
    files = where / "files"
    units = files / "etc" / "systemd" / "system"
    for unit, text in (
        ("sandhost.service", DROP_IN.format(service=service)),
        ("sandhost.socket", SOCKET_DROP_IN),
    ):
        (units / f"{unit}.d").mkdir(parents=True)
        (units / f"{unit}.d" / "test.conf").write_text(text)
        shutil.copy(ROOT / "systemd" / unit, units)
    (units / "test.target").write_text(TARGET.format(wants=wants))
    (files / "etc" / "sandhost").mkdir()
    (files / "etc" / "sandhost" / "sandhost.toml").write_text(config)
    (files / "etc" / "sandhost" / "api_key").write_text(canary.KEY + "\n")
    canary.leave_out(str(files / "etc" / "sandhost" / "api_key"))
    (files / "etc" / "sandhost" / "api_key").chmod(0o600)
    program = files / "usr/local/lib/sandhost/bin/sandhost"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    (where / "work").mkdir()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    env = {
        "PATH": os.defpath + ":/usr/sbin:/sbin",
        "WORK": str(where / "work"),
        "FILES": str(files),
        "PREFIX": sys.base_prefix,
        "PYTHON": version,
        "SITE": str(Path(sys.prefix) / "lib" / version / "site-packages"),
        "SOURCE": str(ROOT),
    }
    flags = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
    console = where / "console"
    with own_cgroup(where) as group, console.open("wb") as out:
        script = f'echo 0 > {group}/cgroup.procs && exec "$@"'
        unshare = ("unshare", *flags, "--fork", "--kill-child", "sh", "-c", BOOT)
        process = subprocess.Popen(
            ["sh", "-c", script, "sh", *unshare],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=env,
        )
        with process:
            try:
                yield Booted(_first_process(process, console), console)
            finally:
                process.kill()


def _first_process(process: subprocess.Popen[bytes], console: Path) -> int:
    """Wait for PID 1 to be systemd, and return its number here."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        assert process.poll() is None, console.read_text(errors="replace")
        assert time.monotonic() < deadline, console.read_text(errors="replace")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        for pid in children.read_text().split():
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            private = Path(f"/proc/{pid}/root/run/systemd/private")
            if name == "systemd" and private.exists():
                return int(pid)
        time.sleep(0.02)
