"""A child's private directories.

Made for one user, locked while in use, removed whole.
"""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from supervisor.sandbox import scratch
from supervisor.sandbox.scratch import Scratch, is_abandoned, remove_tree

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where scratch directories are made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def listing(where: Path) -> list[str]:
    """The content of a directory."""
    return sorted(os.listdir(where))


def touch(*parts: str) -> None:
    """Make an empty file, and the directories above it."""
    path = Path(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


# spec S4
async def test_root_and_tmp_are_the_users_alone_and_go_away(tmp: Path) -> None:
    made = Scratch(None)
    (base,) = listing(tmp)
    assert base.startswith("sandhost-")
    assert listing(tmp / base) == ["home", "root", "run", "tmp"]
    for path in (str(tmp / base), made.root, made.tmp):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert await made.remove() is None
    assert listing(tmp) == []
    assert made.descriptors() == ()


async def test_a_root_that_was_given_stays(tmp: Path) -> None:
    given = tmp / "given"
    given.mkdir()
    (given / "a").touch()
    made = Scratch(str(given), keep=True)
    assert made.root == str(given)
    assert await made.remove() is None
    assert listing(tmp) == ["given"]
    assert listing(given) == ["a"]


async def test_a_root_that_is_kept_stays_without_its_tmp(tmp: Path) -> None:
    made = Scratch(None, keep=True)
    touch(made.root, "a")
    assert await made.remove() is None
    (base,) = listing(tmp)
    assert base.startswith("sandhost-kept-")
    assert listing(tmp / base) == ["root"]
    assert listing(Path(made.root)) == ["a"]


# attack 4: who has a grant on the place where it is made puts a link in its place.
@pytest.mark.parametrize("keep", [True, False])
async def test_what_is_removed_is_what_is_held(tmp: Path, *, keep: bool) -> None:
    for name in ("tmp", "run", "root"):
        touch(str(tmp / "another"), name, "precious")
    made = Scratch(None, keep=keep)
    touch(made.tmp, "a")
    (base,) = (name for name in listing(tmp) if name.startswith("sandhost-"))
    (tmp / base).rename(tmp / "moved")
    (tmp / base).symlink_to(tmp / "another")
    told = await made.remove()
    assert (told is None) == keep  # its name is another directory's now
    assert len(list((tmp / "another").glob("*/precious"))) == 3
    assert listing(tmp / "moved") == (["root"] if keep else [])


async def test_its_paths_have_no_links(tmp: Path) -> None:
    (tmp / "real").mkdir()
    (tmp / "link").symlink_to("real")
    made = Scratch(None, where=str(tmp / "link"))
    for path in (made.root, made.tmp, made.run):
        assert path.startswith(f"{tmp / 'real'}/")
    assert await made.remove() is None


async def test_where_it_is_made_may_be_set_group_id(tmp: Path) -> None:
    # A file made in such a directory is so, too; no mode of a directory could be set.
    os.chmod(tmp, 0o2770)
    made = Scratch(None)
    for path in (os.path.dirname(made.tmp), made.root, made.tmp, made.run):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert await made.remove() is None


# attack 39
async def test_a_directory_is_abandoned_when_its_host_is_gone(tmp: Path) -> None:
    made = Scratch(None)
    base = tmp / listing(tmp)[0]
    assert not is_abandoned(base)
    ((lock, what),) = made.descriptors()
    assert what == "scratch directory"
    assert not os.get_inheritable(lock)
    made.unlock()  # as the kernel does for a dead host
    assert is_abandoned(base)
    remove_tree(base)


def test_nothing_is_left_when_it_cannot_be_made(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir

    def full(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        if path == "root":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        make(path, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(OSError, match="No space left"):
        Scratch(None)
    assert listing(tmp) == []


# attack 11
async def test_a_tree_deeper_than_any_path_is_removed(tmp: Path) -> None:
    made = Scratch(None)
    here = os.open(made.root, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 100, dir_fd=here)
        below = os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert await made.remove() is None
    assert listing(tmp) == []


# attack 3
async def test_links_are_removed_and_not_followed(tmp: Path) -> None:
    precious = tmp / "precious"
    precious.mkdir()
    (precious / "a").touch()
    made = Scratch(None)
    os.symlink(precious, Path(made.root, "link"))
    os.rmdir(made.tmp)
    os.symlink(precious, made.tmp)
    assert await made.remove() is None
    assert listing(tmp) == ["precious"]
    assert listing(precious) == ["a"]


async def test_directories_that_nobody_may_enter_are_removed(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Scratch(None)
    locked = Path(made.root, "a", "b", "c")
    touch(str(locked), "file")
    for path in (
        locked,
        locked.parent,
        locked.parent.parent,
    ):
        os.chmod(path, 0)
    rename = os.rename

    def move(old: str, new: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        # The kernel asks of all users but root that it may be written.
        mode = os.stat(old, dir_fd=src_dir_fd, follow_symlinks=False).st_mode
        assert mode & 0o700 == 0o700
        rename(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", move)
    assert await made.remove() is None
    assert listing(tmp) == []


async def test_many_entries_are_removed(tmp: Path) -> None:
    made = Scratch(None)
    for number in range(3000):
        os.close(os.open(f"{made.root}/{number}", os.O_CREAT))
    os.mkfifo(f"{made.root}/fifo")
    os.mkdir(os.fsencode(made.root) + b"/\xff\n")
    assert await made.remove() is None
    assert listing(tmp) == []


async def test_what_cannot_be_removed_is_told_and_the_rest_is_removed(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Scratch(None)
    for name in ("a", "stubborn", "z"):
        touch(made.root, name)
    unlink = os.unlink

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        if path == "stubborn":
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", refuse)
    told = await made.remove()
    monkeypatch.undo()
    assert told is not None
    assert "cannot remove" in told
    assert "Operation not permitted ('stubborn')" in told
    assert "\n" not in told
    (base,) = listing(tmp)
    left = [name for _, _, names in os.walk(tmp / base) for name in names]
    assert left == ["stubborn"]
    assert remove_tree(tmp / base) is None


# spec S4
async def test_it_is_removed_although_everything_is_cancelled(tmp: Path) -> None:
    made = Scratch(None)
    with trio.CancelScope() as scope:
        scope.cancel()
        await made.remove()
    assert listing(tmp) == []


async def test_a_removal_that_finds_no_thread_is_given_up(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hostlib.threads.limiter", trio.CapacityLimiter(1))
    monkeypatch.setattr(scratch, "REMOVE_TIMEOUT_S", 0.01)
    from hostlib.threads import limiter  # noqa: PLC0415 - the one that was set above

    made = Scratch(None)
    async with limiter:
        told = await made.remove()
    assert told is not None
    assert "no thread was free" in told
    base = tmp / listing(tmp)[0]
    assert is_abandoned(base)  # so somebody will find it
    assert await made.remove() is None  # not its own any more
    assert remove_tree(base) is None


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many processes and threads as the user of the host may have."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("trio.to_thread.run_sync", refuse)


# attack 29, spec S4
@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize("keep", [True, False])
async def test_it_is_removed_although_no_thread_can_be_started(
    tmp: Path, *, keep: bool
) -> None:
    made = Scratch(None, keep=keep)
    touch(made.tmp, "a", "b", "c")
    touch(made.root, "a")
    assert await made.remove() is None
    assert made.descriptors() == ()
    if keep:
        assert listing(tmp / listing(tmp)[0]) == ["root"]
    else:
        assert listing(tmp) == []


# attack 29, spec S5: others have their turn, however much there is.
@pytest.mark.usefixtures("no_thread")
async def test_a_long_removal_without_a_thread_is_done_in_turns(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "SLICE_S", 0.0)
    made = Scratch(None)
    for number in range(20):
        touch(made.tmp, str(number))
    turns = 0

    async def look() -> None:
        nonlocal turns
        while made.descriptors():
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await made.remove()
    assert listing(tmp) == []
    assert turns > 10


# attack 29: what is left is told, and found by who looks for leftovers.
@pytest.mark.usefixtures("no_thread")
async def test_a_removal_without_a_thread_that_takes_too_long_is_given_up(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch, "SLICE_S", 0.0)
    monkeypatch.setattr(scratch, "REMOVE_TIMEOUT_S", 0.0)
    made = Scratch(None)
    touch(made.tmp, "a")
    told = await made.remove()
    assert told is not None
    assert "no thread was free for it" in told
    assert is_abandoned(tmp / listing(tmp)[0])


# attack 18, spec S4: what cannot be looked into is told, and ends nobody's host.
async def test_a_directory_that_cannot_be_listed_is_told(
    tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Scratch(None)

    def no_descriptor(_fd: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patched:
        patched.setattr("os.scandir", no_descriptor)
        told = await made.remove()
    assert told is not None
    assert "Too many open files" in told
    assert remove_tree(tmp / listing(tmp)[0]) is None


def test_what_is_gone_already_needs_no_removal(tmp: Path) -> None:
    assert remove_tree(tmp / "nothing") is None


def test_what_is_no_directory_is_not_removed(tmp: Path) -> None:
    (tmp / "file").touch()
    (tmp / "link").symlink_to(tmp)
    assert remove_tree(tmp / "file") is not None
    assert remove_tree(tmp / "link") is not None
    assert listing(tmp) == ["file", "link"]


def test_empty_directories_are_removed_with_few_descriptors_left(
    tmp_path: Path,
) -> None:
    program = (
        "import contextlib, os, pathlib, sys\n"
        "from supervisor.sandbox.scratch import remove_tree\n"
        "held = []\n"
        "with contextlib.suppress(OSError):\n"
        "    while True:\n"
        "        held.append(os.dup(2))\n"
        "for fd in held[-2:]:  # for the top, and for a look at what is in it\n"
        "    os.close(fd)\n"
        "print(remove_tree(pathlib.Path(sys.argv[1])))\n"
    )
    for name in ("tmp", "run", "root"):
        (tmp_path / "top" / name).mkdir(parents=True)
    words = ["sh", "-c", 'ulimit -n 32; exec "$@"', "sh", sys.executable, "-c", program]
    done = subprocess.run(
        [*words, str(tmp_path / "top")], capture_output=True, check=True
    )
    assert done.stdout == b"None\n", done.stderr
    assert not (tmp_path / "top").exists()
