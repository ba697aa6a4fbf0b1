"""``--hide`` and ``--guard``: hidden from a program, or not taken by a commit."""

from pathlib import Path

import pytest

from tests.system.e2e.test_workspace import Place

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return a base with two secrets."""
    place = Place(tmp_path)
    (place.base / "deep/er").mkdir(parents=True)
    for name in (".env", "deep/er/key.pem"):
        (place.base / name).write_text("secret\n")
    (place.base / "deep/er/open.txt").write_text("open\n")
    return place


HIDING = ("--hide", ".env", "--hide", "**/*.pem")


# spec WS5, WS6
@pytest.mark.nobody
def test_a_program_does_not_see_what_is_hidden(place: Place) -> None:
    script = "ls -A . deep/er; cat .env deep/er/key.pem; echo new > deep/er/new.txt"
    done = place.named(script, *HIDING)
    assert done.out.decode().split() == [".:", "a.txt", "deep", "deep/er:", "open.txt"]
    assert done.err.count(b"No such file or directory") == 2
    assert place.ask("diff", "w", "--name-only").out == b"deep/er/new.txt\n"
    assert place.ask("commit", "w").status == 0
    assert (place.base / "deep/er/key.pem").read_text() == "secret\n"


# spec WS6, WS10
def test_what_a_program_makes_under_a_hidden_name_is_not_committed(
    place: Place,
) -> None:
    place.named("echo forged > .env; echo made > made.txt", *HIDING)
    # A hidden path stays so, whatever the next command line says.
    place.named("true")
    done = place.ask("commit", "w", "--allow", "*")
    assert done.status == 1
    assert b"guarded    .env: it is hidden and stays as it is" in done.out
    assert place.ask("commit", "w", "--except", ".env").status == 0
    assert (place.base / ".env").read_text() == "secret\n"
    assert (place.base / "made.txt").read_text() == "made\n"


# spec WS6
@pytest.mark.nobody
def test_a_removed_directory_keeps_what_was_hidden_in_it(place: Place) -> None:
    place.named("rm -r deep", *HIDING)
    assert place.ask("diff", "w", "--name-only").out == b"deep/er/open.txt\n"
    assert place.ask("commit", "w").status == 0
    assert [path.name for path in (place.base / "deep/er").iterdir()] == ["key.pem"]


# spec WS5, WS6
def test_more_can_be_guarded(place: Place) -> None:
    place.named("echo x >> a.txt", "--guard", "a.*")
    done = place.ask("commit", "w")
    assert (done.status, done.out.splitlines()[0]) == (
        1,
        b"guarded    a.txt: name it with --allow",
    )
    assert place.ask("commit", "w", "--allow", "a.txt").status == 0


# spec WS6
@pytest.mark.parametrize(
    ("mode", "options", "reason"),
    [
        (":direct", HIDING, b"mode 'direct' shows the base itself; use the mode 're"),
        (":read-only", HIDING, b"mode 'read-only' shows the base itself"),
        ("", ("--hide", "!"), b"--hide: cannot use the pattern '!'"),
    ],
)
def test_what_cannot_be_hidden_is_told_first(
    place: Place, mode: str, options: tuple[str, ...], reason: bytes
) -> None:
    done = place.run("echo started", *options, mode=mode)
    assert (done.status, done.out) == (125, b"")
    assert reason in done.err
    assert done.err.count(b"\n") == 1


# spec WS6
def test_the_time_of_a_walk_is_told(place: Place) -> None:
    done = place.run("true", *HIDING, "--log-level", "INFO")
    assert b"Looked for what workspace" in done.err
    done = place.run("true", "--hide", "/.env", "--log-level", "INFO")
    assert b"Looked for" not in done.err
