"""Faults of a command line, a file or a disk: one clear line, no traceback."""

import os
import re
import shlex
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.helpers.command import (
    ENVIRONMENT,
    bound_by_permissions,
    sandhost,
    shell,
    small_disk,
)
from tests.system.e2e.layers import as_root

pytestmark = pytest.mark.slow

REFUSED = 125


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run",), "Missing argument"),
        (("run", "--"), "Missing argument"),
        (("run", "--bogus", "--", "true"), "No such option '--bogus'"),
        (("run", "--root"), "--root"),
        (("run", "--dialect", "3", "--", "true"), "--dialect"),
        (("run", "--dialect", "x", "--", "true"), "--dialect"),
        (("run", "--timeout", "soon", "--", "true"), "--timeout: not a time: 'soon'"),
        (("run", "--timeout", "-1", "--", "true"), "not a time: '-1'"),
        (
            ("run", "--limit", "wishes=3", "--", "true"),
            "--limit: not a limit: 'wishes=3'",
        ),
        (
            ("run", "--limit", "memory=lots", "--", "true"),
            "--limit: not a size: 'lots'",
        ),
        (("run", "--limit", "cpu=1,cpu=2", "--", "true"), "given twice"),
        (("run", "--env", "NOVALUE", "--", "true"), "--env: not a variable: 'NOVALUE'"),
        (("run", "--env", "=x", "--", "true"), "not a variable: '=x'"),
        (
            ("run", "--pass-env", "A=x", "--", "true"),
            "--pass-env: not a name: 'A=x'; write NAME, or --env NAME=VALUE",
        ),
        (("run", "--pass-env", "", "--", "true"), "--pass-env: not a name: ''"),
        (("run", "--transport", "pigeon", "--", "true"), "not a transport: 'pigeon'"),
        (
            ("run", "--log-level", "loud", "--", "true"),
            "--log-level: not a log level: 'loud'",
        ),
        (
            ("run", "--log-format", "xml", "--", "true"),
            "--log-format: not a log format",
        ),
        (("run", "--log-format", "", "--", "true"), "not a log format: ''"),
        (("run", "--log-level", "", "--", "true"), "not a log level: ''"),
        (("run", "--sandbox", "", "--", "true"), "--sandbox: no profile ''"),
        (
            ("run", "--root", "missing", "--", "true"),
            "--root: cannot use 'missing': no",
        ),
        (
            ("run", "--root", "", "--", "true"),
            "--root: cannot use '': no such directory",
        ),
        (("run", "--timeout", "", "--", "true"), "--timeout: not a time: ''"),
        (("run", "--control", "", "--", "true"), "cannot use ''"),
        (("run", "--root", "file", "--", "true"), "'file': not a directory"),
        (("run", "--cwd", "missing", "--", "true"), "'missing': no such directory"),
        (("run", "--read", "missing", "--", "true"), "missing': No such file"),
        (("run", "--read", "", "--", "true"), "No such file or directory"),
        (("run", "--write", "no/such/file", "--", "true"), "No such file"),
        (
            ("run", "--journal", "no/such/file", "--", "true"),
            "No such file or directory; name what is there, or make it first",
        ),
        (("run", "--journal", ".", "--", "true"), "Is a directory; name another"),
        (("run", "--config", "missing", "--", "true"), "'missing': No such file"),
        (("run", "--config", ".", "--", "true"), "cannot read '.': it is a directory"),
        (("run", "--root", "a\nb\x1b[2J", "--", "true"), "no such directory"),
        (("pipeline",), "Missing argument"),
        (("pipeline", "--", "true", ":::"), "a part of the pipeline is empty"),
        (("pipeline", "--", ":::", "true"), "a part of the pipeline is empty"),
    ],
)
def test_a_bad_command_line_is_refused_in_one_line(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    (tmp_path / "file").touch()
    outcome = sandhost(*words, cwd=tmp_path)
    assert outcome.status == REFUSED
    assert outcome.out == b""
    assert outcome.said(said)
    assert outcome.said(f"sandhost {words[0]}: ")


def test_an_unknown_command_is_a_usage_error() -> None:
    outcome = sandhost("frobnicate")
    assert (outcome.status, outcome.out) == (2, b"")
    assert outcome.said("frobnicate")


def test_no_command_shows_what_there_is() -> None:
    outcome = sandhost()
    assert outcome.status == 2
    assert b"run" in outcome.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--sandbox", "my-profile"), "--sandbox: no profile 'my-profile'"),
        (("--sandbox", "none", "--network", "a.example"), "rules cannot be kept"),
        (("--sandbox", "none", "--network", "none"), "contradicts sandbox 'none'"),
    ],
)
@pytest.mark.parametrize("command", ["run", "pipeline"])
def test_a_sandbox_that_cannot_be_meant_is_refused(
    tmp_path: Path, command: str, options: tuple[str, ...], said: str
) -> None:
    outcome = sandhost(command, *options, "--", "touch", "done", cwd=tmp_path)
    assert outcome.status == REFUSED
    assert outcome.said(said)
    assert not (tmp_path / "done").exists()


def test_no_sandbox_is_available() -> None:
    assert sandhost("run", "--sandbox", "none", "--", "true").status == 0


def no_root(closed: Path) -> tuple[str, ...]:
    return ("--root", str(closed))


def beneath_a_closed_directory(closed: Path) -> tuple[str, ...]:
    return ("--root", str(closed / "inner"))


def no_grant(closed: Path) -> tuple[str, ...]:
    return ("--read", str(closed / "inner"))


def no_working_directory(closed: Path) -> tuple[str, ...]:
    return ("--cwd", str(closed))


def no_journal(closed: Path) -> tuple[str, ...]:
    return ("--journal", str(closed / "journal"))


def no_configuration(closed: Path) -> tuple[str, ...]:
    return ("--config", str(closed / "config"))


@pytest.mark.parametrize(
    "options",
    [
        no_root,
        beneath_a_closed_directory,
        no_grant,
        no_working_directory,
        no_journal,
        no_configuration,
    ],
)
def test_what_may_not_be_entered_is_said(
    tmp_path: Path, options: Callable[[Path], tuple[str, ...]]
) -> None:
    closed = tmp_path / "closed"
    (closed / "inner").mkdir(parents=True)
    closed.chmod(0)
    try:
        outcome = sandhost(
            "run", *options(closed), "--", "true", wrapper=bound_by_permissions()
        )
    finally:
        closed.chmod(0o700)
    assert outcome.status == REFUSED
    assert outcome.said("Permission denied")


def test_a_program_without_permission_is_126(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o600)
    outcome = sandhost("run", "--", program)
    assert outcome.status == 126
    assert outcome.said("Permission denied")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("run -- true", REFUSED, "the working directory is gone; change to one"),
        ("run --cwd . -- true", REFUSED, "--cwd: cannot use '.': the working dir"),
        ("run --root . -- true", REFUSED, "--root: cannot use '.': the working dir"),
        ("run --cwd / --read x -- true", REFUSED, "cannot use 'x': No such file"),
        ("pipeline -- true", REFUSED, "the working directory is gone"),
        ("serve --control x", 1, "the working directory is gone"),
        ("spawn --cwd . -- true", 2, "--cwd: cannot use '.': the working directory"),
        ("mcp --root .", 1, "the working directory is gone"),
        ("check-config x", 2, "x: No such file or directory"),
        ("ps --control x", 2, "cannot ask 'x': there is no such socket"),
        ("shim x", 2, "cannot use 'x': No such file or directory"),
    ],
)
def test_a_working_directory_that_is_gone_is_said(
    tmp_path: Path, words: str, status: int, said: str
) -> None:
    (tmp_path / "gone").mkdir()
    script = f"cd gone && rmdir ../gone && exec $S {words}"
    outcome = shell(script, cwd=tmp_path)
    assert outcome.status == status
    assert outcome.said(said)


def test_a_working_directory_that_may_not_be_entered_is_said(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    script = (
        f"cd closed && chmod 0 . && exec {shlex.join(bound_by_permissions())} $S run"
    )
    try:
        # Whom permissions bind has no users to give.
        options = shlex.join(map(str, as_root(tmp_path)))
        outcome = shell(f"{script} {options} -- true", cwd=tmp_path)
    finally:
        closed.chmod(0o700)
    assert outcome.status == REFUSED
    assert outcome.said("its working directory may not be entered; change to another")


def test_who_names_whole_paths_needs_no_working_directory(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    script = "cd gone && rmdir ../gone && exec $S run --cwd / --read / -- pwd"
    outcome = shell(script, cwd=tmp_path)
    assert (outcome.status, outcome.out, outcome.err) == (0, b"/\n", b"")


def test_a_nested_child_in_a_directory_that_is_gone_is_refused() -> None:
    script = "mkdir $TMPDIR/g; cd $TMPDIR/g; rmdir $TMPDIR/g; exec $S relay -- true"
    outcome = shell(f"export S; exec $S run --pass-env S -- sh -c '{script}'")
    assert outcome.status == REFUSED
    assert outcome.said("sandhost relay: the working directory is gone")


def test_a_journal_on_a_full_disk_is_said_once_and_stops_nothing() -> None:
    words = ("--journal", "/dev/full", "--log-format", "text")
    script = "for n in 1 2 3; do printf 'OPEN a w false\\n' >&3; read -r r <&3; done"
    outcome = sandhost("run", *words, "--", "sh", "-c", f"{script}; exit 7")
    assert outcome.status == 7
    assert outcome.said("cannot write the journal: No space left on device")


# spec W5: a full disk is the child's error, in the system's words.
def test_a_root_on_a_full_disk_is_the_childs_error(tmp_path: Path) -> None:
    script = (
        "printf 'OPEN a w false\\n' >&3; read -r r n <&3;"
        'printf "WRITE $n 3\\nabc" >&3; read -r r <&3; echo "$r";'
        'printf "WRITE $n 100000\\n" >&3; head -c 100000 /dev/zero >&3;'
        'read -r r <&3; echo "$r"'
    )
    with small_disk(tmp_path, "32k") as disk:
        outcome = sandhost("run", "--root", disk, "--", "sh", "-c", script)
        assert (disk / "a").read_bytes() == b"abc"
    assert (outcome.status, outcome.err) == (0, b"")
    assert outcome.out == b"OK 3\nERROR failed to write: No space left on device\n"


def test_a_full_disk_for_temporary_directories_is_said(tmp_path: Path) -> None:
    with small_disk(tmp_path, "4k") as disk:
        (disk / "filler").write_bytes(bytes(4096))
        env = {**ENVIRONMENT, "TMPDIR": str(disk)}
        outcome = sandhost("run", "--", "sh", "-c", "echo $TMPDIR", env=env)
    if outcome.status == 0:  # the system's own temporary directory takes over
        assert not outcome.out.startswith(os.fsencode(disk))
    else:
        assert outcome.status == REFUSED
        assert outcome.said("No space left on device")


# Where every directory for temporary files is on a disk that is full, what makes none of
# them goes on, and a child is told what the matter is.
@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("run --sandbox none -- sh -c '$0 fs ls; exit 7' $S", 7, b""),
        ("run -- sh -c 'echo x | $0 fs put a' $S", 1, b"cannot write 'a': No space"),
        ("pipeline -- true ::: true", 0, b""),
        ("doctor --leaks", 0, b""),
    ],
)
def test_a_disk_that_is_full_everywhere(
    tmp_path: Path, words: str, status: int, said: bytes
) -> None:
    with small_disk(tmp_path, "16k") as disk:
        (disk / "filler").write_bytes(bytes(16_384))
        bind = f"mount --move {disk} /tmp || exit 99; for d in /var/tmp /usr/tmp; do"
        bind += " [ ! -d $d ] || mount --bind /tmp $d || exit 99; done"
        script = f"{bind}; cd /tmp; [ -x $S ] || exit 99; exec $S {words}"
        outcome = shell(f"exec unshare --mount sh -c {shlex.quote(script)}")
    if outcome.status in {99, 127}:
        pytest.skip(f"cannot mount it there: {outcome.err!r}")
    assert outcome.status == status, outcome.err
    assert said in outcome.err
    assert b"internal error" not in outcome.err


# A file of the host in memory counts as a file; what does not fit is said.
@pytest.mark.parametrize("profile", ["none", "auto"])
def test_a_host_that_may_make_no_file_starts_children(profile: str) -> None:
    start = f"ulimit -f 0; exec $S run --sandbox {profile}"
    outcome = shell(f"{start} -- sh -c 'echo on; exit 3' | cat")
    assert (outcome.out, outcome.err) == (b"on\n", b"")
    # More environment than fits into one datagram to the launchpad.
    outcome = shell(
        f"A=$(head -c 100000 /dev/zero | tr '\\0' a); {start} --env A=$A -- true"
    )
    assert outcome.status == REFUSED
    assert outcome.said(
        "cannot start a child: File too large; raise the limit on the size"
    )


@pytest.mark.parametrize("descriptors", [9, 13, 17])
def test_too_few_descriptors_are_said(descriptors: int) -> None:
    outcome = shell(f"ulimit -n {descriptors}; exec $S run -- true")
    if outcome.status == 0:
        assert outcome.err == b""
    else:
        assert outcome.status == REFUSED
        assert outcome.said("sandhost")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("--help", 2),
        ("", 2),
        ("--version", 2),
        ("run --help", REFUSED),
        ("ps --help", 2),
        ("shim bin", 2),
        ("fs --help", 1),
    ],
)
def test_what_cannot_be_printed_is_said(
    tmp_path: Path, words: str, status: int, unbuffered: str
) -> None:
    env = {"PYTHONUNBUFFERED": unbuffered}
    outcome = shell(f"exec $S {words} >/dev/full", cwd=tmp_path, env=env)
    assert outcome.status == status
    assert outcome.said("cannot write to st")
    assert outcome.said("No space left on device")


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("run", "run [OPTIONS] -- COMMAND [ARG]..."),
        ("pipeline", "pipeline [OPTIONS] -- A [ARG]... ::: B [ARG]..."),
        ("spawn", "spawn [OPTIONS] [-- COMMAND [ARG]...]"),
        ("stop", "stop [OPTIONS] [CHILD]..."),
        ("logs", "logs [OPTIONS] CHILD"),
    ],
)
def test_a_commands_words_are_shown_as_they_are_written(
    command: str, usage: str
) -> None:
    text = sandhost(command, "--help").out.decode()
    assert text.splitlines()[0] == f"Usage: sandhost {usage}"
    assert not re.search("<[a-z]", text)  # a type of Python's


def test_the_version_is_told() -> None:
    outcome = sandhost("--version")
    assert (outcome.status, outcome.err) == (0, b"")
    assert outcome.out == f"sandhost {version('sandhost')}\n".encode()


def test_a_reader_of_the_help_that_went_away_is_no_fault() -> None:
    outcome = shell("{ $S run --help; echo $? >&2; } | :")
    assert outcome.err == b"0\n"


# A name that is no text, in the message about it.
def test_bytes_in_a_command_line_are_shown_as_text() -> None:
    outcome = sandhost("run", "--", os.fsdecode(b"\xff\n\x1b[2J"))
    assert outcome.status == 127
    assert outcome.said("cannot start")
    assert b"\x1b" not in outcome.err
