"""Children that are down: the figures and the status page know them."""

import re
from pathlib import Path

import pytest

from tests.helpers.daemon import daemon
from tests.helpers.scrape import curl, parsed
from tests.system.e2e.chromium import chromium

pytestmark = pytest.mark.slow

CONFIG = """
[metrics]
listen = "tcp://127.0.0.1:0"
page = true

[policy.plain]
sandbox = "none"

[child.lives]
policy = "plain"
command = ["sleep", "600"]

[child.broken]
policy = "plain"
command = ["sh", "-c", "exit 3"]
restart = "always"
backoff = "10ms"
max_restarts = 1

[child.pauses]
policy = "plain"
command = ["sh", "-c", "exit 4"]
restart = "always"
backoff = "60s"

[child.done]
policy = "plain"
command = ["true"]

[child.halted]
policy = "plain"
command = ["sleep", "600"]
"""

NAMES = ["broken", "done", "halted", "lives", "pauses"]

DOWN = {
    "given_up": "broken",
    "backing_off": "pauses",
    "ended": "done",
    "stopped": "halted",
}


# The sum of `sandhost_children` is every child, wherever it is.
def test_figures_and_page_know_children_that_are_down(tmp_path: Path) -> None:
    with daemon(tmp_path, CONFIG) as running:
        running.client.stop_child("halted")
        wanted = {name: state.replace("_", " ") for state, name in DOWN.items()}

        def is_so() -> bool:
            states = {row.name: row.state for row in running.client.ps()}
            return wanted.items() <= states.items()

        running.wait(is_so, f"{wanted}")
        (url,) = re.findall(r"(http://[^\"\s]+/)metrics", running.said())
        figures = parsed(curl(f"{url}metrics").body)
        states = {
            re.search(r"state=(\w+)", name)[1]: value  # type: ignore[index]
            for name, value in figures.items()
            if name.startswith("sandhost_children{")
        }
        found = {state for state, value in states.items() if value}
        assert found == {*DOWN, "running"}
        assert sum(states.values()) == 5
        assert figures["sandhost_children_configured"] == 5
        page = curl(url).body
    table = page.partition("Children</h2>")[2].partition("</table>")[0]
    names = re.findall(r"<b>([a-z]+)</b>", table)
    assert names == ["broken", "pauses", "done", "halted", "lives"]
    assert "given up: more than 1 restarts" in table
    assert "exited with 4" in table


def names_in(page: str) -> list[str]:
    """Return the names of the children of a page, in its order."""
    table = page.partition("Children</h2>")[2].partition("</table>")[0]
    return re.findall(r"<b>([a-z]+)</b>", table)


# Without a script the address sorts and filters.
def test_an_address_sorts_and_filters(tmp_path: Path) -> None:
    with daemon(tmp_path, CONFIG) as running:
        running.wait(lambda: running.row("broken").state == "given up", "its end")
        (url,) = re.findall(r"(http://[^\"\s]+/)metrics", running.said())
        assert names_in(curl(f"{url}?sort=child").body) == sorted(NAMES)
        assert names_in(curl(f"{url}?sort=-child").body) == sorted(NAMES, reverse=True)
        assert names_in(curl(f"{url}?filter=GIVEN%20up").body) == ["broken"]
        assert names_in(curl(f"{url}?filter=small").body) == [], "a tag is no text"
        for odd in ("?sort=nonsense", "?sort=%00", "?%ff", "?filter=", "?sort=-"):
            assert sorted(names_in(curl(url + odd).body)) == sorted(NAMES)
        nasty = curl(f"{url}?filter=%22%3E%3Cb%3Ex").body
        assert "<b>x" not in nasty
        assert "&quot;&gt;&lt;b&gt;x" in nasty
        assert curl(f"{url}?filter={'x' * 5000}").body.count("x" * 161) == 0


def test_a_reader_sorts_and_filters_a_live_page(tmp_path: Path) -> None:
    shown = (
        "[...document.querySelector('tbody').rows].filter(r => r.offsetHeight)"
        ".map(r => r.querySelector('b').textContent)"
    )
    with daemon(tmp_path, CONFIG) as running, chromium(tmp_path) as browser:
        running.wait(lambda: running.row("broken").state == "given up", "its end")
        (url,) = re.findall(r"(http://[^\"\s]+/)metrics", running.said())
        browser.open(url, width=360)
        browser.wait("document.getElementById('link').className === 'on'")
        head = "document.querySelector('th[data-sort=child] a').click()"
        for wanted in (sorted(NAMES), sorted(NAMES, reverse=True)):
            browser.value(head)
            assert browser.value(shown) == wanted
        assert "sort=-child" in browser.value("location.search")
        browser.value(
            "document.getElementById('filter').value = 'GIVEN';"
            "document.getElementById('filter').dispatchEvent(new Event('input'))"
        )
        assert browser.value(shown) == ["broken"]
        # Later rows are arranged likewise.
        running.client.spawn(["sleep", "600"], name="given", policy="plain")
        browser.wait(f"{shown}.length === 2")
        assert browser.value(shown) == ["given", "broken"]
        assert browser.console == []
