"""Staged names: those of files being written are no leaks, all others are."""

import errno
import os
from typing import Any

import pytest

from supervisor.doctor.leaks import check_host
from supervisor.doctor.leftovers import STAGED_PREFIX
from tests.helpers.stage import Stage, stage
from tests.supervisor.doctor.test_leaks import clean
from vfs.backends import host_file

pytestmark = pytest.mark.slow

__all__ = ["stage"]


# spec A3b, attack 39
async def test_a_staged_name_that_is_nobodys_is_shown(stage: Stage) -> None:
    await stage.puppet()
    deep = stage.root / "a" / "b"
    deep.mkdir(parents=True)
    (deep / ".sandhost-0123").touch()
    (deep / ".sandhost").touch()
    report = await check_host(stage.host)
    assert report["staged"] == [{"directory": str(deep), "name": ".sandhost-0123"}]
    assert report["staged_search_complete"] is True


# spec A3b
async def test_a_staged_name_that_is_being_written_is_explained(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def no_unnamed_files(path: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no unnamed files")
        return real_open(path, flags, *args, **more)

    puppet = await stage.puppet(publish="on-close")
    monkeypatch.setattr(os, "open", no_unnamed_files)
    await puppet.open(b"a", b"w")
    monkeypatch.undo()
    assert [name[:10] for name in os.listdir(stage.root)] == [STAGED_PREFIX]
    await clean(stage)


def test_staged_names_begin_as_the_backend_makes_them() -> None:
    assert os.fsencode(STAGED_PREFIX) == host_file.STAGED_PREFIX


async def test_only_what_a_child_may_write_is_searched(stage: Stage) -> None:
    outside = stage.where / "outside"
    outside.mkdir()
    (outside / ".sandhost-0123").touch()
    await stage.puppet(read=(str(outside),))
    await clean(stage)


async def test_beside_a_granted_file_only_its_directory_is_searched(
    stage: Stage,
) -> None:
    beside = stage.where / "beside"
    (beside / "deep").mkdir(parents=True)
    (beside / "deep" / ".sandhost-0123").touch()
    await stage.puppet(write=(str(beside / "file"),))
    await clean(stage)
    (beside / ".sandhost-4567").touch()
    report: dict[str, Any] = await check_host(stage.host)
    assert [row["name"] for row in report["staged"]] == [".sandhost-4567"]


async def test_a_search_that_was_cut_short_is_said_to_be(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.doctor.leftovers.SEARCH_S", -1.0)
    (stage.root / "a").touch()
    await stage.puppet()
    report = await check_host(stage.host)
    assert report["staged_search_complete"] is False
