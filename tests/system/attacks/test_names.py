"""Names that lead out, and things in the tree that are no files: through the door.

The rules are proved where paths are resolved (`tests/vfs`); here a child in each kind of
walls tries, so that walls neither open a way nor stand in the door's.
"""

import os
import socket
from pathlib import Path

import pytest

from tests.helpers.stage import Puppet, Stage, eventually
from tests.system.attacks.conftest import only

pytestmark = [pytest.mark.slow, pytest.mark.attack]


def denied(name: bytes) -> bytes:
    """Return the refusal of a name."""
    return b"ERROR VFS access denied: '%b'" % name


@pytest.fixture
def outside(stage: Stage) -> Path:
    """A directory beside the root whose name begins like the root's."""
    made = stage.where / "root-evil"
    made.mkdir()
    (made / "file").write_bytes(b"outside")
    return made


async def untouched(child: Puppet, names: list[bytes], outside: Path) -> None:
    """Try names in every mode; nothing is given and nothing changes."""
    before = sorted(os.listdir(outside)), (outside / "file").read_bytes()
    for name in names:
        for mode in (b"r", b"w", b"a", b"r+", b"w+", b"a+"):
            assert await child.ask(b"OPEN %b %b false\n" % (name, mode)) == denied(name)
    assert (sorted(os.listdir(outside)), (outside / "file").read_bytes()) == before


# attack 2
async def test_a_twin_of_the_root_is_outside(stage: Stage, outside: Path) -> None:
    child = await stage.puppet()
    names = [os.fsencode(outside / "file"), b"../root-evil/file", b"../root-evil"]
    await untouched(child, names, outside)


# attack 3, attack 5: files, directories, ancestors of what is missing.
async def test_links_out_lead_nowhere(stage: Stage, outside: Path) -> None:
    child = await stage.puppet()
    (stage.root / "file").symlink_to("../root-evil/file")
    (stage.root / "dir").symlink_to(outside)
    (stage.root / "new").symlink_to(outside / "new")
    names = [b"file", b"dir/file", b"dir//file", b"dir/./file", b"dir/new", b"new"]
    names += [b"dir/a/b", b"dir/../file"]
    await untouched(child, names, outside)
    for name in (b"dir/", b"dir//", b"dir/."):
        for request in (b"OPEN %b r false\n", b"LIST false %b\n", b"STAT false %b\n"):
            said = await child.ask(request % name)
            assert said == denied(name), request


# attack 7, spec A4: a hard link that somebody put into the root is the root's, as a name: who
# takes it away takes no more than that, and it leads to nothing beside it.
async def test_a_hard_link_in_the_root_is_the_roots(
    stage: Stage, outside: Path
) -> None:
    (outside / "other").write_bytes(b"not linked")
    (stage.root / "hard").hardlink_to(outside / "file")
    child = await stage.puppet()
    assert await child.read(await child.open(b"hard"), 99) == b"outside"
    await untouched(child, [os.fsencode(outside / "file")], outside)
    away = os.fsencode(outside / "moved")
    moved = b"RENAME false 4 %d\nhard%b" % (len(away), away)
    assert await child.ask(moved) == denied(away)
    for name in (b"hard/../../root-evil/other", b"hard/other"):
        assert (await child.ask(b"OPEN %b r false\n" % name)).startswith(b"ERROR ")
    assert await child.ask(b"REMOVE false hard\n") == b"OK"
    assert sorted(os.listdir(outside)) == ["file", "other"]
    assert (outside / "file").read_bytes() == b"outside"


# attack 7: a child makes none, by no command.
async def test_a_child_makes_no_hard_link(stage: Stage, outside: Path) -> None:
    child = await stage.puppet()
    name = os.fsencode(outside / "file")
    asked = await child.ask(b"RENAME false %d %d\n%bmine" % (len(name), 4, name))
    assert asked == denied(name)
    assert os.stat(outside / "file").st_nlink == 1
    assert os.listdir(stage.root) == []


# attack 7: nor by its own calls, but without walls, where its user may.
async def test_walls_let_a_child_make_no_hard_link(
    stage: Stage, outside: Path, kind: str
) -> None:
    child = await stage.puppet()
    link = f"ln {outside}/file {stage.root}/mine 2>/dev/null"
    assert (await child.do(f"os.system({link!r})") == 0) == (kind == "none")
    assert os.stat(outside / "file").st_nlink == 1 + (kind == "none")


# attack 8, spec O7
async def test_what_is_no_file_is_refused_at_once(stage: Stage) -> None:
    child = await stage.puppet()
    os.mkfifo(stage.root / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(stage.root, os.O_PATH | os.O_DIRECTORY)
        server.bind(f"/proc/self/fd/{here}/sock")  # a path of a socket is short
        os.close(here)
        names = [b"fifo", b"sock", b"."]
        if os.geteuid() == 0:
            os.mknod(stage.root / "null", 0o20666, os.makedev(1, 3))
            names.append(b"null")
        for name in names:
            for mode in (b"r", b"w", b"a+"):
                said = await child.ask(b"OPEN %b %b false\n" % (name, mode))
                assert said.startswith(b"ERROR failed to open file '"), said
    assert await child.ask(b"PING\n") == b"OK"


# attack 9: a refused open neither made nor cut anything.
async def test_a_refused_open_changes_nothing(stage: Stage, outside: Path) -> None:
    child = await stage.puppet(read=(str(outside),))
    for mode in (b"w", b"a", b"r+", b"w+"):
        for name in ("file", "new"):
            path = os.fsencode(outside / name)
            assert await child.ask(b"OPEN %b %b false\n" % (path, mode)) == denied(path)
    assert (outside / "file").read_bytes() == b"outside"
    assert os.listdir(outside) == ["file"]


# attack 11, attack 12, attack 22
async def test_names_that_are_long_odd_or_look_alike(stage: Stage) -> None:
    child = await stage.puppet()
    (stage.root / "café").write_bytes(b"composed")
    for name in (
        b"/".join([b"a"] * 3000),
        b"x" * 4096,
        b"x" * 256,
        b"a/" * 2100 + b"x",
    ):
        assert (await child.ask(b"OPEN %b r false\n" % name)).startswith(b"ERROR ")
    assert (await child.ask(b"OPEN a\0b w false\n")).startswith(b"ERROR ")
    decomposed = "cafe\u0301".encode()
    assert (await child.ask(b"OPEN %b r false\n" % decomposed)).startswith(b"ERROR ")
    fileno = await child.open("café".encode())
    assert await child.read(fileno, 99) == b"composed"
    assert os.listdir(stage.root) == ["café"]


# attack 14
async def test_lenient_numbers_are_none(stage: Stage) -> None:
    child = await stage.puppet()
    fileno = await child.open(b"a", b"w+")
    for number in (b"+%d", b"0x%x", b"%d_0", b"%d.0", b"-%d"):
        token = number % fileno
        said = await child.ask(b"READ %b 1\n" % token)
        assert said.startswith(b"ERROR "), token
    for size in (b"+1", b"0x1", b"1_0", "\u0661".encode(), b"1e1", b""):
        said = await child.ask(b"READ %d %b\n" % (fileno, size))
        assert said.startswith(b"ERROR "), size
    assert await child.write(fileno, b"fine") == b"OK 4"


# attack 20: what is full is full for the one that filled it.
async def test_who_fills_its_share_alone_is_told(stage: Stage) -> None:
    child = await stage.puppet(max_bytes=10_000, max_files=3, max_file_bytes=8_000)
    other = await stage.puppet()
    first, second = await child.open(b"a", b"w"), await child.open(b"b", b"w")
    assert await child.write(first, b"x" * 8_000) == b"OK 8000"
    assert await child.write(first, b"x") == b"ERROR failed to write: File too large"
    full = b"ERROR failed to write: Disk quota exceeded"
    assert await child.write(second, b"x" * 2_001) == full
    # Sparse files too: the size counts, not the blocks.
    truncated = await child.ask(b"TRUNCATE %d 5000\n" % second)
    assert truncated == b"ERROR failed to truncate: Disk quota exceeded"
    # spec S7: what is attached counts against its ancestors.
    nested = await child.do("opened(b'c', b'w', b'false', (far := attached())) and far")
    said = await child.do(f"ask(b'OPEN d w false\\n', {nested})")
    assert said == b"ERROR failed to open file 'd': Disk quota exceeded"
    # A failed request took nothing.
    assert await child.write(second, b"x" * 2_000) == b"OK 2000"
    fileno = await other.open(b"e", b"w")
    assert await other.write(fileno, b"x" * 20_000) == b"OK 20000"


# attack 20, attack 21: what a WRITE may add is reserved with its header, so that of many
# that begin at once one goes through; whatever ends it gives it back.
@pytest.mark.parametrize("end", ["it comes whole", "its client goes", "the child dies"])
async def test_what_a_header_declares_is_reserved(stage: Stage, end: str) -> None:
    child = await stage.puppet(max_bytes=100_000)
    first, second = await child.open(b"a", b"w"), await child.open(b"b", b"w")
    far = await child.do("attached()")
    near = await child.do(f"opened(b'c', b'w', b'false', {far})")
    await child.do(f"send(b'WRITE {near} 90000\\n' + b'x' * 70000, {far})")
    ledger = child.child.session.client.ledger  # type: ignore[union-attr]
    await eventually(lambda: ledger.size_bytes.used == 90_000)
    full = b"ERROR failed to write: Disk quota exceeded"
    assert await child.write(first, b"y" * 10_001) == full
    assert await child.write(second, b"y" * 10_000) == b"OK 10000"
    assert (stage.root / "c").stat().st_size == 0
    if end == "it comes whole":
        assert await child.do(f"ask(b'x' * 20000, {far})") == b"OK 90000"
        assert await child.write(first, b"y") == full
        assert ledger.size_bytes.used == 100_000
    elif end == "its client goes":
        await child.do(f"os.close({far})")
        await eventually(lambda: ledger.size_bytes.used == 10_000)
        assert await child.write(first, b"y" * 90_000) == b"OK 90000"
    else:
        await child.kill()
        assert ledger.size_bytes.used == 10_000
        stage.assert_nothing_left()


# attack 15: a length that is too much is drained and refused, and holds nothing.
async def test_a_header_that_declares_too_much_reserves_nothing(stage: Stage) -> None:
    child = await stage.puppet(max_bytes=100_000)
    fileno = await child.open(b"a", b"w")
    said = await child.write(fileno, b"x" * 100_001)
    assert said == b"ERROR failed to write: Disk quota exceeded"
    assert await child.ask(b"PING\n") == b"OK"
    assert await child.write(fileno, b"x" * 100_000) == b"OK 100000"


@pytest.fixture
async def wrapped(stage: Stage) -> Puppet:
    """A child whose COMMAND is bubblewrap around a program."""
    return await stage.puppet()


# attack 6, attack 26, attack 28: FD 3 passes through bubblewrap, and nothing else does.
@only("bubblewrap")
async def test_the_door_passes_through_bubblewrap(
    stage: Stage, wrapped: Puppet, outside: Path
) -> None:
    assert set(await wrapped.do("descriptors()")) == {0, 1, 2, 3}
    fileno = await wrapped.open(b"mine", b"w+")
    assert await wrapped.write(fileno, b"through FD 3") == b"OK 12"
    assert (stage.root / "mine").read_bytes() == b"through FD 3"
    # A file that it may not open itself it gets by the door, and the other way round.
    path = os.fsencode(outside / "file")
    assert await wrapped.ask(b"OPEN %b r false\n" % path) == denied(path)
    assert await wrapped.do(f"os.access({str(stage.root)!r}, os.W_OK)") is False
    await wrapped.do("daemon()")
    assert await wrapped.kill() == 128 + 9
    stage.assert_nothing_left()


# attack 26: its namespace has nobody but itself.
@only("bubblewrap")
async def test_kill_everybody_in_bubblewrap_reaches_itself(
    stage: Stage, wrapped: Puppet
) -> None:
    other = await stage.puppet()
    pid = await wrapped.do("os.getpid()")
    assert pid < 10
    # It is not itself among them; with nobody there it would be told so.
    wrapped.tell("[os.fork() or signal.pause(), os.kill(-1, 9), os._exit(3)]")
    assert await wrapped.child.wait_gone() == 3
    assert await other.ask(b"PING\n") == b"OK"
