"""The manual pages: one for each command, with all of its options, and good roff."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from supervisor.cli.app import COMMANDS
from tests.helpers.command import sandhost, shell

pytestmark = pytest.mark.slow

NAMES = [name for entries in COMMANDS.values() for name in entries]


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the pages."""
    where = tmp_path_factory.mktemp("manual") / "man1"
    outcome = sandhost("man", where)
    assert (outcome.status, outcome.err) == (0, b"")
    assert outcome.out == f"{len(NAMES) + 1} pages in {where}\n".encode()
    return where


def plain(page: Path) -> str:
    """Return the words of a page without roff's own."""
    return re.sub(r"\\f[BR]|\\&", "", page.read_text()).replace(r"\-", "-")


def test_each_command_has_a_page(manual: Path) -> None:
    pages = {path.name for path in manual.iterdir()}
    assert pages == {"sandhost.1", *(f"sandhost-{name}.1" for name in NAMES)}
    whole = plain(manual / "sandhost.1")
    assert [n for n in NAMES if f"sandhost-{n}(1)" not in whole] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_what_help_says(manual: Path, name: str) -> None:
    told = sandhost(name, "--help").out.decode()
    page = plain(manual / f"sandhost-{name}.1")
    options = re.findall(r"^  +(--?[a-z][-a-z]*)", told, re.MULTILINE)
    assert options or name == "fd"  # whose options are the calls' parameters
    assert [option for option in options if option not in page] == []
    example = re.findall(r"xample.*?: (.*)", told)[-1]
    assert example.split("  ")[0] in page


@pytest.mark.parametrize("name", ["sandhost", *(f"sandhost-{n}" for n in NAMES)])
def test_a_page_is_good_roff(manual: Path, name: str) -> None:
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("groff is not installed")
    done = subprocess.run(
        [groff, "-ww", "-man", "-Tutf8", "-z", str(manual / f"{name}.1")],
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""


def test_man_shows_a_page(manual: Path) -> None:
    if shutil.which("man") is None:
        pytest.skip("man is not installed")
    outcome = shell(f"man -l {manual}/sandhost-run.1 | cat", env={"MANWIDTH": "80"})
    if b"minimized" in outcome.out + outcome.err:
        pytest.skip("man is a placeholder on this machine")
    assert b"sandhost run [OPTIONS] -- COMMAND [ARG]..." in outcome.out


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = sandhost("man", tmp_path / "file")
    assert (outcome.status, outcome.out) == (2, b"")
    assert outcome.said(f"cannot write '{tmp_path}/file'")
