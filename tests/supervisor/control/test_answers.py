"""Answers of the control socket that need a moment, while the host goes on."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from supervisor.control.answers import Answers
from supervisor.usage.workspace_sizes import WorkspaceSizes

if TYPE_CHECKING:
    from supervisor.host import Host


class Roster:
    """One child that is between two lives, until somebody takes samples."""

    def __init__(self) -> None:
        self.is_between = True

    def absent_rows(self) -> Iterator[dict[str, object]]:
        """Yield its row while it has no process."""
        if self.is_between:
            yield {"name": "again"}


async def test_a_child_that_comes_back_meanwhile_is_in_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roster = Roster()
    host = SimpleNamespace(
        sizes=WorkspaceSizes(),
        roster=roster,
        metrics=None,
        journal=SimpleNamespace(taps=[]),
        children={},
    )
    answers = Answers(cast("Host", host), ())

    async def sample(targets: object) -> dict[Any, Any]:
        roster.is_between = False  # its next process runs
        return {}

    monkeypatch.setattr(answers.watcher, "sample", sample)
    rows = await answers.known["ps"]()
    assert json.loads(bytes(cast("list[bytes]", rows)[0])) == {"name": "again"}
