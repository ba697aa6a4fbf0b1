"""The page of the command line has the options that the command has."""

import re

from supervisor.cli.run import pipeline, run
from tests.architecture.tree import ROOT


def test_the_page_has_each_option_of_run_and_no_other() -> None:
    page = (ROOT / "docs/reference/command-line.md").read_text(encoding="utf-8")
    table = page.partition("| option | meaning |")[2].partition("\n\n")[0]
    rows = [re.split(r" (?<!\\)\| ", line)[0] for line in table.splitlines()]
    told = [name for row in rows for name in re.findall(r"`(--[-a-z]+)", row)]
    made = {name for option in run.params for name in option.opts if name[:2] == "--"}
    assert len(told) == len(set(told))
    assert set(told) == made
    of_pipeline = {name for option in pipeline.params for name in option.opts}
    assert of_pipeline <= made | {"command"}
