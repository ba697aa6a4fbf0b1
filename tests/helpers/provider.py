"""The stand-in for a model's provider, as a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.architecture.tree import ROOT
from tests.helpers.canary import KEY, VARIABLE, leave_out
from tests.helpers.command import ENVIRONMENT

BARE = {name: text for name, text in ENVIRONMENT.items() if name != VARIABLE}

# The key comes by a pipe: children may look at this process.
PROGRAM = """
import sys, trio
from demo.provider.__main__ import main
words, tell = sys.argv[1:], str
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
        log: what it appends a line to for each request, and for each piece sent.
        key: what requests have to carry.
        in_every_form: what it gives away is the key in all forms (`canary_forms.py`).
    """
    command = [sys.executable, "-c", PROGRAM]
    if in_every_form:
        command.append("--in-every-form")
    if log is not None:
        command += ["--log", str(log)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=BARE
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(key.encode() + b"\n")
            process.stdin.flush()
            yield process.stdout.readline().decode().strip()
        finally:
            process.kill()
