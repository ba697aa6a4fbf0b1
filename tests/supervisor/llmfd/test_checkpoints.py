"""Checkpoints: whole or missing, the same in another host, never wrong text."""

import errno
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import trio

from hostlib.journal import Journal
from supervisor.llmfd import (
    TOOLS,
    Allowance,
    Checkpoints,
    Process,
    ProcessParts,
    Retention,
    Store,
    checkpoint_rows,
    checkpoint_state,
    checkpoints,
)
from supervisor.llmfd.blob_files import BlobFiles
from supervisor.llmfd.workspaces import LayeredWorkspaces, WorkspaceSnapshot
from supervisor.workspace.attributes import USER_MARKS
from supervisor.workspace.directory import make_workspace
from supervisor.workspace.use import WorkspaceUse
from supervisor.workspace.workspace import Workspace
from tests.helpers.contents import asking, failed, text_of
from tests.helpers.sessions import Hall, hall

__all__ = ["hall"]

BINARY = bytes(range(256)) * 20


def opened(where: Path, owner: str = "child-1", limit: int = 10**9) -> Process:
    """Return a process of a new host with the checkpoints of a directory."""
    return Process(
        ProcessParts(
            Store(),
            TOOLS,
            allowance=Allowance(limit),
            checkpoints=Checkpoints(str(where)),
            owner=owner,
        )
    )


def closed(process: Process) -> None:
    """End a host."""
    process.close()
    assert process.shared.checkpoints is not None
    process.shared.checkpoints.close()
    assert not process.shared.store.blobs


@pytest.fixture
def first(tmp_path: Path, no_leaks: None) -> Iterator[Process]:
    """A process with a conversation, a name, a section and 3 contents, one twice."""
    del no_leaks
    made = opened(tmp_path)
    made.messages.append({"role": "user", "content": "hi"})
    made.add_text("one\ntwo\n" * 1000, "tool:a")
    made.add(made.shared.store.put(BINARY), "tool:b")
    made.table.next_number = 7
    made.add_text("one\ntwo\n" * 1000, "tool:c", name="third")
    made.table.fds[1].sections["mark"] = (3, 4)
    yield made
    closed(made)


class Files:
    """The workspaces of a child, as a checkpoint sees them."""

    def __init__(self) -> None:
        self.there: set[WorkspaceSnapshot] = set()
        self.restored: list[WorkspaceSnapshot] = []
        self.has_rights = True

    def is_whole(self, caller: object) -> bool:
        """Tell whether the caller may."""
        del caller
        return self.has_rights

    async def take(self, caller: object, label: str) -> tuple[WorkspaceSnapshot, ...]:
        """Make a snapshot."""
        assert self.is_whole(caller)
        made = WorkspaceSnapshot("w", label)
        self.there.add(made)
        return (made,)

    async def drop(self, snapshots: Sequence[WorkspaceSnapshot]) -> None:
        """Remove some."""
        self.there -= set(snapshots)

    async def find(
        self, snapshots: Sequence[WorkspaceSnapshot]
    ) -> tuple[WorkspaceSnapshot, ...]:
        """Return those that are there."""
        return tuple(one for one in snapshots if one in self.there)

    async def restore_later(self, snapshots: Sequence[WorkspaceSnapshot]) -> None:
        """Record what is to be restored."""
        self.restored.extend(snapshots)


# spec WS16
async def test_a_checkpoint_names_the_snapshot_that_belongs_to_it(
    first: Process,
) -> None:
    files = first.shared.workspaces = Files()
    kept = await asking(first, "checkpoint_process")
    ident = str(kept.get("id"))
    (named,) = kept
    label = ident.replace(":", "-")
    assert (named.tag, dict(named.attrib)) == (
        "snapshot",
        {"workspace": "w", "label": label},
    )
    ((listed,),) = await asking(first, "list_checkpoints")
    assert dict(listed.attrib) == dict(named.attrib)
    (shown,) = await asking(first, "restore_process", checkpoint_id=ident)
    assert (shown.get("label"), shown.get("files")) == (label, "as they are")
    assert files.restored == []
    answer = await asking(first, "restore_process", checkpoint_id=ident, files=True)
    assert answer[0].get("files") == "when the child has ended"
    assert files.restored == [WorkspaceSnapshot("w", label)]
    await asking(first, "delete_checkpoint", checkpoint_id=ident)
    assert files.there == set()
    kept = await asking(first, "checkpoint_process", files=False)
    assert list(kept) == []


# spec WS16: what cannot be restored as a whole is refused before anything is
async def test_files_that_are_gone_or_not_one_s_own_are_refused(first: Process) -> None:
    files = first.shared.workspaces = Files()
    plain = (await asking(first, "checkpoint_process", files=False)).get("id")
    whole = (await asking(first, "checkpoint_process")).get("id")
    first.add_text("later", "test")

    async def refused(ident: str | None) -> tuple[str, str, str]:
        asked = await asking(first, "restore_process", checkpoint_id=ident, files=True)
        return failed(asked)

    assert (await refused(plain))[0] == "not_found"
    files.has_rights = False
    assert (await refused(whole))[0] == "file_operation"
    files.there.clear()
    assert "not found" in (await refused(whole))[2]
    assert len(first.table.fds) == 4
    assert files.restored == []
    (shown,) = await asking(first, "restore_process", checkpoint_id=whole)
    assert (shown.get("files"), len(first.table.fds)) == ("gone", 3)


# spec WS16: a checkpoint that does not come to be leaves no snapshot
async def test_the_snapshot_of_a_checkpoint_that_fails_goes(
    first: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = first.shared.workspaces = Files()
    monkeypatch.setattr(checkpoints, "MOST_CHECKPOINTS", 0)
    assert failed(await asking(first, "checkpoint_process"))[0] == "file_operation"
    assert files.there == set()


class Events(Journal):
    """A journal that calls a function for each event."""

    def __init__(self, tell: Callable[[], None]) -> None:
        super().__init__(-1, lambda _: None)
        self.tell = tell

    def write(self, event: str, **fields: object) -> None:
        del event, fields
        self.tell()


# spec WS16: a client may end between the snapshots of two workspaces
async def test_a_snapshot_goes_if_its_caller_is_cancelled_before_the_next(
    hall: Hall, tmp_path: Path
) -> None:
    base, state = str(tmp_path), str(tmp_path / "state")
    os.mkdir(state, 0o700)
    uses = [WorkspaceUse(name, base, "review", state) for name in ("first", "second")]
    for use in uses:
        make_workspace(state, use.name, base.encode(), USER_MARKS)
    told: list[str] = []
    client = hall.connect().client
    with trio.CancelScope() as scope:

        def cancel() -> None:
            with Workspace(state, "first") as workspace:
                told.extend(workspace.state.labels())
            scope.cancel()

        files = LayeredWorkspaces("child-1", client, uses, Events(cancel))
        await files.take(client, "ckpt-1")
    assert scope.cancelled_caught
    assert told == ["ckpt-1"]
    for use in uses:
        with Workspace(state, use.name) as workspace:
            assert not workspace.state.labels()


# spec WS16: what stands in the database is looked at before it names anything
@pytest.mark.parametrize("names", ["x", [["w"]], [["w", "../x"]], [["w", 1]]])
async def test_names_of_snapshots_that_are_none_are_damage(
    first: Process, names: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    first.shared.workspaces = Files()
    with monkeypatch.context() as patch:
        whole = checkpoint_state.state_of
        patch.setattr(checkpoints, "state_of", lambda process, _: whole(process, names))  # type: ignore[arg-type]
        kept = await asking(first, "checkpoint_process")
    ident = kept.get("id")
    answer = await asking(first, "restore_process", checkpoint_id=ident)
    assert failed(answer)[0] == "corrupt"


async def test_a_checkpoint_is_restored_in_a_new_host(
    first: Process, tmp_path: Path
) -> None:
    kept = await asking(first, "checkpoint_process", label="before")
    size = 8000 + len(BINARY)
    assert kept.tag == "checkpoint"
    assert list(kept.attrib) == ["id", "created", "label", "fds", "bytes", "messages"]
    assert [kept.get(k) for k in ("label", "fds", "bytes", "messages")] == [
        *("before", "3", str(size), "1")
    ]
    first.add_text("later", "test")
    assert first.shared.checkpoints is not None
    first.shared.checkpoints.close()
    second = opened(tmp_path)
    listed = await asking(second, "list_checkpoints")
    assert [row.attrib for row in listed] == [kept.attrib]
    checkpoint_id = kept.get("id")
    answer = await asking(second, "restore_process", checkpoint_id)
    assert answer.attrib == {
        "checkpoint_id": checkpoint_id,
        "fds": "3",
        "messages": "1",
    }
    assert second.messages == first.messages
    assert second.table.next_number == 8
    for number in (1, 2, 7):
        was, now = first.table.fds[number], second.table.fds[number]
        assert now.content.original.data[:] == was.content.original.data[:]
        assert now.content.text.data[:] == was.content.text.data[:]
        assert (now.sections, now.name, now.source, now.created) == (
            *(was.sections, was.name, was.source, was.created),
        )
    by_name = await asking(second, "read_fd", name="third")
    assert text_of(by_name).startswith("one\ntwo\n")
    closed(second)


async def test_to_restore_drops_what_came_later(first: Process) -> None:
    kept = await asking(first, "checkpoint_process")
    await asking(first, "rename_fd", fd="fd:1", name="new")
    first.add_text("later", "test")
    first.messages.append({"role": "user", "content": "later"})
    await asking(first, "restore_process", kept.get("id"))
    assert list(first.table.fds) == [1, 2, 7]
    assert first.table.next_number == 8
    assert len(first.messages) == 1
    assert failed(await asking(first, "read_fd", name="new"))[0] == "not_found"


async def test_an_unknown_checkpoint_and_that_of_another_are_not_found(
    first: Process,
) -> None:
    kept = await asking(first, "checkpoint_process")
    first.shared.owner = "child-2"
    assert (await asking(first, "list_checkpoints")).get("count") == "0"
    for name in (kept.get("id"), "ckpt:1", ""):
        answer = await asking(first, "restore_process", name)
        assert failed(answer)[0] == "not_found"


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["flipped", "short", "missing"])
async def test_a_damaged_content_is_corrupt_and_changes_nothing(
    first: Process, tmp_path: Path, damage: str
) -> None:
    kept = await asking(first, "checkpoint_process")
    for path in (tmp_path / "blobs").iterdir():
        if damage == "flipped":
            _flip(path)
        elif damage == "short":
            os.truncate(path, 10)
        else:
            path.unlink()
    answer = await asking(first, "restore_process", kept.get("id"))
    assert failed(answer)[0] == "corrupt"
    assert list(first.table.fds) == [1, 2, 7]
    # The next checkpoint does not take the damaged file for what it was.
    again = await asking(first, "checkpoint_process")
    answer = await asking(first, "restore_process", again.get("id"))
    assert answer.tag == "restore"


async def test_a_damaged_state_is_corrupt(first: Process, tmp_path: Path) -> None:
    kept = await asking(first, "checkpoint_process")
    with sqlite3.connect(tmp_path / "checkpoints.sqlite") as database:
        database.execute("UPDATE checkpoint SET state = replace(state, 'mark', 'mask')")
    database.close()
    answer = await asking(first, "restore_process", kept.get("id"))
    assert failed(answer)[0] == "corrupt"


async def test_a_damaged_database_is_corrupt(tmp_path: Path, no_leaks: None) -> None:
    del no_leaks
    (tmp_path / "checkpoints.sqlite").write_bytes(b"no database" * 1000)
    made = opened(tmp_path)
    for name in ("checkpoint_process", "list_checkpoints"):
        answer = await asking(made, name)
        assert failed(answer)[0] == "corrupt"
    closed(made)


# attack 49: SQLite would follow it.
async def test_a_link_in_the_databases_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints.sqlite").symlink_to("made")
    made = opened(tmp_path)
    answer = await asking(made, "checkpoint_process")
    assert failed(answer)[0] == "file_operation"
    assert not (tmp_path / "made").exists()
    closed(made)


SURROGATE = "ckpt:\ud800"


async def test_a_lone_surrogate_is_no_id_and_no_label(first: Process) -> None:
    for name in ("restore_process", "delete_checkpoint"):
        answer = await asking(first, name, SURROGATE)
        assert failed(answer) == ("not_found", "", "Checkpoint ckpt:\ufffd not found")
    answer = await asking(first, "checkpoint_process", label="\udcff")
    assert failed(answer)[0] == "invalid_parameter"
    first.messages.append({"role": "user", "content": "\ud800"})
    kept = await asking(first, "checkpoint_process")
    assert (await asking(first, "restore_process", kept.get("id"))).tag == "restore"
    assert first.messages[-1]["content"] == "\ud800"


def change(where: Path, *statements: str) -> None:
    """Change the database of a directory behind its host's back."""
    with sqlite3.connect(where / "checkpoints.sqlite") as database:
        for statement in statements:
            database.execute(statement)
    database.close()


def loosened(table: str) -> tuple[str, ...]:
    """Return statements that take every constraint of a table away."""
    return (
        f"CREATE TABLE loose AS SELECT * FROM {table}",  # noqa: S608
        f"DROP TABLE {table}",
        f"ALTER TABLE loose RENAME TO {table}",
    )


ROWS = [
    *("created = 'abc'", "created = 1e300", "created = -1", "created = NULL"),
    *("created = created + 1", "label = 'other'", "label = NULL", "label = x'ff'"),
    *("label = CAST(x'ff' AS TEXT)", "fds = 'x'", "bytes = 0", "messages = 9"),
    *("state = 'text'", "state = NULL", "hash = NULL", "hash = 1"),
]


@pytest.mark.parametrize("damage", ROWS)
async def test_a_damaged_row_is_corrupt_and_hides_no_other(
    first: Process, tmp_path: Path, damage: str
) -> None:
    kept = await asking(first, "checkpoint_process", label="bad")
    whole = await asking(first, "checkpoint_process", label="good")
    bad, good = kept.get("id"), whole.get("id")
    change(
        tmp_path,
        *loosened("checkpoint"),
        f"UPDATE checkpoint SET {damage} WHERE id = '{bad}'",  # noqa: S608
    )
    listed = await asking(first, "list_checkpoints")
    said = f"Checkpoint {bad} is damaged and cannot be restored"
    assert failed(listed) == ("corrupt", "", said)
    assert f"{good} (good)" in listed.findtext("details", "")
    answer = await asking(first, "restore_process", bad)
    assert failed(answer) == ("corrupt", "", said)
    assert (await asking(first, "restore_process", good)).tag == "restore"
    assert (await asking(first, "checkpoint_process")).tag == "checkpoint"
    assert (await asking(first, "delete_checkpoint", bad)).tag == "checkpoint_deleted"
    assert (await asking(first, "list_checkpoints")).get("count") == "2"


@pytest.mark.parametrize("damage", ["NULL", "x'ff'", "CAST(x'ff' AS TEXT)", "''"])
async def test_a_checkpoint_whose_id_is_damaged_is_told(
    first: Process, tmp_path: Path, damage: str
) -> None:
    kept = await asking(first, "checkpoint_process")
    change(
        tmp_path,
        *loosened("checkpoint"),
        f"UPDATE checkpoint SET id = {damage}",  # noqa: S608
    )
    listed = await asking(first, "list_checkpoints")
    said = "Checkpoint (unreadable id) is damaged and cannot be restored"
    assert failed(listed)[::2] == ("corrupt", said)
    for name in ("restore_process", "delete_checkpoint"):
        assert failed(await asking(first, name, kept.get("id")))[0] == "not_found"


@pytest.mark.parametrize(
    "damage",
    ["size = 'x'", "size = NULL", "size = -1", "key = NULL", "key = '../victim'"],
)
async def test_what_a_checkpoint_holds_is_looked_at(
    first: Process, tmp_path: Path, damage: str
) -> None:
    kept = await asking(first, "checkpoint_process")
    victim = tmp_path / "victim"
    victim.write_text("not of the checkpoints")
    change(tmp_path, *loosened("held"), f"UPDATE held SET {damage}")  # noqa: S608
    answer = await asking(first, "checkpoint_process")
    said = f"Checkpoint {kept.get('id')} is damaged and cannot be restored"
    assert failed(answer)[::2] == ("corrupt", said)
    answer = await asking(first, "delete_checkpoint", kept.get("id"))
    assert answer.tag == "checkpoint_deleted"
    assert victim.exists(), "only contents are removed"
    assert (await asking(first, "checkpoint_process")).tag == "checkpoint"


STATES = [
    *(b"", b"\xff", b"[]", b"{}", b"[" * 100_000, b"1" * 5000),
    b'{"next": 1, "messages": [], "program": "", "fds": [], "more": 1}',
    b'{"next": "1", "messages": [], "program": "", "fds": []}',
    b'{"next": 1, "messages": ["x"], "program": "", "fds": []}',
    b'{"next": 1, "messages": [], "program": null, "fds": []}',
    b'{"next": 1, "messages": [], "program": "", "fds": [{}]}',
]

ROW = {
    "number": 1,
    "key": "0" * 64,
    "page_size": 10,
    "source": "x",
    "created": 1.0,
    "name": "n",
    "sections": {},
}

ROWS_OF_STATES = [
    *([{**ROW, "number": 0}], [{**ROW, "number": 2}], [{**ROW, "number": True}]),
    *([{**ROW, "key": "../victim"}], [{**ROW, "page_size": 0}], [{**ROW, "name": 1}]),
    *([{**ROW, "created": "x"}], [{**ROW, "created": 1e300}], [{**ROW, "source": 1}]),
    *([{**ROW, "sections": {"a": part}}] for part in (1, [1], [2, 1], [0, 1], "ab")),
    *([{**ROW, "sections": []}], [ROW, ROW]),
]


@pytest.mark.parametrize("fds", ROWS_OF_STATES)
def test_descriptors_that_nobody_wrote_are_refused(
    fds: list[dict[str, object]],
) -> None:
    state = {"next": 2, "messages": [], "program": ""}
    whole = json.dumps({**state, "fds": [ROW]}).encode()
    assert checkpoint_state.read_state(whole) is not None
    assert (
        checkpoint_state.read_state(json.dumps({**state, "fds": fds}).encode()) is None
    )


@pytest.mark.parametrize("state", STATES)
async def test_a_state_that_nobody_wrote_is_corrupt_whatever_its_hash(
    tmp_path: Path, no_leaks: None, state: bytes
) -> None:
    del no_leaks
    made = opened(tmp_path)
    await asking(made, "list_checkpoints")
    told = checkpoint_rows.Summary("ckpt:1", 1.0, "", 0, 0, 0)
    row = (*checkpoint_rows.row_of("child-1", told, state), "child-1")
    with sqlite3.connect(tmp_path / "checkpoints.sqlite") as database:
        database.execute(
            f"INSERT INTO checkpoint ({checkpoint_rows.COLUMNS}, owner)"  # noqa: S608
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            row,
        )
    database.close()
    answer = await asking(made, "restore_process", "ckpt:1")
    assert failed(answer)[0] == "corrupt"
    closed(made)


async def test_names_of_the_database_that_are_no_text_are_corrupt(
    first: Process, tmp_path: Path
) -> None:
    await asking(first, "checkpoint_process")
    before = first.shared.checkpoints
    assert before is not None
    before.close()
    path = tmp_path / "checkpoints.sqlite"
    data = path.read_bytes()
    assert b"CREATE TABLE held" in data
    path.write_bytes(
        data.replace(b"CREATE TABLE held", b"CREATE \xff\xff\xff\xff\xff held")
    )
    second = opened(tmp_path)
    for name in ("list_checkpoints", "checkpoint_process"):
        assert failed(await asking(second, name))[0] == "corrupt"
    for name in ("restore_process", "delete_checkpoint"):
        assert failed(await asking(second, name, "ckpt:1"))[0] == "corrupt"
    closed(second)


async def test_tables_of_another_shape_are_corrupt(
    tmp_path: Path, no_leaks: None
) -> None:
    del no_leaks
    change(tmp_path, "CREATE TABLE checkpoint (other)")
    made = opened(tmp_path)
    answer = await asking(made, "list_checkpoints")
    assert failed(answer)[0] == "corrupt"
    closed(made)


async def test_what_may_not_be_kept_any_more_is_not_restored(
    first: Process, tmp_path: Path
) -> None:
    kept = await asking(first, "checkpoint_process")
    assert first.shared.checkpoints is not None
    first.shared.checkpoints.close()
    small = opened(tmp_path, limit=1000)
    small.add_text("here", "test")
    answer = await asking(small, "restore_process", kept.get("id"))
    assert failed(answer)[0] == "file_operation"
    assert list(small.table.fds) == [1]
    assert small.shared.allowance is not None
    assert small.shared.allowance.used == 4
    closed(small)


async def test_checkpoints_are_bounded(tmp_path: Path, no_leaks: None) -> None:
    del no_leaks
    made = opened(tmp_path)
    assert made.shared.checkpoints is not None
    made.shared.checkpoints.most_bytes = 10
    made.add_text("x" * 8, "test")
    for _ in range(2):  # the same content counts once
        assert (await asking(made, "checkpoint_process")).tag == "checkpoint"
    made.add_text("y" * 8, "test")
    answer = await asking(made, "checkpoint_process")
    assert failed(answer)[2] == "Cannot keep a checkpoint: Disk quota exceeded"
    closed(made)


def test_a_directory_has_one_host(tmp_path: Path) -> None:
    one = Checkpoints(str(tmp_path))
    with pytest.raises(BlockingIOError, match="another host") as refused:
        Checkpoints(str(tmp_path))
    assert refused.value.filename == str(tmp_path)
    one.close()
    one.close()
    Checkpoints(str(tmp_path)).close()


@pytest.mark.parametrize("before", [None, 0o755])
def test_a_directory_is_private(tmp_path: Path, before: int | None) -> None:
    where = tmp_path / "checkpoints"
    if before is not None:
        where.mkdir(before)
        where.chmod(before)
    Checkpoints(str(where)).close()
    modes = [path.stat().st_mode & 0o777 for path in (where, where / "blobs")]
    assert modes == [0o700, 0o700]


async def test_contents_that_nobody_came_to_hold_are_removed(
    first: Process, tmp_path: Path
) -> None:
    (tmp_path / "blobs" / "00").write_text("left by a host that was killed")
    await asking(first, "checkpoint_process")
    assert len(os.listdir(tmp_path / "blobs")) == 2


@pytest.mark.parametrize("at", ["second content", "state"])
async def test_what_cannot_be_kept_leaves_no_contents(
    first: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    await asking(first, "checkpoint_process")
    blobs = tmp_path / "blobs"
    held = sorted(os.listdir(blobs))
    # One that is held was damaged, and is written anew before the disk is full.
    (blobs / held[0]).write_bytes(b"damaged")
    for text in ("new\n" * 1000, "newer\n" * 1000):
        first.add_text(text, "test")
    written = 0

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def append(files: BlobFiles, name: str, data: bytes) -> None:
        nonlocal written
        written += 1 if data else 0
        if written == 3:
            full()
        write(files, name, data)

    write = BlobFiles.append

    if at == "state":
        monkeypatch.setattr(checkpoints, "state_of", full)
    else:
        monkeypatch.setattr(BlobFiles, "append", append)
    answer = await asking(first, "checkpoint_process")
    assert failed(answer)[0] == "file_operation"
    assert sorted(os.listdir(blobs)) == held
    assert (blobs / held[0]).read_bytes() != b"damaged"
    monkeypatch.undo()
    assert (await asking(first, "checkpoint_process")).get("fds") == "5"


async def test_what_no_host_has_left_there_is_left_alone(
    first: Process, tmp_path: Path
) -> None:
    blobs = tmp_path / "blobs"
    (blobs / "lost+found").mkdir()
    (blobs / "link").symlink_to(tmp_path)
    (blobs / "00.part").write_text("left by a host that was killed")
    answer = await asking(first, "checkpoint_process")
    assert answer.tag == "checkpoint"
    names = set(os.listdir(blobs))
    assert {"lost+found", "link"} < names
    assert len(names) == 4, "two contents, and nothing that was begun"


async def test_where_none_are_kept_that_is_told() -> None:
    made = Process(ProcessParts(Store(), TOOLS))
    for name, arguments in (
        ("checkpoint_process", {}),
        ("list_checkpoints", {}),
        ("restore_process", {"checkpoint_id": "ckpt:1"}),
    ):
        assert failed(await asking(made, name, **arguments))[0] == "file_operation"
    long = await asking(made, "checkpoint_process", label="x" * 201)
    assert failed(long)[0] == "invalid_parameter"


# Their end


def files_of(where: Path) -> set[int]:
    """Return the sizes of the contents on the disk."""
    return {path.stat().st_size for path in (where / "blobs").iterdir()}


async def test_what_is_deleted_is_gone_with_what_only_it_held(
    first: Process, tmp_path: Path
) -> None:
    one = await asking(first, "checkpoint_process")
    first.shared.owner = "child-2"
    await asking(first, "keep_fds", fds=["fd:2"])
    other = await asking(first, "checkpoint_process")
    for name, owner in ((one.get("id"), "child-2"), ("ckpt:1", "child-1")):
        first.shared.owner = owner
        answer = await asking(first, "delete_checkpoint", name)
        assert failed(answer)[::2] == ("not_found", f"Checkpoint {name} not found")
    answer = await asking(first, "delete_checkpoint", one.get("id"))
    assert (answer.tag, answer.attrib) == ("checkpoint_deleted", {"id": one.get("id")})
    assert (await asking(first, "list_checkpoints")).get("count") == "0"
    assert (
        failed(await asking(first, "restore_process", one.get("id")))[0] == "not_found"
    )
    assert files_of(tmp_path) == {len(BINARY)}, "what another holds stays"
    first.shared.owner = "child-2"
    answer = await asking(first, "restore_process", other.get("id"))
    assert answer.tag == "restore"
    await asking(first, "delete_checkpoint", other.get("id"))
    assert files_of(tmp_path) == set()


@pytest.mark.parametrize("damage", ["flipped", "missing"])
async def test_a_damaged_checkpoint_can_be_deleted(
    first: Process, tmp_path: Path, damage: str
) -> None:
    kept = await asking(first, "checkpoint_process")
    for path in (tmp_path / "blobs").iterdir():
        _flip(path) if damage == "flipped" else path.unlink()
    answer = await asking(first, "delete_checkpoint", kept.get("id"))
    assert answer.tag == "checkpoint_deleted"
    assert files_of(tmp_path) == set()


def keeping(where: Path, retention: Retention, owner: str = "child-1") -> Process:
    """Return a process of a host that keeps checkpoints so."""
    checkpoints = Checkpoints(str(where), retention=retention)
    return Process(ProcessParts(Store(), TOOLS, checkpoints=checkpoints, owner=owner))


async def test_of_each_owner_the_newest_stay(tmp_path: Path, no_leaks: None) -> None:
    del no_leaks
    made = keeping(tmp_path, Retention(count=2))
    for size in (1, 2, 3, 4):
        made.add_text("x" * size, "test")
        made.table.keep_only({size})
        for owner in ("child-1", "child-2")[: 2 if size < 3 else 1]:
            made.shared.owner = owner
            assert (await asking(made, "checkpoint_process", str(size))).get("id")
    for owner, labels in (("child-1", ["3", "4"]), ("child-2", ["1", "2"])):
        made.shared.owner = owner
        listed = await asking(made, "list_checkpoints")
        assert [row.get("label") for row in listed] == labels
    assert files_of(tmp_path) == {1, 2, 3, 4}
    closed(made)


async def test_what_goes_makes_room_for_what_comes(
    tmp_path: Path, no_leaks: None
) -> None:
    del no_leaks
    made = keeping(tmp_path, Retention(count=1))
    assert made.shared.checkpoints is not None
    made.shared.checkpoints.most_bytes = 10
    for number in (1, 2, 3):
        made.add_text(str(number) * 8, "test")
        made.table.keep_only({number})
        assert (await asking(made, "checkpoint_process")).tag == "checkpoint"
    made.add_text("4" * 11, "test")
    made.table.keep_only({4})
    refused = await asking(made, "checkpoint_process")
    assert refused.findtext("details") == "delete_checkpoint makes room"
    assert (await asking(made, "list_checkpoints")).get("count") == "1"
    closed(made)


async def test_what_is_old_goes_when_a_host_starts_and_when_one_is_made(
    tmp_path: Path, no_leaks: None
) -> None:
    del no_leaks
    first = keeping(tmp_path, Retention())
    for size in (1, 2):
        first.add_text("x" * size, "test")
        first.table.keep_only({size})
        await asking(first, "checkpoint_process", str(size))
    closed(first)
    with sqlite3.connect(tmp_path / "checkpoints.sqlite") as database:
        database.execute("UPDATE checkpoint SET created = created - 60")
    database.close()
    second = keeping(tmp_path, Retention(age_s=30), "child-9")
    assert (await asking(second, "list_checkpoints")).get("count") == "0"
    assert files_of(tmp_path) == set(), "whoever's they were"
    second.add_text("xxx", "test")
    kept = await asking(second, "checkpoint_process")
    with sqlite3.connect(tmp_path / "checkpoints.sqlite") as database:
        database.execute("UPDATE checkpoint SET created = created - 60")
    database.close()
    again = await asking(second, "checkpoint_process")
    listed = await asking(second, "list_checkpoints")
    assert [row.get("id") for row in listed] == [again.get("id")] != [kept.get("id")]
    assert files_of(tmp_path) == {3}, "held by the one that was made"
    closed(second)
