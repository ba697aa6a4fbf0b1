"""A child that looks wherever a secret of the host could show, and records all.

It knows no secret.  All that it reads, by its own calls and through the door, goes into the
file `found` of its root, for the test to search.  argv: directories to look through.
"""

import contextlib
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

from vfs.client import Client

MOST_BYTES = 1 << 20
OF_A_PROCESS = ("environ", "cmdline", "status", "stat", "maps", "limits", "mountinfo")
ORDERS = ("!leak", "!leak !plain", "!leak-refused", "!status=401", "!broken", "hello")


def read(path: str) -> bytes:
    """Return the start of a file by this process's own calls."""
    with open(path, "rb") as file:
        return file.read(MOST_BYTES)


def processes() -> Iterator[str]:
    """Yield what `/proc` has of every process that is to be seen, descriptors too."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        yield from (f"/proc/{pid}/{name}" for name in OF_A_PROCESS)
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{number}"
                yield f"link {path}"
                with contextlib.suppress(OSError):
                    if os.path.isfile(path):
                        yield path


def own_calls() -> Iterator[bytes]:
    """Yield what this process finds without the door."""
    for path in processes():
        with contextlib.suppress(OSError):
            if path.startswith("link "):
                yield os.readlink(path.removeprefix("link ")).encode()
            else:
                yield read(path)


def by_the_door(client: Client, directory: str) -> Iterator[bytes]:
    """Yield every file beneath a directory that the host opens for this process."""
    for where, _, names in os.walk(directory):
        for name in names:
            for claim in (True, False):
                try:
                    file = client.open(f"{where}/{name}", "r", claim)
                except OSError as why:
                    yield str(why).encode()
                    continue
                with contextlib.suppress(OSError):
                    yield client.read(file, MOST_BYTES)
                client.close(file)


def of_the_host(client: Client) -> Iterator[bytes]:
    """Yield what the door tells of the host's own process and its launchpad."""
    parents = {os.getppid(), 1, *map(int, filter(str.isdigit, os.listdir("/proc")))}
    for pid in ("self", "thread-self", *parents):
        for name in ("environ", "cmdline", "mem", "maps", "fd/0"):
            try:
                file = client.open(f"/proc/{pid}/{name}", "r", True)
            except OSError as why:
                yield str(why).encode()
                continue
            with contextlib.suppress(OSError):
                yield client.read(file, MOST_BYTES)
            client.close(file)


def replies(client: Client) -> Iterator[bytes]:
    """Yield what the host answers about the model, also when the provider leaks."""
    for order in ORDERS:
        for outputs in ((), ("out",)):
            try:
                yield client.llm_chat_json(order, output_files=outputs)[0]
            except OSError as why:
                yield str(why).encode()
    yield client.llm_quota().encode()
    yield repr(client.llm_config()).encode()


def endpoint() -> Iterator[bytes]:
    """Yield what the endpoint answers an unmodified program."""
    base = os.environ.get("OPENAI_BASE_URL", "")
    head = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}"}
    head["Content-Type"] = "application/json"
    for order in ORDERS:
        messages = [{"role": "user", "content": order}]
        body = json.dumps({"model": "x", "messages": messages})
        ask = urllib.request.Request(  # noqa: S310 - the host's own address
            f"{base}/chat/completions", body.encode(), head
        )
        try:
            with urllib.request.urlopen(ask, timeout=60) as reply:  # noqa: S310
                yield reply.read()
        except urllib.error.HTTPError as why:
            yield why.read()
        except (OSError, ValueError) as why:
            yield repr(why).encode()


def main() -> None:
    """Look everywhere, write it down, and stay for whoever looks from outside."""
    client = Client()
    found = [repr(dict(os.environ)).encode(), repr(client.caps()).encode()]
    found += own_calls()
    found += of_the_host(client)
    found += replies(client)
    found += endpoint()
    for directory in sys.argv[1:]:
        found += by_the_door(client, directory)
    file = client.open("found", "w", False)
    for piece in found:
        client.write(file, piece + b"\n")
    client.close(file)
    os.write(1, b"looked everywhere\n")
    signal.pause()


main()
