"""A child of the soak that uses tools and LLM fds, and dies in the middle.

Tools: one to its end with more output than memory keeps, one whose client leaves, one
that goes on without a client, one that writes in the child's root. An LLM fd that is
searched, and one that is kept. A second connection, with a file open on it.

usage: soak_child.py PROOF, which is made when all of that was done
"""

import os
import signal
import sys
from pathlib import Path

from vfs.client import Client
from vfs.client.tools import ToolClient

LINES = 30_000
"""That `seq` prints: 170 KB, of which 64 KiB stay in memory."""


def use_tools() -> None:
    """Run tools, and leave two running."""
    tools = ToolClient()
    output = tools.run("seq", str(LINES), cwd=".").output
    if not output.endswith(b"\n%d\n" % LINES):
        raise SystemExit("output of a tool is missing")
    if (
        tools.run("sh", "-c", "echo made >made; rm made; exit 3", cwd=".").exit_code
        != 3
    ):
        raise SystemExit("a tool ended as it should not have")
    tools.start("sleep", "1000", cwd=".").close()
    tools.start("sleep", "1000", cwd=".", detach=True).close()


def use_contents(client: Client) -> None:
    """Wrap a content, search it, and keep another one."""
    text = b"".join(b"line %d\n" % n for n in range(10_000))
    wrapped = client.fd_call("wrap_output", token=client.fd_put(text))
    if "<fd_result" not in wrapped:
        raise SystemExit(f"no fd: {wrapped}")
    found = client.fd_call("search_fd", fd="fd:1", query="line 9999")
    if "line 9999" not in found:
        raise SystemExit(f"not found: {found}")
    client.fd_call("wrap_output", token=client.fd_put(text + b"another\n"))


def main() -> None:
    """Use all of it; the end comes as to a child that is killed."""
    use_tools()
    client = Client()
    use_contents(client)
    client.attach().open("kept", "w")
    Path(sys.argv[1]).touch()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
