"""Words that hide the subject of a sentence, in the product: some never, the others fewer."""

import re

import pytest

from tests.architecture.tree import product_files

MOST = {
    r"take note": 0,
    r"what it is:": 0,
    r"what it is not": 0,
    r"whoever": 0,
    r"likewise": 20,
}
"""A pattern, and how often it may stand in all files together: the numbers only shrink."""


@pytest.mark.parametrize("pattern", MOST)
def test_a_word_that_hides_the_subject_is_not_used_more_often(pattern: str) -> None:
    texts = (path.read_text(encoding="utf-8") for path in product_files())
    found = sum(len(re.findall(pattern, text, re.IGNORECASE)) for text in texts)
    assert found <= MOST[pattern]
