"""A hostile program in a workspace misleads neither host nor operator."""

import json
import os
import shlex
from pathlib import Path

import pytest

from tests.system.e2e.test_workspace import Place

pytestmark = pytest.mark.slow

TIB = 1 << 40


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return a base with a directory and two files."""
    found = Place(tmp_path)
    (found.base / "d").mkdir()
    (found.base / "d/kept.txt").write_text("kept\n")
    return found


def run(place: Place, script: str) -> list[str]:
    """Run a Python program in the workspace ``w``; return what it told."""
    done = place.named(f"exec /usr/bin/python3 -c {shlex.quote(script)}")
    assert done.status == 0, done.err.decode()
    return done.out.decode().splitlines()


FORGED = """
import os
os.chmod("d", 0o755)
open("a.txt", "a").write("more\\n")
os.mkdir("made")
taken = 0
for space in ("trusted", "user"):
    for mark, value in (("opaque", b"y"), ("opaque", b"x"), ("whiteout", b"y"),
                        ("redirect", b"/d"), ("redirect", b"/../../../etc"),
                        ("metacopy", b""), ("origin", b"\\0" * 29), ("impure", b"y"),
                        ("nlink", b"U+9"), ("protattr", b"\\1")):
        for path in ("d", "made", "a.txt"):
            try:
                os.setxattr(path, f"{space}.overlay.{mark}", value)
            except OSError as why:
                assert space == "trusted" or why.errno != 1, (path, mark, why)
            else:
                assert space == "user", (path, mark)
                taken += 1
print(taken > 0)
print(sorted(os.listdir("d")), sorted(os.listdir("made")))
"""


# spec WS2, WS8, WS12, attack 52
@pytest.mark.nobody
def test_forged_marks_of_the_kernel_hide_and_redirect_nothing(place: Place) -> None:
    taken, shown = run(place, FORGED)
    assert (taken, shown) == ("True", "['kept.txt'] []")
    # The layer is mounted anew: what was said in it would be heard by now.
    again = run(place, "import os; print(sorted(os.listdir('d')), os.listdir('made'))")
    assert again == ["['kept.txt'] []"]
    rows = {row["path"]: row["change"] for row in place.rows("diff", "w")}
    assert rows == {"a.txt": "modified", "made": "added"}
    done = json.loads(place.ask("commit", "w", "--json").out)
    if os.geteuid() == 0:  # its marks are others, and these do not come along
        assert done["applied"] == ["a.txt", "made"]
    else:
        # In the base they would be heard: the file, for one, could not be opened.
        assert (done["applied"], done["guarded"]) == ([], ["a.txt", "made"])
        assert run(place, "print(open('a.txt').read())") == ["hello", "more", ""]
        return
    assert (place.base / "d/kept.txt").read_text() == "kept\n"
    assert (place.base / "a.txt").read_text() == "hello\nmore\n"
    assert os.listdir(place.base / "made") == []
    # Committed files are in the base now, beneath the next layer.
    script = (
        "import os; print(open('a.txt').read(), os.listdir('d'), os.listdir('made'))"
    )
    assert run(place, script) == ["hello", "more", " ['kept.txt'] []"]


NODES = """
import errno, os, stat
for kind, number in ((stat.S_IFCHR, 0), (stat.S_IFCHR, os.makedev(1, 3)),
                     (stat.S_IFBLK, os.makedev(7, 0))):
    try:
        os.mknod("d/node", kind | 0o666, number)
        print("made")
    except OSError as why:
        print(errno.errorcode[why.errno])
"""


# spec WS13, attack 52
@pytest.mark.nobody
def test_a_program_makes_no_device_and_no_whiteout(place: Place) -> None:
    assert run(place, NODES) == ["EPERM"] * 3
    assert place.ask("diff", "w").status != 1
    assert place.rows("list") == []


LOOKALIKES = """
import os
os.symlink({outside!r}, ".sandhost-commit-w")
os.mkdir(".sandhost-commit-1")
open(".sandhost-commit-1/journal", "w").write("no")
open(".wh.a.txt", "w").write("no")
open("d/.wh..wh..opq", "w").write("no")
open("mine", "w").write("yes")
"""


# spec WS12, WS13, attack 54
@pytest.mark.nobody
def test_names_like_the_host_s_own_are_names(place: Place, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    run(place, LOOKALIKES.format(outside=str(outside)))
    first = json.loads(place.ask("commit", "w", "--json").out)
    assert first["guarded"] == [".sandhost-commit-w"]  # a link that leads out
    done = place.ask("commit", "w", "--except", ".sandhost-commit-w", "--json")
    assert done.status == 0
    assert (place.base / "mine").read_text() == "yes"
    assert (place.base / "a.txt").read_text() == "hello\n"
    assert (place.base / "d/kept.txt").read_text() == "kept\n"
    assert os.listdir(outside) == []


LINKED = """
import os
os.link("a.txt", "twin")
open("twin", "a").write("more\\n")
os.link("d/kept.txt", "gone")
os.unlink("d/kept.txt")
"""


# spec WS1, WS3b, attack 53
@pytest.mark.nobody
def test_a_hard_link_to_a_file_of_the_base_is_no_way_into_it(place: Place) -> None:
    before = (place.base / "a.txt").stat()
    run(place, LINKED)
    after = (place.base / "a.txt").stat()
    assert (after.st_ino, after.st_nlink) == (before.st_ino, 1)
    assert (place.base / "a.txt").read_text() == "hello\n"
    assert place.ask("commit", "w").status == 0
    assert (place.base / "twin").read_text() == "hello\nmore\n"
    assert (place.base / "gone").read_text() == "kept\n"
    assert not (place.base / "d/kept.txt").exists()


SPARSE = f"""
import os
with open("huge", "wb") as file:
    file.write(b"head")
    file.truncate({TIB})
"""


# spec WS12, attack 56
def test_a_sparse_file_of_a_tebibyte_stays_one(place: Place) -> None:
    run(place, SPARSE)
    (row,) = place.rows("diff", "w")
    assert (row["path"], row["size"]) == ("huge", TIB)
    assert b"huge" in place.ask("diff", "w", "--stat").out
    assert place.ask("commit", "w").status == 0
    found = (place.base / "huge").stat()
    assert found.st_size == TIB
    assert found.st_blocks * 512 < 1 << 20
    with (place.base / "huge").open("rb") as file:
        assert file.read(8) == b"head\0\0\0\0"
