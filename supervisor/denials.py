"""What clients were denied, in the journal and the log (spec A1): bounded for each child.

What it is: the event ``security.denied``.  What it is not: the refusal itself
(``replies.denied``), nor the figures of it, which count every one (``metrics``).

Rules of this file.

1. A child names what it likes, as often as it likes: of a name ``NAME_CHARS`` are written,
   with the length of the whole; of many denials ``BURST`` at once, then ``PER_S`` a second.
2. What is left out is counted, and the count is told: ``security.left_out``, with the next
   denial that is written, and at the latest when the child is gone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from supervisor.journal import text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from supervisor.journal import Journal
    from vfs.filesystem import Client

NAME_CHARS = 256
"""As much of a name as tells which it is; a line of the wire has room for 64 KiB."""

BURST = 100
"""More than a program makes by mistake before it gives up."""

PER_S = 1.0
"""Afterwards: a day of it is 20 MB of journal, and nobody else's events leave for it."""


@dataclass(slots=True)
class _Account:
    """What a child has left to be written.

    Attributes:
        left: denials, ``BURST`` at most.
        at_s: when that was so (time.monotonic).
        left_out: denials since the last one that was written.
    """

    left: float
    at_s: float
    left_out: int = 0


class Denials:
    """Tells of what clients were denied.

    Args:
        journal: where events go.
        child_of: the id of the child behind a client.
        log: takes a level, a line and its fields.
    """

    def __init__(
        self,
        journal: Journal,
        child_of: Callable[[Client], str],
        log: Callable[..., None],
    ) -> None:
        self._journal = journal
        self._child_of = child_of
        self._log = log
        self._accounts: dict[str, _Account] = {}

    def tell(self, client: Client, what: str, name: bytes) -> None:
        """Report that a client reached for what it may not (spec A1)."""
        child_id = self._child_of(client)
        if not self._is_due(child_id):
            self._journal.count("security.denied", command=what)
            return
        self._tell_left_out(child_id)
        # A character has 4 bytes at most: none of those that are kept is cut.
        shown = text_of(name[: 4 * NAME_CHARS])[:NAME_CHARS]
        fields: dict[str, object] = {
            "child_id": child_id,
            "client_id": client.id,
            "command": what,
            "filename": shown,
        }
        if len(name) > NAME_CHARS:
            fields["filename_bytes"] = len(name)
        self._log("WARNING", f"Denied {what} for client {client.id}", **fields)
        self._journal.write("security.denied", **fields)

    def forget(self, child_id: str) -> None:
        """Tell what was left out of a child that is gone."""
        self._tell_left_out(child_id)
        self._accounts.pop(child_id, None)

    def tell_all(self) -> None:
        """Tell what was left out so far: what comes next counts anew."""
        for child_id in self._accounts:
            self._tell_left_out(child_id)

    def _is_due(self, child_id: str) -> bool:
        """Take one from what a child has left, or count that there is none."""
        now_s = time.monotonic()
        account = self._accounts.get(child_id)
        if account is None:
            account = self._accounts[child_id] = _Account(BURST, now_s)
        earned = (now_s - account.at_s) * PER_S
        account.left = min(BURST, account.left + earned)
        account.at_s = now_s
        if account.left < 1:
            account.left_out += 1
            return False
        account.left -= 1
        return True

    def _tell_left_out(self, child_id: str) -> None:
        account = self._accounts.get(child_id)
        if account is None or not account.left_out:
            return
        text = f"{account.left_out} more denials of {child_id} were left out"
        self._log("WARNING", text, child_id=child_id, denials=account.left_out)
        self._journal.write(
            "security.left_out", child_id=child_id, denials=account.left_out
        )
        account.left_out = 0
