"""Programs that reach servers of `networkworld`, and what those serve.

Each is as it is installed; what it is told is a name, an address of a file and whom to
trust. Go and C programs are compiled here.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.certificates import certificate

TIMEOUT_S = 60.0
PROGRAMS = os.pathsep.join((str(Path(sys.executable).parent), os.defpath))
"""PATH of the programs."""

NAME = "web.test"
PORTS = "22,80,443,5432"
URL, PLAIN = f"https://{NAME}", f"http://{NAME}"

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
mkdir -p "$HOME/crate" && cd "$HOME/crate" && cp PLACE/Cargo.toml . &&
export CARGO_HTTP_CAINFO=TRUST PATH="$PATH:SHOWN/bin" &&
cargo fetch --config 'registries.ours.index="sparse+URL/crates/"' 2>&1
""".replace("URL", URL)
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
SAID = "from the web"


class MissingError(Exception):
    """A program is not installed; the text says which."""


@dataclass(frozen=True, slots=True)
class Client:
    """One program and what it is to fetch.

    Attributes:
        program: has to be installed.
        words: its command; PLACE stands for the directory that is served, TRUST for the
            certificate, MADE for what was compiled, SHOWN for its installation.
        wanted: its output if it has reached its server.
        source: name and text of a source file.
        compiler: a command that compiles it.
    """

    program: str
    words: tuple[str, ...]
    wanted: str = SAID
    source: tuple[str, str] = ("", "")
    compiler: tuple[str, ...] = ()


CLIENTS = {
    "curl": Client("curl", ("curl", "-sS", "--cacert", "TRUST", f"{URL}/said")),
    "wget": Client("wget", ("wget", "-qO-", "--ca-certificate=TRUST", f"{URL}/said")),
    "busybox": Client("busybox", ("busybox", "wget", "-qO-", f"{PLAIN}/said")),
    # The variable wins over what another sandbox says of certificates.
    "git": Client(
        "git",
        ("env", "GIT_SSL_CAINFO=TRUST", "git", "ls-remote", f"{URL}/demo.git"),
        "refs/heads/of-the-test",
    ),
    "ssh": Client(
        "ssh",
        ("sh", "-c", f"ssh -v {NAME} 2>&1"),
        "remote software version OfTheTest",
    ),
    "pip": Client(
        "pip",
        (sys.executable, "-m", "pip", "--cert", "TRUST", "index", "versions", "-i",
         f"{URL}/simple", "demo"),
        "Available versions: 1.0",
    ),
    "npm": Client(
        "npm",
        ("npm", "view", "demo", "version", f"--registry={URL}/npm", "--cafile=TRUST"),
        "1.0.0",
    ),
    "cargo": Client("cargo", ("sh", "-c", CARGO), "Downloaded demo v1.0.0"),
    "java": Client("java", ("java", "PLACE/Get.java", f"{PLAIN}/said")),
    "node": Client("node", ("node", "-e", NODE)),
    "psql": Client(
        "psql", ("psql", "-h", NAME, "-U", "a", "-Atc", "select 1"), "from postgres"
    ),
    "asyncio": Client("python3", (sys.executable, "-c", ASYNCIO, "TRUST")),
    "go": Client(
        "go", ("MADE", f"{NAME}:80"), SAID, ("get.go", GO), ("go", "build")
    ),
    "musl": Client(
        "musl-gcc", ("MADE", NAME, "80"), SAID, ("get.c", C), ("musl-gcc", "-static")
    ),
}  # fmt: skip
"""Each asks in its own way: by the C library's resolver, by its own, by musl's."""


def command(client: Client, place: Path) -> tuple[str, ...]:
    """Return a client's command; compile it first if needed.

    Raises:
        MissingError: its program is not installed.
    """
    words = {"PLACE": str(place), "TRUST": str(place / "tls-made.pem")}
    shown = installation(client)
    if shown is not None:
        words["SHOWN"] = str(shown)
    elif shutil.which(client.program, path=PROGRAMS) is None:
        raise MissingError(f"{client.program} is not installed")
    if client.compiler:
        words["MADE"] = build(client, place)
    found = list(client.words)
    for name, value in words.items():
        found = [word.replace(name, value) for word in found]
    return tuple(found)


def installation(client: Client) -> Path | None:
    """Return what has to be shown of a client by name; cargo's is beneath a home.

    Raises:
        MissingError: its program is not installed.
    """
    if client.program != "cargo":
        return None
    rustup = shutil.which("rustup")
    if rustup is None:
        found = shutil.which("cargo")
        if found is None:
            raise MissingError("cargo is not installed")
        return Path(found).resolve().parents[1]
    done = subprocess.run(
        [rustup, "which", "cargo"], capture_output=True, text=True, check=True,
        timeout=TIMEOUT_S,
    )  # fmt: skip
    return Path(done.stdout.strip()).parents[1]


def build(client: Client, place: Path) -> str:
    """Compile a client; return the program."""
    name, text = client.source
    source, made = place / name, place / name.replace(".", "-")
    source.write_text(text)
    env = {"PATH": PROGRAMS, "HOME": str(place), "CGO_ENABLED": "0"}
    words = [*client.compiler, "-o", str(made), str(source)]
    subprocess.run(words, check=True, env=env, timeout=TIMEOUT_S)
    return str(made)


def fill(place: Path) -> Path:
    """Make what is served; return the directory."""
    certificate(place, NAME)
    (place / "said").write_text(f"{SAID}\n")
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
    _add_crate(place)
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


def _add_crate(place: Path) -> None:
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
