"""A child with few descriptors left: what it asks for fails, and nothing else does."""

import sys
from pathlib import Path

import pytest

from tests.helpers.command import SANDHOST, sandhost

pytestmark = pytest.mark.slow

# Descriptors are used up, and given back, between two ATTACHes.
FULL = """
import os, sys
from vfs.client import Client
client = Client()
client.attach().disconnect()
client.listdir(".")
try:
    client.stat("missing")
except OSError:
    pass
held = []
try:
    while True:
        held.append(os.dup(2))
except OSError:
    pass
try:
    client.attach()
except OSError as why:
    print(why.errno, why.strerror)
for fd in held:
    os.close(fd)
print(client.listdir("."))
client.attach().ping()
print(client.ping())
"""

# Who attaches may have many; the relay that hands them on may not.
MANY = """
from vfs.client import Client
client, held = Client(), []
try:
    while True:
        held.append(client.attach())
except OSError as why:
    print(why.errno)
for one in (client, *held):
    one.ping()
print(0 < len(held) < 20)
"""


# spec T3, N4: one answer for each request, and the connection goes on.
@pytest.mark.parametrize("transport", ["socketpair", "pipes"])
def test_a_client_without_a_descriptor_for_it_keeps_its_door(
    tmp_path: Path, transport: str
) -> None:
    (tmp_path / "full.py").write_text(FULL)
    outcome = sandhost(
        "run", "--sandbox", "none", "--transport", transport, "--cwd", tmp_path,
        "--", "sh", "-c", 'ulimit -n 64; exec "$0" full.py', sys.executable,
    )  # fmt: skip
    assert (outcome.status, outcome.err) == (0, b"")
    first, *others = outcome.out.splitlines()
    assert first.startswith(b"24 the host attached a connection that this process has")
    assert others == [b"[]", b"None"]


# spec N3, N4: a lane's failure is that lane's, and one that is not begun is nobody's.
@pytest.mark.parametrize("depth", [1, 2])
def test_a_relay_without_a_descriptor_for_it_goes_on(
    tmp_path: Path, depth: int
) -> None:
    (tmp_path / "many.py").write_text(MANY)
    above = f"{SANDHOST} relay -- " * (depth - 1)
    own = "ulimit -S -n 1024; exec $0 many.py"
    script = f"ulimit -S -n 31; exec {SANDHOST} relay -- sh -c '{own}' $0"
    outcome = sandhost(
        "run", "--sandbox", "none", "--cwd", tmp_path, "--",
        "sh", "-c", f'exec {above} sh -c "$1" "$0"', sys.executable, script,
    )  # fmt: skip
    assert (outcome.status, outcome.err) == (0, b"")
    assert outcome.out.splitlines() == [b"24", b"True"]


# What could not be done, and what to do.
@pytest.mark.parametrize("descriptors", [8, 10, 12, 14])
def test_a_relay_that_cannot_begin_says_what_to_do(descriptors: int) -> None:
    script = f"ulimit -n {descriptors}; exec {SANDHOST} relay -- true"
    outcome = sandhost("run", "--sandbox", "none", "--", "sh", "-c", script)
    assert outcome.status == 125
    assert outcome.err.startswith(b"sandhost relay: cannot ")
    assert outcome.err.endswith(b"(ulimit -n)\n")
