"""The host's spending, over restarts (spec L10; ADR 11)."""

import os
import sqlite3
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from hostlib.paths import LEDGER
from supervisor.llm.ledger import LedgerError, Spending
from supervisor.llm.quota import Node, Usage
from supervisor.llm.section import Weights
from tests.helpers.sessions import chat_request
from tests.helpers.stage import eventually, open_model_stage

DAY_S = 86_400.0


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


# spec L10: a restart of the host forgets nothing that was charged.
@pytest.mark.slow
async def test_a_restart_forgets_nothing(tmp_path: Path) -> None:
    quota = {"max_tokens": 1000, "window": "never"}
    state = str(tmp_path / "state")
    for number in (1, 2, 3):
        where = tmp_path / str(number)
        where.mkdir()
        async with open_model_stage(
            where, state_dir=state, quota=quota, max_calls=3
        ) as stage:
            line = stage.connect()
            reply = await line.chat(b"!prompt-tokens=100 !words=0")
            assert reply.status == f"{number}00.0/1000 weighted tokens"
            # It is in the file before the answer is out.
            with sqlite3.connect(Path(state) / LEDGER) as base:
                row = base.execute("SELECT period, tokens, calls FROM spent").fetchall()
            base.close()
            assert row == [("never", number * 100.0, number)]
            if number == 3:
                assert (await line.ask(chat_request(b"a"))).startswith(b"ERROR quota")
    assert (Path(state) / LEDGER).stat().st_mode & 0o777 == 0o600


async def test_a_day_has_a_budget_of_its_own(tmp_path: Path, no_leaks: None) -> None:
    del no_leaks
    clock = Clock()
    root = Node(None, 100.0)
    spending = Spending(root, "day", str(tmp_path), clock=clock)
    root.tokens.used, root.calls.used = 60.0, 2
    spending.add(root, 60.0, 2)
    await spending.wait_written()
    assert not spending.reset()
    clock.now += DAY_S
    assert spending.reset()
    assert not spending.reset()
    assert not root.tokens.used
    spending.add(root, 5.0, 1)
    await spending.close()
    for today, spent in ((clock.now, (5.0, 1)), (clock.now - DAY_S, (60.0, 2))):
        clock.now = today
        again = Node(None, 100.0)
        reopened = Spending(again, "day", str(tmp_path), clock=clock)
        assert (again.tokens.used, again.calls.used) == spent
        await reopened.close()


# spec L10: what a child was charged is its own over restarts, by its name.
async def test_a_childs_total_is_kept_by_its_name(tmp_path: Path) -> None:
    for number in range(3):
        root = Node()
        spending = Spending(root, "never", str(tmp_path))
        child, other = [await spending.node_of_child(name) for name in ("a", "b")]
        assert await spending.node_of_child("a") is child
        assert (child.tokens.used, child.calls.used) == (10.0 * number, number)
        assert (other.tokens.used, other.calls.used) == (0.0, 0)
        nested = Node(child)
        nested.reserve(0, 1, Weights()).settle(Usage(10, 0))
        spending.add(nested, 10.0, 1)
        await spending.close()
        assert root.tokens.used == 10.0 * (number + 1)


@pytest.mark.slow
async def test_a_childs_day_is_the_hosts(tmp_path: Path) -> None:
    clock = Clock()
    spending = Spending(Node(), "day", str(tmp_path), clock=clock)
    child = await spending.node_of_child("a")
    child.reserve(0, 1, Weights()).settle(Usage(10, 0))
    spending.add(child, 10.0, 1)
    clock.now += DAY_S
    assert spending.reset()
    assert not child.tokens.used
    spending.add(child, 4.0, 1)
    await spending.close()
    for today, spent in ((clock.now, 4.0), (clock.now - DAY_S, 10.0)):
        clock.now = today
        again = Spending(Node(), "day", str(tmp_path), clock=clock)
        assert (await again.node_of_child("a")).tokens.used == spent
        await again.close()


# All that waits goes in one transaction, or nothing of it.
async def test_a_charge_that_is_half_written_is_not_there(tmp_path: Path) -> None:
    said: list[str] = []
    root = Node()
    spending = Spending(root, "never", str(tmp_path), said.append)
    child = await spending.node_of_child("a")
    with sqlite3.connect(tmp_path / LEDGER) as base:
        base.execute("ALTER TABLE spent_by_child RENAME TO away")
    spending.add(child, 7.0, 1)
    await spending.wait_written()
    assert "no such table" in said[0]
    assert base.execute("SELECT count(*) FROM spent").fetchall() == [(0,)]
    with base:
        base.execute("ALTER TABLE away RENAME TO spent_by_child")
    await spending.close()
    assert base.execute("SELECT tokens FROM spent").fetchall() == [(7.0,)]
    rows = base.execute("SELECT child, tokens FROM spent_by_child").fetchall()
    assert rows == [("a", 7.0)]
    base.close()


# A file of a version that kept the host's total alone.
async def test_an_older_file_is_taken(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / LEDGER) as base:
        base.execute(
            "CREATE TABLE spent (period TEXT PRIMARY KEY, tokens REAL NOT NULL,"
            " calls INTEGER NOT NULL) WITHOUT ROWID"
        )
        base.execute("INSERT INTO spent VALUES ('never', 12.0, 3)")
    base.close()
    root = Node()
    spending = Spending(root, "never", str(tmp_path))
    assert (root.tokens.used, root.calls.used) == (12.0, 3)
    assert (await spending.node_of_child("a")).tokens.used == 0.0
    await spending.close()


# spec L10: also of a call that failed, or whose client went away.
@pytest.mark.parametrize("order", [b"!hang-after=2 !words=5", b"!error !words=8"])
async def test_what_a_lost_call_cost_is_in_the_file(
    tmp_path: Path, order: bytes
) -> None:
    state = tmp_path / "state"
    quota = {"max_tokens": 1000, "window": "never"}
    async with open_model_stage(tmp_path, state_dir=str(state), quota=quota) as stage:
        line = stage.connect()
        await line.send(chat_request(order))
        if order.startswith(b"!hang"):
            await stage.provider.wait_for(1)
            await eventually(lambda: stage.provider.served[0].pieces == 2)
            line.close()
            await line.gone()
        else:
            assert (await line.chat_reply()).line.startswith(b"ERROR OpenAI")
        spent = stage.llm.models.accounts.root.tokens.used
        assert spent > 0
        # Now, and not with the next call that ends well.
        with sqlite3.connect(state / LEDGER) as base:
            rows = base.execute("SELECT tokens, calls FROM spent").fetchall()
        base.close()
        # Both count: else giving up would be a way around max_calls.
        assert rows == [(spent, 1)]


# spec L10, MD5: a host's next program goes on with the accounts of children that are between
# two lives; with a ledger, the larger of what both know.
@pytest.mark.parametrize("window", ["run", "never"])
async def test_accounts_of_children_are_handed_over(
    tmp_path: Path, window: str
) -> None:
    state: object = None
    for name in ("before", "after"):
        where = tmp_path / name
        where.mkdir()
        directory = str(tmp_path / f"state-{name}")
        async with open_model_stage(
            where, state_dir=directory, quota={"window": window}
        ) as stage:
            if state is not None:
                await stage.llm.restore(state)
            child = await stage.llm.models.accounts.spending.node_of_child("a")
            if state is None:
                child.reserve(0, 1, Weights()).settle(Usage(10, 0))
                child.learn("m", 3.0)
                child.refusals = 2
            assert (child.tokens.used, child.calls.used) == (10.0, 1)
            assert (child.factor("m"), child.refusals) == (3.0, 2)
            assert stage.llm.models.accounts.root.tokens.used == 10.0
            state, fds = stage.llm.snapshot(ExitStack())
            assert not fds
            assert isinstance(state, dict)


async def test_hosts_that_share_a_directory_share_the_total(tmp_path: Path) -> None:
    nodes = [Node(None, 100.0) for _ in range(2)]
    both = [Spending(node, "never", str(tmp_path)) for node in nodes]
    for node, spending in zip(nodes, both, strict=True):
        node.tokens.used += 30.0
        spending.add(node, 30.0, 1)
        await spending.wait_written()
    assert [node.tokens.used for node in nodes] == [30.0, 60.0]
    both[0].add(nodes[0], 0.0, 0)
    await both[0].wait_written()
    assert nodes[0].tokens.used == 60.0
    for spending in both:
        await spending.close()


async def test_without_a_directory_nothing_is_kept(tmp_path: Path) -> None:
    for window, directory in (("run", str(tmp_path)), ("day", None)):
        root = Node()
        spending = Spending(root, window, directory)
        spending.add(root, 5.0, 1)
        await spending.wait_written()
        assert not spending.descriptors()
        await spending.close()
    assert not os.listdir(tmp_path)


async def test_a_damaged_file_is_told_and_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / LEDGER).write_bytes(b"not a database at all" * 100)
    with pytest.raises(LedgerError, match="cannot keep the quota in"):
        Spending(Node(), "never", str(tmp_path))
    assert (tmp_path / LEDGER).read_bytes().startswith(b"not a database")
    with pytest.raises(LedgerError, match="make the state directory writable"):
        Spending(Node(), "never", "/proc/nowhere")


# attack 49: SQLite would follow it.
async def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / LEDGER).symlink_to("made")
    with pytest.raises(LedgerError, match="cannot keep the quota in"):
        Spending(Node(), "never", str(tmp_path))
    assert not (tmp_path / "made").exists()


async def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    said: list[str] = []
    root = Node()
    spending = Spending(root, "never", str(tmp_path), said.append)
    with sqlite3.connect(tmp_path / LEDGER) as base:
        base.execute("DROP TABLE spent")
    base.close()
    for _ in range(3):
        spending.add(root, 1.0, 1)
        await spending.wait_written()
    assert len(said) == 1
    assert "no such table" in said[0]
    # When it works again, nothing is lost.
    with sqlite3.connect(tmp_path / LEDGER) as base:
        base.execute(
            "CREATE TABLE spent (period TEXT PRIMARY KEY, tokens REAL, calls INT)"
        )
    base.close()
    await spending.close()
    with sqlite3.connect(tmp_path / LEDGER) as base:
        assert base.execute("SELECT tokens, calls FROM spent").fetchall() == [(3.0, 3)]
    base.close()


# A host whose disk was full can be replaced when there is room, also without a call.
async def test_a_host_writes_again_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.llm.ledger.AGAIN_S", 0.01)
    state = tmp_path / "state"
    quota = {"window": "never"}
    async with open_model_stage(tmp_path, state_dir=str(state), quota=quota) as stage:
        accounts = stage.llm.models.accounts
        with sqlite3.connect(state / LEDGER) as base:
            base.execute("ALTER TABLE spent RENAME TO away")
        accounts.spending.add(accounts.root, 7.0, 1)
        await accounts.spending.wait_written()
        assert stage.llm.busy() == "the quota's file cannot be written"
        with base:
            base.execute("ALTER TABLE away RENAME TO spent")
        base.close()
        await eventually(lambda: stage.llm.busy() is None)
        assert rows_of(state, "spent") == [("never", 7.0, 1)]


# A child that is killed while its charge waits for a thread has spent it all the same.
@pytest.mark.parametrize("failure", ["cancelled", "no thread"])
async def test_a_charge_that_found_no_thread_is_written_with_the_next(
    tmp_path: Path, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Node()
    spending = Spending(root, "never", str(tmp_path), lambda _: None)
    spending.add(root, 1.0, 1)

    async def waits(*_: object, **__: object) -> None:
        if failure == "no thread":
            raise RuntimeError("can't start new thread")
        await trio.sleep_forever()

    with monkeypatch.context() as patched:
        patched.setattr(trio.to_thread, "run_sync", waits)
        with trio.move_on_after(0.01):
            await spending.wait_written()
    await spending.close()
    with sqlite3.connect(tmp_path / LEDGER) as base:
        assert base.execute("SELECT tokens, calls FROM spent").fetchall() == [(1.0, 1)]
    base.close()


async def test_the_files_descriptors_are_explained(tmp_path: Path) -> None:
    root = Node()
    spending = Spending(root, "never", str(tmp_path))
    spending.add(root, 1.0, 1)
    await spending.wait_written()
    named = {fd for fd, _ in spending.descriptors()}
    links = {os.readlink(f"/proc/self/fd/{fd}") for fd in named}
    assert os.path.join(tmp_path, LEDGER) in links
    await spending.close()


def rows_of(directory: Path, table: str) -> list[tuple[object, ...]]:
    """Return the rows of a table of the ledger."""
    base = sqlite3.connect(directory / LEDGER)
    try:
        rows: list[tuple[object, ...]] = base.execute(
            f"SELECT * FROM {table}"  # noqa: S608
        ).fetchall()
        return rows
    finally:
        base.close()


# spec FL7: what a dead host had reserved counts as spent, a living one's does not.
async def test_only_a_dead_hosts_reservations_are_charged(tmp_path: Path) -> None:
    root = Node()
    living = Spending(root, "never", str(tmp_path))
    child = await living.node_of_child("a")
    living.reserve(((child, 30.0), (root, 20.0)))
    await living.wait_written()
    other = Node()
    beside = Spending(other, "never", str(tmp_path))
    assert other.tokens.used == 0.0
    await beside.close()
    await living.close()  # with a call under way, as a kill leaves it
    again = Node()
    later = Spending(again, "never", str(tmp_path))
    assert (again.tokens.used, again.calls.used) == (20.0, 1)
    child = await later.node_of_child("a")
    assert (child.tokens.used, child.calls.used) == (30.0, 1)
    assert rows_of(tmp_path, "reserved") == []
    assert len(rows_of(tmp_path, "hosts")) == 1
    await later.close()
    assert rows_of(tmp_path, "hosts") == []


# spec FL7: a settled call is charged what it cost, in one transaction with its end.
async def test_a_call_that_is_settled_leaves_no_reservation(tmp_path: Path) -> None:
    root = Node()
    spending = Spending(root, "never", str(tmp_path))
    number = spending.reserve(((root, 30.0),))
    await spending.wait_written()
    assert len(rows_of(tmp_path, "reserved")) == 1
    spending.add(root, 4.0, 1, number)
    await spending.wait_written()
    assert rows_of(tmp_path, "reserved") == []
    assert rows_of(tmp_path, "spent") == [("never", 4.0, 1)]
    await spending.close()


# spec FL7
async def test_a_call_that_ends_before_it_is_written_is_never_written(
    tmp_path: Path,
) -> None:
    root = Node()
    spending = Spending(root, "never", str(tmp_path))
    spending.add(root, 0.0, 0, spending.reserve(((root, 30.0),)))
    await spending.wait_written()
    assert rows_of(tmp_path, "reserved") == []
    await spending.close()


# spec FL7: what could not be written is written later, but for what has ended.
async def test_reservations_wait_for_a_file_that_fails(tmp_path: Path) -> None:
    said: list[str] = []
    root = Node()
    spending = Spending(root, "never", str(tmp_path), said.append)
    base = sqlite3.connect(tmp_path / LEDGER)
    base.execute("ALTER TABLE reserved RENAME TO away")
    ended, left = (spending.reserve(((root, 30.0),)) for _ in range(2))
    await spending.wait_written()
    assert len(said) == 1
    spending.add(root, 4.0, 1, ended)
    await spending.wait_written()
    base.execute("ALTER TABLE away RENAME TO reserved")
    base.close()
    await spending.wait_written()
    assert [row[1] for row in rows_of(tmp_path, "reserved")] == [left]
    assert rows_of(tmp_path, "spent") == [("never", 4.0, 1)]
    await spending.close()
