"""The HOME, name, terminal and `/etc` of programs that do not know the host."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.command import ENVIRONMENT, Outcome, sandhost
from tests.system.attacks.test_unprivileged import nobodys_command
from tests.system.e2e.layers import TABLE, layers, present

pytestmark = pytest.mark.slow

IS_ROOT = os.geteuid() == 0


@cache
def gives_mounts() -> bool:
    """Tell whether a child here gets mounts of its own."""
    return "mountns" in present(layers())


def shell(script: str, *options: str) -> Outcome:
    """Run a shell script behind a door."""
    return sandhost("run", *options, "--", "sh", "-c", script)


def says(script: str, *options: str) -> str:
    """Return what it prints; it has to end well."""
    outcome = shell(script, *options)
    assert outcome.status == 0, outcome
    return outcome.out.decode().strip()


# spec HM1
def test_home_is_writable_private_and_gone_afterwards() -> None:
    script = (
        'echo x > "$HOME/.rc" && cat "$HOME/.rc" && stat -c %a "$HOME" && echo "$HOME"'
    )
    content, mode, home = says(script).split()
    assert (content, mode) == ("x", "700")
    assert home != ENVIRONMENT["HOME"]
    assert not Path(home).exists()


# spec HM1
def test_without_walls_home_stays() -> None:
    assert says('echo "$HOME"', "--sandbox", "none") == ENVIRONMENT["HOME"]


# spec HM1
@pytest.mark.parametrize("options", [("--env", "HOME=/x"), ("--pass-env", "HOME")])
def test_a_home_that_is_named_wins(options: tuple[str, str]) -> None:
    expected = "/x" if options[0] == "--env" else ENVIRONMENT["HOME"]
    assert says('echo "$HOME"', *options) == expected


# spec HM1
def test_a_kept_home_is_given_again(tmp_path: Path) -> None:
    home = tmp_path / "home"
    script = (
        'echo "$HOME"; echo x >> "$HOME/seen"; cat "$HOME/seen"; stat -c %U "$HOME"'
    )
    me = "root" if IS_ROOT else None
    for runs in (1, 2):
        first, *seen, _ = says(script, "--home", str(home)).split()
        assert first == str(home)
        assert seen == ["x"] * runs
    assert me is None or (home / "seen").owner() == me


# spec HM1
@pytest.mark.skipif(not IS_ROOT, reason="it takes root to have another's directory")
def test_a_kept_home_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 1234, 1234)
    outcome = shell("true", "--home", str(tmp_path))
    assert outcome.status == 125
    assert "HOME belongs to user 1234" in outcome.err.decode()


# spec HM1
@pytest.mark.parametrize("is_kept", [False, True])
def test_the_operator_chooses_the_first_entries(
    tmp_path: Path, *, is_kept: bool
) -> None:
    config = tmp_path / "c.toml"
    kept = f'home = "{tmp_path}/kept"\n' if is_kept else ""
    config.write_text(
        f"[policy.run]\n{kept}"
        'home_files = { ".gitconfig" = "[user]\\nname = A\\n", "a/b" = "2" }\n'
    )
    options = ("--config", str(config))
    script = 'cat "$HOME/.gitconfig" "$HOME/a/b"; echo "$HOME"; echo 3 > "$HOME/a/b"'
    said = says(script, *options)
    assert said.startswith("[user]\nname = A\n2")
    if is_kept:
        assert says('cat "$HOME/a/b"', *options) == "3"


# spec HM1
def test_first_entries_stay_within_home(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[policy.run]\nhome_files = { "../x" = "" }\n')
    outcome = shell("true", "--config", str(config))
    assert outcome.status == 125
    assert "home_files" in outcome.err.decode()


def python(code: str, *options: str) -> list[str]:
    """Return the lines that a Python program prints."""
    outcome = sandhost("run", *options, "--", sys.executable, "-c", code)
    assert outcome.status == 0, outcome
    return outcome.out.decode().splitlines()


needs_mounts = pytest.mark.skipif(not gives_mounts(), reason="takes the layer mountns")


# spec HM2
@needs_mounts
def test_a_child_has_a_name() -> None:
    code = """
import getpass, grp, os, pwd
me = pwd.getpwuid(os.getuid())
print(getpass.getuser(), me.pw_name, grp.getgrgid(os.getgid()).gr_name)
print(me.pw_dir == os.environ["HOME"] == os.path.expanduser("~"))
del os.environ["HOME"]
print(os.path.expanduser("~") == me.pw_dir)
print(sorted(user.pw_name for user in pwd.getpwall()))
"""
    assert python(code) == [
        "child child child",
        "True",
        "True",
        "['child', 'nobody', 'root']",
    ]
    assert says("whoami") == "child"


# spec HM2
@needs_mounts
def test_the_host_s_names_stay_with_the_host_without_mounts_of_its_own(
    tmp_path: Path,
) -> None:
    config = tmp_path / "c.toml"
    config.write_text('[sandbox.few]\nlayers = ["landlock", "rlimits"]\n')
    options = ("--config", str(config), "--sandbox", "few")
    assert says("cat /etc/passwd", *options) == Path("/etc/passwd").read_text().strip()


# spec HM2
@needs_mounts
@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_node_finds_its_user() -> None:
    code = "const u = require('os').userInfo(); console.log(u.username, u.homedir)"
    name, home = says(f'node -e "{code}"; true').split()
    assert (name, home.rpartition("/")[2]) == ("child", "home")


# spec HM3
@needs_mounts
def test_a_child_opens_terminals_of_its_own() -> None:
    code = """
import os, pty
ours, theirs = pty.openpty()
print(os.ttyname(theirs), sorted(os.listdir("/dev/pts")))
os.write(theirs, b"x")
print(os.read(ours, 1))
pid, fd = pty.fork()
if pid == 0:
    os.write(os.open("/dev/tty", os.O_RDWR), b"y")
    os._exit(0)
print(os.read(fd, 100))
"""
    assert python(code) == [
        "/dev/pts/0 ['0', 'ptmx']",
        "b'x'",
        "b'y'",
    ]


# spec HM3
@needs_mounts
def test_nothing_is_put_into_a_terminal() -> None:
    code = """
import errno, fcntl, pty, termios
ours, theirs = pty.openpty()
try:
    fcntl.ioctl(theirs, termios.TIOCSTI, b"x")
except OSError as why:
    print(errno.errorcode[why.errno])
"""
    assert python(code) == ["EPERM"]


# spec HM3
@needs_mounts
def test_two_children_have_not_the_same_terminals() -> None:
    code = (
        "import os, pty; print(os.ttyname(pty.openpty()[1]), *os.listdir('/dev/pts'))"
    )
    words = (sys.executable, "-c", f"{code}; input()")
    outcome = sandhost("pipeline", "--", *words, ":::", "sh", "-c", "cat; ls /dev/pts")
    assert outcome.out.decode().split() == ["/dev/pts/0", "0", "ptmx", "ptmx"]


# spec HM3
@needs_mounts
@pytest.mark.skipif(shutil.which("script") is None, reason="there is no script(1)")
def test_script_runs_a_program_in_a_terminal() -> None:
    assert says("script -qec 'tty; test -t 1' /dev/null </dev/null") == "/dev/pts/0"


# spec HM3
@needs_mounts
@pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux")
def test_tmux_runs() -> None:
    script = """
export TERM=xterm
tmux -S "$TMPDIR/s" new-session -d 'tty > "$HOME/tty"; tmux wait-for -S done; cat' &&
tmux -S "$TMPDIR/s" wait-for done && cat "$HOME/tty"; tmux -S "$TMPDIR/s" kill-server
"""
    assert says(script).startswith("/dev/pts/")


# spec HM3
def test_standard_descriptors_have_names() -> None:
    assert says("echo x > /dev/stdout; ls /dev/fd | head -1") == "x\n0"


# spec HM4
@needs_mounts
def test_what_is_seen_of_etc_can_be_read() -> None:
    code = """
import os
for top, directories, files in os.walk("/etc", onerror=print):
    for name in files:
        path = os.path.join(top, name)
        try:
            with open(path, "rb") as file:
                file.read(1)
        except FileNotFoundError:  # a link to nothing
            pass
        except OSError as why:
            print(why)
for name in ("shadow", "cron.d", "fstab", "sudoers"):
    print(os.path.lexists("/etc/" + name))
"""
    assert python(code) == ["False"] * 4


# spec HM4
@needs_mounts
def test_programs_find_which_system_it_is() -> None:
    names = ("debian_version", "login.defs", "adduser.conf", "os-release", "skel")
    there = [name for name in names if Path("/etc", name).exists()]
    script = f"cd /etc && ls -d {' '.join(there)} && cat subuid subgid"
    assert says(script).split() == sorted(there)


# spec HM4
@needs_mounts
def test_a_child_has_a_machine_id_of_its_own() -> None:
    ids = [says("cat /etc/machine-id") for _ in range(2)]
    assert all(re.fullmatch("[0-9a-f]{32}", found) for found in ids)
    assert len({*ids}) == 2
    real = Path("/etc/machine-id")
    assert not real.exists() or real.read_text().strip() not in ids


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of a user of no rights."""
    with tempfile.TemporaryDirectory(prefix="sandhost-tests-") as name:
        yield Path(name)


# spec HM1, HM2, HM3
@needs_mounts
def test_the_child_of_a_host_without_rights_has_them_too(place: Path) -> None:
    python_words, env = nobodys_command(place)
    script = (
        'whoami; touch "$HOME/x" && ls "$HOME"; cat /etc/debian_version > /dev/null;'
        " python3 -c 'import os, pty; print(os.ttyname(pty.openpty()[1]))'"
    )
    words = [*python_words, "-m", "supervisor", "run", "--", "sh", "-c", script]
    ended = subprocess.run(
        words, env=env, cwd="/", capture_output=True, text=True, check=False
    )
    if "mountns" not in layers_of(python_words, env):
        pytest.skip("this machine gives users no mounts of their own")
    assert (ended.stdout.split(), ended.stderr) == (["child", "x", "/dev/pts/0"], "")


def layers_of(words: list[str], env: dict[str, str]) -> set[str]:
    """Return the layers that a user's child gets."""
    ask = [*words, "-c", TABLE]
    said = subprocess.run(ask, env=env, cwd="/", capture_output=True, check=False)
    return present({row["layer"]: row for row in json.loads(said.stdout)["layers"]})


# spec HM8
@pytest.mark.skipif(not IS_ROOT, reason="it takes a group of this host's")
def test_a_group_that_bounds_memory_leaves_addresses_free() -> None:
    code = "import mmap; mmap.mmap(-1, 1 << 34, flags=0x4022); print('reserved')"
    assert python(code, "--limit", "memory=512M") == ["reserved"]
