"""Words that hide the subject of a sentence, in the product.

Some never, the others fewer.
"""

import re

import pytest

from tests.architecture.tree import product_files, relative, tree_files

MOST = {
    r"take note": 0,
    r"what it is:": 0,
    r"what it is not": 0,
    r"whoever": 0,
    r"likewise": 0,
}
"""A pattern, and how often it may stand in all files together: the numbers only shrink."""


@pytest.mark.parametrize("pattern", MOST)
def test_a_word_that_hides_the_subject_is_not_used_more_often(pattern: str) -> None:
    texts = (path.read_text(encoding="utf-8") for path in product_files())
    found = sum(len(re.findall(pattern, text, re.IGNORECASE)) for text in texts)
    assert found <= MOST[pattern]


HIDES = re.compile(
    r"(?:^|(?<=[.!?] )|(?<=\| )|(?<=\*\* ))(?:Who|Whoever|What|Nobody)\b"
)
"""The beginning of a sentence without a subject that a reader knows."""

PAGES = tuple(
    path
    for path in tree_files()
    if path.suffix == ".md"
    and path.name != "CHANGELOG.md"
    and path.parent.name != "old"
)


def paragraphs(page: str) -> list[str]:
    """Return the paragraphs and items of a page, each as one line, without its code."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\.)\s?)", prose)
    return [
        " ".join(re.sub(r"^\s*(?:[-*#]+|\d+\.)\s", "", part).split()) for part in parts
    ]


# CONTRIBUTING: subjects are child, client, tool, caller, host.
def test_a_sentence_of_a_page_has_a_subject() -> None:
    assert not [
        f"{relative(page)}: {part[:80]}"
        for page in PAGES
        for part in paragraphs(page.read_text(encoding="utf-8"))
        if HIDES.search(part)
    ]


def test_the_check_sees_such_a_sentence() -> None:
    page = "# What it is\n\nFine. Whoever asks.\n- Nobody waits.\n\n```\nWhat is code\n```\n"
    assert [bool(HIDES.search(part)) for part in paragraphs(page)] == [
        True,
        True,
        True,
        False,
    ]
