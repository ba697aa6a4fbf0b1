"""Nested children: rights only shrink, and all counts against the top child."""

import errno
import json
import os
import sys

import pytest

from tests.helpers.stage import Puppet, Stage, eventually

pytestmark = [pytest.mark.slow, pytest.mark.attack]


DENIED = "AccessDeniedError"


# attack 38, spec A5, N3, I8
async def test_a_nested_child_gets_no_right_of_its_grandparent(stage: Stage) -> None:
    grant = stage.where / "grant"
    (grant / "sub" / "deeper").mkdir(parents=True)
    (grant / "file").write_text("parent's")
    (grant / "sub" / "file").write_text("nested")
    (stage.root / "in-root").write_text("root")
    out = stage.where / "out"
    with out.open("wb") as file:
        child = await stage.spawn(
            sys.executable,
            "-I",
            stage.script("family.py"),
            str(grant),
            read=(str(grant),),
            stdio=(stage.null, file.fileno(), 2),
        )
        assert await child.wait_gone() == 0
    told = json.loads(out.read_text())
    assert told.pop("allowed") == "nested"
    assert told.pop("allowed attached") == "nested"
    assert told.pop("narrow to less") == "narrowed"
    # An earlier client has its own rights, fixed when it was attached.
    assert told.pop("attached before") == "nested"
    refused = {name: said for name, said in told.items() if "arrow" in name}
    refused["back again"] = told["back again"]
    assert set(refused.values()) == {"FsProxyError"}
    others = {name: said for name, said in told.items() if name not in refused}
    assert set(others.values()) == {DENIED}, others
    stage.assert_nothing_left()


def json_request(word: str, document: object) -> bytes:
    data = json.dumps(document).encode()
    return b"%b %d\n%b" % (word.encode(), len(data), data)


# spec A5: a right that was given up is gone, for those attached later too.
async def test_a_top_level_right_that_was_given_up_is_gone(stage: Stage) -> None:
    (stage.where / "outside").write_bytes(b"x")
    child = await stage.puppet(top_level=True)
    await child.open(b"outside", b"r", b"true")
    assert await child.ask(json_request("NARROW", {})) == b"OK"
    denied = b"ERROR VFS access denied: 'outside'"
    assert await child.ask(b"OPEN outside r true\n") == denied
    assert await child.do("opened(b'outside', b'r', b'true', attached())") == denied


# spec A5, attack 38: documents that are none, or ask for what is not there.
@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b"nonsense",
        b'{"read": ["/etc"]}',
        b'{"read": [".."]}',
        b'{"write": ["link"]}',
        b'{"top_level": true}',
        b'{"read": ["a\\u0000b"]}',
        b'{"read": [7]}',
        b'{"read": [""]}',
        b'{"read": ["root"], "rights": "all"}',
    ],
)
async def test_a_document_that_does_not_narrow_changes_nothing(
    stage: Stage, document: bytes
) -> None:
    os.symlink("/etc", stage.root / "link")
    child = await stage.puppet()
    request = b"NARROW %d\n%b" % (len(document), document)
    reply = await child.ask(request)
    assert reply.startswith(b"ERROR ")
    await child.open(b"still-mine", b"w+")


async def count_until_error(child: Puppet, expression: str) -> tuple[int, bytes]:
    """How often it can be done, and the error then."""
    done = 0
    while not isinstance(last := await child.do(expression), bytes):
        done += 1
        assert done < 1000
    return done, last


# spec S7: connections of a child count against it, however deep they are.
async def test_ten_thousand_attaches_are_sixty_four(stage: Stage) -> None:
    child, other = await stage.puppet(), await stage.puppet()
    await child.do("globals().__setitem__('LAST', IN)")
    chain = "globals().__setitem__('LAST', attached(LAST)) or LAST"
    done, error = await count_until_error(child, chain)
    assert done == 63  # and its own
    assert error == b"ERROR failed to attach: " + os.strerror(errno.EUSERS).encode()
    assert isinstance(await other.do("attached()"), int)
    # An end makes room: EOF on the deepest one that is left.
    rows = len(stage.host.fs.tables.clients)
    assert rows == 64 + 2
    await child.kill()
    assert len(stage.host.fs.tables.clients) == 2


# spec S7: open files over all connections of a child count against it.
async def test_open_files_of_all_connections_count_together(stage: Stage) -> None:
    child, other = await stage.puppet(max_open_files=20), await stage.puppet()
    (stage.root / "a").write_bytes(b"x")
    await child.do("globals().__setitem__('D', attached())")
    assert (await count_until_error(child, "opened(b'a')"))[0] == 20
    assert (await count_until_error(child, "opened(b'a', fd=D)"))[0] == 0
    await other.open(b"a")
    assert await child.do("ask(b'CLOSE 1000\\n')") == b"OK"
    assert (await count_until_error(child, "opened(b'a', fd=D)"))[0] == 1


# spec S7: bytes that files may grow by are one sum.
async def test_bytes_of_all_connections_count_together(stage: Stage) -> None:
    child = await stage.puppet(max_bytes=1000)
    first = await child.open(b"a", b"w")
    assert await child.write(first, b"x" * 600) == b"OK 600"
    quota = b"ERROR failed to write: " + os.strerror(errno.EDQUOT).encode()
    await child.do("globals().__setitem__('D', attached())")
    await child.do("globals().__setitem__('N', opened(b'b', b'w', fd=D))")
    write = "ask(b'WRITE %d 600\\n' % N + b'x' * 600, D)"
    assert await child.do(write) == quota
    assert await child.do(write.replace("600", "400")) == b"OK 400"
    assert await child.write(first, b"x") == quota
    assert (stage.root / "b").stat().st_size == 400


# attack 20, spec S7: so is the largest that any file may grow to, however deep.
async def test_the_size_of_a_file_is_bounded_for_all_connections(stage: Stage) -> None:
    child = await stage.puppet(max_file_bytes=1000)
    large = b"ERROR failed to write: " + os.strerror(errno.EFBIG).encode()
    deep = "globals().__setitem__('D', attached(attached(IN)))"
    await child.do(deep)
    await child.do("globals().__setitem__('N', opened(b'a', b'w', fd=D))")
    assert await child.do("ask(b'WRITE %d 1001\\n' % N + b'x' * 1001, D)") == large
    assert await child.do("ask(b'WRITE %d 1000\\n' % N + b'x' * 1000, D)") == b"OK 1000"
    assert await child.do("ask(b'WRITE %d 1\\nx' % N, D)") == large
    assert (stage.root / "a").stat().st_size == 1000


# spec N4, T3: attached connections answer each in its own order, all at once.
async def test_attached_connections_work_side_by_side(stage: Stage) -> None:
    child = await stage.puppet()
    await child.do("globals().__setitem__('D', [attached() for _ in range(20)])")
    names = "opened(b'f%d' % d, b'w+', fd=d)"
    filenos = await child.do(f"[{names} for d in D]")
    assert len(set(filenos)) == 20
    wrote = "[send(b'WRITE %d 4\\nabcd' % n, d) for n, d in zip(N, D)]"
    await child.do(f"globals().__setitem__('N', {filenos})")
    await child.do(wrote)
    assert await child.do("{line(d) for d in reversed(D)}") == {b"OK 4"}
    # Its end is told by EOF on that connection alone.
    await child.do("[os.close(d) for d in D[:10]] and None")
    assert await child.ask(b"PING\n") == b"OK"
    assert await child.do("{ask(b'PING\\n', d) for d in D[10:]}") == {b"OK"}


# spec W5, S7, attack 21: the header of a WRITE reserves here and at every ancestor, so
# that what was begun goes through; who comes later is told, and nobody outside the tree.
async def test_a_nested_header_reserves_at_every_ancestor(stage: Stage) -> None:
    child = await stage.puppet(max_bytes=100)
    other = await stage.puppet(max_bytes=100)
    own = await child.open(b"own", b"w")
    far = await child.do("attached()")
    nested = await child.do(f"opened(b'nested', b'w', b'false', {far})")
    await child.do(f"send(b'WRITE {nested} 80\\nabc', {far})")
    ledger = child.child.session.client.ledger  # type: ignore[union-attr]
    await eventually(lambda: ledger.size_bytes.used == 80)
    full = b"ERROR failed to write: Disk quota exceeded"
    assert await child.write(own, b"x" * 30) == full
    assert await child.write(own, b"x" * 20) == b"OK 20"
    assert (stage.root / "nested").read_bytes() == b""
    theirs = await other.open(b"theirs", b"w")
    assert await other.write(theirs, b"x" * 100) == b"OK 100"
    assert await child.do(f"ask(b'y' * 77, {far})") == b"OK 80"
    assert await child.write(own, b"x") == full
