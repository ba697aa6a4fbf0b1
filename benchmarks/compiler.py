"""Compiles the C yardsticks on first use.

The programs in `benchmarks/yardsticks/` are the child's side of every measurement, the
peer that the host is compared with, and the physical limits. They are built into
`benchmarks/.build/` and again whenever their source is newer.
"""

import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.measure import MeasureError

SOURCES = Path(__file__).parent / "yardsticks"
BUILD = Path(__file__).parent / ".build"
COMPILE_TIMEOUT_S = 60.0  # a second is usual; more means a compiler that hangs


def yardstick(name: str) -> str:
    """Return the path of a compiled yardstick, built if it is missing or old.

    Args:
        name: the source without its suffix, such as "fsclient".

    Raises:
        MeasureError: there is no compiler, or it failed.
    """
    source = SOURCES / f"{name}.c"
    program = BUILD / name
    if program.exists() and program.stat().st_mtime_ns >= source.stat().st_mtime_ns:
        return str(program)
    BUILD.mkdir(exist_ok=True)
    # A new name first: another run may be executing the old program right now.
    fresh = program.with_suffix(f".{os.getpid()}")
    compiler = _compiler()
    built = subprocess.run(
        [compiler, "-O2", "-pthread", "-o", fresh, source],
        capture_output=True,
        check=False,
        timeout=COMPILE_TIMEOUT_S,
    )
    if built.returncode:
        reason = built.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise MeasureError(f"cannot compile {source.name} with {compiler}: {reason}")
    fresh.replace(program)
    return str(program)


def _compiler() -> str:
    chosen = os.environ.get("CC")
    for name in [chosen] if chosen else ["cc", "gcc", "clang"]:
        if found := shutil.which(name):
            return found
    raise MeasureError(
        f"cannot build the yardsticks: no C compiler ({chosen or 'cc, gcc, clang'}) "
        "on PATH; install one (Debian: gcc) or name it with CC=..."
    )
