"""Figures that tests measure: said on the terminal also where everything passes."""

from collections.abc import Callable

import pytest


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Say one line on the terminal."""

    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n    {text}", end="")  # noqa: T201 - that is its business

    return say
