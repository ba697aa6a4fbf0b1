"""Whether a sidecar has a tool: asked once for each of its generations.

Rules of this file.

1. An answer holds for one (generation, tool); a restart begins a new generation and
   forgets everything.  Nothing is remembered across sidecars, so that a better kind
   that starts is asked at the next request.
2. The client that asks waits; no other does.  Several that ask for the same tool share one
   probe; if the one that runs it is cancelled, the next takes over.
3. No answer in time is no answer, and neither is one that is not understood: the tool
   counts as missing for who asked, and the next one asks again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

Probe = Callable[[str], Awaitable[str | None]]
"""Finds a tool: where it is, or None; raises ``NoAnswerError``."""

PROBE_TIMEOUT_S = 5.0
"""Longest that a request waits to learn whether a tool is there: an engine's command
starts within a second, also on a busy machine."""


class NoAnswerError(Exception):
    """Whether the tool is there could not be learned."""


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
        """Return where a tool is in a generation of the sidecar; None if nowhere.

        Cancellation: nothing is remembered.
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
            # Into the table of the generation that was asked, which may be over.
            known[tool] = found
            return found
        finally:
            del asking[tool]
            answered.set()
