"""The status page in a browser: light and dark, wide and at a phone's width.

The host is a process of its own, as for a user. Pictures of the last run are kept where
`SANDHOST_PICTURES` says, for people.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.command import read_until, running
from tests.system.e2e.chromium import Browser, chromium

pytestmark = pytest.mark.slow

PHONE = 360

NASTY = "<script>document.title='run'<script><img_src=x_onerror='alert(1)'>"

CHILD = """
ask() { printf "$1" >&3; IFS= read -r reply <&3; }
ask "OPEN $NASTY w false\\n"
ask 'OPEN report.csv w false\\n'
printf 'WRITE 1000 700000\\n' >&3
head -c 700000 /dev/zero >&3
IFS= read -r reply <&3
ask "OPEN $NASTY r true\\n"
echo ready
while read -r name; do ask "OPEN $name w false\\n"; echo ready; done
"""


@contextmanager
def paged(where: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a child that has some files open; gives the page's address, and the host."""
    config = where / "sandhost.toml"
    config.write_text('[metrics]\nlisten = "tcp://127.0.0.1:0"\npage = true\n')
    words = ("run", "--config", config, "--log-level", "info")
    limit = ("--limit", "open_files=4,bytes=1M")
    command = (*words, *limit, "--env", f"NASTY={NASTY}", "--", "sh", "-c", CHILD)
    with running(*command, stdin=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        said = read_until(process.stderr.fileno(), b"/metrics").decode()
        (url,) = re.findall(r"(http://\S+/)metrics", said)
        read_until(process.stdout.fileno(), b"ready\n")
        yield url, process


@pytest.mark.parametrize(
    ("scheme", "width"),
    [("light", 1200), ("dark", 1200), ("light", PHONE), ("dark", PHONE)],
)
def test_the_page_can_be_read(tmp_path: Path, scheme: str, width: int) -> None:
    with paged(tmp_path) as (url, _), chromium(tmp_path) as browser:
        browser.open(url, width=width, scheme=scheme)
        browser.wait("document.getElementById('link').className === 'on'")
        check(browser, scheme, width)
        picture = tmp_path / f"{scheme}-{width}.png"
        browser.picture(picture)
        assert picture.stat().st_size > 10_000
        keep = os.environ.get("SANDHOST_PICTURES")
        if keep:
            shutil.copy(picture, keep)
        assert browser.console == [], "nothing was blocked, and nothing failed"


def check(browser: Browser, scheme: str, width: int) -> None:
    """Check one look of the page."""
    assert browser.value("document.title").startswith("sandhost ")
    wide = browser.value("document.documentElement.scrollWidth")
    assert wide <= width, "the page itself must not scroll sideways"
    paper = browser.value("getComputedStyle(document.body).backgroundColor")
    is_light = sum(map(int, re.findall(r"\d+", paper)[:3])) > 384
    assert is_light == (scheme == "light")
    text = browser.value("document.body.innerText")
    for words in ("<script>document.title", "report.csv", "child-1", "denied"):
        assert words in text
    widths = (
        "[...document.querySelectorAll('rect.used')].map(r => r.width.baseVal.value)"
    )
    filled = sorted(round(width) for width in browser.value(widths))
    assert filled[-2:] == [50, 67], "files, growth: in per cent"
    label = "getComputedStyle(document.querySelector('td'), '::before').content"
    assert (browser.value(label) != "none") == (width == PHONE), (
        "cells tell their column"
    )


def test_a_page_lives_without_being_loaded_again(tmp_path: Path) -> None:
    with paged(tmp_path) as (url, host), chromium(tmp_path) as browser:
        assert host.stdin is not None
        browser.open(url)
        browser.wait("document.getElementById('link').className === 'on'")
        browser.value("document.body.dataset.mark = 'same page'")
        host.stdin.write(b"late.txt\n")
        host.stdin.flush()
        browser.wait("document.body.innerText.includes('late.txt')")
        assert browser.value("document.body.dataset.mark") == "same page"
        host.stdin.close()
        browser.wait("document.getElementById('link').className === 'lost'")
