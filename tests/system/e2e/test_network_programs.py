"""Programs that know no proxy reach granted names by name, and no others (spec NET4).

Servers of the test's own stand in a net namespace that is all the world of a host; what
runs is the whole product, in its usual sandbox. A program that is not installed is skipped.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
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
GO = """
package main

import (
	"io"
	"net"
	"os"
)

func main() {
	sock, err := net.Dial("tcp", os.Args[1])
	if err != nil {
		panic(err)
	}
	io.WriteString(sock, "GET /said HTTP/1.0\\r\\n\\r\\n")
	io.Copy(os.Stdout, sock)
}
"""
C = """
#include <netdb.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

int main(int argc, char **argv) {
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
  int fault = getaddrinfo(argv[1], argv[2], &hints, &found);
  if (fault) return puts(gai_strerror(fault)), 1;
  int sock = socket(found->ai_family, found->ai_socktype, 0);
  if (connect(sock, found->ai_addr, found->ai_addrlen)) return perror("connect"), 1;
  dprintf(sock, "GET /said HTTP/1.0\\r\\n\\r\\n");
  char part[4096];
  for (ssize_t size; (size = read(sock, part, sizeof part)) > 0;)
    if (write(1, part, size) != size) return 1;
  return 0;
}
"""
CRATE = """
[package]
name = "user"
version = "1.0.0"

[lib]
path = "Cargo.toml"

[dependencies]
demo = { version = "1", registry = "ours" }
"""
CARGO = """
mkdir "$HOME/crate" && cd "$HOME/crate" && cp {place}/Cargo.toml . &&
export CARGO_HTTP_CAINFO={trust} PATH="${{PATH}}:{cargo.parent}" &&
{cargo} fetch --config 'registries.ours.index="sparse+{url}/crates/"' 2>&1
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
    add_crate(place)
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


def add_crate(place: Path) -> None:
    """Make a sparse index with one crate (Cargo Book, Index Format)."""
    (place / "Cargo.toml").write_text(CRATE)
    packed = io.BytesIO()
    files = {
        "Cargo.toml": '[package]\nname = "demo"\nversion = "1.0.0"\n',
        "src/lib.rs": "",
    }
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"demo-1.0.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    index = place / "crates"
    (index / "de" / "mo").mkdir(parents=True)
    (index / "demo.crate").write_bytes(packed.getvalue())
    dl = f"{URL}/crates/{{crate}}.crate"
    (index / "config.json").write_text(json.dumps({"dl": dl}))
    row = {
        "name": "demo",
        "vers": "1.0.0",
        "deps": [],
        "cksum": hashlib.sha256(packed.getvalue()).hexdigest(),
        "features": {},
        "yanked": False,
    }
    (index / "de" / "mo" / "demo").write_text(json.dumps(row) + "\n")


def find_cargo() -> Path:
    """Return a cargo itself, not the program that chooses one; skips without."""
    found = shutil.which("rustup") or shutil.which("cargo")
    if found is None:
        pytest.skip("cargo is not installed")
    if Path(found).name == "cargo":
        return Path(found).resolve()
    done = subprocess.run(
        [found, "which", "cargo"], capture_output=True, text=True, check=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    return Path(done.stdout.strip())


def build(place: Path, name: str, text: str, *command: str) -> str:
    """Compile a program; skips where there is no compiler."""
    if shutil.which(command[0], path=PROGRAMS) is None:
        pytest.skip(f"{command[0]} is not installed")
    source, made = place / name, place / name.replace(".", "-")
    source.write_text(text)
    env = {**ENVIRONMENT, "HOME": str(place), "CGO_ENABLED": "0"}
    words = [*command, "-o", str(made), str(source)]
    subprocess.run(words, check=True, env=env, timeout=TIMEOUT_S)
    return str(made)


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


# spec NET4: cargo's own resolver and TLS, from a sparse index of the test's.
def test_cargo_fetches_a_crate_of_a_granted_name(world: Path) -> None:
    cargo = find_cargo()
    trust = str(world / "tls-made.pem")
    script = CARGO.format(place=world, trust=trust, cargo=cargo, url=URL)
    shown = ("--expose", str(cargo.parents[1]))
    out, err = run(world, "sh", "-c", script, rules=(*RULES, *shown))
    assert "Downloaded demo v1.0.0" in out, f"{out}\n{err}"


# spec NET4: a program without the C library asks DNS by itself.
def test_a_go_program_reaches_a_granted_name(world: Path) -> None:
    program = build(world, "get.go", GO, "go", "build")
    out, err = run(world, program, "web.test:80")
    assert out.endswith("from the web\n"), f"{out}\n{err}"


# spec NET4: another C library asks for both families at once, and takes the first.
def test_a_musl_program_reaches_a_granted_name(world: Path) -> None:
    program = build(world, "get.c", C, "musl-gcc", "-static")
    out, err = run(world, program, "web.test", "80")
    assert out.endswith("from the web\n"), f"{out}\n{err}"


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
