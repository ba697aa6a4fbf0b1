"""Bases that travel: whole or not at all, fetched once, bounded, swept."""

from __future__ import annotations

import base64
import gc
import os
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio

from supervisor.membership import base_keeper
from supervisor.membership.base_keeper import BaseKeeper
from supervisor.membership.bases import BaseError, Bases, PeerError
from supervisor.workspace.attributes import TRUSTED_MARKS
from supervisor.workspace.directory import COPIES, make_workspace

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping
    from pathlib import Path

    from supervisor.fleet.messages import Base

MIB = 1024 * 1024


def node(where: Path, kept: int = 8, max_bytes: int = MIB) -> Bases:
    """Return the bases of a new node."""
    bases = Bases(str(where), max_bytes, kept)
    assert bases.open() == []
    return bases


def pack(bases: Bases, where: Path, text: str) -> tuple[Base, bytes]:
    """Pack a directory with one file; return what is ordered and what travels."""
    where.mkdir(exist_ok=True)
    (where / "file").write_text(text)
    base = bases.pack(str(where), "a")
    with bases.open_packed(base.digest) as file:
        return base, file.read()


def take(bases: Bases, base: Base, data: bytes) -> None:
    """Have a node take a base."""
    incoming = bases.begin(base)
    try:
        incoming.write(data)
        bases.finish(incoming)
    finally:
        bases.give_up(incoming)


def there(where: Path) -> list[str]:
    """Return what is among the bases of a node."""
    return sorted(os.listdir(where / COPIES))


# spec FL10
def test_a_base_is_there_under_its_hash(tmp_path: Path) -> None:
    base, data = pack(node(tmp_path / "a"), tmp_path / "repo", "x")
    b = node(tmp_path / "b")
    assert b.find(base.digest) is None
    take(b, base, data)
    path = b.find(base.digest)
    assert path is not None
    assert sorted(os.listdir(path)) == ["file"]
    (row,) = b.sweep(frozenset())
    assert (row.digest, row.size_bytes, row.is_used) == (base.digest, len(data), False)
    take(b, base, data)  # again: what is there stays
    assert there(tmp_path / "b") == [base.digest]


# spec FL10
@pytest.mark.parametrize("how", ["cut", "other", "long", "large"])
def test_what_is_not_the_base_leaves_nothing(tmp_path: Path, how: str) -> None:
    base, data = pack(node(tmp_path / "a"), tmp_path / "repo", "x")
    b = node(tmp_path / "b", max_bytes=1024 if how == "large" else MIB)
    sent = {"cut": data[:-512], "other": bytes(len(data)), "long": data + b"x"}
    with pytest.raises(BaseError, match=f"cannot take base {base.digest}: ") as told:
        take(b, base, sent.get(how, data))
    assert isinstance(told.value, PeerError) == (how in {"cut", "other"})
    assert there(tmp_path / "b") == []


# spec FL10
def test_what_a_daemon_that_died_left_is_swept_at_the_start(tmp_path: Path) -> None:
    base, data = pack(node(tmp_path / "a"), tmp_path / "repo", "x")
    b = node(tmp_path / "b")
    incoming = b.begin(base)
    incoming.write(data)
    incoming.file.close()  # and no more
    assert len(there(tmp_path / "b")) == 1
    node(tmp_path / "b")
    assert there(tmp_path / "b") == []


# spec FL10
def test_bases_go_beyond_the_bound_unless_they_are_used(tmp_path: Path) -> None:
    a, b = node(tmp_path / "a"), node(tmp_path / "b", kept=1)
    made = [pack(a, tmp_path / "repo", str(n)) for n in range(4)]
    for base, data in made:
        take(b, base, data)
    in_use, held, _, last = (base.digest for base, _ in made)
    path = b.find(in_use)
    assert path is not None
    make_workspace(str(tmp_path / "b"), "w", os.fsencode(path), TRUSTED_MARKS)
    assert b.find(last) is not None  # it is used last
    rows = b.sweep(frozenset({held}))
    assert {row.digest: row.is_used for row in rows} == {
        in_use: True,
        held: True,
        last: False,
    }
    assert there(tmp_path / "b") == sorted([in_use, held, last])


# spec FL10
def test_what_was_packed_goes_beyond_the_bound(tmp_path: Path) -> None:
    a = node(tmp_path / "a", kept=1)
    first, second, third = (
        pack(a, tmp_path / "repo", text)[0] for text in ("1", "2", "3")
    )
    with pytest.raises(BaseError, match="not kept any more: start the child anew"):
        a.open_packed(first.digest)
    for base in (second, third):
        assert a.paths_of(base.digest) == {b"", b"file"}
    with pytest.raises(BaseError, match="no SHA-256"):
        a.open_packed("../../secret")


class Peers:
    """The node that has a base.

    Attributes:
        asked: how often it was.
        fails: how often it does not answer.
        is_slow: it sends a half, and no more.
        half_sent: set when it has.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked = 0
        self.fails = 0
        self.is_slow = False
        self.half_sent = trio.Event()

    async def items(
        self, _node: str, do: str, _args: Mapping[str, Any]
    ) -> AsyncGenerator[msgspec.Raw, None]:
        """Yield the base in two pieces."""
        assert do == base_keeper.BASE_STREAM
        self.asked += 1
        if self.asked <= self.fails:
            raise PeerError("cannot ask")
        half = len(self.data) // 2
        yield item(self.data[:half])
        if self.is_slow:
            self.half_sent.set()
            await trio.sleep_forever()
        yield item(self.data[half:])


def item(data: bytes) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode({"data": base64.b64encode(data).decode()}))


def locks() -> int:
    """Return how many locks there are."""
    gc.collect()
    return sum(isinstance(one, trio.Lock) for one in gc.get_objects())


# spec FL10
async def test_a_base_is_fetched_once_for_all_children(tmp_path: Path) -> None:
    base, data = pack(node(tmp_path / "a"), tmp_path / "repo", "x")
    peers = Peers(data)
    keeper = BaseKeeper(node(tmp_path / "b"), peers.items)
    paths = set()

    async def use() -> None:
        async with keeper.held(base):
            paths.add(await keeper.ready(base))

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(use)
    assert (peers.asked, len(paths)) == (1, 1)
    assert await keeper.ready(base) == paths.pop()
    assert peers.asked == 1
    (row,) = msgspec.to_builtins(keeper.row())["fleet_bases"]
    assert (row["digest"], row["is_used"]) == (base.digest, True)


# A daemon runs for months, and each child may bring a base of its own.
@pytest.mark.slow
async def test_nothing_is_kept_of_a_base_that_no_child_has(tmp_path: Path) -> None:
    peers = Peers(b"")
    keeper = BaseKeeper(node(tmp_path / "b"), peers.items)
    before = locks()
    for number in range(3):
        base, peers.data = pack(
            node(tmp_path / f"{number}"), tmp_path / "repo", f"{number}"
        )
        async with keeper.held(base):
            await keeper.ready(base)
    assert locks() == before


# spec FL10
async def test_a_node_that_does_not_answer_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, data = pack(node(tmp_path / "a"), tmp_path / "repo", "x")
    peers = Peers(data)
    keeper = BaseKeeper(node(tmp_path / "b"), peers.items)
    monkeypatch.setattr(base_keeper, "PAUSE_S", 0.0)
    peers.fails = 2
    await keeper.ready(base)
    assert peers.asked == 3
    base, peers.data = pack(node(tmp_path / "c"), tmp_path / "repo", "y")
    peers.fails = 1000
    monkeypatch.setattr(base_keeper, "PATIENCE_S", 0.0)
    with pytest.raises(PeerError, match="cannot ask"):
        await keeper.ready(base)


# spec FL10
async def test_a_fetch_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    base, data = pack(node(tmp_path / "a"), tmp_path / "repo", "x")
    peers = Peers(data)
    peers.is_slow = True
    keeper = BaseKeeper(node(tmp_path / "b"), peers.items)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.ready, base)
        await peers.half_sent.wait()
        assert len(there(tmp_path / "b")) == 1
        nursery.cancel_scope.cancel()
    assert there(tmp_path / "b") == []


# spec FL10
async def test_a_base_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_keeper, "PIECE_BYTES", 1000)
    a = node(tmp_path / "a")
    base, data = pack(a, tmp_path / "repo", "x")
    keeper = BaseKeeper(a, Peers(b"").items)
    found = []
    async with aclosing(keeper.read(base.digest)) as pieces:
        async for piece in pieces:
            assert len(piece) <= 1000
            found.append(piece)
    assert b"".join(found) == data
