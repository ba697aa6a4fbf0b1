"""The logs of children that no file configures: the oldest go first."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from supervisor.config.child import ChildSection
from supervisor.config.document import Config
from supervisor.kept_children.adhoc_logs import AdhocLogs
from supervisor.kept_children.roster import Children


async def end(children: Children, name: str) -> None:
    """Have a child end that nobody has configured."""

    async def run(_after: object) -> None:
        await trio.lowlevel.checkpoint()

    log = SimpleNamespace(close=lambda: None)
    kept: Any = SimpleNamespace(name=name, run=run, configured=False, log=log)
    children.by_name[name] = kept
    await children.run_child(kept, [])


# attack 29: as many processes and threads as the user of the host may have.
async def test_a_log_that_no_thread_removes_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("supervisor.kept_children.adhoc_logs.MOST_LOGS", 1)
    for number in range(1, 4):
        (tmp_path / f"spawn-{number}").mkdir()
    host: Any = SimpleNamespace(holders=set(), roster=None)
    places: Any = SimpleNamespace(logs=str(tmp_path), scratch=None, state_dir="")
    async with trio.open_nursery() as nursery:
        children = Children(host, Config(), places, nursery)
        with monkeypatch.context() as patched:
            patched.setattr("trio.to_thread.run_sync", no_thread)
            await end(children, "spawn-4")
        assert len(os.listdir(tmp_path)) == 3
        await end(children, "spawn-5")
    assert os.listdir(tmp_path) == []


async def test_a_log_stays_while_a_child_has_its_name_or_had_it_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.kept_children.adhoc_logs.MOST_LOGS", 2)
    for name in ("old", "job", "web"):
        (tmp_path / name).mkdir()
    host: Any = SimpleNamespace(holders=set(), roster=None)
    places: Any = SimpleNamespace(logs=str(tmp_path), scratch=None, state_dir="")
    async with trio.open_nursery() as nursery:
        children = Children(host, Config(), places, nursery)
        for name in ("old", "web", "job", "job", "job"):
            await end(children, name)
        assert set(os.listdir(tmp_path)) == {"job", "web"}
        configured: Any = SimpleNamespace(name="web", configured=True)
        children.by_name["web"] = configured
        for name in ("one", "two", "three"):
            await end(children, name)
    assert os.listdir(tmp_path) == ["web"]


# A daemon that begins counts what those before it have left, named or not.
async def test_logs_of_named_children_are_counted_by_the_next_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.kept_children.adhoc_logs.MOST_LOGS", 2)
    (tmp_path / "configured").mkdir()
    (tmp_path / "spawn-7").mkdir()  # of an older program: it has no mark
    os.utime(tmp_path / "spawn-7", (0, 0))
    for name in ("first", "second", "web"):
        AdhocLogs(str(tmp_path)).begin(name)
        (tmp_path / name / "x.log").write_text("said")
    AdhocLogs(str(tmp_path)).configure("web")
    logs = AdhocLogs(str(tmp_path))
    assert logs.new_name() == "spawn-8"
    assert len(os.listdir(tmp_path)) == 5
    logs.begin("third")
    await logs.end("third", set())
    assert set(os.listdir(tmp_path)) == {"configured", "web", "second", "third"}
    logs.begin("first")
    await logs.end("first", {"second"})
    assert set(os.listdir(tmp_path)) == {
        *("configured", "web", "second", "third", "first"),
    }


async def test_a_log_counts_until_a_configuration_names_its_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.kept_children.adhoc_logs.MOST_LOGS", 2)
    places: Any = SimpleNamespace(logs=str(tmp_path), scratch=None, state_dir="")

    async def run_daemon(config: Config, *names: str) -> None:
        """Let children begin and end, and then the daemon."""
        host: Any = SimpleNamespace(holders=set(), roster=None, log=None)
        for name in names or [None]:
            async with trio.open_nursery() as nursery:
                children = Children(host, config, places, nursery)
                children.start_configured()
                if name is not None:
                    children.spawn(name, ChildSection(["true"]))
                for kept in children:
                    kept.stop()  # before its process is started

    await run_daemon(Config(), "job", "web")
    assert set(os.listdir(tmp_path)) == {"job", "web"}
    await run_daemon(Config(child={"web": ChildSection(["true"])}))
    await run_daemon(Config(), "one", "two")
    assert set(os.listdir(tmp_path)) == {"web", "one", "two"}


# attack 49: a link in the operator's own log paths leads nowhere.
def test_a_mark_of_a_log_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    target = tmp_path / "target"
    (tmp_path / "job" / ".spawned").symlink_to(target)
    AdhocLogs(str(tmp_path)).begin("job")
    assert not target.exists()
