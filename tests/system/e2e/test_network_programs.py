"""Programs without a proxy reach granted names, and no others (spec NET4).

Servers of the test's own stand in a net namespace that is all the world of a host; what
runs is the whole product, in its usual sandbox. A program that is not installed is skipped.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import networkworld
from tests.helpers.command import ENVIRONMENT, SANDHOST, TIMEOUT_S
from tests.helpers.networkclients import (
    CLIENTS,
    NAME,
    PLAIN,
    PORTS,
    URL,
    MissingError,
    command,
    fill,
    installation,
)

pytestmark = pytest.mark.slow

RULES = ("--network", f"{NAME}:{PORTS}")


@pytest.fixture(scope="module")
def world() -> Iterator[Path]:
    """A directory with what the servers of the world serve."""
    if os.geteuid() or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("a world of its own needs root, unshare(1) and ip(8)")
    # A child that is no root sees it, as the directory in which its host is started.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield fill(Path(name))


def run(world: Path, *command: str, rules: tuple[str, ...] = RULES) -> tuple[str, str]:
    """Return what a program in a child has written on stdout, and what is in stderr."""
    where = (str(world), str(world / "tls.pem"))
    outer = ("unshare", "--net", "--mount", sys.executable, networkworld.__file__)
    done = subprocess.run(
        [*outer, *where, SANDHOST, "run", *rules, "--", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=ENVIRONMENT,
        cwd=world,
    )
    return done.stdout, done.stderr


# spec NET4: no program has to know; names come first.
# spec NET6: over TLS and without, and where the server speaks first.
@pytest.mark.parametrize("name", CLIENTS)
def test_a_program_reaches_a_granted_name(name: str, world: Path) -> None:
    client = CLIENTS[name]
    try:
        words = command(client, world)
    except MissingError as why:
        pytest.skip(str(why))
    shown = installation(client)
    options = () if shown is None else ("--expose", str(shown))
    out, err = run(world, *words, rules=(*RULES, *options))
    assert client.wanted in out, f"{out}\n{err}"


# spec NET5: other names do not exist, and other ports refuse connections.
def test_a_program_reaches_nothing_else(world: Path) -> None:
    tries = "; ".join(
        f"curl -sS -m 20 {url} 2>&1"
        for url in (f"{PLAIN}:81/", "http://203.0.113.5/said", "http://other.test/")
    )
    out, _ = run(world, "sh", "-c", tries)
    first, second, third = out.splitlines()
    assert "Connection refused" in first or "Couldn't connect" in first
    assert "unreachable" in second or "Couldn't connect" in second
    assert "Could not resolve host" in third


# spec NET8: a program that was told of the proxy reaches the same, and is told why not.
def test_a_program_is_told_by_the_proxy(world: Path) -> None:
    trust = str(world / "tls-made.pem")
    tries = (
        f"curl -sS --cacert {trust} {URL}/said; curl -sS {PLAIN}/said;"
        f" curl -sS http://other.test/"
    )
    out, err = run(world, "sh", "-c", tries, rules=(*RULES, "--proxy-env"))
    assert out.count("from the web") == 2, err
    assert json.loads(out.splitlines()[-1])["rule"] == "other.test:80"
