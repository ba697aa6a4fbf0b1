"""Directions of imports.

Supervisor -> vfs -> protocol.

The contracts of `pyproject.toml` say what import-linter can say; the rest is here:
one home for psutil, and what a child pays for at its start.
"""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture import uses
from tests.architecture.tree import (
    PACKAGES,
    ROOT,
    module_name,
    parsed,
    product_files,
    relative,
)

KERNEL_OF_LAUNCHPAD = (
    *("epoll", "kill_timer", "mount_calls", "namespaces", "processes", "syscalls"),
)
"""Modules of `hostlib.linux` that the launchpad loads; they use the standard library."""
PSUTIL_HOME = "supervisor.usage.samples"

# Each costs a child more at its start than everything that it needs together.
HEAVY = {
    "asyncio", "ctypes", "dataclasses", "inspect", "json", "logging", "pathlib", "re",
    "shutil", "socket", "subprocess", "tempfile", "threading", "typing",
}  # fmt: skip


def imports_of(package: str) -> Iterator[tuple[str, str, str]]:
    """Yield (importing module, "file:line", imported name) within a package.

    Imports for types only are left out.
    """
    for path in product_files():
        name = module_name(path)
        if is_in(name, package):
            for line, target in uses.imported_at_run_time(parsed(path)):
                yield name, f"{relative(path)}:{line}", target


def is_in(name: str, *packages: str) -> bool:
    """Return whether a dotted name is one of the packages or beneath one."""
    return any(name == p or name.startswith(f"{p}.") for p in packages)


def test_the_import_contracts_are_kept() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rooms_of_the_supervisor_are_in_one_order() -> None:
    """A `:` between rooms would let each import the other."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = document["tool"]["importlinter"]["contracts"]
    (rooms,) = [c for c in contracts if c["id"] == "rooms"]
    assert not [row for row in rooms["layers"] if ":" in row]
    assert len(rooms["ignore_imports"]) <= 2


def test_services_know_conversations_by_their_ports() -> None:
    allowed = ("supervisor.fsproxy.ports", "supervisor.fsproxy.replies")
    wrong = [
        f"{place}: {target}"
        for service in ("llm", "llmfd", "toolexec", "network")
        for _, place, target in imports_of(f"supervisor.{service}")
        if is_in(target, "supervisor.fsproxy") and not is_in(target, *allowed)
    ]
    assert not wrong, "\n".join(wrong)


def test_psutil_lives_in_the_watcher() -> None:
    wrong = [
        f"{place}: {target}"
        for package in PACKAGES
        for name, place, target in imports_of(package)
        if is_in(target, "psutil") and name != PSUTIL_HOME
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", ["vfs", "supervisor"])
def test_the_package_root_imports_nothing(package: str) -> None:
    tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    assert not list(uses.imported(tree))


def loaded_by(module: str) -> set[str]:
    """Return the modules that a bare interpreter loads for one import.

    `-S` keeps site-packages out, so a third-party import fails at once; `-I` keeps
    the environment out.
    """
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules);"
        f" import {module}; print(*(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, os.fspath(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def foreign(loaded: set[str], *own: str) -> set[str]:
    """Return what is neither of the standard library nor in one of `own`."""
    return {
        name
        for name in loaded
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not is_in(name, *own)
    }


@pytest.mark.parametrize("module", ["protocol", "vfs.client"])
def test_a_child_pays_for_the_standard_library_only(module: str) -> None:
    loaded = loaded_by(module)
    assert module in loaded
    assert not foreign(loaded, "protocol", "vfs")
    host_side = {
        name
        for name in loaded
        if is_in(name, "vfs", "hostlib")
        and not re.fullmatch(r"vfs(\.client[\w.]*)?", name)
    }
    assert not host_side, "the child's side pulls in the host's"


@pytest.mark.parametrize("module", ["protocol", "vfs.client", "vfs.client.shell.llm"])
def test_a_child_loads_nothing_heavy(module: str) -> None:
    assert not loaded_by(module) & HEAVY


def test_the_launchpad_loads_the_standard_library_and_its_own_files() -> None:
    others = {
        name
        for name in foreign(loaded_by("supervisor.spawn.launchpad.main"))
        if not name.startswith("supervisor.spawn.launchpad")
    }
    parents = {"supervisor", "supervisor.spawn", "hostlib", "hostlib.linux"}
    kernel = {f"hostlib.linux.{name}" for name in KERNEL_OF_LAUNCHPAD}
    assert others <= parents | kernel


def test_the_launchpad_loads_nothing_heavy() -> None:
    # prctl(2) has no other door than ctypes.
    assert not loaded_by("supervisor.spawn.launchpad.main") & (HEAVY - {"ctypes"})


def test_the_check_of_loaded_modules_sees_a_heavy_one() -> None:
    assert loaded_by("dataclasses") & HEAVY == {"dataclasses", "inspect", "re"}


def test_imports_for_types_only_are_told_apart() -> None:
    source = "import a\nif TYPE_CHECKING:\n    import b\nelse:\n    import c\n"
    tree = ast.parse(source)
    assert [name for _, name in uses.imported_at_run_time(tree)] == ["a", "c"]
    assert {name for _, name in uses.imported(tree)} == {"a", "b", "c"}


def test_the_tests_start_without_the_product() -> None:
    program = f"""
import sys
import tests.conftest
found = [name for name in sys.modules if name.partition(".")[0] in {PACKAGES!r}]
assert not found, found
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True,
        # As in a worker: no directory for temporary files is made.
        env={**os.environ, "PYTEST_XDIST_WORKER": "gw0"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
