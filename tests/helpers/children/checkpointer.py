"""Makes checkpoints and exports in its own processes, one a line of stdin.

For each line `KIND DIRECTORY` it forks; the fork says its pid, waits for a byte on stdin,
does what KIND says and tells what came of it: the id of a checkpoint, the answer of an
export, or `failed: ` and why. So a test can trace a process that has imported everything
and has not begun.
"""

import os
import sys
from functools import partial

import trio

from supervisor.llmfd import (
    TOOLS,
    Checkpoints,
    ClientFiles,
    FdError,
    Process,
    ProcessParts,
    Retention,
    Store,
)
from vfs.filesystem import Filesystem
from vfs.ledger import Ledger
from vfs.places import close_places, open_place
from vfs.policy import Policy

EXPORTED = "".join(f"line {number}\n" for number in range(30_000))
"""More than two steps of the store: a first one, one between, and a last one."""


def keep(directory: str, label: str, count: int = 0) -> str:
    """Keep a checkpoint of three contents, one of them binary; return its id."""
    checkpoints = Checkpoints(directory, retention=Retention(count))
    process = Process(ProcessParts(Store(), TOOLS))
    for text in (f"{label}\n" * 1000, "the same in all\n" * 1000):
        process.add_text(text, "test")
    process.add(process.shared.store.put(b"\xff" + label.encode() * 500), "test")
    process.messages.append({"role": "user", "content": label})
    made = checkpoints.save(process, "owner", label)
    checkpoints.close()
    return made.id


def forget(directory: str) -> str:
    """Delete the oldest checkpoint; return its id."""
    checkpoints = Checkpoints(directory)
    oldest = checkpoints.all_of("owner")[0].id
    checkpoints.delete("owner", oldest)
    checkpoints.close()
    return oldest


async def export(directory: str, mode: str) -> str:
    """Off-load a content to the disk and write it to the file `out`.

    Return the answer.
    """
    root = open_place(f"{directory}/root", read=True, write=True, relative=b"")
    cwd = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    client = (fs := Filesystem()).connect(Policy((root,), cwd_fd=cwd), Ledger(), "t")
    # Nothing fits into memory: what is put in goes to a file.
    process = Process(
        ProcessParts(Store(max_memory=1, directory=f"{directory}/contents"), TOOLS)
    )
    process.files = ClientFiles(fs, client)
    try:
        process.add_text(EXPORTED, "test")
        more = {"insert_at_line": 1} if mode == "insert" else {}
        answer = await process.call(
            "fd_to_file", fd="fd:1", file_path="out", mode=mode, **more
        )
    finally:
        process.close()
        if client.files:
            os.abort()  # a file was left open
        fs.disconnect(client, "test")
        close_places((root,))
        os.close(cwd)
    return " ".join(answer.decode().split())


def work(kind: str, directory: str, number: int) -> str:
    """Do what a line says."""
    if kind in {"keep", "rotate"}:
        return keep(directory, str(number), 2 * (kind == "rotate"))
    if kind == "forget":
        return forget(directory)
    return trio.run(partial(export, directory, kind))


def main() -> None:
    """Serve until stdin ends."""
    number = 0
    while line := os.read(0, 4096):
        number += 1
        kind, _, directory = line.decode().strip().partition(" ")
        pid = os.fork()
        if not pid:
            # By a call that no test injects anything into.
            os.writev(1, [b"%d\n" % os.getpid()])
            os.read(0, 1)
            try:
                told = work(kind, directory, number)
            except FdError as why:
                told = f"failed: {why.message}; {why.details}"
            except OSError as why:  # of the opening: a host does not start then
                told = f"failed: {why.strerror}"
            os.writev(1, [told.encode() + b"\n"])
            os._exit(0)
        os.waitpid(pid, 0)
        os.writev(1, [b"over\n"])


if __name__ == "__main__":
    sys.path.insert(0, "")
    main()
