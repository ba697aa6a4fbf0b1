"""Programs that know no proxy reach granted names by name, and no others (spec NET4).

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
from tests.helpers.certificates import certificate
from tests.helpers.command import ENVIRONMENT, PROGRAMS, SANDHOST, TIMEOUT_S

pytestmark = pytest.mark.slow

RULES = ("--network", "web.test:22,80,443,5432")
URL, PLAIN = "https://web.test", "http://web.test"

JAVA = """
import java.net.*;
import java.util.*;
class Get {
    public static void main(String[] a) throws Exception {
        try (Scanner s = new Scanner(new URL(a[0]).openStream())) {
            System.out.println(s.nextLine());
        }
    }
}
"""
ASYNCIO = """
import asyncio, ssl, sys
async def main():
    context = ssl.create_default_context(cafile=sys.argv[1])
    streams = await asyncio.open_connection("web.test", 443, ssl=context)
    streams[1].write(b"GET /said HTTP/1.0\\r\\n\\r\\n")
    print((await streams[0].read()).decode())
asyncio.run(main())
"""
NODE = f"fetch('{PLAIN}/said').then(r => r.text()).then(t => console.log(t))"


@pytest.fixture(scope="module")
def world() -> Iterator[Path]:
    """A directory with what the servers of the world serve."""
    if os.geteuid() or shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("a world of its own needs root, unshare(1) and ip(8)")
    # A child that is no root sees it, as the directory in which its host is started.
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield fill(Path(name))


def fill(place: Path) -> Path:
    """Make what is served."""
    certificate(place, "web.test")
    (place / "said").write_text("from the web\n")
    (place / "Get.java").write_text(JAVA)
    simple = place / "simple" / "demo"
    simple.mkdir(parents=True)
    (simple / "index.html").write_text("<a href='/demo-1.0.tar.gz'>demo-1.0.tar.gz</a>")
    (place / "demo-1.0.tar.gz").write_bytes(b"")
    version = {"name": "demo", "version": "1.0.0", "dist": {"tarball": f"{URL}/demo"}}
    package = {"name": "demo", "dist-tags": {"latest": "1.0.0"}}
    text = json.dumps({**package, "versions": {"1.0.0": version}})
    (place / "npm").mkdir()
    (place / "npm" / "demo").write_text(text)
    if shutil.which("git"):
        repository = str(place / "demo.git")
        commands = (
            ("init", "-q", "--bare", repository),
            ("-C", repository, "update-server-info"),
        )
        for command in commands:
            subprocess.run(["git", *command], check=True, timeout=TIMEOUT_S)
        head = place / "demo.git" / "info" / "refs"
        head.write_text(f"{'5' * 40}\trefs/heads/of-the-test\n")
    for path in (place, *place.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return place


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


def programs(place: str) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return by name: a command, and what it writes if it has reached its server."""
    trust = f"{place}/tls-made.pem"
    return {
        "curl": (("curl", "-sS", "--cacert", trust, f"{URL}/said"), "from the web"),
        "wget": (("wget", "-qO-", f"--ca-certificate={trust}", f"{URL}/said"), "from the web"),
        "busybox": (("busybox", "wget", "-qO-", f"{PLAIN}/said"), "from the web"),
        "git": (
            ("git", "-c", f"http.sslCAInfo={trust}", "ls-remote", f"{URL}/demo.git"),
            "refs/heads/of-the-test",
        ),
        "ssh": (
            ("sh", "-c", "ssh -v web.test 2>&1"),
            "remote software version OfTheTest",
        ),
        "pip": (
            (sys.executable, "-m", "pip", "--cert", trust, "index", "versions", "-i",
             f"{URL}/simple", "demo"),
            "Available versions: 1.0",
        ),
        "npm": (
            ("npm", "view", "demo", "version", f"--registry={URL}/npm", f"--cafile={trust}"),
            "1.0.0",
        ),
        "java": (("java", f"{place}/Get.java", f"{PLAIN}/said"), "from the web"),
        "node": (("node", "-e", NODE), "from the web"),
        "psql": (("psql", "-h", "web.test", "-U", "a", "-Atc", "select 1"), "from postgres"),
        "python3": ((sys.executable, "-c", ASYNCIO, trust), "from the web"),
    }  # fmt: skip


# spec NET4: no program has to know; names come first.
# spec NET6: over TLS and without, and where the server speaks first.
@pytest.mark.parametrize("name", programs(""))
def test_a_program_reaches_a_granted_name(name: str, world: Path) -> None:
    if name != "pip" and shutil.which(name, path=PROGRAMS) is None:
        pytest.skip(f"{name} is not installed")
    command, wanted = programs(str(world))[name]
    out, err = run(world, *command)
    assert wanted in out, f"{out}\n{err}"


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
