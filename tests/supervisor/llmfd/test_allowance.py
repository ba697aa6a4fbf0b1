"""The contents of one child's processes: each counted once while held."""

import pytest

from supervisor.llmfd import TOOLS, Allowance, FdError, Process, ProcessParts, Store
from supervisor.llmfd.table import FdTable
from tests.helpers.contents import ask, failed


def bounded(limit: int) -> tuple[Process, Allowance]:
    """Return a process whose contents are bounded, and what bounds them."""
    allowance = Allowance(limit)
    return Process(ProcessParts(Store(), TOOLS, allowance=allowance)), allowance


def test_descriptors_and_temporary_files_share_what_is_the_same() -> None:
    made, allowance = bounded(25)
    made.add_text("0123456789", "test")
    temp = ask(made, "create_temp_file", content="0123456789")
    made.add_text("0123456789", "test")
    assert allowance.used == 10
    ask(made, "write_temp_file", temp_file_id=temp.get("id"), content="abcdefghij")
    assert allowance.used == 20
    answer = ask(made, "write_temp_file", temp_file_id=temp.get("id"), content="x" * 6)
    assert failed(answer)[0] == "file_operation"  # the old one is there until then
    ask(made, "keep_fds", fds=["fd:2"])
    assert allowance.used == 20
    ask(made, "delete_temp_file", temp_file_id=temp.get("id"))
    assert allowance.used == 10
    made.close()
    assert allowance.used == 0


def test_binary_content_counts_with_the_text_that_stands_for_it() -> None:
    made, allowance = bounded(100)
    made.add(made.shared.store.put(b"\xff" * 30), "test")
    assert allowance.used == 30 + 40
    with pytest.raises(FdError):
        made.add(made.shared.store.put(b"\xfe" * 30), "test")
    assert allowance.used == 70
    made.close()
    assert allowance.used == 0
    assert not made.shared.store.blobs


def lines(fd: str, start: int, end: int) -> dict[str, object]:
    """Return what names lines of a descriptor."""
    return {"fd": fd, "start_line": start, "end_line": end}


def test_lines_that_are_kept_count_in_place_of_what_they_are_taken_from() -> None:
    made, allowance = bounded(10)
    made.add_text("1\n2\n3\n4\n", "test")
    answer = ask(made, "keep_fds", fds=[lines("fd:1", 1, 2), lines("fd:1", 2, 4)])
    assert answer.get("count") == "2"
    assert list(made.table.fds) == [2, 3]
    assert allowance.used == 10
    answer = ask(made, "keep_fds", fds=[lines("fd:3", 1, 3), "fd:2"])
    assert answer.get("count") == "2", "what stays counts once"
    assert allowance.used == 10
    made.close()
    assert (allowance.used, made.shared.store.blobs) == (0, {})


def test_lines_that_do_not_fit_change_nothing() -> None:
    made, allowance = bounded(10)
    made.add_text("1\n2\n3\n4\n", "test", name="kept")
    fork = made.fork()
    too_much = [lines("fd:1", 1, 3), lines("fd:1", 2, 4)]
    for process, fds in (
        (made, too_much),
        (fork, [lines("fd:1", 1, 2)]),  # the parent goes on to hold the whole
        (made, [lines("fd:1", 1, 2)]),
    ):
        assert failed(ask(process, "keep_fds", fds=fds))[0] == "file_operation"
        assert (list(process.table.fds), process.table.next_number) == ([1], 2)
        assert ask(process, "fd_info", name="kept").get("fd") == "fd:1"
        assert (allowance.used, len(made.shared.store.blobs)) == (8, 1)
    ask(fork, "keep_fds", fds=[])
    assert ask(made, "keep_fds", fds=[lines("fd:1", 1, 2)]).get("count") == "1"
    assert allowance.used == 4


def test_as_many_lines_may_be_kept_as_there_may_be_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("supervisor.llmfd.table.MOST_FDS", 2)
    made, _ = bounded(100)
    made.add_text("1\n2\n3\n", "test")
    made.add_text("two", "test")
    each = [lines("fd:1", n, n) for n in (1, 2, 3)]
    for fds in (each, ["fd:2", *each[:2]]):
        assert failed(ask(made, "keep_fds", fds=fds))[0] == "file_operation"
        assert list(made.table.fds) == [1, 2]
    assert ask(made, "keep_fds", fds=["fd:2", each[0]]).get("count") == "2"


def test_what_is_beyond_a_bound_that_has_shrunk_may_be_given_up() -> None:
    made, allowance = bounded(100)
    for text in ("12345", "67890", "abcde"):
        made.add_text(text, "test")
    allowance.limit = 8  # another configuration, an exchange of the program later
    assert ask(made, "keep_fds", fds=["fd:1", "fd:2"]).get("count") == "2"
    made.table.adopt(FdTable(made.shared.store))
    assert allowance.used == 0


def test_a_table_that_is_too_large_takes_the_place_of_none() -> None:
    made, allowance = bounded(10)
    made.add_text("12345", "test")
    store = made.shared.store
    for texts, is_good in ((("6" * 6, "7" * 6), False), (("8" * 9,), True)):
        other = FdTable(store)
        for text in texts:
            other.add(store.put(text.encode()), "test", 4000)
        if is_good:
            made.table.adopt(other)
        else:
            with pytest.raises(FdError):
                made.table.adopt(other)
            assert allowance.used == 5
        other.close()
    assert allowance.used == 9
    assert len(store.blobs) == 1
    made.close()
    assert allowance.used == 0
    assert not store.blobs
