"""The walls of a host that is not root: the same attacks, by a user of no rights."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOBODY = 65534


def nobodys_command() -> tuple[list[str], dict[str, str]]:
    """Return how that user starts an interpreter with what the tests need."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("the tests do not run as root, or setpriv (util-linux) is missing")
    become = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = sysconfig.get_path("purelib")
    for interpreter in (sys.executable, shutil.which(name, path=os.defpath)):
        if interpreter is None:
            continue
        env = {"PATH": os.defpath, "PYTHONPATH": f"{ROOT}:{packages}"}
        # Twice: the first start may still profit from what root could reach.
        again = "import subprocess, sys, trio, pytest, supervisor;"
        again += "subprocess.run([sys.executable, '-c', ''], check=True)"
        probe = [*become, interpreter, "-c", again]
        if (
            subprocess.run(probe, env=env, capture_output=True, check=False).returncode
            == 0
        ):
            return [*become, interpreter], env
    pytest.skip("no interpreter that everybody may execute has the packages")


@pytest.mark.slow
def test_the_walls_hold_for_a_host_without_rights(tmp_path: Path) -> None:
    command, env = nobodys_command()
    os.chown(tmp_path, NOBODY, NOBODY)
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == 0 and directory.name.startswith("p"):
            directory.chmod(0o711)
    env.update(TMPDIR=str(tmp_path), HOME=str(tmp_path))
    tests = ROOT / "tests" / "attacks" / "test_walls.py"
    options = (
        "-q",
        "-k",
        "auto",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path}/base",
    )
    done = subprocess.run(
        [*command, "-m", "pytest", *options, str(tests)],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


# attack 24: a child of the host's own user, and no walls between them.
@pytest.mark.slow
def test_a_key_of_the_host_is_not_to_be_seen_by_its_own_user() -> None:
    command, env = nobodys_command()
    canary = "sk-canary-2b7a90"
    env.update(TMPDIR="/tmp", HOME="/tmp", OPENAI_API_KEY=canary)
    program = (
        "import os, sys\n"
        "word = bytes.fromhex(sys.argv[1])[::-1]\n"
        "host = int(next(t for t in open(f'/proc/{os.getppid()}/status')"
        " if t.startswith('PPid')).split()[1])\n"
        "for name in ('environ', 'mem', 'auxv', 'fd', 'maps'):\n"
        "    try:\n"
        "        print(os.open(f'/proc/{host}/{name}', os.O_RDONLY))\n"
        "    except PermissionError:\n"
        "        print('EACCES')\n"
        "print(word in open('/proc/self/environ', 'rb').read())\n"
        "print(open(f'/proc/{host}/limits').read().split('core file size')[1].split()[0])"
    )
    words = ("-m", "supervisor", "run", "--sandbox", "none", "--", "/usr/bin/env")
    done = subprocess.run(
        [*command, *words, command[-1], "-c", program, canary.encode()[::-1].hex()],
        cwd="/", env=env, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["EACCES"] * 5 + ["False", "0"], done.stderr
