"""The walls of a host that is not root: the same attacks, by a user of no rights."""

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

from tests.architecture.test_attack_walls import attacks_of, kinds_of_attacks
from tests.architecture.tree import ROOT
from tests.attacks.conftest import KINDS
from tests.chaos.rounds import LONG

NOBODY = 65534


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
    """
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("the tests do not run as root, or setpriv (util-linux) is missing")
    become = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    os.chown(where, NOBODY, NOBODY)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    env = {"PATH": os.defpath, "TMPDIR": str(where), "HOME": str(where)}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
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
            return [*become, str(python)], env
    pytest.skip("no interpreter that everybody may execute has the packages")


PASSED = re.compile(r"^PASSED (tests/\S+\.py)::(\w+)(?:\[(.*)\])?$", re.MULTILINE)


def passed_by_nobody(
    where: Path, *options: str, wrapper: tuple[str, ...] = ()
) -> list[tuple[str, str, str]]:
    """Run tests as that user; fail if not all that were not skipped passed.

    Args:
        where: the user's directory.
        options: of pytest.
        wrapper: words before the interpreter.

    Returns:
        (file, test, parameters) of each that passed.
    """
    (*become, python), env = nobodys_command(where)
    usual = ("-q", "-rp", "-p", "no:cacheprovider", f"--basetemp={where}/base")
    done = subprocess.run(
        [*become, *wrapper, python, "-m", "pytest", *usual, *options],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=560, check=False,
    )  # fmt: skip
    said = PASSED.sub("", done.stdout)
    assert done.returncode == 0, said[-4000:] + done.stderr[-1000:]
    return PASSED.findall(done.stdout)


def file_passed_by_nobody(
    request: pytest.FixtureRequest,
) -> list[tuple[str, str, str]]:
    """Run all tests of the current test's own file as that user; as above."""
    with tempfile.TemporaryDirectory(prefix="sandhost-tests-") as name:
        return passed_by_nobody(Path(name), request.node.path.as_posix())


BY_NOBODY = (
    "crash", "cwd", "door", "door_socket", "ends", "fewer_walls", "groups_left", "host_proc", "leases", "lengths",
    "mounts", "names", "nesting", "reports", "roots", "shut_files", "stalls", "tools",
    "walls",
)  # fmt: skip
NOT_BY_NOBODY = {
    "canary": "the canary below is that user's",
    "neighbours": "it measures",
    "rights_shrink": "walls have no part in it, nor has the user: the door is asked",
    "unprivileged": "it is this file",
}
"""Files of attacks that are not run, and why."""

MEASURED = ("flood_delays", "never_reads_is_closed")
"""Tests in them that measure how long others wait: once is enough."""

AT_LEAST = {
    "none": 50,
    "auto": 50,
    "namespaces": 50,
    "bubblewrap": 50,
    "fewer_walls": 3,
    "cwd": 16,
}
"""So many tests there are of each kind of walls, and of those that choose their own."""


OWN_PIDS = ("unshare", "-Urpf", "--mount-proc")
"""Where whoever is nobody may say which pid is the next; it is root in there."""

WITH_OWN_PIDS = "pid_that_was_given"
"""The test that needs that."""


def attacks_tried(passed: list[tuple[str, str, str]], kind_of: str) -> set[str]:
    """Return the attacks that tests of a kind of walls have tried."""
    tests = {(f, test) for f, test, words in passed if kind_of in words.split("-")}
    named = {f: tuple(attacks_of(ROOT / f)) for f, _ in tests}
    return {name for f in named for test, name in named[f] if (f, test) in tests}


# Each kind apart, so that they can be run at once. What is skipped for that user is noticed:
# each attack that somebody tries in such walls is one that it has tried.
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kind_of",
    [pytest.param(k, marks=[pytest.mark.chaos] * (k == "none")) for k in AT_LEAST],
)
def test_the_attacks_fail_for_a_host_without_rights(place: Path, kind_of: str) -> None:
    if kind_of == "none" and not LONG:
        pytest.skip("without walls the user matters little: see make chaos")
    files = [f"{ROOT}/tests/attacks/test_{name}.py" for name in BY_NOBODY]
    chosen = " and ".join((kind_of, *(f"not {name}" for name in MEASURED)))
    passed = passed_by_nobody(place, "-k", chosen, *files)
    assert len(passed) >= AT_LEAST[kind_of]
    if kind_of in KINDS:
        words = ("-k", f"{kind_of} and {WITH_OWN_PIDS}", *files)
        passed += passed_by_nobody(place, *words, wrapper=OWN_PIDS)
        wanted = {
            name for name, kinds in kinds_of_attacks().items() if kind_of in kinds
        }
        assert wanted - attacks_tried(passed, kind_of) == set()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_table_is_true_for_a_host_without_rights(place: Path) -> None:
    file = f"{ROOT}/tests/e2e/test_sandbox.py"
    assert len(passed_by_nobody(place, "-k", "switched_off", file)) > 10


# spec L13: what lies in a user namespace has a net namespace with the model's port.
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_endpoint_is_within_reach_for_a_host_without_rights(place: Path) -> None:
    names = ("llm/test_inner_listener", "e2e/test_llm_walled")
    files = (f"{ROOT}/tests/{name}.py" for name in names)
    # A child of that installation does not see the packages that `relay` imports.
    assert len(passed_by_nobody(place, "-k", "not nested", *files)) > 20


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_own_directories_are_hidden_by_a_host_without_rights(place: Path) -> None:
    names = ("e2e/test_own_directories.py", "toolexec_sidecars/test_own_places.py")
    files = (f"{ROOT}/tests/{name}" for name in names)
    # The packages of these tests are none of a child's to see, as an installation's are.
    assert len(passed_by_nobody(place, "-k", "not nested", *files)) >= 11


# spec WS2a, WS4, HM7
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_workspaces_are_told_of_and_edited_by_a_host_without_rights(
    place: Path,
) -> None:
    names = ("e2e/test_doctor_workspaces", "supervisor/fds/test_mcp_files")
    files = (f"{ROOT}/tests/{name}.py" for name in names)
    chosen = "each_mode_is_tried or reads_edits_and_runs"
    assert len(passed_by_nobody(place, "-k", chosen, *files)) == 2


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
