"""A child with a nested process that asks for the rights of its grandparent.

Child and nested process speak through `vfs.client`: the child attaches a connection,
narrows it, and starts the nested process with that connection as its FD 3. The nested
one tries everything that its parent may and it may not. argv: the directory that the
child may read, in which the nested one gets `sub` only. Prints a JSON object: what was
tried, and the error's class or the bytes that came.
"""

import json
import os
import sys
from typing import TYPE_CHECKING

from vfs.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable


def nested_process(grant: str) -> dict[str, str]:
    """Try to get more than `sub`, in every way there is."""
    client = Client((3,), shared=False)
    again = client.attach()

    def read(name: str, who: Client = client, claim: bool = False) -> str:
        return who.read(who.open(name, "r", claim), 99).decode()

    def narrowed(rights: dict[str, object]) -> str:
        client.narrow(rights)
        return "narrowed"

    attempts: dict[str, Callable[[], object]] = {
        "allowed": lambda: read(f"{grant}/sub/file"),
        "allowed attached": lambda: read(f"{grant}/sub/file", again),
        "parent's grant": lambda: read(f"{grant}/file"),
        "parent's grant attached": lambda: read(f"{grant}/file", again),
        "up and down": lambda: read(f"{grant}/sub/../file"),
        "root": lambda: read("in-root"),
        "root attached": lambda: read("in-root", again),
        "claim": lambda: read(f"{grant}/file", client, claim=True),
        "write": lambda: client.open(f"{grant}/sub/file", "r+"),
        "narrow wider": lambda: narrowed({"read": [grant]}),
        "narrow to root": lambda: narrowed({"read": ["."]}),
        "narrow to write": lambda: narrowed({"write": [f"{grant}/sub"]}),
        "narrow to everything": lambda: narrowed({"read": ["/"], "write": ["/"]}),
        "narrow to less": lambda: narrowed({"read": [f"{grant}/sub/deeper"]}),
        "after less": lambda: read(f"{grant}/sub/file"),
        "back again": lambda: narrowed({"read": [f"{grant}/sub"]}),
        "attached before": lambda: read(f"{grant}/sub/file", again),
    }
    told = {}
    for what, attempt in attempts.items():
        try:
            told[what] = str(attempt())
        except OSError as why:
            told[what] = type(why).__name__
    return told


def main() -> None:
    """Attach, narrow, and hand the connection to a process of its own."""
    grant = sys.argv[1]
    mine = Client()
    theirs = mine.attach()
    theirs.narrow({"read": [f"{grant}/sub"]})
    door = theirs.release()
    pid = os.fork()
    if pid == 0:
        os.dup2(door, 3)
        os.write(1, json.dumps(nested_process(grant)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    # The parent still has the rights that the nested one gave up.
    with mine.open_file("in-root") as file:
        os._exit(0 if file.read(99) == b"root" else 1)


main()
