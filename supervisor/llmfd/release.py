"""Gives contents back that a holder has given up; many of them in a thread.

A table may have thousands, and a client a hundred conversations with as many: even
counting is slow then. The store knows how slow freeing bytes is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostlib.threads import in_background

if TYPE_CHECKING:
    from collections.abc import Sequence

    from supervisor.llmfd.allowance import Allowance
    from supervisor.llmfd.blob import Content
    from supervisor.llmfd.store import Store

MOST_AT_ONCE = 500
"""Contents that are given back in one step: a millisecond if all are freed."""


def give_back(
    store: Store, allowance: Allowance | None, contents: Sequence[Content]
) -> None:
    """Give contents back that a holder has forgotten; few of them at once."""
    if len(contents) > MOST_AT_ONCE:
        in_background(_give_back_many, store, allowance, contents)
    else:
        _give_back(store, allowance, contents)


def _give_back_many(
    store: Store, allowance: Allowance | None, contents: Sequence[Content]
) -> None:
    for start in range(0, len(contents), MOST_AT_ONCE):  # others wait for the locks
        _give_back(store, allowance, contents[start : start + MOST_AT_ONCE])


def _give_back(
    store: Store, allowance: Allowance | None, contents: Sequence[Content]
) -> None:
    if allowance is not None:
        allowance.drop(contents)
    store.drop_all(contents)
