"""docs/reference/llm-fds.md names every call and its parameters as they are."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import pytest

from supervisor.llmfd import Json, Store, Tool, parameters_schema
from supervisor.llmfd.conversations import Conversations
from supervisor.llmfd.service import FdService
from tests.architecture.tree import ROOT
from tests.helpers.sessions import Hall, hall

if TYPE_CHECKING:
    from supervisor.llmfd.toolloop import LoopModel

__all__ = ["hall"]

CALL = re.compile(r"`([a-z_]+)\(([^)`]*)\)`")


def documented() -> dict[str, set[str]]:
    """Return the parameters of each call in the table of calls."""
    page = (ROOT / "docs" / "reference" / "llm-fds.md").read_text(encoding="utf-8")
    part = page.partition("\n## Calls\n")[2].partition("\n## ")[0]
    rows = "\n".join(line for line in part.splitlines() if line.startswith("|"))
    return {
        name: set(re.findall(r"[a-z_0-9]+", parameters))
        for name, parameters in CALL.findall(rows)
    }


@pytest.fixture
def tools(hall: Hall) -> Iterator[dict[str, Tool]]:
    """Yield every call that a host with a model has."""
    service = FdService(hall.fs, Store())
    Conversations(service, model=cast("LoopModel", None))  # it is asked nothing
    yield service.tools
    service.close()


def properties(schema: dict[str, Json]) -> set[str]:
    found = schema["properties"]
    assert isinstance(found, dict)
    return set(found)


# Outside checks, spec llm-fd 6: what the page says is what the JSON schemas say.
async def test_the_page_has_every_call_with_its_parameters(
    tools: dict[str, Tool],
) -> None:
    there = {name: properties(parameters_schema(tool)) for name, tool in tools.items()}
    assert {"fork", "spawn", "summarize_fd", "write_temp_file"} <= set(there)
    assert documented() == there


# spec llm-fd 5
async def test_a_checkpoint_is_restored_by_its_checkpoint_id(
    tools: dict[str, Tool],
) -> None:
    for name, others in (("restore_process", {"files"}), ("delete_checkpoint", set())):
        schema = parameters_schema(tools[name])
        assert schema["required"] == ["checkpoint_id"]
        assert properties(schema) == {"checkpoint_id", *others}
