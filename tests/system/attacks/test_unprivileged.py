"""The walls of a host that is not root: the same attacks, by a user of no rights."""

import atexit
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.test_attack_walls import attacks_of, collected
from tests.architecture.tree import ROOT
from tests.helpers.rounds import LONG, LONG_ALONE
from tests.system.attacks.conftest import KINDS

NOBODY = 65534 - int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""A user of no rights, for each worker its own: of some things, as descriptors in flight
over sockets, the kernel counts how many a user has."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of that user's.

    Not pytest's: another run of root's takes the way to its directories from others.
    """
    with tempfile.TemporaryDirectory(prefix="sandhost-tests-") as name:
        yield Path(name)


LAUNCHER = """#!{python}
import sys
from supervisor.__main__ import main
sys.exit(main())
"""


def nobodys_command(where: Path) -> tuple[list[str], dict[str, str]]:
    """Return how that user starts an interpreter with what the tests need.

    It is one that everybody may execute, with the packages of these tests and a command
    `sandhost` beside it, as an installation has them.

    Args:
        where: the user's directory, made its own here.

    Returns:
        The words, and the environment.
    """
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("the tests do not run as root, or setpriv (util-linux) is missing")
    become = (setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    os.chown(where, NOBODY, NOBODY)
    env = {"PATH": os.defpath, "TMPDIR": str(where), "HOME": str(where)}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    python = installed_for_nobody(become)
    if python is None:
        pytest.skip("no interpreter that everybody may execute has the packages")
    return [*become, python], env


@functools.cache
def installed_for_nobody(become: tuple[str, ...]) -> str | None:
    """Return an interpreter that the user may start, one for all tests.

    Returns:
        Its path; None if there is none that has the packages.
    """
    directory = tempfile.TemporaryDirectory(prefix="nobody-")
    atexit.register(directory.cleanup)
    where = Path(directory.name)
    where.chmod(0o755)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    env = {"PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1"}
    for interpreter in (sys.executable, shutil.which(name, path=os.defpath)):
        if interpreter is None:
            continue
        made = where / "installation"
        python = made / "bin" / "python"
        words = [interpreter, "-m", "venv", "--clear", "--without-pip", str(made)]
        if subprocess.run(words, capture_output=True, check=False).returncode != 0:
            continue
        packages = f"{ROOT}\n{sysconfig.get_path('purelib')}\n"
        (made / "lib" / name / "site-packages" / "tests.pth").write_text(packages)
        (made / "bin" / "sandhost").write_text(LAUNCHER.format(python=python))
        (made / "bin" / "sandhost").chmod(0o755)
        # Twice: the first start may still profit from what root could reach.
        again = "import subprocess, sys, trio, pytest, supervisor;"
        again += "subprocess.run([sys.executable, '-c', ''], check=True)"
        probe = [*become, str(python), "-I", "-c", again]
        if not subprocess.run(
            probe, env=env, cwd="/", capture_output=True, check=False
        ).returncode:
            return str(python)
    return None


PASSED = re.compile(r"^PASSED (tests/\S+\.py)::(\w+)(?:\[(.*)\])?$", re.MULTILINE)


def passed_by_nobody(
    where: Path,
    *options: str,
    wrapper: tuple[str, ...] = (),
    rounds: int | None = None,
    timeout_s: float = 560,
) -> list[tuple[str, str, str]]:
    """Run tests as that user; fail if not all that were not skipped passed.

    Args:
        where: the user's directory.
        options: of pytest.
        wrapper: words before the interpreter.
        rounds: of chaos; None for the short form.
        timeout_s: how long they may take.

    Returns:
        (file, test, parameters) of each that passed.
    """
    (*become, python), env = nobodys_command(where)
    if rounds is not None:
        env["CHAOS_ROUNDS"] = str(rounds)
    usual = ("-q", "-rp", "-p", "no:cacheprovider", f"--basetemp={where}/base")
    done = subprocess.run(
        [*become, *wrapper, python, "-m", "pytest", *usual, *options],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    said = PASSED.sub("", done.stdout)
    assert done.returncode == 0, said[-4000:] + done.stderr[-1000:]
    return PASSED.findall(done.stdout)


def file_passed_by_nobody(
    request: pytest.FixtureRequest, *, rounds: int | None = None, timeout_s: float = 560
) -> list[tuple[str, str, str]]:
    """Run all tests of the current test's own file as that user; as above."""
    file = request.node.path.as_posix()
    with tempfile.TemporaryDirectory(prefix="sandhost-tests-") as name:
        return passed_by_nobody(Path(name), file, rounds=rounds, timeout_s=timeout_s)


BY_NOBODY = (
    "crash", "cwd", "door", "door_socket", "ends", "fewer_walls", "groups_left", "host_proc", "leases", "lengths",
    "mounts", "names", "nesting", "reports", "roots", "shut_files", "stalls", "tools",
    "walls",
)  # fmt: skip
NOT_BY_NOBODY = {
    "canary": "the canary below is that user's",
    "key_in_memory": "root looks into processes of all users",
    "neighbours": "it measures",
    "rights_shrink": "walls have no part in it, nor has the user: the door is asked",
    "unprivileged": "it is this file",
}
"""Files of attacks that are not run, and why."""

DOOR_ALONE = frozenset({"door", "lengths", "nesting", "reports", "stalls"})
"""Files in which FD 3 is asked and answers, whatever the walls are: root tries them in
each kind of walls, a user of no rights in `auto`; in each kind as well in the long form."""

MEASURED = ("flood_delays", "never_reads_is_closed")
"""Tests in them that measure how long others wait: once is enough."""

AT_LEAST = {
    "auto": 50,
    "namespaces": 30,
    "bubblewrap": 30,
    "test_fewer_walls": 3,
    "test_cwd": 10,
}
"""So many tests there are of each kind of walls, and in files that choose their own."""

RUNS = {"auto": ("auto",), "others": tuple(AT_LEAST)[1:], "none": ("none",)}
"""The short form's choice: without walls the user matters little, which is for the long form."""

LIKE_AUTO = "namespaces"
"""Walls of which each layer is named: `auto` has them here, so they are for the long form."""


OWN_PIDS = ("unshare", "-Urpf", "--mount-proc")
"""Where whoever is nobody may say which pid is the next; it is root in there."""

WITH_OWN_PIDS, OF_OWN_PIDS = "pid_that_was_given", "tests/system/attacks/test_ends.py"
"""The test that needs that, and its file."""


def attacks_tried(passed: list[tuple[str, str, str]], kind: str) -> set[str]:
    """Return the attacks that tests of a kind of walls have tried."""
    tests = {(f, test) for f, test, words in passed if kind in words.split("-")}
    return {
        name
        for file in {f for f, _ in tests}
        for test, name in attacks_of(ROOT / file)
        if (file, test) in tests
    }


def attacks_wanted(names: list[str], kind: str) -> set[str]:
    """Return the attacks that tests in some files try in a kind of walls."""
    files = (f"tests/system/attacks/test_{name}.py" for name in names)
    return {
        attack
        for file in files
        for test, attack in attacks_of(ROOT / file)
        if kind in collected()[file, test]
    }


# A test that is skipped for that user is noticed: each attack that somebody tries in such walls is
# one that it has tried.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "run",
    [pytest.param(r, marks=() if r == "auto" else LONG_ALONE) for r in RUNS],
)
def test_the_attacks_fail_for_a_host_without_rights(place: Path, run: str) -> None:
    if run == "none" and not LONG:
        pytest.skip("without walls the user matters little: see make chaos")
    is_whole = LONG or run == "auto"
    names = [name for name in BY_NOBODY if is_whole or name not in DOOR_ALONE]
    files = [f"{ROOT}/tests/system/attacks/test_{name}.py" for name in names]
    tried = [kind for kind in RUNS[run] if LONG or kind != LIKE_AUTO]
    kinds = " or ".join(tried)
    chosen = " and ".join((f"({kinds})", *(f"not {name}" for name in MEASURED)))
    passed = passed_by_nobody(place, "-k", chosen, *files)
    own_pids = ("-k", f"({kinds}) and {WITH_OWN_PIDS}", f"{ROOT}/{OF_OWN_PIDS}")
    passed += passed_by_nobody(place, *own_pids, wrapper=OWN_PIDS)
    asked = [*BY_NOBODY, *NOT_BY_NOBODY] if is_whole else names
    for kind in tried:
        ran = [t for t in passed if kind in {Path(t[0]).stem, *t[2].split("-")}]
        assert len(ran) >= AT_LEAST.get(kind, 50), kind
        if kind in KINDS:
            assert attacks_wanted(asked, kind) - attacks_tried(passed, kind) == set()


# attack 24: a child of the host's own user, and no walls between them.
@pytest.mark.slow
def test_a_key_of_the_host_is_not_to_be_seen_by_its_own_user(place: Path) -> None:
    command, env = nobodys_command(place)
    canary = "sk-canary-2b7a90"
    env["OPENAI_API_KEY"] = canary
    program = (
        "import os, sys\n"
        "word = bytes.fromhex(sys.argv[1])[::-1]\n"
        "pad = os.getppid()\n"
        "host = int(next(t for t in open(f'/proc/{pad}/status')"
        " if t.startswith('PPid')).split()[1])\n"
        "for pid in (host, pad):\n"
        "    for name in ('environ', 'mem', 'auxv', 'fd', 'maps'):\n"
        "        try:\n"
        "            print(os.open(f'/proc/{pid}/{name}', os.O_RDONLY))\n"
        "        except PermissionError:\n"
        "            print('EACCES')\n"
        "print(word in open('/proc/self/environ', 'rb').read())\n"
        "print(open(f'/proc/{host}/limits').read().split('core file size')[1].split()[0])"
    )
    words = ("-m", "supervisor", "run", "--sandbox", "none", "--", "/usr/bin/env")
    # Where no core file would be written anyhow, nothing would be seen of the limit.
    cores = ("sh", "-c", 'ulimit -S -c "$(ulimit -H -c)"; exec "$@"', "sh")
    done = subprocess.run(
        [*cores, *command, *words, command[-1], "-c", program, canary.encode()[::-1].hex()],
        cwd="/", env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["EACCES"] * 10 + ["False", "0"], done.stderr
