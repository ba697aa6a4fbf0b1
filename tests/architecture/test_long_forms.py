"""Each long form is run: `make chaos` runs the tests that are marked `chaos`."""

import re
from pathlib import Path

from tests.architecture.tree import relative, tree_files


def words_of(path: Path) -> set[str]:
    """Return the dotted names of a file."""
    return set(re.findall(r"[\w.]+", path.read_text(encoding="utf-8")))


def test_a_test_file_with_a_long_form_has_a_test_that_make_chaos_runs() -> None:
    asking = [
        path
        for path in tree_files()
        if path.name.startswith("test_")
        and "from tests.helpers.rounds import" in path.read_text(encoding="utf-8")
    ]
    assert len(asking) > 10
    lacking = [
        relative(path)
        for path in asking
        if not {"pytest.mark.chaos", "LONG_ALONE"} & words_of(path)
    ]
    assert not lacking, f"mark what is longer there with pytest.mark.chaos: {lacking}"
