"""Whose checkpoints are whose.

By a configured name, or by an owner that was drawn.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.llmfd import Process, Store, checkpoints
from supervisor.llmfd.own_checkpoints import is_owner, owner_of
from supervisor.llmfd.service import FdService
from tests.helpers.contents import asking, failed
from tests.supervisor.llmfd.test_checkpoints import closed, opened
from vfs.filesystem import Filesystem


@pytest.fixture
def process(tmp_path: Path, no_leaks: None) -> Iterator[Process]:
    """A process of a child that the configuration names."""
    del no_leaks
    made = opened(tmp_path, owner_of("web"))
    yield made
    closed(made)


async def labels(process: Process) -> list[str | None]:
    """Return the labels of the checkpoints that a process is shown."""
    listed = await asking(process, "list_checkpoints")
    return [one.get("label") for one in listed]


# attack 44
async def test_a_named_childs_checkpoint_is_nobody_elses_by_its_id(
    process: Process,
) -> None:
    made = await asking(process, "checkpoint_process", label="web's")
    for other in (owner_of("other"), owner_of(None), "web", "child-1", ""):
        process.shared.owner = other
        assert await labels(process) == []
        for name in ("restore_process", "delete_checkpoint"):
            answer = await asking(process, name, checkpoint_id=made.get("id"))
            assert failed(answer)[0] == "not_found"
    process.shared.owner = owner_of("web")
    assert await labels(process) == ["web's"]


# attack 44: it is found by who names it, and by nobody else.
async def test_a_nameless_childs_checkpoint_is_found_by_its_id_alone(
    process: Process,
) -> None:
    process.shared.owner = owner_of(None)
    process.add_text("kept\n", "tool:a")
    made = await asking(process, "checkpoint_process", label="nameless")
    for other in (owner_of(None), owner_of("web")):
        process.shared.owner = other
        assert await labels(process) == []
        restored = await asking(
            process, "restore_process", checkpoint_id=made.get("id")
        )
        assert restored.get("fds") == "1"
    await asking(process, "delete_checkpoint", checkpoint_id=made.get("id"))
    answer = await asking(process, "restore_process", checkpoint_id=made.get("id"))
    assert failed(answer)[0] == "not_found"


# Unlisted checkpoints are bounded together; those with an owner are no part.
async def test_checkpoints_of_children_that_are_gone_are_bounded(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "MOST_CHECKPOINTS", 3)
    kept = process.shared.checkpoints
    assert kept is not None
    await asking(process, "checkpoint_process", label="web's")
    living = owner_of(None)
    kept.living.add(living)
    process.shared.owner = living
    await asking(process, "checkpoint_process", label="living")
    made = []
    for number in range(6):
        process.shared.owner = owner_of(None)
        one = await asking(process, "checkpoint_process", label=str(number))
        made.append(one.get("id"))
    found = []
    for one_id in made:
        answer = await asking(process, "restore_process", checkpoint_id=one_id)
        found.append(answer.tag == "restore")
    # The newest three, and the one that was made last.
    assert found == [False, False, True, True, True, True]
    process.shared.owner = living
    assert await labels(process) == ["living"]
    process.shared.owner = owner_of("web")
    assert await labels(process) == ["web's"]


# attack 44: a program that takes children over from an older one keeps no place of theirs.
def test_an_owner_of_an_older_program_is_replaced() -> None:
    service = FdService(Filesystem(), Store())
    for left in ("child-1", "mcp", ""):
        owner = service.make_shared(left).owner
        assert owner != left
        assert is_owner(owner)
    for left in (owner_of("web"), owner_of(None)):
        assert service.make_shared(left).owner == left
    service.close()


def test_owners_differ() -> None:
    assert owner_of("a") == owner_of("a") != owner_of("b")
    assert owner_of(None) != owner_of(None)
    assert is_owner(owner_of(None))
    assert is_owner(owner_of("child-1"))
    assert not is_owner("child-1")
    assert not is_owner("")
