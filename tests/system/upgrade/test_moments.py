"""A client in the middle of a request when the host is replaced: it never notices.

Each test leads children to such a moment, has the host replaced, and lets them go on. A
replacement starts two interpreters, so one of them serves several children at once.
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.replacing import Hand, Replaced, hands, replaced
from tests.helpers.sessions import pattern
from tests.helpers.stage import CHILDREN

pytestmark = pytest.mark.slow

MIB = 1024 * 1024


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A directory with a root in which there is something to read."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "long").write_bytes(pattern(6 * MIB))
    return tmp_path


def opened(hand: Hand, name: bytes, mode: bytes, fd: int | None = None) -> int:
    """Have a child open a file that it may open."""
    fileno = hand.do(f"opened({name!r}, {mode!r}, b'false', {fd})")
    assert isinstance(fileno, int), fileno
    return fileno


def end(host: Replaced, *made: Hand) -> None:
    """Let children exit; the host must end with them, and hold nothing till then."""
    host.assert_no_leaks()
    for hand in made:
        hand.tell("os._exit(0)")
    for _ in made:
        assert host.hear("ended")[1] == "0"
    assert host.wait() == 0


TRANSPORTS = ["socketpair", "pipes"]


# spec F1, F4, W2, W4: a message that has begun goes on where it was.
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_message_that_has_begun_is_answered_once(where: Path, transport: str) -> None:
    data = pattern(3 * MIB)
    cuts = {
        "line": (b"OPEN ne", b"w w false\n"),
        "short": (b"WRITE %d 9\n1234", b"56789"),
        "long": (b"WRITE %%d %d\n" % len(data), b""),  # its payload: below
        "drained": (b"WRITE 77 9\n1234", b"56789"),
        "skipped": (b"x" * 70_000, b"y" * 70_000 + b"\nPING\n"),
        "ahead": (b"PING\nWRITE %d 3\nabc" * 3 + b"PI", b"NG\n"),
    }
    with hands(where, *cuts) as made:
        specs = [hand.spec(transport=transport) for hand in made]
        with replaced(where, *specs) as host:
            by_name = {hand.name: hand for hand in made}
            filenos = {
                name: opened(hand, name.encode(), b"w")
                for name, hand in by_name.items()
            }
            rest: dict[str, bytes] = {}
            for name, (begin, second) in cuts.items():
                begun = begin.replace(b"%d", b"%d" % filenos[name])
                rest[name] = second
                by_name[name].do(f"send({begun!r})")
            by_name["long"].do("send((b'%07d ' * 200_000) % (*range(200_000),))")
            assert by_name["skipped"].do("line()") == b"ERROR request line too long"
            host.replace()
            for name, second in rest.items():
                by_name[name].do(f"send({second!r})")
            by_name["long"].do(
                f"send(((b'%07d ' * {len(data) // 8 - 200_000})"
                f" % (*range(200_000, {len(data) // 8}),)))"
            )
            assert by_name["line"].do("line()").startswith(b"OK ")
            assert by_name["short"].do("line()") == b"OK 9"
            assert by_name["long"].do("line()") == b"OK %d" % len(data)
            assert by_name["drained"].do("line()") == b"ERROR invalid fileno: 77"
            assert by_name["skipped"].do("line()") == b"OK"
            for wanted in (b"OK", b"OK 3") * 3 + (b"OK",):
                assert by_name["ahead"].do("line()") == wanted
            for hand in made:
                assert hand.ask(b"PING\n") == b"OK"
            end(host, *made)
    assert (where / "root" / "short").read_bytes() == b"123456789"
    assert (where / "root" / "long").read_bytes() == data
    assert (where / "root" / "ahead").read_bytes() == b"abc" * 3


# spec W2, W3: a payload beyond the budget lies in a file, and changes hands with it.
def test_a_payload_in_a_file_is_completed(where: Path) -> None:
    with hands(where, "one") as (one,):
        settings = {"payload_budget_bytes": 65_536}
        with replaced(where, one.spec(), settings=settings) as host:
            fileno = opened(one, b"new", b"w")
            one.do(f"send(b'WRITE {fileno} 1600000\\n' + b'a' * 900_000)")
            assert any("deleted" in name for name in host.descriptors().values())
            host.replace()
            one.do("send(b'b' * 700_000)")
            assert one.do("line()") == b"OK 1600000"
            assert one.ask(b"PING\n") == b"OK"
            end(host, one)
    assert (where / "root" / "new").read_bytes() == b"a" * 900_000 + b"b" * 700_000


# spec A3b: what a staged file will be is kept room for, whoever publishes it.
def test_the_entries_that_staged_files_will_make_stay_reserved(where: Path) -> None:
    with hands(where, "one") as (one,):
        spec = one.spec(publish="on-close", max_files=2)
        with replaced(where, spec) as host:
            staged = [opened(one, name, b"w") for name in (b"a", b"b")]
            replaces = opened(one, b"long", b"w")
            refused = b"ERROR failed to open file 'c': Disk quota exceeded"
            assert one.ask(b"OPEN c w false\n") == refused
            host.replace()
            assert one.ask(b"OPEN c w false\n") == refused
            for fileno in (*staged, replaces):
                assert one.ask(b"CLOSE %d\n" % fileno) == b"OK"
                assert one.ask(b"OPEN c w false\n") == refused
            assert one.ask(b"REMOVE false a\n") == b"OK"
            fileno = opened(one, b"c", b"w")
            host.replace()
            assert one.ask(b"CLOSE %d\n" % fileno) == b"OK"
            assert one.ask(b"OPEN a w false\n") == refused.replace(b"'c'", b"'a'")
            end(host, one)
    assert sorted(os.listdir(where / "root")) == ["b", "c", "long"]


# spec T3, R1, F8: what a client has not taken of its reply is sent by the next program.
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_reply_that_is_not_taken_is_sent_on(where: Path, transport: str) -> None:
    with hands(where, "file", "many", "reply") as made:
        specs = [hand.spec(transport=transport) for hand in made]
        with replaced(where, *specs) as host:
            for hand in made:
                assert opened(hand, b"long", b"r") > 0
            numbers = {row["client_id"]: row["fileno"] for row in host.ask("files")}
            by_name = dict(zip(["file", "many", "reply"], made, strict=True))
            filenos = dict(zip(by_name, sorted(numbers.values()), strict=True))
            by_name["file"].do(f"send(b'READ {filenos['file']} {6 * MIB}\\nPING\\n')")
            small = f"READ {filenos['many']} 60000\\n"
            by_name["many"].do(f"send(b'{small}' * 40 + b'PING\\n')")
            request = f"READ {filenos['reply']} 65536\\n"
            by_name["reply"].do(f"send(b'{request}' * 20)")
            host.replace()
            assert by_name["file"].do("line()") == b"OK %d" % (6 * MIB)
            assert by_name["file"].do(
                f"take({6 * MIB}) == (b'%07d ' * {6 * MIB // 8})"
                f" % (*range({6 * MIB // 8}),)"
            )
            assert by_name["file"].do("line()") == b"OK"
            for name, size, count in (("many", 60_000, 40), ("reply", 65_536, 20)):
                for number in range(count):
                    assert by_name[name].do("line()") == b"OK %d" % size
                    taken = by_name[name].do(f"take({size})[:8]")
                    assert taken == pattern(8, number * size)
            assert by_name["many"].do("line()") == b"OK"
            end(host, *made)


# spec A3b: a staged file shows when it is closed, whoever is the host by then.
def test_a_staged_file_is_published_by_the_next_program(where: Path) -> None:
    with hands(where, "closes", "dies") as (closes, dies):
        specs = [hand.spec(publish="on-close") for hand in (closes, dies)]
        with replaced(where, *specs) as host:
            filenos = [opened(h, h.name.encode(), b"w") for h in (closes, dies)]
            for hand, fileno in zip((closes, dies), filenos, strict=True):
                assert hand.ask(b"WRITE %d 5\nfirst" % fileno) == b"OK 5"
            host.replace()
            assert closes.ask(b"WRITE %d 7\n second" % filenos[0]) == b"OK 7"
            assert not (where / "root" / "closes").exists()
            assert closes.ask(b"CLOSE %d\n" % filenos[0]) == b"OK"
            assert (where / "root" / "closes").read_bytes() == b"first second"
            end(host, closes, dies)
    assert not (where / "root" / "dies").exists()


# spec A5, S7, N4, I8: nested clients keep their parent, their rights and their bounds.
def test_nested_clients_keep_their_place_and_their_rights(where: Path) -> None:
    (where / "root" / "part").mkdir()
    (where / "root" / "part" / "file").write_bytes(b"within")
    with hands(where, "one", "two") as (one, two):
        specs = [one.spec(), two.spec(transport="pipes")]
        with replaced(where, *specs) as host:
            for hand in (one, two):
                hand.do("globals().update(a=attached(), b=attached())")
                hand.do("globals().update(c=attached(a))")
                document = b'{"read": ["part"]}'
                assert hand.do(f"ask(b'NARROW 18\\n' + {document!r}, a)") == b"OK"
                assert hand.do("opened(b'part/file', b'r', b'false', a)") > 0
            before = host.ask("clients")
            host.replace()
            after = host.ask("clients")
            assert {row["id"]: row for row in before} == {r["id"]: r for r in after}
            for hand in (one, two):
                assert hand.do("read(opened(b'part/file', fd=a), 9, a)") == b"within"
                refused = hand.do("opened(b'long', b'r', b'false', a)")
                assert refused.startswith(b"ERROR VFS access denied")
                assert hand.do("opened(b'long', b'r', b'false', b)") > 0
                assert hand.do("opened(b'long', b'r', b'true', c)") != 0
                assert hand.do("attached(c)") > 0
            ids = [row["id"] for row in host.ask("clients")]
            assert len(set(ids)) == len(ids) == 10
            # The one above goes, and those beneath go with it (spec S3).
            one.do("os.close(a)")
            one.do("ask(b'PING\\n', b)")
            end(host, one, two)


# spec S7, I4, I7: what is used of a bound stays used, and no number comes twice.
def test_bounds_and_numbers_go_on_counting(where: Path) -> None:
    bounds = {"max_open_files": 3, "max_bytes": 1000, "max_files": 2}
    with hands(where, "one") as (one,):
        with replaced(where, one.spec(**bounds)) as host:
            first = opened(one, b"a", b"w")
            second = opened(one, b"b", b"w")
            assert one.ask(b"WRITE %d 600\n" % first + b"x" * 600) == b"OK 600"
            assert one.ask(b"CLOSE %d\n" % second) == b"OK"
            host.replace()
            quota = one.ask(b"WRITE %d 500\n" % first + b"x" * 500)
            assert quota.startswith(b"ERROR failed to write: Disk quota")
            assert one.ask(b"WRITE %d 400\n" % first + b"x" * 400) == b"OK 400"
            assert b"quota" in one.do("opened(b'c', b'w')")
            third, fourth = opened(one, b"a", b"r"), opened(one, b"b", b"r")
            assert fourth > third > second > first
            assert b"Too many open files" in one.do("opened(b'long')")
            (row,) = (r for r in host.ask("files") if r["fileno"] == first)
            assert (row["offset"], row["mode"]) == (1000, "w")
            end(host, one)


# spec S7, attack 20: what was removed while it was open is given back at its last close, to
# whoever removed it and once.
def test_what_was_removed_while_it_was_open_is_given_back_once(where: Path) -> None:
    with hands(where, "one") as (one,):
        with replaced(where, one.spec(max_bytes=1000)) as host:
            kept, gone = opened(one, b"a", b"w"), opened(one, b"b", b"w")
            for fileno in (kept, gone):
                assert one.ask(b"WRITE %d 500\n" % fileno + b"x" * 500) == b"OK 500"
            assert one.ask(b"REMOVE false a\n") == b"OK"
            (where / "root" / "b").unlink()
            host.replace()
            third = opened(one, b"c", b"w")
            refused = b"ERROR failed to write: Disk quota exceeded"
            assert one.ask(b"CLOSE %d\n" % gone) == b"OK"
            assert one.ask(b"WRITE %d 1\nx" % third) == refused
            assert one.ask(b"CLOSE %d\n" % kept) == b"OK"
            assert one.ask(b"WRITE %d 501\n" % third + b"x" * 501) == refused
            assert one.ask(b"WRITE %d 500\n" % third + b"x" * 500) == b"OK 500"
            end(host, one)


# spec S7: the largest that a file may be stays that, with no other bound beside it.
def test_the_size_of_one_file_stays_bounded(where: Path) -> None:
    with hands(where, "one") as (one,):
        with replaced(where, one.spec(max_file_bytes=1000)) as host:
            first = opened(one, b"a", b"w")
            host.replace()
            for fileno in (first, opened(one, b"b", b"w")):
                large = one.ask(b"WRITE %d 1001\n" % fileno + b"x" * 1001)
                assert large == b"ERROR failed to write: File too large"
                assert one.ask(b"WRITE %d 1000\n" % fileno + b"x" * 1000) == b"OK 1000"
            end(host, one)


# spec S7, W2: what a WRITE in the middle has reserved stays reserved, and no more.
def test_a_write_that_has_begun_keeps_what_it_reserved(where: Path) -> None:
    with hands(where, "one") as (one,):
        with replaced(where, one.spec(max_bytes=1000)) as host:
            first = opened(one, b"a", b"w")
            one.do("globals().update(beside=attached())")
            second = one.do("opened(b'b', b'w', b'false', beside)")
            one.do(f"send(b'WRITE {first} 600\\n' + b'x' * 300)")
            for _ in range(2):
                host.replace()
                more = f"ask(b'WRITE {second} 500\\n' + b'y' * 500, beside)"
                assert one.do(more).startswith(b"ERROR failed to write: Disk quota")
            one.do("send(b'x' * 300)")
            assert one.do("line()") == b"OK 600"
            host.replace()
            less = f"ask(b'WRITE {second} 400\\n' + b'y' * 400, beside)"
            assert one.do(less) == b"OK 400"
            assert one.ask(b"WRITE %d 1\nz" % first).startswith(b"ERROR failed")
            # Written over: nothing grows, and nothing is reserved for ever.
            assert one.ask(b"SEEK %d 0\n" % first) == b"OK 0"
            assert one.ask(b"WRITE %d 600\n" % first + b"z" * 600) == b"OK 600"
            end(host, one)


# spec S2, S3: a conversation that is over stays over while its process goes on.
def test_a_child_without_its_connection_goes_on(where: Path) -> None:
    with hands(where, "one", "two") as (one, two):
        with replaced(where, one.spec(), two.spec()) as host:
            one.do("os.close(3)")
            while len(host.ask("clients")) > 1:
                pass
            pids = list(host.pids)
            host.replace()
            assert host.pids == pids
            assert one.do("os.getpid()") == pids[0]
            host.replace()
            end(host, one, two)


@pytest.fixture
def sandboxed(where: Path) -> Iterator[tuple[Replaced, Hand]]:
    """A child in all the layers that this machine gives."""
    with hands(where, "one") as (one,):
        spec = one.spec(sandbox="auto", network="none", cwd=str(CHILDREN))
        with replaced(where, spec) as host:
            yield host, one


def test_a_sandboxed_child_keeps_its_layers(sandboxed: tuple[Replaced, Hand]) -> None:
    host, one = sandboxed
    (before,) = host.ask("ps")
    host.replace()
    (after,) = host.ask("ps")
    assert before["isolation"]["layers"]
    assert {**before, "usage": None} == {**after, "usage": None}
    assert os.path.exists(f"/proc/{host.pids[0]}")
    end(host, one)


def test_the_traffic_of_nested_clients_that_are_gone_is_kept(where: Path) -> None:
    with hands(where, "one") as (one,):
        with replaced(where, one.spec()) as host:
            one.do("globals().update(a=attached())")
            assert one.do("[ask(b'PING\\n', a) for _ in range(5)]") == [b"OK"] * 5
            assert one.do("ask(b'NONSENSE\\n', a)").startswith(b"ERROR")
            one.do("os.close(a)")
            while len(host.ask("clients")) > 1:
                pass
            (before,) = host.ask("ps")
            assert before["traffic"]["requests"] >= 6
            for _ in range(2):
                host.replace()
                (after,) = host.ask("ps")
                assert after["traffic"] == before["traffic"]


# spec N4: the descriptor that an ATTACH has made waits for its client, and arrives.
def test_an_attach_that_is_not_taken_arrives(where: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        fits = 0
        with suppress(BlockingIOError):
            while True:
                fits += ours.send(b"OK\n") // 3
    with hands(where, "one") as (one,):
        with replaced(where, one.spec()) as host:
            one.do(f"send(b'PING\\n' * {fits} + b'ATTACH\\nPI')")
            while len(host.ask("clients")) < 2:
                pass
            host.replace()
            assert one.do(f"take({3 * fits}) == b'OK\\n' * {fits}")
            one.do("globals().update(socket=__import__('socket'))")
            data, control, *_ = one.do(
                "socket.socket(fileno=os.dup(3)).recvmsg(64, 64)"
            )
            (row,) = (r for r in host.ask("clients") if r["parent_id"] is not None)
            assert data == b"OK %b\n" % row["id"].encode()
            (number,) = struct.unpack("i", control[0][2])
            assert one.ask(b"PING\n", number) == b"OK"
            assert one.ask(b"NG\n") == b"OK"
            end(host, one)
