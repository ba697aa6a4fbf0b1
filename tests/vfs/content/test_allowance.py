"""What the processes of one child may keep: each content once, until nobody holds it."""

import pytest

from tests.helpers.contents import ask, failed
from vfs.content import TOOLS, Allowance, FdError, Process, Shared, Store
from vfs.content.table import FdTable


def bounded(limit: int) -> tuple[Process, Allowance]:
    """Return a process whose contents are bounded, and what bounds them."""
    allowance = Allowance(limit)
    return Process(Shared(Store(), TOOLS, allowance=allowance)), allowance


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


def test_a_table_that_is_too_large_takes_the_place_of_none() -> None:
    made, allowance = bounded(10)
    made.add_text("12345", "test")
    store = made.shared.store
    for texts, is_good in ((("6" * 6, "7" * 6), False), (("8" * 9,), True)):
        other = FdTable(store)
        for text in texts:
            other.add(store.put(text.encode()), "test", 4000)
        if is_good:
            made.table.take_over(other)
        else:
            with pytest.raises(FdError):
                made.table.take_over(other)
            assert allowance.used == 5
        other.close()
    assert allowance.used == 9
    assert len(store.blobs) == 1
    made.close()
    assert allowance.used == 0
    assert not store.blobs
