"""Where the system's temporary directory is, also when its disk is full.

``tempfile`` takes a directory only if a file can be written in it at that moment, and
otherwise says that there is none. Most of what asks here makes no file at all, and who does
is told by the kernel what the matter is, and with which path.
"""

import os
import tempfile
from pathlib import Path

_VARIABLES = ("TMPDIR", "TEMP", "TMP")
_USUAL = ("/tmp", "/var/tmp")  # noqa: S108 - what is made there has names of its own


def temporary_directory() -> str:
    """Return the system's temporary directory.

    Where nothing can be written anywhere, it is the first that this user may write in; or
    else the usual one, whose error is then the clearest. ``tempfile`` has it from then on.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        named = [os.environ.get(name, "") for name in _VARIABLES]
        found = [p for p in (*named, *_USUAL) if p.startswith("/") and _may_write(p)]
        tempfile.tempdir = found[0] if found else _USUAL[0]
        return tempfile.tempdir


def _may_write(path: str) -> bool:
    return Path(path).is_dir() and os.access(path, os.W_OK | os.X_OK)
