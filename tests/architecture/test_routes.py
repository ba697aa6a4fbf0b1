"""The program that traces the routes of requests (`tests/architecture/routes.py`)."""

from pathlib import Path
from typing import Any

import pytest
import trio

from tests.architecture import routes
from tests.architecture.tree import ROOT


@pytest.mark.slow
def test_the_route_of_a_write_goes_by_its_handler_to_the_file(tmp_path: Path) -> None:
    route = routes.run(routes.trace_write, tmp_path)
    visited = [Path(name).relative_to(ROOT).as_posix() for name in route.visits]
    handler = visited.index("supervisor/fsproxy/handlers/files.py")
    assert "vfs/backends/host_file.py" in visited[handler:]
    assert route.moves == len(visited) - 1
    assert not [name for name in visited if not (ROOT / name).is_file()]


def test_returns_are_moves_to_files_that_were_left() -> None:
    route = routes.Route()
    for name in ("session", "session", "hostio", "session", "filesystem"):
        route.note(f"{ROOT}/vfs/{name}.py")
        route.note(f"{ROOT}/tests/{name}.py")
    assert (route.files, route.moves, route.returns) == (3, 3, 1)


async def test_a_coroutine_that_goes_on_is_a_move_and_no_call() -> None:
    source = "async def wait(sleep):\n    await sleep(0)\n    await sleep(0)\n"
    names: dict[str, Any] = {}
    exec(compile(source, f"{ROOT}/vfs/wait.py", "exec"), names)  # noqa: S102 - above
    exec(compile("def call(): pass", f"{ROOT}/vfs/call.py", "exec"), names)  # noqa: S102

    async def sleep(seconds: float) -> None:
        names["call"]()
        await trio.sleep(seconds)

    route = routes.Route()
    with routes.traced(route):
        await names["wait"](sleep)
    assert (route.moves, route.returns) == (4, 3)
    assert route.calls is not None
    assert (route.calls.moves, route.calls.returns) == (1, 0)
