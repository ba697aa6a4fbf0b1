"""Children that are down: the figures and the status page know them."""

import re
from pathlib import Path

import pytest

from tests.helpers.daemon import daemon
from tests.helpers.scrape import curl, parsed

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
