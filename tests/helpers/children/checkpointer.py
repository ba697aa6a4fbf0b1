"""Makes checkpoints in processes of its own, one for each line of stdin.

For each line `DIRECTORY` it forks; the fork says its pid, waits for a byte on stdin, keeps
a checkpoint and says its id. So a test can trace a process that has imported everything
and has not begun.
"""

import os
import sys

from vfs.content import TOOLS, Checkpoints, Process, Shared, Store


def keep(directory: str, label: str) -> str:
    """Keep a checkpoint of three contents, one of them binary; return its id."""
    checkpoints = Checkpoints(directory)
    process = Process(Shared(Store(), TOOLS))
    for text in (f"{label}\n" * 1000, "the same in all\n" * 1000):
        process.add_text(text, "test")
    process.add(process.shared.store.put(b"\xff" + label.encode() * 500), "test")
    process.messages.append({"role": "user", "content": label})
    made = checkpoints.save(process, "owner", label)
    checkpoints.close()
    return made.id


def main() -> None:
    """Serve until stdin ends."""
    number = 0
    while line := os.read(0, 4096):
        number += 1
        pid = os.fork()
        if not pid:
            os.write(1, b"%d\n" % os.getpid())
            os.read(0, 1)
            os.write(1, keep(line.decode().strip(), str(number)).encode() + b"\n")
            os._exit(0)
        os.waitpid(pid, 0)
        os.write(1, b"over\n")


if __name__ == "__main__":
    sys.path.insert(0, "")
    main()
