"""Roots, grants, transports and dialects, through `sandhost fs` and plain shell."""

from pathlib import Path

import pytest

from tests.helpers.command import SANDHOST, sandhost

pytestmark = pytest.mark.slow

DENIED = b"access denied"


def in_child(
    script: str, *options: str | Path, **changes: object
) -> tuple[int, bytes, bytes]:
    """Run a shell script in which `$0` is the command.

    The host keeps its own warnings of denied requests to itself: what is on stderr is
    the child's.
    """
    options = ("--log-level", "error", *options)
    outcome = sandhost("run", *options, "--", "sh", "-c", script, SANDHOST, **changes)
    return outcome.status, outcome.out, outcome.err


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A root, and beside it a directory and a file."""
    for name in ("root", "granted", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(f"in {name}")
    return tmp_path


@pytest.mark.parametrize("transport", ["socketpair", "pipes"])
def test_files_of_the_root_are_read_and_written(places: Path, transport: str) -> None:
    options = ("--root", places / "root", "--transport", transport)
    script = "$0 fs cat file && echo more | $0 fs put --append file && $0 fs stat file"
    status, out, err = in_child(script, *options)
    assert (status, err) == (0, b"")
    assert out.startswith(b"in rootfile: file, 12 bytes")
    assert (places / "root" / "file").read_text() == "in rootmore\n"


# spec A3: a grant gives what it says, and nothing beside it.
def test_a_grant_to_read_reads_and_does_not_write(places: Path) -> None:
    granted = places / "granted"
    options = ("--root", places / "root", "--read", granted)
    assert in_child(f"$0 fs cat {granted}/file", *options) == (0, b"in granted", b"")
    for script in (
        f"echo x | $0 fs put {granted}/file",
        f"$0 fs rm {granted}/file",
        f"$0 fs cat {places}/other/file",
        f"$0 fs cat {granted}/../other/file",
        "$0 fs cat ../granted/file",
        "$0 fs cat /etc/passwd",
    ):
        status, out, err = in_child(script, *options)
        assert (status, out) == (1, b"")
        assert DENIED in err
        assert len(err.splitlines()) == 1
    assert (granted / "file").read_text() == "in granted"


def test_a_grant_to_write_writes_and_does_not_read(places: Path) -> None:
    granted = places / "granted"
    options = ("--root", places / "root", "--write", granted)
    script = f"echo new | $0 fs put {granted}/made"
    assert in_child(script, *options) == (0, b"", b"")
    assert (granted / "made").read_text() == "new\n"
    status, out, err = in_child(f"$0 fs cat {granted}/file", *options)
    assert (status, out) == (1, b"")
    assert DENIED in err


def test_both_grants_on_one_place_give_both(places: Path) -> None:
    granted = places / "granted"
    options = ("--read", granted, "--write", granted)
    script = f"$0 fs cp {granted}/file {granted}/copy && $0 fs cat {granted}/copy"
    assert in_child(script, *options) == (0, b"in granted", b"")


def test_a_grant_of_one_file_is_of_that_file(places: Path) -> None:
    file = places / "granted" / "file"
    script = f"$0 fs cat {file}"
    assert in_child(script, "--read", file) == (0, b"in granted", b"")
    (places / "granted" / "sibling").write_text("x")
    status, _, err = in_child(f"$0 fs cat {file.parent}/sibling", "--read", file)
    assert status == 1
    assert DENIED in err


# spec A2: the top-level view is the host's, relative names from the working directory.
def test_the_top_level_view_is_the_hosts(places: Path) -> None:
    script = "$0 fs cat file && $0 fs cat /etc/hostname >/dev/null"
    status, out, err = in_child(script, "--top-level", "--cwd", places / "other")
    assert (status, out, err) == (0, b"in other", b"")


RAW = """
ask() { printf "$1" >&3; IFS= read -r reply <&3; printf '%s\\n' "$reply"; }
"""


# spec O5: the older dialect, as a shell speaks it.
def test_dialect_one_names_a_context(places: Path) -> None:
    script = RAW + (
        "ask 'OPEN file r\\n'; ask 'OPEN file r internal\\n'; ask 'OPEN file r user\\n';"
        "ask 'OPEN file r cloud\\n'; ask 'OPEN file\\n'; ask 'READ 1000 7\\n'"
    )
    status, out, err = in_child(script, "--dialect", "1", "--root", places / "root")
    assert (status, err) == (0, b"")
    assert out.splitlines() == [
        b"OK 1000",
        b"OK 1001",
        b"ERROR VFS access denied: 'file'",
        b"ERROR invalid context: cloud",
        b"ERROR OPEN requires filename and mode",
        b"OK 7",
    ]


# The commands and the Python client inside are told, nested ones too.
@pytest.mark.parametrize(
    "script",
    [
        "$0 fs cat file",
        "$0 relay -- $0 fs cat file",
        "$0 relay --read file -- $0 relay -- $0 fs cat file",
    ],
    ids=["alone", "nested", "narrowed, two deep"],
)
def test_what_runs_in_a_child_of_dialect_one_speaks_it(
    places: Path, script: str
) -> None:
    status, out, err = in_child(script, "--dialect", "1", "--root", places / "root")
    assert (status, out, err) == (0, b"in root", b"")


def test_dialect_two_names_a_flag(places: Path) -> None:
    script = RAW + "ask 'OPEN file r false\\n'; ask 'OPEN file r\\n'"
    status, out, _ = in_child(script, "--root", places / "root")
    assert (status, out) == (
        0,
        b"OK 1000\nERROR OPEN requires filename, mode, and is_top_level\n",
    )


# spec T1: over pipes a shell writes to 4 and reads from 3.
def test_a_shell_speaks_over_pipes(places: Path) -> None:
    script = "printf 'PING\\n' >&4; read -r reply <&3; echo $reply"
    assert in_child(script, "--transport", "pipes") == (0, b"OK\n", b"")


# spec T5: two commands of one pipe share the door.
def test_two_helpers_share_the_door_of_one_child(places: Path) -> None:
    data = bytes(range(256)) * 20_000
    (places / "root" / "a").write_bytes(data)
    script = "$0 fs cat a | $0 fs put b && $0 fs cat a b | wc -c"
    status, out, err = in_child(script, "--root", places / "root")
    assert (status, err) == (0, b"")
    assert int(out) == 2 * len(data)
    assert (places / "root" / "b").read_bytes() == data


def test_outside_a_child_helpers_say_so() -> None:
    outcome = sandhost("fs", "cat", "a")
    assert outcome.status == 2
    assert outcome.said("sandhost fs: ")
