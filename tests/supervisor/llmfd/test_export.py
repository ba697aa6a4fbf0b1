"""`fd_to_file`: whole or not at all, under the client's rights."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import trio

from supervisor.llmfd import ClientFiles, Process, Store, client_files
from supervisor.llmfd.service import FdService
from tests.helpers.contents import asking, failed
from tests.helpers.sessions import Hall, hall
from vfs.backends import host_file
from vfs.backends.host_file import HostHandle
from vfs.clients import OpenFile
from vfs.ledger import Ledger

__all__ = ["hall"]

TEXT = "".join(f"line {n}\n" for n in range(1, 1001))


def used_of(ledger: Ledger) -> list[int]:
    """Return what is used of open files, clients and bytes."""
    return [account.used for account in ledger.accounts[:3]]


def at(hall: Hall, text: str | bytes = TEXT, ledger: Ledger | None = None) -> Process:
    """Return the process of a client, with one content."""
    line = hall.connect(ledger=ledger)
    process = FdService(hall.fs, Store()).process_of(line.client)
    data = text if isinstance(text, bytes) else text.encode()
    process.add(process.shared.store.put(data), "test")
    return process


async def test_a_content_is_written_and_counted(hall: Hall) -> None:
    answer = await asking(at(hall), "fd_to_file", fd="fd:1", file_path="out.txt")
    assert answer.attrib == {
        "fd": "fd:1",
        "file_path": "out.txt",
        "success": "true",
        "mode": "write",
    }
    assert answer.findtext("message") == (
        "Content from fd:1 successfully written to out.txt"
    )
    assert answer.findtext("stats/bytes") == str(len(TEXT))
    assert answer.findtext("stats/lines") == "1000"
    assert (hall.root / "out.txt").read_text() == TEXT


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({"page": 2}, None),
        ({"start_line": 45, "end_line": 47}, "line 45\nline 46\nline 47\n"),
        ({"end_line": 1}, "line 1\n"),
    ],
)
async def test_a_part_is_written(
    hall: Hall, selector: dict[str, object], expected: str | None
) -> None:
    process = at(hall)
    if expected is None:
        span = process.table.fds[1].content.text.pages(4000).span(2)
        expected = TEXT[span.start : span.end]
    await asking(process, "fd_to_file", fd="fd:1", file_path="a", **selector)
    assert (hall.root / "a").read_text() == expected


async def test_missing_directories_are_made_and_append_adds(hall: Hall) -> None:
    process = at(hall, "abc")
    for _ in range(2):
        await asking(process, "fd_to_file", fd="fd:1", file_path="x/y/z", mode="append")
    assert (hall.root / "x/y/z").read_text() == "abcabc"


@pytest.mark.parametrize(
    ("old", "line", "content", "new", "size", "lines"),
    [
        ("1\n2\n", 1, "x", "x\n1\n2\n", 2, 1),
        ("1\n2\n", 2, "x\n", "1\nx\n2\n", 2, 1),
        ("1\n2\n", 3, "x", "1\n2\nx", 1, 1),
        ("1\n2", 3, "x", "1\n2\nx", 1, 1),
        ("1\n2", 2, "x\ny", "1\nx\ny\n2", 4, 2),
        ("", 1, "x", "x", 1, 1),
        ("1\n", 2, "", "1\n", 0, 0),
    ],
)
async def test_insert_puts_it_before_the_line(  # noqa: PLR0917
    hall: Hall, old: str, line: int, content: str, new: str, size: int, lines: int
) -> None:
    (hall.root / "a").write_text(old)
    answer = await asking(
        at(hall, content),
        "fd_to_file",
        fd="fd:1",
        file_path="a",
        mode="insert",
        insert_at_line=line,
    )
    assert (hall.root / "a").read_text() == new
    assert answer.findtext("stats/bytes") == str(size)
    assert answer.findtext("stats/lines") == str(lines)


@pytest.mark.parametrize("line", [-1, 0, 4])
async def test_insert_beyond_the_end_is_refused(hall: Hall, line: int) -> None:
    (hall.root / "a").write_text("1\n2\n")
    arguments = {"file_path": "a", "mode": "insert", "insert_at_line": line}
    answer = await asking(at(hall), "fd_to_file", fd="fd:1", **arguments)
    assert failed(answer) == (
        "invalid_parameter",
        "fd:1",
        "Invalid insert_at_line. Valid range: 1-3",
    )
    assert (hall.root / "a").read_text() == "1\n2\n"


# The host keeps a copy of the file meanwhile.
@pytest.mark.parametrize(("room", "is_good"), [(5000, False), (15_000, True)])
async def test_an_insert_counts_the_file_against_the_contents_of_the_child(
    hall: Hall, room: int, is_good: bool
) -> None:
    old = "old line\n" * 1000
    (hall.root / "a").write_text(old)
    client = hall.connect().client
    made = FdService(hall.fs, Store(), max_store=room).process_of(client)
    made.add(made.shared.store.put(b"new line\n"), "test")
    allowance = made.shared.allowance
    assert allowance is not None
    before = allowance.used
    answer = await asking(
        made, "fd_to_file", fd="fd:1", file_path="a", mode="insert", insert_at_line=1
    )
    if is_good:
        assert answer.tag == "fd_write"
        old = "new line\n" + old
    else:
        text = "Cannot store content: Disk quota exceeded"
        assert failed(answer) == ("file_operation", "fd:1", text)
    assert (hall.root / "a").read_text() == old
    assert allowance.used == before


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"file_path": "old", "exist_ok": False}, "file_operation", "File exists"),
        ({"file_path": "new", "create": False}, "file_operation", "No such file"),
        ({"file_path": "new", "mode": "insert", "insert_at_line": 1}, *("file_operation", "No such file")),
        ({"file_path": "/etc/passwd"}, "file_operation", "Permission denied"),
        ({"file_path": "../out"}, "file_operation", "Permission denied"),
        ({"file_path": "old/under"}, "file_operation", "Not a directory"),
        ({"file_path": "directory"}, "file_operation", "Is a directory"),
        ({"file_path": "new/deep/directory/"}, "file_operation", "Is a directory"),
        ({"file_path": "new/deep/."}, "file_operation", "Is a directory"),
        ({"file_path": "a\0b"}, "file_operation", "No such file"),
        ({"file_path": ""}, "file_operation", "No such file"),
        ({"file_path": "new", "mode": "insert"}, "invalid_parameter", "insert_at"),
        ({"file_path": "new", "insert_at_line": 1}, "invalid_parameter", "insert_at"),
        ({"file_path": "new", "mode": "update"}, "invalid_parameter", "one of: write"),
        ({}, "invalid_parameter", "Missing parameter: file_path"),
    ],
)  # fmt: skip
async def test_what_is_refused_touches_nothing(
    hall: Hall, arguments: dict[str, object], kind: str, message: str
) -> None:
    (hall.root / "old").write_text("old")
    (hall.root / "directory").mkdir()
    answer = await asking(at(hall), "fd_to_file", fd="fd:1", **arguments)
    assert failed(answer)[:2] == (kind, "fd:1")
    assert message in failed(answer)[2]
    if kind == "file_operation":
        assert failed(answer)[2].startswith("Cannot write to file: ")
        mode = arguments.get("mode", "write")
        path = str(arguments["file_path"]).replace("\0", "\ufffd")
        assert answer.findtext("details") == f"Operation: {mode}, Path: {path}"
    assert sorted(p.name for p in hall.root.iterdir()) == ["directory", "old"]
    assert (hall.root / "old").read_text() == "old"


async def test_binary_is_written_as_it_came_and_only_whole(hall: Hall) -> None:
    data = bytes(range(256)) * 100
    process = at(hall, data)
    answer = await asking(process, "fd_to_file", fd="fd:1", file_path="a")
    assert (hall.root / "a").read_bytes() == data
    assert answer.findtext("stats/bytes") == str(len(data))
    answer = await asking(process, "fd_to_file", fd="fd:1", file_path="b", page=1)
    assert failed(answer)[0] == "invalid_parameter"


async def test_the_bits_of_a_file_that_is_replaced_stay(hall: Hall) -> None:
    target = hall.root / "run.sh"
    target.write_text("old")
    target.chmod(0o751)
    await asking(at(hall), "fd_to_file", fd="fd:1", file_path="run.sh")
    assert target.stat().st_mode & 0o777 == 0o751


def _full(*_: object, **__: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("mode", ["write", "append", "insert"])
@pytest.mark.parametrize("at_call", ["write", "sync", "rename"])
async def test_a_full_disk_leaves_the_old_file_to_the_byte(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, mode: str, at_call: str
) -> None:
    (hall.root / "a").write_bytes(b"old\r\n\xff")
    process = at(hall)
    if at_call == "write":
        monkeypatch.setattr(host_file.HostHandle, "pwrite", _full)
        monkeypatch.setattr(host_file.HostHandle, "append", _full)
    elif mode == "append":
        pytest.skip("an append needs neither")
    else:
        name = "fsync" if at_call == "sync" else "rename"
        monkeypatch.setattr(os, name, _full)
    more = {"insert_at_line": 1} if mode == "insert" else {}
    answer = await asking(
        process, "fd_to_file", fd="fd:1", file_path="a", mode=mode, **more
    )
    monkeypatch.undo()
    assert failed(answer)[2] == "Cannot write to file: No space left on device"
    assert (hall.root / "a").read_bytes() == b"old\r\n\xff"
    assert os.listdir(hall.root) == ["a"]


async def test_an_append_that_fails_in_the_middle_is_cut_off(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hall.root / "a").write_text("old")
    process = at(hall, "x" * 3_000_000)
    append = host_file.HostHandle.append
    calls = iter((append, _full))

    def once(handle: host_file.HostHandle, data: bytes) -> int:
        return next(calls)(handle, data)

    monkeypatch.setattr(host_file.HostHandle, "append", once)
    answer = await asking(
        process, "fd_to_file", fd="fd:1", file_path="a", mode="append"
    )
    assert failed(answer)[0] == "file_operation"
    assert (hall.root / "a").read_text() == "old"


# spec W5: what is cut off is what was added in its own turn, behind what others wrote.
async def test_an_append_that_fails_behind_anothers_write_is_cut_off(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(size_bytes=10_000_000)
    assert ledger.turn is not None
    turn = ledger.turn
    (hall.root / "a").write_text("old")
    process = at(hall, "x" * 3_000_000, ledger=ledger)
    append = host_file.HostHandle.append
    calls = iter((append, _full))
    open_waiting = hall.fs.open_waiting

    def once(handle: host_file.HostHandle, data: bytes) -> int:
        return next(calls)(handle, data)

    async def write(*, task_status: trio.TaskStatus[None]) -> None:
        async with turn:
            task_status.started()
            while not turn.waiting:
                await trio.lowlevel.checkpoint()
            with (hall.root / "a").open("ab") as file:
                file.write(b"new")

    async with trio.open_nursery() as nursery:

        async def overtaken(*args: Any) -> OpenFile:
            file = await open_waiting(*args)
            await nursery.start(write)
            return file

        monkeypatch.setattr(host_file.HostHandle, "append", once)
        monkeypatch.setattr(hall.fs, "open_waiting", overtaken)
        answer = await asking(
            process, "fd_to_file", fd="fd:1", file_path="a", mode="append"
        )
    assert failed(answer)[0] == "file_operation"
    assert (hall.root / "a").read_text() == "oldnew"
    assert ledger.size_bytes.used == 0


# spec S7: others of the child wait for a piece of a long export, not for its end.
@pytest.mark.parametrize("mode", ["write", "append", "insert"])
async def test_others_have_their_turn_in_the_middle_of_an_export(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(client_files, "TURN_BYTES", 1024 * 1024)
    ledger = Ledger(size_bytes=10_000_000)
    assert ledger.turn is not None
    turn = ledger.turn
    (hall.root / "a").write_text("old\n")
    content = "x" * 2_999_999 + "\n"
    process = at(hall, content, ledger=ledger)
    charge = OpenFile.charge_growth
    charged: list[int] = []
    seen: list[int] = []

    async def other() -> None:
        async with turn:
            seen.append(sum(charged))

    async with trio.open_nursery() as nursery:

        def look(file: OpenFile, size: int, old_size: int) -> int:
            if not charged:
                nursery.start_soon(other)
            charged.append(size)
            return charge(file, size, old_size)

        monkeypatch.setattr(OpenFile, "charge_growth", look)
        more = {"insert_at_line": 1} if mode == "insert" else {}
        answer = await asking(
            process, "fd_to_file", fd="fd:1", file_path="a", mode=mode, **more
        )
    assert answer.tag == "fd_write"
    assert 0 < seen[0] < sum(charged)
    wanted = {"write": content, "append": "old\n" + content}
    found = (hall.root / "a").read_text()
    assert found == wanted.get(mode, content + "old\n")
    assert ledger.size_bytes.used == len(found) - len("old\n")


# spec S5: what the last close gives back to the kernel takes it long.
@pytest.mark.parametrize("mode", ["read", "append"])
async def test_a_long_file_that_is_removed_meanwhile_is_closed_in_a_thread(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr("hostlib.large_files.INLINE_TRUNCATE_BYTES", 100_000)
    (hall.root / "a").write_bytes(b"x" * 300_000)
    closing: list[Callable[[], None]] = []
    monkeypatch.setattr(
        "hostlib.large_files.in_background",
        lambda call, *args: closing.append(partial(call, *args)),
    )
    ends = ClientFiles(hall.fs, hall.connect().client)

    def take(_: bytes) -> None:
        (hall.root / "a").unlink(missing_ok=True)

    def pieces() -> Iterator[bytes]:
        take(b"")
        yield b""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if mode == "read":
        await ends.read("a", take)
    else:
        with pytest.raises(OSError, match="No space"):
            await ends.append("a", pieces())
    assert not hall.fs.tables.files
    (run,) = closing
    run()


async def test_what_is_written_counts_against_the_child(hall: Hall) -> None:
    ledger = Ledger(size_bytes=10_000, files=3)
    process = at(hall, ledger=ledger)
    (hall.root / "a").write_text("old")
    answer = await asking(process, "fd_to_file", fd="fd:1", file_path="a")
    assert answer.tag == "fd_write"
    used = used_of(ledger)
    answer = await asking(process, "fd_to_file", fd="fd:1", file_path="b")
    assert failed(answer)[2] == "Cannot write to file: Disk quota exceeded"
    assert used_of(ledger) == used
    assert os.listdir(hall.root) == ["a"]


@pytest.mark.parametrize("mode", ["write", "append"])
async def test_what_is_written_is_charged_in_its_turn(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    ledger = Ledger(size_bytes=100_000, files=3)
    process = at(hall, ledger=ledger)
    charge = OpenFile.charge_growth
    seen = []

    def look(file: OpenFile, size: int, old_size: int) -> int:
        assert ledger.turn is not None
        seen.append((threading.current_thread(), ledger.turn.is_taken))
        return charge(file, size, old_size)

    monkeypatch.setattr(OpenFile, "charge_growth", look)
    await asking(process, "fd_to_file", fd="fd:1", file_path="a", mode=mode)
    assert seen == [(threading.main_thread(), True)]
    assert ledger.size_bytes.used == len(TEXT)


# spec S5: the file system of the file may be down.
@pytest.mark.parametrize("mode", ["write", "append"])
async def test_a_size_is_asked_for_in_a_thread(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    process = at(hall, ledger=Ledger(size_bytes=100_000))
    size, seen = HostHandle.size, []

    def look(handle: HostHandle) -> int:
        seen.append(threading.current_thread())
        return size(handle)

    monkeypatch.setattr(HostHandle, "size", look)
    await asking(process, "fd_to_file", fd="fd:1", file_path="a", mode=mode)
    assert seen
    assert threading.main_thread() not in seen


@pytest.mark.parametrize("mode", ["write", "insert"])
async def test_a_directory_that_is_not_flushed_is_told_precisely(
    hall: Hall, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    ledger = Ledger(size_bytes=100_000, files=3)
    process = at(hall, ledger=ledger)
    more = {"insert_at_line": 1} if mode == "insert" else {}
    (hall.root / "a").write_text("old\n")
    before = ledger.size_bytes.used
    monkeypatch.setattr(host_file, "sync_directory", _full)
    answer = await asking(
        process, "fd_to_file", fd="fd:1", file_path="a", mode=mode, **more
    )
    monkeypatch.undo()
    assert failed(answer)[2] == "Cannot write to file: No space left on device"
    assert answer.findtext("details") == (
        f"Operation: {mode}, Path: a. The new content stands there, whole, but the"
        " directory could not be put on the disk: after a crash of the machine the old"
        " one may be there again"
    )
    new = TEXT + ("old\n" if mode == "insert" else "")
    assert (hall.root / "a").read_text() == new
    assert os.listdir(hall.root) == ["a"]
    assert ledger.size_bytes.used - before == len(new) - len("old\n"), "it is there"


async def test_an_export_counts_among_the_files_that_a_host_has_open(
    hall: Hall, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = at(hall)
    monkeypatch.setattr(hall.fs.descriptor_account, "limit", 0)
    answer = await asking(process, "fd_to_file", fd="fd:1", file_path="a")
    assert failed(answer)[2] == "Cannot write to file: Too many open files"
    assert os.listdir(hall.root) == []


@pytest.mark.parametrize("mode", ["write", "append", "insert"])
@pytest.mark.parametrize("at_call", [0, 1, 2])
async def test_without_a_thread_the_old_file_is_there_and_nothing_stays_open(
    hall: Hall,
    monkeypatch: pytest.MonkeyPatch,
    no_leaks: None,
    mode: str,
    at_call: int,
) -> None:
    del no_leaks
    ledger = Ledger(size_bytes=100_000, files=3)
    process = at(hall, ledger=ledger)
    (hall.root / "a").write_text("old\n")
    more = {"insert_at_line": 1} if mode == "insert" else {}
    run_sync, calls, used = trio.to_thread.run_sync, 0, used_of(ledger)

    async def some(*args: Any, **kwargs: Any) -> object:
        nonlocal calls
        calls += 1
        if calls == at_call + 1:
            raise RuntimeError("can't start new thread")
        return await run_sync(*args, **kwargs)

    monkeypatch.setattr(trio.to_thread, "run_sync", some)
    answer = await asking(
        process, "fd_to_file", fd="fd:1", file_path="a", mode=mode, **more
    )
    monkeypatch.undo()
    assert not list(ledger.open)
    if calls <= at_call:  # it needs no more of them
        assert answer.tag == "fd_write"
        return
    assert failed(answer)[2] == (
        "Cannot write to file: Resource temporarily unavailable"
    )
    assert (hall.root / "a").read_text() == "old\n"
    assert used_of(ledger) == used
    assert os.listdir(hall.root) == ["a"]
    answer = await asking(process, "fd_to_file", fd="fd:1", file_path="a")
    assert answer.tag == "fd_write"
