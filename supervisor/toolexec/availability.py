"""Whether a sidecar has a tool: asked once in each of its generations.

Rules of this file.

1. An answer holds for one (generation, tool); a restart begins a new generation without
   answers. Sidecars are asked separately, so that a better one that starts is asked at
   the next request.
2. Only the asking client waits. Clients that ask for the same tool share one probe; if
   the one that runs it is cancelled, the next takes over.
3. A late or unclear answer counts as a missing tool for this request; the next request
   asks again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

Probe = Callable[[str], Awaitable[str | None]]
"""Finds a tool: returns its path, or None; raises ``NoAnswerError``."""

PROBE_TIMEOUT_S = 5.0
"""Longest wait of a request for the answer: an engine's command starts within a second,
also on a busy machine."""


class NoAnswerError(Exception):
    """The sidecar did not say whether it has the tool."""


class Availability:
    """The known tools of one sidecar.

    Args:
        probe: asks the sidecar.
        timeout_s: longest wait for it.
    """

    def __init__(self, probe: Probe, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._probe = probe
        self._timeout_s = timeout_s
        self._generation = -1
        self._known: dict[str, str | None] = {}
        self._asking: dict[str, trio.Event] = {}

    async def find(self, tool: str, generation: int) -> str | None:
        """Return the path of a tool in a generation of the sidecar; None if missing.

        Cancellation: no answer is stored.
        """
        with trio.move_on_after(self._timeout_s):
            while True:
                self._turn_to(generation)
                if tool in self._known:
                    return self._known[tool]
                asking = self._asking.get(tool)
                if asking is None:
                    return await self._ask(tool)
                await asking.wait()
        return None

    def _turn_to(self, generation: int) -> None:
        if generation > self._generation:
            self._generation = generation
            self._known = {}
            self._asking = {}

    async def _ask(self, tool: str) -> str | None:
        asking, known = self._asking, self._known
        answered = asking[tool] = trio.Event()
        try:
            found = await self._probe(tool)
        except NoAnswerError:
            return None
        else:
            # Stored in the table of the asked generation, which may be over.
            known[tool] = found
            return found
        finally:
            del asking[tool]
            answered.set()
