"""How far one request goes through the product's files, traced in a host.

    python -m tests.architecture.routes

prints a row for each of four requests: the files it enters, the moves from one file to
another, and the moves back to a file that was left. Counted are calls of functions of the
product's packages in the thread of the loop, from the request's first byte until its reply
has come. Each request is made once before, for what is done on the first one only.

A coroutine that goes on after a wait is traced as a call, and so is each that awaits it: a
wait five functions deep is five moves of which no line of the product tells. The last two
columns are the moves and returns without those.
"""

import argparse
import opcode
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import trio

from tests.architecture.tree import PACKAGES, ROOT
from tests.helpers.stage import open_model_stage, open_stage
from tests.helpers.toolscene import opened_scene

SETTLE_S = 0.05
"""How long a host is left alone before a request, so that what came before is done."""

_RESUME = opcode.opmap["RESUME"]
_WITHIN = tuple(f"{ROOT / package}/" for package in PACKAGES)


@dataclass
class Route:
    """The files of the product that were entered, in order.

    Attributes:
        visits: their names; the same one never follows itself.
        calls: the same without coroutines that go on.
    """

    visits: list[str] = field(default_factory=list)
    calls: "Route | None" = None

    def note(self, name: str) -> None:
        """Add a call of a function of a file."""
        if name.startswith(_WITHIN) and self.visits[-1:] != [name]:
            self.visits.append(name)

    @property
    def files(self) -> int:
        """How many different files were entered."""
        return len(set(self.visits))

    @property
    def moves(self) -> int:
        """How often a function of another file was called."""
        return max(0, len(self.visits) - 1)

    @property
    def returns(self) -> int:
        """How many of the moves led to a file that was entered before."""
        return len(self.visits) - self.files


@contextmanager
def traced(route: Route) -> Iterator[None]:
    """Trace the calls of this thread."""
    route.calls = calls = Route()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            route.note(frame.f_code.co_filename)
            if not _goes_on(frame):
                calls.note(frame.f_code.co_filename)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def _goes_on(frame: FrameType) -> bool:
    """Return whether a frame that is entered is a coroutine's after a wait."""
    # The argument of RESUME says where: 0 at the beginning of a function (dis, 3.11).
    code, at = frame.f_code.co_code, frame.f_lasti
    return at >= 0 and code[at] == _RESUME and bool(code[at + 1] & 3)


async def trace_write(where: Path) -> Route:
    """Return the route of a WRITE of 4 KiB."""
    route = Route()
    async with open_stage(where) as stage:
        child = await stage.puppet()
        fileno = await child.open(b"a", b"w")
        assert await child.write(fileno, bytes(4096)) == b"OK 4096"
        await trio.sleep(SETTLE_S)
        with traced(route):
            reply = await child.write(fileno, bytes(4000))
        assert reply == b"OK 4000"
    return route


async def trace_kill(where: Path) -> Route:
    """Return the route of a child's end by SIGKILL, until nothing of it is left."""
    route = Route()
    async with open_stage(where) as stage:
        for measured in (False, True):
            child = await stage.puppet()
            await child.ask(b"PING\n")
            await trio.sleep(SETTLE_S)
            with traced(route) if measured else traced(Route()):
                assert await child.kill() == 128 + 9
    return route


async def trace_tool(where: Path) -> Route:
    """Return the route of `printf` over ToolExec."""
    route = Route()
    async with opened_scene(where) as scene:
        for measured in (False, True):
            await trio.sleep(SETTLE_S)
            with traced(route) if measured else traced(Route()):
                reply = await scene.run("tool=printf", "arg=hello")
            assert (reply.body, reply.code) == (b"hello", 0)
    return route


async def trace_chat(where: Path) -> Route:
    """Return the route of an LLM_CHAT, to a provider on loopback."""
    route = Route()
    async with open_model_stage(where) as stage:
        line = stage.connect()
        for measured in (False, True):
            await trio.sleep(SETTLE_S)
            with traced(route) if measured else traced(Route()):
                reply = await line.chat(prompt=b"hello")
            assert reply.text
    return route


ROUTES: dict[str, Callable[[Path], Awaitable[Route]]] = {
    "WRITE": trace_write,
    "kill -9": trace_kill,
    "ToolExec printf": trace_tool,
    "LLM_CHAT": trace_chat,
}


def run(trace: Callable[[Path], Awaitable[Route]], where: Path) -> Route:
    """Trace one request, with the host's files in a directory."""
    return trio.run(trace, where)


def main() -> None:
    """Print the routes."""
    parser = argparse.ArgumentParser(prog="python -m tests.architecture.routes")
    parser.add_argument("--visits", action="store_true", help="list the files, too")
    visits = parser.parse_args().visits
    print(f"{'request':<16} {'files':>5} {'moves':>5} {'returns':>7}   by calls alone")
    for name, trace in ROUTES.items():
        with tempfile.TemporaryDirectory() as where:
            route = run(trace, Path(where))
        calls = route.calls or Route()
        whole = f"{name:<16} {route.files:>5} {route.moves:>5} {route.returns:>7}"
        print(f"{whole}   {calls.moves:>5} {calls.returns:>7}")
        for visit in route.visits if visits else ():
            print("   ", Path(visit).relative_to(ROOT))


if __name__ == "__main__":
    main()
