"""The stand-in for a model's provider, as a process of its own."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.architecture.tree import ROOT
from tests.helpers.canary import KEY, VARIABLE, leave_out
from tests.helpers.command import ENVIRONMENT, server_of_forks
from tests.helpers.steps import ending, steps_before

if TYPE_CHECKING:
    from tests.helpers.forkserver import Forked

BARE = {name: text for name, text in ENVIRONMENT.items() if name != VARIABLE}

# The key comes by a pipe: children may look at this process.
PROGRAM = """
import trio
from demo.provider.__main__ import main
words, tell = list(args), str
if "--in-every-form" in words:
    from tests.helpers.canary_forms import in_every_form as tell
    words.remove("--in-every-form")
trio.run(main, words, sys.stdin.readline().strip(), tell)
"""


def key_file(where: Path, key: str = KEY) -> str:
    """Write a key file that only its owner may read."""
    path = where / "key"
    path.write_text(key + "\n")
    path.chmod(0o600)
    leave_out(str(path))
    return str(path)


@contextmanager
def provider_process(
    log: Path | None = None, key: str = KEY, *, in_every_form: bool = False
) -> Iterator[str]:
    """Run it; yield its base URL.

    Args:
        log: a file that gets a line for each request, and for each piece sent.
        key: the one that requests have to carry.
        in_every_form: it gives the key away in all forms (`canary_forms.py`).
    """
    words = ["--in-every-form"] if in_every_form else []
    if log is not None:
        words += ["--log", str(log)]
    steps = ending(steps_before("", *words), PROGRAM)
    server = server_of_forks()
    key_reads, key_writes = os.pipe2(os.O_CLOEXEC)
    url_reads, url_writes = os.pipe2(os.O_CLOEXEC)
    process: subprocess.Popen[bytes] | Forked
    with open(key_writes, "wb", 0) as told, open(url_reads) as said:
        try:
            if server is not None and server.takes([], BARE):
                streams = [key_reads, url_writes, 2]
                process = server.start([], str(ROOT), BARE, streams, steps, "provider")
            else:
                process = subprocess.Popen(
                    steps, cwd=ROOT, stdin=key_reads, stdout=url_writes, env=BARE
                )
        finally:
            os.close(key_reads)
            os.close(url_writes)
        with process:
            try:
                told.write(key.encode() + b"\n")
                yield said.readline().strip()
            finally:
                process.kill()
