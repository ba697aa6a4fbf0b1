"""A tool's way to its child's model on a machine that gives it none."""

import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor.fsproxy.ports import Doors
from supervisor.toolexec.backends.launch import open_doors
from supervisor.toolexec.routes import SpawnPlan

ENV = {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "OPENAI_API_KEY": "sk-sandhost-a"}
PLAN = SpawnPlan(
    executable="/bin/true",
    argv=("true",),
    env={"PATH": "/bin"},
    cwd="/",
    rlimits=(),
    is_walled=True,
)


class Log:
    """The host's log."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, level: str, text: str, **fields: object) -> None:
        """Take a line."""
        assert level == "WARNING"
        assert fields["child_id"] == "c1"
        self.lines.append(text)


def owner_of(doors: Doors | None, log: Log) -> Any:
    """Return the executions of a child with such doors."""
    model = SimpleNamespace(doors_of=lambda client: doors)
    host = SimpleNamespace(services=SimpleNamespace(llm=model, network=None), log=log)
    child = SimpleNamespace(id="c1", session=SimpleNamespace(client=None))
    return SimpleNamespace(host=host, child=child, lacks_doors=False)


# spec MD1: /dev/null answers SIOCGSKNS as a kernel does that lacks it, by ENOTTY.
def test_a_tool_starts_without_the_model_where_its_net_namespace_is_not_given(
    no_leaks: None,
) -> None:
    del no_leaks
    log = Log()
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        owner = owner_of(Doors(ENV, fd), log)
        for _ in range(2):
            with ExitStack() as stack:
                assert open_doors(owner, PLAN, stack) == (PLAN.env, {})
    finally:
        os.close(fd)
    (said,) = log.lines
    assert said.startswith("Tools have no way to the model: ")
    assert "Inappropriate ioctl for device" in said


# spec MD1
@pytest.mark.parametrize("doors", [None, Doors(ENV, -1)])
def test_a_tool_in_the_net_namespace_of_its_host_joins_none(
    doors: Doors | None,
) -> None:
    log = Log()
    with ExitStack() as stack:
        env, joined = open_doors(owner_of(doors, log), PLAN, stack)
    assert not joined
    assert env == {**PLAN.env, **({} if doors is None else ENV)}
    assert not log.lines
