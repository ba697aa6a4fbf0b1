"""Pauses between two looks at a layer that a child writes to."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from supervisor.workspace import bounds as bounds_module
from supervisor.workspace.bounds import LONGEST_PAUSE_S, LayerBounds, PassedLimit
from supervisor.workspace.settings import DiskRoom, WorkspaceSettings
from supervisor.workspace.use import WorkspaceUse
from vfs.growth import PlacesContent

COUNT_S = 3.0
"""So long takes a count of a million files."""

FILLED_S = 20.0
"""The disk is full from then on, and the layer grows."""


class Machine:
    """A disk and a layer with many files, by a clock that goes on with what is done."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses: list[float] = []
        self.counted_s: list[float] = []

    def monotonic(self) -> float:
        """Return the time."""
        return self.now_s

    async def sleep(self, pause_s: float) -> None:
        """Let time pass."""
        self.pauses.append(pause_s)
        self.now_s += pause_s

    def content_beneath(self, _: int) -> PlacesContent:
        """Count the layer."""
        self.counted_s.append(self.now_s)
        self.now_s += COUNT_S
        return PlacesContent(round(self.now_s), 1_000_000, 0)

    def disk_room(self, _: int) -> DiskRoom:
        """Return what the disk has left, and has to keep."""
        is_full = self.now_s >= 100.0 + FILLED_S
        return DiskRoom(0 if is_full else 1 << 50, 1 << 30)


class FullMachine(Machine):
    """One whose disk is full from the beginning; the layer rests for ten counts."""

    def content_beneath(self, upper: int) -> PlacesContent:
        """Count the layer."""
        found = super().content_beneath(upper)
        is_grown = len(self.counted_s) > 10
        return found._replace(size_bytes=2 if is_grown else 1)

    def disk_room(self, _: int) -> DiskRoom:
        """Return a disk that is full."""
        return DiskRoom(0, 1 << 30)


async def watch(
    machine: Machine, top: Path, monkeypatch: pytest.MonkeyPatch
) -> PassedLimit:
    """Look at a layer of a machine until a limit is passed."""
    for name in ("content_beneath", "disk_room"):
        monkeypatch.setattr(bounds_module, name, getattr(machine, name))
    for name in ("time", "trio"):
        way = SimpleNamespace(monotonic=machine.monotonic, sleep=machine.sleep)
        monkeypatch.setattr(bounds_module, name, way)
    (top / "workspaces/w/upper").mkdir(parents=True)
    settings = WorkspaceSettings(max_files=2_000_000)
    use = WorkspaceUse("w", "/base", "review", str(top), settings)
    return await LayerBounds(use).wait_passed()


# spec WS17
async def test_a_limit_does_not_make_looks_at_the_disk_rarer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    passed = await watch(machine, tmp_path, monkeypatch)
    assert passed.limit == "reserve"
    assert max(machine.pauses) <= LONGEST_PAUSE_S
    # Before the disk was full it was counted once: the next count was not due.
    assert [one for one in machine.counted_s if one < 100.0 + FILLED_S] == [100.0]


# spec WS17
async def test_counts_of_a_layer_that_rests_on_a_full_disk_use_half_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FullMachine()
    passed = await watch(machine, tmp_path, monkeypatch)
    assert passed.limit == "reserve"
    counted_s = COUNT_S * len(machine.counted_s)
    assert counted_s <= 0.6 * (machine.now_s - 100.0)
