"""The stand-in as a program: it serves until a signal ends it.

With ``--script`` it gives the answers of a JSON list, one after the other
(`script.py`). With ``--log`` it appends a JSON line for each request, and one for each
piece it has sent. The first line of its output is the base URL.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import trio

from demo.provider.server import serving


async def main(
    words: list[str], key: str | None = None, tell: Callable[[str], str] = str
) -> None:
    """Serve until a signal ends it; the first line of output is the base URL."""
    parser = argparse.ArgumentParser(prog="python -m demo.provider")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--key", default=key)
    parser.add_argument("--log", type=Path, default=None)
    parser.add_argument("--script", type=Path, default=None)
    parser.add_argument("--orders", default="")
    given = parser.parse_args(words)
    async with serving(given.key, given.port) as provider:
        provider.tell = tell
        provider.orders = given.orders
        if given.script is not None:
            provider.script = json.loads(given.script.read_text())
        if given.log is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            provider.log_fd = os.open(given.log, flags, 0o600)
        print(provider.url, flush=True)
        await trio.sleep_forever()


if __name__ == "__main__":
    try:
        trio.run(partial(main, sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
