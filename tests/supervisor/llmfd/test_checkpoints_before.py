"""A directory of checkpoints of earlier programs, to the byte, and its use.

These files are never made again by the tested code: a change of what is
written has to read this, too.
"""

import os
import sqlite3
from pathlib import Path

import pytest

from supervisor.llmfd import TOOLS, Checkpoints, Process, ProcessParts, Store
from tests.helpers.contents import asking, failed, text_of

TEXT = b"line \xc3\xa9\n" * 3
KEY = "8b6b1daa61d17d89e5ec8bb9c49f3da3542fdcd691d2bef77a432bc76670d333"

TABLES = """
CREATE TABLE checkpoint (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL,
    label TEXT NOT NULL, fds INTEGER NOT NULL, bytes INTEGER NOT NULL,
    messages INTEGER NOT NULL, state BLOB NOT NULL, hash BLOB NOT NULL);
CREATE TABLE held (
    checkpoint TEXT NOT NULL, owner TEXT NOT NULL, key TEXT NOT NULL,
    size INTEGER NOT NULL);
CREATE INDEX held_by_owner ON held (owner, key);
"""
"""Before checkpoints could be deleted: it had no other index."""

STATE = (
    b'{"next": 8, "messages": [{"role": "system", "content": "Be good."},'
    b' {"role": "user", "content": "go \\u00e9"}], "program": "general", "fds":'
    b' [{"number": 7, "key":'
    b' "8b6b1daa61d17d89e5ec8bb9c49f3da3542fdcd691d2bef77a432bc76670d333", "page_size":'
    b' 4000, "source": "tool:t", "created": 1700000000.25, "name": "the log",'
    b' "sections": {"here": [2, 3]}}]}'
)
"""Before each message was a line of its own."""

HASH = bytes.fromhex("6120b9d0e09f89d254f0a27846aa35eb111d9c5b9312b17333ac87542f2c39ef")
ROW = (
    "ckpt:0011223344556677",
    "child-1",
    1700000001.5,
    "before",
    1,
    24,
    2,
    STATE,
    HASH,
)


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A directory that an earlier program has left."""
    (tmp_path / "blobs").mkdir(mode=0o700)
    (tmp_path / "blobs" / KEY).write_bytes(TEXT)
    database = sqlite3.connect(tmp_path / "checkpoints.sqlite")
    database.execute("PRAGMA journal_mode = WAL")
    database.executescript(TABLES)
    database.execute("INSERT INTO checkpoint VALUES (?,?,?,?,?,?,?,?,?)", ROW)
    database.execute("INSERT INTO held VALUES (?,?,?,?)", (ROW[0], ROW[1], KEY, 24))
    database.commit()
    database.close()
    return tmp_path


async def test_what_an_earlier_program_kept_is_restored_and_goes(
    where: Path, no_leaks: None
) -> None:
    del no_leaks
    checkpoints = Checkpoints(str(where))
    process = Process(
        ProcessParts(Store(), TOOLS, checkpoints=checkpoints, owner="child-1")
    )
    listed = await asking(process, "list_checkpoints")
    assert [row.attrib for row in listed] == [
        {
            "id": "ckpt:0011223344556677",
            "created": "2023-11-14T22:13:21.500000Z",
            "label": "before",
            "fds": "1",
            "bytes": "24",
            "messages": "2",
        }
    ]
    answer = await asking(process, "restore_process", checkpoint_id=ROW[0])
    assert (answer.get("fds"), answer.get("messages")) == ("1", "2")
    assert text_of(await asking(process, "read_fd", name="the log")) == TEXT.decode()
    part = await asking(process, "get_fd_section", fd="fd:7", ref_id="here")
    assert part.get("lines") == "2-3"
    info = await asking(process, "fd_info", fd="fd:7")
    assert info.get("source") == "tool:t"
    assert info.get("creation_time") == "2023-11-14T22:13:20.250000Z"
    assert process.program == "general"
    assert [one["content"] for one in process.messages] == ["Be good.", "go é"]
    assert process.add_text("next", "test").id == "fd:8"
    # One of this program beside it, and then neither.
    later = (await asking(process, "checkpoint_process")).get("id")
    for checkpoint in (ROW[0], later):
        await asking(process, "delete_checkpoint", checkpoint_id=checkpoint)
    assert os.listdir(where / "blobs") == []
    process.close()
    checkpoints.close()


@pytest.mark.parametrize("column", ["label", "state", "created", "messages", "owner"])
async def test_what_was_changed_since_is_corrupt(where: Path, column: str) -> None:
    values = {
        "label": "after",
        "state": STATE[:-1] + b" }",
        "created": 1.0,
        "messages": 3,
    }
    owner = "child-2" if column == "owner" else "child-1"
    database = sqlite3.connect(where / "checkpoints.sqlite")
    value = values.get(column, "child-2")
    database.execute(f"UPDATE checkpoint SET {column} = ?", (value,))  # noqa: S608
    database.commit()
    database.close()
    checkpoints = Checkpoints(str(where))
    process = Process(
        ProcessParts(Store(), TOOLS, checkpoints=checkpoints, owner=owner)
    )
    answer = await asking(process, "restore_process", checkpoint_id=ROW[0])
    assert failed(answer)[0] == "corrupt"
    process.close()
    checkpoints.close()
