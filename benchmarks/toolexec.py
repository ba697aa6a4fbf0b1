"""Tools run by the host, beside tools run directly, by the same child.

The child (`toolclient.py`) does both in turn and tells the times; the host runs in this
program. The tools are `head`, `echo` and `true`, found in PATH by the smallest sidecar
there can be, so that what is measured is the server.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.hosts import run_trio
from benchmarks.measure import MeasureError
from benchmarks.options import parse, parser
from benchmarks.report import Report, Row, at_least, at_most
from protocol.toolexec.token import TokenRights
from supervisor.fsproxy.ports import ChildView
from supervisor.host import open_host
from supervisor.spawn.launchpad.start import start_launchpad
from supervisor.spawn.request import find_executable
from supervisor.spec import ChildSpec, minimal_env
from supervisor.toolexec.routes import SpawnPlan, Target
from supervisor.toolexec.service import open_toolexec
from supervisor.toolexec.settings import ToolExecSettings

NAME = "toolexec"
METHOD = "one child that runs tools, directly and through its host, in turn"
ROUNDS = 7
CLIENT = Path(__file__).with_name("toolclient.py")
SIZE_MB = 268.435456
FAST_PIPE_MB_S = 1400.0
LEAST_MB_S = 700.0
RSS_LIMIT_MIB = 32.0


class AnyTool:
    """The smallest sidecar: every tool of PATH, in the root directory."""

    name = kind = "any"
    timeout_s = 0.0
    tty = fd3 = False

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def is_permitted(self, child: ChildView, tool: str, rights: TokenRights) -> bool:
        """Yes."""
        return True

    async def route(
        self, child: ChildView, tool: str, cwd: bytes, rights: TokenRights
    ) -> Target:
        """Choose itself."""
        return self

    async def child_starting(self, child: ChildView, stack: AsyncExitStack) -> None:
        """Nothing is to be made ready."""

    def busy(self) -> str | None:
        """Nothing is."""
        return None

    def snapshot(self) -> tuple[object, set[int]]:
        """Have nothing to hand over."""
        return None, set()

    async def open_cwd(self, cwd: bytes, child: ChildView) -> int:
        """Open the root directory."""
        return os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    async def command(
        self, child: ChildView, tool: str, args: tuple[bytes, ...], cwd_fd: int
    ) -> SpawnPlan:
        """Find it in PATH, once."""
        found = self._found.get(tool)
        if found is None:
            found = self._found[tool] = find_executable(tool, "/usr/bin:/bin", "/")
        return SpawnPlan(found, (tool, *map(os.fsdecode, args)), {"PATH": "/usr/bin"})


async def measure(rounds: int) -> list[Row]:
    """Run the client in a child of a host, and take its figures."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        place = Path(name)
        for directory in ("root", "run"):
            (place / directory).mkdir(mode=0o700)
        command = (
            sys.executable,
            "-I",
            "-S",
            str(CLIENT),
            str(rounds),
            str(os.getpid()),
        )
        launchpad = start_launchpad()
        async with open_host(launchpad) as host:
            settings = ToolExecSettings(tcp=None)
            async with open_toolexec(host, settings, AnyTool()):
                out = os.open(
                    place / "out", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
                )
                spec = ChildSpec(
                    command=command,
                    cwd=name,
                    root=str(place / "root"),
                    run_dir=str(place / "run"),
                    env=minimal_env(name),
                    stdio=(0, out, 2),
                )
                child = await host.spawn(spec)
                status = await child.wait_gone()
                told = os.pread(out, 1 << 20, 0)
                os.close(out)
    if status != 0:
        raise MeasureError(f"the client ended with status {status}")
    return rows(json.loads(told))


def rows(told: dict[str, object]) -> list[Row]:
    """Return the figures of what the client told."""
    streams, here, bytes_, trues, others, at_once = (
        _pairs(told[name])
        for name in ("stream", "stream_here", "byte", "trues", "others", "at_once")
    )
    pipe_mb_s, host_mb_s = _mb_s(streams, 0), _mb_s(streams, 1)
    added_ms = statistics.median((hosted - direct) * 1e3 for direct, hosted in bytes_)
    is_fast = pipe_mb_s >= FAST_PIPE_MB_S
    stalled = told["stalled"]
    stream_s = told["stream_s"]
    if not (isinstance(stalled, dict) and isinstance(stream_s, list)):
        raise MeasureError("the client told something else")
    if not stalled["is_equal"]:
        raise MeasureError(
            "what a stalled reader read at last was not what was printed"
        )
    per_s = statistics.median(100 / hosted for _, hosted in trues)
    at_once_per_s = statistics.median(64 / hosted for _, hosted in at_once)
    return [
        Row(
            "stream of 256 MiB, of head | cat >/dev/null",
            _ratio(streams),
            "x",
            at_least(0.6),
            f"{host_mb_s:.0f} / {pipe_mb_s:.0f} MB/s",
        ),
        Row(
            "stream of 256 MiB, of head | cat into the same reader",
            _ratio(here),
            "x",
            at_least(0.6),
            f"{_mb_s(here, 1):.0f} / {_mb_s(here, 0):.0f} MB/s",
        ),
        Row(
            "stream of 256 MiB",
            host_mb_s,
            "MB/s",
            at_least(LEAST_MB_S) if is_fast else None,
            "" if is_fast else f"no aim where the pipe gives < {FAST_PIPE_MB_S:g} MB/s",
        ),
        Row(
            "processor time of the host, a GiB streamed",
            statistics.median(stream_s) * 2**30 / (SIZE_MB * 1e6) * 1e3,
            "ms",
        ),
        Row("first byte, added to a direct one", added_ms, "ms", at_most(2.0)),
        Row(
            "executions of true, of Popen + wait",
            _ratio(trues),
            "x",
            at_least(0.4),
            f"{per_s:.0f} /s",
        ),
        Row("the same, with other arguments each time", _ratio(others), "x"),
        Row(
            "64 executions of true at once, of 64 Popen + wait",
            _ratio(at_once),
            "x",
            at_least(0.6),
            f"{at_once_per_s:.0f} /s",
        ),
        Row(
            "growth of the host while 1 GiB waits",
            stalled["grown_bytes"] / 2**20,
            "MiB",
            at_most(RSS_LIMIT_MIB),
            "then read whole, sha256 equal",
        ),
    ]


def _pairs(told: object) -> list[tuple[float, float]]:
    if not isinstance(told, list):
        raise MeasureError("the client told something else")
    return [(float(direct), float(hosted)) for direct, hosted in told]


def _mb_s(pairs: Sequence[tuple[float, float]], which: int) -> float:
    return statistics.median(SIZE_MB / pair[which] for pair in pairs)


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(direct / hosted for direct, hosted in pairs)


def main(argv: Sequence[str] = ()) -> int:
    """Measure, print, and return the exit status."""
    given = parse(parser(NAME, METHOD, rounds=ROUNDS), argv)
    try:
        found = run_trio(measure, given.rounds)
    except MeasureError as error:
        found = [Row("tools", None, "", detail=str(error))]
    report = Report(NAME, METHOD, given.rounds, found)
    return report.publish(save=given.save, strict=given.strict)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
