"""Names with newlines, escapes and bytes beyond UTF-8, in each form of a command."""

import base64
import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from typing import Any

import pytest

from supervisor.__main__ import run_command
from tests.supervisor.workspace.scene import Scene, tree_of

pytestmark = pytest.mark.slow

NAMES = sorted(
    (b"new\nline", b"\xff\xfe", b"quo\"te's", b" blank ", b"tab\t", b"-dash", b"a\\n",
     b"\x1b[31mred", b"carriage\r", "\u00fc\u2028".encode(), b"sub\n\xff/in\nner\x80")
)  # fmt: skip
DIRECTORY = b"sub\n\xff"
SHOWN = NAMES[-1].replace(b"\n", b"\\x0a")

Ask = Callable[..., tuple[int, bytes, bytes]]


@pytest.fixture
def ask(scene: Scene, capfdbinary: pytest.CaptureFixture[bytes]) -> Ask:
    """Return what runs ``sandhost workspace``: status, stdout, stderr."""

    def command(verb: str, *words: str) -> tuple[int, bytes, bytes]:
        state = ("--state-dir", str(scene.state))
        status = run_command(["workspace", verb, *words, *state])
        out, err = capfdbinary.readouterr()
        return status, out, err

    return command


@pytest.fixture
def odd(scene: Scene) -> Scene:
    """Return a workspace in which files with odd names were edited, made and removed."""
    base = os.fsencode(scene.base)
    os.mkdir(os.path.join(base, DIRECTORY))
    for number, name in enumerate(NAMES):
        if number % 3:
            fill(base, name, b"old\n")
    scene.make()
    with scene.run() as top:
        for number, name in enumerate(NAMES):
            if number % 3 == 2:
                os.unlink(os.path.join(os.fsencode(top), name))
            else:
                fill(os.fsencode(top), name, b"new\n")
    scene.end_run()
    return scene


def fill(top: bytes, name: bytes, content: bytes) -> None:
    with open(os.path.join(top, name), "wb") as file:
        file.write(content)


def path_of(row: Any) -> bytes:
    """Return the path that stands in JSON, as text or in base64."""
    if isinstance(row, str):
        return row.encode()
    return row["path"].encode() if "path" in row else base64.b64decode(row["path_b64"])


# spec WS8, WS9, WS14
def test_odd_names_are_told_whole_and_on_one_line(odd: Scene, ask: Ask) -> None:
    seen = odd.seen()
    status, out, err = ask("diff", "w", "--name-only", "-z")
    assert (status, out.split(b"\0"), err) == (1, [*NAMES, b""], b"")
    for form in ("--name-only", "--stat"):
        status, out, err = ask("diff", "w", form)
        assert (status, out.count(b"\n"), err) == (1, len(NAMES), b"")
        assert SHOWN in out
        assert b"\x1b" not in out
    assert [path_of(row) for row in json.loads(ask("diff", "w", "--json")[1])] == NAMES
    exported = odd.top / "made.patch"
    assert ask("export", "w", str(exported))[0] == 0
    patch = ask("diff", "w")[1]
    assert patch == exported.read_bytes()
    other = odd.copy("other", odd.base)
    subprocess.run(["git", "apply", "-"], cwd=other, input=patch, check=True)
    assert tree_of(other) == seen
    layer = odd.top / "made.tar"
    assert ask("export", "w", str(layer))[0] == 0
    with tarfile.open(layer, errors="surrogateescape") as tar:
        names = sorted(os.fsencode(name.replace(".wh.", "")) for name in tar.getnames())
    assert names == NAMES


# spec WS10, WS11
def test_a_commit_tells_odd_names_whole_and_on_one_line(odd: Scene, ask: Ask) -> None:
    done = json.loads(ask("commit", "w", "--dry-run", "--json")[1])
    assert [path_of(one) for one in done["applied"]] == NAMES
    fill(os.fsencode(odd.base), NAMES[-1], b"operator's\n")
    with odd.run() as top:
        guarded = os.path.join(os.fsencode(top), b"\xfe\n")
        os.symlink(b"/outside\n", guarded)
    status, out, err = ask("commit", "w")
    assert (status, err) == (1, b"")
    assert out.splitlines() == [
        b"conflict   " + SHOWN + b": it was changed in the base",
        b"guarded    \xfe\\x0a: name it with --allow",
        b"nothing was committed",
    ]
    done = json.loads(ask("commit", "w", "--json")[1])
    assert [path_of(one) for one in done["conflicts"]] == [NAMES[-1]]
    assert [path_of(one) for one in done["guarded"]] == [b"\xfe\n"]
    assert [path_of(one) for one in done["left"]] == sorted([*NAMES, b"\xfe\n"])
    words = ("--theirs", "*", "--except", os.fsdecode(b"\xfe*"))
    status, out, err = ask("commit", "w", *words)
    assert (status, err) == (0, b"")
    assert out.count(b"\n") == len(NAMES)
    assert odd.rows() == [(os.fsdecode(b"\xfe\n"), "added")]


# spec WS7
def test_a_workspace_that_another_command_works_on_is_not_listed_as_in_use(
    scene: Scene, ask: Ask
) -> None:
    scene.make()
    with scene.open():
        (row,) = json.loads(ask("list", "--json")[1])
    assert (row["state"], row["child"], row["changed"]) == ("idle", "", None)
    assert row["base"] == str(scene.base)


# spec WS7, WS10
def test_a_base_with_an_odd_name_is_told_of_on_one_line(scene: Scene, ask: Ask) -> None:
    scene.base = scene.top / os.fsdecode(b"re\npo\xff")
    scene.base.mkdir()
    scene.make()
    with scene.run() as top:
        fill(os.fsencode(top), b"made", b"new\n")
    (row,) = json.loads(ask("list", "--json")[1])
    assert row["changed"] == 1
    assert base64.b64decode(row["base_b64"]) == os.fsencode(scene.base)
    assert ask("list")[1].count(b"\n") == 2
    scene.base.rename(scene.top / "aside")
    status, out, err = ask("commit", "w")
    assert (status, out, err.count(b"\n")) == (2, b"", 1)
    assert b"put it back, or discard the workspace" in err
    assert ask("discard", "w", "--yes")[0] == 0
