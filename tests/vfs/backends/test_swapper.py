"""A race against somebody who swaps what a name means, while the host resolves it.

A process exchanges two entries with renameat2(2) as fast as it can: a directory with a
link that leads out, a file with such a link, a directory with one outside. Nothing that
is opened, made or removed meanwhile may lie outside. `SWAPPER_OPENS` makes it longer.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hostlib.linux.resolve import DENIED, open_beneath_kernel, open_beneath_walk
from tests.helpers.rounds import LONG
from tests.helpers.sessions import Hall, hall
from tests.helpers.swapping import can_exchange, swapped
from vfs.backends import MODES, HostDirectory
from vfs.errors import AccessDeniedError

__all__ = ["hall"]

pytestmark = [pytest.mark.slow, pytest.mark.attack, pytest.mark.chaos]

OPENS = int(os.environ.get("SWAPPER_OPENS", "50000" if LONG else "10000"))


@pytest.fixture
def scene(tmp_path: Path) -> Path:
    """Make `root`, and `outside` with the same names in it."""
    for where in ("root", "outside"):
        (tmp_path / where / "dir" / "deep").mkdir(parents=True)
        for name in ("file", "dir/file", "dir/deep/file"):
            (tmp_path / where / name).write_text(where)
    if why := can_exchange(tmp_path / "root", tmp_path / "outside"):
        pytest.skip(why)
    return tmp_path


def count(attempt: Callable[[], bytes], number: int) -> dict[str, int]:
    """Return how many attempts gave what: the content found, or an error's class."""
    found: dict[str, int] = {}
    for _ in range(number):
        try:
            what = attempt().decode()
        except AccessDeniedError:
            what = "denied"
        except OSError as why:
            what = "denied" if why.errno in DENIED else os.strerror(why.errno or 0)
        found[what] = found.get(what, 0) + 1
    return found


CASES = {
    "a directory and a link out": (
        "root/dir",
        "root/link",
        "../outside/dir",
        b"dir/file",
    ),
    "a directory above": ("root/dir", "root/link", "../outside/dir", b"dir/deep/file"),
    "a file and a link out": ("root/file", "root/link", "../outside/file", b"file"),
    "a way back up": ("root/dir/deep", "outside/dir", None, b"dir/deep/../file"),
    "a long way back up": (
        "root/dir",
        "outside/dir/deep",
        None,
        b"dir/deep/../../file",
    ),
}


# attack 4, spec A4: 0 escapes.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", [open_beneath_kernel, open_beneath_walk])
@pytest.mark.parametrize("case", CASES)
def test_nothing_outside_is_opened(
    scene: Path, case: str, way: Callable[[int, bytes, int], int]
) -> None:
    one, other, target, name = CASES[case]
    if target is not None:
        (scene / other).symlink_to(target)
    root = os.open(scene / "root", os.O_PATH | os.O_DIRECTORY)

    def attempt() -> bytes:
        fd = way(root, name, os.O_RDONLY)
        try:
            return os.pread(fd, 100, 0)
        finally:
            os.close(fd)

    with swapped(scene / one, scene / other):
        found = count(attempt, OPENS)
    os.close(root)
    assert "outside" not in found
    assert found["root"] > OPENS // 100, found
    if target is not None:  # the race was run: the name led out at times
        assert found["denied"] > OPENS // 100, found


# attack 4, spec A3b: nor is anything made, published or removed there.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("staged", [False, True])
def test_nothing_outside_is_made_or_removed(scene: Path, staged: bool) -> None:
    (scene / "root" / "link").symlink_to("../outside/dir")
    backend = HostDirectory(os.open(scene / "root", os.O_PATH | os.O_DIRECTORY))
    before = sorted((scene / "outside").rglob("*"))

    def attempt() -> bytes:
        handle = backend.open(
            b"dir/new", MODES[b"w"], create=True, exclusive=False, staged=staged
        )
        try:
            handle.pwrite(b"content", 0)
            handle.publish(durable=False)
        finally:
            handle.close()
        backend.make_directory(b"dir/made")
        backend.rename(b"dir/made", backend, b"dir/moved")
        backend.remove(b"dir/moved")
        backend.remove(b"dir/new")
        return b"root"

    with swapped(scene / "root" / "dir", scene / "root" / "link"):
        found = count(attempt, OPENS // 10)
    backend.close()
    assert sorted((scene / "outside").rglob("*")) == before
    assert (scene / "outside" / "dir" / "file").read_text() == "outside"
    assert "denied" in found


# attack 4, end to end: what a client reads is never what stands outside.
@pytest.mark.timeout(600)
async def test_no_client_reads_what_is_outside(hall: Hall) -> None:
    (hall.where / "outside").mkdir()
    (hall.where / "outside" / "file").write_text("outside")
    (hall.root / "dir").mkdir()
    (hall.root / "dir" / "file").write_text("root")
    (hall.root / "link").symlink_to("../outside")
    line = hall.connect()
    found: dict[bytes, int] = {}
    with swapped(hall.root / "dir", hall.root / "link"):
        for _ in range(OPENS // 10):
            reply = await line.ask(b"OPEN dir/file r false\n")
            if reply.startswith(b"OK "):
                fileno = int(reply[3:])
                reply = await line.read(fileno, 100)
                assert await line.ask(b"CLOSE %d\n" % fileno) == b"OK"
            found[reply] = found.get(reply, 0) + 1
    denied = b"ERROR VFS access denied: 'dir/file'"
    assert set(found) == {b"root", denied}
    assert len(hall.denials) == found[denied]
