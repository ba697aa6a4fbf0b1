"""Grants and roots by odd names: the check and the start of a child agree."""

from pathlib import Path

import pytest

from tests.helpers.command import Outcome, sandhost
from tests.helpers.daemon import daemon
from tests.system.e2e.test_check_config import check, faults

pytestmark = pytest.mark.slow

GONE = "No such file or directory"
NO_DIRECTORY = "Not a directory"
RING = "Too many levels of symbolic links"


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """A directory with a bit of everything."""
    (tmp_path / "adir/sub").mkdir(parents=True)
    (tmp_path / "afile").touch()
    for link, target in (
        ("ring", "other"), ("other", "ring"), ("todir", "adir"), ("tofile", "afile"),
        ("tonew", "adir/new"), ("tonone", "none/new"), ("tofile_", "afile/"), ("0", "new"),
    ):  # fmt: skip
        (tmp_path / link).symlink_to(target)
    for number in range(1, 42):  # the kernel follows 40
        (tmp_path / str(number)).symlink_to(str(number - 1))
    return tmp_path


def configuration(where: Path, grant: str) -> str:
    """Return one whose policy for `run` says this, and nothing else."""
    key, _, path = grant.partition(" ")
    text = f"{where}/{path}"
    return f"[policy.run]\n{key} = {text if key == 'root' else [text]!r}\n"


def checked(where: Path, grant: str) -> Outcome:
    """Check a configuration with a grant.

    A grant of a file yet to be made is a warning.
    """
    return check(where, configuration(where, grant))


def started(where: Path, grant: str) -> Outcome:
    """Start a child by its options, where nobody has checked them before."""
    key, _, path = grant.partition(" ")
    return sandhost("run", f"--{key}", f"{where}/{path}", "--", "true")


# Bad input: a fault of the file is told with it, and not at each start of each child.
@pytest.mark.parametrize(
    ("grant", "why", "fault"),
    [
        ("read afile/", NO_DIRECTORY, "cannot use {}: "),
        ("read afile/.", NO_DIRECTORY, "cannot use {}: "),
        ("read afile/..", NO_DIRECTORY, "cannot use {}: "),
        ("read afile/below", NO_DIRECTORY, "cannot use {}: "),
        ("read tofile/", NO_DIRECTORY, "cannot use {}: "),
        ("read new", GONE, "there is no {}; make it first"),
        ("read new/", GONE, "there is no directory {}; make it first"),
        ("read new/.", GONE, "there is no directory {}; make it first"),
        ("read tonew", GONE, "{} is a link that leads nowhere; mend it"),
        ("read ring", RING, "cannot use {}: "),
        ("read ring/below", RING, "cannot use {}: "),
        ("read 41", RING, "cannot use {}: "),
        ("write afile/", NO_DIRECTORY, "cannot use {}: "),
        ("write afile/.", NO_DIRECTORY, "cannot use {}: "),
        ("write afile/new", NO_DIRECTORY, "cannot use {}: "),
        ("write tofile_", NO_DIRECTORY, "cannot use {}: "),
        ("write new/", GONE, "there is no directory {}; make it first"),
        ("write new//", GONE, "there is no directory {}; make it first"),
        ("write new/.", GONE, "there is no directory {}; make it first"),
        ("write new/..", GONE, "there is no directory {}; make it first"),
        ("write new/file", GONE, "there is no {}; make it first"),
        ("write tonew/", GONE, "there is no directory {}; make it first"),
        ("write tonone", GONE, "{} is a link that leads nowhere; mend it"),
        ("write ring", RING, "cannot use {}: "),
        ("write ring/", RING, "cannot use {}: "),
        ("write ring/new", RING, "cannot use {}: "),
        ("write 39", RING, "cannot use {}: "),  # 40 links, and nothing behind them
        ("write 41", RING, "cannot use {}: "),
        ("root afile/", NO_DIRECTORY, "{} is not a directory"),
        ("root afile/.", NO_DIRECTORY, "{} is not a directory"),
        ("root new/", "no such directory", "there is no {}; make it first"),
        ("root new/.", "no such directory", "there is no {}; make it first"),
        ("root tonew", "no such directory", "there is no {}; make it first"),
        ("root ring", RING, "cannot use {}: "),
    ],
)
def test_what_no_start_takes_is_a_fault(
    where: Path, grant: str, why: str, fault: str
) -> None:
    key, _, path = grant.partition(" ")
    name = repr(f"{where}/{path}")
    outcome = checked(where, grant)
    assert outcome.status == 2
    if fault.endswith(": "):
        fault += why
    assert outcome.said(f"c.toml: policy.run.{key}: {fault.format(name)}")
    outcome = started(where, grant)
    assert outcome.status == 125
    assert outcome.said("cannot use ")
    assert outcome.said(why)
    # As it was written; of a file, the directory that it is to be in.
    assert outcome.said(f"'{where}/")


@pytest.mark.parametrize(
    ("grant", "is_made"),
    [
        *((f"{key} {path}", True)
          for key in ("read", "write")
          for path in ("adir", "adir/", "adir/.", "adir/..", "adir//sub", "todir/",
                       "todir/.", "afile", "tofile", "adir/../afile")),
        *((f"root {path}", True) for path in ("adir", "adir/", "adir/.", "todir/")),
        ("write new", False),
        ("write tonew", False),
        ("write adir/../new", False),
        ("write 38", False),
    ],
)  # fmt: skip
def test_what_a_start_takes_is_no_fault(
    where: Path, grant: str, *, is_made: bool
) -> None:
    path = f"{where}/{grant.partition(' ')[2]}"
    outcome = checked(where, grant)
    assert outcome.status == 0
    if is_made:
        assert outcome.err == b""
    else:
        assert outcome.said(
            f"c.toml: policy.run.write: warning: there is no {path!r}: the grant is for a"
            " file of that name, which the child may make; make the directory first if"
        )
    outcome = started(where, grant)
    assert (outcome.status, outcome.err) == (
        0,
        b"",
    )  # an operator who writes it there may mean it


# Both rights are held once, and the one to write is the one that makes it.
def test_a_file_yet_to_be_made_may_be_read_as_well(where: Path) -> None:
    path = f"{where}/new"
    text = f"[policy.run]\nread = [{path!r}]\nwrite = [{path!r}]\n"
    assert check(where, text).status == 0
    script = 'echo hello | sandhost fs put "$1" && sandhost fs cat "$1"'
    words = ("run", "--config", "c.toml", "--", "sh", "-c", script, "sh", path)
    outcome = sandhost(*words, cwd=where)
    assert (outcome.status, outcome.out) == (0, b"hello\n")


def test_a_reload_is_refused_for_what_no_start_takes(where: Path) -> None:
    child = "[child.a]\ncommand = ['sleep', '1000']\npolicy = 'run'\n"
    fine = configuration(where, "write adir") + child
    with daemon(where, fine) as running:
        pid = running.row("a").pid
        file = where / "c.toml"
        file.write_text(file.read_text().replace("/adir'", "/new/'"))
        outcome = sandhost("reload", "--control", where / "run/control")
        assert outcome.status == 2
        assert outcome.said(f"there is no directory '{where}/new/'; make it first")
        assert running.row("a").pid == pid
        assert running.end() == 0


def test_all_faults_of_grants_are_told_with_their_keys(where: Path) -> None:
    grants = f"read = ['{where}/ring']\nwrite = ['{where}/new/', '{where}/afile/']\n"
    outcome = check(where, f"[policy.a]\n{grants}", "--json")
    assert [key for key, _ in faults(outcome)] == [
        "policy.a.read",
        "policy.a.write",
        "policy.a.write",
    ]
    ring = f"cannot use '{where}/ring': {RING}; name what is there: links go round"
    assert faults(outcome)[0][1].startswith(ring)
